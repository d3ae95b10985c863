"""megatron.core.transformer: what a forward that is left half way leaves in modules, and the next would find.

With --moe-shared-expert-overlap the forward of shared experts is five calls: what each leaves for the next lies in the
module, and from 0.18 on it notes which is next, and takes no other. A layer of 0.19 has the input of its MLP until that
has ended, and so the graph before it. A second run that stops early, and a call that fails, leave all that; after a
call that ran out of memory, the next may be a second attempt.
"""

from __future__ import annotations

from typing import Any

from mindspeed_mem.passes import Listener, Precedence, ScheduleCall
from mindspeed_mem.patching import around, join

_HANDED_ON = (
    "cached_fc1_input",
    "cached_fc2_input",
    "cached_fc2_output",
    "cached_output",
    "gate_score",
    "mlp_norm_manager",
)
_begun: list[set[Any]] = []
"""Of the calls and second runs that are under way, the outermost first: modules whose forward began in each."""


@around("megatron.core.transformer.transformer_layer:TransformerLayer._forward_pre_mlp_layernorm", since="0.19")
@around("megatron.core.transformer.moe.shared_experts:SharedExpertMLP.pre_forward_comm")
def begins(original, self, *args, **kwargs):
    if _begun:
        _begun[-1].add(self)
    return original(self, *args, **kwargs)


def _forget(module: Any) -> None:
    own = vars(module)
    own.update((name, None) for name in _HANDED_ON if name in own)
    if "_overlap_state" in own:
        own["_overlap_state"] = type(own["_overlap_state"]).IDLE


class Unfinished(Listener):
    precedence = Precedence.LEFT_OVER

    def begin_call(self, call: ScheduleCall) -> None:
        _begun.append(set())

    def end_call(self, call: ScheduleCall, completed: bool) -> None:
        begun = _begun.pop()
        for module in () if completed else begun:
            _forget(module)


class _SecondRun:
    __slots__ = ()

    def __enter__(self) -> None:
        _begun.append(set())

    def __exit__(self, *exc_info: Any) -> None:
        for module in _begun.pop():
            _forget(module)


join("mindspeed_mem.passes:LISTENERS", Unfinished(), declared_by=__name__)
join("mindspeed_mem.activation.rerun.second_run:GUARDS", _SecondRun, declared_by=__name__)
