"""What happens to the activations of each (layer, operator): the configuration joined with a model's operators."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mindspeed_mem.plan.checks import Distance
from mindspeed_mem.plan.config import OpSwap, SwapConfig, SwapEntry
from mindspeed_mem.plan.layers import Layers, Stages, by_layer, in_words
from mindspeed_mem.plan.operators import Match, match, selects, within
from mindspeed_mem.plan.recomputation import Recomputation, Recompute, outermost

DEFAULT_PATTERN = r".*\.flash_attention"
"""What the default policy swaps, in every layer."""
DEFAULT_ENTRY = "swap_config (default policy)"
"""What that is called in messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Swap:
    """The decision to swap an operator's activations."""

    distance: Distance
    """In operators, at least 1, or Auto: the release comes so much later, the copy back starts so much earlier."""
    activations: str
    """``produced`` by the operator, ``saved`` for its backward, or ``both``."""
    entry: str
    """Who asked for it, such as ``swap_config.op_swap[1]``."""


@dataclass(frozen=True, kw_only=True)
class SwapRule:
    """One pattern of an `op_swap` entry, or (with pattern None) one `layer_swap` entry."""

    pattern: str | None
    layers: Layers
    swap: Swap
    path: str
    stages: Stages = True
    """As in the entry; `resolve` has put it into `layers`."""


class MemoryPlan:
    """Every (layer, operator)'s decision. Made by `resolve`; the same on all ranks if its arguments are."""

    def __init__(
        self,
        rules: Sequence[SwapRule],
        layers: Mapping[int, tuple[str, ...]],
        num_layers: int,
        recomputation: Recomputation,
        *,
        swap_recompute_inputs: bool = False,
        decisive: Sequence[object] = (),
        notices: Sequence[str] = (),
    ):
        self._layers = layers
        self._all_layers = sorted({*range(num_layers), *layers})
        self._op_rules = by_layer((rule for rule in rules if rule.pattern is not None), self._all_layers)
        self._layer_rules = by_layer((rule for rule in rules if rule.pattern is None), self._all_layers)
        self._recomputation = recomputation
        self._decisions: dict[int, dict[str, Swap | None]] = {layer: {} for layer in self._all_layers}
        self._log: list[str] = []
        self._idle: dict[tuple[str, str, str], set[int]] = {}
        self.swap_recompute_inputs = swap_recompute_inputs
        """Whether a swap takes effect, too, where its activation is what a recomputed region starts from."""
        self.selects_by_saver = any(rule.swap.activations != "produced" for rule in rules)
        """Whether any entry moves what an operator saves, whoever produced it (``activations: saved`` or ``both``)."""
        self.recomputes = any(recomputation.anywhere_in(layer) for layer in self._all_layers)
        """Whether any forward runs again."""
        matches = lru_cache(maxsize=None)(match)  # layers of one kind have equal operators
        order = {pattern: place for place, pattern in enumerate(dict.fromkeys(rule.pattern for rule in rules))}
        for layer in self._all_layers:
            self._log += recomputation.log_lines(layer)
            self._fill(layer, matches, order)
        swaps_idle = (
            f"{path} has no effect{on} in {in_words(found)}: {why}" for (path, on, why), found in self._idle.items()
        )
        self.notices: tuple[str, ...] = (*notices, *swaps_idle, *recomputation.notices)
        """What is configured but has no effect, one line each; to be logged once, on rank 0."""
        text = repr((num_layers, swap_recompute_inputs, *decisive))
        self._fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]

    def decision(self, layer: int, op: str) -> Swap | None:
        """What to do with an operator's activations: a `Swap`, or None to keep them on the device.

        Args:
            layer: global layer index, counted from 0.
            op: path in Megatron's names below the layer; one that was not known at the start is decided by the same
                patterns when it is first asked for. ``""``: the layer's own code, outside any operator.
        """
        known = self._decisions.get(layer)
        if known is None or self._recomputation.decision(layer, op) is not None:
            return None
        try:
            return known[op]
        except KeyError:
            swap = known[op] = self._late_decision(layer, op)
            return swap

    def recompute(self, layer: int, op: str) -> Recompute | None:
        """Whether an operator's forward runs again, and who asked for it; `decision` is None there.

        Args:
            layer: global layer index, counted from 0.
            op: as for `decision`. ``""``: the whole layer, if nothing in it is excluded.

        A recomputed region starts at the outermost operator that has an answer; all in it have one, too. What contains
        something excluded has none.
        """
        return self._recomputation.decision(layer, op)

    def recompute_entries(self, layer: int) -> set[str]:
        """Who asked for what runs again in this layer."""
        found = (self.recompute(layer, op) for op in ("", *self._layers.get(layer, ())))
        return {answer.entry for answer in found if answer is not None}

    def swap_entries(self, layer: int) -> set[str]:
        """Who asked for what leaves in this layer."""
        found = (self.decision(layer, op) for op in ("", *self._layers.get(layer, ())))
        return {swap.entry for swap in found if swap is not None}

    def fingerprint(self) -> str:
        """Short and equal for equal plans, to compare ranks: who asked and which layers a rank knows do not count."""
        return self._fingerprint

    def operators_in(self, layer: int) -> int:
        """How many operators a layer is known to have, at least 1."""
        return max(len(self._layers.get(layer, ())), 1)

    def layers_touched(self) -> set[int]:
        """The layers with anything swapped or recomputed; one whose operators are unknown counts if it is named."""
        return {
            layer
            for layer in self._all_layers
            if any(self._decisions[layer].values())
            or self._recomputation.anywhere_in(layer)
            or self._layer_swap(layer) is not None
            or (layer not in self._layers and self._op_rules[layer])
        }

    def log_lines(self) -> list[str]:
        """The decisions as MindFormers logs them, layer by layer."""
        return list(self._log)

    def _late_decision(self, layer: int, op: str) -> Swap | None:
        """For an operator met only while running: as if it had been known."""
        rules = (rule for rule in self._op_rules[layer] if selects(rule.pattern or "", op))
        first = next(rules, None)
        return self._layer_swap(layer) if first is None else first.swap

    def _layer_swap(self, layer: int) -> Swap | None:
        return next((rule.swap for rule in self._layer_rules[layer]), None)

    def _fill(self, layer: int, matches: Callable[..., list[Match]], order: Mapping[str | None, int]) -> None:
        """Decide one layer's known operators: first entries win, and `op_swap` over `layer_swap`."""
        operators, decided = self._layers.get(layer), self._decisions[layer]
        listed: list[tuple[SwapRule, Match]] = []
        for rule in self._op_rules[layer] if operators is not None else ():
            found = matches(rule.pattern, operators)
            listed += self._apply(rule, layer, found, decided)
        winner = self._layer_swap(layer)
        for rule in self._layer_rules[layer]:
            if winner is not None and _kind(rule.swap) != _kind(winner):
                self._note(rule.path, f"{winner.entry} names the layer first", layer)
        for operator in operators or ():
            decided.setdefault(operator, winner)
        self._yield_to_recompute(layer, decided, winner)
        listed = [(rule, hit) for rule, hit in listed if any(decided[op] is rule.swap for op in hit.operators)]
        if winner is not None and self.recompute(layer, "") is None:
            self._log.append(f"Set layer swap at layer {layer} and value is: {winner.distance}")
        if listed:
            self._log.append(f"Set op_swap at layer {layer}: {_listing(listed, order)}")

    def _apply(
        self, rule: SwapRule, layer: int, found: list[Match], decided: dict[str, Swap | None]
    ) -> list[tuple[SwapRule, Match]]:
        """Give the operators found to `rule` unless they are taken; the matches that gained any."""
        gained: list[tuple[SwapRule, Match]] = []
        taken: dict[str, set[str]] = {}
        for hit in found:
            new = [operator for operator in hit.operators if operator not in decided]
            for operator in hit.operators:
                earlier = decided.setdefault(operator, rule.swap)
                if earlier is not None and _kind(earlier) != _kind(rule.swap):
                    taken.setdefault(earlier.entry, set()).add(operator)
            if new:
                gained.append((rule, hit))
        if not found and rule.layers is not True:
            self._note(rule.path, f"{rule.pattern!r} matches no operator there", layer)
        if found and not gained:
            for entry, operators in sorted(taken.items()):
                self._note(rule.path, f"{entry} names {', '.join(sorted(operators))} first", layer)
        return gained

    def _yield_to_recompute(self, layer: int, decided: dict[str, Swap | None], layer_swap: Swap | None) -> None:
        """Take back the swaps of operators whose forward runs again."""
        lost: dict[tuple[str, str], list[str]] = {}
        whole = self.recompute(layer, "")
        if whole is not None and layer_swap is not None:
            lost[layer_swap.entry, whole.entry] = []
        for operator, swap in decided.items():
            again = None if swap is None else self.recompute(layer, operator)
            if swap is not None and again is not None:
                decided[operator] = None
                lost.setdefault((swap.entry, again.entry), []).append(operator)
        for (entry, by), operators in lost.items():
            everything = whole is not None and layer_swap is not None and entry == layer_swap.entry
            on = "" if everything else f" on {', '.join(outermost(dict.fromkeys(operators)))}"
            what = "the whole layer is recomputed" if everything else "recompute goes over swap"
            self._note(entry, f"{what} ({by})", layer, on)

    def _note(self, path: str, why: str, layer: int, on: str = "") -> None:
        self._idle.setdefault((path, on, why), set()).add(layer)


def _kind(swap: Swap) -> tuple[Distance, str]:
    return swap.distance, swap.activations


def _listing(listed: list[tuple[SwapRule, Match]], order: Mapping[str | None, int]) -> str:
    """The matches of one layer, patterns in the order of their first entry, nothing twice at one value."""
    parts = []
    for rule, hit in sorted(listed, key=lambda item: order[item[0].pattern]):
        inside = any(
            _kind(other.swap) == _kind(rule.swap) and within(hit.node, container.node) for other, container in listed
        )
        if not inside:
            parent, _, name = hit.shown.rpartition(".")
            parts.append(f"{parent}.{name}, value={rule.swap.distance}")
    return ", ".join(dict.fromkeys(parts))  # one name may be of two operators: `add` of both residual additions


def swap_rules(config: SwapConfig) -> list[SwapRule]:
    """What `swap_config` asks for, entry by entry, `op_swap` first."""
    if not config.swap:
        return []
    if config.layer_swap is None and config.op_swap is None:
        swap = Swap(distance=config.default_prefetch, activations=config.activations, entry=DEFAULT_ENTRY)
        return [SwapRule(pattern=DEFAULT_PATTERN, layers=True, swap=swap, path=DEFAULT_ENTRY)]
    rules = []
    entries: list[SwapEntry] = [*(config.op_swap or ()), *(config.layer_swap or ())]
    for entry in entries:
        swap = Swap(distance=entry.backward_prefetch, activations=entry.activations, entry=entry.entry)
        names: tuple[str | None, ...] = entry.op_name if isinstance(entry, OpSwap) else (None,)
        for index, name in enumerate(names):
            path = entry.entry if name is None else f"{entry.entry}.op_name"
            path += f"[{index}]" if len(names) > 1 else ""
            rules.append(SwapRule(pattern=name, layers=entry.layers, swap=swap, path=path, stages=entry.stages))
    return rules
