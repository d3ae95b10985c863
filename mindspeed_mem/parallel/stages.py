"""Which pipeline stage each module is of, by ``layer.pipeline_stage = k`` on as few modules as it takes."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from mindspeed_mem.parallel.strategy import StrategyError

ATTRIBUTE = "pipeline_stage"


@dataclass
class Stages:
    """A module without a number is of the stage of the module it is in, or else of the one before it."""

    of: dict[str, int] = field(default_factory=dict)
    """By the names of parameters and buffers."""
    begins: list[str] = field(default_factory=list)
    """Paths of the modules with which the stages after the first begin."""

    @property
    def count(self) -> int:
        return len(self.begins) + 1


def stages_of(model: nn.Module, ranks: int) -> Stages:
    """The stages of `model` for a pipeline of so many `ranks`, each of which has as many stages as the others.

    Raises StrategyError with all that is wrong with the numbers.
    """
    problems: list[str] = []
    found = Stages()
    first: dict[int, str] = {}
    named: dict[int, tuple[str, int]] = {}
    current = [0]

    def visit(module: nn.Module, path: str, inherited: int | None) -> None:
        own = module.__dict__.get(ATTRIBUTE)
        if own is not None and (not isinstance(own, int) or isinstance(own, bool) or own < 0):
            problems.append(f"{path or 'the model'}.{ATTRIBUTE}: got {own!r}; a number from 0 on")
            own = None
        if own is not None:
            first.setdefault(own, path)
            current[0] = own
        stage = own if own is not None else inherited
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is None:
                    continue
                name, where = f"{path}.{key}" if path else key, current[0] if stage is None else stage
                found.of[name] = where
                other, before = named.setdefault(id(tensor), (name, where))
                if before != where:
                    problems.append(f"{name} of stage {where} is {other} of stage {before}: tied tensors share a stage")
        for key, child in module.named_children():
            visit(child, f"{path}.{key}" if path else key, stage)

    visit(model, "", None)
    count = max([*first, 0]) + 1
    missing = [number for number in range(1, count) if number not in first]
    if missing:
        problems.append(f"no module has {ATTRIBUTE} {', '.join(map(str, missing))}, but one has {count - 1}")
    if count % ranks:
        problems.append(
            f"the model has {count} pipeline stages and the mesh {ranks} ranks for them: give each rank as many; set "
            f"layer.{ATTRIBUTE} from 0 to {ranks - 1} (or to a multiple of {ranks}, less 1)"
        )
    if problems:
        raise StrategyError(problems)
    found.begins = [first[number] for number in range(1, count)]
    return found
