"""What devices can do, by their vendors' data sheets, and how much of that a training job reaches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Device(NamedTuple):
    """Figures of a data sheet; GB/s are of one direction, half of what sheets give for both."""

    memory_gib: float
    """As torch reports it, rounded down from the least that was found: drivers differ by 0.1 or 0.2 GiB."""
    tflops: float
    """bf16 matrix products, dense: half of what sheets give "with sparsity"."""
    memory_gbps: float
    link_gbps: float
    """To the host."""
    tensor_gbps: float
    """To the other devices of its node."""


_PCIE4, _PCIE5 = 32.0, 64.0  # 16 lanes; the sheets' 64 and 128 GB/s are of both directions
# NVIDIA's sheets were read in copies by others (glennklockwood.com, hpctech.co.jp, aggregated tables); the dense peaks
# agree with torchtitan's get_peak_flops, which lacks GH200. "Reports" is the total capacity (GiB) in torch's messages
# of memory that ran out; "in public logs" where several agree and none is named.
DEVICES = {
    # Sheet nvidia-a100-us (SXM): 312, 1,555 GB/s, NVLink 600, PCIe 4. Reports 39.38 to 39.56 in public logs.
    "a100-40gb": Device(39.3, 312, 1555, _PCIE4, 300),
    # The same sheet (SXM): 312, 2,039 GB/s, NVLink 600, PCIe 4. Reports 79.14 to 79.25 in public logs.
    "a100-80gb": Device(79.1, 312, 2039, _PCIE4, 300),
    # Sheet H100 (SXM): 1,979 sparse, 3.35 TB/s, NVLink 900, PCIe 5 128. Reports 79.11 (vllm-project/vllm#27508).
    "h100": Device(79.1, 989, 3350, _PCIE5, 450),
    # Sheet H100 (PCIe): 1,513 sparse, 2 TB/s, NVLink 600 (bridges of pairs; else PCIe), PCIe 5 128. No report found:
    # taken from the SXM's, which has as many GB.
    "h100-pcie": Device(79.1, 756, 2000, _PCIE5, 300),
    # Sheet H200 (SXM): 1,979 sparse, 4.8 TB/s, NVLink 900, PCIe 5 128. Reports 139.72 to 139.81 in public logs.
    "h200": Device(139.7, 989, 4800, _PCIE5, 450),
    # Sheet GH200 (96 GB HBM3; there is one of 144 GB): 1,979 sparse, 4 TB/s, NVLink-C2C 900. To its neighbours as H100,
    # not confirmed. Reports 94.50 (vllm-project/vllm#9630) or 94.88 (Lightning-AI/litgpt#1892).
    "gh200": Device(94.5, 989, 4000, 450, 450),
    # Sheet HGX B200 (180 GB): 4,500 sparse, 7.7 TB/s (8 in older ones), NVLink 1,800, PCIe 5 128. Reports 178.35 or
    # 178.36 in public logs.
    "b200": Device(178.3, 2250, 7700, _PCIE5, 900),
    # Sheet L40S: 362.05, 864 GB/s, no NVLink, PCIe 4 64. Reports 44.42 (stepfun-ai/Step-Video-T2V#8), 44.3 with others
    # of the same 48 GB.
    "l40s": Device(44.3, 362, 864, _PCIE4, _PCIE4),
    # The 910B3 of 64 GB (a 910B1 has more cores). No data sheet could be read, so by others: 313 and 1.6 TB/s in
    # public benchmarks, HCCS 7 links of 56 GB/s both ways (arthurchiao.art, gpu-data-sheets), of which two devices use
    # one. The link is not confirmed: PCIe 4, to which the 25.6 GB/s of MindSpeed's smart_swap fit (80 %). Reports 60.96
    # (vllm-project/vllm-ascend#1670).
    "ascend-910b": Device(60.9, 313, 1600, _PCIE4, 196),
}
_MATRICES, _REST = 0.65, 0.8
"""The share that is assumed to be reached: of matrix products in large layers, and of memories and links. Single
kernels reach more (of H100's memory 92 %), NCCL some 350 of 450 GB/s on H100 (NVIDIA/nccl#986), one H100 alone 55.7 of
64 GB/s to its host, but eight that copy at once 35 (openxla/xla#21708): a job that knows should say."""
ASSUMED = f"{100 * _MATRICES:g} % of the sheet's TFLOP/s and {100 * _REST:g} % of its GB/s"


def reached(device: Device) -> dict[str, float]:
    """The speeds of `Machine` on such a device."""
    moved = {name: _REST * getattr(device, name) for name in ("memory_gbps", "link_gbps", "tensor_gbps")}
    return {"tflops": _MATRICES * device.tflops, **moved}


def assumptions(name: str, said: Mapping[str, object]) -> str | None:
    """Which figures of this device's sheet the speeds come from that were not said, as a sentence."""
    device = DEVICES[name]
    figures = {
        "tflops": f"{device.tflops:g} TFLOP/s in bf16",
        "memory_gbps": f"{device.memory_gbps:g} GB/s device memory",
        "link_gbps": f"{device.link_gbps:g} GB/s to the host",
        "tensor_gbps": f"{device.tensor_gbps:g} GB/s to its neighbours",
    }
    taken = [text for figure, text in figures.items() if said.get(figure) is None]
    return f"Taken for {name}: {', '.join(taken)}; assumed to be reached: {ASSUMED}." if taken else None
