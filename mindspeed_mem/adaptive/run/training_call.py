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
    seq_length: int | None
    micro_batch_size: int | None
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
        return self._differs_in_sizes(other) and max(self._parts(other)) <= _ALIKE

    def outranks(self, other: Call) -> bool:
        """Whether this one is planned for rather than the other, where one has more tokens in a micro-batch, and one
        longer sequences: the former counts, so that sizes do not come after one another in a circle."""
        return self._differs_in_sizes(other) and self.size >= other.size

    def part(self, other: Call) -> float | None:
        """How much of this one a micro-batch of the other is: the less, the more differs its sequence length or the
        number of its tokens. None: it is larger, and not outranked."""
        parts = self._parts(other)
        if max(parts) > _ALIKE and other.size > self.size:
            return None
        return min(min(one, 1 / max(one, 1.0)) for one in parts)

    @property
    def size(self) -> tuple[int, int]:
        """Of a micro-batch: its tokens, and its sequence length; loops without a pipeline need not tell."""
        length = self.seq_length or 0
        return length * (self.micro_batch_size or 0), length

    def _parts(self, other: Call) -> list[float]:
        return [
            theirs / max(mine, 1) if theirs != mine else 1.0 for mine, theirs in zip(self.size, other.size, strict=True)
        ]

    def _differs_in_sizes(self, other: Call) -> bool:
        """At most, and in the number of micro-batches."""
        sizes = {name: getattr(self, name) for name in ("seq_length", "micro_batch_size", "micro_batches")}
        return other._replace(**sizes) == self


class Sizes:
    """Follows the calls of a training. Those that are as large as the one that is planned for, or profiled to be, the
    `aim`, are measured; smaller ones run beside."""

    def __init__(self) -> None:
        self.aim: Call | None = None
        self._last: Call | None = None
        self._part: float | None = None  # of the aim, the last call
        self._least = 1 / _ALIKE  # a part of the aim: smaller ones are not measured
        self._beside: list[float] = []  # the parts of the calls in a row that were not
        self._steady = 0  # calls in a row that are like the last

    def aim_at(self, call: Call) -> None:
        self.aim = call
        self._part = None if self._last is None else call.part(self._last)
        self._least, self._steady = 1 / _ALIKE, 0
        self._beside.clear()

    def begins(self, call: Call) -> None:
        """This call does."""
        last, self._last = self._last, call
        alike = last is not None and last.is_as_large(call) and call.is_as_large(last)
        self._steady = self._steady + 1 if alike else 1
        self.runs(call)

    def runs(self, call: Call | None) -> None:
        """One runs, or has run, that was this. None: one runs of which nobody knows that yet; it is measured."""
        if call is None:
            self._part = self._last = None
            return
        self._part = None if self.aim is None else self.aim.part(call)
        if self._part is None or self.is_measured:
            self._beside.clear()
            return
        self._beside.append(self._part)
        if len(self._beside) == _BESIDE:  # one as large as the aim is rare
            self._least = max(self._beside) / _ALIKE
            self._beside.clear()

    @property
    def is_measured(self) -> bool:
        """Whether the call that runs is."""
        return self._part is None or self._part >= self._least

    @property
    def has_shrunk(self) -> bool:
        """Smaller calls have come in a row that are alike."""
        return self._part is not None and self._part < 1 / _ALIKE and self._steady >= _BESIDE

    @property
    def has_left(self) -> bool:
        """So many smaller calls have come in a row that one as large as the aim may have been an exception."""
        return len(self._beside) >= _BACK
