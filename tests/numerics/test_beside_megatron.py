"""Beside what else Megatron's users have switched on, features train to the bits of Megatron alone."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import sys
import types
from collections.abc import Iterator

import pytest
import torch

from tests.worlds import on_ranks, parallel

pytestmark = pytest.mark.distributed

SHARED = {"kind": "moe", "moe_shared_expert_intermediate_size": 64, "moe_shared_expert_overlap": True}
PIECES = {"kind": "moe", "dtype": torch.bfloat16, "overlap_moe_expert_parallel_comm": True}
PREDICTION = {"kind": "dropout", "mtp_num_layers": 2}


def memory_features(
    layout: dict,
    model: dict,
    around=contextlib.nullcontext,
    recomputes: bool = True,
    plans: list | None = None,
    **of_optimizer,
) -> tuple:
    """What differs from Megatron alone with everything swapped, and with operators and layers recomputed (or by
    `plans`); which operators of which layers moved, and which layers ran again."""
    from tests import models
    from tests.models import build_optimizer, forget_routing, train_step
    from tests.swap_runs import EVERYTHING, again, difference, forget_tables, left_over, swap

    def run() -> list:
        with around(), parallel(**layout):
            chunks = models.build_gpt(layers=2, **model)
            optimizer = build_optimizer(chunks, **of_optimizer)
            results = [train_step(chunks, optimizer=optimizer, step=number) for number in range(2)]
            forget_routing(chunks)
            forget_tables()
            return results

    plans = plans or [EVERYTHING, again([".*norm", "mlp"]), again(recompute=True)]
    found, moved, ran = [], set(), set()
    without = run()
    for plan in plans if recomputes else plans[:1]:
        with swap(plan) as engine:
            results, report = run(), engine.report()
            left = left_over(engine)
        found += [what for one, other in zip(results, without, strict=True) for what in difference(one, other)]
        found += [f"left over {left}"] if any(left.values()) else []
        moved |= {(row.layer, row.op) for row in report.moved_by_operator if row.bytes}
        ran |= {row.layer for row in report.recomputed_by_operator if row.bytes}
    return found, moved, ran


def with_less_memory(model: dict, around=contextlib.nullcontext, **of_optimizer) -> tuple[list[str], int]:
    """What differs where a step has 60 % of the memory that it takes alone, and the bytes that left the device."""
    from tests.limited_runs import Training, counted, different, surviving

    def training(memory) -> Training:
        return Training(memory, optimizer=of_optimizer, layers=4, **model)

    with counted() as memory:
        with around(), parallel():
            plain = training(memory)
            expected = [plain.step() for _ in range(2)]
            peak = plain.peak
        with surviving() as engine, around(), parallel():
            limited = training(memory)
            found = [different(limited.step(), expected[0]), different(limited.step(int(0.6 * peak)), expected[1])]
            return sum(found, []), engine.mover.bytes_out


def under_a_cap(model: dict, around=contextlib.nullcontext, **of_optimizer) -> list[str]:
    """What differs in a pipeline of two stages that hold one micro-batch each."""
    from tests.capped_runs import capped, trained
    from tests.swap_runs import difference

    kind, more = model["kind"], {name: value for name, value in model.items() if name != "kind"}

    def run() -> list:
        with around(), parallel(pp=2):
            return trained(kind, more, 4, optimizer=of_optimizer)[0]

    without = run()
    with capped(1):
        return [what for one, other in zip(run(), without, strict=True) for what in difference(one, other)]


def test_multi_token_prediction():
    """Its layers count on from the decoder's, and their operators have the names they have there."""
    [(found, moved, ran)] = on_ranks(1, memory_features, {}, PREDICTION)
    assert not found and ran == {0, 1, 2, 3}
    of_layer = [{op for layer, op in moved if layer == number} for number in range(4)]
    assert {"mlp.activation_func", "self_attention.linear_qkv", "eh_proj"} <= of_layer[2] == of_layer[3]
    assert of_layer[0] - {"input_layernorm"} <= of_layer[2]


def test_multi_token_prediction_in_a_pipeline():
    ranks = on_ranks(2, memory_features, {"pp": 2}, {"mtp_num_layers": 1})
    assert [found for found, _, _ in ranks] == [[], []]
    assert [ran for _, _, ran in ranks] == [{0}, {1, 2}]


def named(plan: dict) -> set:
    from tests.models import build_gpt, train_step
    from tests.swap_runs import swap

    with swap(plan) as engine, parallel():
        train_step(build_gpt(layers=2, mtp_num_layers=1), micro_batches=1)
        return {row.layer for row in engine.report().recomputed_by_operator if row.bytes}


def test_layers_of_multi_token_prediction_have_a_name():
    plan = {"swap_config": {"swap": False}, "recompute_config": {"recompute": ["mtp:0"]}}
    assert on_ranks(1, named, plan) == [{2}]


def test_shared_experts_on_a_stream_of_their_own():
    [(found, moved, ran)] = on_ranks(1, memory_features, {}, SHARED)
    assert not found and ran == {0, 1} and moved


@pytest.mark.sweep
@pytest.mark.parametrize("lag", ["random"])
def test_shared_experts_on_a_stream_that_lags(lag):
    from tests.accelerator.lags import under

    [(found, _, ran)] = on_ranks(1, under, lag, memory_features, {}, SHARED, device="cuda")
    assert not found and ran == {0, 1}


# ---- context parallelism, with an attention that needs no kernels


def gathered(spec) -> None:
    """Put it into the spec of a layer."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    class Gathered(torch.nn.Module):
        """Each rank has a part of the queries, and gathers keys and values."""

        def __init__(self, **more):
            super().__init__()

        def forward(self, query, key, value, attention_mask, **more):
            group = parallel_state.get_context_parallel_group()
            key, value = (gather_from_sequence_parallel_region(one, group=group) for one in (key, value))
            rows = len(query) * group.rank() + torch.arange(len(query))[:, None]
            scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * query.shape[-1] ** -0.5
            weights = scores.masked_fill(torch.arange(len(key)) > rows, float("-inf")).softmax(-1)
            return torch.einsum("bhqk,kbhd->qbhd", weights, value).flatten(2)

    spec.submodules.self_attention.submodules.core_attention = Gathered


CUT = {"context_parallel_size": 2}


def test_context_parallelism():
    model = {"kind": "dense", "change_spec": gathered, **CUT}
    for found, moved, ran in on_ranks(2, memory_features, CUT, model):
        assert not found and moved and ran == {0, 1}


def chunked_or_split(layout: dict, model: dict, stages: tuple[int, ...], around=contextlib.nullcontext) -> list[str]:
    """The same for chunk ZeRO of these stages, and for optimizers split over ranks."""
    from mindspeed_mem.features import Settings, put_into_force
    from tests import models
    from tests.chunk_runs import chunked
    from tests.models import build_optimizer, forget_routing, train_step
    from tests.swap_runs import difference
    from tests.worlds import applied

    def run(**more) -> list:
        with around(), parallel(**layout):
            chunks = models.build_gpt(layers=2, **more, **model)
            optimizer = build_optimizer(chunks)
            results = [train_step(chunks, optimizer=optimizer, step=number) for number in range(2)]
            forget_routing(chunks)
            return results

    def numbers(results) -> list:
        return [(one.loss, one.grad_norm) for one in results]

    put_into_force(Settings(optimizer_parallel="sharding"))
    try:
        with applied("optimizer_parallel"):
            split = run()
    finally:
        put_into_force(Settings())
    found = [what for one, other in zip(split, run(), strict=True) for what in difference(one, other)]
    expected: list = []
    for stage in (0, *stages) if stages else ():
        with chunked(stage):
            got = numbers(run(ddp={"use_distributed_optimizer": True}))
        expected = expected or got
        found += [] if got == expected else [f"stage {stage}: {got} instead of {expected}"]
    return found


def test_parameters_in_chunks_beside_context_parallelism():
    model = {"kind": "dense", "change_spec": gathered, **CUT}
    assert on_ranks(2, chunked_or_split, CUT, model, (3,)) == [[], []]


def test_optimizers_split_over_ranks_beside_layers_in_graphs():
    model = {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn"]}
    assert on_ranks(2, chunked_or_split, {}, model, (), graphed) == [[], []]


def test_parameters_in_chunks_beside_layers_that_run_in_pieces():
    assert on_ranks(2, chunked_or_split, {"ep": 2}, PIECES, (2, 3)) == [[], []]


def with_ranges(case, *args):
    """The accelerator has no markers for profilers."""
    from torch.cuda import nvtx

    nvtx.range_push = nvtx.range_pop = lambda *_, **__: 0
    return case(*args)


@pytest.mark.sweep
@pytest.mark.parametrize("lag", ["random"])
def test_parameters_in_chunks_beside_pieces_on_streams_that_lag(lag):
    from tests.accelerator.lags import under

    given = (with_ranges, chunked_or_split, {"ep": 2}, PIECES, (2, 3))
    assert on_ranks(2, under, lag, *given, device="cuda") == [[], []]


# ---- an optimizer that keeps parameters and states in the precisions it was given


@contextlib.contextmanager
def precision_aware() -> Iterator[None]:
    """A stand-in for TransformerEngine's Adam, with the parameters and the state that Megatron asks it for."""
    from megatron.core import optimizer as optimizers
    from megatron.core import utils
    from megatron.core.optimizer import distrib_optimizer

    class FusedAdam(torch.optim.Optimizer):
        def __init__(
            self,
            params,
            lr,
            weight_decay,
            betas,
            eps,
            adam_w_mode=True,
            exp_avg_dtype=torch.float32,
            exp_avg_sq_dtype=torch.float32,
            master_weights=False,
            use_decoupled_grad=False,
            master_weight_dtype=torch.float32,
            store_param_remainders=False,
            capturable=False,
        ):
            assert adam_w_mode and master_weights and use_decoupled_grad
            self.kept = exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype
            super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

        @torch.no_grad()
        def step(self, closure=None, grad_scaler=None):
            for group in self.param_groups:
                group["step"] = number = group.get("step", 0) + 1
                for one in group["params"]:
                    if one.decoupled_grad is None or not one.numel():
                        continue
                    state = self.state[one]
                    if not state:
                        places = ("exp_avg", "exp_avg_sq", "master_param")
                        given = (torch.zeros_like(one), torch.zeros_like(one), one)
                        state.update((name, it.to(d)) for name, it, d in zip(places, given, self.kept, strict=True))
                    gradient, first, second = one.decoupled_grad.float(), state["exp_avg"], state["exp_avg_sq"]
                    beta, gamma = group["betas"]
                    first.copy_(first.float().lerp(gradient, 1 - beta))
                    second.copy_(second.float().lerp(gradient.square(), 1 - gamma))
                    scale = second.float().div(1 - gamma**number).sqrt() + group["eps"]
                    master = state["master_param"].float() * (1 - group["lr"] * group["weight_decay"])
                    state["master_param"].copy_(master - group["lr"] / (1 - beta**number) * first.float() / scale)
                    one.copy_(state["master_param"])

    names = ["transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"]
    added = {name: types.ModuleType(name) for name in names if name not in sys.modules}
    places = [(optimizers, "USING_PYTORCH_OPTIMIZER", False), (optimizers, "Adam", FusedAdam)]
    places += [(distrib_optimizer, "Adam", FusedAdam), (utils, "_te_version", None)]
    before = [(home, name, getattr(home, name, None)) for home, name, _ in places]
    for home, name, what in places:
        setattr(home, name, what)
    sys.modules.update(added)
    added[names[0]].__version__ = "2.20.0"
    added[names[-1]].FusedAdam = FusedAdam
    try:
        yield
    finally:
        for home, name, what in before:
            setattr(home, name, what)
        for name in added:
            del sys.modules[name]


PRECISIONS = {
    "use_precision_aware_optimizer": True,
    "main_grads_dtype": torch.bfloat16,
    "exp_avg_dtype": torch.bfloat16,
    "exp_avg_sq_dtype": torch.bfloat16,
}
LOW = {"kind": "dense", "dtype": torch.bfloat16}
LOW |= {"ddp": {"use_distributed_optimizer": True, "grad_reduce_in_fp32": False}}


def test_an_optimizer_of_low_precision_beside_plans_survival_and_caps():
    [(found, moved, ran)] = on_ranks(1, memory_features, {}, LOW, precision_aware, **PRECISIONS)
    assert not found and moved and ran == {0, 1}
    [(found, nbytes)] = on_ranks(1, with_less_memory, LOW, precision_aware, **PRECISIONS)
    assert not found and nbytes
    assert on_ranks(2, under_a_cap, LOW, precision_aware, **PRECISIONS) == [[], []]


# ---- Megatron's own offloading, in a pipeline with a cap


@contextlib.contextmanager
def offloading() -> Iterator[None]:
    """It asks TransformerEngine for nothing but to be told that it offloads."""
    import megatron.core.extensions.transformer_engine as extension
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

    class Told:
        CPUOffloadEnabled = False

    before, extension.cpu_offload = getattr(extension, "cpu_offload", None), Told
    try:
        yield
    finally:
        extension.cpu_offload, PipelineOffloadManager.OFFLOAD_MGR = before, None


def capped_beside_offloading(layout: dict, cap: int) -> tuple:
    """What differs with a cap; for each of three steps, how many calls Megatron's offloading has recorded."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

    from tests.capped_runs import capped
    from tests.models import build_gpt, build_optimizer, train_step
    from tests.swap_runs import difference

    modules = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"]
    own = {"fine_grained_activation_offloading": True, "offload_modules": modules, "min_offloaded_tensor_size": 0}

    def run() -> tuple[list, list[int]]:
        results, recorded = [], []
        with offloading(), parallel(**layout):
            chunks = build_gpt("swiglu_gqa_rope", **own)
            optimizer = build_optimizer(chunks)
            for step in range(3):
                results.append(train_step(chunks, optimizer=optimizer, step=step, micro_batches=6))
                recorded.append(len(PipelineOffloadManager.get_instance()._cached_chunks_forward))
        return results, recorded

    without, _ = run()
    with capped(cap):
        results, recorded = run()
    return [what for one, other in zip(results, without, strict=True) for what in difference(one, other)], recorded


FAILS_ALONE = pytest.mark.skipif(
    importlib.metadata.version("megatron-core").startswith("0.19."), reason="'Chunk mismatch' without a cap, too"
)


@pytest.mark.parametrize(
    ("layout", "cap"),
    [pytest.param({"pp": 2}, 1, id="pp2"), pytest.param({"pp": 2, "vpp": 2}, 2, id="pp2-vpp2", marks=FAILS_ALONE)],
)
def test_megatrons_offloading_in_a_capped_pipeline(layout, cap):
    for found, recorded in on_ranks(2, capped_beside_offloading, layout, cap):
        assert not found and len(set(recorded)) == 1, recorded


# ---- CUDA graphs


@contextlib.contextmanager
def graphed() -> Iterator[None]:
    """Layers built inside have stand-ins for the graphs that TransformerEngine makes: nobody sees what runs in them,
    and each writes what it returns where it always does, without raising the version."""
    from megatron.core.transformer import cuda_graphs
    from megatron.core.transformer.module import GraphableMegatronModule

    import tests.models
    from mindspeed_mem.activation import engine as engines

    class Captured(torch.autograd.Function):
        @staticmethod
        def forward(ctx, graph, hidden, *parameters):
            engine = engines.use(None)
            cuda_graphs._set_capture_start()
            unseen = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
            try:
                with torch.enable_grad(), unseen:
                    given = hidden.detach().requires_grad_()
                    outputs = graph.layer._te_cuda_graph_capture(given, attention_mask=None)
            finally:
                cuda_graphs._set_capture_end()
                engines.use(engine)
            ctx.ran = outputs, (given, *parameters)
            graph.written = graph.written or [torch.empty_like(output) for output in outputs]
            for place, output in zip(graph.written, outputs, strict=True):
                place.data.copy_(output.detach())
            return tuple(place.detach() for place in graph.written)

        @staticmethod
        def backward(ctx, *gradients):
            outputs, given = ctx.ran
            pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
            found = [o for o, _ in pairs], given, [g for _, g in pairs]
            return None, *torch.autograd.grad(*found, allow_unused=True)

    class Graph:
        def __init__(self, layer):
            self.layer, self.written = layer, None

        def __call__(self, hidden, **more):
            inside = self.layer._get_submodules_under_cudagraphs()
            return Captured.apply(self, hidden, *(p for module in inside for p in module.parameters()))

    build = tests.models.build_gpt

    def build_gpt(*args, **kwargs):
        chunks = build(*args, **kwargs)
        for layer in chunks[0].module.decoder.layers:
            layer.cuda_graphs = [Graph(layer)]
            arguments = GraphableMegatronModule._get_te_cuda_graph_replay_args  # its own asks TransformerEngine
            layer._get_te_cuda_graph_replay_args = functools.partial(arguments, layer)
        return chunks

    tests.models.build_gpt = build_gpt
    try:
        yield
    finally:
        tests.models.build_gpt = build


@pytest.mark.parametrize(
    ("kind", "scope", "captured"),
    [
        ("moe", ["attn", "moe_router"], ("input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp.router")),
        ("dense", ["attn"], ("input_layernorm", "self_attention", "self_attn_bda")),
        ("dense", ["mlp"], ("pre_mlp_layernorm", "mlp")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_what_graphs_capture_is_left_alone_and_the_rest_is_swapped(kind, scope, captured):
    model = {"kind": kind, "cuda_graph_impl": "transformer_engine", "cuda_graph_scope": scope}
    [(found, moved, _)] = on_ranks(1, memory_features, {}, model, graphed, recomputes=False)
    [(_, of_all, _)] = on_ranks(1, memory_features, {}, {"kind": kind}, recomputes=False)
    assert not found
    inside = {(layer, op) for layer, op in of_all if any(f"{op}.".startswith(f"{one}.") for one in captured)}
    assert moved and moved <= of_all - inside < of_all
