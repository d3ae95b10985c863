"""Attached plain models survive a lack of device memory, with every bit the same."""

import copy
import gc

import pytest
import torch

import mindspeed_mem
from tests.attachment.plain_models import MIXED, PARTS, TEXT, Net, loss_of, same
from tests.limited_runs import counted
from tests.worlds import on_ranks

USUAL = TEXT.repeat(8, 8)


def step(attached, memory, above=None, text=USUAL):
    """Peak above what is there, loss and gradients of a step that may allocate so much."""
    model = attached.model
    model.zero_grad()
    gc.collect()
    before = memory.allocated
    memory.reset_peak()
    memory.limit = None if above is None else before + above
    torch.manual_seed(4)
    try:
        with attached.step():
            loss = loss_of(model, text)
            loss.backward()
    finally:
        memory.limit = None
    return memory.peak - before, [loss.detach().clone(), *(one.grad.clone() for one in model.parameters())]


@pytest.mark.parametrize("plan", [None, MIXED], ids=["no plan", "a plan"])
def test_half_of_the_memory_is_enough(plan, limited_memory):
    model = Net(4, 64)
    with counted() as memory:
        with mindspeed_mem.attach(model, None) as attached:
            peak, expected = step(attached, memory)
        with mindspeed_mem.attach(model, plan, survive=True) as attached:
            assert same(step(attached, memory)[1], expected)
            for _ in range(2):
                used, found = step(attached, memory, peak // 2)
                assert same(found, expected) and used <= peak // 2
            assert attached.engine.mover.evicted_bytes


def test_the_first_step_copies_few_of_the_tensors_that_functions_name(limited_memory):
    """Nobody is known to write to them."""
    data = [torch.zeros(1 << 20) for _ in range(9)]

    class Act(torch.nn.GELU):
        def forward(self, x):
            return super().forward(x) * len(data)

    model = Net(2, 16)
    for block in model.blocks:
        block.act = Act()
    with counted() as memory, mindspeed_mem.attach(model, PARTS) as attached:
        first, later = step(attached, memory)[0], step(attached, memory)[0]
        assert attached.engine.report().recomputed_bytes
    assert first - later < 6 * data[0].nbytes


def test_larger_inputs_than_ever_are_survived(limited_memory):
    """Steps before them had ample memory, so they were not guarded."""
    model = Net(4, 64)
    with counted() as memory:
        with mindspeed_mem.attach(model, None) as attached:
            peak, expected = step(attached, memory)
        with mindspeed_mem.attach(model, None, survive=True) as attached:
            for _ in range(4):
                step(attached, memory, peak, TEXT.repeat(1, 8))
            guarded = attached.engine.survival.guarded_steps
            assert same(step(attached, memory, peak // 2)[1], expected)
            assert guarded < 4 and attached.engine.mover.evicted_bytes


def test_more_layers_than_ever_are_survived(limited_memory):
    """As with layers that are dropped by chance, or left early."""
    model = Net(6, 64)
    layers = model.blocks
    with counted() as memory:
        with mindspeed_mem.attach(model, None) as attached:
            peak, expected = step(attached, memory)
        with mindspeed_mem.attach(model, None, survive=True) as attached:
            model.blocks = layers[:2]
            for _ in range(4):
                step(attached, memory, peak)
            guarded = attached.engine.survival.guarded_steps
            model.blocks = layers
            assert same(step(attached, memory, int(0.6 * peak))[1], expected)
            assert guarded < 4 and attached.engine.mover.evicted_bytes


def test_an_evaluation_within_a_step_is_survived_where_none_was_before(limited_memory):
    model = Net(4, 64)
    with counted() as memory, mindspeed_mem.attach(model, None, survive=True) as attached:
        peak = max(step(attached, memory)[0] for _ in range(4))
        memory.limit = memory.allocated + int(1.2 * peak)
        with attached.step():
            loss = loss_of(model, USUAL)
            with torch.no_grad():
                loss_of(model, USUAL.repeat(3, 1))
            loss.backward()
        memory.limit = None
        assert attached.engine.mover.evicted_bytes


def test_a_step_that_is_not_guarded_says_what_it_lacked(limited_memory):
    model = Net(2, 16)
    with mindspeed_mem.attach(model, None, survive=True, device_memory_gib=0.5) as attached:
        for _ in range(3):
            with attached.step():
                loss_of(model).backward()
        with pytest.raises(torch.OutOfMemoryError, match="bytes of device memory are needed") as caught:
            with attached.step():
                loss_of(model)
                torch.empty(2**29)
    assert "try: smaller micro-batches" in str(caught.value)


def test_device_memory_is_limited_as_long_as_attached(limited_memory):
    model = Net()
    with mindspeed_mem.attach(model, MIXED, device_memory_gib=0.5) as attached:
        backend = attached.engine.backend
        assert backend.limit() == 2**29
        loss_of(model).backward()
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**29)
    assert backend.limit() is None
    with pytest.raises(ValueError, match="device_memory_gib: "):
        mindspeed_mem.attach(model, MIXED, device_memory_gib=2**20)


class Wide(torch.nn.Module):
    """A block with an operation that no guard sees once: as compiled code would run out of memory."""

    def __init__(self):
        super().__init__()
        self.net, self.fails = Net(4, 64), 0

    def forward(self, text):
        found = self.net(text)
        if self.fails:
            self.fails -= 1
            raise torch.OutOfMemoryError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
        return found


def step_of(model, texts, optimizer, accumulate=0):
    text = next(texts)
    for _ in range(accumulate + 1):
        loss = loss_of(model, text)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return [loss.detach().clone(), *(one.detach().clone() for one in model.parameters())]


def three_steps(model, run):
    torch.manual_seed(4)
    texts, optimizer = iter(TEXT.clone().split(1)), torch.optim.AdamW(model.parameters())
    return [one for _ in range(3) for one in run(step_of, model, texts, optimizer)]


def test_a_step_is_tried_again(caplog):
    model = Wide()
    expected = three_steps(copy.deepcopy(model), lambda call, *args: call(*args))
    with mindspeed_mem.attach(model, None, survive=True) as attached:
        model.fails = 1
        assert same(three_steps(model, attached.run_step), expected)
        assert attached.engine.report().bytes_out
    assert "tried again with all activations swapped" in caplog.text


def test_a_step_that_cannot_be_tried_again_says_why():
    model = Wide()
    optimizer = torch.optim.AdamW(model.parameters())
    with mindspeed_mem.attach(model, None, survive=True, host_memory_gib=1) as attached:
        loss_of(model).backward()
        model.fails = 1
        with pytest.raises(torch.OutOfMemoryError) as caught:
            attached.run_step(step_of, model, iter([TEXT]), optimizer)
        text = str(caught.value)
        assert "was not tried again: gradients of an earlier call" in text
        assert "try: smaller micro-batches" in text and "--" not in text and "'recompute': True" in text
        model.zero_grad()
        model.fails = 2
        with pytest.raises(torch.OutOfMemoryError):
            attached.run_step(step_of, model, iter([TEXT]), optimizer)
        assert model.fails == 0


def test_what_is_in_use_does_not_contradict_what_was_needed(limited_memory):
    """The operation that failed let go of what it had, or asked for what was free in pieces."""

    def step():
        loss_of(model).backward()
        optimizer.step()
        raise torch.OutOfMemoryError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes")

    model = Net(2, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    with mindspeed_mem.attach(model, None, survive=True, device_memory_gib=0.5) as attached:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            attached.run_step(step)
    [line] = [line for line in str(caught.value).splitlines() if "in use: " in line]
    assert "bytes, so the rest was in pieces, in use elsewhere, or has been freed since; " in line


class Greedy(torch.nn.LayerNorm):
    def forward(self, x):
        return super().forward(x) + torch.empty(2**29)[0]


def test_what_follows_the_layers_is_not_called_a_layer(limited_memory):
    model = Net(2, 16)
    model.norm = Greedy(16)
    with mindspeed_mem.attach(model, None, survive=True, device_memory_gib=0.5) as attached:
        with pytest.raises(torch.OutOfMemoryError) as caught, attached.step():
            loss_of(model)
    assert "(outside the layers)" in str(caught.value) and "so the rest was" not in str(caught.value)


@pytest.mark.parametrize("copies", [False, True])
def test_a_step_whose_optimizer_has_begun_is_not_tried_again(copies):
    """Also one that trains copies of the parameters, as in mixed precision."""
    model = Net(2, 32)
    trained = [one.detach().clone() for one in model.parameters()] if copies else model.parameters()
    optimizer, texts, ran = torch.optim.AdamW(trained), iter([TEXT, TEXT]), []

    def step():
        ran.append(step_of(model, texts, optimizer))
        raise torch.OutOfMemoryError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    with mindspeed_mem.attach(model, None, survive=True, host_memory_gib=1) as attached:
        with pytest.raises(torch.OutOfMemoryError, match="not tried again: an optimizer had begun its step"):
            attached.run_step(step)
    assert len(ran) == 1


def on_rank_after_a_collective():
    model, ran = Net(2, 32), []

    def step():
        ran.append(True)
        loss = loss_of(model)
        torch.distributed.all_reduce(loss.detach())
        raise torch.OutOfMemoryError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    with mindspeed_mem.attach(model, None, survive=True, host_memory_gib=1) as attached:
        with pytest.raises(torch.OutOfMemoryError, match="taken part in a collective"):
            attached.run_step(step)
    return len(ran)


@pytest.mark.distributed
def test_a_step_with_a_collective_is_not_tried_again():
    assert on_ranks(2, on_rank_after_a_collective) == [1, 1]
