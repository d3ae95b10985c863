"""Which activations leave when memory runs out, in which order, and which do not."""

from __future__ import annotations

import pytest

from tests.worlds import on_ranks, parallel

pytestmark = pytest.mark.distributed


def forwards(engine, chunks, order) -> list:
    """Losses of the micro-batches that ``order`` runs forward before its first backward."""
    from tests.swap_runs import one_forward

    engine.passes.begin_schedule(("test", len(order)), order)
    losses = []
    for direction, micro_batch, _ in order:
        if direction != "F":
            return losses
        with engine.survival.holding_all():
            losses.append(one_forward(engine, chunks, micro_batch))


def order_of_victims() -> list[tuple[int, list[int]]]:
    """Micro-batches in the order in which they leave, each with the operators' numbers."""
    from tests.limited_runs import surviving
    from tests.models import build_gpt

    left = []
    order = [("F", 0, 0), ("F", 1, 0), ("F", 2, 0), ("B", 0, 0), ("B", 1, 0), ("B", 2, 0)]
    with surviving() as engine, parallel():
        losses = forwards(engine, build_gpt("dense", layers=3), order)
        release = engine.mover.release

        def noted(record):
            left.append((record.micro_batch.key[0], record.last_use))
            return release(record)

        engine.mover.release = noted
        while engine.mover.make_room(1, set()):
            pass
        engine.passes.end_schedule(False)
        del losses
    found: list[tuple[int, list[int]]] = []
    for micro_batch, number in left:
        if not found or found[-1][0] != micro_batch:
            found.append((micro_batch, []))
        found[-1][1].append(number)
    return found


def test_what_backward_needs_last_leaves_first():
    [found] = on_ranks(1, order_of_victims)
    assert [micro_batch for micro_batch, _ in found] == [2, 1, 0]
    for _, numbers in found:
        assert len(numbers) > 20 and numbers == sorted(numbers)


def what_stays() -> dict[str, bool]:
    import torch

    from tests.limited_runs import surviving
    from tests.models import build_gpt

    kept = []

    def keep(module, args):
        kept.append(args[0])  # somebody else's reference

    with surviving() as engine, parallel():
        chunks = build_gpt("dense", layers=3)
        layer = chunks[0].module.decoder.layers[1]
        layer.mlp.linear_fc2.register_forward_pre_hook(keep)
        pointers = {p.data_ptr() for p in chunks[0].parameters()}
        losses = forwards(engine, chunks, [("F", 0, 0), ("B", 0, 0)])
        mover = engine.mover
        candidates = [r for r in mover.known if r.storage() is not None and r.nbytes >= 1024]
        pinned = next(r for r in candidates if mover._turn(r.micro_batch) >= 0 and r.layer == 2 and r.state == "kept")
        name = pinned.storage()._cdata
        while mover.make_room(1 << 40, {name}):
            pass
        nbytes = kept[0].untyped_storage().nbytes()
        kept.clear()
        freed = mover.make_room(1 << 40, {name})
        on_device = mover.on_device()
        found = {
            "pinned stays": pinned.state == "kept",
            "held elsewhere stays until it is let go": freed == nbytes == 32 * 256 * 4,
            "parameters stay": {p.data_ptr() for p in chunks[0].parameters()} == pointers,
            "little is left": on_device.total() < 200_000,
        }
        engine.passes.begin_backward(losses[0])
        losses[0].sum().backward()
        engine.passes.end_backward()
        found["all gradients"] = all(torch.isfinite(p.main_grad).all() for p in chunks[0].parameters())
        engine.passes.end_schedule(False)
    return found


def test_what_is_in_use_stays():
    [found] = on_ranks(1, what_stays)
    assert all(found.values()), found
