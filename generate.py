"""Sampling from a model.

Dimensions, as suffixes: R rows (samples), T positions, V vocab.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def sample_text(program, params, tokenizer, prompt: str, length: int, temperature: float, seed: int) -> list[str]:
    """Continues `prompt` by `length` tokens, once for every shard of the batch; returns prompt and continuation.

    Recomputes all positions for every token. Prompt and continuation together are cut to the context length;
    a sample ends early where the model begins a new document. Temperature 0 takes the likeliest token.
    """
    spec = program.evaluation_sharding.spec[0] or ()
    rows = math.prod(program.mesh.shape[axis] for axis in ((spec,) if isinstance(spec, str) else spec))
    given = np.concatenate([[tokenizer.bos_id], tokenizer.encode(prompt.encode())])[: program.config.context_length - 1]
    total = min(len(given) + length, program.config.context_length)
    tokens = np.zeros((rows, total), np.int32)
    tokens[:, : len(given)] = given
    with program.on_mesh():
        run = functools.partial(_continue, program.model, len(given), tokenizer.size, temperature)
        whole = NamedSharding(program.mesh, PartitionSpec())  # every process can read it
        out = jax.jit(run, out_shardings=whole)(params, tokens, jax.random.key(seed))
    return [_text(tokenizer, row, len(given)) for row in np.asarray(out)]


def _continue(model, start: int, vocab_size: int, temperature: float, params, tokens_RT, key):
    variables = {"params": params}
    positions_RT = jnp.broadcast_to(jnp.arange(tokens_RT.shape[1]), tokens_RT.shape)

    def add_token(i, tokens_RT):
        x_RTD = model.apply(variables, tokens_RT, positions_RT, jnp.ones_like(tokens_RT), True)
        last_R1D = jax.lax.dynamic_slice_in_dim(x_RTD, i - 1, 1, axis=1)
        logits_RV = model.apply(variables, last_R1D, method="logits")[:, 0, :vocab_size]
        if temperature == 0:
            chosen_R = jnp.argmax(logits_RV, axis=-1)
        else:
            chosen_R = jax.random.categorical(jax.random.fold_in(key, i), logits_RV / temperature)
        return jax.lax.dynamic_update_slice_in_dim(tokens_RT, chosen_R[:, None].astype(jnp.int32), i, axis=1)

    return jax.lax.fori_loop(start, tokens_RT.shape[1], add_token, tokens_RT)


def _text(tokenizer, tokens, start: int) -> str:
    ends = np.flatnonzero(tokens[start:] == tokenizer.bos_id)
    return tokenizer.decode(tokens[: start + ends[0]] if len(ends) else tokens)
