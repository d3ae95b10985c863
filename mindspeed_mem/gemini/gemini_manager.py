"""GeminiManager: where the chunks of one model rest, and the passes over them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_mem.gemini.chunk_manager import ChunkManager, Rest
from mindspeed_mem.gemini.launch import get_current_device
from mindspeed_mem.gemini.options import OptionError, refuse, refuse_unknown
from mindspeed_mem.zero.core import hooks
from mindspeed_mem.zero.core.gathering import Reading
from mindspeed_mem.zero.core.passes import PassesOverChunks
from mindspeed_mem.zero.core.placement import POLICIES, last_share
from mindspeed_mem.zero.plain.built_chunk import BuiltChunk


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


class GeminiManager:
    """Args:
        placement_policy: "device", "host", "static" or "auto"; "cuda", "npu" and "cpu" are synonyms of the first two.
        chunk_manager: holds the model's chunks.
        shard_param_frac, offload_optim_frac, offload_param_frac: of "static", see `PlacementPolicy`.
        gather_budget_mb: MiB of gathered parameters at once; None: what one module needs, and the next chunk.
        max_prefetch: how many chunks are gathered before they are used, as far as the budget allows.

    Raises OptionError with all that is wrong.
    """

    def __init__(
        self,
        placement_policy: str,
        chunk_manager: ChunkManager,
        *,
        shard_param_frac: float = 1.0,
        offload_optim_frac: float = 0.0,
        offload_param_frac: float = 0.0,
        gather_budget_mb: float | None = None,
        max_prefetch: int = 1,
        **unknown: Any,
    ) -> None:
        self.placement = PlacementPolicy(
            policy=placement_policy,
            shard_param_frac=shard_param_frac,
            offload_optim_frac=offload_optim_frac,
            offload_param_frac=offload_param_frac,
        )
        wrong = refuse_unknown("GeminiManager", unknown, GeminiManager.__init__) + self.placement.problems()
        if gather_budget_mb is not None and not (isinstance(gather_budget_mb, (int, float)) and gather_budget_mb > 0):
            wrong.append(f"gather_budget_mb is a number above 0 or None, not {gather_budget_mb!r}")
        if not isinstance(max_prefetch, int) or max_prefetch < 0:
            wrong.append(f"max_prefetch is a whole number of at least 0, not {max_prefetch!r}")
        refuse(wrong)
        self.chunk_manager = chunk_manager
        self.gathering = chunk_manager.gathering
        self.gathering.ahead = max_prefetch
        self._passes = PassesOverChunks(
            self.gathering, None if gather_budget_mb is None else int(gather_budget_mb * 2**20)
        )
        self._movable: list[BuiltChunk] = []
        self.in_pass = False

    @staticmethod
    def get_default_device(policy: str) -> torch.device:
        """The accelerator, or the CPU: where the chunks of any policy are gathered, wherever they rest."""
        refuse(PlacementPolicy(policy=policy).problems())
        return get_current_device()

    def build(self) -> None:
        """Build the chunks of all parameters appended, where the policy wants them."""
        manager, placement = self.chunk_manager, self.placement
        if POLICIES[placement.policy] == "auto" and not self._passes.measure(manager.backend, "placement auto"):
            placement = PlacementPolicy(policy="device")
        self._movable = manager.build(placement.place([plan.capacity for plan in manager.plan()]))

    def follow(self, module: torch.nn.Module) -> None:
        """Gather the chunks of `module` by what its modules use. Raises OptionError for a budget that is too small."""
        sharded = [one.chunk for one in self.chunk_manager.built.values() if one.sharded]
        if not sharded:
            return
        self._passes.allow(self.gathering.largest_use(hooks.uses(module)), sharded, _too_small)
        running: list[Reading] = []
        foreign = hooks.ForeignReads(self.gathering, running)
        hooks.attach(module, self.gathering, running=running, returned=foreign.returned)
        foreign.watch(module)

    # ---- passes

    def begin(self, key: Hashable, training: bool) -> None:
        """A pass of the kind `key` starts."""
        self._passes.begin(key, self._movable if training else None)
        self.in_pass = True

    def end(self, completed: bool) -> None:
        """It is over, or was broken off; nothing stays gathered."""
        if not self.in_pass:
            return
        self.in_pass = False
        self._passes.end(completed)


def _too_small(given: int, least: int, enough: int) -> OptionError:
    mib = 2**20
    return OptionError(
        f"gather_budget_mb={given / mib:g}: one module reads chunks of {least / mib:.3f} MiB at once; give at least "
        f"that ({enough / mib:.3f} to fetch the next chunk meanwhile), or smaller chunks (min_chunk_size_mb)"
    )
