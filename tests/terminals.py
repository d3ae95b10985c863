"""A terminal as standard error."""

from __future__ import annotations

import contextlib
import os
import pty
import sys
import threading
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def terminal(columns: int = 200, kind: str = "xterm") -> Iterator[list[str]]:
    """Inside, standard error is one; afterwards the list has all that was written to it."""
    reading, writing = pty.openpty()
    got: list[bytes] = []
    found: list[str] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # nobody writes any more
            while part := os.read(reading, 4096):
                got.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(writing, "w") as stream, mock.patch.dict(os.environ, TERM=kind, COLUMNS=str(columns)):
        before, sys.stderr = sys.stderr, stream
        try:
            yield found
        finally:
            sys.stderr = before
    reader.join()
    os.close(reading)
    found.append(b"".join(got).decode())
