"""What this package cannot do without, and what to say where that is missing.

This file and `__main__` are read before anything is known about the installation: no imports beyond the standard
library, and nothing that an older Python cannot parse.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PYTHON = (3, 10)
IMPORTED_AS = {"torch": "torch", "wrapt": "wrapt", "PyYAML": "yaml", "numpy": "numpy"}
"""What has to be installed to train, by the name that pip knows, with the name that is imported."""

COMPAT: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("compat.json").read_text(encoding="utf-8"))
"""What works on which megatron-core: by version, and in ``features`` by feature; made by `make compat`."""

TESTED = {"torch": ("2.13",), "megatron-core": tuple(COMPAT), "mindspeed": ("0.16.0",), "torch_npu": ()}
"""The versions that tests have run with, by their beginnings."""


def old_python() -> str | None:
    """Why this Python does not do, in a sentence; None if it does."""
    if sys.version_info >= PYTHON:
        return None
    needed = ".".join(map(str, PYTHON))
    return (
        f"this needs Python {needed} or newer, and runs on {platform.python_version()} ({sys.executable}); "
        f"install torch and this package into an environment of Python {needed} to 3.13 and start it with that"
    )


def compat(version: str | None) -> dict[str, str]:
    """By feature, what holds for it on this version of megatron-core; empty where no test has run with that."""
    return COMPAT.get(_released(version or ""), {}).get("features", {})


def _released(version: str) -> str:
    """Without what a build adds, as ``+cpu``: megatron-core 0.19 adds the commit of a checkout that it lies in."""
    return version.partition("+")[0]


def untested(versions: Mapping[str, str | None]) -> list[str]:
    """A sentence for each package whose version is another than the tests have run with, or unknown."""
    found = []
    for name, tested in TESTED.items():
        number = versions.get(name)
        if number is None or any((_released(number) + ".").startswith(one + ".") for one in tested):
            continue
        with_what = f"with {', '.join(tested)}, and patches may not do what they should" if tested else "with none"
        found.append(f"{name} {number} is untested: this version of mindspeed_mem was tested {with_what}")
    return found


def without_solver() -> str | None:
    """Why no plan can be searched, in words; None: one can be."""
    if importlib.util.find_spec("scipy") is not None:
        return None
    return "scipy, which solves for plans, is not installed: pip install scipy, or 'mindspeed-mem[adaptive]'"


def absent(*names: str) -> str | None:
    """Which of these packages, or of all that training needs, are not installed, in a sentence; None: none."""
    missing = [name for name in names or IMPORTED_AS if importlib.util.find_spec(IMPORTED_AS[name]) is None]
    if not missing:
        return None
    are = "is" if len(missing) == 1 else "are"
    return f"{', '.join(missing)} {are} not installed: {sys.executable} -m pip install {' '.join(missing)}"
