"""The table of operators: what each keeps for backward, and what every other name for it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypedDict

from mindspeed_mem.plan.layers import in_words
from mindspeed_mem.plan.operators import within
from mindspeed_mem.report.units import mib

OUTSIDE = -1
_HEAD = ("operator", "MindFormers", "produced", "saved", "frees", "FLOPs", "its storages are needed by")
_RIGHT = (2, 3, 4, 5)  # the columns of numbers
_WIDTH = 48  # of the last column
_LEGEND = """Each row is a choice, a module for all below it. A name with a dot in front continues the one above it.
MiB per micro-batch and rank; each storage counted once, views of it included.
  produced: what it produced and any backward needs; this is what swapping it moves by default
  saved:    what its own backward needs, whoever produced it (activations: saved); * of it, some is others' as well
  frees:    what recomputing it takes off the device, less inputs that would be kept for that alone; -: nothing
  FLOPs:    what its second run computes, of its layer's forward (matrix products in torch's operations)"""


class StorageRow(TypedDict):
    """One storage kept for backward, as the census counts it."""

    layer: int
    """Who produced it; -1: it came from outside the layers."""
    op: str
    bytes: int
    saved_by: list[tuple[int, str]]
    """Layer and operator."""


class ChoiceRow(TypedDict):
    """One operator that ran."""

    layer: int
    op: str
    frees: int
    """Bytes that recomputing it frees."""
    flops: int
    """Of its second run."""
    forward: int
    """FLOPs of its forward."""


def format_operators(
    storages: Sequence[StorageRow],
    operators: Mapping[int, Sequence[str]],
    classes: Mapping[int, str],
    names: Callable[[str], Sequence[str]],
    choices: Sequence[ChoiceRow] = (),
) -> str:
    """A text with one table for each class of layers that are alike.

    Args:
        storages: what is kept for backward, of all layers.
        operators: the operator paths of each layer, by global index; those that keep nothing are listed as well.
        classes: a label for each layer.
        names: an operator's other names.
        choices: what recomputing each operator would do, in the order in which they ran.
    """
    tables: dict[tuple, list[int]] = {}
    for layer in sorted(operators):
        own = {one["op"]: one for one in choices if one["layer"] == layer}
        rows = _rows(layer, operators[layer], storages, names, own)
        flops = own[""]["forward"] if "" in own else 0
        tables.setdefault((classes.get(layer, "layer"), flops, rows), []).append(layer)
    parts = [_LEGEND]
    for (label, flops, rows), layers in tables.items():
        total = sum(one["bytes"] for one in storages if one["layer"] == layers[0])
        forward = f", forward {_count(flops)}" if flops else ""
        alike = f", each of these {len(layers)} layers" if len(layers) > 1 else ""
        parts.append(f"{in_words(layers)}: {label}, {mib(total)} MiB produced{forward}{alike}\n{_align(rows)}")
    outside = [one for one in storages if one["layer"] == OUTSIDE]
    if outside:
        total = sum(one["bytes"] for one in outside)
        needed = sorted({op or "a layer" for one in outside for layer, op in one["saved_by"] if layer != OUTSIDE})
        parts.append(f"from outside the layers (embedding, previous stage): {mib(total)} MiB, for {_some(needed)}")
    return "\n\n".join(parts)


def _rows(
    layer: int,
    operators: Sequence[str],
    storages: Sequence[StorageRow],
    names: Callable[[str], Sequence[str]],
    choices: Mapping[str, ChoiceRow],
) -> tuple:
    used = [op for one in storages for at, op in [*one["saved_by"], (one["layer"], one["op"])] if at == layer]
    rows = []
    for op, parent, depth in _in_order(dict.fromkeys([*choices, *used, *operators])):
        produced = [one for one in storages if one["layer"] == layer and _is_in(one["op"], op)]
        saved = [one for one in storages if any(at == layer and _is_in(by, op) for at, by in one["saved_by"])]
        shared = any(not (at == layer and _is_in(by, op)) for one in saved for at, by in one["saved_by"])
        needed = {(at, by) for one in produced for at, by in one["saved_by"]}
        needed = {(at, by) for at, by in needed if by == op or at != layer or not _is_in(by, op)}
        indent = "  " * depth
        rows.append(
            (
                indent + (op.removeprefix(parent) if op else "(the whole layer)"),
                indent + name if (name := _other_name(op, parent, names)) else "",
                mib(sum(one["bytes"] for one in produced)),
                mib(sum(one["bytes"] for one in saved)) + ("*" if shared else " "),
                *_recompute(choices.get(op), choices.get("")),
                _some([_from(layer, op, parent, saver) for saver in sorted(needed)]) if op else "",
            )
        )
    return tuple(rows)


def _in_order(listed: Iterable[str]) -> list[tuple[str, str, int]]:
    """(operator, the module above it that is listed, depth): each module before what is below it."""
    listed = list(listed)
    parents = {op: max((p for p in listed if p and within(op, p)), key=len, default="") for op in listed}
    first: dict[str, int] = {}
    for index, op in enumerate(listed):
        while op:
            first.setdefault(op, index)
            op = parents[op]

    def chain(op: str) -> list[str]:
        return [*(chain(parents[op]) if parents[op] else []), op]

    return [
        (op, parents[op], len(chain(op)) - 1)
        for op in sorted(listed, key=lambda op: [first.get(p, -1) for p in chain(op)])
    ]


def _is_in(op: str, module: str) -> bool:
    return op == module or within(op, module)


def _other_name(op: str, parent: str, names: Callable[[str], Sequence[str]]) -> str:
    """Its other names, without what they share with those of the module above, and only if they differ."""
    others = [(*names(parent), parent)[0], *names(op)] if parent else ["", *names(op)]
    name = _joined([name.removeprefix(others[0]) for name in others[1:]]) if op else ""
    return "" if name == op.removeprefix(parent) else name


def _recompute(choice: ChoiceRow | None, layer: ChoiceRow | None) -> tuple[str, str]:
    if choice is None or choice["frees"] <= 0:
        return "-", "-"
    if not layer or not layer["forward"]:
        return mib(choice["frees"]), "-"
    share = 100 * choice["flops"] / layer["forward"]
    return mib(choice["frees"]), "<1 %" if 0 < share < 0.5 else f"{share:.0f} %"


def _count(flops: int) -> str:
    scale, unit = next(((10**n, u) for n, u in ((12, "T"), (9, "G")) if flops >= 10**n), (10**6, "M"))
    return f"{flops / scale:.1f} {unit}FLOP"


def _some(names: Sequence[str]) -> str:
    text, shown = ", ".join(names), 2
    while len(text) > _WIDTH and shown and len(names) > 1:
        text = ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
        shown -= 1
    return text


def _from(layer: int, op: str, parent: str, saver: tuple[int, str]) -> str:
    """A saver as seen from an operator of `layer`."""
    if saver == (layer, op):
        return "itself"
    if saver[0] == layer:
        siblings = parent and within(saver[1], parent)
        return saver[1].removeprefix(parent) if siblings else saver[1] or "the layer itself"
    return f"layer {saver[0] - layer:+d} {saver[1]}".rstrip()


def _joined(names: Sequence[str]) -> str:
    """``a.x, a.y, a.y.z`` as ``a.x|y|y.z``."""
    dotted = bool(names) and all(name.startswith(".") for name in names)
    paths = [name.split(".") for name in names]
    shared = 0
    while paths and all(len(path) > shared + 1 and path[shared] == paths[0][shared] for path in paths):
        shared += 1
    ends = "|".join(".".join(path[shared:]) for path in paths)
    return ".".join([*paths[0][:shared], ends]) if shared or dotted else ends


def _align(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in [_HEAD, *rows]) for i in range(len(_HEAD))]
    lines = [
        "  ".join(cell.rjust(widths[i]) if i in _RIGHT else cell.ljust(widths[i]) for i, cell in enumerate(row))
        for row in [_HEAD, *rows]
    ]
    return "\n".join(f"  {line}".rstrip() for line in lines)
