"""What happens to the activations of each (layer, operator): the configuration joined with a model's operators."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mindspeed_mem.plan.checks import Layers, MemoryConfigError, as_ranges, out_of_range
from mindspeed_mem.plan.config import LayerSwap, MemoryConfig, OpSwap, SwapConfig
from mindspeed_mem.plan.operators import Match, match, near_patterns, selects, with_inline

__all__ = ["DEFAULT_PATTERN", "MemoryPlan", "Swap", "resolve"]

DEFAULT_PATTERN = r".*\.flash_attention"
"""What the default policy swaps, in every layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Swap:
    """The decision to swap an operator's activations."""

    distance: int
    """In operators, at least 1: the release comes so much later, the copy back starts so much earlier."""
    activations: str
    """``produced`` by the operator, ``saved`` for its backward, or ``both``."""
    entry: str
    """Who asked for it, such as ``swap_config.op_swap[1]``."""


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """One pattern of an `op_swap` entry, or (with pattern None) one `layer_swap` entry."""

    pattern: str | None
    layers: Layers
    swap: Swap
    path: str

    def covers(self, layer: int) -> bool:
        return self.layers is True or layer in self.layers


class MemoryPlan:
    """Every (layer, operator)'s decision. Made by `resolve`; the same on all ranks if its arguments are."""

    def __init__(self, rules: Sequence[_Rule], layers: Mapping[int, tuple[str, ...]], num_layers: int):
        self._op_rules = [rule for rule in rules if rule.pattern is not None]
        self._layer_rules = [rule for rule in rules if rule.pattern is None]
        self._layers = layers
        self._all_layers = sorted({*range(num_layers), *layers})
        self._decisions: dict[int, dict[str, Swap | None]] = {layer: {} for layer in self._all_layers}
        self._log: list[str] = []
        self._idle: dict[tuple[str, str], set[int]] = {}
        self.notices: tuple[str, ...] = ()
        """What is configured but has no effect, one line each; to be logged once, on rank 0."""
        matches = lru_cache(maxsize=None)(match)  # layers of one kind have equal operators
        for layer in self._all_layers:
            self._fill(layer, matches)
        self.notices = tuple(
            f"{path} has no effect in layer{'s' if len(found) > 1 else ''} {as_ranges(found)}: {why}"
            for (path, why), found in self._idle.items()
        )

    def decision(self, layer: int, op: str) -> Swap | None:
        """What to do with an operator's activations: a `Swap`, or None to keep them on the device.

        Args:
            layer: global layer index, counted from 0.
            op: path in Megatron's names below the layer; one that was not known at the start is decided by the same
                patterns when it is first asked for. ``""``: the layer's own code, outside any operator.
        """
        known = self._decisions.get(layer)
        if known is None:
            return None
        try:
            return known[op]
        except KeyError:
            swap = known[op] = self._late_decision(layer, op)
            return swap

    def layers_touched(self) -> set[int]:
        """The layers in which something is swapped; a layer whose operators are unknown counts if it is named."""
        return {
            layer
            for layer in self._all_layers
            if any(self._decisions[layer].values())
            or self._layer_swap(layer) is not None
            or (layer not in self._layers and any(r.covers(layer) for r in (*self._op_rules, *self._layer_rules)))
        }

    @property
    def selects_by_saver(self) -> bool:
        """Whether any entry moves what an operator saves, whoever produced it (``activations: saved`` or ``both``)."""
        return any(rule.swap.activations != "produced" for rule in (*self._op_rules, *self._layer_rules))

    def log_lines(self) -> list[str]:
        """The decisions as MindFormers logs them, layer by layer."""
        return list(self._log)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is swapped anywhere."""
        return not self.layers_touched()

    def _late_decision(self, layer: int, op: str) -> Swap | None:
        """For an operator met only while running: as if it had been known."""
        rules = (rule for rule in self._op_rules if rule.covers(layer) and selects(rule.pattern or "", op))
        first = next(rules, None)
        return self._layer_swap(layer) if first is None else first.swap

    def _layer_swap(self, layer: int) -> Swap | None:
        return next((rule.swap for rule in self._layer_rules if rule.covers(layer)), None)

    def _fill(self, layer: int, matches: Callable[..., list[Match]]) -> None:
        """Decide one layer's known operators: first entries win, and `op_swap` over `layer_swap`."""
        operators, decided = self._layers.get(layer), self._decisions[layer]
        listed: list[tuple[_Rule, Match]] = []
        for rule in self._op_rules if operators is not None else ():
            if rule.covers(layer):
                found = matches(rule.pattern, operators)
                listed += self._apply(rule, layer, found, decided)
        winner = self._layer_swap(layer)
        for rule in self._layer_rules:
            if rule.covers(layer) and winner is not None and _kind(rule.swap) != _kind(winner):
                self._note(rule.path, f"{winner.entry} names the layer first", layer)
        for operator in operators or ():
            decided.setdefault(operator, winner)
        if winner is not None:
            self._log.append(f"Set layer swap at layer {layer} and value is: {winner.distance}")
        if listed:
            self._log.append(f"Set op_swap at layer {layer}: {_listing(listed, self._op_rules)}")

    def _apply(
        self, rule: _Rule, layer: int, found: list[Match], decided: dict[str, Swap | None]
    ) -> list[tuple[_Rule, Match]]:
        """Give the operators found to `rule` unless they are taken; the matches that gained any."""
        gained: list[tuple[_Rule, Match]] = []
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

    def _note(self, path: str, why: str, layer: int) -> None:
        self._idle.setdefault((path, why), set()).add(layer)


def _kind(swap: Swap) -> tuple[int, str]:
    return swap.distance, swap.activations


def _listing(listed: list[tuple[_Rule, Match]], rules: list[_Rule]) -> str:
    """The matches of one layer, patterns in the order of their first entry, nothing twice at one value."""
    order = list(dict.fromkeys(rule.pattern for rule in rules))
    parts = []
    for rule, hit in sorted(listed, key=lambda item: order.index(item[0].pattern)):
        inside = any(
            _kind(other.swap) == _kind(rule.swap) and hit.node.startswith(f"{container.node}.")
            for other, container in listed
        )
        if not inside:
            parent, _, name = hit.shown.rpartition(".")
            parts.append(f"{parent}.{name}, value={rule.swap.distance}")
    return ", ".join(parts)


def _rules(config: SwapConfig) -> list[_Rule]:
    if not config.swap:
        return []
    if config.layer_swap is None and config.op_swap is None:
        path = "swap_config (default policy)"
        swap = Swap(distance=config.default_prefetch, activations=config.activations, entry=path)
        return [_Rule(pattern=DEFAULT_PATTERN, layers=True, swap=swap, path=path)]
    rules = []
    for entry in (*(config.op_swap or ()), *(config.layer_swap or ())):
        swap = Swap(distance=entry.backward_prefetch, activations=entry.activations, entry=entry.entry)
        names = entry.op_name if isinstance(entry, OpSwap) else (None,)
        for index, name in enumerate(names):
            path = entry.entry if name is None else f"{entry.entry}.op_name"
            path += f"[{index}]" if len(names) > 1 else ""
            rules.append(_Rule(pattern=name, layers=entry.layers, swap=swap, path=path))
    return rules


def resolve(config: MemoryConfig, layers: Mapping[int, Collection[str]], num_layers: int) -> MemoryPlan:
    """Join a configuration with a model.

    Args:
        config: from `load_memory_config`.
        layers: for each global layer index the operators (modules) of that layer, as paths in Megatron's names.
            Layers of other pipeline stages may be missing, but then no mistake in a name can be found there. Indices
            from `num_layers` on (multi-token prediction) are reached by ``layers: True`` and by naming them.
        num_layers: the model's layers, over all pipeline stages.

    Raises:
        MemoryConfigError: all layers out of range, and all patterns that match nothing in any of their layers.
    """
    rules = _rules(config.swap)
    known = {layer: with_inline(operators) for layer, operators in layers.items()}
    problems = _range_problems(config.swap, known, num_layers) + _name_problems(rules, known)
    if problems:
        raise MemoryConfigError(problems, config.source)
    return MemoryPlan(rules, known, num_layers)


def _range_problems(config: SwapConfig, known: Collection[int], num_layers: int) -> list[str]:
    problems = []
    entries: list[LayerSwap | OpSwap] = [*(config.layer_swap or ()), *(config.op_swap or ())]
    for entry in entries if config.swap else ():
        layers = () if entry.layers is True else entry.layers
        if outside := {layer for layer in layers if layer >= num_layers and layer not in known}:
            problems.append(f"{entry.entry}.layers: {out_of_range(outside, num_layers)}")
    return problems


def _name_problems(rules: Sequence[_Rule], known: Mapping[int, tuple[str, ...]]) -> list[str]:
    problems = []
    for rule in rules:
        places = [layer for layer in known if rule.covers(layer)]
        trees = {known[layer] for layer in places}
        if rule.pattern is None or not trees or any(match(rule.pattern, tree) for tree in trees):
            continue
        near = near_patterns(rule.pattern, list(dict.fromkeys(op for tree in sorted(trees) for op in tree)))
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        problems.append(
            f"{rule.path}: got {rule.pattern!r}, which matches no operator in layers {as_ranges(places)}; "
            f"{hint}allowed: what `python -m mindspeed_mem ops` prints"
        )
    return problems
