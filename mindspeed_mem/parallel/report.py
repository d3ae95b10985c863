"""What was redistributed: recorded forward and backward while a step runs, as a table.

DTensor moves tensors in one function, whoever asks; while a step is recorded ours stands in its place. What that sends
is read off the collectives themselves, so totals are those of torch's `CommDebugMode`.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed.tensor._api as _api
import torch.distributed.tensor._dispatch as _dispatch
import torch.distributed.tensor._redistribute as _redistribute
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_mem.parallel.collectives import observers
from mindspeed_mem.parallel.moves import running, text

logger = logging.getLogger(__name__)

_LOOKED_UP_IN = (_redistribute, _dispatch, _api)
_NAME = "redistribute_local_tensor"
_KINDS = {
    "all_gather_into_tensor": "all_gather",
    "all_reduce": "all_reduce",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "broadcast": "broadcast",
}
"""By the names of torch's operators."""
_SENT = {"all_gather": lambda n: n - 1, "all_reduce": lambda n: 2 * (n - 1) / n, "broadcast": lambda n: 1}
"""What a rank sends, in multiples of what it puts in, by the number of ranks; others send (n - 1) / n of it."""


class Collective(NamedTuple):
    """One collective that ran."""

    name: str
    axis: str
    sent: int
    """Bytes that this rank sends."""


class Move(NamedTuple):
    """One tensor that changed its layout, or whose parts a region exchanged."""

    backward: bool
    operator: str
    """Whose input, or whose gradient, was moved; in backward the operator of the forward."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    source: str
    """The layout before: "dp:0" is split over dp in dimension 0, "tp:sum" a sum to be made over tp."""
    target: str
    collectives: tuple[Collective, ...]
    asked: bool
    """Whether a strategy or a collective of the user says so; if not, DTensor derived it inside the operator."""


class Report:
    """The moves of what was recorded, with how often each was made."""

    def __init__(self) -> None:
        self.moves: Counter[Move] = Counter()

    def totals(self) -> dict[str, int]:
        """How many collectives ran, by name."""
        found: Counter[str] = Counter()
        for move, times in self.moves.items():
            for one in move.collectives:
                found[one.name] += times
        return dict(found)

    def sent(self) -> dict[str, int]:
        """Bytes that this rank sent, by mesh axis."""
        found: Counter[str] = Counter()
        for move, times in self.moves.items():
            for one in move.collectives:
                found[one.axis] += times * one.sent
        return dict(found)

    def __str__(self) -> str:
        head = ("", "operator", "tensor", "from", "to", "collectives", "bytes sent", "times", "")
        rows = [head]
        for move, times in self.moves.items():
            rows.append(
                (
                    "backward" if move.backward else "forward",
                    move.operator or "outside the model",
                    "x".join(map(str, move.shape)),
                    move.source,
                    move.target,
                    " ".join(f"{one.name}({one.axis})" for one in move.collectives) or "-",
                    str(sum(one.sent for one in move.collectives)),
                    str(times),
                    "" if move.asked else "not asked for",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        totals = ", ".join(f"{count} {name}" for name, count in sorted(self.totals().items())) or "nothing"
        sent = ", ".join(f"{axis} {size}" for axis, size in sorted(self.sent().items()))
        return "\n".join([line.rstrip() for line in lines] + [f"in all: {totals}; bytes sent per rank: {sent or 0}"])


_open: list[Report] = []
_originals: dict[Any, Any] = {}


def is_recording() -> bool:
    return bool(_open)


def start(report: Report) -> None:
    """Record into `report` what is moved from now on, until `stop`."""
    if not _open:
        for module in _LOOKED_UP_IN:
            _originals[module] = getattr(module, _NAME)
            setattr(module, _NAME, _recorded)
        observers.append(_hand_written)
    _open.append(report)


def stop(report: Report) -> bool:
    """No longer; whether it was recorded into."""
    if report not in _open:
        return False
    _open.remove(report)
    if not _open:
        observers.remove(_hand_written)
        for module, original in _originals.items():
            setattr(module, _NAME, original)
        _originals.clear()
    return True


@contextlib.contextmanager
def recording() -> Iterator[Report]:
    """A report of what is redistributed inside, forward and backward."""
    report = Report()
    start(report)
    try:
        yield report
    finally:
        stop(report)


def mark(result: Any, where: str) -> None:
    """Let the nodes of backward that made `result` know the operator, for messages of what backward moves."""
    nodes = [one.grad_fn for one in (result if isinstance(result, (tuple, list)) else [result]) if _has_node(one)]
    while nodes:
        node = nodes.pop()
        if node is not None and _KEY not in node.metadata:
            node.metadata[_KEY] = where
            nodes += [following for following, _ in node.next_functions]


_KEY = "mindspeed_mem.parallel"


def _has_node(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def of_backward() -> str | None:
    """The operator whose backward runs; None: none does."""
    if torch._C._current_graph_task_id() == -1:
        return None
    node = torch._C._current_autograd_node()
    metadata: Any = {} if node is None else node.metadata
    return metadata.get(_KEY, "")


def _recorded(local_tensor: torch.Tensor, current_spec: Any, target_spec: Any, *args: Any, **kwargs: Any) -> Any:
    original = _originals[_redistribute]
    if current_spec.placements == target_spec.placements:
        return original(local_tensor, current_spec, target_spec, *args, **kwargs)
    mesh = current_spec.mesh
    with _Counted(mesh) as counted:
        result = original(local_tensor, current_spec, target_spec, *args, **kwargs)
    source, target = text(current_spec.placements, mesh), text(target_spec.placements, mesh)
    _note(tuple(current_spec.tensor_meta.shape), source, target, counted.found, running.asked)
    return result


def _hand_written(name: str, axis: str, sent: int) -> None:
    _note((), "", "", [Collective(name, axis, sent)], True)


def _note(shape: tuple[int, ...], source: str, target: str, found: list[Collective], asked: bool) -> None:
    backward = of_backward()
    where = running.where or backward or ""
    for report in _open:
        report.moves[Move(backward is not None, where, shape, source, target, tuple(found), asked)] += 1


class _Counted(TorchDispatchMode):
    """Sees the collectives that run on local tensors."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self._mesh = mesh
        self.found: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _KINDS.get(getattr(func, "_opname", ""))
        if kind is not None and func.namespace in ("_c10d_functional", "_dtensor"):
            name: Any = next(one for one in reversed(args) if isinstance(one, str))
            group = torch.distributed.distributed_c10d._resolve_process_group(name)
            sent = args[0].nbytes * _SENT.get(kind, lambda n: (n - 1) / n)(group.size())
            self.found.append(Collective(kind, self._axis(group), int(sent)))
        return func(*args, **(kwargs or {}))

    def _axis(self, group: Any) -> str:
        """By name; several that torch makes one group of, with a plus."""
        names = self._mesh.mesh_dim_names or ()
        members = torch.distributed.get_process_group_ranks(group)
        for index, name in enumerate(names):
            if torch.distributed.get_process_group_ranks(self._mesh.get_group(index)) == members:
                return name
        layout = self._mesh.mesh
        return "+".join(
            name
            for index, name in enumerate(names)
            if len({int((layout == member).nonzero()[0, index]) for member in members}) > 1
        )
