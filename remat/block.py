"""The graph of one block of a program, from a trace of the real block on the real mesh."""

import jax

from device_kinds import DeviceKind
from model.layers import Block
from parallel.sharding import sharding
from remat.graph import BlockGraph

# A TPU keeps a tensor in tiles of 128 numbers along its last dimension: heads of 64 take twice their bytes.
LANES = {"tpu": 128}


def trace_block(program, kind: DeviceKind) -> BlockGraph:
    """The graph of one block of a program, as a microbatch meets it on the program's mesh. Allocates nothing."""
    c, sizes = program.config, dict(program.mesh.shape)
    rows = c.global_batch_size // c.gradient_accumulation
    block = Block(program.model.config, program.model.gradient_dtype)
    stacked = program.abstract_state.params["block"]
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape[1:], p.dtype), stacked)
    x = jax.ShapeDtypeStruct((rows, c.context_length, c.model.embed_dim), c.model.compute_dtype)
    ids = jax.ShapeDtypeStruct((rows, c.context_length), "int32")
    layer = jax.ShapeDtypeStruct((), "int32")
    key = jax.eval_shape(lambda: jax.random.key(0)) if c.model.dropout_rate else None

    def run(params, x, layer, key, positions, segment_ids):
        forward = lambda params, x: block.apply(  # noqa: E731
            {"params": params}, x, layer, key, positions, segment_ids, deterministic=key is None
        )
        out, pullback = jax.vjp(forward, params, x)
        return out, jax.tree.leaves(pullback)

    with program.on_mesh():
        jaxpr = jax.make_jaxpr(run)(params, x, layer, key, ids, ids)

    def spec(array_sharding):
        axes = tuple(array_sharding.spec)
        return tuple((a,) if isinstance(a, str) else tuple(a or ()) for a in axes)

    def padded(axes, rank):
        return (*axes, *((),) * (rank - len(axes)))

    of_params = [padded(spec(p.sharding)[1:], len(p.shape) - 1) for p in jax.tree.leaves(stacked)]
    rules = c.rules
    of_x = padded(spec(sharding(program.mesh, rules, "batch", "length", "embed")), 3)
    of_ids = padded(spec(sharding(program.mesh, rules, "batch", "length")), 2)
    specs = [*of_params, of_x, (), *([()] if key is not None else []), of_ids, of_ids]
    lanes = LANES.get(program.mesh.devices.flat[0].platform, 1)
    return BlockGraph(jaxpr, specs, len(of_params), sizes, kind, lanes)
