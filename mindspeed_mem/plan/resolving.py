"""Joining a configuration with a model: all that can only be wrong about the two together is found here."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from functools import lru_cache
from typing import NamedTuple

from mindspeed_mem.plan.checks import MemoryConfigError, given
from mindspeed_mem.plan.config import MemoryConfig, SwapConfig, SwapEntry
from mindspeed_mem.plan.layers import Layers, among, as_ranges, in_words, numbered, numbers_in, out_of_range
from mindspeed_mem.plan.memory_plan import DEFAULT_ENTRY, MemoryPlan, SwapRule, swap_rules
from mindspeed_mem.plan.operators import elsewhere, fused, match, names_a_primitive, near_patterns, with_inline
from mindspeed_mem.plan.recomputation import Recomputation
from mindspeed_mem.plan.recompute_config import Count, RecomputeRule, StageCounts

Places = Mapping[int, tuple[int, int]]


def resolve(
    config: MemoryConfig,
    layers: Mapping[int, Collection[str]],
    num_layers: int,
    places: Places | None = None,
    stacks: Mapping[str, range | None] | None = None,
) -> MemoryPlan:
    """Join a configuration with a model.

    Args:
        config: from `load_memory_config`.
        layers: for each global layer index the operators (modules) of that layer, as paths in Megatron's names.
            Layers of other pipeline stages may be missing, but then no mistake in a name can be found there. Indices
            from `num_layers` on (multi-token prediction) are reached by ``layers: True`` and by naming them.
        num_layers: the model's layers, over all pipeline stages.
        places: for each global layer index its pipeline stage and virtual stage, both counted from 0. Only layer
            counts per stage and `stages` of swap entries need it; None: there is one stage.
        stacks: the numbers of each stack's layers, by its name; None: no stack has one.

    Raises:
        MemoryConfigError: all names that no stack has, all layers out of range, all patterns that match nothing in any
            of their layers, and all layer counts that do not fit the stages.
    """
    known = {layer: with_inline(operators) for layer, operators in layers.items()}
    problems: list[str] = []
    config = _by_number(config, stacks or {}, problems)
    problems += _swap_range_problems(config.swap, known, num_layers)
    notices: list[str] = []
    stages = _Stages(dict.fromkeys(range(num_layers), (0, 0)) if places is None else places, num_layers)
    rules, excludes = (
        [_with_layers(rule, stages, known, problems, notices) for rule in found]
        for found in (config.recompute.rules, config.recompute.excludes)
    )
    swaps = [_on_stages(rule, stages, problems) for rule in swap_rules(config.swap)]
    names = [_Name(rule.path, rule.pattern, rule.layers) for rule in swaps]
    for rule in (*rules, *excludes):
        assert not isinstance(rule.layers, StageCounts)  # there are layers in its place
        names += [] if rule.default else [_Name(rule.entry, rule.pattern, rule.layers)]
    trees = _Trees(known)
    absent = [name for name in names if trees.matches_nothing(name)]
    part_of = {name.path: where for name in absent if (where := trees.fused(name))}
    unknown = [name for name in absent if name.path not in part_of]
    problems += [trees.problem(name) for name in unknown if not names_a_primitive(name.pattern or "")]
    if problems:
        raise MemoryConfigError(problems, config.source)
    decisive = [
        *((r.pattern, _canonical(r.layers), r.swap.distance, r.swap.activations) for r in swaps),
        *((r.kind, r.pattern, _canonical(r.layers)) for r in rules),
        *(("exclude", r.pattern, _canonical(r.layers)) for r in excludes),
    ]
    notices += [f"{path}: no effect, since here it is part of {' and '.join(where)}" for path, where in part_of.items()]
    if unknown:
        meant = list(dict.fromkeys(one for name in unknown for one in trees.elsewhere(name)))
        hint = f"did you mean {' or '.join(meant)}? " if meant else ""
        notices.append(
            f"{', '.join(name.path for name in unknown)}: no effect, since no operator of this model stands for these "
            f"primitives of MindFormers; {hint}"
            "`python -m mindspeed_mem ops` prints the operators"
        )
    if absent:
        entries = {name.path for name in absent}
        swaps = [rule for rule in swaps if rule.path not in entries]
        rules, excludes = ([rule for rule in found if rule.entry not in entries] for found in (rules, excludes))
    recomputation = Recomputation(rules, excludes, known, sorted({*range(num_layers), *known}))
    return MemoryPlan(
        swaps,
        known,
        num_layers,
        recomputation,
        swap_recompute_inputs=config.swap.swap and config.swap.swap_recompute_inputs,
        decisive=decisive,
        notices=list(dict.fromkeys(notices)),
    )


def _by_number(config: MemoryConfig, stacks: Mapping[str, range | None], problems: list[str]) -> MemoryConfig:
    """The configuration with numbers in the place of layers with their stack's name."""

    def replaced(entries: Sequence, below: str = "") -> tuple:
        done = []
        for entry in entries:
            if not isinstance(entry.layers, StageCounts):
                layers, wrong = numbered(entry.layers, stacks)
                found = [f"{entry.entry}{below}: {one}" for one in wrong]
                problems.extend(one for one in found if one not in problems)  # once for all defaults
                entry = dataclasses.replace(entry, layers=layers)
            done.append(entry)
        return tuple(done)

    swap, recompute = config.swap, config.recompute
    if swap.swap:
        swap = dataclasses.replace(
            swap,
            layer_swap=None if swap.layer_swap is None else replaced(swap.layer_swap, ".layers"),
            op_swap=None if swap.op_swap is None else replaced(swap.op_swap, ".layers"),
        )
    recompute = dataclasses.replace(recompute, rules=replaced(recompute.rules), excludes=replaced(recompute.excludes))
    return dataclasses.replace(config, swap=swap, recompute=recompute)


def _canonical(layers: Layers | StageCounts) -> object:
    return sorted(layers) if isinstance(layers, tuple) else layers


def _swap_range_problems(config: SwapConfig, known: Collection[int], num_layers: int) -> list[str]:
    entries: list[SwapEntry] = [*(config.layer_swap or ()), *(config.op_swap or ())]
    found = ((e, _outside(e.layers, known, num_layers)) for e in entries if config.swap)
    return [f"{entry.entry}.layers: {out_of_range(outside, num_layers)}" for entry, outside in found if outside]


def _outside(layers: Layers, known: Collection[int], num_layers: int) -> set[int]:
    return {layer for layer in numbers_in(layers) if layer >= num_layers and layer not in known}


def _with_layers(
    rule: RecomputeRule, stages: _Stages, known: Collection[int], problems: list[str], notices: list[str]
) -> RecomputeRule:
    """The rule with layer indices in the place of counts per stage; of no layer if there is a problem."""
    if isinstance(rule.layers, StageCounts):
        found = list(stages.problems(rule.layers))
        if not found:
            notices += [f"{rule.entry}{where}: {text}" for where, text in stages.notices(rule.layers)]
        elif not rule.default or f"{rule.entry}{found[0][0]}: {found[0][1]}" not in problems:  # once for all defaults
            problems += [f"{rule.entry}{where}: {text}" for where, text in found]
        return dataclasses.replace(rule, layers=() if found else tuple(stages.first(rule.layers)))
    if outside := _outside(rule.layers, known, stages.num_layers):
        problems.append(f"{rule.entry}: {out_of_range(outside, stages.num_layers)}")
    return rule


def _on_stages(rule: SwapRule, stages: _Stages, problems: list[str]) -> SwapRule:
    """The rule with those of its layers that are on its stages; of no layer if there is a problem."""
    if rule.stages is True:
        return rule
    there = stages.layers_of(rule.stages)
    layers = tuple(sorted(among(there, rule.layers)))
    if outside := {stage for stage in rule.stages if stage >= stages.pipeline} if stages.complete else ():
        last = f"0 to {stages.pipeline - 1}" if stages.pipeline > 1 else "0"
        plural = "s" if len(outside) > 1 else ""
        problems.append(
            f"{rule.swap.entry}.stages: got stage{plural} {as_ranges(outside)}; allowed: {last}, the pipeline stages "
            "with layers, counted from 0"
        )
    elif not layers and stages.complete:
        where = f"{as_ranges(there)} are there" if there else "there are none"
        problems.append(
            f"{rule.swap.entry}.stages: got {as_ranges(rule.stages)}, where none of its layers is; "
            f"of all layers {where}"
        )
    return dataclasses.replace(rule, layers=layers)


class _Stages:
    """Which layers each stage has, in model order."""

    def __init__(self, places: Places, num_layers: int):
        self.num_layers = num_layers
        inside = {layer: place for layer, place in sorted(places.items()) if layer < num_layers}
        self.pipeline = 1 + max((stage for stage, _ in inside.values()), default=0)
        self.virtual = 1 + max((chunk for _, chunk in inside.values()), default=0)
        self._of: dict[tuple[int, int | None], list[int]] = {}
        self._layers: dict[tuple[int, ...], frozenset[int]] = {}
        for layer, (stage, chunk) in inside.items():
            self._of.setdefault((stage, chunk), []).append(layer)
            self._of.setdefault((stage, None), []).append(layer)
        self.complete = len(inside) == num_layers
        """Whether the place of every layer is known."""

    def layers_of(self, stages: tuple[int, ...]) -> Set[int]:
        if stages not in self._layers:  # entries for one layer each ask for the same
            self._layers[stages] = frozenset(layer for stage in stages for layer in self._of.get((stage, None), ()))
        return self._layers[stages]

    def _rows(self, counts: StageCounts) -> list[tuple[Count, ...]]:
        """A count for each stage, one row for each virtual stage, or one for all if they are not nested.

        Zeros for stages beyond the last that has layers are left out: it may hold only the loss.
        """
        rows = [(row,) * self.pipeline if isinstance(row, bool) else row for row in counts.counts]
        rows = [_without_zeros(row, self.pipeline) for row in rows]
        while counts.nested and len(rows) > self.virtual and not any(rows[-1]):
            rows.pop()
        return rows

    def _cells(self, counts: StageCounts) -> Iterator[tuple[str, Count, list[int], str]]:
        """Each count with its place in the value, the layers it counts in order, and the name of their stage."""
        for chunk, row in enumerate(self._rows(counts)):
            for stage, count in enumerate(row):
                if counts.nested:
                    there = self._of.get((stage, chunk), [])
                    yield f"[{chunk}][{stage}]", count, there, f"pipeline stage {stage}, virtual stage {chunk}"
                else:
                    turns = itertools.zip_longest(*(self._of.get((stage, part), ()) for part in range(self.virtual)))
                    there = [layer for turn in turns for layer in turn if layer is not None]
                    yield f"[{stage}]", count, there, f"pipeline stage {stage}"

    def first(self, counts: StageCounts) -> list[int]:
        """The layers counted; no more than there are."""
        cells = self._cells(counts)
        return sorted(layer for _, count, there, _ in cells for layer in (there if count is True else there[:count]))

    def problems(self, counts: StageCounts) -> Iterator[tuple[str, str]]:
        """What does not fit, each with its place in the value."""
        rows = self._rows(counts)
        hint = "; numbers are layer indices only where swap_config.swap is True, or in a flag"
        if counts.nested and len(rows) != self.virtual:
            yield "", f"got {len(rows)} lists; allowed: {self.virtual}, one for each virtual stage{hint}"
        for chunk, row in enumerate(rows):
            if len(row) > self.pipeline or (counts.nested and len(row) < self.pipeline):
                yield (
                    f"[{chunk}]" if counts.nested else "",
                    f"got {given(list(row))}; allowed: {self.pipeline} counts, one for each pipeline stage{hint}",
                )

    def notices(self, counts: StageCounts) -> Iterator[tuple[str, str]]:
        """What fits only because more layers than there are count as all, and a missing count as none."""
        for where, count, there, name in self._cells(counts):
            if count is not True and count > len(there):
                have = in_words(there) if there else "no layers"
                yield where, f"got {count}, but {name} has {have}: these are all that count"
        if not counts.nested and len(row := self._rows(counts)[0]) < self.pipeline:
            missing = f"stage{'s' if self.pipeline - len(row) > 1 else ''} {as_ranges(range(len(row), self.pipeline))}"
            yield "", f"got {given(list(row))}, no count for pipeline {missing}: nothing is recomputed there"


def _without_zeros(row: tuple[Count, ...], length: int) -> tuple[Count, ...]:
    end = len(row)
    while end > length and not row[end - 1]:
        end -= 1
    return row[:end]


class _Name(NamedTuple):
    """A pattern in the configuration, and where it is to be found."""

    path: str
    pattern: str | None
    layers: Layers


class _Trees:
    """The operators of the layers that are known; layers of one kind have equal ones, which are looked at once."""

    def __init__(self, known: Mapping[int, tuple[str, ...]]):
        self._known = known
        self._everywhere = set(known.values())
        self._matches = lru_cache(maxsize=None)(match)
        self._near = lru_cache(maxsize=None)(near_patterns)

    def matches_nothing(self, name: _Name) -> bool:
        """Whether its layers are known and have no such operator."""
        trees = self._of(name)
        return name.pattern is not None and bool(trees) and not any(self._matches(name.pattern, one) for one in trees)

    def fused(self, name: _Name) -> list[str]:
        """The operators that contain what it names."""
        found = (node for tree in sorted(self._of(name)) for node in fused(name.pattern or "", tree))
        return list(dict.fromkeys(found))

    def elsewhere(self, name: _Name) -> list[str]:
        """Operators that it would name in other parents, or in other case."""
        return elsewhere(name.pattern or "", self._operators(name))

    def problem(self, name: _Name) -> str:
        """What to say of a name that matches nothing."""
        near = self._near(name.pattern or "", self._operators(name))
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        if name.path == DEFAULT_ENTRY:
            hint = "say what is to be swapped by layer_swap or op_swap; "
        return (
            f"{name.path}: got {name.pattern!r}, which matches no operator in "
            f"{in_words(among(self._known, name.layers))}; {hint}allowed: what `python -m mindspeed_mem ops` prints"
        )

    def _operators(self, name: _Name) -> tuple[str, ...]:
        return tuple(dict.fromkeys(op for tree in sorted(self._of(name)) for op in tree))

    def _of(self, name: _Name) -> set[tuple[str, ...]]:
        if name.layers is True:
            return self._everywhere
        return {self._known[layer] for layer in among(self._known, name.layers)}
