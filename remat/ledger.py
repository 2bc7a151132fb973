"""Where a device's memory goes: limits, and the parts that can be counted without compiling anything."""

import contextlib
import dataclasses
import math
import os

import jax
import numpy as np

from configs.schema import Config, InputError
from device_kinds import DeviceKind, device_kind
from parallel.agree import gathered_bytes
from parallel.sharding import sharding

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Limit:
    """One device's memory. `reserved_bytes`: the config's reserve and what others already use."""

    id: int
    process: int
    limit_bytes: int
    reserved_bytes: int

    @property
    def budget(self) -> int:
        return self.limit_bytes - self.reserved_bytes


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of all devices of a mesh. One program runs on all of them, so the tightest one binds."""

    devices: tuple[Limit, ...]
    source: str  # where the limits come from
    platform: str

    @property
    def binding(self) -> Limit:
        return min(self.devices, key=lambda d: d.budget)

    @property
    def budget(self) -> int:
        return self.binding.budget


def parse_limits(text: str) -> dict[int, float]:
    """GiB by global device id, from "3:9.5,5:8"."""
    limits = {}
    for part in text.split(",") if text else []:
        device, _, gib = part.partition(":")
        try:
            limits[int(device)] = float(gib)
        except ValueError:
            raise InputError(
                f"config.memory.limits_gib is {text!r}; it must be device ids and GiB, such as '3:9.5,5:8'."
            ) from None
        if not 0 < limits[int(device)] < math.inf:
            raise InputError(f"config.memory.limits_gib is {text!r}; {part!r} must be above 0 GiB.")
    return limits


def ranges(ids: list[int]) -> str:
    """Device ids for people: "0-3, 2048-2051"."""
    found: list[list[int]] = []
    for i in sorted(ids):
        if found and i == found[-1][1] + 1:
            found[-1][1] = i
        else:
            found.append([i, i])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in found)


def find_limits(config: Config, devices: list) -> Limits:
    """Each device's limit: the config's, else what the device reports, else the table's, else the host's memory shared out.

    Raises InputError if nothing is known of a device, or a limit is for a device that the mesh does not have.
    """
    own = parse_limits(config.memory.limits_gib)
    unknown = sorted(own.keys() - {d.id for d in devices})
    if unknown:
        raise InputError(
            f"config.memory.limits_gib is {config.memory.limits_gib!r}, but the mesh has no device {unknown[0]}; it has "
            f"{ranges([d.id for d in devices])}."
        )
    found, sources = [], set()
    for device in sorted(devices, key=lambda d: d.id):
        stats: dict = {}
        with contextlib.suppress(jax.errors.JaxRuntimeError, RuntimeError):
            stats = device.memory_stats() or {}
        kind = device_kind(device.device_kind)
        if device.id in own or config.memory.limit_gib:
            limit, source = round(own.get(device.id, config.memory.limit_gib) * GIB), "config.memory"
        elif "bytes_limit" in stats:
            limit, source = stats["bytes_limit"], "the devices' own report"
        elif kind:
            limit, source = usable_bytes(kind, device.platform), "the table of device kinds"
        elif device.platform == "cpu":
            host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            here = sum(d.process_index == device.process_index for d in devices)
            limit, source = host // here, "the host's memory, shared out"
        else:
            raise InputError(
                f"How much memory does device {device.id} ({device.device_kind}) have? It does not say, and it is in no "
                "table. Set config.memory.limit_gib."
            )
        in_use = stats.get("bytes_in_use", 0)
        found.append(Limit(device.id, device.process_index, limit, round(config.memory.reserve_gib * GIB) + in_use))
        sources.add(source)
    return Limits(_gathered(found), " and ".join(sorted(sources)), devices[0].platform)


def _gathered(own: list[Limit]) -> tuple[Limit, ...]:
    """The limits that all processes found for their own devices: every process must plan from the same numbers."""
    if jax.process_count() == 1:
        return tuple(own)
    rows = [dataclasses.astuple(limit) for limit in own if limit.process == jax.process_index()]
    everyone = gathered_bytes(np.array(rows).ravel()).reshape(-1, 4)
    return tuple(Limit(*map(int, row)) for row in everyone)


@dataclasses.dataclass(frozen=True)
class Parts:
    """Bytes on each device that no plan changes."""

    params_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    batch_bytes: int  # of the step's own batch
    loss_bytes: int  # logits of a chunk in float32, whose place their gradient takes
    block_gradient_bytes: int  # of gradient_bytes, those of the blocks, of one microbatch
    beside_bytes: int  # batches prepared ahead: on the device, but no part of the step

    @property
    def fixed_bytes(self) -> int:
        counted = self.params_bytes, self.optimizer_bytes, self.gradient_bytes, self.batch_bytes, self.loss_bytes
        return sum(counted)


def usable_bytes(kind: DeviceKind, platform: str) -> int:
    """What a program can have of a device that does not say: on GPU the share that JAX takes at the start."""
    share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75)) if platform == "gpu" else 1.0
    return int(kind.memory_bytes * share)


def bytes_on_a_device(tree) -> int:
    """Of abstract arrays with shardings, what one device holds."""
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def count_parts(program) -> Parts:
    """The parts that follow from shapes and shardings."""
    config, state = program.config, program.abstract_state
    params = bytes_on_a_device(state.params)
    gradient_size = jax.numpy.dtype(config.loss.gradient_dtype).itemsize

    def gradients(params):
        return gradient_size * sum(math.prod(p.sharding.shard_shape(p.shape)) for p in jax.tree.leaves(params))

    batch = bytes_on_a_device(program.abstract_batch())
    logits = sharding(program.mesh, config.rules, "batch", None, "vocab")
    rows, chunk = program.abstract_batch()["inputs"].shape[1], min(config.loss.chunk_length, config.context_length)
    shape = (rows, chunk, config.model.vocab_size)
    return Parts(
        params_bytes=params,
        optimizer_bytes=bytes_on_a_device(state.opt_state),
        gradient_bytes=gradients(state.params) * (2 if config.gradient_accumulation > 1 else 1),
        batch_bytes=batch,
        loss_bytes=math.prod(logits.shard_shape(shape)) * 4,
        block_gradient_bytes=gradients(state.params["block"]),
        beside_bytes=batch * (1 + config.data.prefetch_batches),
    )
