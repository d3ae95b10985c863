"""What the doctor finds: versions, devices, what makes results better, and whether each patch can be applied here."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import platform
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from mindspeed_mem import __version__, requirements
from mindspeed_mem.activation import hot_path
from mindspeed_mem.device import available_backends, device_names, get_backend, native_build
from mindspeed_mem.experimental import delegating
from mindspeed_mem.features import FEATURES, too_old
from mindspeed_mem.megatron_adaptor import patch_modules
from mindspeed_mem.patching import REGISTRY, Patch, upstream

PACKAGES = ("torch", "torch_npu", "megatron-core", "mindspeed", "wrapt", "PyYAML")
_MODULES = {"megatron-core": "megatron.core", "PyYAML": "yaml"}
"""Of packages that are imported by another name."""
REQUIRED = {"torch", "megatron-core", "wrapt", "PyYAML"}
GROUPS = ("cpu_*", "sdpa_*", "activation_*", "*")  # in the adaptor's order: repairs before megatron is imported


def examine() -> dict[str, Any]:
    """Everything the doctor knows, as plain data: versions, devices, optional parts, patches and problems.

    Of an optional part: what was found, or None, and then what its absence costs. Applies all patches: only for a fresh
    process.
    """
    _be_quiet()
    devices, optional = _devices(), _optional()  # before the patches for cpu change what torch.cuda says
    patches = _patches()
    versions: dict[str, str | None] = {"python": platform.python_version(), "mindspeed_mem": __version__}
    versions |= {name: _version(name) for name in PACKAGES}  # megatron is imported by now, and had to come after them
    problems = [f"{name} is not installed" for name in PACKAGES if name in REQUIRED and versions[name] is None]
    problems += [f"{p['file']}: {p['target']}: {'; '.join([p['status'], *p['notes']])}" for p in patches if p["wrong"]]
    found = {"versions": versions, "untested": requirements.untested(versions), "devices": devices}
    found["features"] = requirements.compat(versions["megatron-core"])
    return {**found, "optional": optional, "patches": patches, "problems": problems}


def _be_quiet() -> None:
    logging.disable(logging.WARNING)  # drift is in the table
    warnings.simplefilter("ignore")


def _version(name: str) -> str | None:
    """What is imported says it itself, which counts where PYTHONPATH hides what is installed; None: it is not there."""
    module = _MODULES.get(name, name)
    loaded = getattr(sys.modules.get(module), "__version__", None)
    if loaded is not None:
        return str(loaded)
    try:
        return version(name)
    except PackageNotFoundError:
        pass
    try:
        return str(getattr(importlib.import_module(module), "__version__", "unknown"))
    except ModuleNotFoundError as error:
        return None if error.name and module.startswith(error.name) else "unknown"
    except Exception:  # whatever a foreign module raises: its patches say it
        return "unknown"


def _devices() -> list[dict[str, Any]]:
    found = []
    for name in filter(available_backends().__contains__, device_names()):
        entry = {"device": name, "chosen": get_backend().type == name}
        if not get_backend(name).is_host:
            module = torch.get_device_module(name)
            entry["names"] = [module.get_device_name(i) for i in range(module.device_count())]
        found.append(entry)
    return found


def _optional() -> list[dict[str, str | None]]:
    library, hot = delegating.available(), hot_path.EXTENSION.built()
    parts = (
        ("scipy", _version("scipy"), "nothing can be planned (mindspeed-mem[adaptive])"),
        ("matplotlib", _version("matplotlib"), "no pictures (mindspeed-mem[picture])"),
        (
            "C++ compiler",
            native_build.find_compiler(),
            "no limited CPU memory, and the allocator below cannot be built",
        ),
        (
            "delegating allocator",
            None if library is None else str(library),
            "--survive-oom cannot make room inside compiled code (optional: python -m mindspeed_mem build-allocator)",
        ),
        (
            "hot path in C++",
            None if hot is None else str(hot),
            "more of the host's time is taken, which matters for small layers (python -m mindspeed_mem build-native)",
        ),
    )
    return [{"name": name, "found": found, "without": without} for name, found, without in parts]


def _patches() -> list[dict[str, Any]]:
    """Apply everything, import what the patches wait for, and look at each symbol."""
    refused = {name for one in FEATURES if too_old(one) for name in patch_modules(one.patches)}
    modules = patch_modules(GROUPS)
    for module in modules:
        importlib.import_module(module)
    modules = [name for name in modules if name not in refused]
    if all(importlib.util.find_spec(name) for name in ("mindspeed", "torch_npu")):
        importlib.import_module("mindspeed_mem.patches.mindspeed_features").join()
    REGISTRY.apply(modules, keep_going=True)
    missing = {}
    for name in dict.fromkeys(patch.module for patch in REGISTRY.of(modules)):
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a foreign module raises is a finding
            missing[name] = error
    return [_row(patch, missing.get(patch.module)) for patch in REGISTRY.of(modules)]


def write_hashes() -> None:
    """Write into the table (upstream.json) what the installed packages have where we patch. For a fresh process."""
    _be_quiet()
    _patches()
    upstream.write(REGISTRY.originals(), upstream.TABLE)


def _row(patch: Patch, error: Exception | None) -> dict[str, Any]:
    status, notes = patch.verify(), list(patch.notes)
    wrong = status.startswith(("FAILED", "LOST"))
    if status == "waiting" and error is not None:
        reason, wrong = _why_waiting(patch, error)
        notes.append(reason)
    return {
        "file": f"patches/{patch.declared_by.rpartition('.')[2]}.py",
        "target": patch.target,
        "status": status,
        "notes": notes,
        "wrong": wrong,
    }


def _why_waiting(patch: Patch, error: Exception) -> tuple[str, bool]:
    """The reason in words, and whether that is wrong: what is not installed need not be patched."""
    if isinstance(error, ModuleNotFoundError) and error.name and patch.module.startswith(error.name):
        absent = error.name
        top = ".".join(patch.module.split(".")[:2]) if patch.module.startswith("megatron.") else absent
        if absent == top or "." not in absent:
            return f"{absent} is not installed", False
        return f"there is no module {absent} in the installed version", not patch.optional
    wrong = not (patch.optional and isinstance(error, ModuleNotFoundError))
    return f"{patch.module} cannot be imported: {type(error).__name__}: {error}", wrong
