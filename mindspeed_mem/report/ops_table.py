"""The table of operators: what each keeps for backward, and what every other name for it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindspeed_mem.report.units import mib

OUTSIDE = -1
_HEAD = ("operator", "MindFormers", "produced", "saved", "its storages are needed by")
_RIGHT = (2, 3)  # the columns of numbers
_LEGEND = """MiB that backward keeps, per micro-batch and rank; each storage counted once, views of it included.
  produced: what the operator produced and any backward needs; this is what swapping it moves by default
  saved:    what its own backward needs, whoever produced it (activations: saved); * of it, some is others' as well"""


def format_operators(
    storages: Sequence[Mapping[str, Any]],
    operators: Mapping[int, Sequence[str]],
    classes: Mapping[int, str],
    names: Callable[[str], Sequence[str]],
) -> str:
    """A text with one table for each class of layers that are alike.

    Args:
        storages: one mapping per storage kept for backward: ``layer`` and ``op`` that produced it (layer -1: came from
            outside the layers), ``bytes``, ``saved_by`` (a list of (layer, op)).
        operators: the operator paths of each layer, by global index; those that keep nothing are listed as well.
        classes: a label for each layer.
        names: an operator's other names.
    """
    tables: dict[tuple, list[int]] = {}
    for layer in sorted(operators):
        rows = _rows(layer, operators[layer], storages, names)
        tables.setdefault((classes.get(layer, "layer"), rows), []).append(layer)
    parts = [_LEGEND]
    for (label, rows), layers in tables.items():
        total = sum(one["bytes"] for one in storages if one["layer"] == layers[0])
        alike = f", each of these {len(layers)} layers" if len(layers) > 1 else ""
        parts.append(f"{_span(layers)}: {label}, {mib(total)} MiB produced{alike}\n{_align(rows)}")
    outside = [one for one in storages if one["layer"] == OUTSIDE]
    if outside:
        total = sum(one["bytes"] for one in outside)
        needed = sorted({op or "a layer" for one in outside for layer, op in one["saved_by"] if layer != OUTSIDE})
        parts.append(f"from outside the layers (embedding, previous stage): {mib(total)} MiB, for {', '.join(needed)}")
    return "\n\n".join(parts)


def _rows(layer: int, operators: Sequence[str], storages: Sequence[Mapping[str, Any]], names: Callable) -> tuple:
    produced: dict[str, int] = {op: 0 for op in operators}
    saved: dict[str, int] = {op: 0 for op in operators}
    needed: dict[str, set[str]] = {}
    shared = set()
    for one in storages:
        by = [tuple(saver) for saver in one["saved_by"]]
        if one["layer"] == layer:
            produced[one["op"]] = produced.get(one["op"], 0) + one["bytes"]
            needed.setdefault(one["op"], set()).update(_from(layer, one["op"], saver) for saver in by)
        for saver_layer, op in by:
            if saver_layer == layer:
                saved[op] = saved.get(op, 0) + one["bytes"]
                if len(by) > 1:
                    shared.add(op)
    in_order = [op for one in storages for at, op in [*one["saved_by"], (one["layer"], one["op"])] if at == layer]
    listed = list(dict.fromkeys([*in_order, *operators]))
    inner = {op for op in listed if any(other.startswith(op + ".") for other in listed)}
    return tuple(
        (
            op or "(the layer itself)",
            _joined(names(op)) if op else "",
            mib(produced.get(op, 0)),
            mib(saved.get(op, 0)) + ("*" if op in shared else " "),
            ", ".join(sorted(needed.get(op, ()))),
        )
        for op in listed
        if op not in inner or produced.get(op) or saved.get(op)
    )


def _from(layer: int, op: str, saver: tuple[int, str]) -> str:
    """A saver as seen from an operator of `layer`."""
    if saver == (layer, op):
        return "itself"
    return (saver[1] or "the layer itself") if saver[0] == layer else f"layer {saver[0] - layer:+d} {saver[1]}".rstrip()


def _joined(names: Sequence[str]) -> str:
    """``a.x, a.y, b.z`` as ``a.x|y b.z``."""
    ends: dict[str, list[str]] = {}
    for name in names:
        parent, _, end = name.rpartition(".")
        ends.setdefault(parent, []).append(end)
    return " ".join((f"{parent}." if parent else "") + "|".join(found) for parent, found in ends.items())


def _span(layers: Sequence[int]) -> str:
    """``layers 0-3, 5``."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"layer{'s' if len(layers) > 1 else ''} {text}"


def _align(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in [_HEAD, *rows]) for i in range(len(_HEAD))]
    lines = [
        "  ".join(cell.rjust(widths[i]) if i in _RIGHT else cell.ljust(widths[i]) for i, cell in enumerate(row))
        for row in [_HEAD, *rows]
    ]
    return "\n".join(f"  {line}".rstrip() for line in lines)
