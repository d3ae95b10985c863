"""--split-backward, --pipeline-schedule zb and v: TransformerEngine's layers put gradients of weights off themselves.

Why here: since 2.3 its modules have a store for that (``wgrad_store``), which Megatron switches on only where layers
run piece by piece (``delay_wgrad_compute`` with ``overlap_moe_expert_parallel_comm``). For a training call each module
is given one that is on, of its own class; its backward then puts there what the gradient of its weight is made of, and
its ``backward_dw`` computes the oldest. Megatron's wrappers pass that call on only with their own option, so the method
below theirs is called. It leaves gradients in ``.grad``; DistributedDataParallel's hooks, which found none in the
backward, are called then, once for each of the backwards that a pass may run. Nothing of TransformerEngine's is
replaced or copied.

It was never run with TransformerEngine, only with stand-ins by its sources (2.20).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from mindspeed_mem import features
from mindspeed_mem.activation import engine as engines
from mindspeed_mem.activation.storage.ledger import LEDGER
from mindspeed_mem.passes import Listener, Precedence, ScheduleCall
from mindspeed_mem.patching import around, join
from mindspeed_mem.schedule.weight_gradients import WEIGHT_GRADIENTS

_HOOKS: Any = WeakTensorKeyDictionary()  # of weak references: _OnceItIsThere
"""By parameter: what autograd calls and holds; its ``now`` is DistributedDataParallel's own."""


class DelayingModules(Listener):
    """Those of the models of the training call that runs."""

    precedence = Precedence.LEFT_OVER

    def __init__(self) -> None:
        self._native: list[tuple[torch.nn.Module, Any]] = []
        self._modules: list[_Module] = []
        self._of: dict[torch.nn.Parameter, _Module] = {}

    def begin_call(self, call: ScheduleCall) -> None:
        if call.forward_only or self._native or not _splits(call):
            return
        config = sys.modules["megatron.core.utils"].get_model_config(call.models[0])
        if getattr(config, "tp_comm_overlap", False):
            return  # its buffers come and go with the backward
        for model in call.models:
            for module in model.modules():
                parameters = _delayable(module)
                if parameters:
                    self._native.append((module, module.wgrad_store))
                    module.wgrad_store = type(module.wgrad_store)(True)
                    one = _Module(module, parameters)
                    self._modules.append(one)
                    self._of |= dict.fromkeys(parameters, one)

    def end_call(self, call: ScheduleCall, completed: bool) -> None:
        if call.forward_only:  # a training step may contain an evaluation
            return
        for module, store in self._native:
            module.wgrad_store = store
        self._native.clear()
        self._modules.clear()
        self._of.clear()

    def awaits(self, parameter: torch.nn.Parameter) -> bool:
        """Whether its gradient was put off by its module in the backward that runs."""
        one = self._of.get(parameter) if WEIGHT_GRADIENTS.collecting else None
        if one is not None:
            one.waits(parameter)
        return one is not None

    def put_off(self) -> list[_Delayed]:
        """What was put off in the pass that ends."""
        return [found for one in self._modules for found in one.put_off()]


class _OnceItIsThere:
    """Called when the gradient of a parameter is there: calls ``now``, or that waits for its module."""

    def __init__(self, parameter: torch.nn.Parameter, now: Callable[..., None]) -> None:
        self._parameter, self.now = parameter, now

    def __call__(self, *unused: Any) -> None:
        if not _MODULES.awaits(self._parameter):
            self.now(*unused)


_Waiting = dict[torch.nn.Parameter, torch.Tensor | None]
"""Parameters whose hooks have been called, with the gradients that they had."""


class _Module:
    """One module, with what it has put off."""

    def __init__(self, module: Any, parameters: list[torch.nn.Parameter]) -> None:
        self.module, self.parameters = module, parameters
        self.backward_dw: Callable[[Any], None] = _native_backward_dw(type(module))
        self._waiting: dict[int, _Waiting] = {}
        """By the backward that runs, in the order in which they came to this module: a checkpoint has its own within
        that of the pass."""
        self._made_by: list[int] = []
        """The backward that each entry of this pass was put into the store by."""
        native = module.wgrad_store.put

        def put(*args: Any, **kwargs: Any) -> Any:
            backward = torch._C._current_graph_task_id()
            self._made_by.append(backward)
            self._waiting.setdefault(backward, {})
            return native(*args, **kwargs)

        module.wgrad_store.put = put

    def waits(self, parameter: torch.nn.Parameter) -> None:
        """Its hook has been called; what it has now (a placeholder, or a bias' gradient) is given back to it then."""
        waiting = self._waiting.setdefault(torch._C._current_graph_task_id(), {})
        waiting[parameter], parameter.grad = parameter.grad, None

    def put_off(self) -> Iterator[_Delayed]:
        """What this pass has put off, by backward; the hooks of a module that has not put anything off are called
        now."""
        waiting, self._waiting = self._waiting, {}
        made_by, self._made_by = self._made_by, []
        if not made_by:
            for one in waiting.values():
                _told(one)
            return
        queue = self.module.wgrad_store.context.queue  # the oldest is computed first
        new = [queue.pop() for _ in made_by][::-1]
        for backward, one in waiting.items():
            entries = [entry for entry, by in zip(new, made_by, strict=True) if by == backward]
            queue.extend(entries)
            yield _Delayed(self, one, entries)


class _Delayed:
    """What a module has put off in one backward."""

    def __init__(self, one: _Module, waiting: _Waiting, entries: list) -> None:
        self._of, self._waiting, self._count = one, waiting, len(entries)
        tensors = (tensor for tensors, _ in entries for tensor in _flat(tensors))
        self.holds = tuple(tensor for tensor in tensors if type(tensor) is torch.Tensor)
        engine = engines.current()
        if engine is not None:
            for tensor in self.holds:
                LEDGER.enter(tensor.untyped_storage(), owned=False)
            if engine.observation.profiler is not None:  # as a whole: the modules' own code says no more
                engine.observation.profiler.puts_off(None, self.holds)

    def compute(self) -> None:
        """By the module's own means, as often as it has run in that; then whoever waits is told."""
        self.holds = ()
        one = self._of
        unwanted = {} if self._waiting else {parameter: parameter.grad for parameter in one.parameters}
        for number in range(self._count):
            sums = {parameter: parameter.grad for parameter in self._waiting} if number else {}
            for parameter, had in self._waiting.items():
                parameter.grad = had
            one.backward_dw(one.module)
            for parameter, grad in sums.items():
                if grad is not None and parameter.grad is not None and parameter.grad is not grad:
                    parameter.grad = grad.add_(parameter.grad)
        _told(self._waiting)
        for parameter, grad in unwanted.items():  # no hook was called: torch.autograd.grad was asked for others
            parameter.grad = grad


def _told(waiting: _Waiting) -> None:
    for parameter, had in waiting.items():
        if parameter.grad is None:
            parameter.grad = had
        hook = _HOOKS[parameter]()
        assert hook is not None, "a gradient of a model that is gone"
        hook.now()


def _splits(call: ScheduleCall) -> bool:
    """Whether somebody computes what would be put off."""
    return call.stages > 1 or not features.in_force().zero_bubble


def _delayable(module: Any) -> list[torch.nn.Parameter]:
    """The weights and biases whose gradients this module can put off; none if it cannot."""
    store = getattr(module, "wgrad_store", None)
    if store is None or _native_backward_dw(type(module)) is None or getattr(module, "ub_bulk_wgrad", False):
        return []
    named = module.named_parameters(recurse=False)
    found = [one for name, one in named if one.requires_grad and not name.startswith("layer_norm")]
    hooked = any(one._backward_hooks or one._post_accumulate_grad_hooks for one in found)
    told = all((hook := _HOOKS.get(one)) is not None and hook() is not None for one in found)
    return found if told and not hooked else []


def _native_backward_dw(kind: type) -> Any:
    """The method below Megatron's wrappers; None: it has none."""
    own = (cls for cls in kind.__mro__ if not cls.__module__.startswith("megatron."))
    return next((vars(cls)["backward_dw"] for cls in own if "backward_dw" in vars(cls)), None)


def _flat(tensors: Any) -> Iterator[Any]:
    for one in tensors:
        if isinstance(one, list | tuple):
            yield from _flat(one)
        else:
            yield one


_MODULES = DelayingModules()
join("mindspeed_mem.passes:LISTENERS", _MODULES, declared_by=__name__)
join("mindspeed_mem.schedule.weight_gradients:WEIGHT_GRADIENTS.sources", _MODULES.put_off, declared_by=__name__)


@around("megatron.core.distributed.distributed_data_parallel:DistributedDataParallel._make_backward_post_hook")
def make_backward_post_hook(original, self, param):
    hook = _OnceItIsThere(param, original(self, param))
    _HOOKS[param] = weakref.ref(hook)  # it holds the model, which nothing else here does
    return hook
