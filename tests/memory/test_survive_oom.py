"""--survive-oom: steps come through with a fraction of the memory they need, and compute the same bits.

Memory is really limited: torch's own out-of-memory error is raised inside operators (`LimitedMemory`).
"""

from __future__ import annotations

import itertools
import time

import pytest

from tests.guarding import settled
from tests.sweeping import apart
from tests.worlds import on_ranks, parallel

SHARES = (0.9, 0.5, 0.3, 0.2)  # of what a step needs beyond parameters, gradients and optimizer
LAYERS = 6
pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("limited_memory")]


def reference(memory, kind: str, steps: int, micro_batches: int = 2, **model) -> tuple[list, int]:
    """What a model computes in some steps without limit and without us, and the most bytes its last step needed."""
    from tests.limited_runs import Training

    with parallel():
        training = Training(memory, kind, micro_batches, **model)
        return [training.step() for _ in range(steps)], training.peak


def nothing_left(engine, memory, before: int) -> list[str]:
    for _ in range(100):  # gloo's threads take their time
        left = settled(memory) - before
        if not left:
            break
        time.sleep(0.05)
    figures = {
        "host": engine.mover.slabs.bytes_in_use,
        "device": left,
        "known": len(engine.mover.known),
    }
    return [f"{name}: {number}" for name, number in figures.items() if number]


def under_limits(kind: str, shares: tuple, plan: dict | None = None, **model) -> list[str]:
    from tests.limited_runs import Training, counted, different, surviving
    from tests.swap_runs import listening

    found = []
    with counted() as memory, listening() as messages:
        expected, peak = reference(memory, kind, steps=3, **model)
        for share in shares:
            with surviving(plan) as engine, parallel():
                training = Training(memory, kind, **model)
                training.step()  # the optimizer's states stay
                before = settled(memory)
                for number in (1, 2):
                    result = training.step(above=int(share * peak))
                    found += [f"{share}, step {number}: {name}" for name in different(result, expected[number])]
                    if training.peak > training.room:
                        found.append(f"{share}, step {number}: {training.peak} of {peak} bytes")
                found += [f"{share}: {left}" for left in nothing_left(engine, memory, before)]
                if not engine.survival.guard.retries and not engine.mover.bytes_out and plan is None:
                    found.append(f"{share}: nothing was rescued")
    return found + [message for message in messages if "tried again" in message]


@pytest.mark.parametrize(
    "kind", apart(["dense", "swiglu_gqa_rope", "moe", "dropout"], "swiglu_gqa_rope", "dropout", python=["dense"])
)
def test_with_less_and_less_memory_every_bit_is_the_same(kind):
    assert on_ranks(1, under_limits, kind, SHARES, layers=LAYERS) == [[]]


def in_pieces(setting: str | None, scarce: bool = False) -> tuple[list[str], int]:
    """What is said beside an allocator that retries once in each step, or, if memory is ``scarce``, for each request
    that fails; ``setting``: what would help. And how many requests failed."""
    from tests.limited_runs import Training, counted, surviving
    from tests.swap_runs import listening

    retries = itertools.count()
    with counted() as memory, listening() as messages:
        peak = reference(memory, "dense", steps=2, layers=LAYERS)[1]
        with surviving(None) as engine, parallel(), pytest.MonkeyPatch.context() as patch:
            if scarce:
                is_out, failed = engine.backend.is_out_of_memory, []

                def noted(error):
                    if is_out(error) and all(error is not other for other in failed):
                        failed.append(error)
                    return is_out(error)

                patch.setattr(engine.backend, "is_out_of_memory", noted)
                patch.setattr(engine.backend, "room", lambda: None)  # or it would be made before a request fails
            patch.setattr(engine.backend, "allocation_retries", (lambda: len(failed)) if scarce else retries.__next__)
            patch.setattr(engine.backend, "against_pieces", lambda: setting)
            training = Training(memory, "dense", layers=LAYERS)
            training.step()  # the optimizer's states stay
            for _ in range(4):
                training.step(above=peak // 2 if scarce else None)
            failures = len(failed) if scarce else 0
    return [message for message in messages if "in pieces" in message], failures


def test_memory_in_pieces_is_told_once_with_what_helps():
    [(said, _)] = on_ranks(1, in_pieces, "VARIABLE=segments")
    assert len(said) == 1 and "VARIABLE=segments" in said[0]
    assert on_ranks(1, in_pieces, None) == [([], 0)]
    [(said, failures)] = on_ranks(1, in_pieces, "VARIABLE=segments", scarce=True)
    assert not said and failures


SWAPS = {"swap_config": {"swap": True, "op_swap": [{"op_name": "mlp", "backward_prefetch": 2, "layers": True}]}}
RECOMPUTES = {
    "swap_config": {"swap": True, "op_swap": []},
    "recompute_config": {"recompute": [1, 2], "select_recompute": {"mlp": [3], r"mlp\.activation_func": [4]}},
}
BOTH = {
    "swap_config": {**SWAPS["swap_config"], "swap_recompute_inputs": True},
    "recompute_config": {"recompute": [1, 2], "select_recompute": {r"mlp\.activation_func": True}},
}


@pytest.mark.parametrize(
    "plan", apart([SWAPS, RECOMPUTES, BOTH], python=[RECOMPUTES], native=[SWAPS]), ids=["swap", "recompute", "both"]
)
def test_beside_a_memory_plan(plan):
    assert on_ranks(1, under_limits, "dropout", (0.5, 0.3, 0.2), plan, layers=5) == [[]]


def many_steps(steps: int) -> list[str]:
    from tests.limited_runs import Training, counted, surviving

    model = {"micro_batches": 1, "layers": 4}
    with counted() as memory:
        _, peak = reference(memory, "dropout", steps=2, **model)
        with surviving() as engine, parallel():
            training = Training(memory, "dropout", **model)
            figures = []
            for _ in range(steps):
                training.step(above=int(0.35 * peak) if figures else None)
                slabs = engine.mover.slabs
                figures.append((memory.allocated, slabs.bytes_held, slabs.allocations, engine.mover.evictions))
            after, last = figures[steps // 10], figures[-1]
            found = [] if last[3] > steps else [f"only {last[3]} activations were moved"]
            if after[:3] != last[:3]:
                found.append(f"device bytes, host bytes, host allocations: {after[:3]} have become {last[:3]}")
            return found


def test_many_steps_under_pressure_grow_nothing():
    assert on_ranks(1, many_steps, 30) == [[]]


def flushes(kind: str, share: float, steps: int) -> list[int]:
    """How many allocations fail in each step under a limit, after a first step without: each costs a flush of what an
    accelerator's allocator keeps."""
    from tests.limited_runs import Training, counted, surviving

    with counted() as memory:
        _, peak = reference(memory, kind, steps=2, layers=4)
        with surviving() as engine, parallel():
            training = Training(memory, kind, layers=4)
            training.step()
            found = []
            for _ in range(steps):
                before = memory.refused
                training.step(above=int(share * peak))
                found.append(memory.refused - before)
            assert engine.mover.evictions > steps
            return found


@pytest.mark.parametrize("kind", ["dropout", "moe"])
@pytest.mark.parametrize("share", [0.9, 0.4])
def test_what_is_known_to_be_needed_does_not_fail(kind, share):
    [found] = on_ranks(1, flushes, kind, share, 3)
    assert max(found[1:]) <= 1, found


def one_rank_lacks(layout: dict, share: float, micro_batches: int) -> tuple[list[str], int]:
    """Rank 1 alone has little memory."""
    import torch.distributed as dist

    from tests.limited_runs import Training, counted, different, surviving

    model = {"micro_batches": micro_batches, "layers": 4}
    found = []
    with counted() as memory:
        with parallel(**layout):
            training = Training(memory, "swiglu_gqa_rope", **model)
            expected = [training.step() for _ in range(3)]
            peak = training.peak
        del training
        with surviving() as engine, parallel(**layout):
            training = Training(memory, "swiglu_gqa_rope", **model)
            training.step()
            before = settled(memory)
            for number in (1, 2):
                result = training.step(above=int(share * peak) if dist.get_rank() == 1 else None)
                found += [f"step {number}: {name}" for name in different(result, expected[number])]
            return found + nothing_left(engine, memory, before), engine.survival.guard.lacks


@pytest.mark.parametrize(
    ("layout", "share", "micro_batches"),
    [({"tp": 2}, 0.3, 2), ({"pp": 2}, 0.4, 4), ({"pp": 2, "vpp": 2}, 0.4, 4), ({}, 0.3, 2)],
    ids=["tensor", "pipeline", "virtual stages", "data"],
)
def test_one_rank_alone_lacks_memory(layout, share, micro_batches):
    (others, rescued_there), (mine, rescued) = on_ranks(2, one_rank_lacks, layout, share, micro_batches, timeout=60)
    assert others == mine == []
    assert rescued_there == 0 < rescued


def grows(what: str, share: float) -> tuple[list[str], int]:
    """After steps that had ample memory, one with more samples, micro-batches or tokens than ever."""
    from mindspeed_mem.ranks import gather
    from tests.limited_runs import Training, counted, different, surviving

    def run(memory, above=None):
        of_any_length = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
        training, found = Training(memory, "swiglu_gqa_rope", micro_batches=4, layers=4, **of_any_length), []
        for number in (8, 8, 8, 32) if what == "tokens" else (1, 1, 1, 4):
            setattr(training, what, number)
            found.append(training.step(above))
        return found, training.peak

    with counted() as memory, parallel(pp=2):
        expected, peak = run(memory)
        with surviving() as engine:
            found, _ = run(memory, int(share * max(gather(peak))))
        return [name for one, other in zip(found, expected, strict=True) for name in different(one, other)], (
            engine.survival.guard.lacks
        )


@pytest.mark.parametrize(("what", "share"), [("samples", 0.6), ("micro_batches", 0.85), ("tokens", 0.75)])
def test_larger_micro_batches_and_more_than_ever_are_guarded(what, share):
    """Stages cannot try a step again, and hold several at once. Schedules are not told how many tokens there are."""
    (first, lacks), (last, _) = on_ranks(2, grows, what, share, timeout=60)
    assert first == last == [] and lacks


def too_small(host_limit: int | None, share: float) -> tuple[str, str, list[str]]:
    """A step that cannot be rescued, and one after it that has room again."""
    from tests.limited_runs import Training, counted, different, surviving

    with counted() as memory:
        expected, peak = reference(memory, "dense", steps=2, layers=LAYERS)
        with surviving(host_limit=host_limit) as engine, parallel():
            training = Training(memory, "dense", layers=LAYERS)
            found = different(training.step(), expected[0])
            before = settled(memory)
            try:
                training.step(above=int(share * peak))
            except Exception as error:
                name, text = type(error).__name__, str(error)
                error.__traceback__ = error.__cause__ = error.__context__ = None
            found += nothing_left(engine, memory, before)
            training.number -= 1
            return name, text, found + different(training.step(), expected[1])


@pytest.mark.parametrize(("host_limit", "share"), [(None, 0.02), (100_000, 0.3)], ids=["device", "host"])
def test_what_cannot_be_rescued_says_what_it_needs_and_leaves_a_process_to_go_on_with(host_limit, share):
    [(name, text, found)] = on_ranks(1, too_small, host_limit, share)
    assert name == "NoRoomError"
    assert "bytes of device memory are needed in aten." in text
    assert "in use: " in text and "try: " in text and "--micro-batch-size" in text
    if host_limit is not None:
        assert "budget 100000 bytes: it is full" in text and "--swap-host-memory-gib" in text
        assert "bytes; " in text.split("largest activations on the device: ")[1]
    assert found == []


def unseen(
    layout: dict | None = None, accumulate: bool = False, kind: str = "dropout", inside: str = "", **model
) -> tuple[list[str], list[str], str]:
    """On the last rank, layer 5 or a module inside of it asks for memory where no operator is: only a second attempt
    can help.

    Returns what differs, the warnings and the error.
    """
    import gc

    import torch
    import torch.distributed as dist

    from tests.limited_runs import Training, counted, surviving
    from tests.swap_runs import listening

    layout = layout or {}

    def train(engine=None, limit=None, nbytes=0) -> tuple[list, int, str]:
        training, results, error = Training(memory, kind, layers=LAYERS, **model), [], ""
        results.append(training.step())
        if limit is not None:
            layer = training.chunks[0].module.decoder.layers[5]
            layer.get_submodule(inside).register_forward_hook(
                lambda *_: torch.empty(0).untyped_storage().resize_(nbytes) and None
            )
        training.zero = not accumulate
        before = settled(memory)
        try:
            results += [training.step(above=limit) for _ in range(2)]
        except RuntimeError as caught:
            error = f"{type(caught).__name__}: {caught}"
            caught.__traceback__ = caught.__cause__ = caught.__context__ = None
        else:
            results.append(nothing_left(engine, memory, before) if engine else [])
        return results, training.peak, error

    with counted() as memory, listening() as messages:
        with parallel(**layout):
            expected, peak, _ = train()
        with surviving() as engine, parallel(**layout):
            last = dist.get_rank() == dist.get_world_size() - 1
            results, _, error = train(engine, int(0.6 * peak) if last else None, int(0.3 * peak))
    if error:
        del engine
        gc.collect()
        dist.destroy_process_group()  # as at the end of a process: the others notice
    return _differences(results, expected), messages, error


def _differences(results: list, expected: list) -> list[str]:
    from tests.limited_runs import different

    found = [name for one, other in zip(results[:3], expected[:3], strict=False) for name in different(one, other)]
    return found + [left for lefts in results[3:] for left in lefts]


@pytest.mark.parametrize("layout", [None, {}], ids=["one rank", "data parallel"])
def test_what_no_operator_asked_for_is_had_in_a_second_attempt_at_the_step(layout):
    ranks = on_ranks(1 if layout is None else 2, unseen, layout, timeout=60)
    for found, _, error in ranks:
        assert (found, error) == ([], "")
    warnings = [message for message in ranks[-1][1] if "tried again with all activations swapped" in message]
    assert len(warnings) == 2


@pytest.mark.sweep
def test_a_second_attempt_after_shared_experts_that_were_left_half_way():
    """From 0.18 on they know which of their calls is next, and take no other."""
    shared = {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_overlap": True}
    given = {"kind": "moe", "inside": "mlp.shared_experts.linear_fc1", **shared}
    [(found, messages, error)] = on_ranks(1, unseen, timeout=60, **given)
    assert (found, error) == ([], "")
    assert sum("tried again with all activations swapped" in message for message in messages) == 2


def logged(fails: bool) -> tuple[list, list[str]]:
    """After each of two steps, in each of which the second micro-batch ``fails`` once: what Megatron has added up for
    its log and to judge results by. And what was said."""
    import functools

    import torch
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine, get_rerun_state_machine
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    from tests.limited_runs import Training, counted, surviving
    from tests.models import expert_losses
    from tests.swap_runs import listening

    judge = get_rerun_state_machine()

    class Judged(Training):
        def forward(self, batches, model):
            output, loss = super().forward(batches, model)
            large = functools.partial(judge.is_unexpectedly_large, threshold=10, context="loss")
            judge.validate_result(output.mean(), large, "a loss", fatal=False)
            return output, loss

    calls, found = itertools.count(), []

    def fail(*unused):
        if fails and next(calls) in (1, 5):
            raise torch.OutOfMemoryError("out of memory")

    with counted() as memory, listening() as messages, surviving(), parallel():
        MTPLossLoggingHelper.tracker.clear()
        training = Judged(memory, "moe", layers=2, mtp_num_layers=1)
        training.chunks[0].module.mtp.layers[0].register_forward_hook(fail)
        for _ in range(2):
            training.step()
            sums = [one["values"] if isinstance(one, dict) else one.values for one in expert_losses().values()]
            sums += [one for one in MTPLossLoggingHelper.tracker.values() if isinstance(one, torch.Tensor)]
            found.append([values.tolist() for values in sums])
            found.append([dict(judge.large_value_counts), dict(judge.max_values)])
        MTPLossLoggingHelper.tracker.clear()
        destroy_rerun_state_machine()
    return found, messages


def test_a_second_attempt_adds_nothing_up_twice():
    [(found, messages)], [(expected, _)] = (on_ranks(1, logged, fails) for fails in (True, False))
    assert sum("tried again with all activations swapped" in message for message in messages) == 2
    assert found == expected and expected[-1][0] == {"loss": 4}


def test_no_second_attempt_on_top_of_earlier_gradients():
    [(_, messages, error)] = on_ranks(1, unseen, None, True)
    assert error.startswith("NoRoomError") and "gradients of an earlier call were in the buffers" in error
    assert not any("tried again with" in message for message in messages)


def test_no_second_attempt_where_others_take_part_and_all_are_told():
    (_, _, told), (_, _, mine) = on_ranks(2, unseen, {"tp": 2}, timeout=60)
    assert "the step was not tried again: other ranks compute the same micro-batches" in mine
    assert "rank 1 ran out of device memory" in told


def with_nothing_on_the_device(plan: dict | None) -> tuple[list[str], tuple[int, int]]:
    """All that may leave does so before every operator, three steps long."""
    from mindspeed_mem.device import op_guard, op_rules
    from tests.limited_runs import Training, counted, different, surviving

    class EvictsAll(op_guard.OpGuard):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            self._make_room(1 << 40, op_rules.storages(args, kwargs or {}))
            return super().__torch_dispatch__(op, types, args, kwargs)

    with counted() as memory:
        with parallel():
            training = Training(memory, "dropout", layers=2)
            expected = [training.step() for _ in range(3)]
        with surviving(plan) as engine, parallel():
            engine.survival.guard = EvictsAll(engine.backend, engine.survival.make_room, engine.survival.no_room)
            engine.survival.policy.ends(lacked=True)  # it is on from the first step
            training = Training(memory, "dropout", layers=2)
            found = [name for one in expected for name in different(training.step(above=1 << 40), one)]
            left = engine.mover.slabs.bytes_in_use, len(engine.mover.known)
    return found, left


LAYERS_AGAIN = {"swap_config": {"swap": True, "op_swap": []}, "recompute_config": {"recompute": True}}
SOME_AGAIN = {
    "swap_config": SWAPS["swap_config"],
    "recompute_config": {"recompute": [0], "select_recompute": {r"mlp\.activation_func": [1], "input_layernorm": [1]}},
}


@pytest.mark.parametrize("plan", [None, LAYERS_AGAIN, SOME_AGAIN], ids=["none", "layers again", "swap, some again"])
def test_everything_may_leave_before_every_operator(plan):
    assert on_ranks(1, with_nothing_on_the_device, plan) == [([], (0, 0))]


def recomputed_under_limits() -> tuple[list[int], list]:
    """Bytes that recompute of fused operators drops in steps under limits; what it was switched off for."""
    from tests.limited_runs import Training, counted, surviving

    plan = {"select_recompute": {r"mlp\.activation_func": True, r"self_attention\.rotary_pos_emb": True}}
    dropped = []
    with counted() as memory, surviving({"swap_config": {"swap": False}, "recompute_config": plan}) as engine:
        with parallel():
            fused = {"bias_activation_fusion": True, "bias_dropout_fusion": True, "ffn_hidden_size": 512}
            training = Training(memory, "swiglu_gqa_rope", 2, layers=12, heads=2, **fused)
            training.step()
            need = training.peak
            for share in (1.5, 0.9, 0.7, 0.55, 0.4, 0.25, 1.5):
                before = engine.mover.dropped.total()
                training.step(int(need * share))
                dropped.append(engine.mover.dropped.total() - before)
            evictions = engine.mover.evictions
        return dropped, [evictions, *engine.second_runs._kept]


def test_room_made_for_fused_operators_does_not_stop_their_recompute():
    [(dropped, (evictions, *stopped))] = on_ranks(1, recomputed_under_limits)
    assert len(set(dropped)) == 1 and dropped[0] and evictions and stopped == []
