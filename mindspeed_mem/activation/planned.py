"""The plan in force: made of the configuration and the tagged layers, by all ranks together; another may follow it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mindspeed_mem.activation import regions
from mindspeed_mem.activation.agreement import agreed
from mindspeed_mem.activation.recompute_regions import RecomputedRegions
from mindspeed_mem.plan import load_memory_config, resolve

if TYPE_CHECKING:
    from torch import nn

    from mindspeed_mem.plan import MemoryConfig

logger = logging.getLogger(__name__)

NO_LAYERS = (
    "nothing is swapped or recomputed: no layer is known. Either mindspeed_mem.megatron_adaptor was configured after "
    "the model was built, or the model has no TransformerBlock or MambaStack of megatron-core"
)


class PlannedRegions(RecomputedRegions):
    """An engine's configuration and plan."""

    config: MemoryConfig

    def __init__(self, device_type: str, watch_only: bool):
        super().__init__(device_type, counting=watch_only)
        self.watch_only = watch_only
        self.plan = None
        self.agreed = False  # all ranks have made the plan together
        self.num_layers = 0
        self.stacks: dict[str, range | None] = {}
        """The numbers of each stack's layers, by its path in the model; None where models disagree."""
        self._covered: set[int] | None = None  # None: all layers
        self._idle = False  # the plan selects nothing: everything runs natively
        self._pp_aware = False  # on all ranks
        self._tells = True
        self._told: set[str] = set()
        self._built = 0  # layers tagged when the plan was made

    def resolve(self, gather: Callable[[Any], list] | None = None, partners: Collection[int] = ()) -> None:
        """Make the plan from the tagged layers. ``gather`` collects an object from all ranks and makes it final, until
        it is called with that again, for another model.

        ``partners``: the ranks with which this one runs collectives inside layers; they must have the same plan.
        Raises MemoryConfigError, with ``gather`` on every rank alike: layers out of range, patterns that match nothing,
        plans that differ between partners.
        """
        if gather is None and self.plan is not None and (self.agreed or self._built == regions.built()):
            return
        if gather is None:  # nobody says what the models are
            self.stacks.clear()
            for model in regions.models():
                self.count_on([model], regions.stacks_in([model]))
        self.agreed, self._built = gather is not None, regions.built()
        self.partners = frozenset(partners) or self.partners
        tree = regions.tagged_layers()
        mine = (tree, self.num_layers, regions.places(), self.config.swap.swap and self.config.swap.pp_aware)
        everyone = gather(mine) if gather is not None else [mine]
        layers: dict[int, set[str]] = {}
        places: dict[int, tuple[int, int]] = {}
        self._pp_aware = all(aware for *_, aware in everyone)
        for their_tree, _, theirs, _ in everyone:
            places.update(theirs)
            for index, paths in their_tree.items():
                layers.setdefault(index, set()).update(paths)
        self.num_layers = max([n for _, n, *_ in everyone] + [index + 1 for index in layers])
        config = self.config if layers else load_memory_config(None)
        make = functools.partial(resolve, config, layers, self.num_layers, places, self.stacks)
        self.plan = make() if gather is None else agreed(make, gather, partners, self.config.source)
        self._modules = {(index, path) for index, paths in tree.items() for path in paths}
        if not self.watch_only:
            touched = self.plan.layers_touched()
            self._by_producer_only = not self.plan.selects_by_saver
            self._covered = touched | regions.after(touched)
            self._idle = not touched
            self.recomputes = self.plan.recomputes
        if not layers:
            self._tell(logging.ERROR, NO_LAYERS)
        for line in self.plan.log_lines() if self._tells else ():
            self._tell(logging.INFO, line)
        for notice in self.plan.notices if self._tells else ():
            self._tell(logging.WARNING, notice)

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
        if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
            ranges = (f"{path} {first[path]}-{first[path] + size - 1}" for path, size in sizes.items())
            self._tell(logging.INFO, f"layers count on from one stack to the next: {', '.join(ranges)}")

    def _tell(self, level: int, line: str) -> None:
        """Once, however many models there are."""
        if line not in self._told:
            logger.log(level, line)
        self._told.add(line)

    def adopt(
        self,
        config: MemoryConfig,
        gather: Callable[[Any], list],
        partners: Collection[int] = (),
        tell: bool = True,
    ) -> None:
        """Execute another configuration from the next training step on. Collective, between two steps.

        ``tell``: log what the plan does, and what in it has no effect. Raises MemoryConfigError, on all ranks; there is
        no plan then.
        """
        self.config, self.plan, self.agreed, self._tells = config, None, False, tell
        self._told.clear()
        self.forget_runs()
        self.resolve(gather, partners)
