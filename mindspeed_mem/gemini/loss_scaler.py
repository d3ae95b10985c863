"""Loss scaling for types whose range is small: the scale grows while all goes well and shrinks when it does not.

Micikevicius et al., Mixed Precision Training (2018); hysteresis as in Megatron and ColossalAI.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(kw_only=True)
class LossScaler:
    """The scale of one optimizer, and its history."""

    scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    """Steps in a row without overflow after which the scale grows."""
    hysteresis: int = 2
    """Overflows between two growths, of which the last shrinks the scale, and every further one."""
    min_scale: float = 1.0
    max_scale: float = 2.0**32
    good_steps: int = 0
    """In a row."""
    overflows_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.overflows_left = self.hysteresis

    def problems(self) -> list[str]:
        """All that is wrong with it."""
        found = []
        for name, allowed in {
            "initial_scale": (self.scale, self.scale >= self.min_scale, f"at least min_scale={self.min_scale}"),
            "min_scale": (self.min_scale, self.min_scale > 0, "above 0"),
            "max_scale": (self.max_scale, self.max_scale >= self.scale, f"at least initial_scale={self.scale}"),
            "growth_factor": (self.growth_factor, self.growth_factor > 1, "above 1"),
            "backoff_factor": (self.backoff_factor, 0 < self.backoff_factor < 1, "between 0 and 1"),
            "growth_interval": (self.growth_interval, self.growth_interval >= 1, "at least 1"),
            "hysteresis": (self.hysteresis, self.hysteresis >= 1, "at least 1"),
        }.items():
            value, fits, wanted = allowed
            if not fits:
                found.append(f"{name} is {wanted}, not {value}")
        return found

    def update(self, overflow: bool) -> None:
        """A step is over; `overflow`: a gradient was not finite somewhere, and the step was skipped."""
        if overflow:
            self.good_steps = 0
            self.overflows_left -= 1
            if self.overflows_left <= 0:
                self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.good_steps, self.overflows_left = 0, self.hysteresis
            self.scale = min(self.scale * self.growth_factor, self.max_scale)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
