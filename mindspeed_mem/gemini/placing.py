"""Where each chunk's parts rest: the placement policy of this API, with the names it had over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_mem.zero.core.placement import POLICIES, last_share


@dataclass(frozen=True)
class Rest:
    """Where one chunk rests."""

    sharded: bool = True
    """Whether each rank keeps only its part of the parameters."""
    parameters_on_host: bool = False
    optimizer_on_host: bool = False
    """Masters, moments and reduced gradients."""


@dataclass(frozen=True, kw_only=True)
class PlacementPolicy:
    """One of `POLICIES`, and the fractions of ``static``, of all elements."""

    policy: str = "static"
    shard_param_frac: float = 1.0
    """Sharded parameters; the others are whole on every rank."""
    offload_optim_frac: float = 0.0
    """Optimizer states on the host."""
    offload_param_frac: float = 0.0
    """Parameters whose shards are on the host."""

    def problems(self) -> list[str]:
        """All that is wrong with it."""
        found = []
        if self.policy not in POLICIES:
            found.append(f"placement_policy is one of {', '.join(POLICIES)}, not {self.policy!r}")
        for name in ("shard_param_frac", "offload_optim_frac", "offload_param_frac"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
                found.append(f"{name} is a fraction from 0 to 1, not {value!r}")
            elif POLICIES.get(self.policy) != "static" and value != type(self).__dataclass_fields__[name].default:
                found.append(f"{name}={value} has a meaning with placement_policy='static' only, not {self.policy!r}")
        if not found and self.offload_param_frac > self.shard_param_frac:
            found.append(
                f"offload_param_frac={self.offload_param_frac} is more than shard_param_frac={self.shard_param_frac}: "
                "only shards rest on the host"
            )
        return found

    @property
    def auto(self) -> bool:
        return POLICIES[self.policy] == "auto"

    def place(self, sizes: Sequence[int]) -> list[Rest]:
        """Where chunks of `sizes` (elements), in the order of use, rest. ``auto`` starts on the host."""
        policy = POLICIES[self.policy]
        if policy != "static":
            on_host = policy != "device"
            return [Rest(True, on_host, on_host)] * len(sizes)
        shares = self.shard_param_frac, self.offload_param_frac, self.offload_optim_frac
        columns = [last_share(sizes, share) for share in shares]
        # An offloaded chunk is sharded, even where rounding to whole chunks has said otherwise.
        return [Rest(shard or param, param, optim) for shard, param, optim in zip(*columns, strict=True)]
