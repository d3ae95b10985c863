"""``python -m mindspeed_mem build-native``: builds the engine's hot path in C++."""

from __future__ import annotations

import argparse
import sys

from mindspeed_mem import requirements

DESCRIPTION = """\
Builds a C++ version of the engine's work around each operator and for each saved tensor, which takes less host time.
Training uses it if it is there, with the same results. It is built for the installed torch and Python, into the
user's cache folder, in a minute or two, and needs a C++ compiler and Python's headers. MINDSPEED_MEM_NATIVE=0 makes
training ignore it; with 1, training says so where it is missing.

    python -m mindspeed_mem build-native
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """There are none."""


def main(given: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    reason = requirements.absent("torch")
    if reason is not None:
        print(f"mindspeed_mem build-native: {reason}", file=sys.stderr)
        return 1
    from mindspeed_mem.activation import hot_path
    from mindspeed_mem.device import DeviceError, fast_tensors

    try:
        for extension in (fast_tensors.EXTENSION, hot_path.EXTENSION):
            print(extension.build())
    except DeviceError as error:
        print(f"mindspeed_mem build-native: {error}", file=sys.stderr)
        return 2
    return 0
