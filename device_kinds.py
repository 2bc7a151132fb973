"""What the kinds of devices can do, from their makers' data sheets; dense figures, per device as JAX counts them."""

import re
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class DeviceKind:
    """peak_flops: bfloat16 products, FLOP per second. Bandwidths: bytes per second.

    `memory_bytes` of a TPU is what its compiler lets a program have, read off the message with which it refuses one
    that is too large; of a GPU it is what the card has.

    `link_bandwidth` is that of all links to other devices together, one way; `host_bandwidth` that to the memory of
    the host, one way, the device's share where several share it; `host_bytes` is such a share of that memory, in the
    machines that the clouds offer.
    """

    peak_flops: float
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    host_bandwidth: float
    host_bytes: float


# The first pattern that is found in `device.device_kind` counts. A TPU v4 or v5p chip is one device of two cores; a
# TPU7x chip is two devices.
_KINDS = {
    r"TPU v4": DeviceKind(275e12, 30.75 * GIB, 1.228e12, 300e9, 8e9, 100e9),
    r"TPU v5 lite|TPU v5e": DeviceKind(197e12, 15.75 * GIB, 0.819e12, 200e9, 8e9, 48e9),
    r"TPU v5p?$": DeviceKind(459e12, 95.73 * GIB, 2.765e12, 600e9, 8e9, 112e9),
    r"TPU v6 lite|TPU v6e": DeviceKind(918e12, 31.24 * GIB, 1.640e12, 448e9, 16e9, 180e9),
    r"TPU7x": DeviceKind(1153.5e12, 94.74 * GIB, 3.690e12, 600e9, 16e9, 120e9),
    r"A100.*80GB": DeviceKind(312e12, 79.25 * GIB, 2.039e12, 300e9, 25e9, 170e9),
    r"A100": DeviceKind(312e12, 39.39 * GIB, 1.555e12, 300e9, 25e9, 85e9),
    r"H100.*PCIe": DeviceKind(756e12, 80 * GIB, 2.0e12, 32e9, 50e9, 117e9),
    r"H100": DeviceKind(989e12, 79.14 * GIB, 3.35e12, 450e9, 50e9, 234e9),
    r"H200": DeviceKind(989e12, 141e9, 4.8e12, 450e9, 50e9, 369e9),
    r"B200": DeviceKind(2250e12, 180e9, 8.0e12, 900e9, 50e9, 495e9),
    r"L40S": DeviceKind(362e12, 48e9, 0.864e12, 25e9, 25e9, 192e9),
    r"NVIDIA L4$": DeviceKind(121e12, 24e9, 0.3e12, 25e9, 25e9, 48e9),
}

# Where the device is in no table, as the CPU: only ratios matter, and these are those of a usual accelerator.
NOMINAL = DeviceKind(200e12, 16 * GIB, 1e12, 200e9, 8e9, 48e9)


def device_kind(name: str) -> DeviceKind | None:
    """By `device.device_kind`; None for one that is not in the table, as the CPU."""
    return next((kind for pattern, kind in _KINDS.items() if re.search(pattern, name)), None)
