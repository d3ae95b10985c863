"""What recompute holds and computes: nothing is left, peaks and freed bytes are closed forms, it stops early."""

from __future__ import annotations

import pytest
import torch

from tests.memory.test_life_cycle import NOTHING
from tests.memory.test_peak import LAYERS, peaks
from tests.numerics.test_recompute import ALL_MOVE, EACH, POLICIES
from tests.swap_runs import again
from tests.sweeping import apart
from tests.worlds import on_ranks, parallel

pytestmark = pytest.mark.distributed

ACTIVATIONS = again([r"mlp\.activation_func"])


def steps_and_evaluation(plan: dict) -> tuple[dict, list[str]]:
    from mindspeed_mem.activation.rerun import rng
    from tests.models import build_gpt, train_step
    from tests.swap_runs import difference, left_over, one_forward, swap

    def run(engine=None) -> list:
        results = []
        with parallel():
            chunks = build_gpt("dropout")
            for step in range(3):
                results.append(train_step(chunks, step=step, micro_batches=2))
                with torch.no_grad():
                    train_step(chunks, step=step, micro_batches=2, forward_only=True)
                if engine:  # a forward that nobody takes back
                    with rng.as_of(rng.capture()):
                        one_forward(engine, chunks)
                    assert left_over(engine) == NOTHING
        return results

    without = run()
    with swap(plan) as engine:
        results = run(engine)
        left = left_over(engine)
    return left, [d for one, other in zip(results, without, strict=True) for d in difference(one, other)]


@pytest.mark.parametrize(
    "plan", apart(["whole layers", "mlp", "defaults", "each"], python=["mlp", "defaults"], native=["whole layers"])
)
def test_evaluation_and_abandoned_forwards_leave_nothing(plan):
    assert on_ranks(1, steps_and_evaluation, POLICIES[plan]) == [(NOTHING, [])]


def broken(plan: dict, where: str, call: int) -> tuple[dict, list[str], list[str]]:
    """A step in which what ``where`` names raises in its ``call``-th run in layer 2, then a good one."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    from mindspeed_mem.activation.rerun import module_rerun
    from tests.models import build_gpt, train_step
    from tests.swap_runs import difference, left_over, swap

    def run(engine=None) -> tuple:
        with parallel():
            chunks = build_gpt("dense")
            mlp = chunks[0].module.decoder.layers[2].mlp
            calls = 0

            def fail(*args):
                nonlocal calls
                calls += 1
                if calls == call:
                    raise ZeroDivisionError(where)

            if where == "activation":  # inline code
                function = mlp.activation_func
                mlp.activation_func = lambda x: (fail(), function(x))[1]
            else:
                handle = getattr(mlp, where).register_forward_pre_hook(fail)
            state = torch.get_rng_state()
            try:
                train_step(chunks)
            except ZeroDivisionError as error:
                error.__traceback__ = None
            else:
                raise AssertionError("the step did not fail")
            assert torch.equal(torch.get_rng_state(), state)
            if where == "activation":
                mlp.activation_func = function
            else:
                handle.remove()
            still = []
            if _get_current_dispatch_mode() is not None:
                still.append("a dispatch mode")
            if module_rerun.running():
                still.append("a second run")
            if (
                torch._C._autograd._saved_tensors_hooks_is_enabled()
                and torch._C._autograd._top_saved_tensors_default_hooks(False)
            ):
                still.append("a hook")
            left = left_over(engine) if engine else {}
            return left, still, train_step(chunks, step=1)

    _, _, without = run()
    with swap(plan) as engine:
        left, still, result = run(engine)
        assert left_over(engine) == NOTHING
        return left, still, difference(result, without)


ON_PYTHON = [
    ("whole layers", "linear_fc2", 1),
    ("mlp", "activation", 1),
    ("defaults", "activation", 2),
    ("mlp", "linear_fc1", 3),
]
ON_NATIVE = [
    ("mlp", "linear_fc2", 1),
    ("defaults", "activation", 1),
    ("whole layers", "linear_fc1", 3),
    ("each", "linear_fc1", 3),
]


@pytest.mark.parametrize(
    ("plan", "where", "call"),
    apart(
        [*ON_PYTHON, *ON_NATIVE, ("mlp", "activation", 3)],
        python=ON_PYTHON,
        native=ON_NATIVE,
    ),
)
@pytest.mark.needs_torch("2.7", "nobody tells whose saved-tensor hooks are in force")
def test_an_exception_half_way_leaves_nothing_and_the_next_step_is_right(plan, where, call):
    """The first run of the first micro-batch, or one in backward: inline code's second, a module's third, as the second
    only shows whether it repeats itself (or the next micro-batch's, where none runs again)."""
    assert on_ranks(1, broken, POLICIES[plan], where, call) == [(NOTHING, [], [])]


def end_of_forward(kind: str, plan: dict) -> tuple[int, int]:
    """Device bytes that a plan frees at the end of forward, and those of the storages that it says."""
    from mindspeed_mem.activation.observe.meter import ActivationMeter
    from mindspeed_mem.activation.storage.ledger import LEDGER
    from tests.models import build_gpt
    from tests.swap_runs import SDPA, one_forward, patched, swap

    def held(engine) -> int:
        chunks = build_gpt(kind)
        with ActivationMeter(engine.backend):
            loss = one_forward(engine, chunks)
        assert loss.requires_grad
        return LEDGER.held.now

    with patched(SDPA), parallel():
        with swap({}, watch_only=True) as engine:
            without, rows = held(engine), engine.observation.census.storages()
        with swap(plan) as engine:
            now, recomputes = held(engine), engine.in_force.plan.recompute
            dropped = [r for r in rows if r["layer"] >= 0 and recomputes(r["layer"], r["op"])]
            outputs = [r for r in dropped if r["op"] == "mlp_bda" and recomputes(r["layer"], "")]
            return without - now, sum(r["bytes"] for r in dropped) - sum(r["bytes"] for r in outputs)


FIRST_LINEAR = 32 * 256 * 4
"""Bytes of what an MLP's first linear returns, for one sequence."""


@pytest.mark.parametrize("kind", ["dense", "swiglu_gqa_rope"])
@pytest.mark.parametrize(
    "plan",
    apart(
        ["whole layers", "some layers", "mlp", "defaults", "norms", "defaults and norms"],
        python=["some layers", "defaults"],
        native=["mlp", "norms"],
    ),
)
def test_held_at_the_end_of_forward_falls_by_exactly_what_the_plan_says(kind, plan):
    """All that recomputed operators produced, except the outputs of whole layers and inputs that only they need: that
    is so where the activation function adds the first linear's bias.
    """
    [(freed, said)] = on_ranks(1, end_of_forward, kind, POLICIES[plan])
    inputs = 4 * FIRST_LINEAR if kind == "dense" and "defaults" in plan else 0
    assert freed == said - inputs > 0


def of_layer(rows: list[dict], layer: int) -> int:
    return sum(row["bytes"] for row in rows if row["layer"] == layer)


@pytest.mark.parametrize("kind", apart(["dense", "swiglu_gqa_rope"], python=["dense"], native=["swiglu_gqa_rope"]))
def test_peaks_are_closed_forms(kind):
    [(without, rows)] = on_ranks(1, peaks, kind, {}, None)
    assert without == sum(of_layer(rows, layer) for layer in range(LAYERS))
    hidden = next(row["bytes"] for row in rows if row["op"] == "mlp_bda")  # what goes from layer to layer
    inside = of_layer(rows, 3) - hidden

    [(peak, _)] = on_ranks(1, peaks, kind, {}, POLICIES["whole layers"])
    assert peak == (LAYERS - 1) * hidden + inside, "the layers' inputs, and the inside of the last one"

    two = {"swap": True, "layer_swap": {"backward_prefetch": 1, "layers": [0, 1]}}
    [(peak, _)] = on_ranks(1, peaks, kind, {}, again(None, two, recompute=[2, 4, 5, 6, 7]))
    assert peak == 2 * hidden + of_layer(rows, 3) + 3 * hidden + inside, "input of 2 and 3, 3 itself, inputs above"

    [(peak, _)] = on_ranks(1, peaks, kind, {}, ACTIVATIONS)
    one = sum(row["bytes"] for row in rows if row["op"] == "mlp.activation_func" and row["layer"] == 3)
    inputs = LAYERS * FIRST_LINEAR if kind == "dense" else 0
    assert peak == without - LAYERS * one + inputs + one - hidden, "the last layer's alone is there, its output gone"


def operations(plan: dict | None, **model: object) -> int:
    """Floating point operations of one step, after that in which operators show whether they repeat themselves."""
    import contextlib

    from torch.utils.flop_counter import FlopCounterMode

    from tests.models import build_gpt, train_step
    from tests.swap_runs import swap

    with parallel(), swap(plan) if plan else contextlib.nullcontext():
        chunks = build_gpt("dense", hidden=256, **model)
        train_step(chunks, micro_batches=1, micro_batch_size=1)
        with FlopCounterMode(display=False) as counter:
            train_step(chunks, micro_batches=1, micro_batch_size=1)
        return counter.get_total_flops()


def test_the_second_run_stops_as_soon_as_backward_has_what_it_needs():
    def measure(plan: dict | None = None, **model: object) -> int:
        return on_ranks(1, operations, plan, **model)[0] - head

    head = 3 * 2 * 32 * 256 * 256  # positions, hidden size, vocabulary
    without = measure()
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    assert measure(**full) / without == pytest.approx(4 / 3, abs=0.001)
    assert measure(POLICIES["whole layers"]) / without <= 1.23
    # per position and layer, in h^2: 24 + 128/h forward; the second run of an MLP leaves its second linear out: 8
    assert measure(POLICIES["mlp"]) / without == pytest.approx(1 + 8 / (3 * 24.5), abs=0.001)
    assert measure(again([r"mlp\.linear_fc2", ".*_bda"])) == without
    assert measure(POLICIES["defaults and norms"]) == without, "no matrix product"


def test_each_operator_alone_costs_no_more_than_the_whole_layer():
    def measure(plan: dict | None = None) -> int:
        return on_ranks(1, operations, plan)[0]

    assert measure(POLICIES["whole layers"]) <= measure(again(EACH)) <= 4 * measure() // 3


def held_with_inputs(swap_inputs: bool) -> tuple[int, int, list[dict]]:
    """Held and moved bytes of a forward, and what moved: norms are swapped, what uses one of them is recomputed."""
    from mindspeed_mem.activation.storage.ledger import LEDGER
    from tests.models import build_gpt
    from tests.swap_runs import one_forward, op, swap

    moved = {"swap": True, "op_swap": op("pre_mlp_layernorm", 1, [1, 2]), "swap_recompute_inputs": swap_inputs}
    with parallel(), swap(again({"mlp": [1]}, moved)) as engine:
        chunks = build_gpt("dense")
        loss = one_forward(engine, chunks)
        assert loss.requires_grad
        return LEDGER.held.now, engine.mover.bytes_out, engine.report().moved_by_operator


def test_inputs_of_recomputed_operators_move_if_told_to():
    [(held, moved, _)] = on_ranks(1, held_with_inputs, False)
    [(held_less, moved_more, rows)] = on_ranks(1, held_with_inputs, True)
    hidden = 32 * 64 * 4
    assert moved_more - moved == hidden == held - held_less
    assert {row.layer for row in rows} == {1, 2}


def all_inputs_swapped() -> tuple[int, int]:
    """Bytes of layers on the device at the end of forward, and host bytes."""
    from tests.models import build_gpt
    from tests.swap_runs import one_forward, owned_now, swap

    plan = again(None, {**ALL_MOVE, "swap_recompute_inputs": True}, recompute=True)
    with parallel(), swap(plan) as engine:
        loss = one_forward(engine, build_gpt("dense"))
        assert loss.requires_grad
        return owned_now(), engine.mover.slabs.bytes_in_use


def test_with_inputs_swapped_recomputed_layers_hold_nothing():
    """The last layer's output is no recomputed layer's input: a layer's output stays unless its own entry moves it."""
    hidden = 32 * 64 * 4
    [(on_device, on_host)] = on_ranks(1, all_inputs_swapped)
    assert on_device == hidden
    assert on_host >= 3 * hidden
