"""What a parallel optimizer tells about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Who does how much. Bytes of a parameter are those of what is updated: its fp32 master if there is one."""

    mode: str
    parameters: int
    """Tensors that are trained."""
    bytes_by_rank: tuple[int, ...]
    """Parameter bytes that each rank updates; optimizer states are in proportion."""
    balance: float
    """The largest of these over their mean: 1 is perfect."""
    messages: int
    """All-gathers of a step."""
    sent_bytes: int
    """What each rank puts into them, padding included."""
    state_bytes: int
    """Optimizer states that this rank holds now, with the masters; before the first step often none."""

    def __str__(self) -> str:
        most, mean = max(self.bytes_by_rank), sum(self.bytes_by_rank) / len(self.bytes_by_rank)
        return (
            f"{self.mode} of {self.parameters} parameters over {len(self.bytes_by_rank)} ranks: a rank updates "
            f"{mean / 2**20:.2f} MiB of them in the mean and {most / 2**20:.2f} at most (balance {self.balance:.3f}), "
            f"and sends {self.sent_bytes / 2**20:.2f} MiB a step (all-gathers: {self.messages})"
        )
