"""Automatic mode: a plan of `semi_auto` that an integer program finds."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mindspeed_mem import progress, ranks, requirements
from mindspeed_mem.parallel import rules
from mindspeed_mem.parallel.calls import Call, Calls, Value, calls_of
from mindspeed_mem.parallel.given import Given
from mindspeed_mem.parallel.meshes import of_other_kinds, old_torch
from mindspeed_mem.parallel.options import COLLECTIVES, Asker, Machine, Placed
from mindspeed_mem.parallel.plan import Plan, Row, strategies
from mindspeed_mem.parallel.search import Class, Search, Solution
from mindspeed_mem.parallel.strategy import StrategyError, strategy_of

_GIB = 2**30


@dataclass
class Found(Plan):
    """A plan with what it is expected to take; edit its rows, or `save` them, and give it to `semi_auto`."""

    seconds: float = 0.0
    """Of a step: what is computed and sent. An estimate for comparing plans."""
    memory_gib: float = 0.0
    """The most that a rank holds: parameters, gradients, optimizer states, what is kept for backward, and what lives
    for a moment beside that."""
    bytes_sent: Mapping[str, int] = field(default_factory=dict)
    """By each rank in a step, by mesh axis."""
    gap: float = 0.0
    """How much faster, as a part of `seconds`, another plan might be: what the solver has not ruled out."""
    search_rows: Callable[[Mapping[str, Row]], Found] | None = field(default=None, repr=False, compare=False)

    def explain(self, operator: str, strategy: Any = None) -> str:
        """What is chosen for an operator ("blocks.0.fc1:linear.0") and its cost, and what another strategy would cost.

        Args:
            strategy: of all its tensors, such as ``((None, None), ("tp", None))``: the rest is searched anew.

        Raises StrategyError if there is no such operator, or nothing fits with that strategy.
        """
        rows = [path for path in self.rows if fnmatch.fnmatchcase(operator, path)]
        path = rows[0] if rows else operator
        chosen = self.rows.get(path, Row())
        text = f"{path}: {chosen.in_strategy or 'inputs as they come'}; cost {chosen.cost}"
        if strategy is None or self.search_rows is None:
            return text
        read: list[str] = []
        given = Row(in_strategy=strategies(strategy, f"{operator!r}", read))
        if read:
            raise StrategyError(read)
        other = self.search_rows({path: given})
        return (
            f"{text}\nwith {given.in_strategy}: a step takes {other.seconds * 1e6:.1f} us instead of "
            f"{self.seconds * 1e6:.1f}, and {other.memory_gib:.4g} GiB instead of {self.memory_gib:.4g}"
        )


def auto(
    model: nn.Module,
    example: torch.Tensor | tuple | Mapping[str, Any],
    mesh: DeviceMesh,
    device_memory_gib: float | None = None,
    *,
    given: Plan | Mapping[str, Any] | None = None,
    machine: Machine | None = None,
    optimizer_bytes: float = 8.0,
) -> Found:
    """The fastest plan of `semi_auto` that an integer program finds for one step of training within the memory.

    Collective: the first rank searches. Nothing is computed and the model is not changed. Layouts that need no
    communication come from DTensor's rules; costs of computing, of redistributions forward and backward, of parameters
    with their gradients and states, and of what is kept for backward from `machine` and the shapes. Layers whose names
    differ in a number are split alike, and run again in backward all or none.

    Args:
        example: the arguments of forward with the full batch's shapes and dtypes, in order or by name.
        device_memory_gib: what may be held on a rank; None: no limit.
        given: rows that stay as they are: strategies of inputs, parameters, operators, and modules (those of the
            operators at their ends).
        machine: what the ranks and links can do.
        optimizer_bytes: of each number of a parameter, 8 for Adam's two float32.

    Returns a plan for `semi_auto`, to be edited or saved.

    Raises StrategyError with all that is wrong; if nothing fits, with the least memory that would do.
    """
    if wrong := of_other_kinds(model, mesh):
        raise StrategyError(wrong)
    problems = [said for said in (requirements.without_solver(),) if said]
    problems += old_torch("auto")
    if not mesh.mesh_dim_names:
        problems.append("the mesh has no axis names; make it with parallel.mesh(dp=2, tp=4)")
    if device_memory_gib is not None and not (math.isfinite(device_memory_gib) and device_memory_gib > 0):
        problems.append(f"device_memory_gib: got {device_memory_gib!r}; write GiB above 0, or None for no limit")
    machine = machine or Machine()
    for name in ("gbps", "latency_us"):
        one = getattr(machine, name)
        missing = [axis for axis in mesh.mesh_dim_names or () if isinstance(one, dict) and axis not in one]
        if missing:
            problems.append(f"machine.{name}: nothing for {', '.join(missing)}")
    if unknown := sorted(machine.slower.keys() - set(COLLECTIVES)):
        problems.append(f"machine.slower: no collective {', '.join(unknown)}; there are {', '.join(COLLECTIVES)}")
    if problems:
        raise StrategyError(problems)
    rules.register()
    rows, costs = Plan.of(given or {}), machine
    made: list[tuple[Calls, Asker]] = []
    links = [costs.link(axis, mesh) for axis in mesh.mesh_dim_names or ()]

    def with_rows(more: Mapping[str, Row]) -> Found:
        if not made:
            made.append(
                (calls_of(model, (example,) if isinstance(example, torch.Tensor) else example), Asker(mesh, costs))
            )
        calls, asker = made[0]
        fixed = Given(model, mesh, calls, Plan({**rows.rows, **more}))
        return _solved(mesh, Search(calls, asker, links, optimizer_bytes, fixed), device_memory_gib)

    found = _by_first_rank(mesh, lambda: with_rows({}))
    found.search_rows = with_rows
    return found


def _by_first_rank(mesh: DeviceMesh, search: Callable[[], Found]) -> Found:
    """What the first rank finds, or its error. Collective."""
    answer: Any = None
    if not any(mesh.get_coordinate() or ()):
        try:
            with progress.shown("searching for the layouts of a model", "seconds to minutes"):
                answer = search()
        except StrategyError as error:
            answer = error.problems
        except Exception as error:  # the others are not left waiting
            answer = (f"auto failed on the first rank: {type(error).__name__}: {error}",)
    for axis in range(mesh.ndim):
        answer = next((one for one in ranks.gather(answer, mesh.get_group(axis)) if one is not None), None)
    if not isinstance(answer, Found):
        raise StrategyError(answer)
    return answer


def _solved(mesh: DeviceMesh, search: Search, limit: float | None) -> Found:
    found = search.solve(None if limit is None else limit * _GIB)
    if found is None:
        least = search.solve(None, least=True)
        if least is None:
            raise StrategyError("no layouts satisfy all given rows together; leave some of them out")
        assert limit is not None
        up = float(f"{least.memory / _GIB * 1.001:.4g}")
        raise StrategyError(
            f"nothing fits into device_memory_gib={limit:g}: the least is {up:g} GiB a rank, with parameters split and "
            "modules run again as far as they can be; give more memory, ranks, or a smaller batch"
        )
    sent = {axis: round(size) for axis, size in zip(mesh.mesh_dim_names or (), found.sent, strict=True)}
    return Found(_rows(mesh, search, found), found.seconds, found.memory / _GIB, sent, found.gap)


def _rows(mesh: DeviceMesh, search: Search, found: Solution) -> dict[str, Row]:
    """The rows of a solution: what is split, what is brought where, and what it costs."""
    given = search.given
    inputs = [one for one in search.classes.values() if one.key[0] == "input"]
    own = tuple(_strategy(found, one, mesh) for one in inputs)
    results = [one for one in search.classes.values() if one.key[0] == "result"]
    returned = tuple(
        strategy_of(given.results[n], mesh, one.member.like.dim()) if n in given.results else None
        for n, one in enumerate(results)
        if isinstance(one.member, Value)
    )
    rows = {"": Row(own or None, returned if given.results else None)} if own or given.results else {}
    split, again = _split(mesh, search, found), [name for path in found.again for name in given.names(path)]
    for path in dict.fromkeys([*split, *again]):
        before = rows.get(path, Row())
        rows[path] = Row(before.in_strategy, before.out_strategy, split.get(path, {}), path in again)
    moved = _moved(search, found)
    alike: dict[tuple, list[tuple[Class, Call, Any, Any]]] = {}
    for one in search.classes.values():
        call = one.call
        if call is None or not call.name:
            continue
        outs = found.chosen[one.key].outs
        if fixed := given.outputs.get(call.name):
            outs = tuple(p if w is None else w for w, p in zip(fixed, outs, strict=True))
        ways = _strategies(found.chosen[one.key].ins, call.inputs, mesh), _strategies(outs, call.outputs, mesh)
        alike.setdefault(one.key[1:3], []).append((one, call, *ways))
    for several in alike.values():
        together = all(one[2:] == several[0][2:] for one in several)  # else each has a row of its own
        for one, call, brought, made in several:
            comes = one.key not in moved and not given.inputs.get(call.name)
            stays = not given.outputs.get(call.name) and all(maker != one.key for maker, _ in found.summed)
            if comes and stays:
                continue
            cost = {f"{what}_us": float(f"{took * 1e6:.4g}") for what, took in found.costs[one.key].items()}
            row = Row(None if comes else brought, None if stays else made, cost=cost)
            operator = call.name.partition(":")[2]
            for name in [f"{path}:{operator}" for path in given.names(one.path)] if together else one.names:
                before = rows.setdefault(name, row)
                rows[name] = replace(
                    before,
                    in_strategy=before.in_strategy or row.in_strategy,
                    out_strategy=before.out_strategy or row.out_strategy,
                )
    return rows


def _split(mesh: DeviceMesh, search: Search, found: Solution) -> dict[str, dict[str, Any]]:
    """How parameters are split, by rows' paths: a pattern where its layers are split alike, whatever their shapes."""
    ways: dict[str, dict[str, list[tuple[Class, Any]]]] = {}
    for one in search.classes.values():
        if one.key[0] in ("parameter", "buffer"):
            ways.setdefault(one.path, {}).setdefault(one.key[2], []).append((one, _strategy(found, one, mesh)))
    split: dict[str, dict[str, Any]] = {}
    for path, leaves in ways.items():
        together = all(way == several[0][1] for several in leaves.values() for _, way in several)
        for leaf, several in leaves.items():
            for one, way in several:
                if any(entry is not None for entry in way):
                    owners = [name.rpartition(".")[0] for name in one.names]
                    for name in search.given.names(path) if together else owners:
                        split.setdefault(name, {})[leaf] = way
    return split


def _strategies(placed: tuple[Placed, ...], values: list[Value], mesh: DeviceMesh) -> tuple:
    """Of several tensors; a sum stays as it comes."""
    return tuple(
        None if any(p.is_partial() for p in one) else strategy_of(one, mesh, value.like.dim())
        for one, value in zip(placed, values, strict=True)
    )


def _strategy(found: Solution, one: Class, mesh: DeviceMesh) -> Any:
    value = one.member
    assert isinstance(value, Value)
    return strategy_of(found.chosen[one.key].outs[0], mesh, value.like.dim())


def _moved(search: Search, found: Solution) -> set[tuple]:
    """The classes of calls at which something is redistributed."""
    return {
        edge.reader
        for edge in search.edges.values()
        if edge.reader[0] == "call"
        and found.chosen[edge.maker].outs[edge.place] != found.chosen[edge.reader].ins[edge.number]
    }
