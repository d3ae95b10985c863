"""Runs operators: says which one runs, has what they save packed, and those that the plan recomputes recorded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from mindspeed_mem.activation import regions
from mindspeed_mem.activation.observe.observation import Observation
from mindspeed_mem.activation.passes import Passes, first_of
from mindspeed_mem.activation.plan_in_force import PlanInForce
from mindspeed_mem.activation.position import NO_OPERATOR, Position
from mindspeed_mem.activation.rerun import module_rerun
from mindspeed_mem.activation.rerun.module_rerun import ModuleRerun
from mindspeed_mem.activation.rerun.tape import Tape
from mindspeed_mem.activation.saved_tensors import SavedTensors
from mindspeed_mem.activation.second_runs import SecondRuns
from mindspeed_mem.activation.storage import marks
from mindspeed_mem.activation.storage.ledger import LEDGER


class OperatorRuns:
    """What patches call around modules, functions and marked code.

    Args:
        resolve: makes the plan, where nobody has said that all layers are built.
    """

    def __init__(
        self,
        position: Position,
        in_force: PlanInForce,
        saved: SavedTensors,
        second_runs: SecondRuns,
        passes: Passes,
        observation: Observation,
        resolve: Callable[[], None],
    ):
        self._position, self._in_force, self._saved, self._second_runs = position, in_force, saved, second_runs
        self._passes, self._observation, self._resolve = passes, observation, resolve

    # ---- modules and functions
    def run(self, original: Callable, module: Any, args: tuple, kwargs: dict) -> Any:
        """Run a tagged module's forward as an operator."""
        layer, path = module.__dict__[regions.TAG]
        again = module_rerun.running()
        if again is not None:
            again.enters_again(path, args, kwargs)
            return original(module, *args, **kwargs)
        if self._position.stack:
            return self._run_module(layer, path, original, module, args, kwargs)
        in_force, second_runs = self._in_force, self._second_runs
        if path or in_force.idle or not regions.may_save():
            if not path and in_force.recomputes and torch.is_grad_enabled():
                second_runs.under_another_checkpoint(layer)  # before its backward, or again in it
            return original(module, *args, **kwargs)
        if not in_force.is_current():
            self._resolve()
            layer = module.__dict__[regions.TAG][0]  # it may count on now
        self._enter_layer(layer, args, kwargs)
        if in_force.covered is not None and layer not in in_force.covered:
            result = self._run_module(layer, path, original, module, args, kwargs)
            self._sign_at(result)
            return result
        hooks = saved_tensors_hooks(self._saved.pack, self._saved.unpack)
        try:
            hooks.__enter__()
        except RuntimeError:  # somebody has disabled hooks here: run natively
            return self._run_module(layer, path, original, module, args, kwargs)
        second_runs.hooked = True
        try:
            result = self._run_module(layer, path, original, module, args, kwargs)
            second_runs.stays(result)
            return result
        finally:
            second_runs.hooked = False
            hooks.__exit__()

    def _run_module(self, layer: int, path: str, original: Callable, module: Any, args: tuple, kwargs: dict) -> Any:
        rerun = self._position.rerun
        if type(rerun) is Tape:  # a module inside marked code
            with self._second_runs.without(rerun):
                return self._run_module(layer, path, original, module, args, kwargs)
        if type(rerun) is ModuleRerun:
            rerun.enters(path, args, kwargs)
        return self._run_call(layer, path, functools.partial(original, module), args, kwargs)

    def run_inline(self, name: str, call: Callable, args: tuple, kwargs: dict, state: Any = None) -> Any:
        """Run a function as operator ``name`` of the running module; ``state`` as for `ModuleRerun`."""
        again = module_rerun.running()
        if again is not None:
            again.enters_again(name, args, kwargs)
        if again is not None or not self._position.stack:
            return call(*args, **kwargs)
        layer, parent, _ = self._position.stack[-1]
        rerun = self._position.rerun
        if type(rerun) is ModuleRerun:
            rerun.enters(name, args, kwargs)
        return self._run_call(layer, regions.inline_path(parent, name), call, args, kwargs, state)

    def run_fused(self, call: Callable, args: tuple, kwargs: dict) -> Any:
        """Run a function that may be compiled: nobody can look into it."""
        census = self._observation.counting
        if census is not None:
            layer, path, inline = self._position.stack[-1] if self._position.stack else NO_OPERATOR
            return census.watch.run_fused((layer, path) if inline else None, call, args, kwargs)
        return self._second_runs.run_fused(call, args, kwargs)

    def _run_call(self, layer: int, path: str, call: Callable, args: tuple, kwargs: dict, state: Any = None) -> Any:
        stack, second_runs = self._position.stack, self._second_runs
        depth = len(stack)
        again = second_runs.operator(layer, path, call, args, kwargs, state)
        if self._observation.counting is not None:
            call = functools.partial(self._observation.counting.watch.run, (layer, path), state, call)
        if depth and stack[-1][:2] == (layer, path) and again is None:
            return call(*args, **kwargs)  # a subclass calling super, or a marker of the same name
        try:
            if again is not None:
                begin = functools.partial(self._start, layer, path, False)
                result = second_runs.run(layer, path, call, args, kwargs, begin, again, state)
            else:
                self._start(layer, path, False)
                result = call(*args, **kwargs)
        except BaseException:
            second_runs.cut_tape(depth)
            del stack[depth:]
            raise
        self._stop(depth)
        return result

    def _sign_at(self, result: Any) -> None:
        """A layer that runs natively still tells when its backward starts, for what is to be back by then."""
        output, micro_batch = first_of(result), self._position.micro_batch
        node = output.grad_fn if isinstance(output, torch.Tensor) else None
        if node is not None and micro_batch is not None and self._in_force.covered:
            number = micro_batch.count
            node.register_prehook(lambda _: micro_batch.unpacks(number))

    # ---- marked code
    def mark_start(self, name: str) -> None:
        """Inline operator ``name`` starts inside the running module."""
        if self._position.stack and not module_rerun.running():
            layer, parent, _ = self._position.stack[-1]
            path = regions.inline_path(parent, name)
            self._start(layer, path, True)
            if self._in_force.recomputes:
                self._second_runs.start_tape(layer, path)

    def mark_stop(self, name: str) -> None:
        stack = self._position.stack
        if (
            stack
            and stack[-1][2]
            and not module_rerun.running()
            and stack[-1][1].rpartition(".")[2] == regions.inline_path("", name)
        ):
            self._stop(len(stack) - 1)

    # ---- where we are
    def _start(self, layer: int, path: str, marker: bool) -> None:
        micro_batch = self._position.micro_batch
        assert micro_batch is not None
        micro_batch.count += 1
        self._position.stack.append((layer, path, marker))
        micro_batch.switch(layer, path, micro_batch.count)
        if self._observation.stopwatch is not None:
            self._observation.stopwatch.switch(layer, path)
        if micro_batch.ahead is not None:
            micro_batch.forward_reaches(self._passes.operators_of[micro_batch.key[1]])

    def _stop(self, depth: int) -> None:
        """What runs above ``depth`` ends: what it produced is complete, and some releases are due."""
        stack, micro_batch = self._position.stack, self._position.micro_batch
        assert micro_batch is not None
        self._second_runs.stop_tape(depth)
        del stack[depth:]
        layer, path, _ = stack[-1] if stack else NO_OPERATOR
        micro_batch.switch(layer, path, micro_batch.count)
        if self._observation.stopwatch is not None:
            self._observation.stopwatch.switch(layer, path)
        micro_batch.copy_fresh()
        micro_batch.release_due(micro_batch.count)

    def _enter_layer(self, layer: int, args: tuple, kwargs: dict) -> None:
        self._passes.enter_layer(layer)
        for value in (*args, *kwargs.values()):
            for tensor in value if isinstance(value, (tuple, list)) else (value,):
                if type(tensor) is torch.Tensor and tensor.grad_fn is None:
                    # masks, tables, what a stage received: others hold them, so moving them would free nothing
                    storage = tensor.untyped_storage()
                    marks.of(storage).keep()
                    if tensor.requires_grad:
                        LEDGER.enter(storage, owned=False)
