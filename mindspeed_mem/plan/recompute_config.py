"""The section `recompute_config`, typed and checked: which layers and operators run their forward again.

A number means two things there, as in MindFormers: with `swap_config.swap` on it names a layer, without it counts the
first layers of a pipeline stage. Flags always name layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mindspeed_mem.plan.checks import Checker, given, is_whole
from mindspeed_mem.plan.layers import Layers
from mindspeed_mem.plan.operators import pattern_error

Kind = Literal["layer", "operator", "communication"]

KINDS: dict[str, Kind] = {
    "recompute": "layer",
    "select_recompute": "operator",
    "select_comm_recompute": "communication",
}
"""The keys that ask for recompute, and what each is about."""
_EXCLUDES: dict[str, str] = {f"{key}_exclude": key for key in ("select_recompute", "select_comm_recompute")}
_GRAPH_ONLY_KEYS = ("parallel_optimizer_comm_recompute", "mp_comm_recompute", "recompute_slice_activation")

DEFAULT_PATTERNS: dict[Kind, tuple[str, ...]] = {
    # Megatron computes the gating multiply and the activation function as one operator; experts have their own.
    "operator": (
        r"feed_forward\.mul",
        r"feed_forward\.(shared_)?experts\.mul",
        r"feed_forward\.experts\.local_experts\.[0-9]+\.mul",
    ),
    "communication": (r".*\.norm",),
}
"""What `True` stands for."""


Count = int | Literal[True]


@dataclass(frozen=True, slots=True)
class StageCounts:
    """The first so many layers of each pipeline stage; True: all of them."""

    counts: tuple[tuple[Count, ...] | bool, ...]
    """By virtual stage, then by pipeline stage; one row only if not nested. True or False for a whole virtual stage."""
    nested: bool
    """False: the one row counts over all virtual stages, the next layer from each in turn."""


@dataclass(frozen=True, kw_only=True)
class RecomputeRule:
    """One request to recompute, or to leave out of what is recomputed."""

    kind: Kind
    pattern: str | None
    r"""A path of regular expressions joined by ``\.``; None: whole layers."""
    layers: Layers | StageCounts
    """True for all, layers by number or with their stack's name, or counts per pipeline stage."""
    entry: str
    r"""Where it stands, such as ``recompute_config.select_recompute.feed_forward\.mul`` or ``--recompute-layers``."""
    default: bool = False
    """Stands for `True`, so it need not match anything."""


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """What is to be recomputed, the strongest request first: whole layers, operators, communication."""

    rules: tuple[RecomputeRule, ...] = ()
    excludes: tuple[RecomputeRule, ...] = ()
    """Stronger than every rule, whole layers included; each has a pattern."""

    @property
    def active(self) -> bool:
        """Whether anything is to be recomputed."""
        return bool(self.rules)


def read_recompute(
    section: Any, flags: Mapping[str, tuple[str, Any]], with_swap: bool, check: Checker, notices: list[str]
) -> RecomputeConfig:
    """Read the section (None: absent) and what flags say in its place, each as (flag, value) by the section's key."""
    path = "recompute_config"
    found = {} if section is None else check.section(section, path, (*KINDS, *_EXCLUDES, *_GRAPH_ONLY_KEYS))
    rules: list[RecomputeRule] = []
    for key, kind in KINDS.items():
        in_file = not _is_off(found.get(key), zero_is_off=not with_swap)
        if key in flags:
            flag, value = flags[key]
            rules += _read(value, flag, kind, True, check)
            if in_file:
                check.problem(
                    f"{path}.{key}", f"got {given(found[key])}, and {flag} is given as well; allowed: one of the two"
                )
        elif in_file:
            rules += _read(found[key], f"{path}.{key}", kind, with_swap, check)
    excludes: list[RecomputeRule] = []
    for key, of in _EXCLUDES.items():
        value = found.get(key)
        if value is True:
            out = [rule for rule in rules if rule.kind == KINDS[of]]
            rules = [rule for rule in rules if rule.kind != KINDS[of]]
            entries = ", ".join(dict.fromkeys(rule.entry for rule in out))
            what = f"{entries} has no effect: {path}.{key} is True" if out else _idle(f"{path}.{key}", of)
            notices.append(what)
        elif _counts_only(value):
            if not _is_off(value, zero_is_off=True):
                notices.append(f"{path}.{key} has no effect: got {given(value)}, which names no operator to take out")
        elif not _is_off(value, zero_is_off=not with_swap):
            excludes += _read(value, f"{path}.{key}", KINDS[of], with_swap, check)
    for key in (*KINDS, *_EXCLUDES):
        value = found.get(key)
        if not with_swap and _is_off(value, zero_is_off=True) and not _is_off(value, zero_is_off=False):
            notices.append(
                f"{path}.{key}: got {given(value)}, which counts 0 layers and has no effect; numbers are layer indices "
                "only where swap_config.swap is True"
            )
    if excludes and not rules and not check.problems:
        notices.append(_idle(", ".join(rule.entry for rule in excludes), "anything"))
        excludes = []
    _read_graph_only(found, path, check, notices)
    return RecomputeConfig(rules=tuple(rules), excludes=tuple(excludes))


def _idle(entries: str, of: str) -> str:
    asked = "nothing is recomputed" if of == "anything" else f"there is no {of} to take out"
    return f"{entries} has no effect: {asked}"


def _is_off(value: Any, zero_is_off: bool, depth: int = 3) -> bool:
    """False, None and empty; lists and mappings of these; 0 where numbers count layers rather than name them."""
    if isinstance(value, Mapping | list | tuple):
        items = value.values() if isinstance(value, Mapping) else value
        return depth > 0 and all(_is_off(item, zero_is_off, depth - 1) for item in items)  # YAML may contain itself
    return value is None or value is False or value == "" or (zero_is_off and type(value) is int and value == 0)


def _read(value: Any, path: str, kind: Kind, with_swap: bool, check: Checker) -> list[RecomputeRule]:
    """The rules that one key or flag asks for; `value` is not off."""
    if kind == "layer":
        layers = _read_layers(value, path, with_swap, check)
        return [] if layers is None else [RecomputeRule(kind=kind, pattern=None, layers=layers, entry=path)]
    if value is True or _counts_only(value):
        layers = _read_layers(value, path, with_swap, check)
        if layers is None:
            return []
        return [
            RecomputeRule(kind=kind, pattern=pattern, layers=layers, entry=path, default=True)
            for pattern in DEFAULT_PATTERNS[kind]
        ]
    if not isinstance(value, Mapping):
        if not isinstance(value, str | list | tuple):
            numbers = "layer indices" if with_swap else "layer counts per pipeline stage"
            check.wrong(
                path,
                value,
                f"True or False, patterns, {numbers}, or a mapping from pattern to True, False or {numbers}",
            )
            return []
        patterns = dict.fromkeys(check.patterns(value, path) or ())
        return [RecomputeRule(kind=kind, pattern=p, layers=True, entry=_below(path, p)) for p in patterns]
    rules = []
    for pattern, where in ((pattern, _below(path, pattern)) for pattern in value):
        error = "a string" if not isinstance(pattern, str) else pattern_error(pattern)
        if error is not None:
            detail = "strings" if error == "a string" else rf"regular expressions joined by '\.' ({error})"
            check.wrong(path, pattern, f"names that are {detail}")
        if _is_off(value[pattern], zero_is_off=not with_swap):
            continue
        layers = _read_layers(value[pattern], where, with_swap, check)
        if error is None and layers is not None:
            rules.append(RecomputeRule(kind=kind, pattern=pattern, layers=layers, entry=where))
    return rules


def _counts_only(value: Any) -> bool:
    """Numbers without a pattern: the default operators of so many layers, or of these."""
    return isinstance(value, list | tuple) and not any(isinstance(item, str | Mapping | None) for item in value)


def _below(path: str, pattern: object) -> str:
    """Where a pattern stands: below a key, or behind a flag."""
    return f"{path} {pattern}" if path.startswith("--") else f"{path}.{pattern}"


def _read_layers(value: Any, path: str, with_swap: bool, check: Checker) -> Layers | StageCounts | None:
    if value is True:
        return True
    return check.layers(value, path) if with_swap or _names_only(value) else _read_counts(value, path, check)


def _names_only(value: Any) -> bool:
    """Layers with their stack's name, which count nothing, with or without swap."""
    rows = value if isinstance(value, list | tuple) else ()
    items = [item for row in rows for item in (row if isinstance(row, list | tuple) else [row])]
    return bool(items) and all(isinstance(item, str) for item in items)


def _read_counts(value: Any, path: str, check: Checker) -> StageCounts | None:
    """``[n0, n1, ...]``, or one such list for each virtual stage; True or False for all or none of a stage's layers."""
    allowed = (
        "True (all layers), layer counts [n0, n1, ...] for the pipeline stages, or one such list for each virtual "
        "stage (numbers are layer indices only where swap_config.swap is True), or only layers with their stack's name "
        "('encoder:0')"
    )
    if not isinstance(value, list | tuple):
        check.wrong(path, value, allowed)
        return None
    nested = any(isinstance(item, list | tuple) for item in value)
    if nested and not all(isinstance(item, list | tuple | bool) for item in value):
        check.wrong(path, value, allowed)
        return None
    before = len(check.problems)
    rows: list[tuple[Count, ...] | bool] = []
    for outer, row in enumerate(value if nested else [value]):
        if isinstance(row, bool):
            rows.append(row)
            continue
        for inner, number in enumerate(row):
            where = f"{path}[{outer}][{inner}]" if nested else f"{path}[{inner}]"
            if not (isinstance(number, bool) or is_whole(number)):
                check.wrong(where, number, "a number of layers, an integer of at least 0, or True for all of the stage")
        rows.append(tuple(0 if number is False else number for number in row))
    return StageCounts(tuple(rows), nested) if len(check.problems) == before else None


def _read_graph_only(found: Mapping[str, Any], path: str, check: Checker, notices: list[str]) -> None:
    unused = []
    for key in _GRAPH_ONLY_KEYS:
        value = found.get(key)
        if not isinstance(value, bool | list | tuple | None):
            check.wrong(f"{path}.{key}", value, "True or False")
        elif not _is_off(value, zero_is_off=True):
            unused.append(key)
    if unused:
        notices.append(f"{path}: {', '.join(unused)} has no effect here, it concerns MindSpore's graph compiler")
