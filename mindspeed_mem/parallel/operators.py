"""The torch functions that a split model calls: each with its strategies, repairs and name."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from mindspeed_mem.parallel import copies, report, rules
from mindspeed_mem.parallel.collectives import regions
from mindspeed_mem.parallel.moves import moved, running, text, whole
from mindspeed_mem.parallel.parts import settled
from mindspeed_mem.parallel.plan import Row, Strategies
from mindspeed_mem.parallel.refusals import explained, is_dtensors
from mindspeed_mem.parallel.strategy import StrategyError, placements


class Operators(TorchFunctionMode):
    """While a model's forward runs: plain tensors beside DTensors are whole ones, and operators follow their rows."""

    def __init__(self, mesh: DeviceMesh, rows: Mapping[str, Row]) -> None:
        super().__init__()
        self.mesh = mesh
        self.rows = {path: row for path, row in rows.items() if ":" in path}
        self.problems: list[str] = []
        self.begun = 0
        """How many forwards have."""
        self.called: set[str] = set()
        """The rows of operators that were."""
        self._with_rows = {path.partition(":")[0] for path in self.rows}
        self._frames: list[tuple[str, Counter[str]]] = []

    def enter(self, path: str) -> None:
        """The forward of the module at `path` begins."""
        self._frames.append((path, Counter()))

    def leave(self) -> None:
        self._frames.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if regions or not self._frames:
            return func(*args, **kwargs)
        kinds = _kinds(args) | (_kinds(kwargs.values()) if kwargs else 0)
        if not kinds & _SPLIT:
            return func(*args, **kwargs)
        path, calls = self._frames[-1]
        if getattr(func, "__name__", "") in ("__get__", "__set__"):
            return _named(func, args, kwargs, f"{path}:{func.__self__.__name__}")
        name = function_name(func)
        changes = name.endswith("_") or name == "setitem" or kwargs.get("inplace")
        if changes and args and _loses(args[0], (args, kwargs)):
            return self._into_plain(func, types, args, kwargs)
        where, row = f"{path}:{name}", None
        if path in self._with_rows:
            row = self._row(where, calls[name])
            calls[name] += 1
        if kinds & _PLAIN:
            args, kwargs = self._all_split((args, kwargs))
        if row is not None and row.in_strategy is not None:
            args, kwargs = bring((args, kwargs), row.in_strategy, self.mesh, where, self.problems)
        if changes:
            _refuse_lost(args[0] if args else None, where)
        before = running.where
        running.where = where
        try:
            result = _named(func, args, kwargs, where, rules.INSTEAD.get(func))
        finally:
            running.where = before
        if row is not None and row.out_strategy is not None:
            result = bring(result, row.out_strategy, self.mesh, f"{where}, output", self.problems, given=(args, kwargs))
        if self.begun <= _MARKED or report.is_recording():
            report.mark(result, where)
        return result

    def _into_plain(self, func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
        """A plain tensor is changed with split ones: in a copy, and back, so that autograd knows where it came from."""
        mine = whole(args[0].clone(), self.mesh)
        result = self.__torch_function__(func, types, (mine, *args[1:]), kwargs)
        args[0].copy_(_plain(mine, f"{self._frames[-1][0]}:{function_name(func)}"))
        return None if result is None else args[0]

    def _row(self, where: str, call: int) -> Row | None:
        for key in (f"{where}.{call}", where):
            if key in self.rows:
                self.called.add(key)
                return self.rows[key]
        return None

    def _all_split(self, values: Any) -> Any:
        leaves, tree = tree_flatten(values)
        return tree_unflatten([whole(one, self.mesh) if _mixes(one) else one for one in leaves], tree)


def _named(function: Callable, args: tuple, kwargs: dict, where: str, instead: Callable | None = None) -> Any:
    """What `function` returns, settled; an error of DTensor's names it."""
    try:
        result = function(*args, **kwargs) if instead is None else instead(function, args, kwargs, where)
        return settled(result, where)
    except Exception as error:
        if is_dtensors(error, function, args, kwargs):
            raise explained(error, where, (args, kwargs)) from error
        raise


def _refuse_lost(x: Any, where: str) -> None:
    """Raise where a change of `x` in place would not reach the tensor that is changed on one device."""
    if not isinstance(x, DTensor) or not (of := copies.copy_of(x)):
        return
    raise StrategyError(
        f"{where}: {tuple(x.shape)} {text(x.placements, x.device_mesh)} is {of}, and a change of it in place would be "
        "lost: use the operator that is not in place, clone() it first, or assign to the tensor itself (x[index] = ...)"
    )


def name_backward() -> None:
    """From now on errors of DTensor in backward, too, say of which operator they are, and what to do."""
    dispatcher = DTensor._op_dispatcher
    for step in ("_propagate_op_sharding_dispatch_slow_path", "_dispatch_get_local_results_slow_path"):
        original = getattr(dispatcher, step, None)
        if original is not None and not isinstance(original, functools.partial):
            setattr(dispatcher, step, functools.partial(_in_backward, original))


def _in_backward(step: Callable, operator: Any, args: tuple, *rest: Any) -> Any:
    try:
        return step(operator, args, *rest)
    except Exception as error:
        where = None if running.where else report.of_backward()
        if where and is_dtensors(error):  # else of a tensor that no split model made
            raise explained(error, f"{where}, backward ({operator})", args) from error
        raise


_MARKED = 10
"""In how many forwards backward learns the operators' names: marking takes 5 us each, and what fails does so early."""
_SPLIT, _PLAIN = 1, 2


def _kinds(values: Iterable[Any]) -> int:
    """Whether there are DTensors among these, and others."""
    found = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            found |= _PLAIN if _mixes(value) else _SPLIT if isinstance(value, DTensor) else 0
        elif isinstance(value, (list, tuple)):
            found |= _kinds(value)
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.dim() > 0


def _mixes(value: Any) -> bool:
    """(A number on the host is whole for torch, too, but its gradient would be a DTensor.)"""
    return (
        _is_plain(value) or isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.requires_grad
    )


def _loses(changed: Any, values: Any) -> bool:
    """Whether a DTensor around this tensor would be changed without it, or without its knowing where that came from."""
    if not isinstance(changed, torch.Tensor) or isinstance(changed, DTensor):
        return False
    graded = (one for one in tree_flatten(values)[0] if isinstance(one, torch.Tensor) and one.requires_grad)
    return changed.dim() == 0 or torch.is_grad_enabled() and next(graded, None) is not None


_names: dict[Any, str] = {}
_IN_WORDS = {"truediv": "div", "rtruediv": "div", "iadd": "add_", "imul": "mul_", "isub": "sub_", "itruediv": "div_"}
_IN_WORDS |= {"ifloordiv": "floor_divide_", "imod": "remainder_", "ipow": "pow_", "iand": "bitwise_and_"}
_IN_WORDS |= {"ior": "bitwise_or_", "ixor": "bitwise_xor_"}


def function_name(func: Callable) -> str:
    """As a user knows it: ``__radd__`` is an add, ``__getitem__`` is getitem."""
    name = _names.get(func)
    if name is None:
        name = getattr(func, "__name__", type(func).__name__)
        if name.startswith("__") and name.endswith("__"):
            name = name[2:-2]
            name = _IN_WORDS.get(name, name)
            name = name[1:] if name in ("radd", "rmul", "rmatmul") else name
        _names[func] = name
    return name


def bring(
    values: Any,
    wanted: Strategies,
    mesh: DeviceMesh,
    what: str,
    problems: list[str],
    local: bool = False,
    plain: bool = False,
    given: Any = None,
) -> Any:
    """The tensors among `values` as the strategies say, the others as they are.

    Args:
        values: nested as it likes; a mapping for strategies by name.
        wanted: None: as they come, the layouts of their gradients fixed.
        problems: takes what does not fit; such a tensor stays as it comes.
        local: plain tensors with a strategy are this rank's parts.
        plain: DTensors without a strategy become plain tensors, whole on each rank.
        given: what these are the results of; None: they are arguments.
    """
    held = None if given is None else [one for one in tree_flatten(given)[0] if _moves(one)]
    if isinstance(wanted, Mapping):
        if not isinstance(values, Mapping):
            problems.append(f"{what}: strategies by name, but the tensors have none; give them in order")
            return values
        missing = [name for name in wanted if name not in values]
        if missing:
            problems.append(f"{what}: nothing is called {', '.join(missing)}; there are {', '.join(map(str, values))}")
        strategies = [
            wanted.get(name) for name, value in values.items() for one in tree_flatten(value)[0] if _moves(one)
        ]
    else:
        strategies = list(wanted or ())
    leaves, tree = tree_flatten(dict(values) if isinstance(values, Mapping) else values)
    tensors = [index for index, leaf in enumerate(leaves) if _moves(leaf)]
    if wanted is not None and len(strategies) != len(tensors):
        problems.append(
            f"{what}: {len(strategies)} strategies for {len(tensors)} tensors; give one for each (None: as it comes), "
            "or strategies by name"
        )
        return values
    for number, index in enumerate(tensors):
        strategy = strategies[number] if wanted is not None else None
        if plain and strategy is None:
            if isinstance(leaves[index], DTensor):
                leaves[index] = _plain(leaves[index], "what the model returns")
        else:
            leaves[index] = _brought(leaves[index], strategy, mesh, f"{what} {number}", problems, local, held)
    changed = tree_unflatten(leaves, tree)
    return _like(values, changed)


def _plain(x: Any, where: str) -> torch.Tensor:
    """A DTensor as the plain tensor, whole on each rank."""
    all_whole = moved(x, [Replicate()] * x.device_mesh.ndim, where)
    return all_whole.to_local(grad_placements=all_whole.placements)


def _moves(value: Any) -> bool:
    return isinstance(value, DTensor) or _is_plain(value)


def _like(values: Any, changed: Any) -> Any:
    """A mapping of a class of its own keeps that (Hugging Face's outputs)."""
    if isinstance(values, Mapping) and type(values) is not dict:
        for key, value in changed.items():
            values[key] = value  # type: ignore[index]
        return values
    return changed


def _brought(
    x: Any, given: Any, mesh: DeviceMesh, what: str, problems: list[str], local: bool, held: list[Any] | None
) -> Any:
    if given is None:
        return moved(x, x.placements, what) if isinstance(x, DTensor) and x.requires_grad else x
    if not isinstance(x, DTensor) and local:
        target = placements(given, mesh, None, what, problems)
        return DTensor.from_local(x, mesh, target, run_check=False) if len(given) == x.dim() else x
    found: list[str] = []
    target = placements(given, mesh, x.shape, what, found)
    problems += found
    if found:
        return x
    x = x if isinstance(x, DTensor) else whole(x, mesh)
    if x.placements == target:
        return moved(x, target, what) if x.requires_grad else x
    brought = moved(x, target, what)
    if held is None or x._is_view() or any(x is one for one in held):  # else nobody has what it is a copy of
        copies.copied(brought, f"the copy that the strategy of {what} asks for")
    return brought
