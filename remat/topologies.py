"""Devices that are not here: the compiler's description of a TPU or GPU topology, to compile programs for.

Nothing runs on them. TPU topologies need the extra `tpu` (libtpu), GPU topologies the extra `cuda12`; neither
needs the hardware or a driver.
"""

import importlib.util
import re

import jax
from jax.experimental import topologies

from configs.schema import InputError
from parallel.mesh import quiet_libtpu

_TPU = re.compile(r"(v4|v5e|v5p|v6e|tpu7x):(\d+x\d+(?:x\d+)?)")
_GPU = re.compile(r"(h100):(?:(\d+)x)?(\d+)")

# What XLA needs to know of a GPU to compile for it (GpuTargetConfigProto), from the data sheets and from
# cudaDeviceProp of the card: cores, memory, and what one block of threads may use.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84978434048 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } runtime_version { major: 12 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
_GPU_TARGETS = {"h100": _H100}


def absent_devices(name: str) -> list[jax.Device]:
    """The devices of a topology such as 'v5e:2x4' (chips along each axis) or 'h100:8', 'h100:4x8' (nodes x GPUs).

    Raises InputError for a name that is none, and where the compiler for it is not installed.
    """
    if match := _TPU.fullmatch(name):
        if not _installed("libtpu"):
            raise InputError(f"--topology={name} needs libtpu. Install it with: pip install '.[tpu]'")
        quiet_libtpu()
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    if match := _GPU.fullmatch(name):
        if not _installed("jax_plugins.xla_cuda12"):
            raise InputError(f"--topology={name} needs the CUDA plugin. Install it with: pip install '.[cuda12]'")
        kind, nodes, gpus = match.groups()
        shape = f"{nodes or 1}x{gpus}x1"
        target = _GPU_TARGETS[kind]
        found = topologies.get_topology_desc(platform="cuda", topology_name=kind, topology=shape, target_config=target)
        return list(found.devices)
    raise InputError(
        f"--topology={name!r} is not a topology; it must be a TPU kind and its chips, such as v5e:2x4 or v5p:4x4x4 "
        f"(v4, v5e, v5p, v6e, tpu7x), or a GPU kind and its number, such as h100:8 or h100:4x8 (nodes x GPUs)."
    )


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False
