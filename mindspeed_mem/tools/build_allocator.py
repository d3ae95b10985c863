"""``python -m mindspeed_mem build-allocator``: builds the delegating allocator (experimental)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mindspeed_mem import requirements

DESCRIPTION = """\
Builds an extension by which torch's allocator, when device memory runs out inside any operator, has activations moved
to the host and tries again; --survive-oom and --adaptive-memory-optimization use it if it is there. It is built for
the installed torch, for whatever device, takes seconds, and needs a C++ compiler. With --output, set
MINDSPEED_MEM_ALLOCATOR to that folder when you train. It has not been run on a GPU or NPU yet.

    python -m mindspeed_mem build-allocator
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--output", metavar="FOLDER", help="where to put it (default: the user's cache folder)")


def main(given: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    reason = requirements.absent("torch")
    if reason is not None:
        print(f"mindspeed_mem build-allocator: {reason}", file=sys.stderr)
        return 1
    from mindspeed_mem.device import DeviceError
    from mindspeed_mem.experimental import delegating

    try:
        library = delegating.build(None if given.output is None else Path(given.output))
    except DeviceError as error:
        print(f"mindspeed_mem build-allocator: {error}", file=sys.stderr)
        return 2
    print(library)
    if given.output is not None:
        print(f"where you train: export {delegating.FOLDER_VARIABLE}={library.parent}")
    return 0
