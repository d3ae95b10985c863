"""Chunk ZeRO, optimizers in several places, Gemini and optimizers in parallel on the accelerator: the same bits under
lags, no wait that Megatron has not, and no allocation in a steady state.

Where a wait that is left out is found: those of `shard_memory.WAITS` and `swapped.WAITS` on the simulated device
(tests/asynchrony); all others here, in `LEFT_OUT`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch

from mindspeed_mem.device import get_backend
from mindspeed_mem.device.accelerator import AcceleratorBackend
from mindspeed_mem.zero.core import arrival
from mindspeed_mem.zero.core.chunk import Chunk, Piece
from mindspeed_mem.zero.core.gradients import GradientShards
from mindspeed_mem.zero.core.shard_memory import HostStore
from mindspeed_mem.zero.optimizer.placed import Place
from mindspeed_mem.zero.optimizer.swapped import SwappedStep
from tests.accelerator.lags import under
from tests.chunk_runs import OVERLAP, Case, differences, trained
from tests.distributed.test_optimizer_parallel import CASES, against_plain
from tests.distributed.test_optimizer_parallel_megatron import BF16, compared
from tests.models import DEVICE
from tests.numerics.test_chunk_placement import OF_TYPE, resting
from tests.placed_runs import OF_HOST, Run, same
from tests.worlds import on_ranks

pytestmark = pytest.mark.distributed

SHARED_BESIDE = {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_overlap": True}

SMALL = {"layers": 1, "hidden": 32}

# ---- waits left out


class Alone:
    """A group of one rank."""

    size, rank = (lambda self: 1), (lambda self: 0)


def on_two_streams() -> dict[str | None, str]:
    """A chunk that one stream has gathered and another reads; then its memory is used again. What the device says of
    each wait that is left out, and of none."""
    original, found = AcceleratorBackend.wait, {}
    for reason in (None, arrival.READ_AFTER_GATHER, arrival.FREE_AFTER_READ):

        def wait(self, stream, event, why, reason=reason):
            if why != reason:
                original(self, stream, event, why)

        with mock.patch.object(AcceleratorBackend, "wait", wait):
            try:
                found[reason] = _read_beside()
            except RuntimeError as error:
                found[reason] = str(error)
    return found


def _read_beside() -> str:
    backend, elements = get_backend(DEVICE), 4096
    main, side = backend.current_stream(), backend.new_stream("side")
    for home, other in ((main, side), (side, main)):
        backend.synchronize()
        with backend.on_stream(home):
            whole = torch.arange(float(elements), device=DEVICE)
            param = torch.nn.Parameter(torch.empty(0, device=DEVICE))
            param.data = whole.view(elements)
            chunk = Chunk(0, [(param, Piece(0, elements))], whole, None, Alone())
            chunk.keep_shard()
            chunk.gather()
            chunk.wait()
        with backend.on_stream(other):
            chunk.wait()
            total = param.detach().sum()
        with backend.on_stream(home):
            chunk.release()
            torch.zeros(elements, device=DEVICE)
        backend.synchronize()
        if total.item() != elements * (elements - 1) / 2:
            return "other numbers"
    return ""


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_streams_that_read_gathered_parameters_wait_for_each_other(kind):
    [found] = on_ranks(1, on_two_streams, device=kind)
    assert found.pop(None) == ""
    assert all("race" in said for said in found.values()), found


class Unwaited:
    """Work that goes on when somebody has waited for it."""

    def __init__(self, work):
        self.work = work

    def wait(self):
        pass


def _reductions_unwaited():
    original = GradientShards.__init__

    def init(self, chunks, reduce, *more):
        original(self, chunks, lambda chunk: Unwaited(reduce(chunk)), *more)

    return mock.patch.object(GradientShards, "__init__", init)


STEP = Case(steps=2, model=SMALL, chunk=4096, micro_batches=1)
ON_HOST = replace(STEP, settings=resting("host", step_on_host=True))
LEFT_OUT: dict[str, tuple[Case, Callable]] = {
    "use after gather": (STEP, lambda: mock.patch.object(arrival.Arrival, "wait")),
    "use after reduction": (replace(STEP, ddp=OVERLAP), _reductions_unwaited),
    "the host's step after gradients down": (ON_HOST, lambda: mock.patch.object(HostStore, "settle")),
    "the host's use after swap out": (
        replace(STEP, settings=resting("host")),
        lambda: mock.patch.object(SwappedStep, "drain"),
    ),
}


def left_out() -> dict[str, str]:
    """How each mistake in a first step is found: by the device's complaint, or by other numbers; "": it is not."""
    from tests.accelerator import stand_in

    found = {}
    for name, (case, mistake) in LEFT_OUT.items():
        expected = trained(3, case).numbers()
        making = mistake()

        def until_second(step, models, optimizer, making=making):
            if step:
                torch.accelerator.synchronize()
                making.stop()

        making.start()
        try:
            with stand_in.lagging(side=10_000):
                same = trained(3, replace(case, during=until_second)).numbers() == expected
            found[name] = "" if same else "other numbers"
        except RuntimeError as error:
            found[name] = str(error)
            making.stop()
        torch.accelerator.synchronize()
    return found


def test_each_wait_of_the_host_and_for_collectives_is_missed():
    for found in on_ranks(2, left_out, device="cuda"):
        assert "reads memory that all_gather_into_tensor" in found["use after gather"]
        assert "memory that reduce_scatter_tensor" in found["use after reduction"]
        assert all(found.values()), found


# ---- the same bits

HALF = {"settings": resting("static:0.5")}
CHUNKS = {
    "copies late": {
        "on the host": Case(settings=resting("host"), steps=2, model={"layers": 2}),
        "half of each": Case(ddp=OVERLAP, steps=2, micro_batches=1, **OF_TYPE["fp16"], **HALF),
    },
    "computation late": {"fp32": Case("dropout", ddp=OVERLAP, steps=2, budget=200_000, **OF_TYPE["fp32"])},
    "random": {
        "shared experts beside": Case(
            "moe", model={**SHARED_BESIDE, **SMALL}, chunk=2048, micro_batches=1, stages=(3,), **HALF
        )
    },
}


@pytest.mark.parametrize("lag", ["copies late", "random", pytest.param("computation late", marks=pytest.mark.sweep)])
def test_chunks(lag):
    assert on_ranks(2, under, lag, differences, CHUNKS[lag], device="cuda") == [[], []]


@pytest.mark.sweep
def test_chunks_in_a_layout():
    model = {"sequence_parallel": True}
    case = Case("dropout", layout={"tp": 2, "pp": 2}, model=model, stages=(3,), steps=2, settings=resting("host"))
    assert on_ranks(4, under, "random", differences, {"TP2 x PP2": case}, device="cuda") == [[]] * 4


def gemini(places: tuple[str, ...], dtype: torch.dtype) -> list[str]:
    """Placements in which losses or parameters are not plain torch's."""
    from tests.gemini.test_training import settings
    from tests.gemini_runs import batches, chunked, farthest, masters, reference, train

    data, found = batches(2, micro=2), []
    losses, wanted = reference(data, dtype, scale=256.0)
    for place in places:
        model, optimizer = chunked(gather_budget_mb=0.06, **settings(place, dtype, initial_scale=256.0))
        if train(model, optimizer, data) != losses or farthest(masters(model), wanted):
            found.append(place)
    return found


@pytest.mark.sweep
def test_gemini():
    places = ("device", "host", "swapped", "static")
    assert on_ranks(2, under, "random", gemini, places, torch.bfloat16, device="cuda") == [[], []]
    # There the optimizer's own kernel is not that of the host.
    assert on_ranks(1, under, "copies late", gemini, ("device", "swapped"), torch.float32, device="npu") == [[]]


def placed(kinds: tuple[str, ...]) -> list[tuple[str, list[Place]]]:
    """Optimizers, and places of parameters, with which these or their states are not those of the optimizer alone."""
    backend, found = get_backend(DEVICE), []
    for kind in kinds:
        for resting_place in (Place.SWAPPED, Place.HOST)[: 1 + (kind in OF_HOST)]:
            sizes, places = [40_000, 3000, 5120, 700], [Place.SWAPPED, Place.DEVICE, resting_place, Place.SWAPPED]
            run, stock = (Run(kind, sizes, one, backend).steps(3, {1}).steps(1) for one in (places, None))
            if not same(run.saved(), stock.saved()):
                found.append((kind, places))
    return found


def test_placed_optimizers():
    kinds = ("AdamW fused", "AdamW", "Adafactor", "SGD momentum")
    assert on_ranks(1, under, "copies late", placed, kinds, device="cuda") == [[]]
    assert on_ranks(1, under, "random", placed, kinds[1:3], device="npu") == [[]]


def test_optimizers_in_parallel():
    # Its foreach reckons with steps where they lie, and torch leaves those of a state dict on the host there.
    asgd = ("ASGD", {"foreach": False})
    cases = [(asgd if kind[0] == "ASGD" else kind, *more) for kind, *more in CASES[1::9]]
    for found in on_ranks(2, under, "computation late", against_plain, cases, device="cuda"):
        assert {case: wrong for case, (wrong, *_) in found.items() if wrong} == {}


@pytest.mark.sweep
def test_megatrons_optimizers_in_parallel():
    for plain, *others in on_ranks(2, under, "random", compared, {}, BF16, {}, device="cuda"):
        for history, wrong, _ in others:
            assert history == plain[0] and wrong == []


# ---- a steady state


def steady(stage: int, case: Case, steps: int = 14) -> dict[str, int]:
    """Of the steps from the 8th to the last but one: what stops the host, or asks the driver, by its reason."""
    from tests.accelerator import stand_in

    noted = []
    trained(stage, replace(case, steps=steps, during=lambda *_: noted.append(stand_in.counters())))
    before, after = noted[8], noted[-2]
    grown = {name: count - before.get(name, 0) for name, count in after.items()}
    kinds = ("host synchronisation: ", "driver allocation: ", "pinned allocation: ")
    return {name: count / (steps - 10) for name, count in grown.items() if count and name.startswith(kinds)}


def steady_states(cases: dict[str, tuple[int, Case]]) -> dict[str, dict[str, int]]:
    return {name: steady(*case) for name, case in cases.items()}


def test_a_steady_state_allocates_nothing_and_waits_only_where_the_host_takes_part():
    small = Case(model=SMALL, chunk=4096, micro_batches=1, ddp=OVERLAP)
    cases = {
        "": (0, small),
        "device": (3, replace(small, budget=20_000)),
        "half on the host": (3, replace(small, **HALF)),
    }
    found = on_ranks(2, steady_states, cases, device="cuda")[0]
    stock = found.pop("")
    assert found.pop("device") == stock
    counts = found.pop("half on the host")
    more = {reason: count - stock.get(reason, 0) for reason, count in counts.items()}
    # Gradients that the host reads; a step whose last copies the host waits for.
    assert {reason: count for reason, count in more.items() if count} == {"host synchronisation: event.synchronize": 4}
