"""The optimizer that updates this rank's part: it wraps any other, which gets to see nothing but that part."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_mem import optimizer_hooks
from mindspeed_mem.optimizer_kinds import settings_of_whole_group
from mindspeed_mem.optimizer_parallel import state as states
from mindspeed_mem.optimizer_parallel.assignment import Assignment, Size
from mindspeed_mem.optimizer_parallel.exchange import MESSAGE_BYTES, Exchange
from mindspeed_mem.optimizer_parallel.part import OptimizerPart, local, memory_order
from mindspeed_mem.optimizer_parallel.support import OptimizerParallelError, problems, problems_of_split
from mindspeed_mem.ranks import gather

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Who does how much. Bytes of a parameter are those of what is updated: its fp32 master if there is one."""

    mode: str
    parameters: int
    """Tensors that are trained."""
    bytes_by_rank: tuple[int, ...]
    """Parameter bytes that each rank updates; optimizer states are in proportion."""
    balance: float
    """The largest of these over their mean: 1 is perfect."""
    messages: int
    """All-gathers of a step."""
    sent_bytes: int
    """What each rank puts into them, padding included."""
    state_bytes: int
    """Optimizer states that this rank holds now, with the masters; before the first step often none."""

    def __str__(self) -> str:
        most, mean = max(self.bytes_by_rank), sum(self.bytes_by_rank) / len(self.bytes_by_rank)
        return (
            f"{self.mode} of {self.parameters} parameters over {len(self.bytes_by_rank)} ranks: a rank updates "
            f"{mean / 2**20:.2f} MiB of them in the mean and {most / 2**20:.2f} at most (balance {self.balance:.3f}), "
            f"and sends {self.sent_bytes / 2**20:.2f} MiB a step (all-gathers: {self.messages})"
        )


class ParallelOptimizer(torch.optim.Optimizer):
    """`optimizer`, of which each rank of a process group does its part. See `parallelize`.

    ``param_groups`` are the given optimizer's own, with all parameters: schedulers, gradient clipping and scaling work
    as before. ``state`` holds what there is for this rank's part, and is for the given optimizer to read. Hooks around
    state dicts, of this optimizer and of the given one, get whole ones.

    ``masters``: for fp32 parameters of `optimizer` the 16-bit parameters of the model that they are masters of. A rank
    keeps its part of a master only; `step` updates the 16-bit ones on all ranks.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        process_group: dist.ProcessGroup | None,
        mode: str,
        *,
        assume_independent: bool = False,
        message_bytes: int = MESSAGE_BYTES,
        masters: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        found = problems(optimizer, mode, assume_independent)
        if dist.get_rank(process_group) < 0:
            found.append(f"process_group: rank {dist.get_rank()} is not in it. Give the group that this rank is in")
        else:
            found += problems_of_split(optimizer, process_group)
        if found:
            raise OptimizerParallelError(found)
        self.inner = optimizer
        self.mode = mode
        self.exchange = Exchange(process_group, message_bytes)
        self._trained = Assignment(mode, self.exchange.ranks)
        self._frozen = Assignment(mode, self.exchange.ranks)
        self._parts: list[list[OptimizerPart]] = []
        # The same groups, not copies: who changes a learning rate in one changes it in the other.
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        optimizer_hooks.take_over(self, optimizer, optimizer_hooks.STATE_HOOKS)
        self._divide(masters or {})

    def __deepcopy__(self, memo: Any) -> Any:
        raise OptimizerParallelError(["a copy would have no parts; parallelize an optimizer of the copied model"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OptimizerParallelError(["pickled, it would have no parts; save its state_dict()"])

    @property
    def parts(self) -> list[OptimizerPart]:
        """Of all parameters, in the order of ``param_groups``."""
        return [part for parts in self._parts for part in parts]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's part, then get the others'. Collective; returns what `closure` returns.

        `closure` is called once, before the update. Every rank has to have the same whole gradients, as parameters
        without one stay as they are.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moved = [p for p in self.parts if p.target.requires_grad or p.parameter.grad is not None]
        try:
            for part in self.parts:
                part.take()
            with self.own_parts(), self._settings_of_whole_groups():
                self.inner.step()
            self._note_states()
        finally:
            for part in self.parts:
                part.let_go()
        self.exchange.spread(moved)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As for any optimizer, on every rank; the new parameters go to those that have least. Collective."""
        if not self._parts:  # the base class, building its list of the groups that the optimizer has
            super().add_param_group(param_group)
            return
        self.inner.add_param_group(param_group)
        self._divide({})

    def state_dict(self, *, only_on: int | None = None) -> dict[str, Any]:
        """The state dict of the given optimizer without parallelism, its tensors on the host. Collective.

        Args:
            only_on: the rank of the process group to get the states; the others' ``state`` is empty then. None: all
                get them, and need the host memory.

        Each state is collected by itself: on the device there is one parameter's more.
        """
        optimizer_hooks.before_saving(self)
        keep = only_on is None or only_on == self.exchange.rank
        found = states.whole(self.state, self.parts, self.exchange, keep)
        groups, start = [], 0
        for group, numbers in zip(self.param_groups, self._numbers(), strict=True):
            indices = list(range(start, start + len(group["params"])))
            start += len(indices)
            groups.append(copy.deepcopy({k: v for k, v in group.items() if k != "params"}) | numbers)
            groups[-1]["params"] = indices
        return optimizer_hooks.after_saving(self, {"state": found, "param_groups": groups})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's part of a state dict of this class, at any number of ranks, or of the plain optimizer.

        Raises ValueError if its groups are not those of this optimizer.
        """
        state_dict = optimizer_hooks.before_loading(self, state_dict)
        groups = state_dict["param_groups"]
        given, own = [len(group["params"]) for group in groups], [len(group["params"]) for group in self.param_groups]
        if given != own:
            raise ValueError(f"state_dict has groups of {given} parameters, this optimizer of {own}: load it into that")
        local: dict[str, Any] = {"state": {}, "param_groups": []}
        for group, parts in zip(groups, self._parts, strict=True):
            indices = []
            for index, part in zip(group["params"], parts, strict=True):
                if part.piece is not None:
                    indices.append(index)
                    if index in state_dict["state"]:
                        local["state"][index] = states.cut(state_dict["state"][index], part)
            local["param_groups"].append({**group, "params": indices})
        with self.own_parts(), optimizer_hooks.resting(self.inner):
            self.inner.load_state_dict(local)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        if state_dict["state"]:
            self._note_states()
        optimizer_hooks.after_loading(self)

    @contextlib.contextmanager
    def own_parts(self) -> Iterator[torch.optim.Optimizer]:
        """The given optimizer, with this rank's part in its groups instead of the parameters."""
        self.inner.param_groups = self.param_groups
        parameters = [group["params"] for group in self.param_groups]
        try:
            for group, parts in zip(self.param_groups, self._parts, strict=True):
                group["params"] = [part.piece for part in parts if part.piece is not None]
            yield self.inner
        finally:
            for group, whole in zip(self.inner.param_groups, parameters, strict=True):
                group["params"] = whole

    @contextlib.contextmanager
    def _settings_of_whole_groups(self) -> Iterator[None]:
        """Inside, groups have the settings that a step of all their parameters would find in the first."""
        before = []
        for group, parts in zip(self.inner.param_groups, self._parts, strict=True):
            stepped = [part.parameter for part in parts if part.parameter.grad is not None]
            found = settings_of_whole_group(self.inner, group, stepped)
            before.append({key: group[key] for key in found})
            group.update(found)
        try:
            yield
        finally:
            for group, settings in zip(self.inner.param_groups, before, strict=True):
                group.update(settings)

    def masters(self) -> dict[torch.Tensor, torch.Tensor]:
        """The whole masters on the host, by the parameter that stands for each. Collective."""
        with_master = [part for part in self.parts if part.has_master]
        return {
            one.parameter: self.exchange.collect(one, one.piece, one.shape, one.parameter.dtype).to("cpu", copy=True)
            for one in with_master
        }

    @torch.no_grad()
    def set_masters(self, masters: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Take this rank's part of whole masters: pairs of the parameter that stands for one, and its values."""
        parts = {id(part.parameter): part for part in self.parts}
        for parameter, master in masters:
            parts[id(parameter)].set_master(master)

    def reload_masters(self) -> None:
        """Set the masters to the model's parameters, which somebody has changed."""
        self.set_masters((part.parameter, part.target) for part in self.parts if part.has_master)

    def figures(self) -> Figures:
        """Who does how much."""
        trained = [part for part in self.parts if part.target.requires_grad]
        plan = self.exchange.plan(trained) if self.exchange.ranks > 1 else []
        tensors = [v for state in self.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        tensors += [part.piece for part in self.parts if part.has_master and part.piece is not None]
        return Figures(
            mode=self.mode,
            parameters=len(trained),
            bytes_by_rank=tuple(self._trained.loads),
            balance=self._trained.balance(),
            messages=len(plan),
            sent_bytes=sum(message.length * message.kind[0].itemsize for message in plan),
            state_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        )

    def _note_states(self) -> None:
        """Where other ranks have states this one has at least an empty one: torch.distributed.checkpoint lets an
        optimizer without any step once, which is collective."""
        if not self.state:
            pieces = (part.piece for part in self.parts if part.piece is not None)
            self.state[next(pieces, self.parts[0].parameter)] = {}

    def _divide(self, masters: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Make the parts of the groups that have none yet, and cut the states that there are."""
        new = self.param_groups[len(self._parts) :]
        parameters = [parameter for group in new for parameter in group["params"]]
        targets = [masters.get(parameter) for parameter in parameters]
        trains = [(p if t is None else t).requires_grad for p, t in zip(parameters, targets, strict=True)]
        self._agree(parameters, trains)
        ranges: dict[int, tuple[range, ...]] = {}
        for assignment, wanted in ((self._trained, True), (self._frozen, False)):
            indices = [index for index, one in enumerate(trains) if one == wanted]
            sizes = [_size(parameters[index]) for index in indices]
            ranges |= dict(zip(indices, assignment.assign(sizes), strict=True))
        made = iter([OptimizerPart(p, ranges[i], self.exchange.rank, targets[i]) for i, p in enumerate(parameters)])
        for group in new:
            self._parts.append([next(made) for _ in group["params"]])
            for part in self._parts[-1]:
                state = self.state.pop(part.parameter, None)
                if state and part.piece is not None:
                    self.state[part.piece] = states.cut(state, part)

    def _agree(self, parameters: list[torch.Tensor], trains: list[bool]) -> None:
        mine = [(tuple(p.shape), str(p.dtype), one) for p, one in zip(parameters, trains, strict=True)]
        exchange = self.exchange
        told = gather((type(self.inner).__name__, self.mode, exchange.message_bytes, mine), exchange.group)
        others = [rank for rank, one in enumerate(told) if one != told[0]]
        if others:
            found = f"ranks {others} of the process group have other parameters or options than rank 0"
            same = "optimizer, mode, message_bytes and parameters, in the same order, with the same shapes, dtypes and"
            raise OptimizerParallelError([f"{found}: all need the same {same} requires_grad"])

    def _numbers(self) -> list[dict[str, Any]]:
        """What groups count (fused optimizers their steps), from a rank that has a part of the group. Collective."""
        mine = []
        for group, parts in zip(self.param_groups, self._parts, strict=True):
            numbers = {k: v for k, v in group.items() if isinstance(v, int | float) and not isinstance(v, bool)}
            mine.append(numbers if any(part.piece is not None for part in parts) else None)
        told = gather(mine, self.exchange.group)
        return [next((one[i] for one in told if one[i] is not None), {}) for i in range(len(mine))]


def parallelize(
    optimizer: torch.optim.Optimizer,
    process_group: dist.ProcessGroup | None,
    mode: str,
    *,
    assume_independent: bool = False,
    message_bytes: int = MESSAGE_BYTES,
) -> ParallelOptimizer:
    """Split the work and the states of `optimizer` over ranks. Use the returned optimizer in its place. Collective.

    Args:
        optimizer: any optimizer of torch.optim except LBFGS; it is taken over, with the states that it has.
            ``sharding`` takes elementwise ones only: see `support`.
        process_group: the ranks that share the work (None: all). They must hold the same parameters, with any layout or
            dtype, and at each step the same gradients. Of DTensors they hold the same parts: ``mesh.get_group("dp")``.
        mode: ``grouping`` (each rank has whole parameters, balanced by size) or ``sharding`` (a slice of each; scalars
            and parameters with gaps in memory stay whole on one rank).
        assume_independent: the caller's word that a class unknown here updates each parameter (``sharding``: element)
            without looking at others.
        message_bytes: the most that is received at once, in a buffer of its own.

    Bit-identical to `optimizer` on one rank. (A CPU with several threads rounds some fused and 16-bit updates of
    parameters beyond 32768 elements as the threads share them, and so differently for a slice.) Raises
    OptimizerParallelError with all that is wrong.
    """
    parallel = ParallelOptimizer(
        optimizer, process_group, mode, assume_independent=assume_independent, message_bytes=message_bytes
    )
    logger.info("optimizer parallelism: %s", parallel.figures())
    return parallel


def _size(parameter: torch.Tensor) -> Size:
    here = local(parameter.detach())
    divisible = here.dim() > 0 and memory_order(here) is not None
    return Size(here.numel(), here.element_size(), divisible)
