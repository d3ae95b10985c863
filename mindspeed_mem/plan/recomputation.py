"""Which operators run their forward again: the rules of `recompute_config` joined with a model's operators."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mindspeed_mem.plan.layers import among, by_layer, in_words
from mindspeed_mem.plan.operators import Match, match, selects, within
from mindspeed_mem.plan.recompute_config import RecomputeRule, StageCounts


@dataclass(frozen=True, kw_only=True, slots=True)
class Recompute:
    """The decision to drop an operator's activations and run its forward again."""

    entry: str
    r"""Who asked for it, such as ``recompute_config.select_recompute.feed_forward\.mul``."""
    communication: bool
    """Asked for as communication, for its collectives rather than its arithmetic."""


def outermost(nodes: Mapping[str, object]) -> list[str]:
    """Those nodes that are not below another one of them, in their order."""
    return [node for node in nodes if not any(parent in nodes for parent in _above(node))]


def _above(node: str) -> Iterator[str]:
    while node:
        node = node.rpartition(".")[0]
        yield node


class Recomputation:
    """Every (layer, operator)'s answer to "does its forward run again?".

    Excludes win over rules. What contains something excluded does not run again as a whole, and its other parts do so
    on their own; what runs again as a whole takes everything in it along.
    """

    def __init__(
        self,
        rules: Sequence[RecomputeRule],
        excludes: Sequence[RecomputeRule],
        layers: Mapping[int, tuple[str, ...]],
        all_layers: Collection[int],
    ):
        self._layers = layers
        self._rules = by_layer(rules, all_layers)
        self._matches: Callable[[str, tuple[str, ...]], list[Match]] = lru_cache(maxsize=None)(match)
        self._selects = lru_cache(maxsize=None)(selects)
        self._decisions: dict[int, dict[str, Recompute | None]] = {layer: {} for layer in all_layers}
        self._excludes = by_layer(excludes, all_layers)
        self._excludes |= {layer: [] for layer in all_layers if not self._rules[layer]}
        self._excluded = {
            layer: [op for op in layers.get(layer, ()) if self._selected(found, op)]
            for layer, found in self._excludes.items()
        }
        self.notices = tuple(self._notices(rules, excludes))
        """What is asked for but has no effect, one line each."""

    def decision(self, layer: int, op: str) -> Recompute | None:
        """What `MemoryPlan.recompute` answers."""
        known = self._decisions.get(layer)
        if known is None:
            return None
        try:
            return known[op]
        except KeyError:
            answer = known[op] = self._decide(layer, op)
            return answer

    def anywhere_in(self, layer: int) -> bool:
        """Whether anything in a layer runs again; if its operators are unknown, whether it may."""
        if layer not in self._layers:
            return bool(self._rules[layer])
        return any(self.decision(layer, op) is not None for op in ("", *self._layers[layer]))

    def log_lines(self, layer: int) -> Iterator[str]:
        """A layer's part in the log, as MindFormers writes it."""
        if any(rule.pattern is None for rule in self._rules[layer]):
            if self.anywhere_in(layer):
                yield f"Set full recompute at layer {layer}{self._exceptions(layer, '')}"
            return
        listed: dict[str, str] = {}
        for kind, name in (("operator", "select"), ("communication", "select comm")):
            parts: dict[str, str] = {}
            for hit in self._effective(layer, kind):
                parts.setdefault(hit.node, hit.shown)
            tops = [node for node in outermost(listed | parts) if node not in listed]
            listed |= parts
            if tops:
                shown = ", ".join(dict.fromkeys(parts[node] + self._exceptions(layer, node) for node in tops))
                yield f"Set {name} recompute at layer {layer}: {shown}"

    def _decide(self, layer: int, op: str) -> Recompute | None:
        if op and layer in self._layers:  # what is in an operator is known there
            around = self.decision(layer, op.rpartition(".")[0])
            if around is not None:
                return around
        if self._holds_excluded(layer, op) or self._selected(self._excludes[layer], op):
            return None
        rules = (r for r in self._rules[layer] if r.pattern is None or (op and self._selects(r.pattern, op)))
        rule = next(rules, None)
        return None if rule is None else Recompute(entry=rule.entry, communication=rule.kind == "communication")

    def _holds_excluded(self, layer: int, op: str) -> bool:
        if not op:  # a layer with unknown operators may hold what is excluded
            return bool(self._excluded[layer] or (layer not in self._layers and self._excludes[layer]))
        return any(within(other, op) for other in self._excluded[layer])

    def _selected(self, rules: Sequence[RecomputeRule], op: str) -> bool:
        return any(rule.pattern is not None and self._selects(rule.pattern, op) for rule in rules)

    def _found(self, rule: RecomputeRule, layer: int) -> list[Match]:
        return self._matches(rule.pattern or "", self._layers.get(layer, ()))

    def _effective(self, layer: int, kind: str) -> Iterator[Match]:
        """The matches of a layer's rules of one kind in which anything runs again."""
        for rule in self._rules[layer]:
            for hit in self._found(rule, layer) if rule.kind == kind else ():
                if any(self.decision(layer, op) is not None for op in hit.operators):
                    yield hit

    def _exceptions(self, layer: int, node: str) -> str:
        """What is excluded below a node, as the log shows it."""
        shown: dict[str, str] = {}
        for exclude in self._excludes[layer]:
            for hit in self._found(exclude, layer):
                if within(hit.node, node):
                    shown.setdefault(hit.node, hit.shown)
        names = ", ".join(shown[name] for name in outermost(shown))
        return f" (except {names})" if names else ""

    def _notices(self, rules: Sequence[RecomputeRule], excludes: Sequence[RecomputeRule]) -> Iterator[str]:
        for entry in dict.fromkeys(rule.entry for rule in rules if rule.default):
            patterns = [rule for rule in rules if rule.entry == entry]
            if self._layers and not any(self._found(rule, layer) for rule in patterns for layer in self._layers):
                names = ", ".join(str(rule.pattern) for rule in patterns)
                yield f"{entry} has no effect: True stands for {names}, and no layer has such an operator"
        for rule in (*rules, *excludes):
            if rule.pattern is None or rule.default:
                continue
            absent = [layer for layer in self._places(rule) if not self._found(rule, layer)]
            if absent and rule.layers is not True:
                yield f"{rule.entry} has no effect in {in_words(absent)}: {rule.pattern!r} matches no operator there"
        for rule in (rule for rule in rules if rule.pattern is not None):
            hidden = [
                layer
                for layer in self._places(rule)
                if self._found(rule, layer)
                and not any(self.decision(layer, op) for hit in self._found(rule, layer) for op in hit.operators)
            ]
            if hidden:
                yield f"{rule.entry} has no effect in {in_words(hidden)}: it is excluded there"
        for exclude in excludes:
            places = self._places(exclude)
            if places and not any(self._takes_out(exclude, layer) for layer in places):
                yield f"{exclude.entry} has no effect: nothing that it names would be recomputed"

    def _places(self, rule: RecomputeRule) -> Collection[int]:
        """The layers that it is about, of those that are known."""
        assert not isinstance(rule.layers, StageCounts)  # `resolve` has made layers of them
        return among(self._layers, rule.layers)

    def _takes_out(self, exclude: RecomputeRule, layer: int) -> bool:
        operators = {op for hit in self._found(exclude, layer) for op in hit.operators}
        return any(
            rule.pattern is None or any(self._selects(rule.pattern, op) for op in operators)
            for rule in (self._rules[layer] if operators else ())
        )
