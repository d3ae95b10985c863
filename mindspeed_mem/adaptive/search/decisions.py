"""From counts to layers: which layers of a block keep, swap or recompute each group.

A swapped group needs time between its forward and its backward, and what is kept last is freed first. So swaps go to
the first layers of a part, recomputation to those after them, and the last layers keep (facts: the first layer of
the backward is the last of the forward). "spread" deals the same counts out evenly instead: the link is then busy all
through a pass, not only in its first part, which pays where a pass has others in flight beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mindspeed_mem.adaptive.problem.definition import Block, LayerClass, Problem

KEEP, SWAP, RECOMPUTE = "K", "S", "R"
NOTHING = "-"
"""Where there is nothing to decide: the first layer's input, which comes from outside."""


@dataclass(frozen=True)
class Count:
    """In how many layers of a block a group is swapped and recomputed; it is kept in the others."""

    swap: int = 0
    recompute: int = 0


Key = tuple[int, int, str]
"""Stage, part, name of the class."""
Counts = Mapping[Key, tuple[Count, ...]]
"""For each block a count for each group of its class."""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """The decisions of one stage."""

    parts: tuple[tuple[str, ...], ...]
    """For each part and layer a letter for each group of the layer's class."""
    distance: int = 1
    """How far ahead swaps are released and fetched, in operators."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # plans are looked up far more often than made
        return hash((self.parts, self.distance))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The decisions for all stages."""

    stages: tuple[StagePlan, ...]
    inputs_move: bool = False
    """Whether what a recomputed operator starts from leaves the device, unless it is recomputed too
    (``swap_recompute_inputs``); otherwise it stays there."""
    window_bytes: int = 0
    """What copies out that are late may hold on each rank before computation waits for them."""
    idle_prefetch: bool = False
    """Whether more copies back start where a pass has ended (``swap_config.idle_prefetch``)."""
    output_gradients: bool = False
    """Whether gradients of outputs are on the host while gradients of weights wait for them
    (``swap_config.output_gradients``)."""


def under(problem: Problem, plan: Plan) -> Problem:
    """The problem with what the plan moves whatever its letters are."""
    return problem.with_output_gradients() if plan.output_gradients else problem


def key(block: Block) -> Key:
    return block.stage, block.part, block.kind.name


def all_kept(problem: Problem) -> dict[Key, tuple[Count, ...]]:
    """The counts of a plan that changes nothing."""
    return {key(block): (Count(),) * len(block.kind.groups) for block in problem.blocks}


def lay_out(
    problem: Problem, counts: Counts, how: str, inputs_move: bool, last: int = 1, only: int | None = None
) -> list[list[list[str]]]:
    """Letters by stage, part and layer, where a layer is a string with a letter for each group; `only` for one stage.

    Where the rule about what recomputation starts from leaves no layer for a recomputation, the group is kept.
    """
    letters = [[[""] * len(part.layers) for part in stage.parts] for stage in problem.stages]
    for block in (one for one in problem.blocks if only in (None, one.stage)):
        for layer, text in _of_block(block, counts[key(block)], how, inputs_move, last).items():
            letters[block.stage][block.part][layer] = text
    return letters


def _of_block(block: Block, counts: Sequence[Count], how: str, inputs_move: bool, last: int) -> dict[int, str]:
    order = in_order(block.layers, how, last)
    swapped: dict[str, set[int]] = {}
    recomputed: dict[str, set[int]] = {}
    found: dict[int, list[str]] = {layer: [] for layer in order}
    for group, count in zip(block.kind.groups, counts, strict=True):  # what a group needs stands before it
        movable = set(block.movable(group))
        places = [layer for layer in order if layer in movable]
        swapped[group.name] = mine = set(places[: count.swap])
        free = [layer for layer in places if layer not in mine]
        may = _may_recompute(block, group.needs, swapped, recomputed, inputs_move)
        allowed = [layer for layer in free if layer in may]
        recomputed[group.name] = again = set(allowed[: count.recompute])
        for layer in order:
            letter = SWAP if layer in mine else RECOMPUTE if layer in again else KEEP
            found[layer].append(letter if layer in movable else NOTHING)
    return {layer: "".join(text) for layer, text in found.items()}


def _may_recompute(
    block: Block,
    needs: Sequence[str],
    swapped: Mapping[str, set[int]],
    recomputed: Mapping[str, set[int]],
    inputs_move: bool,
) -> set[int]:
    """The layers in which what recomputation starts from is where it has to be."""
    layers = set(block.layers)
    if not inputs_move:
        return layers.difference(*(swapped[name] for name in needs))
    groups = [block.kind.groups[block.kind.group_index[name]] for name in needs]
    gone = (swapped[one.name] | recomputed[one.name] | set(block.layers) - set(block.movable(one)) for one in groups)
    return layers.intersection(*gone)


def in_order(layers: Sequence[int], how: str, last: int = 1) -> list[int]:
    """The layers in the order in which they get their action: swap, then recompute, then keep.

    Every beginning of the "spread" order is spread evenly over all layers but the `last`, which come at the end.
    """
    if how == "first":
        return list(layers)
    body, tail = list(layers[: len(layers) - last]), list(layers[len(layers) - last :])
    bits = max(1, (len(body) - 1).bit_length())
    reversed_bits = [int(f"{number:0{bits}b}"[::-1], 2) for number in range(2**bits)]
    return [body[place] for place in reversed_bits if place < len(body)] + tail


def whole_layers_swapped(problem: Problem, plan: Plan, layers: int) -> Plan:
    """The plan where all leaves that the first so many layers of each part make.

    Naming a whole layer also reaches what naming operators does not: what code between them makes, and what the layer
    hands to the next, which starts no second run from it then.
    """
    stages = []
    for stage, of_stage in zip(problem.stages, plan.stages, strict=True):
        parts = []
        for part, texts in zip(stage.parts, of_stage.parts, strict=True):
            kinds = [problem.class_of[name] for name in part.layers]
            made = [SWAP * len(kind.groups) for kind in kinds[:layers]]
            given = [_without_input(*one) for one in zip(kinds, texts, strict=True)][len(made) : len(made) + 1]
            rest = texts[len(made) + len(given) :]
            parts.append((*map(_where_any, texts, [*made, *given, *rest]),))
        stages.append(replace(of_stage, parts=tuple(parts)))
    return replace(plan, stages=tuple(stages))


def _without_input(kind: LayerClass, text: str) -> str:
    """The letters of a layer whose input leaves: nothing runs again in it."""
    again = {group.name: SWAP if group.swappable else KEEP for group in kind.groups}
    pairs = zip(kind.groups, text, strict=True)
    return "".join(
        SWAP if group.from_previous else again[group.name] if letter == RECOMPUTE else letter for group, letter in pairs
    )


def _where_any(before: str, after: str) -> str:
    """The letters after a change, but for those where there is nothing to decide."""
    return "".join(old if old == NOTHING else new for old, new in zip(before, after, strict=True))


def is_valid(kind: LayerClass, text: str, inputs_move: bool) -> bool:
    """Whether a layer's letters can be carried out: groups that can be swapped or made again, and what recomputation
    starts from where it has to be."""
    for group, letter in zip(kind.groups, text, strict=True):
        if letter == SWAP and not group.swappable:
            return False
        if letter == RECOMPUTE:
            if group.recompute_seconds is None:
                return False
            forbidden = KEEP if inputs_move else SWAP
            if any(text[kind.group_index[name]] == forbidden for name in group.needs):
                return False
    return True


def is_valid_stage(problem: Problem, number: int, plan: StagePlan, inputs_move: bool) -> bool:
    """Whether all of a stage's letters can be carried out."""
    parts = zip(problem.stages[number].parts, plan.parts, strict=True)
    rows = {(name, text) for part, letters in parts for name, text in zip(part.layers, letters, strict=True)}
    return all(is_valid(problem.class_of[name], text, inputs_move) for name, text in rows)


def host_bytes(problem: Problem, number: int, plan: StagePlan) -> int:
    """The most that a stage has on the host."""
    parts, later = [], []  # until the backward, and until gradients of weights
    for place, (letters, part) in enumerate(zip(plan.parts, problem.stages[number].parts, strict=True)):
        rows = zip(letters, (problem.class_of[name] for name in part.layers), strict=True)
        swapped = [g for text, kind in rows for g, one in zip(kind.groups, text, strict=True) if one == SWAP]
        parts.append(sum(group.bytes for group in swapped))
        later.append(sum(map(problem.on_host, swapped)) + problem.gradients_on_host(number, place))
    both = [*parts, *later]
    most = problem.whole[number].held
    return max(sum(n * size for n, size in zip((*held, *waits), both, strict=True)) for held, waits in most)
