"""Whether a step may run out of device memory, as far as the steps before it tell: only then it has to be guarded.

What tells is the peak of allocated bytes, the lacks that were seen, and the times that the allocator had to give back
what it kept (`Backend.allocation_retries`): memory in pieces runs out before its bytes do. They tell nothing of a step
whose model is given more than ever before, or that begins with more memory in use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindspeed_mem.device import Backend

_UNKNOWN = 3  # parts of steps of which nobody can tell yet whether memory becomes tight in them
_TIGHT = 0.1  # of the device's memory: with less left at the peak, the next step may lack some
_CALM = 20  # parts of steps in a row without a lack, after which the next are taken to be like them
_CALM_PLANNED = 4  # the same under a plan made for this memory
_ALMOST = 0.015  # of the device's memory: what has to be left at the peak even then


class GuardPolicy:
    """Watches the parts of steps (forwards and backwards of one; its optimizer) of one process.

    Attributes:
        varies: the same step may take another amount of memory next time (experts get other tokens).
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.varies = False
        self._parts = self._calm = self._highest = 0
        self._running = 1
        self._lacked = False
        self._calm_after = _CALM
        self._retries: int | None = None  # of the allocator, when last looked at
        self._given: dict[tuple[str, bool], tuple[int, ...]] = {}  # the most that models were given; see `outgrown`
        self._in_use = 0  # at most, when a part began

    def forget(self, planned: bool = False) -> None:
        """Steps from now on are of another kind; ``planned``: they should fit."""
        self._backend.reset_peak()
        self._calm_after = _CALM_PLANNED if planned else _CALM
        self._parts = self._calm = self._highest = 0
        self._lacked = False
        self._given.clear()  # peaks that are forgotten tell nothing of steps that are given as much

    def note_peak(self, nbytes: int | None = None) -> None:
        """Device memory has been at this peak (None: at the backend's, which somebody is about to reset)."""
        self._highest = max(self._highest, (self._backend.peak() if nbytes is None else nbytes) or 0)

    def outgrown(self, *sizes: int, keeps: bool = True, told_by: str = "") -> bool:
        """In one part models are given this much so far, in each of these measures (their elements, the longest
        dimension, what is held at once); whether any is more than ever before. ``keeps``: for a backward. ``told_by``:
        who measures. Its first is not: nothing is known by then."""
        key, first = (told_by, keeps), all(told_by != by for by, _ in self._given)
        before = self._given.get(key, (0,) * len(sizes))
        self._given[key] = tuple(map(max, before, sizes))
        return not first and self._given[key] != before

    @property
    def is_first(self) -> bool:
        """What runs began first, of those that tell anything: nothing is more than ever yet."""
        return self._parts == self._running

    def begins(self, parts: int = 1, outgrown: bool = False) -> bool:
        """A part begins, or several at once; whether memory may run out in it. ``outgrown``: of what they are given."""
        unknown = self._parts < _UNKNOWN
        self._parts, self._running = self._parts + parts, parts
        if self._retries is None:
            self._retries = self._backend.allocation_retries()
        limit, room, in_use = self._backend.limit(), self._backend.room(), self._backend.allocated() or 0
        if limit is None or room is None:
            return self._lacked or outgrown
        if in_use > self._in_use + _ALMOST * limit:  # a larger model, or another optimizer
            self._in_use, outgrown = in_use, True
        left = room - (self._highest - in_use)
        if self._calm >= self._calm_after and not self.varies and not outgrown:
            return left < _ALMOST * limit
        return self._lacked or unknown or outgrown or left < _TIGHT * limit

    def ends(self, lacked: bool) -> None:
        """It has ended, with or without a lack of memory; a retry of the allocator since the last end is one, too."""
        before, self._retries = self._retries, self._backend.allocation_retries()
        lacked |= before is not None and self._retries > before
        self._lacked |= lacked
        self._calm = 0 if lacked else self._calm + self._running
        self.note_peak()  # who trains may reset the backend's
