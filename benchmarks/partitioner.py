"""Bytes kept against FLOPs computed again: our planner beside torch's partitioner and Megatron's settings.

    python benchmarks/partitioner.py --json benchmarks/results/partitioner_cpu.json

One block of a Llama-like model in bf16 (RMS norms, rotary embedding, fused attention, SwiGLU). torch's min-cut
partitioner gets it as one graph with an `activation_memory_budget` (torch._functorch.config; its "flops" estimator and
"dp" solver), and what its forward graph hands to its backward graph is counted, parameters and the input apart; what
the backward graph computes more than without a budget is counted by torch's `FlopCounterMode`. Our planner gets the
shape of a row of such blocks without a link, so that it keeps or recomputes whole operators. Only matrix products and
attention have FLOPs here; all else is taken to be free, as the partitioner does. Nothing is timed, and no device is
needed: both scale with the shape.

torch.distributed._tools' solver for one module (sac_ilp; where its pulp can be imported) gets the same block as its
`SACEstimator` sees it, with FLOPs for times, since its own are those of a CUDA device. It adds up operators: whatever
is not saved counts as run again, to the last one, and whatever is saved as bytes, whether backward reads it or not.
That is how its rows are counted here, without the block's output.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
import torch._functorch.config as config  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch._functorch.aot_autograd import aot_function, make_boxed_func  # noqa: E402
from torch._functorch.partitioners import min_cut_rematerialization_partition  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils import flop_counter  # noqa: E402

from mindspeed_mem.adaptive import Search  # noqa: E402
from mindspeed_mem.adaptive.problem import from_shape  # noqa: E402
from mindspeed_mem.adaptive.problem.shape import Degrees, Machine, Shape  # noqa: E402

HIDDEN, HEADS, FFN, LENGTH = 512, 4, 1376, 512
LAYERS = 32
"""Of which our planner is given a row: what it says of one is their average."""
BUDGETS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
MIB = 2**20
_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@flop_counter.register_flop_formula(_CPU)
def _attention(query, key, value, *args, out_shape=None, **kwargs) -> int:
    return flop_counter.sdpa_flop_count(query, key, value)


@flop_counter.register_flop_formula(_CPU_BACKWARD)
def _attention_backward(gradient, query, key, value, *args, out_shape=None, **kwargs) -> int:
    return flop_counter.sdpa_backward_flop_count(gradient, query, key, value)


class Block(nn.Module):
    """``x`` and what it returns: bf16 [1, LENGTH, HIDDEN]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 2 * FFN, bias=False), nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        def turned(one: torch.Tensor) -> torch.Tensor:
            first, second = one.chunk(2, -1)
            return one * cos + torch.cat((-second, first), -1) * sin

        split = self.qkv(self.norm1(x)).chunk(3, -1)
        query, key, value = (one.view(1, LENGTH, HEADS, -1).transpose(1, 2) for one in split)
        attended = F.scaled_dot_product_attention(turned(query), turned(key), value, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(x.shape))
        gate, up = self.fc1(self.norm2(x)).chunk(2, -1)
        return x + self.fc2(F.silu(gate) * up)


def partitioned(budget: float) -> tuple[int, int, int]:
    """Bytes from forward to backward, FLOPs of forward and of backward, under a budget (a share of what is kept
    without recompute)."""
    graphs: dict[str, torch.fx.GraphModule] = {}

    def kept(name: str):
        def compiler(graph, _):
            graphs[name] = graph
            return make_boxed_func(graph.forward)

        return compiler

    block = Block().to(torch.bfloat16)
    parameters = dict(block.named_parameters())
    table = torch.ones(LENGTH, HIDDEN // HEADS, dtype=torch.bfloat16)
    x = torch.ones(1, LENGTH, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with config.patch(activation_memory_budget=budget, activation_memory_budget_runtime_estimator="flops"):
        call = aot_function(
            lambda parameters, *given: torch.func.functional_call(block, parameters, given),
            kept("forward"),
            kept("backward"),
            partition_fn=min_cut_rematerialization_partition,
        )
        call(parameters, x, table, table).sum().backward()
    [output] = graphs["forward"].graph.find_nodes(op="output")
    saved = [node for node in output.args[0][1:] if isinstance(node, torch.fx.Node) and not _given(node)]
    values = [node.meta["val"] for node in saved if isinstance(node.meta["val"], torch.Tensor)]
    nbytes = sum(one.numel() * one.element_size() for one in values)
    return nbytes, _flops(graphs["forward"]), _flops(graphs["backward"])


def solved() -> list[tuple[int, float]] | None:
    """Bytes kept and FLOPs computed again, as a share of forward, of torch's solver for one module, by budget; None
    where it cannot be imported."""
    try:
        from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module
    except ImportError:
        return None
    from torch.distributed._tools.sac_estimator import SACEstimator

    def counted(func, args, kwargs) -> tuple:
        out = func(*args, **(kwargs or {}))
        formula = flop_counter.flop_registry.get(func.overloadpacket)
        return out, formula(*args, **(kwargs or {}), out_val=out) / 1e9 if formula is not None else 0.0

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_default_dtype, before)
        stack.enter_context(FakeTensorMode())
        block = Block()
        table = torch.ones(LENGTH, HIDDEN // HEADS, dtype=torch.bfloat16)
        x = torch.ones(1, LENGTH, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        estimator = SACEstimator()
        estimator._estimate_runtime = counted
        with estimator:
            block(x, table, table).sum().backward()
    [stats] = [one for name, one in estimator.sac_mod_stats.items() if name.endswith("Block")]
    # Without its output, which the block after it has, and which is the last that has a size.
    last = max(place for place, size in enumerate(stats.memory) if size)
    memory = [size if place != last else 0 for place, size in enumerate(stats.memory)]
    # What neither has bytes nor FLOPs would be in no row of its program, and have no value.
    stats = dataclasses.replace(stats, memory=memory, runtimes=[one + 1e-9 for one in stats.runtimes])
    found = []
    for budget in BUDGETS:
        chosen = get_optimal_checkpointing_policy_per_module(stats, budget)
        rows = list(zip(chosen, stats.memory, stats.runtimes, strict=True))
        again = sum(seconds for saved, _, seconds in rows if not saved)
        found.append((sum(size for saved, size, _ in rows if saved), again / sum(stats.runtimes)))
    return found


def _given(node: torch.fx.Node) -> bool:
    """Whether it is a parameter or the input, or a view of one."""
    while node.op != "placeholder" and node.target in (torch.ops.aten.t.default, torch.ops.aten.view.default):
        node = node.args[0]  # type: ignore[assignment]  # its first is a node
    return node.op == "placeholder"


def _flops(graph: torch.fx.GraphModule) -> int:
    with FakeTensorMode(allow_non_fake_inputs=True), flop_counter.FlopCounterMode(display=False) as counter:
        given = []
        for node in graph.graph.find_nodes(op="placeholder"):
            one = node.meta["val"]
            if isinstance(one, torch.Tensor):
                one = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype)
            given.append(one)
        graph(*given)
    return counter.get_total_flops()


def planned() -> tuple[list[tuple[int, float]], dict[str, tuple[int, float]]]:
    """Bytes kept, and what is computed again as a share of forward: of our plans from small to large, and of
    Megatron's settings."""
    shape = Shape(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        seq_length=LENGTH,
        micro_batch_size=1,
        ffn_hidden_size=FFN,
        num_query_groups=HEADS,
        kv_channels=HIDDEN // HEADS,
        vocab_size=1,
        swiglu=True,
        normalization="RMSNorm",
        rope=True,
        bias=False,
    )
    machine = Machine(memory_bytes=10**15, tflops=1, memory_gbps=10**9)  # nothing but FLOPs takes time
    problem = from_shape.problem(shape, Degrees(), machine)
    [kind] = problem.classes
    own = {group.name: group for group in kind.groups if not group.from_previous}  # the input is whoever's made it
    forward = sum(operator.forward_seconds for operator in kind.operators)
    search = Search(problem, swap=False)
    low, high = search.floor(), max(search.simulated(search.keep_all).peaks)
    found: dict[int, float] = {}
    for step in range(201):
        plan = search.best(low + (high - low) * step // 200).plan
        nbytes, again = 0, 0.0
        for text in plan.stages[0].parts[0]:
            letters = dict(zip((group.name for group in kind.groups), text, strict=True))
            nbytes += sum(group.bytes for name, group in own.items() if letters[name] == "K")
            again += sum(group.recompute_seconds or 0.0 for name, group in own.items() if letters[name] == "R")
        nbytes //= LAYERS
        found[nbytes] = min(found.get(nbytes, again / forward / LAYERS), again / forward / LAYERS)
    sizes = {name: (group.bytes, (group.recompute_seconds or 0.0) / forward) for name, group in own.items()}
    return sorted(found.items()), {
        "nothing": (sum(size for size, _ in sizes.values()), 0.0),
        "selective: core_attn": _without(sizes, "core_attention"),
        "selective: layernorm": _without(sizes, "norm"),
        "selective: core_attn layernorm": _without(sizes, "core_attention", "norm"),
        "selective: core_attn layernorm mlp": _without(sizes, "core_attention", "norm", "mlp."),
        "full": (0, 1.0),
    }


def _without(sizes: dict[str, tuple[int, float]], *parts: str) -> tuple[int, float]:
    again = [name for name in sizes if any(part in name for part in parts)]
    return sum(size for name, (size, _) in sizes.items() if name not in again), sum(sizes[name][1] for name in again)


def _within(plans: list[tuple[int, float]], nbytes: int) -> str:
    """Of our plans that keep no more bytes the one that computes least again."""
    fitting = [(share, size) for size, share in plans if size <= nbytes]
    if not fitting:
        return "- | -"
    share, size = min(fitting)
    return f"{size / MIB:.2f} | {100 * share:.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()
    plans, settings = planned()
    _, forward, without = partitioned(1.0)
    rows = []
    print("torch's budget | kept, MiB | again, of a forward | our plan of no more bytes, MiB | again")
    for budget in BUDGETS:
        nbytes, _, backward = partitioned(budget)
        again = (backward - without) / forward
        rows.append({"budget": budget, "bytes": nbytes, "again": again})
        print(f"{budget:.1f} | {nbytes / MIB:.2f} | {100 * again:.1f} % | {_within(plans, nbytes)}", flush=True)
    print("\nMegatron's setting | kept, MiB | again | our plan of no more bytes, MiB | again")
    for name, (size, share) in settings.items():
        print(f"{name} | {size / MIB:.2f} | {100 * share:.1f} % | {_within(plans, size)}")
    solver = solved()
    if solver is None:
        print("\ntorch.distributed._tools' solver needs pulp, which is not installed")
    else:
        print("\nits budget | torch's solver keeps, MiB | again | our plan of no more bytes, MiB | again")
        for budget, (size, share) in zip(BUDGETS, solver, strict=True):
            print(f"{budget:.1f} | {size / MIB:.2f} | {100 * share:.1f} % | {_within(plans, size)}")
    if given.json:
        of = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "shape": [HIDDEN, HEADS, FFN, LENGTH]}
        given.json.write_text(
            json.dumps(of | {"torchs": rows, "plans": plans, "megatrons": settings, "solver": solver}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
