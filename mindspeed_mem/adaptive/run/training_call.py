"""What a training call is, as far as a plan depends on it, and which of many sizes are planned for."""

from __future__ import annotations

from typing import NamedTuple

_ALIKE = 1.05
"""A size so many times as large is no other one."""
_BESIDE = 10
"""Calls of other sizes in a row, after which those of the size that is planned for are not waited for any more."""
_BACK = 3
"""Calls in a row that a plan serves which was settled on, after which a larger size that had come is given up."""


class Call(NamedTuple):
    """One training call."""

    stages: int
    virtual_stages: int
    group_size: int | None
    cap: int | None
    seq_length: int
    micro_batch_size: int
    micro_batches: int
    schedule: str = "1f1b"
    """``--pipeline-schedule``, where there is a pipeline."""
    split_backward: bool = False

    def serves(self, other: Call) -> bool:
        """Whether a plan that was made for this one is one for the other: nothing more is held at once there.

        That grows with the micro-batches until the pipeline is full; twice the stages, or a group, fill any. (In an
        order found by simulation it may be a pass more or less with any number: then eviction corrects the plan.)
        """
        if self.virtual_stages == 1 and self.schedule == "1f1b":
            full = self.stages
        else:
            full = 2 * max(self.stages, self.group_size or 1)
        return self.is_as_large(other) and min(other.micro_batches, full) <= self.micro_batches

    def is_as_large(self, other: Call) -> bool:
        """Whether micro-batches of the other are not larger, and all else is the same."""
        sizes = {name: getattr(self, name) for name in ("seq_length", "micro_batch_size", "micro_batches")}
        return other._replace(**sizes) == self and self.part(other) is not None

    def part(self, other: Call) -> float | None:
        """How large a micro-batch of the other is for one of this: by its tokens or its sequence length, whichever is
        less. None: it is larger, by either."""
        sizes = (
            (self.seq_length, other.seq_length),
            (self.seq_length * self.micro_batch_size, other.seq_length * other.micro_batch_size),
        )
        parts = [theirs / max(mine, 1) if theirs != mine else 1.0 for mine, theirs in sizes]
        return None if max(parts) > _ALIKE else min(parts)


class Sizes:
    """Follows the calls of a training. Those that are as large as the one that is planned for, or profiled to be, the
    `aim`, are measured; smaller ones run beside."""

    def __init__(self) -> None:
        self.aim: Call | None = None
        self.is_measured = True
        """The call that runs."""
        self._is_smaller = False
        self._least = 1 / _ALIKE  # a part of the aim: smaller ones are not measured
        self._beside: list[float] = []  # the parts of the calls in a row that were not
        self._steady = 0  # calls in a row that are like the last
        self._last: Call | None = None

    def aim_at(self, call: Call) -> None:
        self.aim, self.is_measured = call, True
        self._least, self._steady = 1 / _ALIKE, 0
        self._beside.clear()

    def begins(self, call: Call) -> None:
        """This call does."""
        last, self._last = self._last, call
        alike = last is not None and last.is_as_large(call) and call.is_as_large(last)
        self._steady = self._steady + 1 if alike else 1
        self.runs(call)

    def runs(self, call: Call) -> None:
        """One runs, or has run, that was this: whether it is measured."""
        part = self.aim.part(call) if self.aim is not None else None
        self._is_smaller = part is not None and part < 1 / _ALIKE
        self.is_measured = part is None or part >= self._least
        if part is None or self.is_measured:
            self._beside.clear()
            return
        self._beside.append(part)
        if len(self._beside) == _BESIDE:  # one as large as the aim is rare
            self._least = max(self._beside) / _ALIKE
            self._beside.clear()

    @property
    def has_shrunk(self) -> bool:
        """Smaller calls have come in a row that are alike."""
        return self._is_smaller and self._steady >= _BESIDE

    @property
    def has_left(self) -> bool:
        """So many smaller calls have come in a row that one as large as the aim may have been an exception."""
        return len(self._beside) >= _BACK
