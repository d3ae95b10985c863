"""What devices can do, by their vendors' data sheets, and how much of that a training job reaches."""

from __future__ import annotations

from typing import NamedTuple


class Device(NamedTuple):
    """Figures of a data sheet; GB/s are of one direction."""

    memory_gib: float
    """As torch reports it: less than the sheet's, as error correction and firmware take some."""
    tflops: float
    """bf16 matrix products, dense."""
    memory_gbps: float
    link_gbps: float
    """To the host."""
    tensor_gbps: float
    """To the other devices of its node."""


_PCIE4, _PCIE5 = 32.0, 64.0
# NVIDIA's data sheets of A100 (nvidia-a100-datasheet-us), H100, H200, L40S, GH200 and HGX B200, whose figures "with
# sparsity" are halved; Huawei's page of the Atlas 800T A2 (2.5 PFLOPS with 8 devices of 64 GB and 1.6 TB/s).
DEVICES = {
    "a100-40gb": Device(39.4, 312, 1555, _PCIE4, 300),
    "a100-80gb": Device(79.2, 312, 2039, _PCIE4, 300),
    "h100": Device(79.2, 989, 3350, _PCIE5, 450),
    "h100-pcie": Device(79.2, 756, 2000, _PCIE5, 300),
    "h200": Device(139.8, 989, 4800, _PCIE5, 450),
    "gh200": Device(94.5, 989, 4000, 450, 450),
    "b200": Device(178.3, 2250, 7700, _PCIE5, 900),
    "l40s": Device(44.4, 362, 864, _PCIE4, _PCIE4),
    "ascend-910b": Device(61.0, 313, 1600, _PCIE4, 196),
}
_MATRICES, _REST = 0.65, 0.8
"""The share that is reached: of matrix products in large layers, and of memories and links."""


def reached(device: Device) -> dict[str, float]:
    """The speeds of `Machine` on such a device."""
    moved = {name: _REST * getattr(device, name) for name in ("memory_gbps", "link_gbps", "tensor_gbps")}
    return {"tflops": _MATRICES * device.tflops, **moved}
