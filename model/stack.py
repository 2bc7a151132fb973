"""The checkpointed block, and the stack of them: nn.scan over layers, one nn.checkpoint policy a segment."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive layers under one policy.

    The names in `save` stay on the device, those in `offload` wait in the host's memory, all else is recomputed.
    `save=None` takes the layers out of nn.checkpoint: every residual of the backward pass is kept.
    """

    first_layer: int
    num_layers: int
    save: tuple[str, ...] | None = ()
    offload: tuple[str, ...] = ()


def checkpointed(
    block_class: type[nn.Module], policy: Callable | None, prevent_cse: bool = True, read: Callable | None = None
) -> Callable:
    """A function `(block, *args)` that calls the block under nn.checkpoint, with `deterministic` static.

    nn.checkpoint wants the position of a static argument, counts the module itself as 0, and takes the
    argument by position only. The position is looked up in the block's own signature, so the block may gain
    arguments anywhere, and callers may pass `deterministic` by name.

    Args:
      policy: what to save, as for `jax.checkpoint`; None saves nothing.
      prevent_cse: False is safe inside a scan of several layers only.
      read: of the block's parameters makes those that it is to run with; inside the checkpoint, so that none is saved.
    Raises:
      TypeError: on making it, if the block has no such argument; on a call, if the value is not a bool.
    """
    call = block_class.__call__
    signature = inspect.signature(call)
    names = list(signature.parameters)
    if "deterministic" not in names:
        raise TypeError(f"{block_class.__name__}.__call__{signature} has no argument `deterministic`.")
    kinds = [p.kind for p in signature.parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.VAR_KEYWORD in kinds:
        raise TypeError(f"{block_class.__name__}.__call__{signature}: name every argument instead of * or **.")
    by_name = [n for n, kind in zip(names, kinds, strict=True) if kind is inspect.Parameter.KEYWORD_ONLY]

    def positional(block, *args):
        values = dict(zip(names[1:], args, strict=True))
        keywords = {n: values.pop(n) for n in by_name}
        call = lambda block: block(*values.values(), **keywords)  # noqa: E731
        return (nn.map_variables(call, "params", trans_in_fn=read) if read else call)(block)

    static = names.index("deterministic")
    lifted = nn.checkpoint(positional, policy=policy, prevent_cse=prevent_cse, static_argnums=(static,))

    def run(block, *args, **kwargs):
        try:
            bound = signature.bind(block, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{block_class.__name__}.__call__{signature}: {error}.") from None
        bound.apply_defaults()
        flag = bound.arguments["deterministic"]
        bound.arguments["deterministic"] = static_bool(flag, block_class.__name__)
        return lifted(*(bound.arguments[n] for n in names))

    return run


def static_bool(flag, owner: str) -> bool:
    """`flag` as a Python bool. Raises TypeError, naming `owner`, if it is traced or no bool."""
    if isinstance(flag, bool | np.bool_):
        return bool(flag)
    kind = "a traced value" if isinstance(flag, jax.core.Tracer) else f"{flag!r} ({type(flag).__name__})"
    raise TypeError(
        f"{owner} got {kind} as `deterministic`; it must be a Python bool, known when the step is traced, because "
        "it decides which program is built. Write deterministic=True or False, and where a jitted function takes "
        "it as an argument, list it in jax.jit(..., static_argnames='deterministic')."
    )


def run_segments(block: nn.Module, segments: Sequence[Segment], num_layers: int, x, *args, deterministic: bool):
    """Runs x through `num_layers` layers; the parameters of `block` are stacked to [layers, ...].

    Parameters do not depend on the segments. The block is called as `block(x, layer, *args, deterministic)`.
    """
    whole = Segment(0, num_layers)
    if block.is_initializing():
        return _scan(block, whole, x, *args, deterministic=deterministic)
    ends = [0, *(s.first_layer + s.num_layers for s in segments)]
    if [s.first_layer for s in segments] != ends[:-1] or ends[-1] != num_layers or min(np.diff(ends)) < 1:
        raise ValueError(f"The segments must cover layers 0 to {num_layers - 1} in order, each once: {list(segments)}")
    if len(segments) == 1:
        return _scan(block, segments[0], x, *args, deterministic=deterministic)
    # A scan over a slice of the stack would copy the slice and keep it for the whole step. So the layers of each
    # segment read their parameters from the one stack, and hand their gradients in where a slice would be.
    variables = {"params": block.variables["params"]}
    stack = jax.lax.stop_gradient(variables)
    slots = _gradient_slots(variables, tuple(s.num_layers for s in segments))
    for segment, own in zip(segments, slots, strict=True):
        run = lambda b, y, s=segment: _scan(b, s, y, *args, deterministic=deterministic, stack=stack)  # noqa: E731
        x = nn.map_variables(run, "params", trans_in_fn=lambda _, own=own: own)(block, x)
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gradient_slots(params, lengths: tuple[int, ...]):
    """For each segment zeros like its layers' parameters, whose gradients, joined, are those of the parameters."""
    return tuple(jax.tree.map(lambda p, n=n: jnp.zeros((n, *p.shape[1:]), p.dtype), params) for n in lengths)


def _join_gradients(lengths, _, gradients):
    return (jax.tree.map(lambda *parts: jnp.concatenate(parts), *gradients),)


_gradient_slots.defvjp(lambda params, lengths: (_gradient_slots(params, lengths), None), _join_gradients)


@jax.custom_vjp
def _read_layer(stack, layer, slots):
    """One layer's parameters out of the stack; their gradients go to `slots`, zeros of their shapes."""
    return jax.tree.map(lambda p: jax.lax.dynamic_index_in_dim(p, layer, keepdims=False), stack)


_read_layer.defvjp(lambda stack, layer, slots: (_read_layer(stack, layer, slots), None), lambda _, g: (None, None, g))


def _scan(block: nn.Module, segment: Segment, x, *args, deterministic: bool, stack=None):
    def body(block, x, layer):
        read = None if stack is None else lambda slots: _read_layer(stack, layer, slots)
        return _call(type(block), segment, read)(block, x, layer, *args, deterministic), None

    scan = nn.scan(
        body,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=segment.num_layers,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    layers = jnp.arange(segment.first_layer, segment.first_layer + segment.num_layers)
    return scan(block, x, layers)[0]


def _call(block_class: type[nn.Module], segment: Segment, read: Callable | None) -> Callable:
    """A function `(block, *args)` that calls the block under the segment's policy."""
    if segment.save is None:
        call = lambda block, *args: block(*args)  # noqa: E731
        return nn.map_variables(call, "params", trans_in_fn=read) if read else call
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=segment.save,
        names_which_can_be_offloaded=segment.offload,
        offload_src="device",
        offload_dst="pinned_host",
    )
    # A loop of one trip is inlined by XLA, where common subexpressions would undo the recompute.
    return checkpointed(block_class, policy, prevent_cse=segment.num_layers == 1, read=read)
