"""The plan fits the tightest device, uses what it has, and is the program that runs."""

import dataclasses
import functools
import itertools
import json
import types

import jax
import numpy as np
import pytest

import planning
from configs.schema import Evaluation, InputError
from parallel.mesh import make_mesh
from program import Program
from remat import ledger, planner, topologies
from remat.graph import Need
from remat.ledger import GIB, find_limits, parse_limits
from remat.measure import Compiler, out_of_memory_bytes, peak_bytes
from remat.planner import decide
from remat.report import as_json, table
from remat.solve import Mix
from remat.topologies import absent_devices
from tests import tiny

MODEL = {"num_layers": 4, "mlp_dim": 128}
# Two devices: their programs compile faster than those of eight.
LARGER = {"context_length": 64, "global_batch_size": 16, "model": MODEL, "mesh": {"data": 1, "fsdp": 2, "tensor": 1}}


def _config(plan="auto", **memory):
    return tiny.config(**LARGER, remat={"plan": plan}, memory={"reserve_gib": 0.0} | memory)


def _mesh():
    return tiny.program(**LARGER).mesh


@functools.cache
def _decide(plan="auto", **memory):
    plan, program, compiler = decide(functools.partial(Program, _config(plan, **memory), _mesh()), compiler=Compiler("cpu"))
    return plan, program, compiler.compiled(program)


def _total(plan):
    """What the step takes with the batches that wait beside it."""
    return plan.compiled_peak_bytes + plan.parts.beside_bytes


@pytest.fixture(scope="module")
def ends():
    """What full recompute needs, and what saving all that is useful needs."""
    return _total(_decide("full")[0]), _total(_decide("auto")[0])


def test_with_room_for_everything_one_compile_saves_everything_useful():
    plan, program, compiled = _decide("auto")
    assert plan.num_compiles == 1 and plan.verified
    assert [s.save for s in plan.segments] == [("q", "k", "v", "attention", "attention_out", "up", "gate")]
    assert peak_bytes(compiled, "cpu") == plan.compiled_peak_bytes
    state, _ = compiled(program.init_state(), tiny.batch(program))
    assert int(state.step) == 1


@pytest.fixture(scope="module")
def between(ends):
    """Plans under limits from little more than full recompute needs to nearly enough for everything."""
    low, high = ends
    return [_decide(limit_gib=(low + share * (high - low)) / GIB)[0] for share in (0.05, 0.5, 0.95)]


def test_every_plan_fits_its_limit_after_at_most_four_compiles(between):
    for plan in between:
        assert plan.verified and _total(plan) <= plan.limits.budget
        assert plan.num_compiles <= 4


def test_more_memory_never_means_more_recompute_nor_a_lower_peak_beyond_noise(between):
    for less, more in itertools.pairwise(between):
        assert more.recompute_seconds <= less.recompute_seconds
        assert _total(less) <= 1.01 * _total(more)
    assert between[-1].recompute_seconds < between[0].recompute_seconds


def test_some_limit_is_met_by_two_segments_the_richer_last(between):
    mixed = [plan.segments for plan in between if len(plan.segments) == 2]
    assert mixed
    for first, second in mixed:
        assert second.first_layer == first.num_layers and first.num_layers + second.num_layers == 4


def test_nothing_fits(ends):
    with pytest.raises(InputError, match=r"No plan fits: .* needs \d+\.\d+ GiB .* GiB are missing\. What would help") as error:
        _decide(limit_gib=0.5 * ends[0] / GIB)
    assert "gradient_accumulation" in str(error.value)


def test_a_given_plan_that_does_not_fit_is_refused(ends):
    with pytest.raises(InputError, match="config.remat.plan=full needs .* remat.plan='auto' finds what fits"):
        _decide("full", limit_gib=0.5 * ends[0] / GIB)


def test_of_two_plans_with_the_same_memory_the_one_that_promises_more_is_not_accepted():
    def tried(saved, seconds, peak):
        need = Need(frozenset(saved), len(saved), 0.0, seconds)
        mix = Mix(need, need, 0, 4)
        return planner.Tried(mix, mix.segments(saved), 0, peak)

    poor, rich, richest = tried("q", 3.0, 70), tried("qk", 2.0, 70), tried("qkv", 1.0, 71)
    assert planner.same_memory([poor, rich, richest]) == [(poor, rich)]
    assert planner._choose([poor, rich], 80) == poor
    assert planner._choose([poor, rich, richest], 80) == richest
    assert planner._choose([poor, rich, richest], 70.5) == poor
    assert planner._choose([poor, rich, richest], 60) is None


def test_an_evaluation_that_does_not_fit_is_refused(ends):
    config = dataclasses.replace(_config(limit_gib=ends[1] / GIB), evaluation=Evaluation(batch_size=4096))
    told = "but evaluation needs .* GiB are missing. What would help: a smaller config.evaluation.batch_size"
    with pytest.raises(InputError, match=told):
        decide(functools.partial(Program, config, _mesh()), compiler=Compiler("cpu"))


def test_what_runs_beside_the_step_is_compiled_and_counted():
    plan, program, _ = _decide("auto")
    state = plan.parts.params_bytes + plan.parts.optimizer_bytes
    assert plan.beside_step["restore"] == state <= plan.beside_step["initialisation"]
    evaluation = peak_bytes(program.evaluation_step, "cpu")
    waiting = 3 * ledger.bytes_on_a_device(program.abstract_evaluation_batch()) + plan.parts.beside_bytes
    assert plan.beside_step["evaluation"] == evaluation + plan.parts.optimizer_bytes + waiting
    assert "sampling" not in plan.beside_step
    low, high = plan.expected_peaks
    assert low == max(_total(plan), plan.beside_step["initialisation"]) <= high


def test_sampling_beside_the_state_is_bounded(tmp_path):
    """The formula is above what the compiled sampler takes, and counts only where a run samples."""
    config = tiny.config(**LARGER, sample={"length": 8, "count": 3})
    program = Program(config, _mesh())
    sampler = jax.jit(lambda params, tokens: program.model.apply({"params": params}, tokens, tokens, tokens, True))
    tokens = jax.ShapeDtypeStruct((3, config.context_length), "int32")
    with program.on_mesh():
        compiled = sampler.lower(program.abstract_state.params, tokens).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < planner.sampling_bytes(config)
    peaks = planner.check_beside_step(program, ledger.count_parts(program), find_limits(config, jax.devices()), Compiler("cpu"))
    assert peaks["sampling"] == peaks["restore"] + planner.sampling_bytes(config)


# Limits and ledger


def test_the_tightest_device_binds_and_the_others_say_what_they_leave(ends):
    low, high = ends
    limit = (low + 0.5 * (high - low)) / GIB
    plan, program, _ = _decide(limits_gib=f"1:{limit}", limit_gib=2 * limit)
    assert plan.limits.binding.id == 1 and plan.segments == _decide(limit_gib=limit)[0].segments
    found = as_json(plan, program, "")
    assert found["binding_device"] == 1
    left = {row["id"]: row["headroom_bytes"] for row in found["devices"]}
    assert min(left, key=left.get) == 1 and left[0] - left[1] == round(2 * limit * GIB) - round(limit * GIB)


def test_the_parts_of_a_row_add_up_to_what_was_predicted(between):
    for plan in between:
        for row in ledger_rows(plan):
            parts = ("params", "optimizer", "gradient", "batch", "saved_activation", "workspace")
            assert sum(row[f"{part}_bytes"] for part in parts) == row["predicted_peak_bytes"] == plan.predicted_peak_bytes
            assert row["headroom_bytes"] == row["limit_bytes"] - row["reserved_bytes"] - row["predicted_peak_bytes"]
            assert row["workspace_bytes"] > 0


def ledger_rows(plan):
    from remat.report import ledger

    return ledger(plan)


def test_parts_are_those_of_the_arrays():
    program = tiny.program(**LARGER)
    parts, state = ledger.count_parts(program), program.init_state()
    on_device = lambda tree: sum(  # noqa: E731
        s.data.nbytes for a in jax.tree.leaves(tree) for s in a.addressable_shards if s.device.id == 1
    )
    assert parts.params_bytes == on_device(state.params) == parts.gradient_bytes
    assert parts.optimizer_bytes == on_device(state.opt_state)
    assert parts.batch_bytes == on_device(tiny.batch(program))
    assert parts.beside_bytes == 3 * parts.batch_bytes


class FakeDevice(types.SimpleNamespace):
    def memory_stats(self):
        return self.stats


def _fakes(*stats, kind="NVIDIA H100 80GB HBM3", platform="gpu"):
    return [FakeDevice(id=i, process_index=0, device_kind=kind, platform=platform, stats=s) for i, s in enumerate(stats)]


def test_what_a_device_reports_and_what_others_use_of_it_counts():
    devices = _fakes({"bytes_limit": 8 * GIB, "bytes_in_use": 0}, {"bytes_limit": 8 * GIB, "bytes_in_use": GIB})
    limits = find_limits(tiny.config(memory={"reserve_gib": 0.5}), devices)
    assert [d.budget for d in limits.devices] == [7.5 * GIB, 6.5 * GIB] and limits.binding.id == 1
    assert limits.source == "the devices' own report"


def test_a_limit_of_the_config_comes_first_and_the_table_last(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    config = tiny.config(memory={"reserve_gib": 0.0, "limits_gib": "1:4"})
    limits = find_limits(config, _fakes({"bytes_limit": 8 * GIB}, {"bytes_limit": 8 * GIB}, None))
    assert [d.limit_bytes for d in limits.devices] == [
        8 * GIB,
        4 * GIB,
        int(0.75 * 79.14 * GIB),
    ]  # JAX takes three quarters of a GPU
    with pytest.raises(InputError, match="How much memory does device 0"):
        find_limits(tiny.config(), _fakes(None, kind="unheard of"))


@pytest.mark.parametrize("text, told", [("3", "must be device ids and GiB"), ("a:4", "must be device ids"), ("3:x", "must be"),
                                        ("3:0", "must be above 0 GiB"), ("3:nan", "must be above 0")])  # fmt: skip
def test_bad_limits_are_refused(text, told):
    with pytest.raises(InputError, match=told):
        parse_limits(text)


def test_a_limit_for_a_device_that_is_not_there_is_refused():
    with pytest.raises(InputError, match="the mesh has no device 9; it has 0-7"):
        find_limits(tiny.config(memory={"limits_gib": "9:4"}), jax.devices())


def test_device_ids_are_told_in_ranges():
    assert ledger.ranges([2049, 0, 1, 2, 2048, 7]) == "0-2, 7, 2048-2049" and ledger.ranges([4]) == "4"


def test_the_need_is_read_off_the_message_that_refuses_a_program():
    assert out_of_memory_bytes("the total memory required ... (16.12G) exceeds available HBM (15.75G)") == int(16.12 * GIB)
    assert out_of_memory_bytes("RESOURCE_EXHAUSTED: Used 20.50G of 15.75G hbm.") == int(20.5 * GIB)
    assert out_of_memory_bytes("something else") is None


# What is written


def test_the_plan_is_written_read_again_and_pinned(tmp_path, between, monkeypatch):
    limit = next(plan for plan in between if len(plan.segments) == 2).limits.budget / GIB
    planning.plan(_config(limit_gib=limit), _mesh(), tmp_path)
    stored = json.loads((tmp_path / "plan.json").read_text())
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"
    keys = "topology device_kind num_devices num_processes versions devices binding_device segments predicted_peak_bytes"
    keys += " compiled_peak_bytes num_compiles verified model_flops recompute_flops modelled_step_seconds next_better rejected"
    assert set(keys.split()) <= set(stored)
    assert stored["verified"] and len(stored["devices"]) == 2
    pinned, _, _ = _decide(str(tmp_path / "plan.json"))
    assert [list(s.save) for s in pinned.segments] == [s["save"] for s in stored["segments"]]
    assert pinned.compiled_peak_bytes == stored["compiled_peak_bytes"]


@pytest.mark.parametrize(
    "text, told",
    [(None, "cannot be read: No such file"), ("{", "is no plan"), ("{}", "is no plan .KeyError: 'segments'"),
     ('{"segments": [{"first_layer": 0, "num_layers": 2, "save": []}]}', "layers 0 to 1; config.model.num_layers is 3"),
     ('{"segments": [{"first_layer": 0, "num_layers": 3, "save": ["mlp_gaet"]}]}', "no activation named 'mlp_gaet'")],
)  # fmt: skip
def test_a_file_that_is_no_plan_for_this_model_is_refused(tmp_path, text, told):
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=told):
        tiny.program(remat={"plan": str(path)})


def test_the_table_fits_a_hundred_columns_and_names_what_binds(between):
    text = table(between[1], tiny.program(**LARGER), "")
    assert max(map(len, text.splitlines())) <= 130 and "the tightest" in text
    assert all(len(line) <= 100 for line in text.splitlines() if "│" in line or "─" in line)
    assert "mlp_out is not saved: the backward pass does not need it" in text


def test_more_memory_is_said_to_buy_time_unless_nothing_is_left_to_buy(between):
    assert between[0].next_better["modelled_seconds_saved"] > 0
    assert _decide("auto")[0].next_better is None


def test_a_wrong_model_is_corrected_by_what_was_compiled(ends, monkeypatch):
    """Off by far at first, the plan still fits: it steps down, then up."""
    low, high = ends
    counted = planner.count_parts

    def too_little(program):
        parts = counted(program)
        return type(parts)(**{**parts.__dict__, "loss_bytes": -int(0.3 * (high - low))})

    monkeypatch.setattr(planner, "count_parts", too_little)
    config = _config(limit_gib=(low + 0.5 * (high - low)) / GIB)
    plan, _, _ = decide(functools.partial(Program, config, _mesh()), compiler=Compiler("cpu"))
    assert plan.verified and 1 < plan.num_compiles <= 4
    assert np.isfinite(plan.recompute_seconds) and plan.recompute_seconds <= _decide("full")[0].recompute_seconds


def test_a_plan_for_devices_that_are_not_here(tmp_path, capsys, monkeypatch):
    pytest.importorskip("libtpu")
    monkeypatch.setattr(planner, "check_beside_step", lambda *_: {})  # two more compiles, which other tests make on the CPU
    config = tiny.config(
        context_length=256, mesh={"data": 1, "fsdp": 8, "tensor": 1}, remat={"plan": "auto"},
        model={"head_dim": 64, "compute_dtype": "bfloat16", "attention_kernel": "auto"},
    )  # fmt: skip
    with tiny.no_compile_cache():
        planning.plan(config, make_mesh(config, absent_devices("v5e:2x4")), tmp_path, "v5e:2x4")
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["verified"] and found["device_kind"] == "TPU v5 lite" and found["topology"] == "v5e:2x4"
    assert {d["limit_bytes"] for d in found["devices"]} == {int(15.75 * GIB)} and len(found["devices"]) == 8
    assert found["num_compiles"] == 1 and found["compiled_peak_bytes"] > 0
    assert found["segments"][0]["save"] == ["q", "k", "v", "attention", "attention_out", "up", "gate"]
    out = capsys.readouterr().out
    assert "compile 1 of at most 4" in out and "limits from the table of device kinds" in out


@pytest.mark.cuda
@pytest.mark.parametrize("topology, kind", [("h100:4x8", "H100"), ("h200:8", "H200"), ("a100-80:8", "A100-SXM4-80GB")])
def test_a_plan_for_gpus_that_are_not_here(tmp_path, topology, kind):
    pytest.importorskip("jax_plugins.xla_cuda12")
    config = tiny.config(
        context_length=256, global_batch_size=32, mesh={"data": -1, "fsdp": 8, "tensor": 1}, remat={"plan": "auto"},
        model={"head_dim": 64, "compute_dtype": "bfloat16", "attention_kernel": "auto"},
    )  # fmt: skip
    with tiny.no_compile_cache():
        planning.plan(config, make_mesh(config, absent_devices(topology)), tmp_path, topology)
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["verified"] and kind in found["device_kind"] and found["topology"] == topology
    assert found["num_devices"] == len(found["devices"]) and found["num_compiles"] == 1


@pytest.mark.parametrize("name", ["v5e", "v5e:8", "v3:2x2", "h100", "h100:2x2x2", "tpu"])
def test_a_name_that_is_no_topology_is_refused(name):
    with pytest.raises(InputError, match="is not a topology; it must be a TPU kind and its chips"):
        absent_devices(name)


@pytest.mark.parametrize("name, extra", [("v5e:2x4", "tpu"), ("h100:8", "cuda12")])
def test_a_compiler_that_is_not_installed_is_named(name, extra, monkeypatch):
    monkeypatch.setattr(topologies, "_installed", lambda module: False)
    with pytest.raises(InputError, match=f"Install it with: pip install '.\\[{extra}\\]'"):
        absent_devices(name)
