"""What a second attempt at a step puts back, and where it must not be made."""

import random

import numpy
import pytest
import torch
from torch import nn

from mindspeed_mem.activation.survive.step_retry import BeforeStep, RecordedIterator, forget_frames


class Model(nn.Module):
    """With gradient buffers, as Megatron's data parallel wrapper has them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.buffer = torch.zeros(4)
        self.register_buffer("counts", torch.zeros(3))
        self.register_buffer("table", torch.zeros(2, 1 << 14))
        self.register_buffer("cache", None)
        self.norm = nn.BatchNorm1d(1 << 15)

    def zero_grad_buffer(self):
        self.buffer.zero_()


def test_an_iterator_gives_the_same_again():
    class Source:
        def __init__(self):
            self.numbers = iter(range(5))
            self.name = "corpus"

        def __next__(self):
            return {"text": next(self.numbers)}

    iterator = RecordedIterator(Source())
    assert not iterator.used and iterator.name == "corpus"
    first = [next(iterator) for _ in range(3)]
    first[0].clear()
    iterator.rewind()
    assert not iterator.used
    assert [next(iterator)["text"] for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(StopIteration):
        next(iterator)


def test_all_that_a_step_changes_is_put_back():
    model, iterator = Model(), RecordedIterator(iter([1, 2]))
    before = BeforeStep([model], [True])
    state = torch.get_rng_state()
    next(iterator)
    torch.rand(7)
    model.buffer += 1
    model.counts += 1
    model.layer(torch.ones(4)).sum().backward()
    assert before.why_not(iterator, started=True) == ""
    before.put_back(iterator)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.buffer.any() and not model.counts.any()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert next(iterator) == 1


def test_buffers_are_put_back_however_they_are_changed():
    model = Model()
    before, mean, table = BeforeStep([model], [True]), model.norm.running_mean, model.table
    model.norm(torch.randn(2, 1 << 15))  # no version tells of it
    model.counts = model.counts + 1
    model.table, model.cache = model.table + 1, torch.ones(2)
    model.register_buffer("made", torch.ones(2))
    assert mean.any() and before.why_not(None, started=False) == ""
    before.put_back(None)
    assert model.norm.running_mean is mean and not mean.any() and not model.norm.num_batches_tracked.any()
    assert not model.counts.any() and model.table is table and model.cache is None
    assert "made" not in dict(model.named_buffers()) and not hasattr(model, "made")


def test_python_and_numpy_draw_the_same_again():
    before = BeforeStep([Model()], [True])
    drawn = random.random(), numpy.random.random()
    before.put_back(None)
    assert (random.random(), numpy.random.random()) == drawn


def test_what_the_data_draws_is_drawn_once():
    """A sequence of random numbers that a step and its data share goes on as if it had not failed."""

    def texts():
        while True:
            yield random.random(), numpy.random.random(), float(torch.rand(()))

    def step(iterator):
        return [(*next(iterator), random.random(), numpy.random.random(), float(torch.rand(()))) for _ in range(2)]

    before = BeforeStep([Model()], [True])
    iterator = RecordedIterator(texts())
    found, more = step(iterator), random.random()
    before.put_back(iterator)
    assert step(iterator) == found and random.random() == more


def test_scripted_modules_and_buffers_of_inference_mode():
    model = Model()
    model.scripted = torch.jit.script(nn.BatchNorm1d(4))
    with torch.inference_mode():
        model.register_buffer("made", torch.ones(3))
    before = BeforeStep([model], [True])
    model.scripted(torch.randn(2, 4))
    with torch.inference_mode():
        model.made += 1
    assert before.why_not(None, started=False) == ""
    before.put_back(None)
    assert not model.scripted.running_mean.any() and torch.equal(model.made, torch.ones(3))


def test_where_it_cannot_be_put_back():
    model, iterator = Model(), RecordedIterator(iter([1]))
    assert "earlier call" in BeforeStep([model], [False]).why_not(iterator, started=False)
    before = BeforeStep([model], [True])
    assert "did not come from the data iterator" in before.why_not(iterator, started=True)
    assert "did not come from the data iterator" in before.why_not(None, started=True)
    next(iterator)
    assert before.why_not(iterator, started=True) == ""
    model.table += 1
    assert "a buffer of the model was changed" in before.why_not(iterator, started=True)
    model.layer(torch.ones(4)).sum().backward()
    assert "earlier call" in BeforeStep([model], [True]).why_not(iterator, started=False)


def test_an_error_lets_go_of_what_its_frames_hold():
    import weakref

    def fail():
        tensor = torch.ones(3)
        refs.append(weakref.ref(tensor))
        try:
            tensor.view(2)
        except RuntimeError as error:
            raise ValueError("outer") from error

    refs = []
    try:
        fail()
    except ValueError as error:
        kept = error
    assert refs[0]() is not None
    forget_frames(kept)
    assert refs[0]() is None
