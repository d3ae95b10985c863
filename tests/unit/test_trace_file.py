"""The traces of ranks become one."""

import json

import pytest

from mindspeed_mem.__main__ import main
from mindspeed_mem.report import trace_file


def event(rank, ts):
    return {"name": "forward 0", "ph": "X", "pid": rank, "tid": 0, "ts": ts, "dur": 1.0}


@pytest.fixture
def files(tmp_path):
    """Rank 1 began 2 microseconds after rank 0."""
    found = []
    for rank in (0, 1):
        found.append(trace_file.file_of_rank(tmp_path / "trace.json", rank))
        trace_file.begin(found[-1], {"rank": rank, "origin_ns": 10**18 + 2000 * rank}, [event(rank, 0.5)])
        trace_file.extend(found[-1], [event(rank, 7.25)])
        trace_file.extend(found[-1], [])
    return found


def test_a_file_is_whole_after_each_step(files):
    assert [one["ts"] for one in json.loads(files[1].read_text())["traceEvents"]] == [0.5, 7.25]
    assert [file.name for file in files] == ["trace.rank0.json", "trace.rank1.json"]


def test_ranks_are_put_together_by_one_clock(files, tmp_path, capsys):
    target = tmp_path / "all.json"
    assert main(["trace", *map(str, reversed(files)), "--output", str(target)]) == 0
    trace = json.loads(target.read_text())
    assert [(one["pid"], one["ts"]) for one in trace["traceEvents"]] == [(0, 0.5), (0, 7.25), (1, 2.5), (1, 9.25)]
    assert "2 ranks, 4 events" in capsys.readouterr().out


def test_all_that_is_wrong_is_said_at_once(files, tmp_path, capsys):
    other, old = tmp_path / "other.json", tmp_path / "old.json"
    other.write_text("[]")
    old.write_text(files[0].read_text().replace('"version": 1', '"version": 0'))
    given = [files[0], files[0], other, tmp_path / "none.json", old]
    with pytest.raises(SystemExit) as caught:
        main(["trace", *map(str, given), "--output", str(tmp_path / "no" / "all.json")])
    said = capsys.readouterr().err
    assert caught.value.code == 2
    for part in ("both of rank 0", "other.json is no trace", "none.json: No such file", "another version", "no folder"):
        assert said.count(part) == 1


def test_a_trace_that_is_read_is_not_written_over(files, capsys):
    before = files[0].read_bytes()
    with pytest.raises(SystemExit) as caught:
        main(["trace", *map(str, files), "--output", str(files[0])])
    assert caught.value.code == 2 and files[0].read_bytes() == before
    assert f"--output would write over what FILE {files[0]} reads" in capsys.readouterr().err
