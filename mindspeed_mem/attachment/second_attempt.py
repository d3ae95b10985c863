"""A step of an attached model is tried once more where it ran out of device memory in spite of all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from mindspeed_mem import ranks
from mindspeed_mem.activation.survive.step_retry import BeforeStep, RecordedIterator, forget_frames
from mindspeed_mem.activation.survive.survival import NoRoomError, Survival
from mindspeed_mem.attachment.optimizers import before_step_of

logger = logging.getLogger(__name__)

_ZERO = ("_hp_mapping", "ds_status")
"""What DeepSpeed puts on a parameter: in stages 1 and 2, and in stage 3."""


def run(
    survival: Survival,
    model: nn.Module,
    inside: Callable[[], AbstractContextManager[None]],
    again: Callable[[], None],
    call: Callable[..., Any],
    args: tuple,
    kwargs: Mapping[str, Any],
) -> Any:
    """Run ``call`` ``inside``, twice where that is needed and can be: ``again`` is told before the second time, and
    iterators among its arguments are rewound.

    Raises NoRoomError, which says why it was not tried again.
    """
    iterators = {id(one): RecordedIterator(one) for one in (*args, *kwargs.values()) if isinstance(one, Iterator)}
    args = tuple(iterators.get(id(one), one) for one in args)
    kwargs = {name: iterators.get(id(one), one) for name, one in kwargs.items()}
    before, collectives, stepped = BeforeStep([model], [True]), ranks.collectives(), []
    try:
        # of any, since many train copies of the model's parameters
        with before_step_of(None, lambda: stepped.append(True)), inside():
            return call(*args, **kwargs)
    except (RuntimeError, MemoryError) as error:
        if not survival.backend.is_out_of_memory(error):
            raise
        failed = survival.explained(error)
    why_not = "the host is full" if survival.mover.host_full else ""
    why_not = why_not or ("an optimizer had begun its step" if stepped else "")
    if any(hasattr(one, name) for one in model.parameters() for name in _ZERO):
        why_not = why_not or "DeepSpeed's ZeRO keeps gradients where nobody can take them back"
    if collectives is None or collectives != ranks.collectives():
        why_not = why_not or "it has taken part in a collective, which cannot be taken back"
    why_not = why_not or before.why_not(None, False)
    if why_not:
        raise NoRoomError(f"{failed}\n  the step was not tried again: {why_not}") from failed
    logger.warning("the step is tried again with all activations swapped: %s", str(failed).partition("\n")[0])
    forget_frames(failed)
    del failed
    before.put_back(None)
    for one in iterators.values():
        one.rewind()
    survival.backend.give_back()  # what it kept in pieces, or a library lacked
    again()
    with survival.moving_everything(), inside():
        return call(*args, **kwargs)
