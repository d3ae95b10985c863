"""Layers that a plan names and of which nothing is ever seen, so that it has no effect on them: told once."""

from __future__ import annotations

from mindspeed_mem.activation import regions
from mindspeed_mem.activation.no_effect_log import NoEffectLog
from mindspeed_mem.activation.plan_in_force import PlanInForce
from mindspeed_mem.activation.second_runs import SecondRuns
from mindspeed_mem.activation.storage.micro_batch import MicroBatch

_ENOUGH = 10  # forwards without a schedule, or training steps of one: what has not run by then counts as never running


class NeverSeen:
    """Looks at the first forwards. Before enough have run it may be another model's turn, or a layer's that does not
    always run, or experts may have had no tokens."""

    def __init__(self, in_force: PlanInForce, second_runs: SecondRuns, no_effect: NoEffectLog):
        self._in_force, self._second_runs, self._no_effect = in_force, second_runs, no_effect
        self._ended = 0
        self.entered: set[int] | None = set()
        """The layers that have run, outside of others' checkpoints; None: nobody looks any more."""
        self._moved: set[int] = set()
        self._stayed = 0  # bytes

    def forward_ended(self, micro_batch: MicroBatch) -> None:
        """That of a plan that swaps."""
        staying, before = micro_batch.mover.staying, self._stayed
        self._stayed = staying.small_bytes + staying.no_room_bytes
        stays = micro_batch.stays or self._stayed > before  # for reasons that are told elsewhere
        self._moved |= self.entered or set() if stays else micro_batch.layers_of_those_moved()

    def alone_ended(self) -> None:
        """A forward without a schedule has."""
        if self._enough():
            self._second_runs.say_what_never_ran()
            self._tell(self._in_force.the_plan.layers_touched(), "forwards")

    def call_trained(self) -> None:
        """A schedule has completed a training step."""
        if self._in_force.plan is not None and self._enough():
            self._tell(self._in_force.plan.layers_touched() & regions.tagged_layers().keys(), "training steps")

    def _enough(self) -> bool:
        self._ended += 1
        return self.entered is not None and self._ended >= _ENOUGH

    def _tell(self, layers: set[int], ran: str) -> None:
        entered, self.entered = self.entered or set(), None
        why = f"nothing of it was seen in {_ENOUGH} {ran}: "
        for layer in layers - entered:
            how = "it does not run, or runs under another checkpoint, or is compiled as a whole"
            self._no_effect.add("the plan has no effect", layer, why + how)
        for layer in layers & entered - self._moved:
            for entry in sorted(self._in_force.the_plan.swap_entries(layer)):
                how = "backward keeps none of it, or it runs under another checkpoint"
                self._no_effect.add(f"{entry} has no effect", layer, why + how)
        self._no_effect.flush()
