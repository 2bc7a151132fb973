"""Saving, restoring anywhere, and refusing what does not fit."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from checkpointing import Checkpointer, load_parameters
from configs.schema import Checkpoint, InputError
from tests import tiny

META = {"config": {"steps": 3}, "plan": {}, "data": {"examples": 24}}


@pytest.fixture(scope="module")
def program():
    return tiny.program()


@pytest.fixture(scope="module")
def state(program):
    """One step from the start, so that the moments are not all zero."""
    state, _ = program.compile_train_step()(program.init_state(), tiny.batch(program))
    return state


@pytest.fixture
def saved(tmp_path, state):
    """A workdir with the state saved as step 1."""
    with Checkpointer(tmp_path, Checkpoint()) as checkpoints:
        checkpoints.save(1, state, META)
    return tmp_path


def _equal(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def _restore(workdir, program, step=1, **settings):
    with Checkpointer(workdir, Checkpoint(**settings), read_only=True) as checkpoints:
        return checkpoints.restore(step, program.abstract_state)


@pytest.mark.parametrize("mesh", [(2, 2, 2), (1, 4, 1), (1, 1, 1), (4, 1, 1), (1, 1, 2)])
def test_restores_on_any_mesh(saved, state, mesh):
    program = tiny.program(mesh=dict(zip(("data", "fsdp", "tensor"), mesh, strict=True)))
    restored = _restore(saved, program)
    _equal(restored, state)
    assert type(restored) is type(state)
    assert jax.tree.map(lambda a: a.sharding, restored) == program.state_shardings


def test_meta_comes_back(saved):
    with Checkpointer(saved, Checkpoint()) as checkpoints:
        assert checkpoints.latest_step() == 1
        assert checkpoints.read_meta(1) == META


def test_the_state_may_be_donated_while_it_is_being_saved(tmp_path, program):
    state, step, batch = program.init_state(), program.compile_train_step(), tiny.batch(program)
    expected = []
    with Checkpointer(tmp_path, Checkpoint(keep_last=3)) as checkpoints:
        for i in range(3):
            expected.append(jax.tree.map(np.asarray, state.params))
            checkpoints.save(i, state, META)
            state, _ = step(state, batch)
    for i in range(3):
        _equal(_restore(tmp_path, program, i).params, expected[i])


def test_keeps_the_last_and_every_so_many_steps(tmp_path):
    small = {"w": jnp.ones(3)}
    settings = Checkpoint(every_steps=2, keep_last=2, keep_every_steps=4)
    with Checkpointer(tmp_path, settings) as checkpoints:
        for step in range(1, 12):
            if checkpoints.should_save(step) or step == 11:
                checkpoints.save(step, small, META)
    assert sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir()) == [4, 8, 10, 11]


def test_a_step_that_is_there_is_not_written_again(saved, state):
    before = {p: p.stat().st_mtime_ns for p in saved.rglob("*")}
    with Checkpointer(saved, Checkpoint()) as checkpoints:
        checkpoints.save(1, state, META | {"data": {}})
    assert {p: p.stat().st_mtime_ns for p in saved.rglob("*")} == before


def test_an_unfinished_save_is_ignored(saved, program):
    os.rename(saved / "checkpoints/1", saved / "checkpoints/2.orbax-checkpoint-tmp")
    with Checkpointer(saved, Checkpoint(), read_only=True) as checkpoints:
        assert checkpoints.latest_step() is None


def test_reading_makes_nothing(tmp_path):
    with Checkpointer(tmp_path / "none", Checkpoint(), read_only=True) as checkpoints:
        assert checkpoints.latest_step() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change, told",
    [
        ({"embed_dim": 64}, r"attention/key/kernel: stored float32\[3,32,2,8\], this model float32\[3,64,2,8\]"),
        ({"num_layers": 4}, r"stored float32\[3,32,4,8\], this model float32\[4,32,4,8\]"),
        ({"tie_embeddings": True}, r"params/head: only in the checkpoint, float32\[32,64\]"),
        ({"qk_norm": True}, r"params/block/attention/key_norm/scale: only in this model"),
        ({"param_dtype": "bfloat16"}, r"stored float32.*this model bfloat16.*(\n.*)*checkpoint.convert_dtype=True"),
    ],
)
def test_another_model_is_refused_with_what_differs(saved, change, told):
    before = sorted(saved.rglob("*"))
    with pytest.raises(InputError, match=told) as error:
        _restore(saved, tiny.program(model=change))
    assert len(str(error.value).splitlines()) <= 11
    with pytest.raises(InputError, match=told):
        load_parameters(str(saved), tiny.program(model=change).abstract_state.params)
    assert sorted(saved.rglob("*")) == before


def test_another_dtype_is_converted_when_asked(saved, state):
    half = tiny.program(model={"param_dtype": "bfloat16"})
    restored = _restore(saved, half, convert_dtype=True)
    _equal(restored.params, jax.tree.map(lambda a: a.astype(jnp.bfloat16), state.params))
    assert jax.tree.map(lambda a: (a.dtype, a.sharding), restored) == jax.tree.map(
        lambda a: (a.dtype, a.sharding), half.abstract_state
    )
    params = load_parameters(str(saved), half.abstract_state.params, convert_dtype=True)
    _equal(params, restored.params)


@pytest.mark.parametrize("part", ["", "checkpoints", "checkpoints/1"])
def test_parameters_alone_whatever_the_optimizer_and_the_mesh(saved, state, part):
    other = tiny.program(mesh={"data": 1, "fsdp": 4, "tensor": 1})
    other.tx = optax.sgd(0.1)
    params = load_parameters(str(saved / part), other.abstract_state.params)
    _equal(params, state.params)
    assert jax.tree.map(lambda a: a.sharding, params) == other.state_shardings.params
    started = other.init_state(params)
    _equal(started.params, state.params)
    assert int(started.step) == 0


def test_the_newest_step_is_taken(saved, state, program):
    newer = dataclasses.replace(state, params=jax.tree.map(lambda p: p + 1, state.params))
    with Checkpointer(saved, Checkpoint()) as checkpoints:
        checkpoints.save(10, newer, META)
    _equal(load_parameters(str(saved), program.abstract_state.params), newer.params)


def test_a_workdir_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written to: Not a directory. Give another one"):
        Checkpointer(tmp_path / "file/run", Checkpoint())


def test_no_checkpoint_is_one_sentence(tmp_path, program):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InputError, match="There is no checkpoint in"):
            load_parameters(str(path), program.abstract_state.params)


@pytest.mark.parametrize("broken", ["state/_METADATA", "state/manifest.ocdbt", "state"])
def test_a_damaged_checkpoint_is_one_sentence(saved, program, broken):
    path = saved / "checkpoints/1" / broken
    path.rename(saved / "away")
    with pytest.raises(InputError, match="cannot be read: ") as error:
        _restore(saved, program)
    assert len(str(error.value)) < 800 and "\n" not in str(error.value)
