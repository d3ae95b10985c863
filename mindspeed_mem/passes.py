"""The passes of a pipeline schedule, and who is told of them.

A pass is the forward or the backward of one micro-batch through one model chunk; a call of a schedule runs those of one
training step, or of an evaluation. `mindspeed_mem.patches.pass_events` makes events of both for the listeners here.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

FORWARD, BACKWARD = "forward", "backward"
WEIGHT = "weight"
"""The third kind of pass, where the backward is split: it computes the gradients of weights that it has put off."""
Pass = tuple[str, int | None, int]
"""Direction, micro-batch, model chunk; the micro-batch is None where no schedule numbers them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ScheduleCall:
    """One call of a schedule on this rank."""

    schedule: str
    """The name of Megatron's function."""
    models: Sequence[nn.Module]
    """This stage's model chunks, as they were given."""
    micro_batches: int
    seq_length: int | None
    micro_batch_size: int | None
    forward_only: bool
    stage: int
    stages: int
    pipeline: Any
    """The process group of these stages; None: there is no pipeline."""
    virtual_stages: int
    group_size: int | None
    """Micro-batches that run on a model chunk in a row; None: that of the schedule."""
    cap: int | None
    """Passes whose activations a stage may hold."""
    passes: Callable[[], Sequence[Pass] | None]
    """Tells the order of this stage's forwards and backwards; None where it is not known beforehand."""
    arguments: Mapping[str, Any]
    """All that the schedule is called with."""

    @property
    def kind(self) -> tuple:
        """What the order of passes and their shapes depend on."""
        order = self.schedule, self.virtual_stages, self.group_size, self.micro_batches, self.cap, self.forward_only
        return *order, self.seq_length, self.micro_batch_size


Run = Callable[[ScheduleCall], Any]


class Precedence(enum.IntEnum):
    """Where a listener stands, the outermost first: it is told of a beginning before those further in, and of an end
    after them."""

    FIRST_STEP = enum.auto()
    """Comes after all that the others do at the end of a call."""
    OWN_CONFIGS = enum.auto()
    """Refuses a call before anything of ours has followed it."""
    ADAPTIVE = enum.auto()
    """Puts plans into force where no activation is alive. A call that runs twice is one training call."""
    TRACE = enum.auto()
    """Follows what the plan of this call does, by whichever attempt."""
    SURVIVE = enum.auto()
    """May run a call twice, which then begins anew for all that follows. What a forward saves outside the layers is
    held before the activations' part begins the forward, and until it has ended it."""
    CHUNKS = enum.auto()
    """Settles what may be gathered at once when the first chunk is needed: by then the plan further in is made. Lets
    go of whole parameters when no activation can ask for them any more."""
    ACTIVATION = enum.auto()
    """Follows the passes themselves, so nothing but what belongs to running them is further in."""
    LEFT_OVER = enum.auto()
    """Lets go of what a call has put off, or left half done, before anybody further out looks at what it left."""
    LOOP = enum.auto()
    """Runs the passes in place of Megatron's loop: what was further in would not run."""


class Listener:
    """Is told of calls and passes; by default it does nothing. A part derives from it and joins `LISTENERS`."""

    precedence: Precedence

    def around_call(self, call: ScheduleCall, run: Run) -> Any:
        """In place of a call: ``run`` begins, runs and ends it for this listener and all further in, each time it is
        called, and returns what the schedule does."""
        return run(call)

    def begin_call(self, call: ScheduleCall) -> None:
        """A call begins. If this raises, it has not begun."""

    def end_call(self, call: ScheduleCall, completed: bool) -> None:
        """A call that began is over; not ``completed``: by an exception."""

    def during_forward(self) -> AbstractContextManager[Any]:
        """Entered before the forward of a pass begins; left when it has ended or failed."""
        return contextlib.nullcontext()

    def begin_forward(self, micro_batch: int | None, model_chunk: int) -> None:
        """The forward of a pass begins."""

    def end_forward(self, output: Any) -> None:
        """It has ended, the loss included, and made ``output``. One that fails does not end."""

    def begin_backward(self, output: Any) -> None:
        """The backward of the pass whose forward made ``output`` begins."""

    def end_backward(self) -> None:
        """It has ended or failed."""


LISTENERS: list[Listener] = []
"""All there are now, in no order: `listening` puts them into theirs."""


def listening() -> list[Listener]:
    """The listeners, the outermost first."""
    return sorted(LISTENERS, key=lambda one: one.precedence)


def run_call(call: ScheduleCall, loop: Run) -> Any:
    """Run a call with all who listen; ``loop`` runs its passes. Returns what the loop does."""
    return _run(listening(), call, loop)


def _run(listeners: Sequence[Listener], call: ScheduleCall, loop: Run) -> Any:
    if not listeners:
        return loop(call)
    one, further_in = listeners[0], listeners[1:]

    def run(call: ScheduleCall) -> Any:
        one.begin_call(call)
        completed = False
        try:
            result = _run(further_in, call, loop)
            completed = True
            return result
        finally:
            one.end_call(call, completed)

    return one.around_call(call, run)
