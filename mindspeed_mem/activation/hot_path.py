"""The engine's hot path in C++, where that has been built: what it does around each operator and for each saved tensor.

    python -m mindspeed_mem build-native           # once for each torch and Python; needs a C++ compiler
    MINDSPEED_MEM_NATIVE=0                         # leaves it aside

It works on the engine's own objects in Python and does the same as their methods; what is out of the ordinary goes on
there. taking_over.py says which methods these are.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from mindspeed_mem.device import native_build
from mindspeed_mem.device.extensions import Extension

_SOURCES = Path(__file__).parent / "csrc"
EXTENSION = Extension(
    _SOURCES / "hot_path.cpp",
    "the engine's hot path",
    (native_build.SOURCES / "fast_tensors.h", *sorted(_SOURCES.glob("*.h"))),
)

native: ModuleType | None = None
"""The one in use; None: Python's own methods are. Whoever calls it looks it up here."""
