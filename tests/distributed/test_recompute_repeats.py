"""Ranks that run collectives together find the same: an operator runs again on all of them, or on none."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from tests.swap_runs import again
from tests.worlds import on_ranks, parallel

pytestmark = pytest.mark.distributed


def step(plan: dict[str, Any]) -> tuple[list, list[str], int]:
    """Two steps, in which the second layer's MLP draws by itself on rank 1 alone; also how often its input came in."""
    import torch.distributed as dist

    from tests.models import build_gpt, train_step
    from tests.swap_runs import listening, swap

    with parallel(tp=2), listening() as said, swap(plan):
        chunks = build_gpt("swiglu_gqa_rope", layers=2)
        mlp = chunks[0].module.decoder.layers[1].mlp
        noise, first = torch.Generator().manual_seed(3), mlp.linear_fc1.forward
        runs = ctypes.c_long()  # nothing puts that back

        def changed(x: torch.Tensor):
            runs.value += 1
            hidden, bias = first(x)
            if dist.get_rank():  # backward needs it, but the other rank sees nothing of it
                hidden = hidden + (hidden * torch.rand(hidden.shape, generator=noise)).mul(0)
            return hidden, bias

        mlp.linear_fc1.forward = changed
        return [train_step(chunks, step=number, micro_batches=2) for number in range(2)], said, runs.value


def on_one_rank_alone(plan: dict[str, Any]) -> tuple[list[str], list[str], int]:
    from tests.swap_runs import difference

    without, _, _ = step({"swap_config": {"swap": False}})
    results, said, runs = step(plan)
    return [what for one, other in zip(results, without, strict=True) for what in difference(one, other)], said, runs


def test_what_does_not_repeat_itself_on_one_rank_is_kept_on_all_that_share_its_collectives():
    found = on_ranks(2, on_one_rank_alone, again(["mlp"]), timeout=90)
    for (wrong, said, runs), why in zip(found, ("on another rank", "run again, it gives other values"), strict=True):
        assert wrong == []
        assert [line for line in said if "recompute has no effect on mlp in layer 1" in line and why in line]
        assert not any("layer 0" in line for line in said)
        assert runs == 2 * 2 + 2, "each micro-batch once, and the trial, with torch's generators elsewhere and as then"


def raising(plan: dict[str, Any]) -> list[str]:
    """What is said where the second layer's MLP cannot run twice, which shows before its collective."""
    from tests.models import build_gpt, train_step
    from tests.swap_runs import listening, swap

    with parallel(tp=2), listening() as said, swap(plan):
        chunks = build_gpt("dense", layers=2)
        mlp, runs = chunks[0].module.decoder.layers[1].mlp, ctypes.c_long()
        first = mlp.linear_fc1.forward

        def once(x: torch.Tensor):
            runs.value += 1
            if runs.value in (2, 3):
                raise ValueError("only once")
            return first(x)

        mlp.linear_fc1.forward = once
        train_step(chunks, micro_batches=2)
        return said


def test_a_second_run_that_raises_is_told_of_before_other_ranks_are_waited_for():
    for said in on_ranks(2, raising, again(["mlp"]), timeout=60):
        [line] = [line for line in said if "run a second time" in line]
        assert "mlp of layer 1" in line and "ValueError: only once; where it does not on the other ranks" in line
        assert any("recompute has no effect on mlp in layer 1" in line for line in said)


def peak_of_the_first_forward(overlap: bool) -> tuple[int, int]:
    """Bytes that the forward takes in which operators are run twice to compare their runs, and those of all parameters.

    ``overlap``: hooks of the operators' own modules wait for their parameters, and ask for others. The backward is left
    out: gloo's threads hold a bucket there for as long as they happen to.
    """
    from tests.limited_runs import counted
    from tests.models import build_gpt, train_step
    from tests.swap_runs import swap

    ddp = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": overlap}
    with counted() as memory, parallel(), swap(again(["mlp"])):
        [chunk] = build_gpt("dense", layers=2, hidden=256, ddp=ddp)
        before, peaks = memory.allocated, []
        chunk.register_forward_hook(lambda *_: peaks.append(memory.peak - before))
        memory.reset_peak()
        train_step([chunk], micro_batches=2, micro_batch_size=1)
        [peak] = peaks
        return peak, sum(parameter.nbytes for parameter in chunk.parameters())


def test_runs_are_compared_without_a_copy_of_what_gathers_parameters():
    plain, overlapped = (on_ranks(2, peak_of_the_first_forward, overlap) for overlap in (False, True))
    for (without, parameters), (peak, _) in zip(plain, overlapped, strict=True):
        assert peak < without + parameters, "gloo itself copies a rank's half of them"


def prints_of_parameters() -> int:
    """In a step whose operators work on a table by parameter."""
    from tests.models import build_gpt, train_step
    from tests.swap_runs import swap

    class Table:
        def __init__(self, parameters):
            self.by_parameter = dict.fromkeys(parameters, 1.0)

        def use(self, module):
            return self.by_parameter[module.weight]

    prints = []
    native = torch.Tensor.__repr__
    with parallel(), swap(again(["mlp"])), pytest.MonkeyPatch.context() as patch:
        [chunk] = build_gpt("dense", layers=2)
        table = Table(chunk.parameters())
        for layer in chunk.module.decoder.layers:
            layer.mlp.linear_fc1.register_forward_pre_hook(lambda module, _: table.use(module) and None)
        patch.setattr(torch.Tensor, "__repr__", lambda self, **more: prints.append(1) or native(self, **more))
        train_step([chunk], micro_batches=1)
    return len(prints)


def test_runs_are_compared_without_a_look_at_the_values_of_parameters():
    assert on_ranks(1, prints_of_parameters) == [0]
