"""What takes long says so on a terminal, in one line that goes away when it is done. Elsewhere nothing is shown."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator

__all__ = ["shown"]

_CLEAR = "\r\x1b[K"


@contextlib.contextmanager
def shown(what: str, usually: str = "") -> Iterator[None]:
    """Inside, a terminal that standard error is says what is being done, and for how many seconds.

    Args:
        what: such as "searching for a plan".
        usually: how long that takes, in words.
    """
    stream = sys.stderr
    if stream is None or stream.closed or not stream.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    began, over = time.monotonic(), threading.Event()

    def write(text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a terminal may go away: no reason to end what is done
            stream.write(text)
            stream.flush()

    def tell() -> None:
        line = f"mindspeed_mem: {what}, {time.monotonic() - began:.0f} s" + (f" ({usually})" if usually else "")
        write(_CLEAR + line[: shutil.get_terminal_size().columns - 1])

    def tick() -> None:
        while not over.wait(1):
            tell()

    tell()
    ticking = threading.Thread(target=tick, name="mindspeed_mem progress", daemon=True)
    ticking.start()
    try:
        yield
    finally:
        over.set()
        ticking.join()
        write(_CLEAR)
