"""Compiles the package's C++ sources on demand, with the user's own compiler against the user's own torch.

Nothing is compiled at installation: what is built lies in the user's cache folder, under a name that tells for which
torch, and is built once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from mindspeed_mem import progress
from mindspeed_mem.device.base import DeviceError

SOURCES = Path(__file__).parent / "csrc"


class CompilerError(DeviceError):
    """A C++ source cannot be compiled here: there is no compiler, or it refuses. The message says which."""


def library_name(source: Path, version: str = "") -> str:
    """The file name of what `source` becomes: another torch, C++ ABI, source or `version` has another name."""
    abi = int(torch.compiled_with_cxx11_abi())
    content = hashlib.sha256(source.read_bytes() + version.encode()).hexdigest()[:12]
    return f"{source.stem}-torch{torch.__version__}-abi{abi}-{content}.so"


def find_compiler() -> str | None:
    """The C++ compiler: the one that CXX names, or the first of the usual ones."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)


def compile_library(
    source: Path,
    target: Path,
    *,
    purpose: str,
    includes: Iterable[Path] = (),
    libraries: Iterable[str] = ("c10",),
    flags: Iterable[str] = (),
) -> Path:
    """Compile `source` into the shared library `target` against torch's headers; returns `target`.

    Args:
        purpose: what needs it, for messages.
        includes: folders with headers besides torch's.
        libraries: what to link with, without "lib".
        flags: what else the compiler gets.

    Raises CompilerError when there is no compiler, or when it refuses: with what it said.
    """
    compiler = find_compiler()
    if compiler is None:
        raise CompilerError(
            f"{purpose} needs a C++ compiler (g++ or clang++), and none is on the PATH: install one, or set CXX to it"
        )
    base = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = [compiler, str(source), "-O2", "-std=c++20", "-shared", "-fPIC", abi, *flags]
    command += [f"-I{folder}" for folder in (base / "include", *includes)]
    command += [f"-L{base / 'lib'}", *(f"-l{name}" for name in libraries)]
    # Several ranks may compile at once: each under a name of its own, and the last rename wins.
    handle, name = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        with progress.shown(f"compiling {source.name} for {purpose}", "up to a minute"):
            done = subprocess.run([*command, "-o", name], capture_output=True, text=True)
        if done.returncode != 0:
            said = done.stderr.strip() or f"it ended with status {done.returncode}, and said nothing"
            shown = said if len(said) <= 3000 else f"{said[:2000]}\n...\n{said[-1000:]}"
            raise CompilerError(f"{compiler} cannot compile {source.name}: {shown}")
        if not is_complete(Path(name)):
            raise CompilerError(f"{compiler} made no whole library of {source.name}, and said nothing of it")
        os.chmod(name, 0o755)  # who trains may be another user than who builds
        os.replace(name, target)
    finally:
        if os.path.exists(name):
            os.unlink(name)
    return target


def is_complete(library: Path) -> bool:
    """Whether a library is there and as long as its header says: loading part of one may end the process."""
    try:
        size = library.stat().st_size
        with open(library, "rb") as file:
            header = file.read(64)
    except OSError:
        return False
    if header[:5] != b"\x7fELF\x02":  # only Linux's of 64 bits say how long they are
        return sys.platform != "linux" and size > 0
    if len(header) < 64:
        return False
    sections, entry, count = int.from_bytes(header[40:48], sys.byteorder), header[58:60], header[60:62]
    return size >= sections + int.from_bytes(entry, sys.byteorder) * int.from_bytes(count, sys.byteorder)


def cache_folder(create: bool = True) -> Path:
    """A folder of this user that can be written to; where there is none, one that is new each time.

    With `create=False` nothing is made: the folder may be missing.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mindspeed_mem"
    except RuntimeError:  # a container's user without a name, and no HOME
        folder = Path(os.devnull, "mindspeed_mem")  # where nothing can be
    if not create or _can_be_written(folder):
        return folder
    return Path(tempfile.mkdtemp(prefix="mindspeed_mem"))


def lasting_folder() -> Path:
    """`cache_folder` for what later processes look for. Raises DeviceError where nothing can be written to it."""
    folder = cache_folder(create=False)
    if not _can_be_written(folder):
        raise DeviceError(
            f"nothing can be written to {folder}, where what has been built is looked for: set XDG_CACHE_HOME, here "
            "and where you train, to a folder that can be written to"
        )
    return folder


def _can_be_written(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
