"""Semi-automatic mode: modules and operators get strategies, the redistributions between them are derived."""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten

from mindspeed_mem import ranks
from mindspeed_mem.activation import asked
from mindspeed_mem.parallel import rules
from mindspeed_mem.parallel.meshes import agree, everywhere, mesh_in_use, of_other_kinds, old_torch
from mindspeed_mem.parallel.moves import Placements, moved
from mindspeed_mem.parallel.operators import Operators, bring, name_backward
from mindspeed_mem.parallel.plan import Plan, Row, Strategies
from mindspeed_mem.parallel.recompute import Recomputed, run_again
from mindspeed_mem.parallel.report import Report, is_recording, start, stop
from mindspeed_mem.parallel.strategy import StrategyError, placements

logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)
_latest: list[Split] = []


def semi_auto(
    model: Model,
    mesh: DeviceMesh,
    plan: Plan | Mapping[str, Any] | str | os.PathLike[str],
    *,
    inputs: str = "whole",
) -> Model:
    """Split `model` over `mesh` as `plan` says; its numbers stay those of one device, up to rounding.

    Parameters and buffers become DTensors in place, with the values of the first rank: those that the plan names are
    split, all others are whole on each rank, with gradients summed. A tensor that is not laid out as its reader's
    strategy says is redistributed for it, and its gradient comes back in the tensor's own layout. Tensors that forward
    makes itself are taken to be the same on all ranks.

    The model returns plain tensors, whole on each rank, from which all ranks compute the same loss; what has an
    ``out_strategy`` in the row of the model itself (``""``) is returned as DTensors with that layout.

    Args:
        model: a plain module, changed in place; make the optimizer afterwards.
        mesh: with axis names.
        plan: rows by the paths of modules, or a YAML file with them (see `Plan`).
        inputs: "whole": each rank passes the full batch. "local": each passes its part of the tensors that the row of
            the model itself (``""``) has strategies for.

    Returns `model`.

    Raises StrategyError with all that does not fit; what needs the inputs' shapes is raised at the end of the first
    forward with them. Collective: ranks with different plans are refused, as are inputs of different shapes in a
    forward, and in the first forward inputs with different numbers.
    """
    rows = Plan.of(plan)
    problems = _unsuited(model, mesh, inputs)
    if not problems:
        problems = _disagreement(rows, model, mesh)
    if problems:
        raise StrategyError(problems)
    names = {name: module for name, module in model.named_modules()}
    by_path = rows.by_path(list(names), problems)
    split_ones = laid_out(model, mesh, by_path, problems)
    check_names(by_path, mesh, problems)
    if problems:
        raise StrategyError(problems)
    rules.register()
    name_backward()
    rules.compare_random_states(mesh)
    _distribute(model, mesh, split_ones)
    split = Split(mesh, by_path, inputs == "local")
    for name, module in names.items():
        module.forward = Forward(module, name, by_path.get(name), split)
        module.register_load_state_dict_pre_hook(_take_parts)
    _watch_optimizers()
    _latest[:] = [split]
    return model


def report(model: nn.Module | None = None) -> Report:
    """What the first step of `model` redistributed; None: of the model that was split last.

    Complete after that step's backward. Raises StrategyError if nothing has been split.
    """
    if model is not None:
        forward: Any = model.forward
        outer: Any = forward.inner if isinstance(forward, Recomputed) else forward
        return outer.split.report
    if not _latest:
        raise StrategyError("nothing is split yet: see parallel.semi_auto")
    return _latest[0].report


def shard(
    target: Callable,
    in_strategy: Strategies = None,
    out_strategy: Strategies = None,
    parameter_plan: Mapping[str, Any] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    name: str | None = None,
) -> Callable:
    """`target` with these strategies: its inputs and outputs are brought to them, forward and backward.

    Args:
        target: a module, changed in place, or a function, which is wrapped.
        in_strategy: for each tensor in order, or by the names of arguments.
        out_strategy: for each output.
        parameter_plan: of a module, by the parameters' names in it.
        mesh: None: the one made last.
        name: for reports and messages.

    Returns the module, or a function in place of the function.

    Raises StrategyError with all that does not fit; for a function, when it is called.
    """
    given = {"in_strategy": in_strategy, "out_strategy": out_strategy, "parameter_plan": parameter_plan}
    plan = Plan.of({"": given})
    if isinstance(target, nn.Module):
        return semi_auto(target, mesh_in_use(mesh), plan)
    if parameter_plan:
        raise StrategyError("parameter_plan is for modules; a function has in_strategy for all its tensors")
    if too_old := old_torch("shard"):
        raise StrategyError(too_old)
    if not callable(target):
        raise StrategyError(f"shard: got a {type(target).__name__}; allowed: a torch.nn.Module, or a function")
    called = name or str(getattr(target, "__name__", type(target).__name__))
    rules.register()
    name_backward()
    made: dict[DeviceMesh, Forward] = {}

    @functools.wraps(target)
    def run(*args: Any, **kwargs: Any) -> Any:
        on = mesh_in_use(mesh)
        if on not in made:
            made[on] = Forward(target, called, plan.rows[""], Split(on, {}, False, plain=False))
        return made[on](*args, **kwargs)

    return run


class Split:
    """What the forwards of one split model share."""

    def __init__(self, mesh: DeviceMesh, rows: Mapping[str, Row], local: bool, plain: bool = True) -> None:
        self.mesh = mesh
        self.rows = rows
        self.local = local
        self.plain = plain
        """Whether it is a model, which returns plain tensors, and whose first step is recorded."""
        self.operators = Operators(mesh, rows)
        self.report = Report()
        self.depth = 0
        self._new = True
        """Whether nothing has been called yet."""
        self._waits = plain
        """Whether the first step is still to be recorded."""

    def __deepcopy__(self, memo: dict) -> Split:
        """For a copy of the model, on the same ranks."""
        return Split(self.mesh, self.rows, self.local, self.plain)

    def compare(self, called: str, inputs: Any) -> None:
        """Raise where the ranks do not call the same with the same inputs; their numbers are compared once."""
        told = [called, f"gradients={torch.is_grad_enabled()}"]
        for one in tree_flatten(inputs)[0]:
            if isinstance(one, torch.Tensor):
                told.append(f"{tuple(one.shape)} {one.dtype} {one.requires_grad}")
                if self._new and not self.local and not isinstance(one, DTensor):
                    told.append(
                        f"sum {one.detach().sum(dtype=torch.complex128 if one.is_complex() else torch.float64)}"
                    )
        self._new = False
        agree(self.mesh, [], " ".join(told), "the full batch is passed on all ranks (or parts, with inputs='local')")

    def begin(self) -> None:
        """The outermost forward starts."""
        self.operators.problems.clear()
        self.operators.begun += 1
        if self._waits and torch.is_grad_enabled():
            self._waits = False
            start(self.report)

    def end(self, result: Any) -> None:
        """It ends with `result`: raise what did not fit. The first step ends with the backward of it."""
        if is_recording():
            for key in self.operators.rows.keys() - self.operators.called:
                path, _, operator = key.partition(":")
                self.operators.problems.append(f"{key}: {path or 'the model'} calls no {operator}")
        if self.operators.problems:
            stop(self.report)
            raise StrategyError(list(dict.fromkeys(self.operators.problems)))
        waits = [one for one in tree_flatten(result)[0] if isinstance(one, torch.Tensor) and one.requires_grad]
        if not is_recording():
            return
        for one in waits:
            one.register_hook(lambda grad: torch.autograd.Variable._execution_engine.queue_callback(self.finish))
        if not waits:
            self.finish()

    def finish(self) -> None:
        """The first step is over."""
        if stop(self.report) and ranks.number() == 0:
            logger.info("redistributed in the first step:\n%s", self.report)


class Forward:
    """A module's forward, or a function, between its boundaries."""

    def __init__(self, target: Any, path: str, row: Row | None, split: Split) -> None:
        self.target = target
        self.path = path
        self.row = row
        self.split = split
        self._inner = target.forward if isinstance(target, nn.Module) else target
        self._parameters = target._parameters if isinstance(target, nn.Module) else {}
        self._recompute = row is not None and row.recompute
        if isinstance(self._inner, Recomputed):
            self._recompute, self._inner = True, self._inner.inner
        try:
            self.__signature__ = inspect.signature(self._inner)
        except ValueError:  # C functions have none
            self.__signature__ = None  # type: ignore[assignment]
        functools.update_wrapper(self, self._inner, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        split = self.split
        if split.depth:
            return self._between(args, kwargs)
        if torch.is_inference_mode_enabled():  # DTensors have no views there
            with torch.inference_mode(False), torch.no_grad():
                return self(*args, **kwargs)
        if split.plain:
            split.compare(f"{self.path} training={self.target.training}", (args, kwargs))
        before = _set_implicit(True)
        split.depth += 1
        try:
            split.begin()
            with split.operators:
                result = self._between(args, kwargs)
            if self.path == "" and split.plain:
                wanted = self.row.out_strategy if self.row is not None else None
                result = bring(result, wanted, split.mesh, "the model, output", split.operators.problems, plain=True)
        except Exception as error:
            stop(split.report)
            if split.operators.problems:
                raise StrategyError(list(dict.fromkeys(split.operators.problems))) from error
            raise
        finally:
            split.depth -= 1
            _set_implicit(before)
        split.end(result)
        return result

    def _between(self, args: tuple, kwargs: dict) -> Any:
        row, mesh, problems = self.row, self.split.mesh, self.split.operators.problems
        if row is None:
            return self._once_or_again(args, kwargs)
        what = self.path or "the model"
        args, kwargs = self._arguments(args, kwargs, row, what)
        result = self._once_or_again(args, kwargs)
        if row.out_strategy is not None and not (self.path == "" and self.split.plain):
            result = bring(result, row.out_strategy, mesh, f"{what}, output", problems, given=(args, kwargs))
        return result

    def _arguments(self, args: tuple, kwargs: dict, row: Row, what: str) -> tuple[tuple, dict]:
        split, wanted = self.split, row.in_strategy
        settings = (split.mesh, f"{what}, input", split.operators.problems, split.local and self.path == "")
        if self.__signature__ is None:
            return bring((args, kwargs), wanted, *settings)
        bound = self.__signature__.bind(*args, **kwargs)
        bound.arguments = bring(dict(bound.arguments), wanted, *settings)
        return bound.args, bound.kwargs

    def _once_or_again(self, args: tuple, kwargs: dict) -> Any:
        if self._recompute and torch.is_grad_enabled() and not asked.runs_again(self.target):
            return run_again(self.target, self._again, args, kwargs)
        return self._inside(args, kwargs)

    def _inside(self, args: tuple, kwargs: dict) -> Any:
        operators = self.split.operators
        for name, one in self._parameters.items():  # of a copy, or frozen until now
            if isinstance(one, DTensor):
                moved(one, one.placements, f"{self.path}.{name}.grad")
        operators.enter(self.path)
        try:
            return self._inner(*args, **kwargs)
        finally:
            operators.leave()

    def _again(self, args: tuple, kwargs: dict) -> Any:
        """In forward, and once more in backward, where nothing else of the model runs."""
        if self.split.depth:
            return self._inside(args, kwargs)
        before = _set_implicit(True)
        self.split.depth += 1
        try:
            with self.split.operators:
                return self._inside(args, kwargs)
        finally:
            self.split.depth -= 1
            _set_implicit(before)


def _set_implicit(allowed: bool) -> bool:
    """Whether DTensor takes plain tensors for whole ones, from now on; returns whether it did."""
    dispatcher = DTensor._op_dispatcher
    before = dispatcher._allow_implicit_replication
    dispatcher._allow_implicit_replication = allowed
    return before


# ---- what users do with split models


def _take_parts(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Whole tensors are loaded, too: each rank takes its part."""
    for name, own in (*module._parameters.items(), *module._buffers.items()):
        given = state.get(prefix + name)
        if isinstance(own, DTensor) and isinstance(given, torch.Tensor) and not isinstance(given, DTensor):
            if given.shape == own.shape:  # else torch says so
                given = given.to(own.device)
                state[prefix + name] = distribute_tensor(given, own.device_mesh, own.placements, src_data_rank=None)


_REPLACED = "_mindspeed_mem_replaced"
"""Attribute of a parameter: a DTensor stands in its place."""


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse_replaced)


def _refuse_replaced(optimizer: torch.optim.Optimizer, *rest: Any) -> None:
    if any(hasattr(one, _REPLACED) for group in optimizer.param_groups for one in group["params"]):
        raise StrategyError(
            f"this {type(optimizer).__name__} has parameters from before semi_auto, which nobody trains any more: make "
            "the optimizer afterwards"
        )


# ---- before anything is changed


def _unsuited(model: nn.Module, mesh: DeviceMesh, inputs: str) -> list[str]:
    if problems := of_other_kinds(model, mesh):
        return problems
    problems = old_torch("semi_auto")
    if not mesh.mesh_dim_names:
        problems.append("the mesh has no axis names; make it with parallel.mesh(dp=2, tp=4)")
    if inputs not in ("whole", "local"):
        problems.append(f"inputs: got {inputs!r}; allowed: 'whole', 'local'")
    for name, module in model.named_modules():
        kind = type(module)
        others = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel", "PipelineStage")
        named = [base.__name__ for base in kind.__mro__ if base.__name__ in others]
        if kind.__module__.startswith("mindspeed_mem.") or named:
            problems.append(
                f"{name or 'the model'} is a {kind.__name__}: semi_auto splits plain modules only, before it"
            )
        if isinstance(module.__dict__.get("forward"), Forward):
            problems.append(f"{name or 'the model'} is split already")
            break
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, DTensor):
            problems.append(f"{name} is a DTensor already; give semi_auto the plain model")
            break
    return problems


def _disagreement(plan: Plan, model: nn.Module, mesh: DeviceMesh) -> list[str]:
    """Why the ranks would not do the same. Collective."""
    shapes = [(name, tuple(one.shape)) for name, one in [*model.named_parameters(), *model.named_buffers()]]
    found = {what: _digest(value) for what, value in (("plans", plan.to_dict()), ("models", shapes))}
    different = {what for what, seen in everywhere(found, mesh).items() if len(seen) > 1}
    return [f"the ranks have different {what}; give all of them the same" for what in sorted(different)]


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def laid_out(
    model: nn.Module, mesh: DeviceMesh, rows: Mapping[str, Row], problems: list[str]
) -> dict[int, tuple[str, Placements]]:
    """Name and placements of each tensor that the rows split, by its id."""
    found: dict[int, tuple[str, Placements]] = {}
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for path, row in rows.items():
        for key, strategy in row.parameter_plan.items():
            name = f"{path}.{key}" if path else key
            if name not in tensors:
                below = [
                    one[len(path) + 1 :] if path else one for one in tensors if one.startswith(f"{path}." * bool(path))
                ]
                problems.append(f"{path!r}: there is no parameter {key!r}; there are {', '.join(below[:12]) or 'none'}")
                continue
            if strategy is None:
                continue
            tensor = tensors[name]
            target = placements(strategy, mesh, tensor.shape, name, problems)
            other, before = found.get(id(tensor), (name, target))
            if before != target:
                problems.append(f"{name}: another row, or the same parameter as {other}, is split otherwise")
            found[id(tensor)] = name, target
    return found


def check_names(rows: Mapping[str, Row], mesh: DeviceMesh, problems: list[str]) -> None:
    """What of the strategies is wrong whatever the shapes are."""
    for path, row in rows.items():
        for field, what in ((row.in_strategy, "input"), (row.out_strategy, "output")):
            named = field.items() if isinstance(field, Mapping) else enumerate(field or ())
            for key, strategy in named:
                if strategy is not None:
                    placements(strategy, mesh, None, f"{path or 'the model'}, {what} {key}", problems)


def _distribute(model: nn.Module, mesh: DeviceMesh, split: Mapping[int, tuple[str, Placements]]) -> None:
    whole = placements((), mesh, None, "")
    names = {id(one): name for name, one in model.named_parameters()}
    made: dict[int, Any] = {}
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for key, tensor in own.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    _, target = split.get(id(tensor), ("", whole))
                    new: Any = distribute_tensor(tensor.detach(), mesh, target)
                    if isinstance(tensor, nn.Parameter):
                        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                        new.__dict__.update(tensor.__dict__)
                        setattr(tensor, _REPLACED, True)
                        if new.requires_grad:
                            moved(new, target, f"{names[id(tensor)]}.grad")
                    made[id(tensor)] = new, tensor  # which lives on: another must not get its id
                own[key] = made[id(tensor)][0]
