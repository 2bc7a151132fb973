"""Cross-entropy that never holds the logits of a whole batch.

Dimensions, as suffixes: B batch, L length, C a chunk of the length, D embed, V vocab.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def cross_entropy_sums(
    logits_fn: Callable[[jax.Array], jax.Array],
    x_BLD: jax.Array,
    targets_BL: jax.Array,
    weights_BL: jax.Array,
    chunk_length: int,
) -> dict[str, jax.Array]:
    """Sums over all positions, for the caller to divide by the number of valid tokens.

    The length is cut into chunks; a chunk's logits exist only while it is worked on, and are computed again
    for the backward pass.

    Args:
      logits_fn: from hidden states x_BCD to logits_BCV in float32.
      weights_BL: 1 where the target counts, 0 where it does not.
    Returns:
      Scalars: `nll` (nats), `log_z_squared` (log(Z)^2, for the z-loss), `tokens` (the sum of the weights).
    """

    @jax.checkpoint
    def chunk_sums(x_BCD, targets_BC, weights_BC):
        logits_BCV = logits_fn(x_BCD)
        log_z_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
        # A masked sum instead of a gather: the vocabulary may be split over devices.
        is_target_BCV = jax.lax.broadcasted_iota(jnp.int32, logits_BCV.shape, 2) == targets_BC[..., None]
        target_BC = jnp.sum(jnp.where(is_target_BCV, logits_BCV, 0), axis=-1)
        return {
            "nll": jnp.sum((log_z_BC - target_BC) * weights_BC),
            "log_z_squared": jnp.sum(log_z_BC**2 * weights_BC),
            "tokens": jnp.sum(weights_BC),
        }

    chunks = jax.tree.map(lambda a: _split(a, chunk_length), (x_BLD, targets_BL, weights_BL))
    zeros = {name: jnp.zeros((), jnp.float32) for name in ("nll", "log_z_squared", "tokens")}
    zeros = jax.tree.map(
        lambda z, s: z.astype(s.dtype), zeros, jax.eval_shape(chunk_sums, *jax.tree.map(lambda a: a[0], chunks))
    )
    return jax.lax.scan(lambda total, c: (jax.tree.map(jnp.add, total, chunk_sums(*c)), None), zeros, chunks)[0]


def _split(a_BL: jax.Array, chunk_length: int) -> jax.Array:
    """[B, L, ...] -> [chunks, B, C, ...]; zeros, of weight 0, fill the last chunk up."""
    length = a_BL.shape[1]
    chunk_length = min(chunk_length, length)
    padding = -length % chunk_length
    if padding:
        a_BL = jnp.pad(a_BL, [(0, 0), (0, padding)] + [(0, 0)] * (a_BL.ndim - 2))
    return jnp.moveaxis(a_BL.reshape(a_BL.shape[0], -1, chunk_length, *a_BL.shape[2:]), 1, 0)
