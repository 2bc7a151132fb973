"""Sampling from a model.

Dimensions, as suffixes: R rows (samples), T positions, V vocab.
"""

import functools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import metrics
from checkpointing import newest_parameters
from configs.schema import Config, InputError, Sample
from input_pipeline import model_tokenizer
from program import Program

_POSITIONS = 128  # a multiple of it is computed: attention kernels want that


def encode_prompt(tokenizer, prompt: str, context_length: int) -> np.ndarray:
    """The prompt's tokens behind the one that begins a document. Raises InputError if nothing fits behind them."""
    try:  # the command line may hold bytes that are no UTF-8: Python keeps them as surrogates
        encoded = tokenizer.encode(prompt.encode(errors="surrogateescape"))
    except UnicodeError as error:
        raise InputError(f"The prompt {prompt!r} is not UTF-8, which this tokenizer needs: {error}.") from error
    tokens = np.concatenate([[tokenizer.bos_id], encoded]).astype(np.int32)
    if len(tokens) >= context_length:
        raise InputError(
            f"The prompt has {len(tokens)} tokens with the one that begins a document; config.context_length is "
            f"{context_length}, and a prompt must leave room for one more. Shorten it."
        )
    return tokens


def sample_text(program: Program, params, tokenizer, sample: Sample) -> list[str]:
    """Continues `sample.prompt`, `sample.count` times; each text is the prompt and its continuation.

    Recomputes all positions for every token. A sample ends after `sample.length` tokens (0: no limit), at the end
    of the context, or where the model begins a new document. The i-th sample depends on the seed and on i alone.
    """
    context = program.config.context_length
    given = encode_prompt(tokenizer, sample.prompt, context)
    end = min(len(given) + sample.length if sample.length else context, context)
    spec = program.evaluation_sharding.spec[0] or ()
    shards = math.prod(program.mesh.shape[axis] for axis in ((spec,) if isinstance(spec, str) else spec))
    rows = -(-sample.count // shards) * shards
    tokens = np.zeros((rows, min(-(-end // _POSITIONS) * _POSITIONS, context)), np.int32)
    tokens[:, : len(given)] = given
    with program.on_mesh():
        run = functools.partial(_continue, program.model, len(given), end, tokenizer.size, sample)
        whole = NamedSharding(program.mesh, PartitionSpec())  # every process can read it
        out = jax.jit(run, out_shardings=whole)(params, tokens)
    return [_text(tokenizer, row[:end], len(given)) for row in np.asarray(out)[: sample.count]]


def _continue(model, start: int, end: int, vocab_size: int, sample: Sample, params, tokens_RT):
    variables = {"params": params}
    keys_R = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(sample.seed), jnp.arange(tokens_RT.shape[0]))
    positions_RT = jnp.broadcast_to(jnp.arange(tokens_RT.shape[1]), tokens_RT.shape)

    def add_token(i, tokens_RT):
        x_RTD = model.apply(variables, tokens_RT, positions_RT, jnp.ones_like(tokens_RT), True)
        last_R1D = jax.lax.dynamic_slice_in_dim(x_RTD, i - 1, 1, axis=1)
        logits_RV = model.apply(variables, last_R1D, method="logits")[:, 0, :vocab_size]
        chosen_R = choose(logits_RV, jax.vmap(jax.random.fold_in, (0, None))(keys_R, i), sample)
        return jax.lax.dynamic_update_slice_in_dim(tokens_RT, chosen_R[:, None].astype(jnp.int32), i, axis=1)

    return jax.lax.fori_loop(start, end, add_token, tokens_RT)


def choose(logits_RV: jax.Array, keys_R: jax.Array, sample: Sample) -> jax.Array:
    """A token for each row: drawn at `temperature` out of the `top_k` likeliest, and of these out of `top_p`."""
    if sample.temperature == 0:
        return jnp.argmax(logits_RV, axis=-1)
    logits_RV = logits_RV / sample.temperature
    order_RV = jnp.argsort(-logits_RV, axis=-1, stable=True)
    sorted_RV = jnp.take_along_axis(logits_RV, order_RV, axis=-1)
    if sample.top_k:
        sorted_RV = jnp.where(jnp.arange(sorted_RV.shape[1]) < sample.top_k, sorted_RV, -jnp.inf)
    if sample.top_p < 1:
        p_RV = jax.nn.softmax(sorted_RV, axis=-1)
        # Those before it, so that the token that reaches top_p is in, and the likeliest always is.
        sorted_RV = jnp.where(jnp.cumsum(p_RV, axis=-1) - p_RV < sample.top_p, sorted_RV, -jnp.inf)
    place_R = jax.vmap(jax.random.categorical)(keys_R, sorted_RV)
    return jnp.take_along_axis(order_RV, place_R[:, None], axis=-1)[:, 0]


def _text(tokenizer, tokens, start: int) -> str:
    ends = np.flatnonzero(tokens[start:] == tokenizer.bos_id)
    return tokenizer.decode(tokens[: start + ends[0]] if len(ends) else tokens)


def generate_newest(config: Config, mesh: Mesh, workdir: pathlib.Path) -> None:
    """Prints samples from the newest checkpoint; writes nothing."""
    program, tokenizer = Program(config, mesh), model_tokenizer(config)
    encode_prompt(tokenizer, config.sample.prompt, config.context_length)
    _, params = newest_parameters(program, workdir)
    metrics.say_samples(sample_text(program, params, tokenizer, config.sample), config.sample)
