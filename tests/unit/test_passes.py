"""Events of passes: who is told in which order, what an exception does, and a call that runs twice."""

from __future__ import annotations

import dataclasses

import pytest

from mindspeed_mem import passes
from mindspeed_mem.passes import Listener, Precedence, ScheduleCall

CALL = ScheduleCall(
    schedule="forward_backward_no_pipelining",
    models=[],
    micro_batches=2,
    seq_length=8,
    micro_batch_size=1,
    forward_only=False,
    stage=0,
    stages=1,
    pipeline=None,
    virtual_stages=1,
    group_size=None,
    cap=None,
    passes=lambda: None,
    arguments={"data_iterator": "given"},
)


class Told(Listener):
    """Writes down what it is told."""

    def __init__(self, place, log, fails=""):
        self.precedence, self.log, self.fails = place, log, fails

    def begin_call(self, call):
        self._note("begins", call.arguments["data_iterator"])

    def end_call(self, call, completed):
        self._note("ends", completed)

    def _note(self, what, value):
        self.log.append(f"{self.precedence.name} {what} {value}")
        if self.fails == what:
            raise ValueError(what)


class Twice(Told):
    """Runs a call again, with other arguments, if it fails."""

    def around_call(self, call, run):
        try:
            return run(call)
        except ValueError:
            return run(dataclasses.replace(call, arguments={"data_iterator": "rewound"}))


@pytest.fixture
def run(monkeypatch):
    """Runs a call with these listeners and a loop that fails as often as asked; returns (result or error, log)."""

    def run(*kinds, failures=0, fails=None):
        log, left = [], [ValueError("in the loop")] * failures
        listeners = [kind(place, log, (fails or {}).get(place, "")) for place, kind in kinds]
        monkeypatch.setattr(passes, "LISTENERS", listeners)

        def loop(call):
            log.append(f"runs {call.arguments['data_iterator']}")
            if left:
                raise left.pop()
            return ["loss"]

        try:
            return passes.run_call(CALL, loop), log
        except ValueError as error:
            return str(error), log

    return run


def test_the_order_is_that_of_the_places_not_of_joining(run):
    result, log = run((Precedence.ACTIVATION, Told), (Precedence.FIRST_STEP, Told), (Precedence.CHUNKS, Told))
    assert result == ["loss"]
    assert log == [
        "FIRST_STEP begins given",
        "CHUNKS begins given",
        "ACTIVATION begins given",
        "runs given",
        "ACTIVATION ends True",
        "CHUNKS ends True",
        "FIRST_STEP ends True",
    ]


def test_a_call_that_fails_ends_incomplete_for_all(run):
    result, log = run((Precedence.CHUNKS, Told), (Precedence.ACTIVATION, Told), failures=1)
    assert result == "in the loop"
    assert log[2:] == ["runs given", "ACTIVATION ends False", "CHUNKS ends False"]


def test_who_fails_to_begin_does_not_end_and_nobody_further_in_begins(run):
    result, log = run(
        (Precedence.FIRST_STEP, Told),
        (Precedence.OWN_CONFIGS, Told),
        (Precedence.LOOP, Told),
        fails={Precedence.OWN_CONFIGS: "begins"},
    )
    assert result == "begins"
    assert log == ["FIRST_STEP begins given", "OWN_CONFIGS begins given", "FIRST_STEP ends False"]


def test_a_failing_end_is_a_failed_call_for_those_further_out(run):
    result, log = run((Precedence.CHUNKS, Told), (Precedence.ACTIVATION, Told), fails={Precedence.ACTIVATION: "ends"})
    assert result == "ends" and log[-2:] == ["ACTIVATION ends True", "CHUNKS ends False"]


def test_a_call_that_runs_twice_begins_anew_further_in_only(run):
    result, log = run(
        (Precedence.ADAPTIVE, Told), (Precedence.SURVIVE, Twice), (Precedence.ACTIVATION, Told), failures=1
    )
    assert result == ["loss"]
    assert log == [
        "ADAPTIVE begins given",
        "SURVIVE begins given",
        "ACTIVATION begins given",
        "runs given",
        "ACTIVATION ends False",
        "SURVIVE ends False",
        "SURVIVE begins rewound",
        "ACTIVATION begins rewound",
        "runs rewound",
        "ACTIVATION ends True",
        "SURVIVE ends True",
        "ADAPTIVE ends True",
    ]


def test_without_listeners_the_loop_runs_alone(run):
    assert run() == (["loss"], ["runs given"])


def test_the_kind_of_a_call_is_what_its_order_and_shapes_depend_on():
    same = dataclasses.replace(CALL, arguments={}, passes=lambda: [])
    assert same.kind == CALL.kind and hash(same.kind) == hash(CALL.kind)
    for name in ("micro_batches", "seq_length", "micro_batch_size", "virtual_stages", "group_size", "cap"):
        assert dataclasses.replace(CALL, **{name: 5}).kind != CALL.kind
    assert dataclasses.replace(CALL, forward_only=True).kind != CALL.kind
