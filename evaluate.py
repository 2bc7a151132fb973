"""Loss on held-out data."""

import contextlib
import math
import pathlib

from jax.sharding import Mesh

import metrics
from checkpointing import newest_parameters
from configs.schema import Config
from input_pipeline import Data, evaluation_batches, load_data
from program import Program


def evaluate(program: Program, params, data: Data) -> dict[str, float]:
    """Loss (nats a token), perplexity and bits per byte over all held-out examples, each counted once."""
    c = program.config
    batch_size = c.evaluation.batch_size or c.global_batch_size // c.gradient_accumulation
    sharding, prefetch = program.evaluation_sharding, c.data.prefetch_batches
    batches = evaluation_batches(data.heldout, batch_size=batch_size, sharding=sharding, prefetch=prefetch)
    nll = tokens = 0.0
    with contextlib.closing(batches), program.on_mesh():
        for batch in batches:
            sums = program.evaluation_step(params, batch)
            nll, tokens = nll + float(sums["nll"]), tokens + float(sums["tokens"])
    loss = nll / tokens
    return {
        "eval_loss": loss,
        "eval_perplexity": math.exp(min(loss, 700)),
        "eval_bits_per_byte": loss / math.log(2) / data.heldout_bytes_per_token,
        "eval_tokens": tokens,
    }


def evaluate_newest(config: Config, mesh: Mesh, workdir: pathlib.Path) -> None:
    """Prints the evaluation of the newest checkpoint; writes nothing."""
    program, data = Program(config, mesh), load_data(config)
    step, params = newest_parameters(program, workdir)
    metrics.say(f"step {step}: {metrics.describe(evaluate(program, params, data))}")
