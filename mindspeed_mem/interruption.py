"""Ctrl-C ends a job with one line for each rank, whatever it was doing."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

__all__ = ["STATUS", "in_one_line"]

STATUS = 128 + signal.SIGINT
"""The exit status, as shells have it."""
_LATER = 0.01  # seconds


@contextlib.contextmanager
def in_one_line(who: str) -> Iterator[None]:
    """Run the body; where SIGINT ends it, say so in one line and exit with status 130.

    What the body does about KeyboardInterrupt is left to it: only what it lets through is told shortly. That includes
    errors that an interrupted rank meets because others have ended before it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    watched = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    earlier, sys.unraisablehook = sys.unraisablehook, _again
    try:
        yield
    except BaseException as error:
        pending = False
        try:  # torchrun sends it a second time
            if watched and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
        except KeyboardInterrupt:  # it had come, but not yet been raised
            pending = True
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if not pending and not _came_of_it(error):
            if watched and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.unraisablehook = earlier
            raise
        place = f" on rank {os.environ['RANK']}" if "RANK" in os.environ else ""
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            os.write(2, f"{who}: interrupted{place}\n".encode())  # whole lines, from all ranks at once
        raise SystemExit(STATUS) from None
    sys.unraisablehook = earlier


def _again(unraisable: sys.UnraisableHookArgs) -> None:
    """KeyboardInterrupt came up in a destructor or a callback, which lets nothing through: raise it once more."""
    if unraisable.exc_type is KeyboardInterrupt:
        main = threading.main_thread().ident  # a sleep there ends only with a signal of its own
        threading.Timer(_LATER, signal.pthread_kill, [main, signal.SIGINT]).start()
    else:
        sys.__unraisablehook__(unraisable)


def _came_of_it(error: BaseException | None) -> bool:
    """Whether it is KeyboardInterrupt, or what was raised while that unwound."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = None if isinstance(error, SystemExit) else error.__context__
    return error is not None
