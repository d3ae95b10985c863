"""What stands around each operator's ``forward`` and each range marker.

Most operators matter to nobody: by the course (native_operators.py) nothing that they save is moved or made again, and
nothing is due when they end. Of these only the number is counted, here and without another call, since what is called
with every operator is most of what the engine costs the host. All others go to `OperatorRuns`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mindspeed_mem.activation import engine as engines
from mindspeed_mem.activation import hot_path, regions
from mindspeed_mem.activation.position import NO_OPERATOR
from mindspeed_mem.activation.rerun.module_rerun import under_way
from mindspeed_mem.patching import Direct

_sequence_nr = torch._C._autograd._get_sequence_nr


@Direct
def region_forward(original: Callable) -> Callable:
    """The ``forward`` of a class of modules of which some are operators: those that have a tag."""
    return _forward(original) if hot_path.native is None else _forward_by(original, hot_path.native)


def _forward_by(original: Callable, native: Any) -> Callable:
    """As `_forward`, in C++."""
    by_dynamo, runs = torch.compiler.is_dynamo_compiling, native.runs

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if by_dynamo():
            return original(module, *args, **kwargs)
        return runs(original, module, args, kwargs)

    return forward


def _forward(original: Callable) -> Callable:
    tag, by_dynamo, flags = regions.TAG, torch.compiler.is_dynamo_compiling, torch.compiler
    in_transform = regions.in_transform

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        engine = engines.in_use
        # compiled code has no regions inside: a compiled module is one operator
        if engine is None or by_dynamo() or flags._is_compiling_flag or tag not in module.__dict__:
            return original(module, *args, **kwargs)
        position = engine.position
        if (position.stack or under_way) and in_transform():  # within a layer it is one operator with it
            return original(module, *args, **kwargs)
        if under_way:  # it runs again
            if under_way[-1].saved.entries:
                under_way[-1].enters_again(module.__dict__[tag][1], args, kwargs)
            return original(module, *args, **kwargs)
        stack, course = position.stack, position.course
        if course is None or not stack:
            return engine.operators.run(original, module, args, kwargs)
        rerun: Any = position.rerun
        if rerun is None:
            quiet = course.inside if position.hooked else course.quiet
        elif position.known:
            quiet = course.again
        else:
            return engine.operators.run(original, module, args, kwargs)
        layer, path = module.__dict__[tag]
        micro_batch: Any = position.micro_batch  # there is one in a layer
        top, depth, number = stack[-1], len(stack), micro_batch.count
        if top[1] == path and top[0] == layer:  # a subclass calling super: it is all of what runs already
            entry = quiet[number] if number < len(quiet) else None
            if entry is None or entry[1] != path or entry[0] != layer:
                return engine.operators.run(original, module, args, kwargs)
        else:
            number += 1
            entry = quiet[number] if number < len(quiet) else None
            if entry is None or entry[1] != path or entry[0] != layer:
                return engine.operators.run(original, module, args, kwargs)
            micro_batch.count = number
            stack.append(entry)
            if number in course.kept:
                micro_batch.native.add(number, course.kept[number])
            if quiet is not course.quiet:
                micro_batch.bounds.append(_sequence_nr())  # as `MicroBatch.switch`
                micro_batch.running.append((layer, path, number))
            if micro_batch.ahead is not None:
                engine.passes.forward_reaches(micro_batch)
        if rerun is not None:
            saved = rerun.saved
            if len(saved.entered) in saved.program.entries:
                saved.enters(rerun, path, args, kwargs)
            else:
                saved.entered.append(path)
        try:
            result = original(module, *args, **kwargs)
        except BaseException:
            engine.operators.abandoned(depth)
            raise
        if position.rerun is not rerun or position.hooked > depth:
            engine.operators.ended(depth)
        elif len(stack) > depth:
            del stack[depth:]
            if quiet is not course.quiet:
                micro_batch.bounds.append(_sequence_nr())
                micro_batch.running.append((top[0], top[1], micro_batch.count))
            due = micro_batch.due
            if micro_batch.fresh or (due and due[0][0] <= micro_batch.count) or micro_batch.late.nbytes:
                micro_batch.operator_ended()
        return result

    return forward


def range_begins(original: Callable) -> Callable:
    """A function that names the inline operator that starts, unless it has a message of its own."""
    return _begin(original) if hot_path.native is None else _marks_by(original, hot_path.native.begins)


def _marks_by(original: Callable, native_call: Callable) -> Callable:
    """As `_begin` and `_end`, in C++."""
    by_dynamo, names = torch.compiler.is_dynamo_compiling, original.__globals__

    def mark(msg: str | None = None, suffix: str | None = None) -> None:
        if by_dynamo():
            return original(msg, suffix)
        return native_call(original, names, _caller, msg, suffix)

    return mark


def _begin(original: Callable) -> Callable:
    by_dynamo, flags, names = torch.compiler.is_dynamo_compiling, torch.compiler, original.__globals__

    def begin(msg: str | None = None, suffix: str | None = None) -> None:
        engine = None if by_dynamo() or flags._is_compiling_flag else engines.in_use
        if engine is not None and msg is None and suffix is not None and engine.position.stack:
            position = engine.position
            course, stack = position.course, position.stack
            entry = None
            if course is not None and not under_way and (position.rerun is None or position.known):
                micro_batch: Any = position.micro_batch
                if position.rerun is not None:
                    quiet = course.again
                else:
                    quiet = course.inside if position.hooked else course.quiet
                layer, parent, _ = stack[-1]
                path, number = regions.inline_path(parent, suffix), micro_batch.count
                within = path == parent
                if not within:
                    number += 1
                entry = quiet[number] if number < len(quiet) else None
                if entry is not None and entry[1] == path and entry[0] == layer:
                    if not within:
                        micro_batch.count = number
                        stack.append(entry)
                        if number in course.kept:
                            micro_batch.native.add(number, course.kept[number])
                        if quiet is not course.quiet:
                            micro_batch.bounds.append(_sequence_nr())
                            micro_batch.running.append((layer, path, number))
                        if micro_batch.ahead is not None:
                            engine.passes.forward_reaches(micro_batch)
                else:
                    entry = None
            if entry is None:
                engine.operators.mark_start(suffix)
        if msg is None and names.get("_nvtx_enabled"):
            msg = _caller()
        return original(msg, suffix)

    return begin


def range_ends(original: Callable) -> Callable:
    """A function that names the inline operator that ends, unless it has a message of its own."""
    return _end(original) if hot_path.native is None else _marks_by(original, hot_path.native.ends)


def _end(original: Callable) -> Callable:
    by_dynamo, flags, names = torch.compiler.is_dynamo_compiling, torch.compiler, original.__globals__

    def end(msg: str | None = None, suffix: str | None = None) -> None:
        engine = None if by_dynamo() or flags._is_compiling_flag else engines.in_use
        if engine is not None and msg is None and suffix is not None and engine.position.stack:
            position = engine.position
            stack = position.stack
            top = stack[-1]
            if top[2]:
                course, looks = position.course, position.hooked or position.rerun is not None
                if course is None or under_way or (looks and not course.again) or position.hooked >= len(stack):
                    engine.operators.mark_stop(suffix)
                elif position.rerun is not None and not position.known:
                    engine.operators.mark_stop(suffix)
                elif regions.last_of(top[1]) == regions.inline_path("", suffix):
                    stack.pop()
                    micro_batch: Any = position.micro_batch
                    if looks or course.switches:
                        layer, path, _ = stack[-1] if stack else NO_OPERATOR
                        micro_batch.bounds.append(_sequence_nr())
                        micro_batch.running.append((layer, path, micro_batch.count))
                    due = micro_batch.due
                    if micro_batch.fresh or (due and due[0][0] <= micro_batch.count) or micro_batch.late.nbytes:
                        micro_batch.operator_ended()
        if msg is None and names.get("_nvtx_enabled"):
            msg = _caller()
        return original(msg, suffix)

    return end


def _caller() -> str:
    """With ranges enabled upstream names a range after its caller, which must not be this file."""
    caller = sys._getframe(2)
    return f"{caller.f_globals.get('__name__')}.{caller.f_code.co_name}"
