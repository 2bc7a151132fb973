"""From logical axis names to shardings on a mesh: the one place that knows the rules.

The model writes logical names (`batch`, `embed`, ...) on parameters and activations; `config.rules` says
which mesh axes split each.
"""

import contextlib
from collections.abc import Iterator

import flax.linen as nn
import jax
from flax.linen.spmd import RulesFallback
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from configs.schema import Rules, mesh_axes


def axis_rules(rules: Rules) -> list[tuple[str, tuple[str, ...] | None]]:
    """The rules as Flax wants them.

    The second half lets a logical axis fall back to "not split" where its mesh axis is taken already, so
    that whatever is still unmatched is a name without a rule, and an error.
    """
    axes = mesh_axes(rules)
    return [*axes.items(), *((name, None) for name in axes)]  # type: ignore[list-item]


@contextlib.contextmanager
def on_mesh(mesh: Mesh, rules: Rules) -> Iterator[None]:
    """Trace and run inside it: without it Flax skips every sharding constraint, silently."""
    with jax.set_mesh(mesh), nn.logical_axis_rules(axis_rules(rules)):
        yield


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """`x` with its dimensions split as the logical `names` say. Raises ValueError for a name without a rule."""
    if x.ndim != len(names):
        raise ValueError(f"{len(names)} logical names {names} for an array of shape {x.shape}")
    return nn.with_logical_constraint(x, names, fallback=RulesFallback.RAISE_ERROR)


def sharding(mesh: Mesh, rules: Rules, *names: str | None) -> NamedSharding:
    """The sharding of an array whose dimensions have these logical names."""
    known = mesh_axes(rules)
    for name in names:
        if name is not None and name not in known:
            raise ValueError(f"{name!r} is not a logical axis; config.rules has {', '.join(known)}")
    spec = nn.logical_to_mesh_axes(names, axis_rules(rules)) or ()
    # ('fsdp',) and 'fsdp' mean the same, but compare unequal, which would make jit compile again.
    return NamedSharding(mesh, PartitionSpec(*(a[0] if isinstance(a, tuple) and len(a) == 1 else a or None for a in spec)))


def tree_shardings(mesh: Mesh, rules: Rules, boxed):
    """Shardings of a tree whose leaves carry logical names (`nn.with_logical_partitioning`) or are whole everywhere."""
    specs = nn.get_partition_spec(boxed)
    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    return jax.tree.map(lambda spec: sharding(mesh, rules, *spec), specs, is_leaf=is_spec)


def like_parameters(state, params):
    """Shardings of an optimizer's state: each array is split like the parameter whose path its own path ends with.

    One that lacks a dimension of the parameter (a factored moment) is split like those that it has; anything else,
    such as a count, is whole on every device. `state` and `params`: of jax.ShapeDtypeStruct, the latter's with shardings.
    """
    known = {jax.tree_util.keystr(path): p for path, p in jax.tree_util.tree_leaves_with_path(params)}

    def find(path, leaf):
        names = [jax.tree_util.keystr(path[i:]) for i in range(len(path))]
        parameter = next((known[name] for name in names if name in known), None)
        any_sharding = next(iter(known.values())).sharding
        spec = _matching(leaf.shape, parameter) if parameter is not None else ()
        return NamedSharding(any_sharding.mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(find, state)


def _matching(shape: tuple[int, ...], parameter) -> tuple:
    split = [*parameter.sharding.spec, *[None] * (len(parameter.shape) - len(parameter.sharding.spec))]
    if shape == parameter.shape:
        return tuple(parameter.sharding.spec)
    for i in range(len(split)):
        if shape == parameter.shape[:i] + parameter.shape[i + 1 :]:
            return (*split[:i], *split[i + 1 :])
    return ()
