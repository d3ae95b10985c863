"""Compiles the accelerator: a quarter of a minute, once for a torch and a state of its sources."""

from __future__ import annotations

import fcntl
import hashlib
from pathlib import Path

import torch

from mindspeed_mem.device import native_build

SOURCES = Path(__file__).parent / "csrc"


def library() -> Path:
    """The accelerator's shared library, compiled if it is not there; raises CompilerError where that cannot be done."""
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
