"""What a run says of itself for its page: `run.json` in the folder that --memory-report names, beside its traces."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import platform
from collections.abc import Mapping, Sequence
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

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


WARNED = Warned()


def begin(folder: Path) -> None:
    """Keep warnings from now on; rank 0 takes away what an earlier run has left in the folder."""
    logging.getLogger("mindspeed_mem").addHandler(WARNED)
    if ranks.number() == 0:
        for pattern in (page_data.RUN, PAGE, "trace.rank*.json"):
            for file in folder.glob(pattern):
                with contextlib.suppress(OSError):
                    file.unlink()


def write(
    folder: Path,
    engines: Sequence[EngineFigures],
    chunks: Sequence[ChunkFigures],
    settings: Mapping[str, Any],
    notices: Sequence[str] = (),
) -> None:
    """Write `run.json`, and the page where what draws it is installed. What cannot be written is told.

    Args:
        engines, chunks: of all ranks.
        settings: flags with their values.
        notices: what was said of them at start.
    """
    about = {
        "version": page_data.VERSION,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": _versions(),
        "settings": {flag: str(value) for flag, value in settings.items()},
        "notices": list(dict.fromkeys([*notices, *WARNED.lines])),
        "ranks": [dataclasses.asdict(one) for one in engines],
        "chunks": [dataclasses.asdict(one) for one in chunks],
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        output.write(folder / page_data.RUN, json.dumps(about, indent=1, default=str) + "\n")
        logger.info("--memory-report: %s", _page(folder))
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
