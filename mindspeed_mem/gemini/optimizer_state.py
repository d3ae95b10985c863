"""The state of a `GeminiAdamOptimizer` as torch's Adam on a plain model has it: complete, and loaded into parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mindspeed_mem.gemini.options import OptionError

if TYPE_CHECKING:
    from mindspeed_mem.gemini.optimizer import GeminiAdamOptimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


@torch.no_grad()
def complete(optimizer: GeminiAdamOptimizer, keep: bool) -> dict[str, Any]:
    """{"state": {number: {"step", "exp_avg", "exp_avg_sq"}}, "param_groups", "loss_scaler"}; {} unless `keep`.

    Collective.
    Numbers count the parameters in the order of the groups; those that have never been stepped have no state.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = {param: number for number, param in enumerate(params)}
    state: dict[int, dict[str, Any]] = {}
    for one in optimizer.model.chunks:
        if not any(optimizer.counts[param] for param in one.chunk.params):
            continue
        for moment in MOMENTS:
            part = torch.zeros_like(one.master, device=one.chunk.whole.device)
            for param, master in one.masters.items():
                held = optimizer.inner.state.get(master, {}).get(moment)
                if held is not None:
                    part[slice(*one.chunk.own_piece(param))].copy_(held)
            whole = one.whole_on_host(part)
            for param, piece in one.chunk.pieces.items():
                if keep and optimizer.counts[param] and param in numbers:
                    entry = state.setdefault(numbers[param], {"step": torch.tensor(float(optimizer.counts[param]))})
                    entry[moment] = whole[slice(*piece)].view(param.shape)
    if not keep:
        return {}
    groups = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append({**settings, "params": [numbers[param] for param in group["params"]]})
    scaler = optimizer.scaler.state_dict() if optimizer.scales_loss else None
    return {"state": dict(sorted(state.items())), "param_groups": groups, "loss_scaler": scaler}


@torch.no_grad()
def load(optimizer: GeminiAdamOptimizer, saved: dict[str, Any]) -> None:
    """Take this rank's part of `saved`. Raises OptionError with all that does not fit, before anything changes."""
    groups = saved.get("param_groups", [])
    wrong = []
    sizes = [len(group["params"]) for group in groups], [len(group["params"]) for group in optimizer.param_groups]
    if sizes[0] != sizes[1]:
        wrong.append(f"the groups saved have {sizes[0]} parameters, the optimizer's {sizes[1]}")
    pairs = [
        (number, param)
        for group, own in zip(groups, optimizer.param_groups, strict=False)
        for number, param in zip(group["params"], own["params"], strict=False)
    ]
    state = saved.get("state", {})
    for number, param in pairs:
        entry = state.get(number)
        if entry is None:
            continue
        if lacking := [name for name in ("step", *MOMENTS) if name not in entry]:
            wrong.append(f"parameter {number} has no {', '.join(lacking)}: another optimizer than Adam saved it")
            continue
        for moment in MOMENTS:
            if entry[moment].shape != param.shape:
                wrong.append(f"{moment} of parameter {number} has shape {tuple(entry[moment].shape)}")
    if wrong:
        raise OptionError("state of the optimizer: " + "; ".join(wrong))
    for group, own in zip(groups, optimizer.param_groups, strict=True):
        own.update({key: value for key, value in group.items() if key != "params"})
    by_master = optimizer.inner.state
    by_master.clear()
    one_of = {param: one for one in optimizer.model.chunks for param in one.chunk.params}
    for number, param in pairs:
        entry, one = state.get(number), one_of[param]
        optimizer.counts[param] = 0 if entry is None else int(entry["step"])
        master = one.masters[param]
        if entry is None or not master.numel():
            continue
        own, first = one.chunk.own_piece(param), one.chunk.pieces[param].start - one.chunk.mine.start
        mine = slice(own.start - first, own.end - first)
        by_master[master] = {"step": torch.tensor(float(entry["step"]), device=master.device)}
        for moment in MOMENTS:
            by_master[master][moment] = torch.empty_like(master).copy_(entry[moment].reshape(-1)[mine])
    optimizer.settle()
    if saved.get("loss_scaler") and optimizer.scales_loss:
        optimizer.scaler.load_state_dict(saved["loss_scaler"])
