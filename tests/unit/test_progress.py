"""What takes long says so on a terminal, and nowhere else."""

import contextlib
import io
import os
import pty
import sys

import pytest

from mindspeed_mem import progress
from mindspeed_mem.__main__ import main

PLAN = (
    "plan --layers 2 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --micro-batch-size 1 "
    "--global-batch-size 2 --link-gbps 20 --device-memory-gib 24"
).split()


@pytest.fixture
def terminal(monkeypatch):
    """Runs what it is given with a terminal as standard error; returns what that has got."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")

    def run(call):
        reading, writing = pty.openpty()
        with os.fdopen(writing, "w") as stream:
            monkeypatch.setattr(sys, "stderr", stream)
            call()
            os.set_blocking(reading, False)
            found = b""
            with contextlib.suppress(BlockingIOError):
                while True:
                    found += os.read(reading, 1 << 16)
        os.close(reading)
        return found.decode()

    return run


def wait():
    with progress.shown("waiting", "a moment"):
        pass


def test_a_terminal_is_told_and_left_as_it_was(terminal):
    assert terminal(wait) == "\r\x1b[Kmindspeed_mem: waiting (a moment): 0 s\r\x1b[K"


def test_a_terminal_that_cannot_take_back_a_line_is_left_alone(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert terminal(wait) == ""


def test_what_is_no_terminal_gets_nothing(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    wait()
    assert stream.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", None)
    wait()


def test_an_error_clears_the_line(terminal):
    def fail():
        with pytest.raises(ZeroDivisionError), progress.shown("failing"):
            raise ZeroDivisionError

    assert terminal(fail).endswith("\r\x1b[K")


def test_planning_is_told(terminal, capsys):
    pytest.importorskip("scipy")
    assert "searching for the best plan" in terminal(lambda: main(PLAN))
    assert "\x1b" not in capsys.readouterr().out
