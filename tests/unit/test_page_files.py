"""The page of files that are not as one would like them, and of runs that are not simple."""

import functools
import html
import json
import logging
import re

import pytest
import torch.distributed as dist

from mindspeed_mem.__main__ import main
from mindspeed_mem.passes import WEIGHT
from mindspeed_mem.report import page_data, run_file, trace_file
from mindspeed_mem.report.page import MOST_ROWS, page
from mindspeed_mem.report.page_data import WHOLE
from mindspeed_mem.schedule import order, simulate

pytest.importorskip("plotly")
MS = 1000.0
BEGAN = 10**18


def span(name, begin, end, cat="compute", **more):
    return {"name": name, "ph": "X", "cat": cat, "pid": 0, "tid": 0, "ts": begin * MS, "dur": (end - begin) * MS,
            "args": more}  # fmt: skip


def passes(begin, micro_batches=1):
    """Forward and backward of each micro-batch, a ms each."""
    found = []
    for number in range(micro_batches):
        for way in ("forward", "backward"):
            at = begin + len(found)
            found.append(span(f"{way} {number}", at, at + 1, **{"micro-batch": number, "model chunk": 0}))
    return found


def write(folder, rank=0, steps=(5,), events=None, **about):
    """A trace whose steps are 10 ms long each; ``events``: of each, by when it begins."""
    found = []
    for number in steps:
        begin = 10.0 * number
        found += [span(f"step {number}", begin, begin + 10, step=number), *(events or passes)(begin)]
        found.append({"name": "device bytes", "ph": "C", "pid": 0, "ts": begin * MS, "args": {"activations": number}})
    folder.mkdir(exist_ok=True)
    file = trace_file.file_of_rank(folder / "trace.json", rank)
    trace_file.begin(file, {"rank": rank, "stage": 0, "stages": 1, "origin_ns": BEGAN, **about}, found)
    return file


def text_of(run, *others):
    """A page without what draws its charts."""
    text = page([run, *others])
    return text.replace(max(re.findall(r"<script>.*?</script>", text, re.DOTALL), key=len), "")


def rows(text):
    found = re.findall(r"<tr>(.*?)</tr>", text, re.DOTALL)
    return [[html.unescape(cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)] for row in found]


def test_what_is_within_something_that_runs_again_does_so_too(tmp_path):
    def events(begin):
        found = passes(begin)
        for layer in (0, 1):
            for place, op in enumerate(("self_attention.linear_qkv", "mlp", "mlp.linear_fc1", "mlp_bda")):
                at = begin + 0.1 * (4 * layer + place)
                found.append(span(op, at, at + 0.1, layer=layer, op=op, **{"micro-batch": 0, "model chunk": 0}))
        again = [span("layer 0", begin + 1, begin + 1.5, "recompute", layer=0, op="")]
        return found + again + [span("layer 1 mlp", begin + 1.5, begin + 2, "recompute", layer=1, op="mlp")]

    run = page_data.read([write(tmp_path, events=events)])
    found = {where: cell.what for where, cell in run.grid().items()}
    assert {op for (layer, op), what in found.items() if layer == 0 and what == "recompute"} == {
        *("self_attention.linear_qkv", "mlp", "mlp.linear_fc1", "mlp_bda"),
        WHOLE,
    }
    assert [op for (layer, op), what in found.items() if layer == 1 and what == "recompute"] == [
        "mlp",
        "mlp.linear_fc1",
    ]
    assert ["layer 0", WHOLE, "recompute", "0.00", "", ""] in rows(text_of(run))


def spoilt(folder):
    """A folder that has a good trace, and four files that are none: what is wrong with each, by its name."""
    write(folder, 0)
    cut = write(folder, 1)
    cut.write_text(cut.read_text()[:-40])
    (folder / "merged.json").write_text(json.dumps(trace_file.merged([folder / "trace.rank0.json"])))
    (folder / "metrics.jsonl").write_text('{"iteration": 1, "step_ms": 5.0}\n{"iteration": 2, "step_ms"')
    (folder / "trace.again.json").write_text((folder / "trace.rank0.json").read_text())
    return {
        "trace.rank1.json": "no whole JSON",
        "merged.json": "all ranks' traces put together",
        "metrics.jsonl": "no whole metrics in line 2",
        "trace.rank0.json": "a second trace of rank 0; that of trace.again.json is shown",
    }


def test_a_folder_is_shown_without_what_cannot_be_used(tmp_path):
    wrong = spoilt(tmp_path / "run")
    run = page_data.read([tmp_path / "run"])
    assert len(run.remarks) == len(wrong) and [row["step_ms"] for row in run.metrics] == [5.0]
    text = html.unescape(text_of(run))
    for name, why in wrong.items():
        assert re.search(rf"<li>{name} in .*run: {why}", text)
    assert "step 5 of 1 rank is shown" in text


def test_files_that_were_named_are_refused_each_with_its_reason(tmp_path):
    wrong = spoilt(tmp_path)
    given = [tmp_path / name for name in wrong if name != "trace.rank0.json"]
    with pytest.raises(page_data.PageError) as caught:
        page_data.read(given)
    for file in given:
        assert f"{file}: {wrong[file.name]}" in str(caught.value)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.json").write_text('{"version": 1}')
    with pytest.raises(page_data.PageError, match="notes.json in .*other: nothing that a page shows"):
        page_data.read([tmp_path / "other"])


def test_ranks_that_stopped_at_different_steps_show_the_last_of_all(tmp_path):
    files = [write(tmp_path, 0, (5, 6, 7)), write(tmp_path, 1, (5, 6), origin_ns=BEGAN + 2 * 10**6)]
    run = page_data.read(files)
    assert [(step.rank, step.number) for step in run.steps] == [(0, 6), (1, 6)] and run.together
    assert [step.passes()[0].begin for step in run.steps] == pytest.approx([0.0, 2.0], abs=0.3)
    assert run.remarks == [
        "the last steps traced differ (7 of rank 0, 6 of rank 1): shown is step 6, the last that all have"
    ]
    assert "step 6 of 2 ranks is shown" in text_of(run)


def test_ranks_without_a_step_in_common_are_not_laid_over_each_other(tmp_path):
    run = page_data.read([write(tmp_path, 0, (5,), stages=2), write(tmp_path, 1, (6,), stage=1, stages=2)])
    assert [step.passes()[0].begin for step in run.steps] == [0.0, 0.0] and not run.together
    text = text_of(run)
    assert "there is none that all have" in text and "ms since each rank began its own step" in text
    assert "The ranks have traced no step in common." in text and "ms since the first rank" not in text


def test_what_was_planned_takes_a_trace_of_each_stage(tmp_path):
    files = [write(tmp_path, rank, stage=rank, stages=2) for rank in (0, 1)]
    assert "Planned: " in text_of(page_data.read(files))
    text = text_of(page_data.read(files[1:]))
    assert "Passes of 1 of 2 pipeline stages" in text and "there is none of stage 0" in text
    assert "planned" not in re.sub(r"would have been planned", "", text)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("v", [False, True])
def test_what_was_planned_knows_a_v_by_who_runs_its_second_chunk_first(tmp_path, v, weights):
    found = order(2, 2, 4, cap=3, split=True, v=v)
    orders = [[one for one in of_stage if weights or one[0] != WEIGHT] for of_stage in found]
    timeline = simulate(orders, 2, v=v, forward=0.25, backward=0.25, weight=0.35)

    def events(stage, begin):
        return [
            span(f"{way} {number}", begin + one.start, begin + one.end, **{"micro-batch": number, "model chunk": chunk})
            for one in timeline.stages[stage]
            for way, number, chunk in [one.work]
        ]

    files = [write(tmp_path, rank, (5,), functools.partial(events, rank), stage=rank, stages=2) for rank in (0, 1)]
    assert f"That would take {timeline.makespan:.1f} ms" in text_of(page_data.read(files))
    if v and not weights:  # in Megatron's circle the same order would take another time
        assert simulate(orders, 2, forward=0.25, backward=0.25).makespan != timeline.makespan


def test_ranks_without_a_trace_are_named(tmp_path):
    write(tmp_path, 1)
    run_file.write(tmp_path, [Engine.of(rank=rank) for rank in range(4)], [], {})
    assert page_data.read([tmp_path]).remarks == ["there is no trace of ranks 0, 2-3"]


def test_layers_of_another_stack_have_its_name(tmp_path):
    def events(begin):
        copies = [span("x", begin + n, begin + n + 0.5, "copy out", layer=n, op="mlp", bytes=8) for n in (1, 2)]
        return passes(begin) + copies

    file = write(tmp_path, events=events, stacks={"decoder": [0, 2], "mtp": [2, 3]})
    found = [row[0] for row in rows(text_of(page_data.read([file]))) if row[1:2] == ["mlp"]]
    assert found == ["decoder:1", "mtp:0"]


def test_passes_that_no_schedule_numbers_have_no_number(tmp_path):
    def events(begin):
        of_none = {"micro-batch": None, "model chunk": 0}
        copy = span("x", begin, begin + 1, "copy out", layer=0, op="mlp", bytes=8)
        return [
            span("forward None", begin, begin + 1, **of_none),
            span("backward", begin + 1, begin + 2, **of_none),
            copy,
        ]

    texts = re.findall(r'"text":\[("[^]]*)\]', text_of(page_data.read([write(tmp_path, events=events)])))
    assert texts == ['""'] * 3  # forwards, backwards, copies


def test_what_waited_for_a_copy_hid_none(tmp_path):
    def events(begin):
        op = span("mlp", begin, begin + 6, layer=0, op="mlp", **{"micro-batch": 0, "model chunk": 0})
        stalls = [span("w", begin + at, begin + at + 1, "stall", layer=0, op="mlp") for at in (1, 1.5, 4)]
        return [*passes(begin), op, *stalls, span("c", begin + 0.5, begin + 8, "copy in", layer=0, op="mlp", bytes=8)]

    [step] = page_data.read([write(tmp_path, events=events)]).steps
    assert (step.hidden(), step.stalled(), step.copying()) == pytest.approx((3.0, 2.5, 7.5))


# ---- run.json


class Engine:
    """The figures of a rank."""

    @staticmethod
    def of(**more):
        from mindspeed_mem.activation.figures import EngineFigures

        zero = dict.fromkeys(("rank", "bytes_out", "bytes_in", "peak_bytes", "peak_bytes_without"), 0)
        zero |= dict.fromkeys(("host_peak_bytes", "stayed_bytes", "passes_kept", "passes", "recomputed_bytes"), 0)
        empty = dict.fromkeys(("recomputed_by_operator", "pinned"), ())
        return EngineFigures(**zero | empty | {"stall_seconds": 0.0, "swaps": True, "recomputes": False} | more)


def test_long_tables_show_what_is_largest(tmp_path):
    from mindspeed_mem.activation.figures import OperatorFigures, PinnedFigures

    many = range(3 * MOST_ROWS)
    again = tuple(OperatorFigures(layer=n, op="mlp", bytes=(n + 1) << 20, runs=2) for n in many)
    pinned = tuple(PinnedFigures(layer=n, op="mlp", bytes=(n + 1) << 20, by="a list") for n in many)
    run_file.write(tmp_path, [Engine.of(recomputed_by_operator=again, pinned=pinned)], [], {})

    def events(begin):
        place = {"ph": "i", "s": "p", "pid": 0, "tid": 0}
        marks = [{"name": "evicted", **place, "ts": begin * MS + n, "args": {"times": n + 1}} for n in many]
        return [*passes(begin), *marks]

    write(tmp_path, events=events)
    found = rows(text_of(page_data.read([tmp_path])))
    largest, left_out = f"layer {many[-1]}", f"... and {len(many) - MOST_ROWS} more"
    assert sum(row[0] == left_out for row in found) == 3
    assert [row[1:] for row in found if row[1:2] == [largest]] == [
        [largest, "mlp", f"{len(many)}.00", "2"],
        [largest, "mlp", f"{len(many)}.00", "a list"],
    ]
    assert ["0", f"{many[-1] / MS:.1f}", "evicted", str(len(many))] in found
    assert not any(row[1:2] == ["layer 0"] for row in found)


def test_what_had_to_leave_in_steps_that_are_not_shown_is_told(tmp_path):
    write(tmp_path)
    for evictions, expected in ((0, "run again, in no step"), (3, "in the whole run 2.00 MiB had to leave, in 3 ")):
        run_file.write(tmp_path, [Engine.of(evictions=evictions, evicted_bytes=evictions and 2 << 20)], [], {})
        assert expected in text_of(page_data.read([tmp_path]))


def test_a_trace_elsewhere_is_on_the_page(tmp_path):
    folder, elsewhere = tmp_path / "report", tmp_path / "traces"
    run_file.begin(folder)
    began = run_file.WARNED.since
    write(elsewhere, 0, origin_ns=began + 1)
    run_file.write(folder, [Engine.of()], [], {}, trace=elsewhere / "trace.json")
    assert "step 5 of 1 rank is shown" in (folder / "index.html").read_text(encoding="utf-8")
    write(elsewhere, 0, origin_ns=began - 1)
    assert "of an earlier run" in page_data.read([folder]).remarks[0]
    (elsewhere / "trace.rank0.json").unlink()
    assert f"this run wrote them to {elsewhere}" in page_data.read([folder]).remarks[0]
    run_file.begin(None)


def test_warnings_are_those_of_this_run(tmp_path):
    for run in (1, 2):
        run_file.begin(tmp_path)
        logging.getLogger("mindspeed_mem.plan").warning("said in run %d", run)
        run_file.write(tmp_path, [Engine.of()], [], {})
        assert page_data.read([tmp_path]).about["notices"] == [f"said in run {run}"]
    run_file.begin(None)
    logging.getLogger("mindspeed_mem.plan").warning("said to nobody")
    assert run_file.WARNED.lines == []


def test_no_rank_waits_for_the_page(tmp_path):
    """With others the page is made when the process ends: they may be in a collective."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        run_file.write(tmp_path, [Engine.of()], [], {})
        assert [one.name for one in tmp_path.iterdir()] == ["run.json"]
    finally:
        dist.destroy_process_group()
    run_file.make_pages()
    assert (tmp_path / "index.html").exists()


# ---- metrics, and two runs


def metrics(file, *given):
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps({"iteration": n, "rank": 0, **row}) + "\n" for n, row in enumerate(given, 1)))
    return file


def test_numbers_that_are_none_are_left_out_and_told(tmp_path):
    nan, inf = float("nan"), float("inf")
    one = metrics(tmp_path / "one.jsonl", {"loss": 4.0, "step_ms": 10.0}, {"loss": nan, "step_ms": None}, {"loss": nan})
    other = metrics(tmp_path / "other.jsonl", {"loss": 4.0, "step_ms": nan}, {"step_ms": 20.0}, {"step_ms": inf})
    runs = [page_data.read([one]), page_data.read([other])]
    found = rows(text_of(*runs))
    assert ["loss", "0", "4", "nan", "4"] in found and ["step, ms", "0", "nan", "inf", "20"] in found
    assert not any(row[0].startswith("longest step") for row in found)  # the first run's last half has none
    metrics(one, {"step_ms": 10.0}, {"step_ms": 10.0}, {"step_ms": nan})
    found = rows(text_of(page_data.read([one]), runs[1]))
    assert ["longest step, last half of the iterations", "10.00 ms", "20.00 ms", "2.000"] in found


def test_two_runs_of_one_name_are_told_apart(tmp_path, capsys):
    files = [metrics(tmp_path / folder / "metrics.jsonl", {"step_ms": 1.0}) for folder in ("a", "b")]
    target = tmp_path / "page.html"
    assert main(["report", str(files[0]), "--with", str(files[1]), "--output", str(target)]) == 0
    assert ["highest of the ranks", "a/metrics", "b/metrics", "ratio"] in rows(target.read_text(encoding="utf-8"))
    assert main(["report", str(files[0]), "--with", str(files[0]), "--output", str(target)]) == 0
    assert "metrics (again)" in target.read_text(encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["report", str(files[0]), "--with", str(files[1]), "--names", "x", "x", "--output", str(target)])
    assert "got 'x' for both runs" in capsys.readouterr().err


def test_a_file_that_is_read_is_not_written_over(tmp_path, capsys):
    file = metrics(tmp_path / "metrics.jsonl", {"step_ms": 1.0})
    before = file.read_bytes()
    with pytest.raises(SystemExit):
        main(["report", str(file), "--output", str(file)])
    assert f"--output would write over what RUN {file} reads" in capsys.readouterr().err
    assert file.read_bytes() == before


@pytest.mark.parametrize("text", ["[" * 100_000, "null"], ids=["nested too deeply", "nothing"])
def test_what_is_no_file_of_a_run_is_refused_by_each_command(text, tmp_path, capsys):
    file = tmp_path / "trace.rank0.json"
    file.write_text(text)
    output = ["--output", str(tmp_path / "made")]
    for words in (["trace", *output], ["report", *output], ["plan", "--device-memory-gib", "1", "--trace"]):
        try:
            status = main([words[0], str(file), *words[1:]] if words[0] != "plan" else [*words, str(file)])
        except SystemExit as error:
            status = error.code
        said = capsys.readouterr().err
        assert status == 2 and "Traceback" not in said and (str(file) in said or "--trace is no" in said)
    assert not (tmp_path / "made").exists()
