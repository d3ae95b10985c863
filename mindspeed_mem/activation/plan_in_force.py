"""The plan in force: made of the configuration and the tagged layers, by all ranks together; another may follow it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import accumulate
from typing import Any

from torch import nn

from mindspeed_mem import ranks
from mindspeed_mem.activation import regions
from mindspeed_mem.activation.agreement import agreed
from mindspeed_mem.activation.storage.auto_distance import AutoDistances
from mindspeed_mem.plan import MemoryConfig, MemoryPlan, Recompute, Swap, load_memory_config, resolve
from mindspeed_mem.plan.checks import Distance

logger = logging.getLogger(__name__)

NO_LAYERS = (
    "nothing is swapped or recomputed: no layer is known. Either mindspeed_mem.megatron_adaptor was configured after "
    "the model was built, or the model has no TransformerBlock or MambaStack of megatron-core"
)


class PlanInForce:
    """A configuration, and once the layers are known the plan that comes of it.

    Args:
        config: what it is made from.
        auto: finds the distances that the configuration leaves open.
        watch_only: nothing is moved, all layers are looked at.
        all_layers: look at all layers, also those of which the plan selects nothing.
    """

    def __init__(self, config: MemoryConfig, auto: AutoDistances, watch_only: bool = False, all_layers: bool = False):
        self.config, self.auto = config, auto
        self.watch_only, self._all_layers, self._for_now = watch_only, all_layers, False
        self.plan: MemoryPlan | None = None
        self.agreed = False
        """All ranks have made the plan together, which is there."""
        self.num_layers = 0
        self.stacks: dict[str, range | None] = {}
        """The numbers of each stack's layers, by its path in the model; None where models disagree."""
        self.modules: set[tuple[int, str]] = set()
        """Operators that are modules, as (layer, path); the rest is inline code."""
        self.partners: frozenset[int] = frozenset()
        """The ranks with which this one runs collectives inside layers."""
        self.recomputes = False
        self.by_producer_only = True
        """No entry moves what an operator saves: who produced a storage decides at once."""
        self.of_produced: dict[tuple[int, str], int | None] = {}
        """What `distance` says of operators that decide that alone, as far as it has been asked."""
        self._recompute: dict[tuple[int, str], Recompute | None] = {}
        """What `recompute` has said,"""
        self._decisions: dict[tuple[int, str], Swap | None] = {}
        """and `decision`."""
        self.everything = False
        """Move whatever is saved, whatever the plan says: the second attempt at a step."""
        self.covered: set[int] | None = None
        """The layers to look at; None: all."""
        self.followers: set[int] = set()
        """Layers and what follows any of them, not just the next: all of these may save what one made."""
        self.idle = False
        """The plan selects nothing: everything runs natively."""
        self.pp_aware = False
        """On all ranks."""
        self.tells = True
        """What the plan does is logged, and what in it has no effect."""
        self._told: set[str] = set()
        self._built = 0  # layers tagged when the plan was made

    # ---- what it says
    def is_current(self) -> bool:
        """Whether the plan knows all layers that have been built."""
        return self.plan is not None and (self.agreed or self._built == regions.built())

    @property
    def the_plan(self) -> MemoryPlan:
        """The plan, where there must be one: in layers that run."""
        assert self.plan is not None
        return self.plan

    @property
    def output_gradients(self) -> bool:
        """Gradients of outputs leave while gradients of weights wait for them."""
        return self.config.swap.swap and self.config.swap.output_gradients

    def recompute(self, layer: int, op: str) -> Recompute | None:
        """As `MemoryPlan.recompute`, of the plan, which must be there."""
        try:
            return self._recompute[layer, op]
        except KeyError:
            answer = self._recompute[layer, op] = self.the_plan.recompute(layer, op)
            return answer

    def decision(self, layer: int, op: str) -> Swap | None:
        if self.plan is None or not 0 <= layer < self.num_layers:
            return None
        try:
            return self._decisions[layer, op]
        except KeyError:
            answer = self._decisions[layer, op] = self.plan.decision(layer, op)
            return answer

    def distance(self, layer: int, op: str, saver_layer: int, saver: str) -> int | None:
        """How far ahead a storage is moved: by its producer's entry, else by that of the operator saving it now."""
        swap = self.decision(layer, op)
        if swap is not None and swap.activations != "saved":
            if isinstance(swap.distance, int):
                self.of_produced[layer, op] = swap.distance
            return self.ahead(swap.distance, layer, op)
        if self.by_producer_only:
            self.of_produced[layer, op] = None
            return None
        swap = self.decision(saver_layer, saver)
        if swap is None or swap.activations == "produced":
            return None
        return self.ahead(swap.distance, layer, op)

    def ahead(self, distance: Distance, layer: int, op: str) -> int:
        """A configured distance as a number; what is left to us goes by the operator that produced the storage."""
        return distance if isinstance(distance, int) else self.auto(layer, op)

    # ---- how it is made
    def resolve(self, gather: Callable[[Any], list] | None = None, partners: Collection[int] = ()) -> None:
        """Make the plan from the tagged layers. ``gather`` collects an object from all ranks and makes it final, until
        it is called with that again, for another model.

        ``partners``: the ranks with which this one runs collectives inside layers; they must have the same plan.
        Raises MemoryConfigError, with ``gather`` on every rank alike: layers out of range, patterns that match nothing,
        plans that differ between partners.
        """
        if gather is None and self.is_current():
            return
        if gather is None:  # nobody says what the models are
            self.stacks.clear()
            for model in regions.models():
                self.count_on([model], regions.stacks_in([model]))
        self._built = regions.built()
        self._forget_answers()
        self.partners = frozenset(partners) or self.partners
        tree = regions.tagged_layers()
        mine = (tree, self.num_layers, regions.places(), self.config.swap.swap and self.config.swap.pp_aware)
        everyone = gather(mine) if gather is not None else [mine]
        layers: dict[int, set[str]] = {}
        places: dict[int, tuple[int, int]] = {}
        self.pp_aware = all(aware for *_, aware in everyone)
        for their_tree, _, theirs, _ in everyone:
            places.update(theirs)
            for index, paths in their_tree.items():
                layers.setdefault(index, set()).update(paths)
        self.num_layers = max([n for _, n, *_ in everyone] + [index + 1 for index in layers])
        config = self.config if layers else load_memory_config(None)
        make = functools.partial(resolve, config, layers, self.num_layers, places, self.stacks)
        self.plan = make() if gather is None else agreed(make, gather, partners, self.config.source)
        self.agreed = gather is not None
        self.modules = {(index, path) for index, paths in tree.items() for path in paths}
        if not self.watch_only:
            self.by_producer_only = not self.plan.selects_by_saver
            self.recomputes = self.plan.recomputes
            self._cover(self.plan)
        if not layers:
            self.tell(logging.ERROR, NO_LAYERS)
        for line in self.plan.log_lines() if self.tells else ():
            self.tell(logging.INFO, line)
        for notice in self.plan.notices if self.tells else ():
            self.tell(logging.WARNING, notice)

    def _cover(self, plan: MemoryPlan) -> None:
        touched, everywhere = plan.layers_touched(), self._all_layers or self._for_now
        followers = regions.after(touched) | (self.followers if touched else set())
        self.covered = None if everywhere else touched | followers
        self.idle = not touched and not everywhere

    def look_everywhere(self, wanted: bool) -> None:
        """Look at all layers for now, whatever the plan selects, or no more. Not in the middle of a step."""
        self._for_now = wanted
        if self.plan is not None and not self.watch_only:
            self._cover(self.plan)

    def count_on(self, models: Iterable[nn.Module], sizes: Mapping[str, int]) -> None:
        """An encoder and a decoder, a tower for images and one for text: the second one's layers count on.

        ``models``: the parts of one model. ``sizes``: how many layers it has in each stack, on all ranks.
        """
        first = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
        for path, size in sizes.items() if "" not in sizes else ():
            mine = range(first[path], first[path] + size)
            self.stacks[path] = mine if self.stacks.get(path, mine) == mine else None
        if len(sizes) < 2:
            return
        total = sum(sizes.values())
        regions.count_on(models, first, total)
        self.num_layers = max(self.num_layers, total)
        if ranks.number() == 0:
            ranges = (f"{path} {first[path]}-{first[path] + size - 1}" for path, size in sizes.items())
            self.tell(logging.INFO, f"layers count on from one stack to the next: {', '.join(ranges)}")

    def tell(self, level: int, line: str) -> None:
        """Once, however many models there are."""
        if line not in self._told:
            logger.log(level, line)
        self._told.add(line)

    def adopt(self, config: MemoryConfig, tell: bool = True) -> None:
        """Another configuration takes the place of this one: there is no plan until it is resolved.

        ``tell``: log then what the plan does, and what in it has no effect.
        """
        self.config, self.plan, self.agreed, self.tells = config, None, False, tell
        self._told.clear()
        self._forget_answers()
        self.recomputes = False

    def _forget_answers(self) -> None:
        for answers in (self.of_produced, self._recompute, self._decisions):
            answers.clear()
