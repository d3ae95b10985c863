"""Which part of a model lies on which pipeline stage, and so who sends what to whom.

A model of P stages with V virtual stages has P * V parts, in the order in which a micro-batch runs through them.
Megatron lays them in a circle: chunk c of stage p is part c * P + p. In a V, which needs two virtual stages, the second
half comes back: chunk 1 of stage p is part 2 P - 1 - p. The first part and the last, the embedding and the loss, then
lie on stage 0, and the turn between both halves is within the last stage. (Qi et al., Pipeline Parallelism with
Controllable Memory, 2024.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed_mem.passes import BACKWARD, FORWARD

Line = tuple[str, int, int]
"""Direction, sending stage, receiving stage."""


@dataclass(frozen=True)
class Placement:
    """Where the parts of a model lie. Stages, chunks and parts count from 0."""

    stages: int
    virtual_stages: int = 1
    v: bool = False
    """The second of two chunks lies the other way round."""

    @property
    def parts(self) -> int:
        return self.stages * self.virtual_stages

    def part(self, stage: int, chunk: int) -> int:
        """The part that is this chunk of this stage."""
        return (chunk + 1) * self.stages - 1 - stage if self.v and chunk else chunk * self.stages + stage

    def place(self, part: int) -> tuple[int, int]:
        """The stage and the chunk that this part is."""
        chunk, stage = divmod(part, self.stages)
        return (self.stages - 1 - stage if self.v and chunk else stage), chunk

    def lines(self) -> Iterator[Line]:
        """What stages send each other, each line once, the same order everywhere."""
        for direction, step in ((FORWARD, 1), (BACKWARD, -1)):
            ends = [(self.place(part)[0], self.place(part + step)[0]) for part in self._senders(step)]
            for sender, receiver in sorted(set(ends)):
                if sender != receiver:
                    yield direction, sender, receiver

    def _senders(self, step: int) -> range:
        return range(self.parts - 1) if step > 0 else range(1, self.parts)
