"""Hooks on a model's modules: what a module reads is gathered before its forward and before its backward.

A module reads its own parameters and those that it is called with (an output layer the embedding's). In forward they
are read until it returns; in backward from the first gradient of an output until the gradients of its inputs are
there, or to the end of the pass if a graph of that backward is made. A bias that a module returns is read after that:
what is no longer read stays until its room is needed. If the caller does more with it than add it (Megatron's fused
activations), the bias counts as one of the caller's in its backward.

Some code reads parameters without calling the module that owns them: torch.nn.MultiheadAttention its output projection,
many models a weight that is used twice. Hooks on modules do not see it; the dictionary that an attribute is found in
does (`ForeignReads`). Such a parameter is gathered when it is read, and counts from then on as one of the module whose
forward is under way, in its backward as well; so does one that a module returns, or a view of it, as one of the module
that has called it. DeepSpeed's ZeRO-3 finds external parameters in the same places.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from mindspeed_mem.nested import tensors_in
from mindspeed_mem.patching import dynamo
from mindspeed_mem.zero.core.chunk import storage_of
from mindspeed_mem.zero.core.gathering import Gathering, Reading

HELD_WHOLE: list[Callable[[torch.nn.Module], bool]] = []
"""Modules for which one of these is true run parts of their forward again in backward, perhaps other parts on other
ranks: all that they contain is gathered when their backward starts."""


def attach(
    model: torch.nn.Module,
    gathering: Gathering,
    before_backward: Callable[[tuple[torch.nn.Parameter, ...]], None] | None = None,
    running: list[Reading] | None = None,
    returned: Callable[[Reading, Any], None] | None = None,
) -> list[RemovableHandle]:
    """Let `gathering` follow all modules of `model`; returns the hooks, to be removed.

    before_backward: called with what a module reads before its backward starts.
    running: is kept to what the modules read whose forward is under way, the innermost last.
    returned: called with what a module has read, and what it returns.
    """
    dynamo.keep_out()
    handles = []
    running = [] if running is None else running
    for module in model.modules():
        followed = _Followed(gathering, before_backward, running, returned)
        handles.append(module.register_forward_pre_hook(followed.before, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(followed.after, with_kwargs=True, always_call=True))
    return handles


def uses(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Parameter, ...]]:
    """What is read at once: each module's own parameters, with those of the modules around it."""
    stack: list[tuple[torch.nn.Module, tuple[torch.nn.Parameter, ...]]] = [(model, ())]
    while stack:
        module, around = stack.pop()
        whole = _held_whole(module)
        own = (*around, *module.parameters(recurse=whole))
        yield own
        stack += [(child, own) for child in module.children() if not whole]


_TAKEN_BY = "_mem_chunk_taken_by"
_VIEWS = {f"{name}Backward0" for name in ("View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Expand", "Alias")}
_READS_NOTHING = {*_VIEWS, "AddBackward0", "ToCopyBackward0"}
"""Nodes whose backward does not read what went into them."""
_sequence_nr = torch._C._autograd._get_sequence_nr


class _Followed:
    """One module: its calls, which may be nested (recomputation within its own backward)."""

    def __init__(
        self,
        gathering: Gathering,
        before_backward: Callable | None,
        running: list[Reading],
        returned: Callable | None,
    ) -> None:
        self._gathering, self._before_backward = gathering, before_backward
        self._running, self._returned = running, returned
        self._calls: list[Reading] = []

    def before(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        for calls in (self._calls, self._running):
            while calls and calls[-1].over:  # left by something that is no Exception, without the hook behind
                calls.pop()
        reading = Reading(_read(module, args, kwargs))
        reading.first = _sequence_nr()
        self._calls.append(reading)
        self._running.append(reading)
        self._gathering.acquire(reading)

    def after(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if not self._calls:  # the hook before did not get to run: another one failed
            return
        reading = self._calls.pop()
        self._running.remove(reading)
        if self._returned is not None:
            self._returned(reading, output)
        self._gathering.done(reading)
        inside = tuple(module.parameters()) if _held_whole(module) else ()
        if reading.biases and torch.is_grad_enabled():
            inside += self._kept(module, reading, output)
        again = Reading((*reading.params, *inside))
        if torch.is_grad_enabled() and again.params:
            self._follow_backward(again, reading.params, list(_tensors((args, kwargs))), list(_tensors(output)))

    def _kept(self, module: torch.nn.Module, reading: Reading, output: Any) -> tuple[torch.nn.Parameter, ...]:
        """Which of the biases that were returned to the module its backward reads."""
        kept = _read_in_backward(set(reading.biases), output, reading.first)
        if kept and self._gathering.budget is not None:  # as in `ForeignReads`
            around = (*kept, *(param for one in self._running for param in one.params))
            needed = self._gathering.largest_use((*around, *read) for read in uses(module))
            self._gathering.budget = max(self._gathering.budget, needed)
        return kept

    def _follow_backward(
        self,
        reading: Reading,
        own: tuple[torch.nn.Parameter, ...],
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> None:
        waiting, number = 0, len(inputs)  # the hooks live as long as the graph: they must not hold the inputs

        def begin(grad: torch.Tensor) -> None:
            nonlocal waiting
            if waiting == 0:
                waiting = number
                if self._before_backward is not None:
                    self._before_backward(own)
            self._gathering.acquire(reading)

        def end(grad: torch.Tensor) -> None:
            # One input's gradient may be complete while another's is not: an addend's before a factor's.
            nonlocal waiting
            if waiting:
                waiting -= 1
                if not waiting and not torch.is_grad_enabled():  # else its graph reads the parameters again
                    self._gathering.done(reading)

        # What takes a tensor is through with it before what made it begins; hooks run in the order they were made in.
        for tensor in outputs:
            if hasattr(tensor, _TAKEN_BY):
                tensor.register_hook(begin)
            else:
                taken_by: list[Callable[[torch.Tensor], None]] = []
                setattr(tensor, _TAKEN_BY, taken_by)
                tensor.register_hook(functools.partial(_one_after_the_other, taken_by, begin))
        for tensor in inputs:
            before = getattr(tensor, _TAKEN_BY, None)
            if before is None:
                tensor.register_hook(end)
            else:
                before.append(end)


def _one_after_the_other(
    first: list[Callable[[torch.Tensor], None]], last: Callable[[torch.Tensor], None], grad: torch.Tensor
) -> None:
    for hook in (*first, last):
        hook(grad)


def _held_whole(module: torch.nn.Module) -> bool:
    return any(whole(module) for whole in HELD_WHOLE)


def _read(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[torch.nn.Parameter, ...]:
    given = (one for one in (*args, *kwargs.values()) if isinstance(one, torch.nn.Parameter))
    return tuple(dict.fromkeys((*module.parameters(recurse=False), *given)))


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    for leaf in tensors_in(tree):
        if leaf.requires_grad and not isinstance(leaf, torch.nn.Parameter):
            yield leaf


def _read_in_backward(params: set[torch.nn.Parameter], output: Any, first: int) -> tuple[torch.nn.Parameter, ...]:
    """Those of ``params`` that the nodes from number ``first`` on may read by which gradients of ``output`` go."""
    found: dict[torch.nn.Parameter, None] = {}
    waiting: list[Any] = [one.grad_fn for one in _tensors(output)]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node._sequence_nr() < first:
            continue
        seen.add(node)
        for before, _ in node.next_functions:
            waiting.append(before)
            while before is not None and before.name() in _VIEWS:
                before = before.next_functions[0][0]
            param = getattr(before, "variable", None)
            if param in params and node.name() not in _READS_NOTHING:
                found[param] = None
    return tuple(found)


def _storage(tensor: torch.Tensor) -> int | None:
    try:
        return storage_of(tensor)
    except (NotImplementedError, RuntimeError):  # sparse, or in a vmap
        return None


class ForeignReads:
    """Watches the parameters of one model.

    Args:
        running: what the modules read whose forward is under way, the innermost last (`attach` keeps it).
        but: a name; parameters with an attribute of this name that is true are only handed on by who reads them.
    """

    def __init__(self, gathering: Gathering, running: list[Reading], but: str = "") -> None:
        self._gathering, self._running, self._but = gathering, running, but

    def watch(self, model: torch.nn.Module) -> None:
        """From now on the attributes of `model` and its submodules are watched."""
        for module in model.modules():
            own = vars(module)  # what is set on a wrapper of torch.compile goes to what it is around
            own["_parameters"] = _Watched(own["_parameters"], self._seen)

    def returned(self, reading: Reading, output: Any) -> None:
        """What a module that has read ``reading`` returns: its caller goes on to read the parameters in there. Biases
        it mostly adds at once: whether its backward reads them is seen once it has ended."""
        if not self._running or not reading.params:
            return
        there, biases = set(), set()
        for one in tensors_in(output):
            if isinstance(one, torch.nn.Parameter) and one.dim() == 1:
                biases.add(one)
            else:
                there.add(_storage(one))
        for param in reading.params:
            if storage_of(param) in there:
                self._seen(param)
            elif param in biases and self._gathering.manages(param):
                self._running[-1].biases.append(param)

    def _seen(self, param: torch.nn.Parameter) -> None:
        if not self._running or any(param in reading.open for reading in reversed(self._running)):
            return
        if self._gathering.manages(param) and not getattr(param, self._but, False):
            reading = self._running[-1]
            reading.params = (*reading.params, param)
            if self._gathering.budget is not None:  # more is read at once than the modules alone say: it has to hold it
                needed = self._gathering.largest_use([{p for one in self._running for p in one.params}])
                self._gathering.budget = max(self._gathering.budget, needed)
            self._gathering.acquire(reading)


class _Watched(dict):
    """A module's parameters by name."""

    def __init__(self, parameters: dict, seen: Callable[[torch.nn.Parameter], None]) -> None:
        super().__init__(parameters)
        self._seen = seen

    def __reduce_ex__(self, protocol: Any) -> tuple[type, tuple[dict]]:
        """Copies are plain."""
        return dict, (dict(self),)

    def __getitem__(self, name: str) -> torch.nn.Parameter | None:
        param = super().__getitem__(name)
        if param is not None:
            self._seen(param)
        return param
