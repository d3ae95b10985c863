"""A layer spec like TransformerEngine's, with stand-ins that save what its functions save (by its sources, 2.11 and
2.20; itself it takes a GPU: `benchmarks/bits.py transformer-engine`): norms inside the linears after them, and one of
several attentions."""

from __future__ import annotations

import dataclasses
import functools
import queue

import pytest
import torch

from mindspeed_mem.plan import MemoryConfigError, load_memory_config, resolve
from tests.numerics.test_beside_megatron import chunked_or_split, memory_features, under_a_cap, with_less_memory
from tests.swap_runs import EVERYTHING, again, entry, op
from tests.worlds import on_ranks


class LayerNormLinear(torch.autograd.Function):
    """As its ``_LayerNormLinear``: saves a view of its input, weight, bias, the norm's weight, its result and what it
    divided by; with fp8 the first product's operand is a copy in low precision, and that of the weight is held by the
    module."""

    @staticmethod
    def forward(ctx, inputs, norm_weight, weight, bias, held, store):
        ctx.store, ctx.shape = store, inputs.shape
        inputs = inputs.view(-1, inputs.shape[-1])
        divided = (inputs.float().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
        normed = ((inputs * divided) * norm_weight).to(held.dtype)
        ctx.save_for_backward(inputs, held, weight, bias, norm_weight, normed, None, divided)
        return (normed.to(inputs.dtype) @ held.to(inputs.dtype).t() + bias).view(*ctx.shape[:-1], -1)

    @staticmethod
    def backward(ctx, gradient):
        inputs, held, _, _, norm_weight, normed, _, divided = ctx.saved_tensors
        flat = gradient.flatten(0, -2)
        into = flat @ held.to(flat.dtype)
        scaled, unit = into * norm_weight, inputs * divided
        back = divided * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))
        back = back.view(ctx.shape)
        of_norm = (into * unit).sum(0)

        def gradients(normed, flat):
            return flat.t() @ normed.to(flat.dtype), flat.sum(0)

        if ctx.store.delay_wgrad_compute():
            ctx.store.put([normed, flat], gradients)
            return back, of_norm, None, None, None, None
        return back, of_norm, *gradients(normed, flat), None, None


class Store:
    """As its ``WeightGradStore``: tensors and what makes gradients of them, first in, first out."""

    def __init__(self, delay_wgrad_compute=False, ub_bulk_wgrad=False):
        self.context = queue.Queue() if delay_wgrad_compute else None

    def delay_wgrad_compute(self):
        return self.context is not None

    def put(self, tensors, function):
        self.context.put([tensors, function])

    def pop(self):
        tensors, function = self.context.get(block=False)
        return function(*tensors), tensors


class Delays:
    """As its base class of modules, where these delay gradients of weights: they overwrite ``.grad`` of a weight, and
    leave alone that of a bias which has one."""

    count = 0

    def backward_dw(self):
        if self.wgrad_store.delay_wgrad_compute():
            Delays.count += 1
            (of_weight, of_bias), _ = self.wgrad_store.pop()
            self.weight.grad = of_weight.to(self.weight.dtype)
            if self.bias is not None and not self.skip_bias_add and self.bias.grad is None:
                self.bias.grad = of_bias.to(self.bias.dtype)


class PassedOn:
    """As Megatron's wrappers of these modules."""

    __module__ = "megatron.core.extensions.transformer_engine"

    def backward_dw(self):
        if self.config.delay_wgrad_compute:
            super().backward_dw()


def of_transformer_engine(spec, low: torch.dtype | None = None) -> None:
    """Change the local spec of a layer. ``low``: the precision of operands, as with fp8; None: the model's."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp

    class Fused(PassedOn, Delays, ColumnParallelLinear):
        def __init__(self, input_size, output_size, **more):
            super().__init__(input_size, output_size, **more)
            self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size))
            self.wgrad_store = Store()
            self._fp8_workspaces: dict[str, torch.Tensor] = {}

        def forward(self, inputs):
            held = self.weight.detach()
            if low is not None:  # kept over the micro-batches of a step, which are all that this test has
                held = self._fp8_workspaces.setdefault("weight", held.to(low))
            bias = torch.zeros_like(self.weight[:, 0]) if self.bias is None or self.skip_bias_add else self.bias
            output = LayerNormLinear.apply(inputs, self.layer_norm_weight, self.weight, bias, held, self.wgrad_store)
            return output, self.bias if self.skip_bias_add else None

    class Flash(torch.nn.Module):
        def forward(self, query, key, value):
            each = (one.permute(1, 2, 0, 3) for one in (query, key, value))
            output = torch.nn.functional.scaled_dot_product_attention(*each, is_causal=True)
            return output.permute(2, 0, 1, 3).flatten(2)

    class Attention(torch.nn.Module):
        def __init__(self, **more):
            super().__init__()
            self.flash_attention, self.fused_attention = Flash(), Flash()

        def forward(self, query, key, value, attention_mask, **more):
            return self.flash_attention(query, key, value)

    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
    layer.self_attention.submodules.linear_qkv = Fused
    if isinstance(layer.mlp, functools.partial):  # since 0.19
        changed = dataclasses.replace(layer.mlp.keywords["submodules"], linear_fc1=Fused)
        layer.mlp = functools.partial(layer.mlp, submodules=changed)
    else:
        layer.mlp.submodules.linear_fc1 = Fused
    layer.self_attention.submodules.core_attention = Attention


def of_transformer_engine_in_low_precision(spec) -> None:
    of_transformer_engine(spec, torch.float8_e4m3fn)


@pytest.mark.distributed
@pytest.mark.parametrize("spec", [of_transformer_engine, of_transformer_engine_in_low_precision], ids=["bf16", "fp8"])
def test_swapped_and_recomputed_to_the_same_bits(spec):
    [(found, moved, ran)] = on_ranks(1, memory_features, {}, {"kind": "dense", "change_spec": spec})
    assert not found and ran == {0, 1}
    of_layer = {name for layer, name in moved if layer == 0}
    assert {"self_attention.linear_qkv", "self_attention.core_attention.flash_attention", "mlp.linear_fc1"} <= of_layer
    assert not any("norm" in name for name in of_layer)


def with_inputs_swapped() -> tuple[int, list[str]]:
    """Bytes moved of what layers that run again start from, and what is said of them."""
    from tests import models, swap_runs
    from tests.worlds import parallel

    plan = again(swap_config={"swap": True, "op_swap": [], "swap_recompute_inputs": True}, recompute=True)
    with parallel(), swap_runs.swap(plan) as engine, swap_runs.listening() as messages:
        chunks = models.build_gpt("dense", layers=3, change_spec=of_transformer_engine)
        for _ in range(2):
            models.train_step(chunks, micro_batches=2)
        return engine.report().bytes_out, messages


@pytest.mark.distributed
def test_the_residual_stream_leaves_although_its_linears_save_views_of_it():
    [(nbytes, messages)] = on_ranks(1, with_inputs_swapped)
    assert nbytes and not [one for one in messages if "no effect" in one]


@pytest.mark.distributed
def test_survived_capped_and_in_chunks_to_the_same_bits():
    model = {"kind": "dense", "change_spec": of_transformer_engine}
    [(found, nbytes)] = on_ranks(1, with_less_memory, model)
    assert not found and nbytes
    assert on_ranks(2, under_a_cap, model) == on_ranks(2, chunked_or_split, {}, model, (2, 3)) == [[], []]


@pytest.mark.distributed
def test_copies_of_weights_in_low_precision_with_less_memory_and_in_a_capped_pipeline():
    model = {"kind": "dense", "change_spec": of_transformer_engine_in_low_precision}
    [(found, nbytes)] = on_ranks(1, with_less_memory, model)
    assert not found and nbytes
    assert on_ranks(2, under_a_cap, model) == [[], []]


OVERLAPPED = {"ddp": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 20_000}}


def delayed(layout: dict, more: dict) -> tuple[list[str], int]:
    """What differs in any bit with gradients of weights put off, and how many fused linears put off."""
    from tests.split_runs import departures

    Delays.count = 0
    found = departures("dense", layout, {"layers": 2, "change_spec": of_transformer_engine, **more}, EVERYTHING)
    return found, Delays.count


def delayed_in_several_backwards() -> list[str]:
    """What differs where a graph is gone through twice in a pass, and where two checkpointed layers share a linear."""
    from tests import models
    from tests.split_runs import departures, gone_through_twice

    def sharing(*args, **kwargs):
        chunks = native(*args, **kwargs)
        first, second = (layer.mlp.linear_fc1 for layer in chunks[0].module.decoder.layers)
        second.forward = first.forward
        return chunks

    model = {"layers": 2, "change_spec": of_transformer_engine, "add_bias_linear": True}
    found = []
    for unwanted in (False, True):
        with gone_through_twice(unwanted):
            found += departures("dense", {}, model)
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    native = models.build_gpt
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "build_gpt", sharing)
        return found + departures("dense", {}, {**model, **full})


@pytest.mark.distributed
def test_its_layers_delay_what_several_backwards_of_a_pass_make():
    assert on_ranks(1, delayed_in_several_backwards) == [[]]


def delayed_in_idle_time(model: dict) -> tuple[list[str], int]:
    """The same in zero bubble."""
    from tests.capped_runs import departures as in_idle_time

    Delays.count = 0
    found = in_idle_time("dense", {"pp": 2}, {"change_spec": of_transformer_engine, **model}, [(None, 4)], split=True)
    return found, Delays.count


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_its_layers_delay_gradients_of_weights_to_the_same_bits(dtype):
    [(found, count)] = on_ranks(1, delayed, {}, {"dtype": dtype})
    assert not found and count and not count % 2
    for found, count in on_ranks(2, delayed, {}, {"dtype": dtype, **OVERLAPPED}):
        assert not found and count
    for found, count in on_ranks(2, delayed_in_idle_time, {"dtype": dtype}):
        assert not found and count


def grouped_experts(spec) -> None:
    """Experts as in its specs: all in one module, with all tokens of one after those of another."""
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.spec_utils import ModuleSpec

    class Grouped(torch.nn.Module):
        def __init__(self, count, input_size, output_size, *, config, **more):
            super().__init__()
            for number in range(count):
                weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
                weight.allreduce = True
                self.register_parameter(f"weight{number}", weight)

        def forward(self, inputs, counts):
            each = zip(inputs.split(list(counts)), self.parameters(), strict=True)
            return torch.cat([one @ weight.t() for one, weight in each]), None

    linears = MLPSubmodules(linear_fc1=Grouped, linear_fc2=Grouped)
    mlp = spec.submodules.mlp
    if isinstance(mlp, functools.partial):  # since 0.19
        experts = functools.partial(TEGroupedMLP, submodules=linears)
        changed = dataclasses.replace(mlp.keywords["submodules"], experts=experts)
        spec.submodules.mlp = functools.partial(mlp, submodules=changed)
    else:
        mlp.submodules.experts = ModuleSpec(module=TEGroupedMLP, submodules=linears)


@pytest.mark.distributed
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_the_activation_function_of_grouped_experts_has_its_name(fused):
    model = {"kind": "moe", "change_spec": grouped_experts, "bias_activation_fusion": fused}
    [(found, moved, ran)] = on_ranks(1, memory_features, {}, model, plans=[EVERYTHING, again(["moe_act"])])
    assert not found and ran == {0, 1}
    assert (0, "mlp.experts.activation_func") in moved


OPERATORS = [
    "self_attention.core_attention.flash_attention",
    "self_attention.core_attention.fused_attention",
    "self_attention.core_attention.unfused_attention.scale_mask_softmax",
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
]


@pytest.mark.parametrize("pattern", ["input_layernorm", "attention_norm", "attn_norm"])
def test_a_norm_in_a_linear_is_named_with_its_linear(pattern):
    config = load_memory_config(entry(op_swap=[op(pattern, 1), op(r"mlp\.linear_fc1", 1)]))
    plan = resolve(config, {0: OPERATORS}, 1)
    [notice] = [line for line in plan.notices if "no effect" in line]
    assert notice.endswith("here it is part of self_attention.linear_qkv") and "op_swap" in notice
    assert plan.decision(0, "mlp.linear_fc1") and not plan.decision(0, "self_attention.linear_qkv")


def test_both_norms_and_their_recomputation():
    plan = resolve(load_memory_config(again(["layernorm", "mlp"])), {0: OPERATORS}, 1)
    assert any("part of self_attention.linear_qkv and mlp.linear_fc1" in line for line in plan.notices)
    assert plan.recompute(0, "mlp") and not plan.recompute(0, "self_attention.linear_qkv")


def test_the_attention_that_runs_has_a_name_of_its_own_and_that_of_all():
    for pattern in (r"self_attention\.core_attention", r"self_attention\.core_attention\.flash_attention", "core_attn"):
        plan = resolve(load_memory_config(entry(op_swap=[op(pattern, 1)])), {0: OPERATORS}, 1)
        assert plan.decision(0, "self_attention.core_attention.flash_attention"), pattern


def test_a_typo_stays_an_error():
    with pytest.raises(MemoryConfigError, match="input_layernrm"):
        resolve(load_memory_config(entry(op_swap=[op("input_layernrm", 1)])), {0: OPERATORS}, 1)
