"""GeminiManager: where the chunks of one model rest, and the passes over them."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any

import torch

from mindspeed_mem.chunk import hooks
from mindspeed_mem.chunk.auto import AutoPlacement
from mindspeed_mem.gemini.built_chunk import BuiltChunk
from mindspeed_mem.gemini.chunk_manager import ChunkManager
from mindspeed_mem.gemini.launch import get_current_device
from mindspeed_mem.gemini.options import refuse, refuse_unknown
from mindspeed_mem.gemini.placing import PlacementPolicy
from mindspeed_mem.gemini.reads import ForeignReads

logger = logging.getLogger(__name__)


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
        self.residency = chunk_manager.residency
        self.residency.ahead = max_prefetch
        self._budget = None if gather_budget_mb is None else int(gather_budget_mb * 2**20)
        self._auto: AutoPlacement | None = None
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
        auto = placement.auto
        if auto and (manager.backend.limit() is None or manager.backend.peak() is None):
            logger.warning("placement auto: this device does not say how much memory it has; all stays on it")
            placement, auto = PlacementPolicy(policy="device"), False
        self._movable = manager.build(placement.place([plan.capacity for plan in manager.plan()]))
        if auto:
            self._auto = AutoPlacement(manager.backend, self.residency, self._budget is None)

    def follow(self, module: torch.nn.Module) -> None:
        """Gather the chunks of `module` by what its modules use. Raises OptionError for a budget that is too small."""
        sharded = [one.chunk for one in self.chunk_manager.built.values() if one.sharded]
        if not sharded:
            return
        least = self.residency.largest_use(hooks.uses(module))
        enough = least + max(chunk.nbytes for chunk in sharded)
        if self._budget is not None and self._budget < least:
            mib = 2**20
            refuse(
                [
                    f"gather_budget_mb={self._budget / mib:g}: one module reads chunks of {least / mib:.3f} MiB at "
                    f"once; give at least that ({enough / mib:.3f} to fetch the next chunk meanwhile), or smaller "
                    "chunks (min_chunk_size_mb)"
                ]
            )
        self.residency.budget = enough if self._budget is None else self._budget
        running: list = []
        hooks.attach(module, self.residency, running=running)
        ForeignReads(self.residency, running).watch(module)

    # ---- passes

    def begin(self, key: Hashable, training: bool) -> None:
        """A pass of the kind `key` starts."""
        if self._auto is not None and training:
            self._auto.begin_pass([_Movable(one) for one in self._movable])
        self.residency.begin(key)
        self.in_pass = True

    def end(self, completed: bool) -> None:
        """It is over, or was broken off; nothing stays gathered."""
        if not self.in_pass:
            return
        self.in_pass = False
        self.residency.end(completed)
        if self._auto is not None:
            self._auto.end_pass(completed)


class _Movable:
    """What `AutoPlacement` may bring to the device."""

    def __init__(self, one: BuiltChunk) -> None:
        self._one, self.nbytes = one, one.nbytes_on_device

    def to_device(self) -> None:
        self._one.to_device()
