"""Chunk ZeRO trains as Megatron's distributed optimizer does, bit for bit: data-parallel ranks."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.chunk_runs import (
    OVERLAP,
    Case,
    Failure,
    altered,
    built,
    chunked,
    differences,
    failing_once,
    masters,
    passed,
    stepped,
    trained,
)
from tests.swap_runs import POLICIES as SWAPPED
from tests.swap_runs import again, swap
from tests.worlds import RankError, applied, on_ranks, parallel

pytestmark = pytest.mark.distributed

HALF, SINGLE, FP16 = torch.bfloat16, torch.float32, torch.float16
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}
SCALED = {"initial_loss_scale": 2.0**16, "hysteresis": 1, "loss_scale_window": 2}
BARE = {"gradient_accumulation_fusion": True}


def of_odd_models(stage: int) -> dict[str, list[tuple[float, float]]]:
    """Losses and norms of each of `tests.odd_models`."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    from tests import odd_models
    from tests.models import build_optimizer

    found = {}
    for kind in odd_models.KINDS:
        with parallel(), chunked(stage, chunk=64):
            config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=2)
            ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
            model = DistributedDataParallel(config, ddp, odd_models.odd_model(kind))
            optimizer, figures = build_optimizer([model], bf16=False), []
            for step in range(3):
                model.zero_grad_buffer()
                loss = model(odd_models.inputs(step)).square().mean()
                loss.backward()
                model.finish_grad_sync()
                figures.append((loss.item(), float(optimizer.step()[1])))
        found[kind] = figures
    return found


def test_parameters_are_there_whoever_reads_them():
    assert on_ranks(2, of_odd_models, 3) == on_ranks(2, of_odd_models, 0)


# ---- changes of a model, before it is wrapped


def frozen(model):
    """A whole layer, and single parameters of another."""
    layers = model.decoder.layers
    for param in (*layers[1].parameters(), layers[2].mlp.linear_fc1.bias):
        param.requires_grad = False


def unused(model):
    """Parameters that no forward reads."""
    model.aside = torch.nn.Linear(96, 200)


def shared(model):
    """One module in two layers: two uses and two gradients in each pass."""
    model.decoder.layers[2].mlp = model.decoder.layers[0].mlp


class Partly(torch.nn.Module):
    """Around a norm: a second parameter, read when `wanted` says so."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.wanted = norm, lambda: True
        self.always, self.sometimes = (torch.nn.Parameter(torch.full((64, 300), 1e-3)) for _ in range(2))

    def forward(self, x):
        out = self.norm(x)
        out = out * (1 + self.always.mean(1).to(out.dtype))
        return out + self.sometimes.mean(1).to(out.dtype) if self.wanted() else out


class Skipped(Partly):
    """What is read only sometimes is in a module of its own, so that the module does not even run."""

    def __init__(self, norm):
        super().__init__(norm)
        self.inner = torch.nn.Linear(64, 64, bias=False)

    def forward(self, x):
        out = self.norm(x) * (1 + self.always.mean(1).to(x.dtype)) + self.sometimes.mean(1).to(x.dtype)
        return out + self.inner(out) if self.wanted() else out


def partly(model, kind=Partly):
    layer = model.decoder.layers[1]
    layer.pre_mlp_layernorm = kind(layer.pre_mlp_layernorm)


def on_rank_0_only(step, models, optimizer, since=0):
    """From this step on the other ranks do without."""
    for module in models[0].modules():
        if isinstance(module, Partly):
            module.wanted = lambda: step < since or torch.distributed.get_rank() == 0


def tokens_for_few(model):
    """Rank by rank, other experts stay without tokens."""
    rank = torch.distributed.get_rank()
    for module in model.modules():
        if type(module).__name__ == "TopKRouter":
            bias = torch.tensor([4.0, 3.0, -8.0, -8.0]).roll(2 * rank)
            module.routing = lambda logits, *a, _routing=module.routing, _bias=bias, **k: _routing(
                logits + _bias, *a, **k
            )


def groups_of_parameters(step, models, optimizer):
    """Norms and biases without weight decay are another group of the optimizer."""
    assert len(optimizer.param_groups) > 1


KINDS = {
    "dense, fp32, overlap": Case(dtype=SINGLE, ddp=OVERLAP),
    "gated, grouped queries": Case("swiglu_gqa_rope", ddp=OVERLAP),
    "latent attention, fp32": Case("mla", SINGLE, around=(functools.partial(applied, "sdpa_*"),), ddp=OVERLAP),
    "experts without tokens": Case("moe", around=(functools.partial(altered, tokens_for_few),), micro_batches=1),
    "fp16, a skipped step": Case(dtype=FP16, optimizer=SCALED, steps=5),
}
OPTIONS = {
    "loss per token": Case(per_token=True, dtype=SINGLE),
    "no clipping, groups of parameters": Case(
        optimizer={"clip_grad": 0.0}, during=groups_of_parameters, ddp={"pad_buckets_for_high_nccl_busbw": True}
    ),
    "gradients in bf16": Case(ddp={"grad_reduce_in_fp32": False}, stages=(3,)),
    "fused gradients": Case(model=BARE),
    "frozen": Case(around=(functools.partial(altered, frozen),), ddp=OVERLAP, stages=(3,)),
    "shared": Case("swiglu_gqa_rope", around=(functools.partial(altered, shared),), ddp=OVERLAP, micro_batches=1),
    "fused activation": Case(model={"bias_activation_fusion": True}, budget=60000, chunk=256, stages=(3,)),
    "small chunks": Case("swiglu_gqa_rope", chunk=64, micro_batches=1, stages=(3,)),
}
MORE = {
    "dense": Case(),
    "experts, fp32, overlap": Case("moe", SINGLE, ddp=OVERLAP),
    "dropout, fp32": Case("dropout", SINGLE),
    "one chunk": Case(chunk=10**7, ddp=OVERLAP, stages=(3,)),
    "gated, fp32": Case("swiglu_gqa_rope", SINGLE, model={"tied": False}),
    "latent attention": Case("mla", around=(functools.partial(applied, "sdpa_*"),)),
    "experts": Case("moe"),
    "fp16, overlap": Case("swiglu_gqa_rope", FP16, optimizer=SCALED, ddp=OVERLAP, steps=4),
    "reduction overlaps only": Case(ddp={"overlap_grad_reduce": True}, micro_batches=3),
    "average in the collective, nan looked for": Case(
        ddp={"average_in_collective": True, "check_for_nan_in_grad": True}, micro_batches=1
    ),
    "unused": Case(around=(functools.partial(altered, unused),)),
    "fused gradients, overlap": Case(model={**BARE, "tied": False}, ddp=OVERLAP, dtype=SINGLE),
}
RECOMPUTED = {
    "full, overlap": Case("dropout", SINGLE, model=FULL, ddp=OVERLAP, stages=(3,)),
    "full, fused, shared": Case(model={**FULL, **BARE}, around=(functools.partial(altered, shared),)),
    "core attention": Case("dropout", model={**SELECTIVE, "recompute_modules": ["core_attn"]}, stages=(3,)),
    "mlp and norms": Case("swiglu_gqa_rope", model={**SELECTIVE, "recompute_modules": ["mlp", "layernorm"]}),
    "experts": Case("moe", model={**SELECTIVE, "recompute_modules": ["moe"]}, ddp=OVERLAP, stages=(3,)),
}
OURS = {
    "whole layers": again(recompute=True),
    "operators": again([".*norm", ".*_bda", r"self_attention\..*", r"mlp\..*"]),
    "everything": SWAPPED["everything"],
    "operators swapped": SWAPPED["operators"],
    "mix": again(
        {"mlp": [1], ".*norm": True},
        {"swap": True, "layer_swap": [{"backward_prefetch": 2, "layers": True}], "swap_recompute_inputs": True},
        recompute=[0, 2],
    ),
}


def ours(kind, plan, *around, **more):
    model = {"layers": 4, **more.pop("model", {})}
    # What is inline code runs again from the second step on only, so the first one's order is not that of all.
    return Case(
        kind, around=(functools.partial(swap, plan), *around), model=model, micro_batches=1, deviates=True, **more
    )


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(KINDS, id="kinds"),
        pytest.param(OPTIONS, id="options"),
        pytest.param(RECOMPUTED, id="recomputed", marks=pytest.mark.sweep),
        pytest.param(MORE, id="more", marks=pytest.mark.sweep),
    ],
)
def test_two_ranks(cases):
    assert on_ranks(2, differences, cases, timeout=500) == [[], []]


@pytest.mark.sweep
def test_beside_more_of_our_own_swap_and_recompute():
    cases = {name: ours("dropout", OURS[name], stages=(3,)) for name in ("whole layers", "mix")}
    assert on_ranks(2, differences, cases, timeout=500) == [[], []]


def test_beside_our_own_swap_and_recompute():
    """An operator that runs again finds its weights there, also one whose expert has tokens on one rank only."""
    cases = {name: ours("dropout", OURS[name], stages=(3,)) for name in ("operators", "operators swapped")}
    few = functools.partial(altered, tokens_for_few)
    cases["fused gradients"] = ours("dropout", OURS["mix"], model=BARE, ddp=OVERLAP)
    fused = {"bias_activation_fusion": True, "bias_dropout_fusion": True}
    cases["fused"] = ours("dropout", OURS["operators swapped"], model=fused, stages=(3,))
    for name in ("whole layers", "everything"):
        cases[f"experts, {name}"] = ours("moe", OURS[name], few, stages=(3,))
    assert on_ranks(2, differences, cases, timeout=500) == [[], []]


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_numbers_of_ranks(ranks):
    cases = {"bf16": Case(ddp=OVERLAP), "fp32": Case("dropout", SINGLE)}
    assert on_ranks(ranks, differences, cases) == [[]] * ranks


def test_a_gradient_that_comes_on_one_rank_only():
    """From the first step on, and in a later one, when an order has been recorded with it."""
    seldom = {"around": (functools.partial(altered, partly),), "chunk": 4096, "steps": 4}
    skipped = functools.partial(altered, functools.partial(partly, kind=Skipped))
    cases = {
        "never": Case(during=on_rank_0_only, **seldom),
        "later": Case(during=functools.partial(on_rank_0_only, since=2), micro_batches=1, **seldom),
    }
    cases["module"] = Case(during=on_rank_0_only, **{**seldom, "around": (skipped,)}, stages=(2,))
    assert on_ranks(2, differences, cases) == [[], []]


def refused(case):
    from mindspeed_mem.zero.core.use_order import ChunkOrderError

    with pytest.raises(ChunkOrderError, match="rank 0 .* chunk [0-9]+.*, rank 1 .*all data-parallel ranks have to run"):
        trained(3, case)


def test_a_module_that_runs_on_one_rank_only_is_an_error_on_all_ranks():
    skipped = functools.partial(altered, functools.partial(partly, kind=Skipped))
    on_ranks(2, refused, Case(during=on_rank_0_only, around=(skipped,), chunk=4096))


def test_a_rank_that_leaves_the_recorded_order_says_so():
    """Which ends in an error of the communication library: the others cannot know."""
    skipped = functools.partial(altered, functools.partial(partly, kind=Skipped))
    since = functools.partial(on_rank_0_only, since=2)
    case = Case(during=since, around=(skipped,), steps=4, micro_batches=1, stages=(3,))
    with pytest.raises(RankError, match="a pass over the chunks is not as it was recorded: a use of chunks"):
        on_ranks(2, differences, {"": case})


def interrupted(stage, case):
    """Masters after training in which two steps fail; first, and not, as `masters` of a model that never failed."""
    found = []
    for fails in (False, True):
        with parallel(), chunked(stage):
            models, optimizer = built(case)
            passed(models, case, 0)
            stepped(optimizer)
            layer = models[0].module.module.decoder.layers[1]
            for module, in_backward in ((layer.mlp, False), (layer.self_attention, True)) if fails else ():
                with failing_once(module, in_backward), pytest.raises(Failure):
                    passed(models, case, 1)
                if stage == 3:
                    assert not any(chunk.gathered for chunk in models[0].chunks_of_model.chunks)
            for step in (1, 2):
                passed(models, case, step)
                stepped(optimizer)
            found.append(masters(optimizer))
    return found


@pytest.mark.parametrize("ddp", [{}, OVERLAP], ids=["", "overlap"])
def test_a_failed_step_leaves_no_trace(ddp):
    for stage in (2, 3):
        for once, failed in on_ranks(2, interrupted, stage, Case(ddp=ddp)):
            assert once == failed


def called_directly(stage, case):
    """Losses of the bare model, outside of any schedule, before and after steps; and of a loop of one's own."""
    text = torch.arange(33).expand(2, -1)
    given = text[:, :-1].contiguous(), torch.arange(32).expand(2, -1), None
    found = []
    with parallel(), chunked(stage):
        models, optimizer = built(case)
        for step in range(3):
            with torch.no_grad():
                found.append(models[0](*given, labels=text[:, 1:].contiguous()).float().mean().item())
            if step == 1:  # no schedule: forward, backward, reduction
                models[0].zero_grad_buffer()
                models[0](*given, labels=text[:, 1:].contiguous()).float().mean().backward()
                models[0].finish_grad_sync()
            else:
                passed(models, case, step)
            found.append(stepped(optimizer))
        found.append(masters(optimizer))
    return found


def asked_for_whole_gradients():
    with parallel(), chunked(2):
        models, _ = built(Case())
        models[0].zero_grad_buffer()
        with pytest.raises(ValueError, match="no rank has with --chunk-zero-stage 2 or 3. Leave"):
            models[0].finish_grad_sync(force_all_reduce=True)


def test_saving_whole_gradients_is_refused():
    on_ranks(1, asked_for_whole_gradients)


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_a_model_called_directly_has_the_weights_of_now(dtype):
    expected = on_ranks(2, called_directly, 0, Case(dtype=dtype))
    for stage in (2, 3):
        assert on_ranks(2, called_directly, stage, Case(dtype=dtype)) == expected


def one_after_the_other(dtype):
    """What is known of the first of two models when it is gone, and a second, larger one trains."""
    import gc

    from mindspeed_mem.zero.buffers import runtime

    with parallel(), chunked(3):
        models, optimizer = built(Case(dtype=dtype))
        passed(models, Case(), 0)
        stepped(optimizer)
        first = set(runtime.current().gathering.chunks)
        other = built(Case(dtype=dtype, model={"layers": 6}))
        passed(other[0], Case(), 0)
        passed(models, Case(), 1)  # both alive: each has its own order
        del models, optimizer
        gc.collect()
        left = first & set(runtime.current().gathering.chunks)
        del first
        passed(other[0], Case(), 1)
        deviations = runtime.current().gathering.order.deviations
        norm = stepped(other[1])
    return len(left), deviations, norm is not None


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_two_models(dtype):
    assert on_ranks(2, one_after_the_other, dtype) == [(0, 0, True)] * 2
