"""What users ask of single modules: ``module.swap()``, ``module.recompute()``. In an attached model it joins the plan.

A mark is plain data on the module, so that copies have it. Entries made of marks are known by their names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from mindspeed_mem.activation import engine as engines
from mindspeed_mem.activation import regions
from mindspeed_mem.activation.rerun import module_rerun
from mindspeed_mem.plan import LayerSwap, MemoryConfig, MemoryConfigError, OpSwap, RecomputeRule
from mindspeed_mem.plan.config import SwapEntry
from mindspeed_mem.plan.memory_plan import DEFAULT_ENTRY, DEFAULT_PATTERN
from mindspeed_mem.plan.recompute_config import Kind

SWAP, RECOMPUTE = "_mindspeed_mem_swap", "_mindspeed_mem_recompute"
_ENTRY = "module."


def ask(module: nn.Module, mark: str, value: Any) -> None:
    """Put a mark on a module (None: take it off). A model that is attached goes by it from the next step on.

    Raises:
        MemoryConfigError: the attached model's plan and this do not go together; the mark is as it was then. Or
            `module` is none.
    """
    if not isinstance(module, nn.Module):
        raise MemoryConfigError([f"{_name(mark)}: got a {type(module).__name__}; allowed: a torch.nn.Module"])
    before = module.__dict__.get(mark)
    _put(module, mark, value)
    engine = engines.current()
    if engine is None or not is_followed(module) or before == value:
        return
    config, told = engine.in_force.config, engine.in_force.tells
    try:
        if engine.adaptation is not None:
            raise MemoryConfigError([f"{_name(mark)}: got a model whose plan is 'auto', which decides that itself"])
        engine.adopt(joined(config), lambda mine: [mine])
    except MemoryConfigError:
        _put(module, mark, before)
        if engine.in_force.config is not config:
            engine.adopt(config, lambda mine: [mine], tell=False)
            engine.in_force.tells = told  # all of it has been told, but the plan is still whose it was
        raise


def is_followed(module: nn.Module) -> bool:
    """Whether it is in an attached model, whose plan what is asked of it joins."""
    engine = engines.current()
    return engine is not None and engine.takes_asked and regions.TAG in module.__dict__


def marked(module: nn.Module) -> Iterator[str]:
    """The names of what is asked of modules within this one, with their paths."""
    for path, one in module.named_modules():
        for mark in (SWAP, RECOMPUTE):
            if one.__dict__.get(mark) is not None:
                yield f"{path or 'the model'}.{_name(mark).removeprefix(_ENTRY)}"


def joined(config: MemoryConfig) -> MemoryConfig:
    """A configuration with what is asked of modules in layers, in the place of what was asked before."""
    entries: list[SwapEntry] = []
    rules: list[RecomputeRule] = []
    for index, layer in regions.alive():
        shares = layer.__dict__.get(regions.SHARED, ())
        for place, module in layer.named_modules():
            at, path = module.__dict__.get(regions.TAG, (-1, ""))
            if at == index or place in shares:
                entries += _swaps(module.__dict__.get(SWAP), index, path)
                rules += _rules(module.__dict__.get(RECOMPUTE), index, path)
    layers = tuple(one for one in entries if isinstance(one, LayerSwap))
    swaps = tuple(one for one in entries if isinstance(one, OpSwap))
    swap, recompute = config.swap, config.recompute
    by_plan = replace(recompute, rules=(*_planned(recompute.rules), *rules))
    if not swaps and not layers and not _asked(swap.op_swap) and not _asked(swap.layer_swap):
        return replace(config, recompute=by_plan)
    if not swap.swap:  # what the plan lists besides has no effect, and is to have none now
        swap = replace(swap, swap=True, layer_swap=(), op_swap=())
    elif swap.layer_swap is None and swap.op_swap is None:
        default = OpSwap(
            op_name=(DEFAULT_PATTERN,),
            layers=True,
            backward_prefetch=swap.default_prefetch,
            activations=swap.activations,
            entry=DEFAULT_ENTRY,
        )
        swap = replace(swap, op_swap=(default,))
    layer_swap, op_swap = (*_planned(swap.layer_swap), *layers), (*_planned(swap.op_swap), *swaps)
    return replace(config, swap=replace(swap, layer_swap=layer_swap, op_swap=op_swap), recompute=by_plan)


def _swaps(distance: int | None, layer: int, path: str) -> list[SwapEntry]:
    if distance is None:
        return []
    said: dict[str, Any] = {"layers": (layer,), "backward_prefetch": distance, "activations": "produced"}
    said["entry"] = _name(SWAP)
    return [OpSwap(op_name=(_pattern(path),), **said) if path else LayerSwap(**said)]


def _rules(asked: bool | None, layer: int, path: str) -> list[RecomputeRule]:
    if not asked:
        return []
    kind: Kind = "operator" if path else "layer"
    return [RecomputeRule(kind=kind, pattern=_pattern(path) or None, layers=(layer,), entry=_name(RECOMPUTE))]


def _pattern(path: str) -> str:
    return path.replace(".", r"\.")


def runs_again(module: nn.Module) -> bool:
    """Whether the plan in force makes what this module, which is about to run, has made again: nobody else need."""
    engine, tag = engines.current(), module.__dict__.get(regions.TAG)
    if engine is None or tag is None or engine.in_force.plan is None:
        return False
    there = bool(module_rerun.running()) or any(one[:2] == tag for one in engine.position.stack)
    return there and engine.in_force.plan.recompute(*tag) is not None


def _put(module: nn.Module, mark: str, value: Any) -> None:
    if value is None:
        module.__dict__.pop(mark, None)
    else:
        module.__dict__[mark] = value


def _name(mark: str) -> str:
    return f"{_ENTRY}{'swap' if mark == SWAP else 'recompute'}()"


def _asked(entries: Any) -> bool:
    return any(one.entry.startswith(_ENTRY) for one in entries or ())


def _planned(entries: Any) -> list[Any]:
    return [one for one in entries or () if not one.entry.startswith(_ENTRY)]
