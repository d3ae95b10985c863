"""The page of a run: what it says is what the run's files say."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mindspeed_mem.report import page_data
from mindspeed_mem.report.page import page as page_of
from tests import browser, warm
from tests.memory.test_trace import traced
from tests.worlds import on_ranks, parallel

pytest.importorskip("plotly")
ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

DRIVER = shutil.which("chromedriver")
FOCUSED = """
const one = document.activeElement;
return [one.tagName, one.getAttribute("aria-label") || one.textContent.trim(), getComputedStyle(one).outlineStyle];
"""

pytestmark = pytest.mark.distributed


def traced_and_told(file: str, folder: str) -> tuple:
    """Trains four steps of which the last two are traced, and writes the run's files with the figures of the last."""
    from mindspeed_mem.report import run_file
    from tests.swap_runs import EVERYTHING

    figures, *_ = traced(EVERYTHING, file, (2, 3))
    run_file.write(Path(folder), [figures[-1]], [], {"--memory-config": "plan.yaml"})
    return figures


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder as --memory-report leaves it, and the engine's figures after each step."""
    folder = tmp_path_factory.mktemp("pages") / "swap"
    [figures] = on_ranks(1, traced_and_told, str(folder / "trace.json"), str(folder))
    rows = [
        {"iteration": number, "rank": 0, "loss": 4.5 - number, "step_ms": 20.0 + number, "swapped_bytes": 1 << 20}
        for number in (1, 2, 3)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder, figures


def command(*arguments) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [warm.python(), "-m", "mindspeed_mem", "report", *map(str, arguments)]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120)


def cells(page: str) -> list[list[str]]:
    """The rows of all tables."""
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    return [[html.unescape(cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)] for row in rows]


def test_what_is_read_is_what_happened(run):
    folder, figures = run
    found = page_data.read([folder])
    [step] = found.steps
    assert step.number == 3 and len(found.metrics) == 3 and not step.marks
    moved = figures[2].bytes_out - figures[1].bytes_out
    assert sum(one.more["bytes"] for one in step.spans if one.track == "copy out") == moved > 0
    forwards = sum(one.name.startswith("forward") for one in step.passes())
    grid = found.grid()
    assert sum(cell.moved for cell in grid.values()) * forwards == pytest.approx(moved / 2**20)
    assert {cell.what for cell in grid.values()} == {"swap", "keep"}
    assert step.copies_block and step.hidden() == 0 < step.copying() < step.length
    series = step.counters["device bytes without the plan, activations"]
    assert max(value for _, value in series) == figures[3].peak_bytes_without / 2**20


def test_the_page_is_there_when_the_run_ends_and_needs_no_network(run):
    folder, figures = run
    page = (folder / "index.html").read_text(encoding="utf-8")
    mine = [row for row in cells(page) if row[:1] == ["0"] and len(row) == 12]
    last = figures[-1]
    wanted = [last.peak_bytes, last.peak_bytes_without, last.bytes_out, last.bytes_in]
    assert [row[1:5] for row in mine] == [[f"{one / 2**20:.2f}" for one in wanted]]
    assert ["--memory-config", "plan.yaml"] in cells(page)
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=\"(?!data:)", page)
    for heading in ("Memory over a step", "The plan, by layer and operator", "Copies and second runs"):
        assert re.search(rf"<h3>{heading}</h3>\s*<p class=\"words\">", page)
    assert "There is one pipeline stage." in page and "No chunks were gathered" in page


def test_the_command_compares_two_runs_and_names_what_is_missing(run, tmp_path):
    folder, _ = run
    alone = tmp_path / "metrics.jsonl"
    alone.write_text('{"iteration": 1, "rank": 0, "loss": 1.5, "step_ms": 40.0}\n')
    done = command(folder, "--with", alone, "--names", "swapped", "kept <b>", "--output", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert ["longest step, last half of the iterations", "23.00 ms", "40.00 ms", "1.739"] in cells(page)
    assert "There is no trace: run with --memory-report DIR" in page and "There is no run.json" in page
    assert "kept &lt;b&gt;" in page and "<b>" not in page.replace(_plotly(page), "")


def _plotly(page: str) -> str:
    return max(re.findall(r"<script>.*?</script>", page, re.DOTALL), key=len)


def test_all_that_is_wrong_is_said_at_once(run, tmp_path):
    folder, _ = run
    (tmp_path / "empty").mkdir()
    (tmp_path / "plan.yaml").write_text("swap_config: {}\n")
    [trace] = folder.glob("trace.*.json")
    files = [trace, folder, tmp_path / "empty", tmp_path / "plan.yaml", tmp_path / "none.json"]
    done = command(*files, "--output", tmp_path / "no" / "page.html", "--names", "a", "b")
    assert done.returncode == 2
    for text in (
        "--output",
        "--names takes a name for each run: 1, not 2",
        "empty has none of a run's files",
        "plan.yaml: nothing that a page shows",
        "none.json: No such file",
        "two traces of rank 0",
    ):
        assert text in done.stderr


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_a_browser_draws_it(run, tmp_path):
    folder, _ = run
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-quic"
    line = [CHROMIUM, *flags.split(), f"--user-data-dir={tmp_path}/user", "--enable-logging=stderr", "--v=0"]
    line += ["--virtual-time-budget=8000", "--dump-dom", (folder / "index.html").as_uri()]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "CONSOLE" not in done.stderr, done.stderr
    drawn = done.stdout.count('class="main-svg"')
    assert drawn >= 2 * 4  # memory, plan, copies, iterations
    assert "stroke" in done.stdout and "copy out" in done.stdout
    assert "Zoom in" in done.stdout and "Share" not in done.stdout.replace(_plotly(done.stdout), "")  # nothing leaves


@pytest.mark.skipif(None in (CHROMIUM, DRIVER), reason="no Chromium with its driver")
def test_the_keyboard_reaches_all_of_it(run, tmp_path):
    folder, _ = run
    with browser.opened(DRIVER, CHROMIUM, tmp_path, (folder / "index.html").as_uri()) as page:
        reached = []
        for _ in range(120):
            page.press(browser.TAB)
            reached.append(page.run(FOCUSED))
            if reached[-1][0] == "BODY":
                break
        assert reached.pop()[0] == "BODY"  # it gets out at the end
        count = {tag: sum(one[0] == tag for one in reached) for tag in ("A", "SUMMARY", "DIV", "BUTTON")}
        assert count["A"] == page.run("return document.querySelectorAll('nav a').length") > 4
        assert count["SUMMARY"] == page.run("return document.querySelectorAll('summary').length") > 1
        assert count["DIV"] > 0 < count["BUTTON"]
        assert all(name and outline != "none" for _, name, outline in reached)  # each is named, and shows that it is it
        page.run("document.querySelector('summary').focus()")
        for key, opened in ((browser.ENTER, True), (" ", False)):
            page.press(key)
            assert page.run("return document.querySelector('details').open") is opened
        page.run("document.querySelector('nav a').focus()")
        page.press(browser.ENTER)
        assert page.run("return location.hash.length > 1")


def stalling(file: str) -> float:
    """Trains three steps on a device with slow copies, of which the second is traced; how long that one stood still."""
    from mindspeed_mem.device.simulated import SimulatedBackend
    from mindspeed_mem.report import trace
    from tests.models import build_gpt, train_step
    from tests.swap_runs import EVERYTHING, SDPA, patched, swap

    backend = SimulatedBackend(check=False, bandwidth=1e8, op_seconds=1e-4)
    with patched(SDPA), parallel(), backend.tracker(), swap(EVERYTHING, backend):
        chunks, stalls = build_gpt("dense", layers=2), []
        trace.start(Path(file), 2, 2)
        for step in range(3):
            train_step(chunks, step=step, micro_batches=2)
            stalls.append(backend.stall_seconds())
        trace.stop()
    return stalls[1] - stalls[0]


def test_waits_for_copies_are_not_taken_for_hidden_ones(tmp_path):
    [stalled] = on_ranks(1, stalling, str(tmp_path / "trace.json"))
    [step] = page_data.read([tmp_path]).steps
    assert step.stalled() == pytest.approx(1e3 * stalled) and stalled > 0
    assert 0 < step.hidden() <= step.length - step.stalled()
    assert step.copying() > step.hidden() + 0.5 * step.stalled()


def configured(folder: str, elsewhere: str) -> list:
    """A run with a trace, then one that wants a report besides, then one by another plan; what each run.json says."""
    import logging

    import mindspeed_mem.megatron_adaptor as mem
    from tests.models import build_gpt, train_step
    from tests.swap_runs import EVERYTHING, again

    asked = {"device": "cpu", "memory_trace": f"{elsewhere}/trace.json", "memory_trace_steps": "1"}
    asked |= {"memory_config": EVERYTHING}
    found = []
    (Path(folder) / "index.html").write_text("of an earlier run")
    try:
        for more in ({}, {"memory_report": folder}, {"memory_report": folder, "memory_config": again({"mlp": True})}):
            mem.configure(asked | more)
            found.append((Path(folder) / "index.html").exists())
            logging.getLogger("mindspeed_mem.plan").warning("said beside %d", len(more))
            with parallel():
                train_step(build_gpt("dense", layers=1), micro_batches=1)
            mem.report()
            if more:
                run = page_data.read([Path(folder)])
                told = [line for line in run.about["notices"] if "said" in line]
                found.append((told, {span.track for step in run.steps for span in step.spans}))
    finally:
        mem.configure({"device": None, "memory_trace": None, "memory_trace_steps": None, "memory_config": None})
    return found


def test_each_run_in_a_process_has_its_own_report(tmp_path):
    [found] = on_ranks(1, configured, str(tmp_path), str(tmp_path / "traces"))
    assert found == [
        True,
        False,
        (["said beside 1"], {"compute", "copy out", "copy in"}),
        False,
        (["said beside 2"], {"compute", "recompute"}),
    ]


def too_short(folder: str, elsewhere: str) -> list[str]:
    """What two runs say that end before the first step to be traced: with a report alone, and with a trace besides."""
    import logging

    import mindspeed_mem.megatron_adaptor as mem
    from tests.swap_runs import listening

    nothing = {"memory_report": None, "memory_trace": None}
    with listening(logging.WARNING) as lines:
        for more in ({}, {"memory_trace": f"{elsewhere}/trace.json"}):
            mem.configure({"device": "cpu", "memory_report": folder} | more)
            mem.configure({"device": "cpu"} | nothing)
    mem.configure({"device": None})
    return [line for line in lines if "no step was traced" in line]


def test_a_run_that_ends_before_what_is_traced_says_so_by_the_flag_that_was_given(tmp_path):
    [(report, trace)] = on_ranks(1, too_short, str(tmp_path), str(tmp_path / "traces"))
    assert report.startswith("--memory-report: no step was traced: 0 training steps have run, and the first")
    assert trace.startswith("--memory-trace: no step was traced")


def test_a_long_step_stays_readable(tmp_path):
    """Neighbours are drawn as one; the highest is still there."""
    place = {"pid": 0, "cat": "copy out", "tid": 1}
    more = {"layer": 0, "op": "mlp", "bytes": 1 << 20}
    events = [{"name": "step 5", "ph": "X", **place, "cat": "compute", "ts": 0, "dur": 9e6, "args": {"step": 5}}]
    for number in range(9000):
        at = {"ts": 1000 * number, "pid": 0}
        events.append({"name": "mlp", "ph": "X", **place, **at, "dur": 900, "args": more})
        events.append({"name": "device bytes", "ph": "C", **at, "args": {"activations": (number % 4501) << 20}})
    about = {"rank": 0, "stage": 0, "origin_ns": 0, "version": 1}
    (tmp_path / "trace.json").write_text(json.dumps({"otherData": about, "traceEvents": events}))
    page = page_of([page_data.read([tmp_path / "trace.json"])])
    assert len(page) - len(_plotly(page)) < 500_000
    assert ["0", "on the device", "4500.00", "4500.0"] in cells(page)
    assert ["0", "copy out", "9000", "9000.00", "8100.0"] in cells(page)
