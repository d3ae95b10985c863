"""Plans that `auto` finds, run on ranks: they train as one device does, as people would split, within memory."""

import argparse
import copy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mindspeed_mem import parallel
from tests.parallel_models import GPT, Block, full, gpt_batch
from tests.sweeping import but
from tests.worlds import on_ranks

# Computing is dear and nothing has to be begun: so small shapes are split as large ones are.
pytestmark = [pytest.mark.distributed, pytest.mark.needs_torch("2.13", "DTensor's rules")]
MACHINE = parallel.Machine(tflops=1e-3, memory_gbps=1, gbps={"dp": 1e-2, "tp": 1}, latency_us=0, launch_us=0)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


class Layers(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.layers = nn.ModuleList(Block(hidden, heads, 0.0) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def found(model, example, shape, memory=None, **more):
    mesh = parallel.mesh("cpu", **shape)
    batch = ("dp" if "dp" in shape else None, *[None] * (example.dim() - 1))
    given = {"": {"in_strategy": (batch,)}}
    return mesh, parallel.auto(model, example, mesh, memory, given=given, machine=MACHINE, **more)


def difference(model, plan, mesh, batches):
    """The largest of outputs and parameters after steps on one device and on the mesh."""
    many = parallel.semi_auto(copy.deepcopy(model), mesh, plan)
    errors = []
    for x in batches:
        outputs = []
        for one in (model, many):
            y = one(x)
            y.square().mean().backward()
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter -= 0.01 * parameter.grad
                    parameter.grad = None
            outputs.append(full(y))
        errors.append(float((outputs[0] - outputs[1]).abs().max()))
    pairs = zip(model.parameters(), many.parameters(), strict=True)
    return max(errors + [float((a - full(b)).abs().max()) for a, b in pairs])


def batches(*shape):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(3)]


def split(plan):
    return {path: dict(row.parameter_plan) for path, row in plan.rows.items() if row.parameter_plan}


def mlp(shape, memory):
    torch.manual_seed(1)
    model, steps = MLP().double(), batches(64, 16)
    mesh, plan = found(model, steps[0], shape)
    again = found(model, steps[0], shape)[1]
    assert again == plan, "the same problem, another plan"
    tight = found(model, steps[0], shape, plan.memory_gib * memory)[1]
    assert tight.memory_gib <= plan.memory_gib * memory and tight.seconds >= plan.seconds
    return [(split(one), difference(copy.deepcopy(model), one, mesh, steps)) for one in (plan, tight)]


@pytest.mark.parametrize("shape", [{"tp": 2}, {"dp": 2, "tp": 2}])
def test_an_mlp_is_split_by_columns_and_then_by_rows(shape):
    size = 4 if "dp" in shape else 2
    (plain, error), (tight, tight_error) = on_ranks(size, mlp, shape, 0.8 if size == 4 else 1.0)[0]
    assert plain == {"fc1": {"weight": ("tp", None), "bias": ("tp",)}, "fc2": {"weight": (None, "tp")}}
    assert error < 1e-12 and tight_error < 1e-12
    if size == 4:  # within less memory it splits more
        assert tight != plain


def blocks(shape):
    """Plans for large blocks, run on small ones."""
    mesh = parallel.mesh("cpu", **shape)
    with torch.device("meta"):
        large = Layers(4096, 32)
    large, x = large.to_empty(device="cpu"), torch.empty(64 if "dp" in shape else 8, 512, 4096)
    more = {"machine": parallel.Machine(gbps={"dp": 20, "tp": 200}), "given": {"": {"in_strategy": (batch(shape),)}}}
    plan = parallel.auto(large, x, mesh, **more)
    tight = parallel.auto(large, x, mesh, plan.memory_gib * 0.95, **more)
    again = [path for path, row in tight.rows.items() if row.recompute]
    torch.manual_seed(1)
    model, steps = Layers(32, 4).double(), batches(4, 16, 32)
    errors = [difference(copy.deepcopy(model), one, mesh, steps) for one in (plan, tight)]
    return split(plan), split(tight), again, plan.memory_gib, errors


def batch(shape):
    return ("dp" if "dp" in shape else None, None, None)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_repeated_blocks_are_split_as_megatron_does_and_split_or_run_again_within_less_memory(size):
    plan, tight, again, _, errors = on_ranks(size, blocks, {"tp": 2} if size == 2 else {"dp": 2, "tp": 2})[0]
    columns = {"weight": ("tp", None), "bias": ("tp",)}
    rows = {"weight": (None, "tp")}
    expected = {f"layers.*.{name}": columns for name in ("q", "k", "v", "fc1")}
    expected |= {f"layers.*.{name}": rows for name in ("out", "fc2")}
    for name in expected if size == 2 else ("layers.*.fc1", "layers.*.out", "layers.*.fc2"):
        assert plan[name] == expected[name]
    assert again or tight != plan, "nothing runs again or is split more"
    assert max(errors) < 1e-12


def impossible():
    torch.manual_seed(1)
    model, x = MLP(), torch.randn(64, 16)
    with pytest.raises(parallel.StrategyError, match="the least is") as error:
        found(model, x, {"tp": 2}, 1e-9)
    least = float(str(error.value).partition("the least is ")[2].split()[0])
    _, plan = found(model, x, {"tp": 2}, least)
    with pytest.raises(parallel.StrategyError):
        found(model, x, {"tp": 2}, least * 0.98)
    return least, plan.memory_gib


def test_too_little_memory_is_refused_with_the_least_that_does():
    least, used = on_ranks(2, impossible)[0]
    assert used <= least


def language_model(shape, folder):
    torch.manual_seed(1)
    model = GPT().double()
    mesh = parallel.mesh("cpu", **shape)
    batch = gpt_batch(0, torch.float64)
    plan = parallel.auto(model, batch, mesh, machine=MACHINE)
    if torch.distributed.get_rank() == 0:
        plan.save(f"{folder}/plan.yaml")
    torch.distributed.barrier()
    model.eval()
    many = parallel.semi_auto(copy.deepcopy(model), mesh, f"{folder}/plan.yaml")
    losses = [one(**batch) for one in (model, many)]
    for loss in losses:
        loss.backward()
    pairs = zip(model.parameters(), many.parameters(), strict=True)
    errors = [float((a.grad - full(b.grad)).abs().max()) for a, b in pairs]
    told = plan.explain("blocks.0.fc1:linear.0", ((None, None, None), (None, None), (None,)))
    missed = sum(parallel.report(many).sent().values()) - sum(plan.bytes_sent.values())
    return float((losses[0] - losses[1]).abs()), max(errors), missed, told


@pytest.mark.parametrize(
    "shape", but([{"tp": 2}, {"dp": 2, "tp": 2}], {"dp": 2, "tp": 2}), ids=["one axis", "two axes"]
)
def test_a_language_model_trains_by_a_plan_that_was_saved_and_read(tmp_path, shape):
    loss, error, missed, told = on_ranks(2 * len(shape), language_model, shape, str(tmp_path))[0]
    assert loss < 1e-12 and error < 1e-12
    assert 0 <= missed <= 3 * 8  # single numbers inside the loss, which are not planned
    assert told.startswith("blocks.*.fc1:linear.0") and "instead of" in told


def small_benchmark():
    """`benchmarks/parallel.py`, for small shapes."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    try:
        import parallel as script
    finally:
        del sys.path[0]
    script.SHAPE.update(hidden=32, length=16)
    return script


def benchmark(machine):
    """Its plans: bytes as predicted and as sent."""
    script = small_benchmark()
    torch.manual_seed(1)
    x = torch.randn(8, 16, 32)
    *_, rows = sys.modules["parallel_auto"].planned(script.blocks, x, machine)
    return [(name, row["predicted_bytes"], row["bytes"]) for name, row in rows.items()]


LATE = parallel.Machine(tflops=0.1, gbps=0.5, latency_us=500, launch_us=200)


CASES = {"links": (2, MACHINE), "host": (2, LATE), "4 ranks": (4, MACHINE)}


@pytest.mark.parametrize("case", but(CASES, *CASES))
def test_predicted_bytes_are_those_that_are_sent(case):
    found = on_ranks(CASES[case][0], benchmark, CASES[case][1])[0]
    assert len(found) == 12 and sum(sent > 0 for *_, sent in found) >= 10
    assert [one for one in found if one[1] != one[2]] == []


def beside_by_hand():
    script = small_benchmark()
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(1)
    found = script.beside_by_hand(rank, ranks, torch.randn(8, 16, 32), argparse.Namespace(rounds=1))
    return [row["loss"] for row in found["variants"].values()]


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [2, 4])  # as --ranks allows
def test_what_the_benchmark_compares_is_the_same(ranks):
    for losses in on_ranks(ranks, beside_by_hand):
        assert len(losses) == 4 and losses == pytest.approx([losses[0]] * 4, rel=1e-5)
