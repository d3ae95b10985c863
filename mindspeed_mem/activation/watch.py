"""What recomputing each operator would free and cost: found below autograd while one forward is watched.

Every torch operation inside layers is noted with the storages it reads and makes, its FLOPs, and the operator running.
A module or function that runs again starts from what it was given, and stops once the last storage that backward needs
of it is there; inline code runs only the operations on which such storages depend. See replay.py and tape.py, whose
rules are followed here. Kernels that are no torch operations count no FLOPs; what is compiled runs uncompiled here.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from mindspeed_mem.activation.records import KEEP

_FORMULAS = dict(flop_registry)
_FORMULAS.setdefault(
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    flop_registry[torch.ops.aten._scaled_dot_product_flash_attention],
)


class _Step(NamedTuple):
    """One operation, or (node None) nothing but a moment."""

    node: tuple[int, str] | None
    flops: int = 0
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()


@dataclass
class _Run:
    """One run of a module or function, from step ``begin`` up to step ``end``."""

    node: tuple[int, str]
    fused: bool  # a function inside inline code that is one step of it
    inputs: set[int]
    begin: int
    end: int = 0
    outputs: set[int] = field(default_factory=set)


class Watch(TorchDispatchMode):
    """Watches one forward. ``running()`` tells the operator (layer, path) that runs."""

    def __init__(self, running: Callable[[], tuple[int, str] | None], device_type: str):
        super().__init__()
        self._running, self._device_type = running, device_type
        self.clear()

    def clear(self) -> None:
        """Forget everything: another forward begins."""
        self._token = object()  # on storages, with their number: which watch gave it
        self._steps: list[_Step] = []
        self._runs: list[_Run] = []
        self._open: list[tuple[int, str]] = []
        self._born: list[int] = [0]  # the step that made each storage, or that saw it first
        self._elsewhere: set[int] = set()  # held by others anyway: masks, tables, what a stage received
        self._saved: dict[int, int] = {}  # at which step each storage was saved first
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._bytes: dict[int, int] = {}

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
        run = _Run(node, fused, inputs, self._moment())
        self._runs.append(run)
        self._open.append(node)
        try:
            result = call(*args, **kwargs)
        finally:
            self._open.pop()
        run.outputs = self._keys(tree_leaves(result))
        run.end = self._moment()
        return result

    def saves(self, storage: torch.UntypedStorage) -> None:
        """Backward keeps a tensor of this storage."""
        key = self._key_of(storage)
        if key and key not in self._saved:
            self._saved[key] = self._moment()
            self._alive[key] = weakref.ref(storage)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        reads = self._keys(tree_leaves((args, kwargs)))
        known = len(self._born)
        result = func(*args, **kwargs)
        made = {key for key in self._keys(tree_leaves(result)) if key >= known}
        schema = getattr(func, "_schema", None)  # an operation on functions, such as flex attention, has none
        written = {
            key
            for position, argument in enumerate(schema.arguments if schema is not None else ())
            if argument.alias_info is not None and argument.alias_info.is_write
            for key in self._keys(tree_leaves(args[position] if position < len(args) else kwargs.get(argument.name)))
        }
        formula = _FORMULAS.get(getattr(func, "_overloadpacket", None))
        flops = formula(*args, **kwargs, out_val=result) if formula is not None else 0
        self._steps.append(_Step(self._running(), flops, frozenset(reads), frozenset(made | written)))
        return result

    def _moment(self) -> int:
        self._steps.append(_Step(None))
        return len(self._steps)

    def _keys(self, leaves: Iterable[Any]) -> set[int]:
        """The storages of those tensors that are activations."""
        found = set()
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.is_nested:
                continue
            if type(leaf) is not torch.Tensor:
                if isinstance(leaf, torch.nn.Parameter):
                    leaf.untyped_storage()._mem_watch = self._token, 0
            elif leaf.device.type == self._device_type:
                found.add(self._key_of(leaf.untyped_storage()))
        return found - {0}

    def _key_of(self, storage: torch.UntypedStorage) -> int:
        """Its number, 0 for a parameter's."""
        mine = getattr(storage, "_mem_watch", None)
        if mine is None or mine[0] is not self._token:
            key = 0 if getattr(storage, "_mem_static", False) else len(self._born)
            mine = storage._mem_watch = self._token, key
            if key:
                self._born.append(len(self._steps))
                self._bytes[key] = storage.nbytes()
                if getattr(storage, "_mem", None) is KEEP:
                    self._elsewhere.add(key)
        return mine[1]

    # ---- what comes of it
    def choices(self) -> list[dict[str, Any]]:
        """For each operator that ran, in the order in which they started: ``layer``, ``op``, bytes that recomputing
        it ``frees`` (below zero where its inputs take more), ``flops`` of its second run, and those of its
        ``forward``."""
        self._saved = {key: step for key, step in self._saved.items() if self._alive[key]() is not None}
        runs: dict[tuple[int, str], list[_Run]] = {}
        inline: dict[tuple[int, str], list[int]] = {}
        starts: dict[tuple[int, str], int] = {}
        for run in self._runs:
            starts.setdefault(run.node, run.begin)
            if not run.fused:
                runs.setdefault(run.node, []).append(run)
        for index, step in enumerate(self._steps):
            if step.node is not None and step.node not in runs:
                starts.setdefault(step.node, index)
                starts[step.node] = min(starts[step.node], index)
                inline.setdefault(step.node, []).append(index)
        found = []
        for node in sorted(starts, key=starts.get):
            layer, op = node
            if node in runs:
                dropped, taken, flops = self._again(runs[node])
                forward = sum(step.flops for run in runs[node] for step in self._steps[run.begin : run.end])
            else:
                fused = [run for run in self._runs if run.node == node]
                steps = [self._steps[index] for index in inline.get(node, ())]
                dropped, taken, flops = self._slice(set(inline.get(node, ())), steps, fused)
                forward = sum(step.flops for step in steps)
            taken = {key for key in taken if key not in self._saved and key not in self._elsewhere}
            frees = sum(self._bytes[key] for key in dropped) - sum(self._bytes[key] for key in taken)
            found.append({"layer": layer, "op": op, "frees": frees, "flops": flops, "forward": forward})
        return found

    def _again(self, runs: list[_Run]) -> tuple[set[int], set[int], int]:
        """What a `Replay` of each of these runs drops and holds, and its FLOPs."""
        dropped, taken, flops = set(), set(), 0
        for run in runs:
            steps = self._steps[run.begin : run.end]
            if any(step.writes & run.inputs for step in steps):
                continue  # it changes what it was given, so it cannot start from there again
            last = 0
            for key, saved in self._saved.items():
                if not run.begin <= self._born[key] < run.end or (key in run.outputs and not run.node[1]):
                    continue  # not made here; what a whole layer returns stays
                if saved < run.end or key in run.outputs:
                    dropped.add(key)
                    if saved < run.end:  # what an operator inside takes is there before it runs
                        taken_at = (r.begin for r in self._runs if run.begin < r.begin < saved and key in r.inputs)
                        saved = min(taken_at, default=saved)
                    last = max(last, min(saved, run.end))
            if last:
                taken |= run.inputs
                flops += sum(step.flops for step in self._steps[run.begin : last])
        return dropped, taken, flops

    def _slice(self, mine: set[int], steps: list[_Step], fused: list[_Run]) -> tuple[set[int], set[int], int]:
        """The same for a `Tape` of these steps, in which some functions are runs of their own."""
        dropped, taken, flops = self._again(fused)
        taken = {key for key in taken if not any(run.begin <= self._born[key] < run.end for run in fused)}
        made = {key for step in steps for key in step.writes if self._born[key] in mine} - taken
        wanted = made & self._saved.keys()
        needed = set(wanted)
        for step in reversed(steps):
            if step.writes & needed:
                needed |= step.reads | step.writes
                flops += step.flops
        of_fused = {key for key in needed if any(run.begin <= self._born[key] < run.end for run in fused)}
        return dropped | wanted, taken | (needed - made - of_fused), flops
