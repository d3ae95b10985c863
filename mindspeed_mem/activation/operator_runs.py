"""Runs operators: says which one runs, has what they save packed, and those that the plan recomputes recorded."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

from mindspeed_mem.activation import regions
from mindspeed_mem.activation.course import UNKNOWN
from mindspeed_mem.activation.native_operators import NativeOperators
from mindspeed_mem.activation.observe.observation import Observation
from mindspeed_mem.activation.passes import Passes, first_of
from mindspeed_mem.activation.plan_in_force import PlanInForce
from mindspeed_mem.activation.position import NO_OPERATOR, Position
from mindspeed_mem.activation.rerun.module_rerun import ModuleRerun, under_way
from mindspeed_mem.activation.rerun.tape import Tape
from mindspeed_mem.activation.saved_tensors import SavedTensors
from mindspeed_mem.activation.second_runs import SecondRuns
from mindspeed_mem.activation.storage import marks
from mindspeed_mem.activation.storage.ledger import LEDGER
from mindspeed_mem.activation.storage.micro_batch import MicroBatch


class OperatorRuns:
    """What patches call around modules, functions and marked code.

    Args:
        resolve: makes the plan, where nobody has said that all layers are built.
    """

    __slots__ = (
        "_position",
        "_in_force",
        "_saved",
        "_second_runs",
        "_passes",
        "_observation",
        "_natives",
        "_resolve",
    )

    def __init__(
        self,
        position: Position,
        in_force: PlanInForce,
        saved: SavedTensors,
        second_runs: SecondRuns,
        passes: Passes,
        observation: Observation,
        natives: NativeOperators,
        resolve: Callable[[], None],
    ):
        self._position, self._in_force, self._saved, self._second_runs = position, in_force, saved, second_runs
        self._passes, self._observation, self._resolve = passes, observation, resolve
        self._natives = natives

    # ---- modules and functions
    def run(self, original: Callable, module: Any, args: tuple, kwargs: dict) -> Any:
        """Run a tagged module's forward as an operator."""
        layer, path = module.__dict__[regions.TAG]
        stack = self._position.stack
        if under_way:
            under_way[-1].enters_again(path, args, kwargs)
            return original(module, *args, **kwargs)
        if stack:
            return self._run_module(layer, path, original, module, args, kwargs)
        in_force, second_runs = self._in_force, self._second_runs
        if in_force.recomputes and forward_ad._current_level >= 0:
            # tensors may have tangents: what is saved of these no second run makes
            return original(module, *args, **kwargs)
        if path or in_force.idle or not regions.may_save():
            if not path and in_force.recomputes and torch.is_grad_enabled() and not regions.is_traced():
                second_runs.under_another_checkpoint(layer)  # before its backward, or again in it
            return original(module, *args, **kwargs)
        if not (in_force.agreed or in_force.is_current()):
            self._resolve()
            layer = module.__dict__[regions.TAG][0]  # it may count on now
        self._enter_layer(layer, module.training, args, kwargs)
        if in_force.covered is not None and layer not in in_force.covered:
            result = self._run_module(layer, path, original, module, args, kwargs)
            self._sign_at(result)
            return result
        hooks = None
        if self._position.course is None:
            hooks = saved_tensors_hooks(*self._saved.hooks)
            try:
                hooks.__enter__()
            except RuntimeError:  # somebody has disabled hooks here: run natively
                return self._run_module(layer, path, original, module, args, kwargs)
        second_runs.hooked = True
        try:
            result = self._run_module(layer, path, original, module, args, kwargs)
            if in_force.recomputes:
                second_runs.stays(result)
            return result
        finally:
            second_runs.hooked = False
            if hooks is not None:
                hooks.__exit__()

    def _run_module(self, layer: int, path: str, original: Callable, module: Any, args: tuple, kwargs: dict) -> Any:
        rerun = self._position.rerun
        if type(rerun) is Tape:  # a module inside marked code
            with self._second_runs.without(rerun):
                return self._run_module(layer, path, original, module, args, kwargs)
        recomputes = self._in_force.recomputes
        if type(rerun) is ModuleRerun:
            rerun.enters(path, args, kwargs)
            recomputes = False  # nothing inside runs again by itself
        if not recomputes and self._observation.counting is None:
            return self._run_once(layer, path, original, (module, *args), kwargs)
        return self._run_call(layer, path, functools.partial(original, module), args, kwargs)

    _run_module_slowly = _run_module  # where the other is in C++

    def run_inline(self, name: str, call: Callable, args: tuple, kwargs: dict, state: Any = None) -> Any:
        """Run a function as operator ``name`` of the running module; ``state`` as for `ModuleRerun`."""
        if under_way:
            under_way[-1].enters_again(name, args, kwargs)
        if under_way or not self._position.stack:
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
        again = second_runs.operator(layer, path, call, args, kwargs, state) if self._in_force.recomputes else None
        if self._observation.counting is not None:
            call = functools.partial(self._observation.counting.watch.run, (layer, path), state, call)
        if again is None:
            return self._run_once(layer, path, call, args, kwargs)
        micro_batch = self._position.micro_batch
        assert micro_batch is not None
        number = micro_batch.count + 1
        try:
            begin = functools.partial(self._start, layer, path, False)
            result = second_runs.run(layer, path, call, args, kwargs, begin, again, state)
        except BaseException:
            self.abandoned(depth)
            raise
        self.ended(depth)
        course = self._position.course
        if course is not None and number in course.signed:
            self._sign_at(result, number)
        return result

    def _run_once(self, layer: int, path: str, call: Callable, args: tuple, kwargs: dict) -> Any:
        """Run an operator that does not run again."""
        position = self._position
        stack, micro_batch = position.stack, position.micro_batch
        if stack and stack[-1][1] == path and stack[-1][0] == layer:
            return self._run_within(call, args, kwargs)  # a subclass calling super, or a marker of the same name
        assert micro_batch is not None
        depth, number = len(stack), micro_batch.count + 1
        try:
            self._start(layer, path, False)
            result = call(*args, **kwargs)
        except BaseException:
            self.abandoned(depth)
            raise
        self.ended(depth)
        course = position.course
        if course is not None and number in course.signed:
            self._sign_at(result, number)
        return result

    def _run_within(self, call: Callable, args: tuple, kwargs: dict) -> Any:
        """Run what is all of the operator that runs already."""
        position = self._position
        if position.watch is not None:
            position.watch.returns()
        micro_batch, course = position.micro_batch, position.course
        number = 0 if micro_batch is None else micro_batch.count
        result = call(*args, **kwargs)
        if course is not None and number in course.signed:
            self._sign_at(result, number)
        return result

    def _sign_at(self, result: Any, number: int | None = None) -> None:
        """What runs natively still tells when its backward starts, for what is to be back by then."""
        output, micro_batch = first_of(result), self._position.micro_batch
        node = output.grad_fn if isinstance(output, torch.Tensor) else None
        if node is not None and micro_batch is not None and self._in_force.covered:
            at = micro_batch.count if number is None else number
            if number is None:  # a layer that has no hook: begin no copy back before it
                micro_batch.signs(at)
            node.register_prehook(says_when(micro_batch, at))

    # ---- marked code
    def mark_start(self, name: str) -> None:
        """Inline operator ``name`` starts inside the running module."""
        stack = self._position.stack
        if stack and not under_way:
            layer, parent, _ = stack[-1]
            path = regions.inline_path(parent, name)
            self._start(layer, path, True)
            if self._in_force.recomputes and self._position.rerun is None:
                self._second_runs.start_tape(layer, path)

    def mark_stop(self, name: str) -> None:
        stack = self._position.stack
        if stack and stack[-1][2] and not under_way and regions.last_of(stack[-1][1]) == regions.inline_path("", name):
            self.ended(len(stack) - 1)

    # ---- where we are
    def abandoned(self, depth: int) -> None:
        """What runs above ``depth`` has raised."""
        self._second_runs.cut_tape(depth)
        self._leave(depth)

    def _start(self, layer: int, path: str, marker: bool) -> None:
        micro_batch = self._position.micro_batch
        assert micro_batch is not None
        micro_batch.count += 1
        position = self._position
        position.stack.append((layer, path, marker))
        if position.course is not None:
            self._by_course(micro_batch, layer, path)
        elif position.watch is not None:
            position.watch.starts(layer, path, marker)
        if not path or position.course is None or position.hooked or self._in_force.recomputes:
            micro_batch.switch(layer, path, micro_batch.count)
        if self._observation.stopwatch is not None:
            self._observation.stopwatch.switch(layer, path)
        if micro_batch.ahead is not None:
            self._passes.forward_reaches(micro_batch)

    def ended(self, depth: int) -> None:
        """What runs above ``depth`` ends: what it produced is complete, and some releases are due."""
        position = self._position
        stack, micro_batch = position.stack, position.micro_batch
        assert micro_batch is not None
        if position.course is not None and not position.hooked and not self._in_force.recomputes:
            # Nobody asks which operator runs: there is no hook, and no second run takes what it makes.
            del stack[depth:]
        else:
            if position.rerun is not None:
                self._second_runs.stop_tape(depth)
            self._leave(depth)
            layer, path, _ = stack[-1] if stack else NO_OPERATOR
            micro_batch.switch(layer, path, micro_batch.count)
            if self._observation.stopwatch is not None:
                self._observation.stopwatch.switch(layer, path)
        if micro_batch.fresh or micro_batch.due or micro_batch.late.nbytes:
            micro_batch.operator_ended()

    def _by_course(self, micro_batch: MicroBatch, layer: int, path: str) -> None:
        """An operator has started in a forward of which it is known what needs the hook."""
        course, number = self._position.course, micro_batch.count
        if course is not UNKNOWN and course is not None:
            if number < len(course.operators) and course.operators[number] == (layer, path):
                kept = course.kept.get(number)
                if kept is not None:
                    micro_batch.native.add(number, kept)
                if number in course.signed:
                    micro_batch.signs(number)
                if not course.hooked[number]:
                    return
            else:
                self._natives.depart()
        if not self._position.hooked and self._second_runs.hooked and regions.hooks_are_ours_alone():
            # under a checkpoint, whose hooks must stay innermost, or where somebody has disabled hooks: run natively
            with contextlib.suppress(RuntimeError):
                torch._C._autograd._push_saved_tensors_default_hooks(*self._saved.hooks)
                self._position.hooked = len(self._position.stack)

    def _leave(self, depth: int) -> None:
        """What runs above ``depth`` has ended. Markers may stand anywhere: hooks of others on top of ours go first."""
        position = self._position
        del position.stack[depth:]
        if position.watch is not None:
            position.watch.stops(depth)
        if position.hooked > depth:
            top = torch._C._autograd._top_saved_tensors_default_hooks(False)
            if top is not None and top[0] is self._saved.hooks[0]:
                torch._C._autograd._pop_saved_tensors_default_hooks()
                position.hooked = 0

    def _enter_layer(self, layer: int, training: bool, args: tuple, kwargs: dict) -> None:
        self._passes.enter_layer(layer)
        given = self._passes.layer_given
        if given is not None and self._passes.scheduled and layer < self._in_force.num_layers:
            given(args, kwargs)
        signature = self._signature(training, args, kwargs)
        on = self._position.course is not None
        self._natives.enter_layer(layer, signature, regions.hooks_are_ours_alone() if on else self._learns())

    def _signature(self, training: bool, args: tuple, kwargs: dict) -> tuple:
        """What decides what a layer saves."""
        signature: list[Any] = [training]
        for value in (*args, *kwargs.values()):
            for tensor in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(tensor, torch.Tensor):
                    nested = tensor.layout is torch.strided and tensor.is_nested
                    signature += self._shapes_in(tensor) if nested else tensor.shape, tensor.dtype, tensor.requires_grad
                    strided = tensor.layout is torch.strided and not nested  # others may have several storages, or none
                    if strided and type(tensor) is torch.Tensor and tensor.grad_fn is None:
                        self._held_by_others(tensor)
        return tuple(signature)

    @staticmethod
    def _shapes_in(nested: torch.Tensor) -> tuple:
        """Of its parts: it has none of its own, unless it is a jagged one."""
        return tuple(map(tuple, nested._nested_tensor_size().tolist()))

    def _held_by_others(self, tensor: torch.Tensor) -> None:
        """Masks, tables, what a stage received: moving them would free nothing."""
        storage = tensor.untyped_storage()
        marks.of(storage).keep()
        if tensor.requires_grad:
            LEDGER.enter(storage, owned=False)
            if self._position.watch is not None:
                self._position.watch.holds(marks.of(storage).token)

    def _learns(self) -> bool:
        """Whether this forward can go by a course, or show one: nobody measures or has hooks here."""
        in_force, observed = self._in_force, self._observation
        return (
            self._passes.scheduled
            and in_force.by_producer_only
            and not self._saved.every_record
            and observed.counting is None
            and observed.stopwatch is None
            and observed.profiler is None
            and not in_force.auto.searching
            and regions.hooks_are_ours_alone()
        )


def says_when(micro_batch: MicroBatch, number: int) -> Callable[[Any], None]:
    """A hook before the node of an operator's result: backward of that operator begins."""
    return lambda _: micro_batch.unpacks(number)
