"""Log lines of this package: information on rank 0, warnings on every rank. The root logger is never touched."""

from __future__ import annotations

import logging
import os

VARIABLE = "MINDSPEED_MEM_LOG"
LEVELS = ("debug", "info", "warning", "error")


def set_up(rank: int) -> None:
    """Let the loggers of this package speak, on standard error where the application has set up no handler of its own.

    The environment variable MINDSPEED_MEM_LOG (debug, info, warning or error) sets the level for rank 0; the others
    print warnings at most. Raises ValueError for another value. Idempotent.
    """
    wanted = os.environ.get(VARIABLE, "").strip().lower() or "info"
    if wanted not in LEVELS:
        raise ValueError(f"{VARIABLE}: got {wanted!r}; allowed: {', '.join(LEVELS)}")
    level = getattr(logging, wanted.upper())
    logger = logging.getLogger("mindspeed_mem")
    logger.setLevel(level if rank == 0 else max(level, logging.WARNING))
    if not any(isinstance(handler, _Fallback) for handler in logger.handlers):
        handler = _Fallback()
        handler.setFormatter(_Formatter())
        logger.addHandler(handler)


class _Fallback(logging.StreamHandler):
    """Silent where the root logger has handlers, which get every record as well."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


class _Formatter(logging.Formatter):
    """Information as it is, for it is made to be read and compared; the rest says what it is and whose."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno <= logging.INFO else f"{record.levelname} mindspeed_mem: {text}"
