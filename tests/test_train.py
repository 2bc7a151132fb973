"""The step and the loop: one mean over all tokens, straight onto the shards, and a resume that loses nothing."""

import json
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train as training
from configs.schema import InputError
from evaluate import evaluate, evaluate_newest
from generate import generate_newest
from input_pipeline import load_data
from program import Program
from tests import tiny

VOCAB = {"vocab_size": 320}


def _config(**changes):
    """The tiny config on made-up text."""
    model = VOCAB | changes.pop("model", {})
    groups = {"data": {"source": "synthetic"}, "checkpoint": {"every_steps": 2}, "evaluation": {"batch_size": 256}}
    return tiny.config(model=model, **(groups | changes))


def _train(workdir, steps, mesh=(2, 2, 2), **changes):
    mesh = dict(zip(("data", "fsdp", "tensor"), mesh, strict=True))
    config = _config(steps=steps, mesh=mesh, **changes)
    training.train(config, tiny.program(mesh=mesh).mesh, pathlib.Path(workdir))
    rows = [json.loads(line) for line in (pathlib.Path(workdir) / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows if "loss" in row}, [row for row in rows if "eval_loss" in row]


# --- the step ---------------------------------------------------------------------------------------


def _uneven(program, seed=0):
    """A batch in which the valid tokens of every row, and so of every device and microbatch, differ in number."""
    batch = tiny.batch(program, seed)
    rows = np.arange(program.config.global_batch_size).reshape(batch["weights"].shape[:2])
    weights = (np.arange(program.config.context_length) <= rows[..., None]).astype(np.float32)
    return batch | {"weights": jax.device_put(weights, program.batch_sharding)}


@pytest.mark.parametrize("mesh", [(1, 1, 1), (8, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_loss_is_a_mean_over_valid_tokens_of_all_devices_and_microbatches(mesh, microbatches):
    """Not a mean of means: with 1, 2, ... 8 valid tokens a row the two differ."""
    axes = dict(zip(("data", "fsdp", "tensor"), mesh, strict=True))
    batch_size = 16 if mesh[0] == 8 else 8
    program = tiny.program(mesh=axes, gradient_accumulation=microbatches, global_batch_size=batch_size)
    batch, state = _uneven(program), program.init_state()
    flat = {k: jnp.asarray(np.asarray(v)).reshape(batch_size, -1) for k, v in batch.items()}
    one = tiny.program(mesh={"data": 1, "fsdp": 1, "tensor": 1}, global_batch_size=batch_size)
    params = jax.device_put(jax.tree.map(np.asarray, state.params), one.state_shardings.params)

    def loss(params):
        x = one.model.apply({"params": params}, flat["inputs"], flat["positions"], flat["segment_ids"], True)
        logits = one.model.apply({"params": params}, x, method="logits")
        log_z = jax.nn.logsumexp(logits, axis=-1)
        nll = log_z - jnp.take_along_axis(logits, flat["targets"][..., None], axis=-1)[..., 0]
        mean = (nll * flat["weights"]).sum() / flat["weights"].sum()
        return mean + 1e-4 * (log_z**2 * flat["weights"]).sum() / flat["weights"].sum(), mean

    with one.on_mesh():
        (_, mean), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    norm = np.sqrt(sum((np.asarray(g) ** 2).sum() for g in jax.tree.leaves(gradient)))
    _, metrics = program.compile_train_step()(state, batch)
    np.testing.assert_allclose([metrics["loss"], metrics["gradient_norm"]], [mean, norm], rtol=2e-5)


def test_a_batch_without_a_valid_token_changes_nothing_but_decay():
    program = tiny.program(optimizer={"weight_decay": 0.0})
    batch = tiny.batch(program)
    batch["weights"] = batch["weights"] * 0
    state = program.init_state()
    before = jax.tree.map(np.asarray, state.params)
    state, metrics = program.compile_train_step()(state, batch)
    assert float(metrics["loss"]) == 0 and float(metrics["gradient_norm"]) == 0
    jax.tree.map(np.testing.assert_array_equal, state.params, before)


def test_gradients_are_summed_in_float32_unless_asked_otherwise():
    """Read off the program as traced: XLA's CPU backend would widen sums over devices of bfloat16."""
    for dtype, found in (("float32", "f32"), ("bfloat16", "bf16")):
        program = tiny.program(
            mesh={"data": 8, "fsdp": 1, "tensor": 1}, model={"compute_dtype": "bfloat16"}, loss={"gradient_dtype": dtype}
        )
        with program.on_mesh():
            lowered = jax.jit(program.train_step).lower(program.abstract_state, program.abstract_batch())
        kernels = re.findall(r"dot_general.*-> tensor<(?:32x64|64x32)x(\w+)>", lowered.as_text())
        assert len(kernels) >= 3 and set(kernels) == {found}


def test_the_state_is_donated():
    program = tiny.program()
    state, batch = program.init_state(), tiny.batch(program)
    new, _ = program.compile_train_step()(state, batch)
    assert state.params["embedding"].is_deleted() and not new.params["embedding"].is_deleted()


def test_parameters_are_made_on_their_shards():
    """No device holds, even for a moment, a whole parameter that is split over eight, nor its random bits."""
    program = tiny.program(mesh={"data": 1, "fsdp": 8, "tensor": 1}, model={"embed_dim": 512, "mlp_dim": 2048})
    whole = 3 * 512 * 2048 * 4  # one stacked kernel of the MLP
    compiled = program.init_program
    shapes = [list(map(int, s.split(","))) for s in re.findall(r"(?:f32|u32|s32)\[([\d,]+)\]", compiled.as_text())]
    assert max(np.prod(s) * 4 for s in shapes) <= whole / 8
    assert compiled.memory_analysis().temp_size_in_bytes < whole
    state = program.init_state()
    assert jax.tree.map(lambda a: a.sharding, state) == program.state_shardings
    kernel = state.params["block"]["mlp"]["up"]["kernel"]
    assert {s.data.nbytes for s in kernel.addressable_shards} == {whole / 8}


def test_the_values_do_not_depend_on_the_mesh():
    states = [
        tiny.program(mesh=dict(zip(("data", "fsdp", "tensor"), m, strict=True))).init_state() for m in ((1, 1, 1), (2, 2, 2))
    ]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), *[s.params for s in states])


# --- the loop ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Six steps without a stop."""
    return _train(tmp_path_factory.mktemp("straight"), 6, model={"dropout_rate": 0.1})


@pytest.mark.parametrize("stop", [2, 3])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path, straight, stop, monkeypatch):
    """With dropout. Stopped after three steps it goes on from the second, which was the last one saved."""
    workdir, calls = tmp_path / "run", []

    def interrupted(report, step, values, original=training.metrics.Reporter.step):
        original(report, step, values)
        calls.append(step)
        if step == stop and not calls.count("stopped"):
            calls.append("stopped")
            raise KeyboardInterrupt

    monkeypatch.setattr(training.metrics.Reporter, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _train(workdir, 6, model={"dropout_rate": 0.1})
    rows, evaluations = _train(workdir, 6, model={"dropout_rate": 0.1})
    names = ("loss", "gradient_norm", "parameter_norm", "learning_rate", "tokens")
    for step in range(1, 7):
        assert [rows[step][n] for n in names] == [straight[0][step][n] for n in names], step
    assert evaluations == straight[1]
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 7  # six steps and an evaluation, none of them twice


def test_goes_on_when_there_are_more_steps_and_not_when_there_are_none(tmp_path, capsys):
    _train(tmp_path, 2)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    _train(tmp_path, 2)
    assert "nothing to do: 2 steps are done. Raise --config.steps" in capsys.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before
    rows, _ = _train(tmp_path, 3)
    assert sorted(rows) == [1, 2, 3]
    assert "resuming from the checkpoint of step 2" in capsys.readouterr().out


def test_goes_on_on_another_mesh(tmp_path, straight):
    _train(tmp_path, 2, model={"dropout_rate": 0.1})
    rows, _ = _train(tmp_path, 4, mesh=(1, 4, 1), model={"dropout_rate": 0.1})
    losses = [rows[i]["loss"] for i in (1, 2)]
    np.testing.assert_allclose(losses, [straight[0][i]["loss"] for i in (1, 2)], rtol=1e-3)  # the schedule differs
    assert sorted(rows) == [1, 2, 3, 4]


def test_goes_on_under_another_plan_with_the_same_losses(tmp_path):
    before, _ = _train(tmp_path, 4)
    shutil.rmtree(tmp_path / "checkpoints/4")
    after, _ = _train(tmp_path, 4, remat={"plan": "names:q,up"})
    assert [after[i]["loss"] for i in (3, 4)] == [before[i]["loss"] for i in (3, 4)]


@pytest.mark.parametrize("change", [{"seed": 1}, {"context_length": 8}])
def test_other_data_is_refused(tmp_path, change):
    _train(tmp_path, 2)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    with pytest.raises(InputError, match=r"was trained on other data: .* was .* is .*config.init_from"):
        _train(tmp_path, 4, **change)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_another_batch_size_neither_repeats_nor_loses_examples(tmp_path):
    _train(tmp_path, 2)
    _train(tmp_path, 4, global_batch_size=16)
    meta = json.loads(next((tmp_path / "checkpoints/4").rglob("metadata")).read_text())
    assert meta["data"]["examples"] == 2 * 8 + 2 * 16


def test_starts_from_the_parameters_of_a_checkpoint_with_a_new_optimizer(tmp_path):
    _train(tmp_path / "first", 4)
    rows, _ = _train(tmp_path / "second", 2, init_from=str(tmp_path / "first"))
    fresh, _ = _train(tmp_path / "third", 2)
    assert rows[1]["loss"] < fresh[1]["loss"] - 0.2
    assert rows[1]["learning_rate"] == 0  # a new schedule: warmup from the start
    with pytest.raises(InputError, match="There is no checkpoint in"):
        _train(tmp_path / "fourth", 2, init_from=str(tmp_path / "none"))


def test_a_step_is_read_only_when_the_next_is_under_way(tmp_path, monkeypatch):
    events = []
    decide, report = training.decide_and_compile, training.metrics.Reporter.step

    def decided(make_program):
        plan, program, step = decide(make_program)
        return plan, program, lambda *args: (events.append("dispatch"), step(*args))[1]

    monkeypatch.setattr(training, "decide_and_compile", decided)
    monkeypatch.setattr(training.metrics.Reporter, "step", lambda r, s, v: (events.append(f"read {s}"), report(r, s, v))[1])
    training.train(_config(steps=4, checkpoint={"every_steps": 100}), tiny.program().mesh, tmp_path)
    assert events == ["dispatch", "dispatch", "read 1", "dispatch", "read 2", "dispatch", "read 3", "read 4"]


def test_everything_a_run_writes_is_in_its_workdir(tmp_path):
    _train(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "checkpoints",
        "config.json",
        "loss.png",
        "metrics.jsonl",
        "plan.json",
        "tensorboard",
    ]
    assert json.loads((tmp_path / "config.json").read_text())["model"]["vocab_size"] == 320


# --- evaluation and samples -------------------------------------------------------------------------


def test_evaluation_counts_every_held_out_byte_once_whatever_the_batch():
    results = []
    for batch_size in (8, 12, 4):
        config = _config(evaluation={"batch_size": batch_size})
        program = Program(config, tiny.program().mesh)
        data = load_data(config)
        results.append(evaluate(program, program.init_state().params, data))
        assert len(data.heldout) % 8 and results[-1]["eval_tokens"] == sum(len(d.raw) for d in data.heldout_documents)
    for result in results[1:]:
        np.testing.assert_allclose(list(result.values()), list(results[0].values()), rtol=1e-5)
    assert results[0]["eval_bits_per_byte"] == pytest.approx(results[0]["eval_loss"] / np.log(2))
    assert results[0]["eval_perplexity"] == pytest.approx(np.exp(results[0]["eval_loss"]))


def test_evaluating_the_newest_checkpoint_gives_what_training_wrote(tmp_path, capsys):
    _, evaluations = _train(tmp_path, 2)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    evaluate_newest(_config(steps=2), tiny.program().mesh, tmp_path)
    assert f"step 2: held-out loss {evaluations[0]['eval_loss']:.4f}" in capsys.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before
    with pytest.raises(InputError, match="There is no checkpoint in"):
        evaluate_newest(_config(steps=2), tiny.program().mesh, tmp_path / "none")


def test_generating_from_the_newest_checkpoint_writes_nothing(tmp_path, capsys):
    config = _config(steps=2, sample={"length": 5, "count": 2, "prompt": "ab"})
    training.train(config, tiny.program().mesh, tmp_path)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    at_the_end = capsys.readouterr().out.partition("a sample:\n")[2]
    generate_newest(config, tiny.program().mesh, tmp_path)
    assert capsys.readouterr().out == at_the_end
    assert at_the_end.startswith("--- sample 1 of 2, seed 0, temperature 0.7\nab")
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before
    with pytest.raises(InputError, match="There is no checkpoint in"):
        generate_newest(config, tiny.program().mesh, tmp_path / "none")


@pytest.mark.parametrize("run", [training.train, generate_newest])
def test_a_prompt_longer_than_the_context_is_refused_before_anything_is_done(tmp_path, run):
    config = _config(steps=2, sample={"length": 5, "prompt": "a" * 16})
    with pytest.raises(InputError, match="The prompt has 17 tokens .* config.context_length is 16"):
        run(config, tiny.program().mesh, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:builtin type event_stats:DeprecationWarning")  # as an error it ends the process
def test_a_profile_has_the_steps_that_were_asked_for(tmp_path):
    training.train(_config(steps=5, profile={"steps": (2, 3)}), tiny.program().mesh, tmp_path)
    (path,) = (tmp_path / "profile").rglob("*.xplane.pb")
    profile = jax.profiler.ProfileData.from_file(str(path))
    lines = (line for plane in profile.planes for line in plane.lines)
    assert {dict(e.stats)["step_num"] for line in lines for e in line.events if e.name == "train"} == {2, 3}


@pytest.mark.parametrize("steps, found", [((4, 9), 1), ((8, 9), 0), ((), 0)])
def test_a_profile_ends_with_the_training(tmp_path, steps, found):
    training.train(_config(steps=5, profile={"steps": steps}), tiny.program().mesh, tmp_path)
    assert len(list((tmp_path / "profile").rglob("*.xplane.pb"))) == found
    jax.profiler.start_trace(tmp_path / "other")  # an error if one were going on
    jax.profiler.stop_trace()
