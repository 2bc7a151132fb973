"""What the kinds of devices can do, from their makers' data sheets; dense figures, per device as JAX counts them."""

import re
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class DeviceKind:
    """peak_flops: bfloat16 products, FLOP per second. memory_bandwidth: bytes per second."""

    peak_flops: float
    memory_bytes: float
    memory_bandwidth: float


# The first pattern that is found in `device.device_kind` counts. A TPU v4 or v5p chip is one device of two cores; a
# TPU7x chip is two devices.
_KINDS = {
    r"TPU v4": DeviceKind(275e12, 32 * GIB, 1.228e12),
    r"TPU v5 lite|TPU v5e": DeviceKind(197e12, 16 * GIB, 0.819e12),
    r"TPU v5p?$": DeviceKind(459e12, 95 * GIB, 2.765e12),
    r"TPU v6 lite|TPU v6e": DeviceKind(918e12, 32 * GIB, 1.640e12),
    r"TPU7x": DeviceKind(1153.5e12, 96 * GIB, 3.690e12),
    r"A100.*80GB": DeviceKind(312e12, 80 * GIB, 2.039e12),
    r"A100": DeviceKind(312e12, 40 * GIB, 1.555e12),
    r"H100.*PCIe": DeviceKind(756e12, 80 * GIB, 2.0e12),
    r"H100": DeviceKind(989e12, 80 * GIB, 3.35e12),
    r"H200": DeviceKind(989e12, 141e9, 4.8e12),
    r"B200": DeviceKind(2250e12, 180e9, 8.0e12),
    r"L40S": DeviceKind(362e12, 48e9, 0.864e12),
    r"NVIDIA L4$": DeviceKind(121e12, 24e9, 0.3e12),
}


def device_kind(name: str) -> DeviceKind | None:
    """By `device.device_kind`; None for one that is not in the table, as the CPU."""
    return next((kind for pattern, kind in _KINDS.items() if re.search(pattern, name)), None)
