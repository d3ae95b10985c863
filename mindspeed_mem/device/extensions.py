"""Python modules in C++ that are built on demand: once for each torch and Python, into the user's cache folder."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from mindspeed_mem.device.native_build import (
    CompilerError,
    cache_folder,
    compile_library,
    is_complete,
    lasting_folder,
    library_name,
)

VARIABLE = "MINDSPEED_MEM_NATIVE"
"""0: those that have been built are left aside. 1: they are wanted, and it is said where there are none."""
_LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python")


def _asked() -> str:
    return os.environ.get(VARIABLE, "").strip()


def unheeded(in_use: bool) -> str | None:
    """What of the variable is not done, in words, if they are in use or not; None: all is as it says."""
    if _asked() not in ("", "0", "1"):
        return f"{VARIABLE}: got {_asked()!r}, which is ignored; allowed: 0 (Python only), 1 (C++)"
    if _asked() == "1" and not in_use:
        return (
            f"{VARIABLE} is 1, and what it asks for has not been built for this torch and this Python, or cannot be "
            "loaded: run python -m mindspeed_mem build-native; until then Python does the same"
        )
    return None


class Extension(NamedTuple):
    """One of them."""

    source: Path
    """Its file, named as the module is."""
    purpose: str
    """For messages: what needs it."""
    headers: Sequence[Path] = ()
    """Of ours that it includes."""

    def build(self) -> Path:
        """Compile it for the torch and the Python that run, unless that has been done; in about a minute.

        Raises CompilerError where there is no compiler, or no headers of Python; DeviceError where it cannot be kept.
        """
        if (built := self.built()) is not None:
            return built
        python = Path(sysconfig.get_path("include"))
        if not (python / "Python.h").exists():
            raise CompilerError(f"Python's headers are missing ({python}/Python.h): install python3-dev, or the like")
        target = lasting_folder() / self._name()
        ours = dict.fromkeys(header.parent for header in self.headers)
        folders = (Path(torch.__file__).parent / "include/torch/csrc/api/include", python, *ours)
        return compile_library(self.source, target, purpose=self.purpose, includes=folders, libraries=_LIBRARIES)

    def built(self) -> Path | None:
        """Where it lies; None if it has not been built."""
        target = cache_folder(create=False) / self._name()
        return target if is_complete(target) else None

    def load(self) -> ModuleType | None:
        """What has been built; None if nothing has, or it cannot be loaded."""
        target, name = self.built(), self.source.stem
        if target is None:
            return None
        try:
            loader = importlib.machinery.ExtensionFileLoader(name, str(target))
            spec = importlib.util.spec_from_file_location(name, str(target), loader=loader)
            assert spec is not None
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
        except (ImportError, OSError):
            return None
        return module

    def wanted(self) -> ModuleType | None:
        """As `load`, unless the user has said not to use any."""
        return None if _asked() == "0" else self.load()

    def _name(self) -> str:
        version = sys.implementation.cache_tag or sys.version
        return library_name(self.source, version + "".join(header.read_text() for header in self.headers))
