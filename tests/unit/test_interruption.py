"""Ctrl-C: one line, whatever it hits; what a script does about it itself is left alone."""

import signal
import sys
import time

import pytest

from mindspeed_mem.interruption import in_one_line


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    monkeypatch.delenv("RANK", raising=False)
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, earlier)


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


class Destroyed:
    def __del__(self):
        ctrl_c()


def in_a_destructor():
    Destroyed()
    time.sleep(30)  # is not waited for


def while_it_unwinds():
    try:
        ctrl_c()
    finally:
        raise RuntimeError("connection closed by peer")


def pending():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    ctrl_c()
    try:
        raise RuntimeError("connection closed by peer")
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


@pytest.mark.parametrize("body", [ctrl_c, in_a_destructor, while_it_unwinds, pending])
def test_it_ends_with_one_line(body, capfd, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit) as ended, in_one_line("training"):
        body()
    assert ended.value.code == 130
    ctrl_c()  # torchrun sends another one: ignored from here on
    assert capfd.readouterr().err == "training: interrupted on rank 3\n"


def test_other_ends_are_what_they_were(capfd):
    with in_one_line("training"):
        with pytest.raises(KeyboardInterrupt):  # the script sees to it
            ctrl_c()
    with pytest.raises(RuntimeError, match="broken"), in_one_line("training"):
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()
        raise RuntimeError("broken")
    with pytest.raises(SystemExit) as ended, in_one_line("training"):
        sys.exit(7)
    assert ended.value.code == 7 and capfd.readouterr().err == ""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert sys.unraisablehook is sys.__unraisablehook__
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()
