"""The decoder as a whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny

ONE_DEVICE = {"data": 1, "fsdp": 1, "tensor": 1}


def _logits(program, params, tokens, positions, segments):
    with program.on_mesh():
        x = program.model.apply({"params": params}, tokens, positions, segments, True)
        return np.asarray(program.model.apply({"params": params}, x, method="logits"))


def test_packed_documents_never_see_each_other():
    program = tiny.program(mesh=ONE_DEVICE)
    params = program.init_state().params
    first, second = np.arange(6)[None], np.arange(20, 30)[None]
    packed = _logits(
        program, params, np.concatenate([first, second], 1), np.concatenate([np.arange(6), np.arange(10)])[None],
        np.repeat([1, 2], [6, 10])[None],
    )  # fmt: skip
    alone = [_logits(program, params, d, np.arange(d.shape[1])[None], np.ones_like(d)) for d in (first, second)]
    np.testing.assert_allclose(packed, np.concatenate(alone, 1), rtol=1e-5, atol=1e-5)
    together = _logits(program, params, np.concatenate([first, second], 1), np.arange(16)[None], np.ones((1, 16), int))
    assert np.abs(together[0, 6:] - packed[0, 6:]).max() > 1e-2


def test_later_tokens_do_not_change_earlier_logits():
    program = tiny.program(mesh=ONE_DEVICE)
    params = program.init_state().params
    tokens = np.arange(16)[None]
    changed = np.where(np.arange(16) < 8, tokens, 50)
    position, one = np.arange(16)[None], np.ones((1, 16), int)
    a, b = (_logits(program, params, t, position, one) for t in (tokens, changed))
    np.testing.assert_array_equal(a[:, :8], b[:, :8])
    assert (a[:, 8:] != b[:, 8:]).any()


def test_a_tied_head_has_no_table_of_its_own_and_a_soft_cap_bounds_the_logits():
    program = tiny.program(mesh=ONE_DEVICE, model={"tie_embeddings": True, "logit_soft_cap": 0.5})
    params = program.init_state().params
    assert "head" not in params
    logits = _logits(program, params, np.arange(16)[None], np.arange(16)[None], np.ones((1, 16), int))
    assert 0.4 < np.abs(logits).max() <= 0.5
    assert "head" in tiny.program(mesh=ONE_DEVICE).abstract_state.params


def test_dtypes_are_those_of_the_config():
    program = tiny.program(mesh=ONE_DEVICE, model={"compute_dtype": "bfloat16", "param_dtype": "float32", "qk_norm": True})
    state = program.abstract_state
    assert {p.dtype for p in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    variables = {"params": state.params}
    ids = jax.ShapeDtypeStruct((1, 16), jnp.int32)
    x = jax.eval_shape(lambda v, t: program.model.apply(v, t, t, t, True), variables, ids)
    assert x.dtype == jnp.bfloat16
    assert jax.eval_shape(lambda v, x: program.model.apply(v, x, method="logits"), variables, x).dtype == jnp.float32
    half = tiny.program(mesh=ONE_DEVICE, model={"param_dtype": "bfloat16"}).abstract_state
    assert {p.dtype for p in jax.tree.leaves(half.params)} == {jnp.dtype("bfloat16")}


def test_qk_norm_adds_a_scale_per_head_dimension():
    params = tiny.program(model={"qk_norm": True}).abstract_state.params["block"]["attention"]
    assert params["query_norm"]["scale"].shape == params["key_norm"]["scale"].shape == (3, 8)


@pytest.mark.parametrize("plan", ["full", "none"])
def test_a_traced_flag_is_refused_by_the_model_under_every_plan(plan):
    program = tiny.program(mesh=ONE_DEVICE, remat={"plan": plan})
    ids = jnp.zeros((1, 16), jnp.int32)
    apply = lambda params, flag: program.model.apply({"params": params}, ids, ids, ids, flag)  # noqa: E731
    with pytest.raises(TypeError, match="a traced value as `deterministic`; it must be a Python bool"):
        jax.eval_shape(apply, program.abstract_state.params, True)


def test_dropout_without_a_key_is_refused():
    program = tiny.program(mesh=ONE_DEVICE, model={"dropout_rate": 0.1})
    params = program.abstract_state.params
    ids = jax.ShapeDtypeStruct((1, 16), jnp.int32)
    with pytest.raises(ValueError, match="dropout needs a key"):
        jax.eval_shape(lambda p, t: program.model.apply({"params": p}, t, t, t, False), params, ids)


@pytest.mark.parametrize("mesh", [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 4, 2)])
def test_every_mesh_gives_the_loss_and_parameters_of_one_device(mesh):
    def two_steps(program):
        state, step = program.init_state(), program.compile_train_step()
        for i in range(2):
            state, metrics = step(state, tiny.batch(program, seed=i, segments=2))
        return metrics, state.params

    expected = two_steps(tiny.program(mesh=ONE_DEVICE))
    actual = two_steps(tiny.program(mesh=dict(zip(("data", "fsdp", "tensor"), mesh, strict=True))))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), actual, expected)
