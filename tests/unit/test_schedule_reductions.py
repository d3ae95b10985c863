"""Gradients of a chunk are reduced with its last backward; parameters are gathered one chunk ahead."""

from __future__ import annotations

import contextlib

import pytest
import torch

from mindspeed_mem.schedule.reductions import GradientReductions, ParameterGathers


class Log(list):
    """What happens, in order."""

    def no_sync(self, name):
        @contextlib.contextmanager
        def context():
            self.append(f"{name} off")
            yield
            self.append(f"{name} on")

        return context

    def start(self, parameters):
        self.append(f"start {next(parameters).shape[0]}")


@pytest.fixture
def chunks():
    return [torch.nn.Linear(1, size, bias=False) for size in (1, 2)]


def test_the_last_backward_of_a_chunk_reduces(chunks):
    log = Log()
    with GradientReductions([log.no_sync("a"), log.no_sync("b")], None, chunks) as reductions:
        for chunk, last in ((1, False), (1, True), (0, False), (0, True)):
            with reductions.backward(chunk, last):
                log.append(f"backward {chunk}")
    off, on = ["a off", "b off"], ["b on", "a on"]
    assert log == [*off, "backward 1", *on, "backward 1", *off, "backward 0", *on, "backward 0", *off, *on]


def test_reductions_that_the_schedule_starts_come_after_it(chunks):
    log = Log()
    with GradientReductions(log.no_sync("all"), log.start, chunks) as reductions:
        for chunk, last in ((1, False), (1, True)):
            with reductions.backward(chunk, last):
                log.append(f"backward {chunk}")
    assert log == ["all off", "backward 1", "backward 1", "all on", "start 2", "all off", "all on"]


def test_gradients_of_weights_that_come_later_are_reduced_with_the_last_of_them(chunks):
    off, on = "all off", "all on"
    for start, last in ((None, [on, "backward", off]), (True, ["backward"])):
        log = Log()
        with GradientReductions(log.no_sync("all"), start and log.start, chunks) as reductions:
            with reductions.backward(0, last=True, weights_later=True):
                log.append("backward")
            with reductions.backward(0, last=False):
                log.append("weights")
            with reductions.backward(0, last=True):
                log.append("weights")
        end = ["weights", on, "start 1", off, on] if start else [on, "weights", off, on]
        assert log == [off, *last, "weights", *end]


def test_without_functions_nothing_happens(chunks):
    with GradientReductions(None, None, chunks) as reductions, reductions.backward(0, last=True):
        pass
    ParameterGathers(None, chunks).before(0)


def test_an_exception_leaves_through_both(chunks):
    log = Log()
    with (
        pytest.raises(ValueError, match="in a pass"),
        GradientReductions(log.no_sync("all"), None, chunks) as reductions,
        reductions.backward(0, last=False),
    ):
        raise ValueError("in a pass")
    assert log == ["all off", "all on"]


def test_parameters_are_gathered_one_chunk_ahead():
    chunks = [torch.nn.Linear(1, size, bias=False) for size in (1, 2, 3)]
    log = Log()
    gathers = ParameterGathers([log.start] * 3, chunks)
    for chunk in (0, 0, 1, 0, 2):
        gathers.before(chunk)
        log.append(chunk)
    assert log == ["start 1", "start 2", 0, 0, "start 3", 1, 0, 2]
