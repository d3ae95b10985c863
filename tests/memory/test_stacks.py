"""Which models a plan reaches: those built later and deeper, hybrid ones, and none built too early, which is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.swap_runs import EVERYTHING, again, entry
from tests.worlds import on_ranks

pytestmark = pytest.mark.distributed


def built_too_early(plan: dict[str, Any]) -> tuple[list[str], int]:
    """What two training steps say of a model that was there before the engine, and the bytes they move."""
    from tests.models import build_gpt, train_step
    from tests.swap_runs import listening, swap
    from tests.worlds import parallel

    with parallel():
        chunks = build_gpt("dense", layers=2)
        with swap(plan) as engine, listening() as said:
            for step in range(2):
                train_step(chunks, step=step)
            return said, engine.report().bytes_out


@pytest.mark.parametrize(
    "plan",
    [EVERYTHING, entry(layer_swap={"layers": [1], "backward_prefetch": 1}), again(recompute=True), again(["mlp"])],
    ids=["swap", "swap of a layer", "recompute", "select recompute"],
)
def test_a_plan_that_finds_no_layers_says_so_once(plan):
    [(said, moved)] = on_ranks(1, built_too_early, plan)
    assert moved == 0 and len(said) == 1
    assert "configured after the model was built" in said[0] and "no TransformerBlock or MambaStack" in said[0]


def moved_by(depths: tuple[int, ...], scheduled: bool) -> list[int]:
    """Bytes that a training step of each model moves; all of them stay alive."""
    from tests.models import build_gpt, train_step
    from tests.swap_runs import one_forward, swap
    from tests.worlds import parallel

    moved, models = [0], []
    with parallel(), swap(EVERYTHING) as engine:
        for depth in depths:
            models.append(build_gpt("dense", layers=depth))
            if scheduled:
                train_step(models[-1], micro_batches=1)
            else:
                one_forward(engine, models[-1]).mean().backward()
            moved.append(engine.report().bytes_out)
    return [later - earlier for earlier, later in zip(moved, moved[1:], strict=False)]


@pytest.mark.parametrize("scheduled", [True, False])
def test_a_deeper_model_built_later_is_moved_as_a_whole(scheduled):
    [[two, four]] = on_ranks(1, moved_by, (2, 4), scheduled)
    [[four_alone]] = on_ranks(1, moved_by, (4,), scheduled)
    assert four == four_alone > 1.5 * two


def static_of_both() -> list[bool]:
    from mindspeed_mem.activation.storage import marks
    from tests.models import build_gpt, train_step
    from tests.swap_runs import swap
    from tests.worlds import parallel

    models = []
    with parallel(), swap(EVERYTHING):
        for _ in range(2):
            models.append(build_gpt("dense", layers=1))
            train_step(models[-1], micro_batches=1)
        return [marks.is_static(p.untyped_storage()) for chunks in models for p in chunks[0].parameters()]


def test_parameters_of_a_later_model_stay_too():
    [found] = on_ranks(1, static_of_both)
    assert len(found) > 10 and all(found)


def hybrid_model(hidden: int = 32, pattern: str = "M*-M") -> torch.nn.Module:
    """State-space, attention and MLP layers."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from tests.peers.hybrid_layers import stack

    config = TransformerConfig(
        num_layers=len(pattern),
        hidden_size=hidden,
        num_attention_heads=2,
        hidden_dropout=0.1,
        is_hybrid_model=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
    )
    try:
        from megatron.core.models.hybrid.hybrid_model import HybridModel
    except ImportError:  # before 0.18
        from megatron.core.models.mamba import MambaModel

        return MambaModel(config, stack, 256, 32, hybrid_override_pattern=pattern)
    return HybridModel(config, stack, 256, 32, hybrid_layer_pattern=pattern)


def hybrid(plan: dict[str, Any] | None) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Gradients of a hybrid model, and the engine's report."""
    import contextlib

    from tests.swap_runs import one_forward, swap
    from tests.worlds import parallel

    with parallel(), contextlib.nullcontext() if plan is None else swap(plan) as engine:
        model = hybrid_model()
        if engine is None:
            text, positions = torch.arange(33).expand(1, -1), torch.arange(32).expand(1, -1)
            loss = model(text[:, :-1].contiguous(), positions, None, labels=text[:, 1:].contiguous())
        else:
            loss = one_forward(engine, [model])
        loss.mean().backward()
        return [p.grad for p in model.parameters()], None if engine is None else engine.report()


@pytest.mark.parametrize(
    ("plan", "figure"),
    [
        (EVERYTHING, "bytes_out"),
        (again(recompute=True), "recomputed_bytes"),
        (again({"mixer": [0, 3], r"mlp\.linear_fc1": [2]}, {"swap": True}), "recomputed_bytes"),
    ],
    ids=["swap", "recompute", "select recompute"],
)
def test_hybrid_models(plan, figure):
    [(without, _)] = on_ranks(1, hybrid, None)
    [(found, report)] = on_ranks(1, hybrid, plan)
    assert all(map(torch.equal, found, without)) and getattr(report, figure) > 0


def encoder_and_decoder(
    plan: dict[str, Any] | None, scheduled: bool = True
) -> tuple[list[torch.Tensor], list[tuple[int, bool]], list[str]]:
    """Gradients of a T5; the layers that moved or ran again, with whether they look at the encoder; what was said."""
    import contextlib

    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.models.T5.t5_spec import (
        get_t5_decoder_with_local_block_spec,
        get_t5_encoder_with_local_block_spec,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    from tests.swap_runs import listening, swap
    from tests.worlds import parallel

    sizes = {"hidden_size": 32, "num_attention_heads": 2, "hidden_dropout": 0.1, "gradient_accumulation_fusion": False}
    encoder, decoder = (TransformerConfig(num_layers=n, masked_softmax_fusion=False, **sizes) for n in (2, 3))
    with parallel(), listening() as said, contextlib.nullcontext() if plan is None else swap(plan) as engine:
        specs = get_t5_encoder_with_local_block_spec(2), get_t5_decoder_with_local_block_spec(3)
        for spec in specs:
            spec.layer_norm = WrappedTorchNorm
        model = T5Model(decoder, encoder, *specs, vocab_size=64, max_sequence_length=16)

        def forward_step(batches, model):
            text, allowed = torch.arange(32).view(2, 16), torch.zeros(2, 1, 16, 16, dtype=torch.bool)
            return model(text, text, allowed, allowed, allowed, lm_labels=text), lambda out: (out.mean(), {})

        if scheduled:
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=None,
                model=model,
                num_microbatches=2,
                seq_length=16,
                micro_batch_size=2,
            )
        else:
            forward_step(None, model)[0].mean().backward()
        report = None if engine is None else engine.report()
        rows = () if report is None else report.moved_by_operator + report.recomputed_by_operator
        touched = sorted({(row.layer, "cross" in row.op) for row in rows if row.bytes})
        return [p.grad for p in model.parameters()], touched, said


@pytest.mark.parametrize(
    ("plan", "layers"),
    [
        (again(None, {"swap": True, "layer_swap": {"layers": [0, 4], "backward_prefetch": 1}}), {0, 4}),
        (
            again(recompute=[2], swap_config={"swap": True, "layer_swap": {"layers": [1], "backward_prefetch": 1}}),
            {1, 2},
        ),
        (EVERYTHING, {0, 1, 2, 3, 4}),
        (again(recompute=["encoder:0"]), {0}),
        (
            again(
                {"mlp": ["decoder:0,2"]},
                {"swap": True, "layer_swap": {"layers": ["encoder:all"], "backward_prefetch": 1}},
            ),
            {0, 1, 2, 4},
        ),
    ],
    ids=["swap", "recompute", "all", "a layer by name", "several by name"],
)
@pytest.mark.parametrize("scheduled", [True, False], ids=["megatron's schedule", "a loop of one's own"])
def test_a_decoders_layers_count_on_from_the_encoders(plan, layers, scheduled):
    [(without, _, _)] = on_ranks(1, encoder_and_decoder, None, scheduled)
    [(found, touched, said)] = on_ranks(1, encoder_and_decoder, plan, scheduled)
    assert all(map(torch.equal, found, without))
    assert {layer for layer, _ in touched} == layers
    assert all(layer > 1 for layer, crosses in touched if crosses)
    assert [line for line in said if "pinned" in line or "no effect" in line] == []


def refused(scheduled: bool) -> str:
    from mindspeed_mem.plan import MemoryConfigError

    swapped = {"swap": True, "layer_swap": {"layers": ["decoder:3"], "backward_prefetch": 1}}
    plan = again(recompute=["encodr:0", 9], swap_config=swapped)
    try:
        encoder_and_decoder(plan, scheduled)
    except MemoryConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("scheduled", [True, False])
def test_names_that_no_stack_has_are_refused_with_all_else(scheduled):
    [said] = on_ranks(1, refused, scheduled)
    assert "3 problems" in said
    assert "'encodr'; did you mean 'encoder'? allowed: encoder (layers 0-1), decoder (layers 0-2)" in said
    assert "layer_swap.layers: got layer 3 of decoder; allowed: 0 to 2, since decoder has 3 layers" in said
    assert "got layer 9; allowed: 0 to 4, since the model has 5 layers" in said
