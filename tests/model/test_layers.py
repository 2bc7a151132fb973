"""Layers against the plainest form of their formulas, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.schema import Model
from model import layers

RNG = np.random.default_rng(0)


def test_rotary_positions_turn_pairs_and_depend_on_differences_only():
    with jax.enable_x64(True):
        x = jnp.asarray(RNG.normal(size=(1, 5, 2, 8)))
        positions = jnp.array([[0, 1, 2, 0, 7]])
        out = layers.rotate(x, positions, 10_000.0)
        frequency = 10_000.0 ** (-np.arange(4) / 4)
        pairs = np.asarray(x[..., :4]) + 1j * np.asarray(x[..., 4:])
        turned = pairs * np.exp(1j * np.asarray(positions)[:, :, None, None] * frequency)
        np.testing.assert_allclose(out, np.concatenate([turned.real, turned.imag], -1), rtol=1e-5, atol=1e-6)
        shifted = layers.rotate(x, positions + 11, 10_000.0)
        score = lambda y: y[0, 1, 0] @ y[0, 2, 0]  # noqa: E731
        np.testing.assert_allclose(score(out), score(shifted), rtol=1e-5)


def test_rms_norm():
    x = RNG.normal(size=(3, 8)).astype(np.float32)
    scale = RNG.normal(size=8).astype(np.float32)
    out = layers.RMSNorm(1e-6, "float32").apply({"params": {"scale": scale}}, x)
    np.testing.assert_allclose(out, x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale, rtol=1e-5)


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "gelu"])
def test_mlp_formulas(activation):
    config = Model(embed_dim=8, mlp_dim=12, activation=activation)
    mlp = layers.MLP(config, "float32")
    x = RNG.normal(size=(2, 3, 8)).astype(np.float32)
    params = jax.tree.map(lambda p: p.value, mlp.init(jax.random.key(0), x), is_leaf=lambda p: hasattr(p, "value"))
    kernels = {name: leaf["kernel"] for name, leaf in params["params"].items()}
    up = x @ kernels["up"]
    if activation == "gelu":
        assert "gate" not in kernels
        hidden = jax.nn.gelu(up)
    else:
        gate = x @ kernels["gate"]
        hidden = up * (gate / (1 + np.exp(-gate)) if activation == "swiglu" else jax.nn.gelu(gate))
    np.testing.assert_allclose(mlp.apply(params, x), hidden @ kernels["down"], rtol=1e-4, atol=1e-5)


def test_projection_has_the_gradients_of_einsum():
    with jax.enable_x64(True):
        x, kernel = jnp.asarray(RNG.normal(size=(2, 3, 8))), jnp.asarray(RNG.normal(size=(8, 4, 5)))
        spec = "BLD,DNH->BLNH"
        ours = jax.grad(lambda x, k: jnp.sum(jnp.sin(layers.project(spec, x, k, "float64"))), (0, 1))(x, kernel)
        plain = jax.grad(lambda x, k: jnp.sum(jnp.sin(jnp.einsum(spec, x, k))), (0, 1))(x, kernel)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), ours, plain)


def test_kernel_gradients_are_summed_in_float32_unless_asked_otherwise():
    """4,096 rows of 1 + 1/256 in bfloat16: a bfloat16 sum of partial sums rounds, a float32 one is exact."""
    x, kernel = jnp.ones((1, 4, 2), jnp.bfloat16), jnp.ones((2, 3), jnp.float32)
    for dtype in ("float32", "bfloat16"):
        f = lambda k, d=dtype: layers.project("BLD,DF->BLF", x, k, d).astype(jnp.float32).sum()  # noqa: E731
        products = [e for e in jax.make_jaxpr(jax.grad(f))(kernel).eqns if e.primitive.name == "dot_general"]
        assert [str(e.outvars[0].aval.dtype) for e in products if e.outvars[0].aval.shape in ((2, 3), (3, 2))] == [dtype]


def test_dropout_drops_its_share_scales_the_rest_and_tells_sites_apart():
    x, key = jnp.ones((100, 100)), jax.random.key(0)
    out = np.asarray(layers.dropout(x, 0.25, key, 0, False))
    assert set(np.unique(out)) == {0, np.float32(1 / 0.75)}
    assert abs((out == 0).mean() - 0.25) < 0.02
    assert (out != np.asarray(layers.dropout(x, 0.25, key, 1, False))).any()
    np.testing.assert_array_equal(layers.dropout(x, 0.25, key, 0, True), x)


def test_a_name_and_a_sharding_come_together():
    """Saving what `saveable` marks needs both: the helper refuses names that do not match the dimensions."""
    with pytest.raises(ValueError, match="2 logical names"):
        layers.saveable(jnp.ones((2, 3, 4)), "q", "batch", "length")
    jaxpr = jax.make_jaxpr(lambda x: layers.saveable(x, "q", "batch", "length"))(jnp.ones((2, 3)))
    assert [e.params["name"] for e in jaxpr.eqns if e.primitive.name == "name"] == ["q"]
