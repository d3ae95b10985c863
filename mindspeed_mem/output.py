"""Files that we write: whether that is possible, known before the work; all of a file or nothing under its name. And
what others print, kept from where a program may read."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["save_figure", "silent", "why_not", "write"]


def why_not(target: str | os.PathLike[str]) -> str | None:
    """Why nothing can be written to `target`, in words; None if it can be. Leaves no trace."""
    path = Path(target)
    try:
        with contextlib.suppress(FileNotFoundError):
            path.stat()  # a name may be too long
        if path.is_dir():
            return f"{target} is a folder; name a file in it"
        if not path.parent.is_dir():
            return f"there is no folder {path.parent}"
        if not _is_device(target):
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        if path.is_file() and not os.access(path, os.W_OK):
            return f"{target} is write-protected"
    except OSError as error:
        return f"nothing can be written to {target}: {error.strerror}"
    return None


def write(target: str | os.PathLike[str], content: str | bytes) -> None:
    """Replace the file at once: whoever dies meanwhile, or fills the disk, leaves the earlier one.

    Raises OSError with the name of the file.
    """
    path = Path(os.path.realpath(target))  # a link stays one
    data = content.encode() if isinstance(content, str) else content
    try:
        if _is_device(target):
            with open(target, "ab") as file:
                file.write(data)
            return
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name[:100])
        try:
            with open(handle, "wb") as file:
                file.write(data)
            os.chmod(name, path.stat().st_mode if path.exists() else 0o644)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        error.filename, error.filename2 = os.fspath(target), None
        raise


def _is_device(target: str | os.PathLike[str]) -> bool:
    """Whether it is a terminal, a pipe or the like, or stands for what a process has open (``/dev/stdout``)."""
    path = Path(target)
    return path.is_relative_to("/dev") or (path.exists() and not path.is_file())


def save_figure(figure: Any, target: str | os.PathLike[str]) -> None:
    """Write a picture of matplotlib, in the format that the name ends in."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format=Path(target).suffix[1:].lower())
    write(target, picture.getvalue())


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Without what HiGHS prints from C++, whatever its options: our output may be read by a program."""
    if sys.stdout is not None:
        sys.stdout.flush()
    c = ctypes.CDLL(None)
    c.fflush(None)
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        c.fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
