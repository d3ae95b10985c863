"""``python -m mindspeed_mem build-allocator``: builds the delegating allocator of a device (experimental)."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from mindspeed_mem import requirements

DESCRIPTION = """\
Builds the allocator that stands in front of torch's own and, where device memory runs out, has activations
moved to the host and tries again, inside any operator; --survive-oom and --adaptive-memory-optimization use it where it
is there. It is built for the torch that is installed, takes seconds, and needs a C++ compiler and the headers of CUDA
(nvcc is not needed). With --output, set MINDSPEED_MEM_ALLOCATOR to that folder where you train. It has not been run on
a GPU or NPU yet.

    python -m mindspeed_mem build-allocator
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    what = "npu if torch_npu is installed, else cuda; cpu is for tests"
    command.add_argument("--device", choices=("cuda", "npu", "cpu"), help=what)
    command.add_argument("--output", metavar="FOLDER", help="where to put it (default: the user's cache folder)")


def main(given: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    reason = requirements.absent("torch")
    if reason is not None:
        print(f"mindspeed_mem build-allocator: {reason}", file=sys.stderr)
        return 1
    from mindspeed_mem.device import DeviceError
    from mindspeed_mem.experimental import building, delegating

    device = given.device or ("npu" if importlib.util.find_spec("torch_npu") else "cuda")
    try:
        library = building.build(device, None if given.output is None else Path(given.output))
    except DeviceError as error:
        print(f"mindspeed_mem build-allocator: {error}", file=sys.stderr)
        return 2
    print(library)
    if given.output is not None:
        print(f"where you train: export {delegating.FOLDER_VARIABLE}={library.parent}")
    return 0
