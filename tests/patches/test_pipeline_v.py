"""What a V refuses, what its two ends share, who gets its losses, and what happens when a pass fails or shapes
change."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest

from tests.worlds import on_ranks, parallel

pytestmark = pytest.mark.distributed


def refused(vpp: int | None, several_tokens: bool) -> str:
    from megatron.core.transformer import transformer_block

    from tests.models import build_gpt
    from tests.v_runs import in_a_v

    try:
        with in_a_v(pp=2, vpp=vpp):
            config = build_gpt("dense")[0].config
            config.mtp_num_layers = int(several_tokens)
            transformer_block.get_num_layers_to_build(config, vp_stage=0)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("vpp", "several_tokens", "words"),
    [
        (None, False, "needs two virtual stages, one on the way down and one back, but there are none"),
        (3, False, "but there are 3"),
        (2, True, "mtp_num_layers: not supported yet"),
    ],
    ids=["none", "three", "several tokens"],
)
def test_what_cannot_lie_in_a_v_is_refused_on_every_rank(vpp, several_tokens, words):
    for message in on_ranks(2, refused, vpp, several_tokens):
        assert "--pipeline-schedule v" in message and words in message


def ends() -> tuple[Any, ...]:
    """As Megatron makes them, before training: the weights of embedding and output layer, and the layers of chunks."""
    import tests.models as models
    from tests.v_runs import in_a_v

    fill, models.fill_by_name = models.fill_by_name, lambda model: None
    try:
        with in_a_v(pp=2):
            chunks = models.build_gpt("dense")
    finally:
        models.fill_by_name = fill
    parts = [chunk.module for chunk in chunks]
    layers = [[layer.layer_number for layer in part.decoder.layers] for part in parts]
    if not parts[0].pre_process:
        return layers, parts[-1].post_process
    return layers, parts[0].shared_embedding_or_output_weight(), parts[-1].shared_embedding_or_output_weight()


def test_the_first_rank_has_both_ends_and_tied_weights_begin_the_same():
    (first_layers, embedding, output), (last_layers, ends_there) = on_ranks(2, ends)
    assert (first_layers, last_layers) == ([[1], [4]], [[2], [3]]) and not ends_there
    assert embedding.abs().sum() > 0 and embedding.equal(output)


def called(chunks: list, length: int, fails_in: int | None = None) -> tuple[list, list]:
    """One training step on 4 micro-batches of this length, with a loss per token: losses and gradients by name.
    ``fails_in``: in this forward of this rank."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from tests.models import SEQUENCE, _texts, global_parameters

    seen: list = []

    def forward_step(batches, model):
        seen.append(model)
        if len(seen) == fails_in:
            raise ValueError("in a pass")
        text = next(batches)[:, : length + 1]
        positions = torch.arange(length).expand(1, -1)
        output = model(text[:, :-1].contiguous(), positions, None, labels=text[:, 1:].contiguous())

        def loss(output):
            mask = text[:, 1:] % 3 > 0
            total, count = (output.float() * mask).sum(), mask.sum().to(torch.int)
            return total, count, {"loss": total.detach().clone()}

        return output, loss

    assert length <= SEQUENCE
    for chunk in chunks:
        chunk.zero_grad_buffer()
    done = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(_texts(range(4), 1)) for _ in chunks],
        model=chunks,
        num_microbatches=4,
        seq_length=length,
        micro_batch_size=1,
    )
    grads = [(name, parameter.main_grad.clone()) for name, parameter in global_parameters(chunks)]
    return [float(one["loss"]) for one in done], grads


def lengths() -> list[str]:
    """What differs in any bit between 1F1B, zero bubble and a V, with sequences of another length in each step."""
    from tests.capped_runs import capped
    from tests.models import build_gpt
    from tests.v_runs import in_a_v, whole

    found, plain = [], []
    for name in ("1f1b", "zb", "v"):
        with contextlib.ExitStack() as stack:
            if name == "v":
                stack.enter_context(in_a_v(pp=2))
            else:
                stack.enter_context(parallel(pp=2))
                stack.enter_context(capped(None, name == "zb"))
            chunks = build_gpt("dense", calculate_per_token_loss=True)
            steps = [(losses, whole(grads)) for losses, grads in (called(chunks, length) for length in (32, 16, 24))]
        plain = plain or steps
        for step, ((losses, (grads, wrong)), of_plain) in enumerate(zip(steps, plain, strict=True)):
            losses_of_plain, (grads_of_plain, _) = of_plain
            found += [f"{name}: {one}" for one in wrong]
            found += [f"{name}, step {step}: losses"] if losses != losses_of_plain else []
            names = [one for one, grad in grads.items() if not grad.equal(grads_of_plain[one])]
            found += [f"{name}, step {step}: {one}" for one in names]
    return found


def test_shapes_that_change_and_losses_per_token():
    """Losses are on the last rank, and gradients divided by the tokens that the first one has counted."""
    assert on_ranks(2, lengths) == [[], []]


def one_fails() -> tuple[str, float, int]:
    """Rank 1 fails in its second forward: what each rank gets, after how long, and of how many passes gradients of
    weights are still put off."""
    import torch.distributed as dist

    from mindspeed_mem.schedule.weight_gradients import WEIGHT_GRADIENTS
    from tests.models import build_gpt
    from tests.v_runs import in_a_v

    with in_a_v(pp=2):
        chunks = build_gpt("dense")
        begin = time.monotonic()
        try:
            called(chunks, 32, fails_in=2 if dist.get_rank() else None)
        except Exception as error:
            seconds = time.monotonic() - begin
            dist.destroy_process_group()  # as when the process ends
            return f"{type(error).__name__}: {error}", seconds, WEIGHT_GRADIENTS.clear()
    return "", 0.0, 0


def test_an_exception_leaves_the_failing_rank_at_once():
    (other, _, of_first), (error, seconds, of_second) = on_ranks(2, one_fails)
    assert error == "ValueError: in a pass" and other
    assert of_first == of_second == 0
    assert seconds < 20


def swapped(plan: dict) -> list[str]:
    """What differs from a V without the engine, what is left over, and if nothing was freed."""
    from tests.swap_runs import left_over, swap
    from tests.v_runs import in_a_v, trained

    with in_a_v(pp=2):
        plain = trained("swiglu_gqa_rope", {}, 4)
        with swap(plan) as engine:
            ours = trained("swiglu_gqa_rope", {}, 4)
            report, left = engine.report(), left_over(engine)
    found = ["losses"] if ours[0] != plain[0] else []
    found += [name for (name, one), (_, other) in zip(ours[1], plain[1], strict=True) if not one.equal(other)]
    found += [f"left over {left}"] if any(left.values()) else []
    return found + ([] if report.peak_bytes < report.peak_bytes_without else ["freed nothing"])


@pytest.mark.parametrize("name", ["swap", pytest.param("pp_aware", marks=pytest.mark.sweep), "recompute"])
def test_with_swap_and_recompute(name):
    from tests.swap_runs import EVERYTHING, again, entry

    plans = {
        "swap": EVERYTHING,
        "pp_aware": entry(layer_swap=[{"backward_prefetch": 1, "layers": True}], pp_aware=True),
        "recompute": again(recompute=True),
    }
    assert sum(on_ranks(2, swapped, plans[name]), []) == []
