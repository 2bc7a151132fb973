"""Starting JAX, and the mesh of devices that everything is laid out on."""

import collections
import math
import os

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from configs.schema import AXES, Config, InputError, axis_sizes
from configs.validation import validate_on_mesh


def start(config: Config, coordinator_address: str = "", num_processes: int = 0, process_id: int = -1) -> None:
    """Readies JAX's backends. Call it before anything else that asks JAX for devices.

    With a coordinator's address this process joins `num_processes` others. Where JAX finds no accelerator,
    the CPU shows `config.mesh.cpu_devices` devices, unless the environment sets JAX_NUM_CPU_DEVICES.
    """
    if coordinator_address and not 0 <= process_id < num_processes:
        raise InputError(
            f"--process_id={process_id} and --num_processes={num_processes}; with --coordinator_address both "
            "are needed: how many processes there are, and which one this is, counted from 0."
        )
    if not coordinator_address and (num_processes or process_id != -1):
        raise InputError("--num_processes and --process_id do nothing without --coordinator_address; give that too.")
    quiet_libtpu()
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", config.mesh.cpu_devices)
    if coordinator_address:
        jax.distributed.initialize(coordinator_address, num_processes, process_id)


def quiet_libtpu() -> None:
    """Where there is no TPU, keeps libtpu from looking for one, which takes long and prints errors."""
    if os.environ.get("TPU_SKIP_MDS_QUERY") == "1":  # JAX sets it where it finds none
        here = {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0", "TPU_ACCELERATOR_TYPE": "v5litepod-8"}
        for variable, value in {**here, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}.items():
            os.environ.setdefault(variable, value)


def make_mesh(config: Config, devices: list | None = None) -> Mesh:
    """Lays the devices out on the axes data, fsdp, tensor, outermost first, and checks the config against it.

    Devices of several slices (TPU slices, GPU nodes) are laid out so that only the outermost axis that can
    be split over the slices uses the slow network between them.

    Args:
      devices: those to lay out; by default all that JAX sees.
    Raises:
      InputError: the mesh does not take the devices, or a size does not divide.
    """
    devices = list(jax.devices() if devices is None else devices)
    wanted = config.mesh.num_devices
    if wanted > len(devices):
        raise InputError(f"config.mesh.num_devices is {wanted}, but JAX sees {_describe(devices)}.{_more_cpu(devices)}")
    processes = {device.process_index for device in devices}
    devices = devices[: wanted or None]
    if processes - {device.process_index for device in devices}:
        raise InputError(
            f"config.mesh.num_devices is {wanted}, which leaves some of the {len(processes)} processes without a device. "
            "Start fewer processes, or take more devices."
        )
    sizes = _resolve(axis_sizes(config.mesh), devices, asked=wanted)
    validate_on_mesh(config, sizes)
    grid = _arrange(tuple(sizes.values()), devices)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _resolve(sizes: dict[str, int], devices: list, asked: int) -> dict[str, int]:
    """Replaces -1 by the number of devices that the other axes leave."""
    text = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    known = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values():
        if len(devices) % known:
            raise InputError(
                f"The mesh {text} needs a multiple of {known} devices, but there are {_describe(devices)}. Change "
                f"config.mesh.*, or take fewer with config.mesh.num_devices.{_more_cpu(devices)}"
            )
        return {axis: len(devices) // known if size == -1 else size for axis, size in sizes.items()}
    if known != len(devices):
        hint = f" or use only {known} of them with config.mesh.num_devices={known}" if known < len(devices) else ""
        given = f"config.mesh.num_devices={asked} asks for" if asked else "there are"
        raise InputError(
            f"The mesh {text} takes {known} devices, but {given} {_describe(devices)}. Change config.mesh.* (an axis "
            f"of -1 takes what the others leave){hint}.{_more_cpu(devices)}"
        )
    return sizes


def _describe(devices: list) -> str:
    return f"{len(devices)} {devices[0].device_kind} device{'s' if len(devices) > 1 else ''}"


def _more_cpu(devices: list) -> str:
    return " config.mesh.cpu_devices sets how many the CPU shows." if devices[0].platform == "cpu" else ""


def _arrange(shape: tuple[int, ...], devices: list):
    """The devices in an array of this shape; across slices only along one axis, as far out as possible."""
    slices = collections.Counter(getattr(device, "slice_index", 0) or 0 for device in devices)
    if len(slices) == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    if len(set(slices.values())) > 1:
        raise InputError(f"The slices have {sorted(slices.values())} devices; a mesh needs equally many of each.")
    for axis, size in enumerate(shape):
        if size % len(slices) == 0:
            between = [1] * len(shape)
            between[axis] = len(slices)
            within = [s // b for s, b in zip(shape, between, strict=True)]
            return mesh_utils.create_hybrid_device_mesh(within, between, devices, allow_split_physical_axes=True)
    axes = ", ".join(f"{axis}={size}" for axis, size in zip(AXES, shape, strict=True))
    raise InputError(
        f"The devices come in {len(slices)} slices, but no axis of the mesh {axes} is a multiple of "
        f"{len(slices)}. Make config.mesh.data a multiple, so that only it crosses the network between slices."
    )
