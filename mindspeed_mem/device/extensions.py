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

from mindspeed_mem.device.native_build import CompilerError, cache_folder, compile_library, is_complete, library_name

VARIABLE = "MINDSPEED_MEM_NATIVE"
"""0: those that have been built are left aside."""
_LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python")


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

        Raises CompilerError where there is no compiler, or no headers of Python.
        """
        python = Path(sysconfig.get_path("include"))
        if not (python / "Python.h").exists():
            raise CompilerError(f"Python's headers are missing ({python}/Python.h): install python3-dev, or the like")
        target = cache_folder() / self._name()
        if not is_complete(target):
            ours = dict.fromkeys(header.parent for header in self.headers)
            folders = (Path(torch.__file__).parent / "include/torch/csrc/api/include", python, *ours)
            compile_library(self.source, target, purpose=self.purpose, includes=folders, libraries=_LIBRARIES)
        return target

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
        return None if os.environ.get(VARIABLE) == "0" else self.load()

    def _name(self) -> str:
        version = sys.implementation.cache_tag or sys.version
        return library_name(self.source, version + "".join(header.read_text() for header in self.headers))
