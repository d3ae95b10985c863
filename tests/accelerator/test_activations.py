"""Swap, recompute, survival and the adaptive run on the accelerator: the same bits under lags, no wait and no
allocation in a steady state."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch

from mindspeed_mem.activation.storage import mover
from tests import side_streams
from tests.accelerator import seeds
from tests.accelerator.lags import LAGS, under
from tests.asynchrony.test_several_streams import PLANS
from tests.asynchrony.test_swap_waits import SCARCE, run
from tests.attachment.rank_cases import on_device
from tests.memory import test_host_calls
from tests.memory.test_adaptive_run import life
from tests.memory.test_survive_oom import under_limits
from tests.memory.test_trace import check_nesting, events_of, spans, traced
from tests.numerics.test_recompute import policies
from tests.numerics.test_swap import compare
from tests.swap_runs import EVERYTHING, again, mismatches, op
from tests.sweeping import but
from tests.worlds import on_ranks, parallel

pytestmark = pytest.mark.distributed

sweep = pytest.mark.sweep
FUSED = {"kind": "dropout", "bias_dropout_fusion": True, "bias_activation_fusion": True}


@pytest.mark.parametrize(
    ("lag", "model"),
    [
        ("copies late", {"kind": "dense"}),
        pytest.param("computation late", {"kind": "swiglu_gqa_rope", "hidden_dropout": 0.1}, marks=sweep),
        pytest.param("random", {"kind": "moe"}, marks=sweep),
        pytest.param("random", {"kind": "mla"}, marks=sweep),
        pytest.param("copies late", FUSED, marks=sweep),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_swap(lag, model):
    assert on_ranks(1, under, lag, compare, {}, {"layers": 3, **model}, ["everything", "both"], device="cuda") == [[]]


@sweep
def test_a_trace_has_the_devices_times(tmp_path):
    file = tmp_path / "trace.json"
    [(figures, differ, _, left)] = on_ranks(
        1, under, "copies late", traced, EVERYTHING, str(file), (2, 2), number=2, device="cuda"
    )
    assert differ == [[]] * 2 and not any(left.values())
    events = events_of(file)
    check_nesting(events)
    for track, counted in (("copy out", "copies_out"), ("copy in", "copies_in")):
        ends = [one["ts"] + one["dur"] for one in spans(events, track)]
        assert ends == sorted(ends) and len(ends) == getattr(figures[1], counted) - getattr(figures[0], counted) > 0
    assert all(one["args"]["allocated"] for one in events if one["name"] == "device bytes")


def test_attached_models():
    """Plain torch models with plans."""
    assert on_ranks(1, under, "copies late", on_device, ["saved", "mixed", "whole"], device="cuda") == [[]]


@pytest.mark.parametrize("operator", seeds.RETURNS)
def test_seeds_of_no_dropout_may_differ(operator):
    [(same, nbytes)] = on_ranks(1, seeds.recomputed, operator, 0.0, device="cuda")
    assert all(same) and nbytes
    [(same, nbytes)] = on_ranks(1, seeds.recomputed, operator, 0.5, device="cuda")
    assert all(same) and not nbytes


def recomputed(model: dict) -> list[str]:
    chosen = policies(model["kind"])
    plans = {name: chosen[name] for name in itertools.islice(chosen, 1, None, 4)}
    return mismatches(plans, {}, model, micro_batches=1)


@pytest.mark.parametrize(
    ("lag", "model"),
    [
        pytest.param("computation late", {"kind": "dropout"}, marks=sweep),
        pytest.param("random", {"kind": "moe"}, marks=sweep),
        pytest.param("copies late", FUSED, marks=sweep),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_recompute_and_mixes(lag, model):
    assert on_ranks(1, under, lag, recomputed, model, device="cuda") == [[]]


@pytest.mark.parametrize(
    ("ranks", "layout", "model", "lag"),
    [
        pytest.param(2, {"tp": 2}, {"sequence_parallel": True}, "random", marks=sweep),
        pytest.param(2, {"pp": 2, "vpp": 2}, {}, "computation late", marks=sweep),
        (2, {}, {"ddp": {"use_distributed_optimizer": True, "overlap_grad_reduce": True}}, "copies late"),
        pytest.param(4, {"tp": 2, "pp": 2}, {"sequence_parallel": True}, "random", marks=sweep),
    ],
    ids=["TP2", "PP2 x VPP2", "DP2", "TP2 x PP2"],
)
def test_swap_on_several_ranks(ranks, layout, model, lag):
    model = {"kind": "swiglu_gqa_rope", "hidden_dropout": 0.1, "hidden": 32, **model}
    assert on_ranks(ranks, under, lag, compare, layout, model, ["everything"], device="cuda") == [[]] * ranks


@sweep
@pytest.mark.parametrize("lag", ["copies late", "computation late", "random"])
def test_survival(lag):
    shares = {"copies late": (0.5, 0.3), "computation late": (0.4,), "random": (0.45, 0.35)}[lag]
    # The allocator's memory is in pieces: they are in a step's room, and with little of it a step may be tried again.
    found = on_ranks(1, under, lag, under_limits, "dropout", shares, layers=6, hidden=16, device="cuda")[0]
    assert [line for line in found if "tried again" not in line] == []


@sweep
def test_an_adaptive_run():
    [(found, state, evicted, peak, limit, lines, report)] = on_ranks(
        1, under, "random", life, "dense", {}, 0.7, layers=4, hidden=16, device="cuda"
    )
    assert found == [] and state == "settled", lines
    assert peak <= limit
    assert report.bytes_out + report.recomputed_bytes > 0


@pytest.mark.parametrize("wait", [None, *mover.WAITS])
def test_each_wait_of_the_mover(wait):
    """`tests.asynchrony` finds every wait of this package missing, on the simulated device."""
    program = "abandoned" if wait == mover.RETIRE_AFTER_COPIES else "pipeline"
    # All late: what an event has told the host needs no wait.
    [found] = on_ranks(1, under, "everything late", run, program, wait, 30, SCARCE, device="cuda")
    assert bool(found) == (wait is not None)


def branches_beside(tells: bool, plans: list[str]) -> list[str]:
    expected, _ = side_streams.run(None, tells=tells)
    found = []
    for name in plans:
        gradients, _ = side_streams.run(PLANS[name], tells=tells)
        if not all(map(torch.equal, gradients, expected)):
            found.append(name)
    return found


FEW = ["swapped, released late", "layers recomputed", "branch recomputed", "recomputed from the host"]


@pytest.mark.parametrize("tells", but([True, False], True), ids=["told", "untold"])
@pytest.mark.parametrize(
    ("lag", "plans"),
    [("random", FEW), *(pytest.param(lag, list(PLANS), marks=sweep) for lag in LAGS)],
    ids=["random, few plans", *LAGS],
)
def test_a_branch_on_a_stream_of_its_own(lag, plans, tells):
    """`tests.asynchrony.test_several_streams` runs all plans on the simulated device."""
    assert on_ranks(1, under, lag, branches_beside, tells, plans, device="cuda") == [[]]


def steady(plan: dict | None, steps: int = 8) -> dict[str, int]:
    """What a step does that stops the host or asks the driver, summed over the last half of the steps."""
    import contextlib

    from tests.accelerator import stand_in
    from tests.models import build_gpt, build_optimizer, train_step
    from tests.swap_runs import swap

    with contextlib.nullcontext() if plan is None else swap(plan), parallel():
        chunks = build_gpt("swiglu_gqa_rope", hidden=32, layers=2)
        optimizer = build_optimizer(chunks)
        for number in range(steps):
            if number == steps // 2:
                stand_in.reset_counters()
            train_step(chunks, optimizer=optimizer, step=number, micro_batches=1)
        counters = stand_in.counters()
    return {name: counters.get(name, 0) for name in ("host synchronisation", "driver allocation", "pinned allocation")}


def steady_states(plans: dict[str, dict]) -> dict[str, dict[str, int]]:
    return {name: steady(plan) for name, plan in {"": None, **plans}.items()}


def test_a_steady_state_waits_for_nothing_and_allocates_nothing():
    both = again(["mlp", ".*norm"], {"swap": True, "op_swap": [op("self_attention", 2)]})
    plans = {"swap": EVERYTHING, "both": both}
    states = on_ranks(1, under, "copies late", steady_states, plans, device="cuda")[0]
    stock = states.pop("")
    assert stock["driver allocation"] == stock["pinned allocation"] == 0
    assert states == dict.fromkeys(states, stock)


def calls_for_copies() -> dict[str, float]:
    """How often an event is recorded (without those that time a wait), and the stream changed, for each copy, in steps
    that move everything."""
    from tests.models import build_gpt, build_optimizer, train_step
    from tests.swap_runs import swap

    calls = {"record": 0, "stream": 0}

    def record(event, stream=None, native=torch.cuda.Event.record):
        calls["record"] += not event.times
        native(event, stream)

    def stream(entered, native=torch.cuda.stream):
        calls["stream"] += 1
        return native(entered)

    with swap(EVERYTHING) as engine, parallel(), pytest.MonkeyPatch.context() as patch:
        chunks = build_gpt("swiglu_gqa_rope", hidden=32, layers=4)
        optimizer = build_optimizer(chunks)
        for number in range(5):
            train_step(chunks, optimizer=optimizer, step=number, micro_batches=1)
            if number == 2:
                before = engine.report()
                patch.setattr(torch.cuda.Event, "record", record)
                patch.setattr(torch.cuda, "stream", stream)
        after = engine.report()
    copies = after.copies_out + after.copies_in - before.copies_out - before.copies_in
    return {name: number / copies for name, number in calls.items()}


def test_how_often_the_host_speaks_to_the_device_for_a_copy():
    [found] = on_ranks(1, calls_for_copies, device="cuda")
    print(found)
    assert found["record"] <= 1.3 and found["stream"] <= 0.6


def states_of_generators() -> tuple[bool, bool, bool]:
    """Whether states are the same where nobody has drawn, others where somebody has, and lead to the same numbers."""
    from mindspeed_mem.activation.rerun import rng
    from mindspeed_mem.device import get_backend

    with test_host_calls.in_cpp():
        rng.follow(get_backend("cuda"))
        before, as_before = rng.capture(), rng.capture()
        drawn = torch.rand(4, device="cuda")
        after = rng.capture()
        rng.restore(before)
        return rng.same(before, as_before), rng.same(before, after), torch.equal(torch.rand(4, device="cuda"), drawn)


def test_who_draws_on_the_device_is_noticed():
    test_host_calls.build()
    assert on_ranks(1, states_of_generators, device="cuda") == [(True, False, True)]


class Recurrent(torch.nn.Module):
    """A layer of a recurrent module, what the stand-in has as one, and dropout elsewhere."""

    class LSTM(torch.nn.LSTM):
        def forward(self, x):
            return torch.tanh(x @ self.weight_hh_l0[:16])

    def __init__(self):
        super().__init__()
        self.cell, self.drop = Recurrent.LSTM(16, 16, 2, dropout=0.1), torch.nn.Dropout(0.2)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), self.drop)

    def forward(self, x):
        return x + self.mlp(self.cell(x))


def beside_recurrent(select: dict[str, Any]) -> tuple[bool, bool, set[tuple[int, str]], list[str]]:
    """Whether bits are as without recompute, whether cells are told to draw a new seed, what was recomputed, what was
    said."""
    import mindspeed_mem
    from tests.swap_runs import listening

    own, found = torch.ops.accelerator, []
    for plan in ({}, {"recompute_config": {"select_recompute": select}}):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[Recurrent() for _ in range(2)]).cuda()
        attached = mindspeed_mem.attach(model, plan) if plan else contextlib.nullcontext()
        with listening() as said, attached:
            torch.cuda.manual_seed(1)
            own.reset_rnn_state(0)
            for _ in range(2):
                model(torch.ones(4, 16, device="cuda")).sum().backward()
            found.append(
                [p.grad.cpu() for p in model.parameters() if p.grad is not None] + [torch.rand(2, device="cuda").cpu()]
            )
            reset = own.reset_rnn_state(0)
            if plan:
                report = attached.engine.report()
    again = {(one.layer, one.op) for one in report.recomputed_by_operator if one.runs}
    return all(map(torch.equal, *found)), reset, again, said


def test_recompute_leaves_the_dropout_of_recurrent_cells_alone():
    """torch's cells on cuDNN keep its state: they draw a new seed where a generator was set."""
    [(same, reset, again, _)] = on_ranks(1, beside_recurrent, {"mlp": True}, device="cuda")
    assert same and not reset and again == {(0, "mlp"), (1, "mlp")}


def test_recurrent_cells_with_dropout_do_not_run_again_on_a_device():
    [(same, _, again, said)] = on_ranks(1, beside_recurrent, {"cell": True, "mlp": True}, device="cuda")
    assert same and again == {(0, "mlp"), (1, "mlp")}
    [line] = [line for line in said if "cell" in line and "no effect" in line]
    assert "the dropout of its LSTM goes on from a state" in line


MOST = {
    "everything": ({"swap_config": EVERYTHING["swap_config"] | {"smallest_bytes": 0}}, 130),
    "norms": (again(select_recompute=[".*norm"]), 108),
}
"""A plan, and the most calls of a layer with what is in C++; some more than there are."""


def test_copies_call_into_python_as_seldom_as_on_a_cpu():
    assert test_host_calls.beyond(MOST, native=True, device="cuda") == {}
