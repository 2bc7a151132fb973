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
_GPU = re.compile(r"(a100-40|a100-80|h100|h200|b200):(?:(\d+)x)?(\d+)")

# What XLA needs to know of a GPU to compile for it (GpuTargetConfigProto), from the data sheets and cudaDeviceProp.
_GPU_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {core_memory} threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: {bandwidth}
  l2_cache_size: {l2} clock_rate_ghz: {ghz} device_memory_size: {memory} shared_memory_per_block_optin: {block_memory}
  cuda_compute_capability {{ major: {major} minor: 0 }} registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }} runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{name}"
"""
_AMPERE = {"core_memory": 167936, "block_memory": 166912, "cores": 108, "fpus": 64, "l2": 41943040, "ghz": 1.41, "major": 8}
_HOPPER = {"core_memory": 233472, "block_memory": 232448, "cores": 132, "fpus": 128, "l2": 52428800, "ghz": 1.98, "major": 9}
_BLACKWELL = _HOPPER | {"cores": 148, "l2": 132644864, "ghz": 1.965, "major": 10}
_GPU_KINDS = {
    "a100-40": _AMPERE | {"memory": 42298834944, "bandwidth": 1555000000000, "name": "NVIDIA A100-SXM4-40GB"},
    "a100-80": _AMPERE | {"memory": 85097971712, "bandwidth": 2039000000000, "name": "NVIDIA A100-SXM4-80GB"},
    "h100": _HOPPER | {"memory": 84978434048, "bandwidth": 3352320000000, "name": "NVIDIA H100 80GB HBM3"},
    "h200": _HOPPER | {"memory": 150110011392, "bandwidth": 4800000000000, "name": "NVIDIA H200"},
    "b200": _BLACKWELL | {"memory": 191513755648, "bandwidth": 8000000000000, "name": "NVIDIA B200"},
}


def absent_devices(name: str) -> list[jax.Device]:
    """The devices of a topology such as 'v5e:2x4' (chips along each axis) or 'h100:8', 'h100:4x8' (nodes x GPUs).

    Raises InputError for a name that is none, and where the compiler for it is not installed.
    """
    if match := _TPU.fullmatch(name):
        if not _installed("libtpu"):
            raise InputError(f"--topology={name} needs libtpu. Install it with: pip install '.[tpu]'")
        quiet_libtpu()
        # On a v4 machine JAX shows each chip of two cores as one device.
        options = {"chip_config_name": "megacore"} if name.startswith("v4:") else {}
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices)
    if match := _GPU.fullmatch(name):
        if not _installed("jax_plugins.xla_cuda12"):
            raise InputError(f"--topology={name} needs the CUDA plugin. Install it with: pip install '.[cuda12]'")
        kind, nodes, gpus = match.groups()
        shape = f"{nodes or 1}x{gpus}x1"
        target = _GPU_TARGET.format(**_GPU_KINDS[kind])
        found = topologies.get_topology_desc(platform="cuda", topology_name=kind, topology=shape, target_config=target)
        return list(found.devices)
    raise InputError(
        f"--topology={name!r} is not a topology; it must be a TPU kind and its chips, such as v5e:2x4 or v5p:4x4x4 "
        f"(v4, v5e, v5p, v6e, tpu7x), or a GPU kind and its number, such as h100:8 or h100:4x8 (nodes x GPUs; "
        f"{', '.join(_GPU_KINDS)})."
    )


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False
