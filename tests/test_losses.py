"""Cross-entropy in chunks against the plain formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from losses import cross_entropy_sums

B, L, D, V = 2, 10, 4, 7
RNG = np.random.default_rng(0)
X, HEAD = RNG.normal(size=(B, L, D)), RNG.normal(size=(D, V))
TARGETS, WEIGHTS = RNG.integers(0, V, (B, L)), (RNG.random((B, L)) < 0.7).astype(float)


def _sums(x, head, chunk):
    logits_fn = lambda x_BCD: jnp.einsum("BCD,DV->BCV", x_BCD, head)  # noqa: E731
    return cross_entropy_sums(logits_fn, x, jnp.asarray(TARGETS), jnp.asarray(WEIGHTS), chunk)


def _plain(x, head):
    logits = jnp.einsum("BLD,DV->BLV", x, head)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    nll = log_z - jnp.take_along_axis(logits, jnp.asarray(TARGETS)[..., None], axis=-1)[..., 0]
    return {"nll": (nll * WEIGHTS).sum(), "log_z_squared": (log_z**2 * WEIGHTS).sum(), "tokens": WEIGHTS.sum()}


@pytest.mark.parametrize("chunk", [1, 3, 5, 10, 512])
def test_chunks_give_the_plain_sums_and_gradients(chunk):
    """Whether or not the chunk divides the length."""
    with jax.enable_x64(True):
        x, head = jnp.asarray(X), jnp.asarray(HEAD)
        for name, expected in _plain(x, head).items():
            np.testing.assert_allclose(_sums(x, head, chunk)[name], expected, rtol=1e-12)
            ours = jax.grad(lambda x, h, n=name: _sums(x, h, chunk)[n] + 0 * h.sum(), (0, 1))(x, head)
            plain = jax.grad(lambda x, h, n=name: _plain(x, h)[n] + 0 * h.sum(), (0, 1))(x, head)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), ours, plain)


def test_no_array_of_all_logits_exists():
    """Neither forward nor backward: nothing in the compiled program is as large as B x L x V."""
    length, vocab = 64, 128
    x, head = jnp.ones((B, length, D)), jnp.ones((D, vocab))
    ids, weights = jnp.ones((B, length), int), jnp.ones((B, length))

    def largest(chunk):
        def loss(x, head):
            logits_fn = lambda x_BCD: jnp.einsum("BCD,DV->BCV", x_BCD, head)  # noqa: E731
            return cross_entropy_sums(logits_fn, x, ids, weights, chunk)["nll"]

        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(x, head).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    whole = B * length * vocab * 4
    assert largest(length) > whole
    assert largest(8) < whole / 2


def test_masked_targets_do_not_count():
    with jax.enable_x64(True):
        gradient = jax.grad(lambda x: _sums(x, jnp.asarray(HEAD), 3)["nll"])(jnp.asarray(X))
    np.testing.assert_array_equal(np.abs(gradient).sum(-1) > 0, WEIGHTS > 0)
