"""The checkpointed block: `deterministic` is found by name and static, and segments change nothing but memory."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import layers
from model.stack import Segment, checkpointed, run_segments
from model.transformer import Transformer
from tests import tiny


class Drop(nn.Module):
    """A block whose flag stands behind `extra` arguments, as a forker would leave it."""

    @nn.compact
    def __call__(self, x, positions, deterministic):
        x = nn.Dense(8)(x) + positions[..., None]
        return nn.Dropout(0.5)(nn.relu(x), deterministic=deterministic)


class DropFirst(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic, positions):
        return Drop(name="drop")(x, positions, deterministic)


class DropKeyword(nn.Module):
    @nn.compact
    def __call__(self, x, positions, *, deterministic=True):
        return Drop(name="drop")(x, positions, deterministic)


X, POSITIONS = jnp.ones((4, 8)), jnp.arange(4.0)


class Wrapped(nn.Module):
    block_class: type

    @nn.compact
    def __call__(self, x, *args, **kwargs):
        return checkpointed(self.block_class, None)(self.block_class(name="block"), x, *args, **kwargs)


def _loss(block_class, *args, **kwargs):
    """Loss and gradient of a wrapped block, jitted, with dropout on whenever the flag says so."""
    module = Wrapped(block_class)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = module.init(rngs, X, *args, **kwargs)
    loss = lambda p: jnp.sum(module.apply(p, X, *args, rngs=rngs, **kwargs) ** 2)  # noqa: E731
    return jax.jit(jax.value_and_grad(loss))(params)


def test_the_flag_is_found_wherever_the_block_has_it():
    for off in (True, False):
        loss, gradient = _loss(Drop, POSITIONS, off)
        same, same_gradient = _loss(DropFirst, off, POSITIONS)
        keyword, _ = _loss(DropKeyword, POSITIONS, deterministic=off)
        assert np.isfinite(loss) and float(jnp.sum(jnp.abs(jax.tree.leaves(gradient)[1]))) > 0
        assert jax.tree.structure(same) == jax.tree.structure(loss)
        assert same.shape == keyword.shape == ()
        assert len(jax.tree.leaves(same_gradient)) == len(jax.tree.leaves(gradient))
    assert _loss(Drop, POSITIONS, True)[0] != _loss(Drop, POSITIONS, False)[0]


def test_a_traced_positions_argument_stays_traced():
    module = Wrapped(Drop)
    params = module.init(jax.random.key(0), X, POSITIONS, True)
    out = jax.jit(lambda positions: module.apply(params, X, positions, True))(POSITIONS)
    np.testing.assert_allclose(out, module.apply(params, X, POSITIONS, True), rtol=1e-6)


@pytest.mark.parametrize("flag", [True, np.bool_(True)])
def test_the_flag_may_be_given_by_name_or_as_numpy_bool(flag):
    assert _loss(Drop, POSITIONS, deterministic=flag)[0] == _loss(Drop, POSITIONS, True)[0]


def test_a_flag_that_is_left_out_is_refused_or_has_its_default():
    with pytest.raises(TypeError, match=r"Drop.__call__\(self, x, positions, deterministic\): missing .*'deterministic'"):
        _loss(Drop, POSITIONS)
    assert _loss(DropKeyword, POSITIONS)[0] == _loss(DropKeyword, POSITIONS, deterministic=True)[0]


@pytest.mark.parametrize("flag", [jnp.array(True), 1, None, "True"])
def test_a_flag_that_is_no_bool_is_refused_in_one_sentence(flag):
    with pytest.raises(TypeError, match="Drop got .* as `deterministic`; it must be a Python bool"):
        _loss(Drop, POSITIONS, flag)


def test_a_traced_flag_is_refused_before_jax_meets_it():
    module = Wrapped(Drop)
    params = module.init(jax.random.key(0), X, POSITIONS, True)
    with pytest.raises(TypeError, match="a traced value as `deterministic`.*static_argnames"):
        jax.jit(lambda flag: module.apply(params, X, POSITIONS, flag))(True)


def test_a_block_without_the_flag_is_refused():
    with pytest.raises(TypeError, match="Dense.__call__.* has no argument `deterministic`"):
        checkpointed(nn.Dense, None)


# What a plan may look like, for three layers.
PLANS = {
    "none": (Segment(0, 3, None),),
    "full": (Segment(0, 3, ()),),
    "names": (Segment(0, 3, ("q", "up")),),
    "two segments": (Segment(0, 2, ()), Segment(2, 1, ("gate", "attention"))),
    "three segments": (Segment(0, 1, None), Segment(1, 1, ("k",)), Segment(2, 1, ())),
}


@functools.cache
def _gradients(segments, dropout=False):
    """Loss and gradients under a plan, and the parameters; in float64 with dropout, else in float32."""
    wide = {"compute_dtype": "float64", "param_dtype": "float64", "dropout_rate": 0.3}
    changes = {"model": wide} if dropout else {}
    program = tiny.program(mesh={"data": 1, "fsdp": 1, "tensor": 1}, **changes)
    params = program.init_state().params
    program.model = Transformer(program.config.model, segments)
    batch = jax.tree.map(lambda a: a[0], tiny.batch(program))
    key = jax.random.key(7)

    def loss(params):
        sums = program.sums(params, batch, key, deterministic=False)
        return sums["nll"] / sums["tokens"]

    with program.on_mesh():
        return jax.jit(jax.value_and_grad(loss))(params), params


@pytest.mark.parametrize("plan", PLANS)
def test_plans_give_the_gradients_of_full_recompute_to_the_bit(plan):
    """Without dropout, in float32."""
    expected, params = _gradients(PLANS["full"])
    actual, same_params = _gradients(PLANS[plan])
    jax.tree.map(np.testing.assert_array_equal, params, same_params)
    if plan == "none":  # XLA fuses what is kept for the backward pass in another order
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), actual, expected)
    else:
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("plan", [p for p in PLANS if p != "full"])
def test_plans_give_the_gradients_of_full_recompute_with_dropout(plan):
    """The masks of a segment are those of its layers, and those of the recompute are those of the forward pass."""
    with jax.enable_x64(True):
        expected, _ = _gradients(PLANS["full"], dropout=True)
        actual, _ = _gradients(PLANS[plan], dropout=True)
        assert expected[0].dtype == jnp.float64
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), actual, expected)


def test_every_layer_of_a_stack_has_its_own_dropout_mask():
    """The stack equals its layers called one by one, each with its index; another index is another mask."""
    program = tiny.program(mesh={"data": 1, "fsdp": 1, "tensor": 1}, model={"num_layers": 2, "dropout_rate": 0.5})
    c, key = program.config.model, jax.random.key(3)
    stacked = program.init_state().params["block"]
    x = jax.random.normal(key, (2, 16, c.embed_dim))
    positions = jnp.broadcast_to(jnp.arange(16), (2, 16))
    block = layers.Block(c)

    def one_by_one(indices):
        y = x
        for i, index in enumerate(indices):
            params = jax.tree.map(lambda p, i=i: p[i], stacked)
            y = block.apply({"params": params}, y, index, key, positions, positions * 0, False)
        return y

    class Stack(nn.Module):
        def setup(self):
            self.block = layers.Block(c)

        def __call__(self, x):
            segments = (Segment(0, 1), Segment(1, 1))
            return run_segments(self.block, segments, 2, x, key, positions, positions * 0, deterministic=False)

    out = Stack().apply({"params": {"block": stacked}}, x)
    np.testing.assert_allclose(out, one_by_one((0, 1)), rtol=1e-5, atol=1e-5)
    assert np.max(np.abs(out - one_by_one((0, 0)))) > 0.1


class Masked(nn.Module):
    """A layer that multiplies by a parameter of ones, then drops half."""

    @nn.compact
    def __call__(self, x, layer, key, deterministic):
        weight = self.param("weight", nn.initializers.ones, x.shape)
        return layers.dropout(x * weight, 0.5, jax.random.fold_in(key, layer), 0, deterministic)


class MaskedStack(nn.Module):
    segments: tuple

    @nn.compact
    def __call__(self, x, key, deterministic):
        return run_segments(Masked(name="block"), self.segments, 3, x, key, deterministic=deterministic)


@pytest.mark.parametrize("segments", [(Segment(0, 3),), (Segment(0, 1), Segment(1, 2)), (Segment(0, 3, None),)])
def test_layers_never_share_a_mask_and_the_recompute_has_that_of_the_forward_pass(segments):
    """The gradient of a sum with respect to a weight of one is the output, if and only if all masks are the same."""
    stack, x, key = MaskedStack(segments), jnp.ones((64, 64)), jax.random.key(3)
    params = stack.init(jax.random.key(0), x, key, True)
    out = jax.jit(lambda p: stack.apply(p, x, key, False))(params)
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(stack.apply(p, x, key, False))))(params)
    for of_layer in gradient["params"]["block"]["weight"]:
        np.testing.assert_array_equal(of_layer, out)
    assert np.mean(np.asarray(out) != 0) == pytest.approx(1 / 8, abs=0.02)  # 1/2, if layers shared one


def test_saving_names_takes_memory_and_none_takes_most():
    temporaries = {}
    for plan in ("full", "names:up,gate", "none"):
        program = tiny.program(model={"num_layers": 8, "mlp_dim": 256}, remat={"plan": plan})
        temporaries[plan] = program.compile_train_step().memory_analysis().temp_size_in_bytes
    assert temporaries["full"] < temporaries["names:up,gate"] < temporaries["none"]


@pytest.mark.parametrize("layers, guarded", [(1, True), (3, False)])
def test_one_layer_is_guarded_against_merging_recompute_and_forward_pass(layers, guarded):
    """XLA inlines a loop of one trip, and would then see common subexpressions; a longer loop needs no barrier."""
    program = tiny.program(model={"num_layers": layers}, mesh={"data": 1, "fsdp": 1, "tensor": 1})
    with program.on_mesh():
        text = jax.jit(program.train_step).lower(program.abstract_state, program.abstract_batch()).as_text()
    # One barrier belongs to the loss, whose chunks are checkpointed too.
    assert (text.count("optimization_barrier") > 1) == guarded


@pytest.mark.parametrize("segments", [(Segment(0, 2),), (Segment(0, 2), Segment(1, 2)), (Segment(0, 3), Segment(3, 0)), ()])
def test_segments_must_cover_every_layer_once(segments):
    with pytest.raises(ValueError, match="must cover layers 0 to 2"):
        _gradients(segments)


def test_the_compiled_program_does_not_grow_with_depth():
    sizes = {}
    for depth in (4, 16):
        compiled = tiny.program(model={"num_layers": depth}).compile_train_step()
        sizes[depth] = sum(" = " in line for line in compiled.as_text().splitlines())
    assert sizes[16] == pytest.approx(sizes[4], rel=0.01)


def test_segments_can_be_compared_and_stored():
    stored = {"first_layer": 0, "num_layers": 2, "save": ("q",), "offload": ()}
    assert dataclasses.asdict(Segment(0, 2, ("q",))) == stored
