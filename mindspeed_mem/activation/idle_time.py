"""swap_config.idle_prefetch: copies back of the backward that comes next begin when the pass before it has ended.

Between the two a pipeline stage may wait for its neighbours, and then nothing needs the link. So what is farther from
its backward than the plan's distance comes back there, in the order in which it will be needed, as far as there is
room: a backward then begins with no more on the device than an earlier one has begun with. From there on what was
brought back only gets less until the plan's own copies have caught up. Where the order of passes is not known, nothing
is done.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mindspeed_mem.activation.storage.ledger import LEDGER
from mindspeed_mem.activation.storage.records import HOST, key_of

if TYPE_CHECKING:
    from mindspeed_mem.activation.plan_in_force import PlanInForce
    from mindspeed_mem.activation.storage.micro_batch import MicroBatch
    from mindspeed_mem.activation.storage.mover import Mover

logger = logging.getLogger(__name__)


class IdleTime:
    """What is done with it on this rank."""

    def __init__(self, mover: Mover, in_force: PlanInForce):
        self._mover, self._in_force = mover, in_force
        self._following: MicroBatch | None = None
        self._most = 0
        """Bytes that were held when a backward of this plan began, at most: without what was brought back for it."""
        self._plan = in_force.plan
        self._said = False

    @property
    def used(self) -> bool:
        swap = self._in_force.config.swap
        return swap.swap and swap.idle_prefetch

    def pass_begins(self, following: MicroBatch | None) -> MicroBatch | None:
        """``following``: whose backward comes after the pass; returns it."""
        self._following = following if self.used else None
        return following

    def backward_begins(self) -> None:
        self._forget_other_plans()
        self._most = max(self._most, LEDGER.held.now)

    def pass_ended(self) -> None:
        """It has ended: nothing of it is alive but what waits for backward."""
        following, self._following = self._following, None
        if following is None:
            return
        self._forget_other_plans()
        staying = self._mover.staying
        later = staying.for_weights
        there = [one for one in following.those_moved() if one.state == HOST and key_of(one) not in later]
        there.sort(key=lambda record: (record.last_use + record.distance, record.last_use), reverse=True)
        # Gradients of weights come first, and what they are made from comes back for two of them at a time.
        between = sum(sorted((nbytes for _, _, nbytes in later), reverse=True)[:2]) + 2 * staying.largest_gradient
        room, wanted = self._most - LEDGER.held.now - between, []
        for record in there:
            room -= record.nbytes
            if room < 0:
                break
            wanted.append(record)
        self._mover.load(wanted)

    def _forget_other_plans(self) -> None:
        """Under an earlier plan, or before there was one, more may have been held."""
        if self._plan is not self._in_force.plan:
            self._plan, self._most = self._in_force.plan, 0

    def say_without(self) -> None:
        """There is no pipeline; said once."""
        if self.used and not self._said:
            self._said = True
            logger.warning("swap_config.idle_prefetch has no effect: without pipeline stages none idles")
