"""What Megatron's schedules run becomes events: with real models, in a pipeline, and when a pass fails."""

from __future__ import annotations

import contextlib

import pytest

from mindspeed_mem.passes import BACKWARD, FORWARD, LISTENERS, Listener, Precedence
from tests.worlds import applied, on_ranks, parallel

pytestmark = pytest.mark.distributed


class Told(Listener):
    """Writes down what it is told of passes and calls, under a name."""

    def __init__(self, place, log):
        self.precedence, self.log = place, log
        self.outputs = {}

    def begin_call(self, call):
        self.call, self.ran = call, []
        self.log.append((self.precedence.name, "begins"))

    def end_call(self, call, completed):
        self.log.append((self.precedence.name, "ends", completed))

    @contextlib.contextmanager
    def during_forward(self):
        self.log.append((self.precedence.name, "enters"))
        try:
            yield
        finally:
            self.log.append((self.precedence.name, "leaves"))

    def begin_forward(self, micro_batch, model_chunk):
        self.now = micro_batch, model_chunk
        self.ran.append((FORWARD, *self.now))
        self.log.append((self.precedence.name, FORWARD))

    def end_forward(self, output):
        output = output[0] if isinstance(output, list) else output
        self.outputs[id(output)] = output, self.now
        self.log.append((self.precedence.name, FORWARD, "ends"))

    def begin_backward(self, output):
        output = output[0] if isinstance(output, list) else output
        self.ran.append((BACKWARD, *self.outputs.pop(id(output))[1]))
        self.log.append((self.precedence.name, BACKWARD))

    def end_backward(self):
        self.log.append((self.precedence.name, BACKWARD, "ends"))


@contextlib.contextmanager
def told(*places):
    """Listeners at these places, and the log that they share."""
    log = []
    listeners = [Told(place, log) for place in places]
    LISTENERS.extend(listeners)
    try:
        with applied():
            yield listeners, log
    finally:
        LISTENERS.clear()


def calls(layout, forward_only=False, **model):
    """Whether the passes that ran were those that the call tells, and what the call says of itself."""
    from tests.models import build_gpt, train_step

    with parallel(**layout), told(Precedence.ACTIVATION) as ([one], _):
        chunks = build_gpt("dense", **model)
        train_step(chunks, micro_batches=4, micro_batch_size=1, forward_only=forward_only)
        call = one.call
        numbers = (call.micro_batches, call.micro_batch_size, call.stage, call.stages, call.virtual_stages)
        return list(call.passes()) == one.ran, len(one.ran), numbers, call.forward_only, list(call.models) == chunks


@pytest.mark.parametrize(
    ("layout", "virtual", "forward_only"),
    [({"pp": 2}, 1, False), ({"pp": 2, "vpp": 2}, 2, False), ({"pp": 2}, 1, True)],
    ids=["pipeline", "interleaved", "evaluation"],
)
def test_a_call_tells_its_passes(layout, virtual, forward_only):
    count = 4 * virtual * (1 if forward_only else 2)
    assert on_ranks(2, calls, layout, forward_only=forward_only) == [
        (True, count, (4, 1, stage, 2, virtual), forward_only, True) for stage in range(2)
    ]


def failing(where):
    """The log of a call of one micro-batch that fails in this direction, and one that does not."""
    import torch

    from tests.models import build_gpt, train_step

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if where == FORWARD:
                raise ArithmeticError
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ArithmeticError

    with parallel():
        chunks = build_gpt("dense")
        with told(Precedence.SURVIVE, Precedence.ACTIVATION) as (_, log):
            with contextlib.nullcontext() if where is None else pytest.raises(ArithmeticError):
                layer = chunks[0].module.decoder.layers[0].mlp
                handle = layer.register_forward_hook(lambda _, __, out: (Fails.apply(out[0]), *out[1:]))
                handle.remove() if where is None else None
                train_step(chunks, micro_batches=1, micro_batch_size=1)
    return log


BEGIN = [
    ("SURVIVE", "begins"),
    ("ACTIVATION", "begins"),
    ("SURVIVE", "enters"),
    ("SURVIVE", FORWARD),
    ("ACTIVATION", "enters"),
    ("ACTIVATION", FORWARD),
]
LEAVE = [("ACTIVATION", "leaves"), ("SURVIVE", "leaves")]
FORWARDED = [*BEGIN, ("ACTIVATION", FORWARD, "ends"), ("SURVIVE", FORWARD, "ends"), *LEAVE]
BACKWARDS = [
    ("SURVIVE", BACKWARD),
    ("ACTIVATION", BACKWARD),
    ("ACTIVATION", BACKWARD, "ends"),
    ("SURVIVE", BACKWARD, "ends"),
]


def ends(completed):
    return [("ACTIVATION", "ends", completed), ("SURVIVE", "ends", completed)]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (None, [*FORWARDED, *BACKWARDS, *ends(True)]),
        (FORWARD, [*BEGIN, *LEAVE, *ends(False)]),
        (BACKWARD, [*FORWARDED, *BACKWARDS, *ends(False)]),
    ],
    ids=["nothing fails", "a forward fails", "a backward fails"],
)
def test_events_of_a_pass_nest_and_a_forward_that_fails_does_not_end(where, expected):
    assert on_ranks(1, failing, where) == [expected]


def evaluated_within():
    """What follows training calls hears of one whose first micro-batch evaluates before it begins."""
    from tests.adaptive_runs import adapting
    from tests.models import build_gpt, train_step

    heard = []

    class Follows:
        is_over = False

        def begin(self, *unused):
            heard.append("begins")

        def end(self, completed):
            heard.append(("ends", completed))

    with parallel(), adapting() as engine:
        engine.adaptation = Follows()
        chunks = build_gpt("dense")

        def evaluate(*unused):
            handle.remove()
            train_step(chunks, micro_batches=1, micro_batch_size=1, forward_only=True)
            heard.append("evaluated")

        handle = chunks[0].register_forward_pre_hook(evaluate)
        train_step(chunks, micro_batches=2, micro_batch_size=1)
    return heard


def test_a_training_call_goes_on_after_an_evaluation_within_it():
    assert on_ranks(1, evaluated_within) == [["begins", "evaluated", ("ends", True)]]


def first_steps():
    """When a callback is called: not by an evaluation nor a failed step, once by a step; forgotten ones never."""
    import sys

    from tests.models import build_gpt, train_step

    seen = []
    with parallel(), applied("first_step") as [name]:
        first_step = sys.modules[name]
        chunks = build_gpt("dense")
        first_step.after(lambda: seen.append("forgotten"))
        first_step.forget()
        callback = lambda: seen.append("called")  # noqa: E731
        first_step.after(callback)
        first_step.after(callback)
        for more in ({"forward_only": True}, {"micro_batch_size": "fails"}, {}, {}):
            with contextlib.suppress(TypeError):
                train_step(chunks, **{"micro_batch_size": 1, **more})
            seen.append(len(seen))
    return seen


def test_the_first_step_is_told_once():
    assert on_ranks(1, first_steps) == [[0, 1, "called", 3, 4]]
