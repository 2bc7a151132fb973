"""What a block offers to save, read off its trace."""

import dataclasses
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from configs.schema import Config, InputError
from model.layers import Block
from model.stack import Segment


def activation_names(config: Config) -> list[str]:
    """The activation names in one block, in the order in which they are computed. Traces it; allocates nothing."""
    model = dataclasses.replace(config.model, attention_kernel="xla")  # all kernels name the same
    block, dtype = Block(model), jnp.dtype(model.compute_dtype)
    x = jax.ShapeDtypeStruct((1, config.context_length, model.embed_dim), dtype)
    ids = jax.ShapeDtypeStruct((1, config.context_length), jnp.int32)
    run = lambda x, ids: block.init_with_output(jax.random.key(0), x, 0, None, ids, ids, True)[0]  # noqa: E731
    return list(dict.fromkeys(_names(jax.make_jaxpr(run)(x, ids).jaxpr)))


def _names(jaxpr) -> Iterator[str]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "name":
            yield equation.params["name"]
        for inner in inner_jaxprs(equation):
            yield from _names(inner)


def check_names(config: Config, names: tuple[str, ...]) -> None:
    """Raises InputError if one of the names is not in the block: JAX itself would silently save nothing for it."""
    known = activation_names(config)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(
            f"config.remat.plan is {config.remat.plan!r}, but a block has no activation named "
            f"{', '.join(map(repr, unknown))}. It has: {', '.join(known)}."
        )


def model_flops(program) -> int:
    """FLOPs of a step's matrix products on all devices, recompute apart: three times those of the forward pass.

    As PaLM counts them (arXiv:2204.02311, appendix B): attention in full whatever the mask, look-ups not at all.
    """
    config = dataclasses.replace(program.model.config, attention_kernel="xla")  # whose products can be seen
    plain = program.model.clone(config=config, segments=(Segment(0, config.num_layers),))
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), program.abstract_batch())

    def forward(params, batch):
        inputs = batch["inputs"], batch["positions"], batch["segment_ids"]
        x_BLD = plain.apply({"params": params}, *inputs, True)
        return plain.apply({"params": params}, x_BLD, method="logits")

    jaxpr = jax.make_jaxpr(forward)(program.abstract_state.params, batch).jaxpr
    return 3 * program.config.gradient_accumulation * matmul_flops(jaxpr)


def matmul_flops(jaxpr) -> int:
    """FLOPs of all matrix products in a jaxpr, two for a multiplication and an addition; those in a scan once a turn.

    Raises ValueError for a loop whose number of turns is not in the program.
    """
    total = 0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2 * equation.outvars[0].aval.size * math.prod(shape[i] for i in contracted)
            continue
        inside = sum(matmul_flops(inner) for inner in inner_jaxprs(equation))
        if inside and name == "while":
            raise ValueError("matmul_flops: a while loop has products; how often it turns is not known")
        total += inside * (equation.params["length"] if name == "scan" else 1)
    return total


def inner_jaxprs(equation) -> Iterator:
    """The jaxprs that an equation calls."""
    for value in jax.tree.leaves(list(equation.params.values())):  # alone or in tuples
        value = getattr(value, "jaxpr", value)
        if hasattr(value, "eqns"):
            yield value
