"""Says once when the first call of a schedule begins, and once when the first training step's forward and backward are
done.

By then all packs have patched, so that it can be verified whose patches are still reached.
"""

from __future__ import annotations

from collections.abc import Callable

from mindspeed_mem.passes import Listener, Precedence, ScheduleCall
from mindspeed_mem.patching import join

_waiting: list[Callable[[], None]] = []
_before: list[Callable[[], None]] = []


def after(callback: Callable[[], None]) -> None:
    """Have `callback` called once, on every rank, after the next training step; a second request is the same one."""
    if callback not in _waiting:
        _waiting.append(callback)


def before(callback: Callable[[], None]) -> None:
    """Have `callback` called once, on every rank, before anything of ours follows the next call of a schedule. Takes
    the place of an earlier one."""
    _before[:] = [callback]


def forget() -> None:
    """Whoever waits is not called any more."""
    _waiting.clear()
    _before.clear()


class FirstStep(Listener):
    precedence = Precedence.FIRST_STEP

    def begin_call(self, call: ScheduleCall) -> None:
        callbacks, _before[:] = _before[:], []
        for callback in callbacks:
            callback()

    def end_call(self, call: ScheduleCall, completed: bool) -> None:
        if _waiting and completed and not call.forward_only:
            callbacks, _waiting[:] = _waiting[:], []
            for callback in callbacks:
                callback()


join("mindspeed_mem.passes:LISTENERS", FirstStep(), declared_by=__name__)
