"""Builds the delegating allocator of a device, which `delegating` loads (``python -m mindspeed_mem build-allocator``).

Nothing of it is built at installation: it needs the device's headers, which training does not.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import torch

from mindspeed_mem.device.base import DeviceError
from mindspeed_mem.device.native_build import cache_folder, compile_library
from mindspeed_mem.experimental.delegating import SOURCES, file_name

_VERSION = "2.13"  # of torch and torch_npu, whose allocator interfaces the sources pass on method by method
# Without what nothing uses: default methods of the base classes need symbols that torch_npu does not export.
_FLAGS = ("-fvisibility=hidden", "-ffunction-sections", "-fdata-sections", "-Wl,--gc-sections")
_CUDA_HEADERS = ("cuda_runtime_api.h", "crt/host_config.h")


class Needs(NamedTuple):
    """Where a device's headers and libraries lie, and what to link with."""

    includes: list[Path]
    library_folders: list[Path]
    libraries: list[str]


def build(device: str, folder: Path | None = None) -> Path:
    """Build the delegating allocator of "cuda", "npu" or "cpu" in `folder` (None: the user's cache folder).

    Returns the library, which is built again even if it is there. Raises DeviceError (CompilerError where the compiler
    refuses) saying what is missing and how to get it.
    """
    if folder is not None and not folder.is_dir():
        raise DeviceError(f"--output: there is no folder {folder}: make it first")
    includes, library_folders, libraries = {"cuda": _cuda, "npu": _npu, "cpu": _cpu}[device]()
    return compile_library(
        SOURCES / f"delegating_{device}.cpp",
        (folder or cache_folder()).resolve() / file_name(device),
        purpose=f"the delegating allocator of {device}",
        includes=includes,
        library_folders=library_folders,
        libraries=["c10", *libraries],
        flags=_FLAGS,
    )


def _cpu() -> Needs:
    return Needs([], [], [])


def _cuda() -> Needs:
    if torch.version.cuda is None:
        raise DeviceError(
            f"this torch ({torch.__version__}) is built without CUDA, so it has no such allocator: install a CUDA build"
            " of torch (pytorch.org lists them), or choose --device npu on an Ascend machine"
        )
    _check_version("torch", torch.__version__)
    folders = _cuda_folders()
    found = {header: next((f for f in folders if (f / header).is_file()), None) for header in _CUDA_HEADERS}
    missing = [header for header, folder in found.items() if folder is None]
    if missing:
        major = torch.version.cuda.partition(".")[0]
        names = ("runtime", "crt") if int(major) >= 13 else (f"runtime-cu{major}", f"nvcc-cu{major}")
        raise DeviceError(
            f"headers of CUDA {torch.version.cuda} are missing: {' and '.join(missing)}. Set CUDA_HOME to a toolkit of "
            f"that version, or pip install {' '.join(f'nvidia-cuda-{name}' for name in names)}. Looked in: "
            f"{', '.join(map(str, folders)) or 'no folder: none of the usual ones exists'}"
        )
    return Needs(list(dict.fromkeys(filter(None, found.values()))), [], ["c10_cuda"])


def _cuda_folders() -> list[Path]:
    """Folders with headers of CUDA: the toolkit's, then those that pip has installed."""
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), nvcc and Path(nvcc).resolve().parents[1]]
    found = [Path(home) / "include" for home in (*homes, "/usr/local/cuda") if home]
    nvidia = importlib.util.find_spec("nvidia")  # cu12 packages have a folder each, those of cu13 share one
    for folder in (nvidia.submodule_search_locations or ()) if nvidia else ():
        found += sorted(Path(folder).glob("*/include"))
    return [folder for folder in dict.fromkeys(found) if folder.is_dir()]


def _npu() -> Needs:
    found = importlib.util.find_spec("torch_npu")  # not imported: that would need a working driver
    if found is None or not found.submodule_search_locations:
        raise DeviceError("torch_npu is not installed: pip install torch_npu in the version of your torch")
    _check_version("torch", torch.__version__)
    try:
        _check_version("torch_npu", importlib.metadata.version("torch_npu"))
    except importlib.metadata.PackageNotFoundError:
        raise DeviceError("torch_npu is there, but not as an installed package: install an official wheel") from None
    base = Path(found.submodule_search_locations[0])
    header = base / "include" / "torch_npu" / "csrc" / "core" / "npu" / "NPUCachingAllocator.h"
    if not header.is_file():
        raise DeviceError(f"this torch_npu has no headers ({header} is missing): install an official wheel")
    third_party = base / "include" / "third_party"
    includes = [base / "include", third_party / "acl" / "inc", third_party / "hccl" / "inc"]
    interface = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "api" / "include"
    return Needs([*includes, interface], [base / "lib"], ["torch_npu"])


def _check_version(package: str, version: str) -> None:
    if not f"{version}.".startswith(f"{_VERSION}."):
        raise DeviceError(
            f"{package} is {version}; the allocator's interface changes between releases, and these sources are for "
            f"{_VERSION}. --survive-oom works without it on any version"
        )
