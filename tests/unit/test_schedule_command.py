"""`python -m mindspeed_mem schedule`: what it prints, draws and refuses; the chart and the simulation below it."""

import importlib.util
import subprocess
import sys

import pytest

from mindspeed_mem.__main__ import main
from mindspeed_mem.command_line import NO_MATPLOTLIB
from mindspeed_mem.passes import BACKWARD, FORWARD
from mindspeed_mem.schedule import DeadlockError, Span, order, simulate
from mindspeed_mem.schedule.chart import chart
from mindspeed_mem.schedule.picture import held_over_time

LARGE = ("--backward-ratio", "--send-ratio", "--mib")


@pytest.fixture
def schedule(capsys, monkeypatch):
    """Runs the command with these words; returns its status, output and errors."""
    monkeypatch.setenv("COLUMNS", "90")

    def run(words):
        status = main(["schedule", *words.split()])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_it_prints_orders_peaks_idle_time_and_a_chart(schedule):
    status, out, err = schedule("--pp 2 --microbatches 3 --backward-ratio 1")
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "2 stages, 3 micro-batches",
        "stage 0: at most 2 in flight; idle 25.0%",
        "  F0 F1 B0 F2 B1 B2",
        "stage 1: at most 1 in flight; idle 25.0%",
        "  F0 B0 F1 B1 F2 B2",
        "",
        "stage 0 0-----1-----......0=====2-----1=====......2=====",
        "stage 1 ......0-----0=====1-----1=====2-----2=====......",
        "",
        "all stages idle 25.0% of 8 forwards' time",
    ]


def test_it_compares_a_cap_with_none_and_with_megatrons_loop(schedule):
    status, out, _ = schedule("--pp 4 --microbatches 8 --max-inflight 3 --mib 2.5")
    assert status == 0 and "stage 0: at most 3 in flight, 7.5 MiB; idle 38.5%" in out
    assert "without the cap: at most 4 in flight, idle 27.3%, time -15.4%" in out
    assert "in Megatron's own loop (--megatron-loop): at most 3 in flight, idle 50.0%, time +23.1%" in out
    status, out, _ = schedule("--pp 4 --microbatches 8 --max-inflight 3 --megatron-loop")
    assert status == 0 and "at most 3 in flight; idle 50.0%" in out and "--megatron-loop" not in out
    _, out, _ = schedule("--pp 4 --vpp 2 --microbatches 8 --max-inflight 8")
    assert "F0.0 F1.0" in out and "not possible: the cap of passes in flight is 8" in out


def test_it_compares_a_cap_with_the_same_memory_without_virtual_stages(schedule):
    _, out, _ = schedule("--pp 8 --vpp 2 --microbatches 32 --max-inflight 8")
    assert out.startswith("8 stages, 2 virtual stages, 32 micro-batches, in an order found by simulation, capped to 8")
    assert "all stages idle 48.1%" in out and "without virtual stages, holding no more: idle 52.2%, time +8.6%\n" in out
    _, out, _ = schedule("--pp 3 --vpp 2 --microbatches 12 --max-inflight 4")
    assert "without virtual stages, holding no more: idle 36.8%, time -2.6%, faster\n" in out
    assert "holding no more" not in schedule("--pp 4 --microbatches 8 --max-inflight 3")[1]


def test_it_shows_a_split_backward_beside_a_whole_one(schedule):
    status, out, err = schedule("--pp 2 --microbatches 3 --pipeline-schedule zb --mib 2")
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "2 stages, 3 micro-batches, the backward split",
        "stage 0: at most 2 in flight, 4 MiB; idle 10.0%",
        "  F0 F1 B0 W0 F2 B1 W1 B2 W2",
        "stage 1: at most 2 in flight, 4 MiB; idle 10.0%",
        "  F0 B0 F1 B1 W0 F2 B2 W1 W2",
        "",
        "stage 0 0-----1-----......0=====0~~~~~2-----1=====1~~~~~2=====2~~~~~",
        "stage 1 ......0-----0=====1-----1=====0~~~~~2-----2=====1~~~~~2~~~~~",
        "",
        "all stages idle 10.0% of 10 forwards' time",
        "with the backward whole (--pipeline-schedule 1f1b): at most 2 in flight, idle 25.0%, time +20.0%",
    ]
    _, out, _ = schedule("--pp 2 --microbatches 3 --pipeline-schedule zb --backward-ratio 3 --weight-ratio 1")
    assert "stage 0 0----1----..........0=========0~~~~2----1=========1~~~~2=========2~~~~" in out
    _, out, _ = schedule("--pp 4 --microbatches 16 --pipeline-schedule zb --max-inflight 3")
    assert (
        "without the cap: at most 4 in flight, idle 5.9%" in out
        and "whole (--pipeline-schedule 1f1b): at most 3" in out
    )


def test_it_shows_a_v_beside_what_holds_no_more(schedule):
    status, out, err = schedule("--pp 2 --microbatches 3 --pipeline-schedule v --max-inflight 3")
    assert (status, err) == (0, "")
    assert out.startswith(
        "2 stages, 2 virtual stages, 3 micro-batches, in an order found by simulation, in a V, the back"
    )
    assert "stage 1: at most 3 in flight; idle 21.7%\n  F0.0 F0.1 B0.1 B0.0 W0.1 F1.0" in out
    assert "without the cap: at most 4 in flight, idle 5.3%" in out
    assert out.endswith("without virtual stages (--pipeline-schedule zb), holding no more: idle 40.0%, time +30.4%\n")
    status, out, _ = schedule("--pp 2 --vpp 2 --microbatches 3 --pipeline-schedule v --forward-only")
    assert status == 0 and "in a V, forward only" in out


def test_all_schedules_stand_in_a_table_and_the_best_is_named(schedule):
    status, out, err = schedule("--pp 8 --microbatches 32 --pipeline-schedule all --max-inflight 4 --mib 10")
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "8 stages, 32 micro-batches, at most 4 in flight on a stage",
        "                               in flight      MiB    idle     time",
        "1f1b                                   4       40   52.2%   +72.5%",
        "interleaved, 2 virtual stages          4       40   48.1%   +58.8%",
        "zb                                     4       40   37.3%   +31.3%",
        "zb, 2 virtual stages                   4       40   26.4%   +12.0%",
        "v, 2 virtual stages                    4       40   17.6%     best",
    ]
    _, out, _ = schedule("--pp 4 --microbatches 6 --pipeline-schedule all")
    assert "interleaved, 2 virtual stages  not possible: the group size is 4" in out
    assert out.endswith("7.7%     best\n")


def test_megatrons_names_say_the_same(schedule):
    short = "--pp 4 --vpp 2 --group-size 4 --max-inflight 9"
    long = "--pipeline-model-parallel-size 4 --virtual-pipeline-model-parallel-size 2 --max-inflight-microbatches 9"
    long += " --microbatch-group-size-per-virtual-pipeline-stage 4"
    assert schedule(f"{long} --microbatches 8") == schedule(f"{short} --microbatches 8")
    assert schedule("--pp 2 --num-virtual-stages-per-pipeline-rank 2 --microbatches 4")[1].startswith(
        "2 stages, 2 virtual stages, 4 micro-batches"
    )


def test_forward_only_passes_hold_nothing(schedule):
    status, out, _ = schedule("--pp 2 --microbatches 4 --vpp 2 --forward-only --max-inflight 4")
    assert status == 0 and "stage 0: at most 0 in flight" in out and "without the cap" not in out
    assert "  F0.0 F1.0 F0.1 F1.1 F2.0 F3.0 F2.1 F3.1" in out


@pytest.mark.parametrize(
    "words, reasons",
    [
        (
            "--pp x --microbatches 0 --backward-ratio nan --mib -1 --megatron-loop --picture no/such.gif",
            [
                "--pp takes a whole number of at least 1, not 'x'",
                "--microbatches takes a whole number of at least 1, not '0'",
                "--backward-ratio takes a number of at least 0.01, not 'nan'",
                "--mib takes a number of at least 0, not '-1'",
                "--megatron-loop chooses among orders with a cap; give one with --max-inflight",
                "--picture takes a file that ends in .svg, .png, .pdf, not 'no/such.gif'",
                "--picture: there is no folder no",
            ],
        ),
        (
            "--microbatches 2 --max-inflight-microbatches 0 --pipeline-model-parallel-size=-1",
            [
                "--pipeline-model-parallel-size takes a whole number of at least 1, not '-1'",
                "--max-inflight-microbatches takes a whole number of at least 1, not '0'",
            ],
        ),
        (
            "--pp 4 --microbatches 8 --backward-ratio 1e308 --send-ratio 1e308 --mib 1e308",
            [f"{option} takes a number of at most 1e+09, not '1e308'" for option in LARGE],
        ),
        ("--pp 100000000 --microbatches 1", ["100000000 forward passes a step (pipeline stages: 100000000, mi"]),
        (
            "--pp 4 --microbatches 131073 --pipeline-schedule all",
            ["1048584 forward passes a step (pipeline stages: 4, virtual stages of each: 2, micro-batches: 13107"],
        ),
        ("--pp 4 --vpp 2 --microbatches 10 --max-inflight 1", ["the cap of passes in", "the group size is 4 (the nu"]),
        ("--pp 4 --microbatches 8 --group-size 4", ["a group size needs virtual stages"]),
        (
            "--pp 4 --microbatches 8 --pipeline-schedule zb --max-inflight 2 --megatron-loop",
            ["Megatron's own loop has no order for a split backward"],
        ),
        (
            "--pp 2 --microbatches 2 --pipeline-schedule all --forward-only --group-size 2",
            ["--forward-only is for one schedule, not for --pipeline-schedule all", "--group-size is for one schedule"],
        ),
        (
            "--pp 2 --vpp 3 --microbatches 2 --pipeline-schedule v --group-size 2",
            ["--group-size has no effect with --pipeline-schedule v", "the number of virtual stages is 3, but a V has"],
        ),
        ("--microbatches 2 --weight-ratio 1", ["--weight-ratio is for --pipeline-schedule zb"]),
        (
            "--microbatches 2 --pipeline-schedule zb --weight-ratio 2",
            ["--weight-ratio 2 is part of --backward-ratio 2, and has to be less"],
        ),
    ],
)
def test_bad_input_is_refused_with_all_reasons(schedule, words, reasons):
    status, out, err = schedule(words)
    first, *lines = [
        line for line in err.splitlines() if NO_MATPLOTLIB not in line
    ]  # one more where matplotlib is absent
    assert (status, out, first) == (2, "", "mindspeed_mem schedule:")
    assert len(lines) == len(reasons)
    assert all(line.startswith("  " + reason) for line, reason in zip(lines, reasons, strict=True))


@pytest.mark.parametrize("ending, start", [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_it_draws_a_picture(schedule, tmp_path, ending, start):
    pytest.importorskip("matplotlib")
    target = tmp_path / f"schedule.{ending}"
    status, out, _ = schedule(f"--pp 4 --vpp 2 --microbatches 8 --max-inflight 9 --mib 3 --picture {target}")
    assert status == 0 and f"drawn to {target}" in out
    assert target.read_bytes().startswith(start)


def test_without_matplotlib_it_says_how_to_install_it(schedule, tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    status, out, err = schedule(f"--pp 2 --microbatches 2 --picture {tmp_path / 'a.svg'}")
    assert (status, out) == (2, "") and "pip install matplotlib" in err


def test_it_needs_neither_torch_nor_megatron_nor_matplotlib():
    code = (
        "import sys; from mindspeed_mem.__main__ import main; main(['schedule', '--microbatches', '2']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'megatron', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_the_chart_is_left_out_where_it_does_not_fit():
    line = simulate(order(4, 1, 8))
    assert chart(line, 1, 40) is None
    assert max(map(len, chart(line, 1, 41))) == 41
    assert chart(line, 1, 300)[3].startswith("stage 3 ..................0-----0===========1-----")


def test_uneven_stages_and_sends_take_their_time():
    line = simulate(order(2, 1, 2), forward=[1, 3], backward=[2, 5], send=0.5)
    assert line.stages[1] == (
        Span((FORWARD, 0, 0), 1.5, 4.5),
        Span((BACKWARD, 0, 0), 4.5, 9.5),
        Span((FORWARD, 1, 0), 9.5, 12.5),
        Span((BACKWARD, 1, 0), 12.5, 17.5),
    )
    assert [(span.start, span.end) for span in line.stages[0]] == [(0, 1), (1, 2), (10, 12), (18, 20)]
    assert line.makespan == 20
    assert line.idle_share(1) == pytest.approx(0.2) and line.idle_share() == pytest.approx(0.45)
    assert held_over_time(line.stages[0]) == {0.0: 1, 1.0: 2, 12.0: 1, 20.0: 0}


def test_a_deadlock_says_who_waits_for_what():
    first = [(FORWARD, 0, 0), (BACKWARD, 0, 0), (FORWARD, 1, 0), (BACKWARD, 1, 0)]
    second = [(FORWARD, 0, 0), (FORWARD, 1, 0), (BACKWARD, 0, 0), (BACKWARD, 1, 0)]
    with pytest.raises(DeadlockError) as error:
        simulate([first, second])
    assert str(error.value) == (
        "stage 0 cannot run B0.0: it waits for B0.0 of stage 1; stage 1 cannot run F1.0: it waits for F1.0 of stage 0"
    )


def test_with_standard_output_closed(monkeypatch):
    """As a service or ``>&-`` starts it: what would be printed goes nowhere."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["schedule", "--microbatches", "2"]) == 0
