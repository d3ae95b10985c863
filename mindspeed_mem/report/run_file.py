"""What a run says of itself for its page: `run.json` in the folder that --memory-report names, beside its traces."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import logging
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from mindspeed_mem import __version__, output, ranks
from mindspeed_mem.activation.figures import EngineFigures
from mindspeed_mem.report import page_data
from mindspeed_mem.zero.buffers.figures import ChunkFigures

logger = logging.getLogger(__name__)

PAGE = "index.html"
_PACKAGES = ("torch", "megatron-core", "mindspeed", "torch_npu")


class Warned(logging.Handler):
    """Keeps what this package warns of, most of it settings without effect."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.since = 0
        """When the run began, in nanoseconds since 1970."""

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


WARNED = Warned()
_unmade: dict[Path, None] = {}
"""Folders whose page is made when the process ends."""


def begin(folder: Path | None) -> None:
    """A run begins: its warnings are kept, and rank 0 takes away what an earlier one has left in the folder.

    None: nobody wants to know any more.
    """
    logger_of_all = logging.getLogger("mindspeed_mem")
    WARNED.lines.clear()
    WARNED.since = time.time_ns()
    if folder is None:
        logger_of_all.removeHandler(WARNED)
        return
    logger_of_all.addHandler(WARNED)
    if ranks.number() == 0:
        for pattern in (page_data.RUN, PAGE, "trace.rank*.json", "trace.rank*.pickle"):
            for file in folder.glob(pattern):
                with contextlib.suppress(OSError):
                    file.unlink()


def write(
    folder: Path,
    engines: Sequence[EngineFigures],
    chunks: Sequence[ChunkFigures],
    settings: Mapping[str, Any],
    notices: Sequence[str] = (),
    trace: Path | None = None,
) -> None:
    """Write `run.json`, and the page where what draws it is installed. What cannot be written is told.

    With several ranks the page is made when this process ends: reading their traces takes time, which the others would
    spend in their next collective.

    Args:
        engines, chunks: of all ranks.
        settings: flags with their values.
        notices: what was said of them at start.
        trace: where --memory-trace has them, without a rank, if that is not in the folder.
    """
    about = {
        "version": page_data.VERSION,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": _versions(),
        "settings": {flag: str(value) for flag, value in settings.items()},
        "notices": list(dict.fromkeys([*notices, *WARNED.lines])),
        "ranks": [dataclasses.asdict(one) for one in engines],
        "chunks": [dataclasses.asdict(one) for one in chunks],
        "began_ns": WARNED.since,
        "trace": None if trace is None or trace.parent.resolve() == folder.resolve() else str(trace.resolve()),
    }
    with _telling(folder):
        folder.mkdir(parents=True, exist_ok=True)
        output.write(folder / page_data.RUN, json.dumps(about, indent=1, default=str) + "\n")
        _unmade[folder.resolve()] = None
        atexit.register(make_pages)
        if ranks.count() == 1:
            make_pages()
        else:
            logger.info("--memory-report: what is known is in %s; the page follows when this process ends", folder)


def make_pages() -> None:
    """Make the pages of which `write` has written the rest."""
    atexit.unregister(make_pages)
    while _unmade:
        folder, _ = _unmade.popitem()
        with _telling(folder):
            logger.info("--memory-report: %s", _page(folder))


@contextlib.contextmanager
def _telling(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        logger.warning("--memory-report: nothing is written: %s: %s", error.filename or folder, error.strerror)


def _page(folder: Path) -> str:
    from mindspeed_mem.report import page

    if missing := page.missing():
        return f"what is known is in {folder}; {missing}, then python -m mindspeed_mem report {folder}"
    target = folder / PAGE
    try:
        output.write(target, page.page([page_data.read([folder])]))
    except OSError:
        raise
    except Exception as error:  # files of somebody else; and training has ended well, whatever it is
        return f"what is known is in {folder}, and no page of it: {error}"
    return str(target)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "mindspeed_mem": __version__}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
