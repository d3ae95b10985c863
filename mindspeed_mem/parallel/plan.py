"""The plan of `semi_auto`: which modules and operators get which strategies, written by hand or found by `auto`.

    {
        "":            {"in_strategy": (("dp", None),)},                    # the model's own inputs
        "mlp.fc1":     {"parameter_plan": {"weight": ("tp", None), "bias": ("tp",)}},
        "mlp.fc2":     {"parameter_plan": {"weight": (None, "tp")}, "out_strategy": (("dp", None),)},
        "layers.*.mlp": {"recompute": True},                                # * stands for one part of a path
        "layers.0:add.1": {"in_strategy": (("dp", None), ("dp", None))},    # the second add that layers.0 itself calls
    }

In YAML the same with lists for tuples and null for None.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from mindspeed_mem.output import write
from mindspeed_mem.parallel.strategy import Strategy, StrategyError

Strategies = tuple[Strategy, ...] | Mapping[str, Strategy] | None
"""For each input or output in order, or by name; those left out of a mapping stay as they come. None: all stay."""


@dataclass(frozen=True)
class Row:
    """What a plan says of a module or an operator."""

    in_strategy: Strategies = None
    """What the inputs are brought to; the names of a mapping are those of forward's parameters."""
    out_strategy: Strategies = None
    """What the outputs are brought to: a strategy for each, so ``(("dp", None),)`` for a single one."""
    parameter_plan: Mapping[str, Strategy] = field(default_factory=dict)
    """How parameters and buffers below a module are split, by their names there; all others are whole."""
    recompute: bool = False
    """Whether a module's forward runs again in backward instead of keeping what it made."""
    cost: Any = None
    """What `auto` noted; nobody reads it."""

    def to_dict(self) -> dict[str, Any]:
        """Without what is as it is anyway, lists for tuples: for YAML."""
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: _plain(value) for name, value in given.items() if value not in (None, {}, False)}


@dataclass
class Plan:
    """Rows by path: of a module (``""`` is the model), or ``path:operator`` and ``path:operator.n`` of the n-th call
    (from 0) of a torch function by the forward of that very module, named as torch does: linear, matmul, softmax."""

    rows: dict[str, Row]

    @classmethod
    def of(cls, given: Plan | Mapping[str, Any] | str | os.PathLike[str]) -> Plan:
        """A plan from what a user gives: rows as mappings, or the name of a YAML file with them.

        Raises StrategyError with all that cannot be read.
        """
        if isinstance(given, Plan):
            return given
        if isinstance(given, (str, os.PathLike)):
            try:
                given = yaml.safe_load(Path(given).read_text(encoding="utf-8")) or {}
            except OSError as error:
                raise StrategyError(f"{error.filename}: cannot be read ({error.strerror})") from None
            except (yaml.YAMLError, ValueError) as error:
                raise StrategyError(f"the plan is not YAML ({' '.join(str(error).split())})") from None
        problems: list[str] = []
        if not isinstance(given, Mapping):
            problems.append(f"a plan has rows by the paths of modules, not {type(given).__name__}")
            given = {}
        rows = {str(path): _row(str(path), row, problems) for path, row in given.items()}
        if problems:
            raise StrategyError(problems)
        return cls(rows)

    def by_path(self, modules: Collection[str], problems: list[str]) -> dict[str, Row]:
        """Each row under the paths that it stands for: of these modules, and of operators in them.

        Appends to `problems` the rows that stand for nothing, and what two of them say of one path alike.
        """
        found: dict[str, Row] = {}
        for given, row in self.rows.items():
            path, colon, operator = given.partition(":")
            pattern = re.compile(re.escape(path).replace(r"\*", r"[^.]+"))
            paths = [name for name in modules if pattern.fullmatch(name)]
            if not paths:
                near = difflib.get_close_matches(path, modules, 3) or [name for name in modules if name][:8]
                one = " (* stands for one part of a path)" if "*" in path else ""
                problems.append(f"{given!r}: there is no module {path!r}{one}; there are {', '.join(near)}, ...")
            if colon and (row.parameter_plan or row.recompute):
                problems.append(f"{given!r}: an operator has in_strategy and out_strategy only")
            for name in paths:
                key = name + colon + operator
                found[key] = _merged(found[key], row, key, problems) if key in found else row
        return found

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """As in YAML."""
        return {path: row.to_dict() for path, row in self.rows.items()}

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write it as YAML, to be read by `of` and edited by hand."""
        write(file, yaml.safe_dump(self.to_dict(), sort_keys=False, default_flow_style=None, width=120))


def _merged(one: Row, other: Row, path: str, problems: list[str]) -> Row:
    """What two rows say of one path, if they do not say the same thing twice."""
    said, more = one.to_dict(), other.to_dict()
    both = [name for name in more if name in said and name != "cost"]
    if both:
        problems.append(f"{path!r}: two rows say {', '.join(both)}; a pattern and a path may say different things")
    return replace(one, **{name: getattr(other, name) for name in more if name not in said})


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (tuple, list)) else value


def _row(path: str, given: Any, problems: list[str]) -> Row:
    if isinstance(given, Row):
        return given
    known = [one.name for one in fields(Row)]
    if not isinstance(given, Mapping):
        problems.append(f"{path!r}: {given!r} is no row; write a mapping with {', '.join(known)}")
        return Row()
    unknown = [str(key) for key in given if key not in known]
    if unknown:
        problems.append(f"{path!r}: unknown {', '.join(unknown)}; there are {', '.join(known)}")
    read: dict[str, Any] = {}
    for name in ("in_strategy", "out_strategy"):
        read[name] = strategies(given.get(name), f"{path!r}, {name}", problems)
    parameters = given.get("parameter_plan") or {}
    if not isinstance(parameters, Mapping):
        problems.append(f"{path!r}, parameter_plan: {parameters!r}; write strategies by parameters' names")
        parameters = {}
    read["parameter_plan"] = {
        str(key): strategy(value, f"{path!r}, parameter {key}", problems) for key, value in parameters.items()
    }
    if not isinstance(given.get("recompute", False), bool):
        problems.append(f"{path!r}, recompute: {given['recompute']!r}; write true or false")
    return Row(**read, recompute=given.get("recompute") is True, cost=given.get("cost"))


def strategies(given: Any, what: str, problems: list[str]) -> Strategies:
    """The strategies of several tensors as tuples; appends to `problems` what is none."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        return {str(key): strategy(value, f"{what}, {key}", problems) for key, value in given.items()}
    if isinstance(given, str) or not isinstance(given, Sequence):
        problems.append(f"{what}: {given!r}; write a strategy for each tensor, such as (('dp', None),)")
        return None
    return tuple(strategy(one, f"{what} {index}", problems) for index, one in enumerate(given))


def strategy(given: Any, what: str, problems: list[str]) -> Strategy:
    """One strategy with tuples for lists; a `Layout` stays what it is."""
    if given is None:
        return None
    if isinstance(given, (str, int)) or not isinstance(given, Sequence):
        problems.append(
            f"{what}: {given!r} is no strategy; write one tuple for each tensor, with an entry for each of its "
            "dimensions: (('dp', None),) for one tensor"
        )
        return None
    if isinstance(given, tuple):
        return given
    return tuple(tuple(one) if isinstance(one, list) else one for one in given)
