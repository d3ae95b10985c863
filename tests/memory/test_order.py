"""When copies start: by operator distance, across layers, and across micro-batches once the order is known."""

from __future__ import annotations

import pytest

from tests.worlds import on_ranks, parallel


def log_of_one_step(distance: int) -> list[str]:
    """Operators and copies of one micro-batch in the order they happen; copies by operator and direction."""
    from mindspeed_mem.device.cpu import CpuBackend
    from tests.models import build_gpt
    from tests.swap_runs import SDPA, entry, one_forward, op, patched, swap

    log: list[str] = []

    class Logged(CpuBackend):
        def copy(self, target, source, stream):
            log.append(stream.native_name)
            super().copy(target, source, stream)

        def new_stream(self, name):
            stream = super().new_stream(name)
            return _Named(stream, name)

    with patched(SDPA), parallel():
        plan = entry(op_swap=[op(r"mlp\.linear_fc1", distance, [1])])
        with swap(plan, Logged()) as engine:
            chunks = build_gpt("swiglu_gqa_rope")
            for number, layer in enumerate(chunks[0].module.decoder.layers):
                for name, module in layer.named_modules():
                    if name in ("self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2", "input_layernorm"):
                        module.register_forward_pre_hook(lambda *_, at=f"{number} {name}": log.append(f"F {at}"))
                        module.register_full_backward_pre_hook(lambda *_, at=f"{number} {name}": log.append(f"B {at}"))
            engine.passes.begin_schedule(())
            loss = one_forward(engine, chunks)
            engine.passes.begin_backward(loss)
            loss.sum().backward()
            engine.passes.end_backward()
    return log


class _Named:
    """A stream that knows its name for the log."""

    def __init__(self, stream, name):
        self.native, self.name, self.side, self.native_name = stream.native, name, True, name


@pytest.mark.distributed
def test_copies_start_as_soon_as_complete_and_as_late_as_the_distance_says():
    near, far = on_ranks(1, log_of_one_step, 1)[0], on_ranks(1, log_of_one_step, 12)[0]
    for log in (near, far):
        assert log.count("copy out") == log.count("copy in") == 1
        # fc1's output is known to be needed when the activation function saves it, which is before fc2
        assert log.index("F 1 mlp.linear_fc1") < log.index("copy out") < log.index("F 1 mlp.linear_fc2")
    # backward of the activation function uses it: one operator ahead is fc2 of the same layer
    assert near.index("B 2 input_layernorm") < near.index("B 1 mlp.linear_fc2") < near.index("copy in")
    # twelve operators ahead is in the attention of the next layer
    assert far.index("B 2 mlp.linear_fc1") < far.index("copy in") < far.index("B 1 mlp.linear_fc2")


def passes_of(order: str) -> list[tuple]:
    from mindspeed_mem.passes import BACKWARD, FORWARD

    return [(FORWARD if action[0] == "F" else BACKWARD, int(action[1:]), 0) for action in order.split()]


def bytes_back_when_backward_begins(orders: list[str], known: list[str | None]) -> tuple[list[list[int]], list[str]]:
    """For each step, the bytes copied back for a micro-batch by the time its backward begins; what was said.

    ``known``: the order that each step was said to have beforehand.
    """
    from tests.models import build_gpt
    from tests.swap_runs import SDPA, entry, listening, one_forward, patched, swap

    steps = []
    with (
        patched(SDPA),
        parallel(),
        listening() as said,
        swap(entry(layer_swap=[{"backward_prefetch": 6, "layers": True}])) as engine,
    ):
        chunks = build_gpt("dense", layers=2)
        for order, before in zip(orders, known, strict=True):
            losses, early, backwards, per_micro_batch = {}, [], 0, 0
            start = engine.mover.bytes_in
            engine.passes.begin_schedule(("a kind of step",), before and passes_of(before))
            for action in order.split():
                number = int(action[1:])
                if action[0] == "F":
                    losses[number] = one_forward(engine, chunks, number)
                    per_micro_batch = per_micro_batch or engine.mover.slabs.bytes_in_use  # after the first forward
                    continue
                early.append(engine.mover.bytes_in - start - backwards * per_micro_batch)
                loss = losses.pop(number)
                engine.passes.begin_backward(loss)
                loss.sum().backward()
                engine.passes.end_backward()
                backwards += 1
            engine.passes.end_schedule(True)
            steps.append(early)
    return steps, said


@pytest.mark.distributed
def test_prefetch_goes_on_to_the_micro_batch_whose_backward_comes_next():
    orders = ["F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1", "F0 B0 F1 B1"]
    [((first, second, changed, settled), _)] = on_ranks(1, bytes_back_when_backward_begins, orders, [None] * 4)
    assert first == [0, 0], "the first step shows the order"
    assert second[0] > 0, "while the forward before it ended"
    assert second[1] > 0, "while the backward before it ended"
    assert changed[1:] == [0], "another order than the one before is not trusted"
    assert settled == [0, 0], "a backward right after its own forward has nothing to come early"


@pytest.mark.distributed
def test_a_known_order_serves_the_first_step_and_is_checked():
    order = "F0 F1 B0 B1"
    [((first, wrong, after), said)] = on_ranks(
        1, bytes_back_when_backward_begins, [order, "F0 B0 F1 B1", order], [order, order, order]
    )
    assert first[0] > 0 and first[1] > 0
    assert wrong == [0, 0]
    assert after[1:] == [0], "what was recorded last counts"
    departures = [line for line in said if "left its known order" in line]
    assert departures == [
        "the schedule left its known order (pass 1 was the backward of micro-batch 0 on chunk 0 instead of the forward "
        "of micro-batch 1 on chunk 0): what runs next is taken from records"
    ]
