"""A model and batches small enough to compile in a second or two."""

import contextlib
import dataclasses

import jax
import numpy as np

from configs.schema import Config, Mesh, Model, Optimizer, Remat
from configs.validation import validate
from parallel.mesh import make_mesh
from program import Program

CONFIG = Config(
    steps=10,
    global_batch_size=8,
    context_length=16,
    model=Model(
        num_layers=3, embed_dim=32, mlp_dim=64, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=64,
        compute_dtype="float32", attention_kernel="xla",
    ),
    mesh=Mesh(data=2, fsdp=2, tensor=2),
    remat=Remat("full"),
    optimizer=Optimizer(learning_rate=1e-2, warmup_steps=2),
)  # fmt: skip


def config(**changes) -> Config:
    """The tiny config with fields replaced; a dict replaces fields of a group: `config(model={"num_layers": 1})`."""
    new = {k: dataclasses.replace(getattr(CONFIG, k), **v) if isinstance(v, dict) else v for k, v in changes.items()}
    new = dataclasses.replace(CONFIG, **new)
    validate(new)
    return new


def program(**changes) -> Program:
    """A program of the tiny config on as many devices as its mesh takes."""
    c = config(**changes)
    return Program(c, make_mesh(c, jax.devices()[: c.mesh.data * c.mesh.fsdp * c.mesh.tensor]))


def batch(program: Program, seed: int = 0, segments: int = 1) -> dict[str, jax.Array]:
    """Random tokens; each sequence is cut into `segments` documents of equal length."""
    c = program.config
    shape = (c.gradient_accumulation, c.global_batch_size // c.gradient_accumulation, c.context_length)
    rng = np.random.default_rng(seed)
    position = np.broadcast_to(np.arange(c.context_length, dtype=np.int32), shape)
    length = c.context_length // segments
    arrays = {
        "inputs": rng.integers(0, c.model.vocab_size, c.global_batch_size * c.context_length).astype(np.int32),
        "targets": rng.integers(0, c.model.vocab_size, c.global_batch_size * c.context_length).astype(np.int32),
        "positions": position % length,
        "segment_ids": position // length + 1,
        "weights": (position % length < length - 1).astype(np.float32),
    }
    return {k: jax.device_put(a.reshape(shape), program.batch_sharding) for k, a in arrays.items()}


@contextlib.contextmanager
def no_compile_cache():
    """What is compiled for absent devices cannot be read back from JAX's cache."""
    seconds = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    try:
        yield
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
