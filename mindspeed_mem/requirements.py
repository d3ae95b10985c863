"""What this package cannot do without, and what to say where that is missing.

This file and `__main__` are read before anything is known about the installation: no imports beyond the standard
library, and nothing that an older Python cannot parse.
"""

from __future__ import annotations

import importlib.util
import platform
import sys

PYTHON = (3, 10)
IMPORTED_AS = {"torch": "torch", "wrapt": "wrapt", "PyYAML": "yaml", "numpy": "numpy"}
"""What has to be installed to train, by the name that pip knows, with the name that is imported."""


def old_python() -> str | None:
    """Why this Python does not do, in a sentence; None if it does."""
    if sys.version_info >= PYTHON:
        return None
    needed = ".".join(map(str, PYTHON))
    return (
        f"this needs Python {needed} or newer, and runs on {platform.python_version()} ({sys.executable}); "
        f"install torch and this package into an environment of Python {needed}, 3.11 or 3.12 and start it with that"
    )


def absent(*names: str) -> str | None:
    """Which of these packages, or of all that training needs, are not installed, in a sentence; None: none."""
    missing = [name for name in names or IMPORTED_AS if importlib.util.find_spec(IMPORTED_AS[name]) is None]
    if not missing:
        return None
    are = "is" if len(missing) == 1 else "are"
    return f"{', '.join(missing)} {are} not installed: {sys.executable} -m pip install {' '.join(missing)}"
