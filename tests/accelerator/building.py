"""Compiles the accelerator: a quarter of a minute, once for a torch and a state of its sources."""

from __future__ import annotations

import fcntl
import hashlib
from pathlib import Path

import pytest
import torch

from mindspeed_mem.device import native_build

SOURCES = Path(__file__).parent / "csrc"


def library(kind: str | None = None) -> Path:
    """The accelerator's shared library, compiled if it is not there.

    Args:
        kind: what it is to stand in for ("cuda", "npu").

    Where it cannot be built, or cannot stand in for that, the test that asks is skipped.
    """
    if native_build.find_compiler() is None:
        pytest.skip("the accelerator needs a C++ compiler")
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9):
        pytest.skip("the accelerator is written for the device interfaces of torch 2.9 and newer")
    if kind == "cuda" and torch.version.cuda is not None:
        pytest.skip("nothing stands in for CUDA in a CUDA build of torch")
    headers = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.h")))).hexdigest()
    source = SOURCES / "device.cpp"
    folder = native_build.cache_folder()
    target = folder / native_build.library_name(source, headers).replace("device", "accelerator", 1)
    with open(folder / "accelerator.lock", "w") as lock:  # several pytest processes may want it at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            base = Path(torch.__file__).parent
            native_build.compile_library(
                source,
                target,
                purpose="the tests' accelerator",
                includes=[base / "include" / "torch" / "csrc" / "api" / "include"],
                libraries=["c10", "torch_cpu"],
                flags=["-O0"],
            )
    return target
