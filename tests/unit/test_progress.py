"""What takes long says so on a terminal, and nowhere else."""

import io
import sys

import pytest

from mindspeed_mem import progress
from mindspeed_mem.__main__ import main
from mindspeed_mem.device import native_build
from tests.terminals import terminal

PLAN = (
    "plan --layers 2 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --micro-batch-size 1 "
    "--global-batch-size 2 --link-gbps 20 --device-memory-gib 24"
).split()


def wait():
    with progress.shown("waiting", "a moment"):
        pass


@pytest.mark.parametrize(
    ("screen", "wanted"),
    [
        ({}, "\r\x1b[Kmindspeed_mem: waiting, 0 s (a moment)\r\x1b[K"),
        ({"columns": 30}, "\r\x1b[Kmindspeed_mem: waiting, 0 s (\r\x1b[K"),
        ({"kind": "dumb"}, ""),
    ],
    ids=["wide", "narrow", "cannot take back a line"],
)
def test_a_terminal_is_told_and_left_as_it_was(screen, wanted):
    with terminal(**screen) as told:
        wait()
    assert told == [wanted]


def test_what_is_no_terminal_gets_nothing(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    wait()
    assert stream.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", None)
    wait()


def test_an_error_clears_the_line():
    with terminal() as told, pytest.raises(ZeroDivisionError), progress.shown("failing"):
        raise ZeroDivisionError
    assert told[0].endswith("\r\x1b[K")


def test_planning_is_told(capsys):
    pytest.importorskip("scipy")
    with terminal() as told:
        main(PLAN)
    assert "searching for the best plan" in told[0]
    assert "\x1b" not in capsys.readouterr().out


def test_compiling_is_told(tmp_path):
    if native_build.find_compiler() is None:
        pytest.skip("no C++ compiler")
    source = tmp_path / "nothing.cpp"
    source.write_text("int nothing;\n")
    with terminal() as told:
        native_build.compile_library(source, tmp_path / "nothing.so", purpose="a test")
    assert "mindspeed_mem: compiling nothing.cpp for a test, 0 s" in told[0]
