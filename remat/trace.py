"""What a block offers to save, read off its trace."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from configs.schema import Config, InputError
from model.layers import Block


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
        for inner in jax.tree.leaves(list(equation.params.values())):  # jaxprs of calls, alone or in tuples
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
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
