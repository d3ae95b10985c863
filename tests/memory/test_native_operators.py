"""Operators of which the plan selects nothing run without the hook once that is known, and nobody can tell."""

from __future__ import annotations

import contextlib
import copy
import threading

import pytest
import torch
import torch._dynamo.compiled_autograd

import mindspeed_mem
from mindspeed_mem.activation.storage.ledger import LEDGER
from tests.attachment.plain_models import Net, accumulated, loss_of, results, same
from tests.swap_runs import again, entry, op
from tests.sweeping import apart
from tests.worlds import on_ranks, parallel

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.needs_torch("2.7", "nobody tells whose saved-tensor hooks are in force"),
]

STEPS, CHANGE = 8, 5
"""Forwards, and from which on something is different."""
PLANS = {
    "swap core attention": entry(op_swap=[op(r"self_attention\.core_attention", 3)]),
    "swap an output": entry(op_swap=[op(r"self_attention\.linear_proj", 2)]),
    "recompute inline code": again({".*norm": True, r"mlp\.activation_func": True}),
    "recompute whole layers": again(recompute=True),
    "both": again({"mlp": True}, {"swap": True, "op_swap": [op(r"self_attention\.linear_qkv", 4)]}),
}
WAYS = (
    "nothing",
    "another operator",
    "an operator less",
    "shapes",
    "saved by the layer",
    "hooks of others",
    "an exception",
    "an exception that is caught",
    "an evaluation",
    "evaluated with gradients",
    "a thread",
)


class _Stop(Exception):
    pass


def packs(engine) -> list[int]:
    """One number that counts calls of the engine's hook from now on."""
    packed, (pack, unpack) = [0], engine.saved.hooks

    def counting(tensor):
        packed[0] += 1
        return pack(tensor)

    engine.saved.hooks = counting, unpack
    return packed


def change(way: str, layers) -> contextlib.AbstractContextManager:
    """What is different from `CHANGE` on."""
    stack = contextlib.ExitStack()
    layer = layers[1]
    if way == "another operator":
        inside = []

        def twice(module, args, output):
            if inside:
                return output
            inside.append(1)
            more = module(*args)[0]
            inside.clear()
            return output[0] + 0.5 * more, *output[1:]

        stack.callback(layer.mlp.register_forward_hook(twice).remove)
    elif way == "an operator less":
        stack.callback(setattr, layer.pre_mlp_layernorm, "forward", layer.pre_mlp_layernorm.forward)
        layer.pre_mlp_layernorm.forward = lambda x: x * 0.5
        stack.callback(layer.pre_mlp_layernorm.__dict__.pop, "forward")
    elif way == "saved by the layer":
        saves = layer.self_attention.register_forward_hook(lambda *call: (call[2][0] * call[2][0], *call[2][1:]))
        stack.callback(saves.remove)
    elif way == "an exception that is caught":
        forward, fails = layer.mlp.forward, []

        def trying(*args, **kwargs):
            fails.append(layer.mlp.linear_fc2.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(_Stop)))
            with contextlib.suppress(_Stop):
                forward(*args, **kwargs)
            fails.pop().remove()
            return forward(*args, **kwargs)

        layer.mlp.forward = trying
        stack.callback(layer.mlp.__dict__.pop, "forward")
    elif way == "hooks of others":
        forward = layer.mlp.forward

        def saving(*args, **kwargs):
            with torch.autograd.graph.save_on_cpu():
                return forward(*args, **kwargs)

        layer.mlp.forward = saving
        stack.callback(layer.mlp.__dict__.pop, "forward")
    return stack


def run(kind: str, plan: dict, way: str) -> tuple[list, dict]:
    """Gradients of each step, and per step: calls of the hook, the ledger's peaks, bytes copied out."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from mindspeed_mem.activation.storage.ledger import LEDGER
    from tests.models import build_gpt, forget_routing, global_parameters
    from tests.swap_runs import left_over, swap

    def forward(engine, chunks, length):
        text = torch.randint(256, (1, length + 1))
        engine.passes.begin_forward(0, 0)
        loss = chunks[0](
            text[:, :-1].contiguous(), torch.arange(length).expand(1, -1), None, labels=text[:, 1:].contiguous()
        )
        engine.passes.end_forward(loss)
        return loss

    gradients, seen = [], {"packed": [], "held": [], "without": [], "out": []}
    with parallel(), swap(plan) as engine:
        packed, chunks = packs(engine), build_gpt(kind)
        layers = chunks[0].module.decoder.layers
        for step in range(STEPS):
            changed = step >= CHANGE
            torch.manual_seed(step)
            chunks[0].zero_grad_buffer()
            LEDGER.reset_peak()
            before, held = engine.mover.bytes_out, LEDGER.held.now
            packed[0] = 0
            with change(way, layers) if changed else contextlib.nullcontext():
                engine.passes.begin_schedule(("train",))
                if way == "an exception" and step == CHANGE:
                    fails = layers[2].mlp.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(_Stop))
                    with contextlib.suppress(_Stop):
                        forward(engine, chunks, 32)
                    fails.remove()
                    engine.passes.end_schedule(False)
                    engine.passes.begin_schedule(("train",))
                if way == "evaluated with gradients" and changed:
                    chunks[0].eval()
                loss = forward(engine, chunks, 24 if way == "shapes" and step % 2 and changed else 32)
                chunks[0].train()
                if way == "an evaluation" and changed:
                    with torch.no_grad():
                        chunks[0](torch.arange(32).expand(1, -1), torch.arange(32).expand(1, -1), None)
                engine.passes.begin_backward(loss)
                if way == "a thread":
                    thread = threading.Thread(target=loss.sum().backward)
                    thread.start()
                    thread.join()
                else:
                    loss.sum().backward()
                engine.passes.end_backward()
                engine.passes.end_schedule(True)
            del loss
            gradients.append({name: one.main_grad.clone() for name, one in global_parameters(chunks)})
            seen["packed"].append(packed[0])
            seen["held"].append(LEDGER.held.peak - held)
            seen["without"].append(LEDGER.without.peak - held)
            seen["out"].append(engine.mover.bytes_out - before)
        report = engine.report()
        forget_routing(chunks)
        seen["left"] = left_over(engine)
        seen["pinned"] = [row for row in report.pinned if "natively" in row.by]
        seen["recomputed"] = report.recomputed_bytes
        MoEAuxLossAutoScaler.main_loss_backward_scale = None  # of another shape in a schedule
    return gradients, seen


def in_flight(plan: dict) -> list[list[int]]:
    """What the ledger counts after each pass of steps of which several micro-batches are in flight at a time."""
    from mindspeed_mem.activation.storage.ledger import LEDGER
    from tests.models import build_gpt
    from tests.swap_runs import swap

    text = torch.arange(33).expand(1, -1)
    found = []
    with parallel(), swap(plan, watch_only=not plan) as engine:
        chunks = build_gpt("swiglu_gqa_rope")
        for _ in range(5):
            held, losses = [], []
            engine.passes.begin_schedule(("train",))
            for forward, micro_batch in ((1, 0), (1, 1), (0, 0), (1, 2), (0, 1), (0, 2)):
                if forward:
                    engine.passes.begin_forward(micro_batch, 0)
                    losses.append(chunks[0](text[:, :-1], text[:, :-1], None, labels=text[:, 1:]))
                    engine.passes.end_forward(losses[-1])
                else:
                    engine.passes.begin_backward(losses[micro_batch])
                    losses[micro_batch].sum().backward()
                    engine.passes.end_backward()
                held.append(LEDGER.held.now)
            engine.passes.end_schedule(True)
            found.append(held)
    return found


@pytest.mark.parametrize("layers", [True, [0], None])
def test_what_runs_natively_is_counted_until_its_backward(layers):
    plan = entry(op_swap=[op(r"self_attention\.core_attention", 3, layers=layers)]) if layers else {}
    [[seen, *others]] = on_ranks(1, in_flight, plan)
    assert others == [seen] * 4 and seen[1] > seen[0] > seen[-1]


def everything(kind: str, ways: tuple[str, ...], changed: str = "swap core attention") -> dict:
    """Each way with one plan, and all plans where nothing changes."""
    found = {}
    for way in ways:
        native, _ = run(kind, {"swap_config": {"swap": False}}, way)
        for name, plan in PLANS.items():
            if kind == "moe" and "inline" in name or way != "nothing" and name != changed:
                continue
            mine, seen = run(kind, plan, way)
            seen["differ"] = [
                f"step {step}: {key}"
                for step, (one, other) in enumerate(zip(mine, native, strict=True))
                for key in other
                if not torch.equal(one[key], other[key])
            ]
            found[name, way] = seen
    return found


PLAN = apart(["swap core attention", "both"], python=["swap core attention"], native=["both"])


@pytest.mark.parametrize("plan", PLAN)
@pytest.mark.parametrize(("kind", "ways"), [("dropout", WAYS), ("swiglu_gqa_rope", ("nothing", "shapes"))])
def test_the_same_gradients_and_figures_whatever_changes(kind, ways, plan):
    for (name, way), seen in on_ranks(1, everything, kind, ways, plan)[0].items():
        case = f"{name}, {way}: {seen}"
        assert not seen["differ"], case
        assert not any(seen["left"].values()), case
        assert not seen["pinned"], case
        steady = range(3, STEPS if way == "nothing" else CHANGE)
        assert len({seen["held"][step] for step in (1, *steady)}) == 1, case
        assert len({seen["without"][step] for step in (1, *steady)}) == 1, case
        assert len({seen["out"][step] for step in (1, *steady)}) == 1, case
        if name.startswith("swap"):
            assert all(seen["packed"][step] < seen["packed"][1] / 2 for step in steady), case


def test_experts_whose_tokens_vary():
    [found] = on_ranks(1, everything, "moe", ("nothing", "shapes"))
    for case, seen in found.items():
        assert not seen["differ"] and not any(seen["left"].values()), (case, seen)
        if case == ("swap core attention", "nothing"):
            assert seen["packed"][-1] < seen["packed"][1], seen


def after_a_change(what: str, learns: bool) -> list[tuple[int, int, int]]:
    """Per forward calls of the hook, bytes copied out and the ledger's peak, where something changes at `CHANGE`."""
    from mindspeed_mem.activation.operator_runs import OperatorRuns
    from mindspeed_mem.activation.storage.ledger import LEDGER
    from tests.models import build_gpt
    from tests.swap_runs import one_forward, swap

    usual, found = OperatorRuns._learns, []
    if not learns:
        OperatorRuns._learns = lambda self: False
    try:
        with parallel(), swap(PLANS["swap core attention"]) as engine:
            packed, chunks = packs(engine), build_gpt("dropout", layers=10 if what == "one departure" else 2)
            layers = chunks[0].module.decoder.layers
            first = [
                chunks[0].module.embedding,
                *(m for one in layers for m in (one.self_attention, one.input_layernorm)),
            ]
            for module in first if what == "gradients" else ():
                module.requires_grad_(False)
            for step in range(CHANGE + 5):
                chunks[0].train(what != "training" or step >= CHANGE)
                if what == "gradients" and step == CHANGE:
                    chunks[0].requires_grad_(True)
                departs = what == "one departure" and step == CHANGE
                LEDGER.reset_peak()
                held, out, packed[0] = LEDGER.held.now, engine.mover.bytes_out, 0
                with change("an operator less", layers) if departs else contextlib.nullcontext():
                    engine.passes.begin_schedule(("train",))
                    loss = one_forward(engine, chunks)
                    engine.passes.begin_backward(loss)
                    loss.sum().backward()
                    engine.passes.end_backward()
                    engine.passes.end_schedule(True)
                del loss
                found.append((packed[0], engine.mover.bytes_out - out, LEDGER.held.peak - held))
    finally:
        OperatorRuns._learns = usual
    return found


@pytest.mark.parametrize("change", ["training", "gradients", "one departure"])
def test_after_a_change_as_much_leaves_and_it_is_learnt_anew(change):
    mine, hooked = (on_ranks(1, after_a_change, change, learns)[0] for learns in (True, False))
    assert [one[1:] for one in mine] == [one[1:] for one in hooked]
    assert mine[CHANGE - 1][0] < mine[0][0] / 2 and mine[-1][0] < hooked[-1][0] / 2, (mine, hooked)


def after_many_shapes() -> tuple[list[int], int]:
    """Calls of the hook in forwards of one shape, after many others that came twice or once; how many are known."""
    from mindspeed_mem.activation import native_operators
    from tests.models import build_gpt
    from tests.swap_runs import swap

    kinds, found = native_operators._KINDS, []
    native_operators._KINDS = 3
    try:
        with parallel(), swap(PLANS["swap core attention"]) as engine:
            packed, chunks = packs(engine), build_gpt("dropout", layers=1)
            for length in (*(n for n in range(2, 8) for _ in range(2)), *range(8, 14), *[32] * 3):
                packed[0] = 0
                text = torch.zeros(1, length, dtype=torch.long)
                engine.passes.begin_schedule(("train",))
                engine.passes.begin_forward(0, 0)
                loss = chunks[0](text, text, None, labels=text)
                engine.passes.end_forward(loss)
                engine.passes.begin_backward(loss)
                loss.sum().backward()
                engine.passes.end_backward()
                engine.passes.end_schedule(True)
                found.append(packed[0])
            natives = engine.operators._natives
            return found[-3:], len(natives._courses) + len(natives._candidates)
    finally:
        native_operators._KINDS = kinds


def test_shapes_that_came_once_keep_nobody_from_learning():
    [(packed, known)] = on_ranks(1, after_many_shapes)
    assert packed[2] < packed[0] == packed[1] and known <= 6


def test_a_backward_that_is_compiled_is_followed():
    """Where what an operator saves has no hook, its node says that its backward begins, also as part of a graph."""
    swap = {"swap": True, "smallest_bytes": 0}
    plan = {"swap_config": swap | {"op_swap": [{"op_name": "fc1", "backward_prefetch": 2, "layers": True}]}}

    def compiled(model):
        loss = loss_of(model)
        with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
            loss.backward()
        return [loss]

    torch.manual_seed(0)
    model = Net()
    expected = results(copy.deepcopy(model), accumulated) + results(copy.deepcopy(model), compiled)
    with mindspeed_mem.attach(model, plan) as attached:
        alike = copy.deepcopy(model.state_dict())
        found = results(model, accumulated)
        model.load_state_dict(alike)
        found += results(model, compiled)
        assert same(expected, found)
        figures = attached.engine.report()
    assert figures.bytes_in == figures.bytes_out > 0
    assert LEDGER.held.now == 0
