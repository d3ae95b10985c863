"""Errors of DTensor in the user's words: of which operator, with which layouts, and what to do about it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map

from mindspeed_mem.parallel.moves import text
from mindspeed_mem.parallel.strategy import StrategyError

_OTHER_LAYOUT = "the parts do not line up with the new dimensions: give it its input in another layout"
_ADVICE = {
    "does not have a sharding strategy": "torch has no rule for it, however its inputs lie: let it compute in "
    "parallel.local(...)",
    "mixed torch.Tensor and DTensor": "a plain tensor meets a split one outside a split model: make it with "
    "parallel.shard, or compute inside the model",
    "unevenly sharded": _OTHER_LAYOUT,
    "is invalid for input of size": _OTHER_LAYOUT,
    "view size is not compatible": "redistribution changes how a tensor lies in memory: use reshape",
    "in-place operations that require placement changes": "use the operator that is not in place",
    "to P(sum) not supported yet": "use the operator that is not in place",
    "from one partial type": "give it inputs in another layout",
    "as_strided not supported": "write it as a view, a slice or an index",
    "returns multiple views": "use the operator that is not in place",
}
"""What to do about what DTensor says."""
_KINDS = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Not what derives from them: running out of memory, the end of a second run and the like are nobody's strategy."""
_TORCH, _OURS = (os.path.dirname(one) + os.sep for one in (torch.__file__, __file__))
_DTENSOR = os.path.dirname(torch.distributed.tensor.__file__) + os.sep
_COLLECTIVES = ("_functional_collectives.py", "distributed_c10d.py")


def is_dtensors(error: Exception, function: Callable | None = None, args: tuple = (), kwargs: Any = None) -> bool:
    """Whether `function` fails because its tensors are split. Where not, the error is to go on as it is.

    Whoever asks must not keep `error` in a variable of its own: its traceback holds the frame, and with it the tensors.
    """
    if type(error) not in _KINDS:
        return False
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not files[-1].startswith((_TORCH, _OURS)) or any(one.endswith(_COLLECTIVES) for one in files):
        return False  # a user's hook, or a rank that is gone
    if any(one.startswith(_DTENSOR) for one in files) or any(words in str(error) for words in _ADVICE):
        return True
    return function is not None and _works_whole(function, args, kwargs or {})


def _works_whole(function: Callable, args: tuple, kwargs: Any) -> bool:
    """Whether this would run on one device, as far as shapes and types say."""

    def like(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    try:
        with torch.no_grad():
            function(*tree_map(like, args), **tree_map(like, kwargs))
    except Exception:
        return False
    return True


def explained(error: Exception, where: str, values: Any) -> StrategyError:
    """What DTensor says of `values`, and what to do."""
    said = " ".join(str(error).split("\n\n")[0].split())
    if said and not isinstance(error, (AssertionError, RuntimeError)):
        said = f"{type(error).__name__}: {said}"
    advice = next(
        (advice for words, advice in _ADVICE.items() if words in str(error)), "give it inputs in another layout"
    )
    layouts = [
        f"{tuple(one.shape)} {text(one.placements, one.device_mesh)}"
        for one in tree_flatten(values)[0]
        if isinstance(one, DTensor)
    ]
    return StrategyError(f"{where}: inputs {', '.join(layouts)}; {said or 'torch gives no reason'}; {advice}")
