"""One forward watched below autograd: every torch operation in layers, and the operators that run.

Each operation is noted with the storages it reads and makes, its FLOPs, and the operator running; what comes of it is
in recompute_cost.py. Kernels that are no torch operations, and what is compiled, count no FLOPs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from mindspeed_mem.activation.observe.observed_ops import Run, Step
from mindspeed_mem.activation.observe.recompute_cost import Forward
from mindspeed_mem.activation.rerun.tape import COLLECTIVES
from mindspeed_mem.activation.storage import marks
from mindspeed_mem.device.op_rules import written_arguments


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    """Of both products, masked or not. Torch's own formulas refuse fewer heads of keys than of queries."""
    *batch, length, channels = query.shape
    return 2 * math.prod(batch) * length * key.size(-2) * (channels + value.size(-1))


_ATTENTION = """_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
_scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu
_scaled_dot_product_fused_attention_overrideable""".split()
"""The last: accelerators that are none of torch's own."""
_FORMULAS = {getattr(torch.ops.aten, name): _attention_flops for name in _ATTENTION if hasattr(torch.ops.aten, name)}


class Watch(TorchDispatchMode):
    """Watches one forward. ``running()`` tells the operator (layer, path) that runs."""

    supports_higher_order_operators = True  # one step, as flex_attention is

    def __init__(self, running: Callable[[], tuple[int, str] | None], device_type: str):
        super().__init__()
        self._running, self._device_type = running, device_type
        self.clear()

    def clear(self) -> None:
        """Forget everything: another forward begins."""
        self._token = object()  # on storages, with their number: which watch gave it
        self._open: list[tuple[int, str]] = []
        self.forward = Forward()
        """What has been seen so far."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions stay compiled, or other bits would come of them; what they do is out of its sight."""
        return True

    # ---- the forward
    def run(self, node: tuple[int, str], state: Any, call: Callable, /, *args, **kwargs) -> Any:
        """Run ``call``, which may read attributes of ``state``, as this operator; a layer switches the mode on."""
        if node in self._open:  # a subclass calling super
            return call(*args, **kwargs)
        with contextlib.nullcontext() if self._open else self:
            return self._note_run(node, call, args, kwargs, vars(state) if state is not None else None)

    def run_fused(self, node: tuple[int, str] | None, call: Callable, args: tuple, kwargs: dict) -> Any:
        """Run a function that may be compiled, out of this mode's sight; ``node``: the inline operator it is in."""
        if not self._open:
            return call(*args, **kwargs)
        self.__exit__(None, None, None)
        try:
            return call(*args, **kwargs) if node is None else self._note_run(node, call, args, kwargs, fused=True)
        finally:
            self.__enter__()

    def _note_run(self, node, call: Callable, args: tuple, kwargs: dict, state: Any = None, fused: bool = False) -> Any:
        inputs = self._keys(tree_leaves((args, kwargs, state)))
        run = Run(node, fused, inputs, self._moment())
        self.forward.runs.append(run)
        self._open.append(node)
        try:
            result = call(*args, **kwargs)
        finally:
            self._open.pop()
        run.outputs = self._keys(tree_leaves(result))
        run.end = self._moment()
        return result

    def saves(self, storage: torch.UntypedStorage, owner: tuple[int, str]) -> int:
        """Backward keeps a tensor of this storage, which ``owner`` produced; returns the storage's number."""
        key = self._key_of(storage)
        if key and key not in self.forward.saved:
            self.forward.saved[key], self.forward.owner[key] = self._moment(), owner
        return key

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        reads = self._keys(tree_leaves((args, kwargs)))
        known = len(self.forward.born)
        result = func(*args, **kwargs)
        made = {key for key in self._keys(tree_leaves(result)) if key >= known}
        written = self._keys(tree_leaves(written_arguments(func, args, kwargs)))
        flops = _flops_of(func, args, kwargs, result)
        collective = getattr(func, "namespace", "") in COLLECTIVES
        self.forward.steps.append(Step(self._running(), flops, frozenset(reads), frozenset(made | written), collective))
        return result

    def _moment(self) -> int:
        self.forward.steps.append(Step(None))
        return len(self.forward.steps)

    def _keys(self, leaves: Iterable[Any]) -> set[int]:
        """The storages of those tensors that are activations."""
        found = set()
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.is_nested:
                continue
            if type(leaf) is not torch.Tensor:
                if isinstance(leaf, torch.nn.Parameter):
                    marks.of(leaf.untyped_storage()).watch = self._token, 0
            elif leaf.device.type == self._device_type:
                found.add(self._key_of(leaf.untyped_storage()))
        return found - {0}

    def _key_of(self, storage: torch.UntypedStorage) -> int:
        """Its number, 0 for a parameter's."""
        found, seen = marks.of(storage), self.forward
        mine = found.watch
        if mine is None or mine[0] is not self._token:
            key = 0 if found.static else len(seen.born)
            mine = found.watch = self._token, key
            if key:
                seen.born.append(len(seen.steps))
                seen.bytes[key] = storage.nbytes()
                if found.stays:
                    seen.elsewhere.add(key)
        if found.managed:
            seen.managed.add(mine[1])
        return mine[1]


def _flops_of(func: Any, args: tuple, kwargs: dict, result: Any) -> int:
    packet = getattr(func, "_overloadpacket", func)
    formula = _FORMULAS.get(packet) or flop_registry.get(packet)
    if formula is None:
        return 0
    try:
        return formula(*args, **kwargs, out_val=result)
    except Exception:  # anybody may have registered it; what it does not know counts nothing, and trains on
        return 0
