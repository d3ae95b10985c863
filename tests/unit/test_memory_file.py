"""Files for torch's memory viewer: torch's own reader takes them, and they say what a ledger has counted."""

import pickle
import pickletools

import pytest
import torch
from torch.cuda import _memory_viz

from mindspeed_mem.activation.storage.ledger import Ledger, logged
from mindspeed_mem.report import memory_file

READ = set(
    """PROTO FRAME STOP MARK MEMOIZE BINGET LONG_BINGET BINPUT LONG_BINPUT EMPTY_DICT DICT SETITEM SETITEMS EMPTY_LIST
    LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 SHORT_BINUNICODE BINUNICODE BININT BININT1 BININT2 LONG1
    BINFLOAT NEWTRUE NEWFALSE NONE""".split()
)
"""What torch/utils/viz/MemoryViz.js knows of pickle."""


@pytest.fixture
def noted(tmp_path):
    """What is read back of a ledger that was noted while tensors came and went."""
    ledger, log = Ledger(), memory_file.Allocations(lambda layer, op: f"layer {layer} {op}")
    ledger.token = logged(log)
    kept, gone = torch.empty(3 << 18), torch.empty(100)
    log.during = "forward 0"
    ledger.enter(kept.untyped_storage(), owned=True, owner=(2, "mlp"))
    ledger.enter(gone.untyped_storage(), owned=True, owner=(2, "mlp_bda"))
    ledger.enter(kept.untyped_storage(), owned=True, owner=(3, "mlp"))  # known already
    log.during = "backward 0"
    del gone
    back = torch.empty(100)
    ledger.enter_copy(back.untyped_storage(), owned=True, owner=(2, "mlp_bda"))
    log.close()
    del back
    file = memory_file.beside(tmp_path / "trace.rank0.json")
    memory_file.write(file, log.events)
    assert file.name == "trace.rank0.memory.pickle"
    used = {one.name for one, _, _ in pickletools.genops(file.read_bytes())}
    assert used <= READ, "the viewer in the browser has a reader of its own"
    return pickle.loads(file.read_bytes())


def test_it_says_who_came_and_went(noted):
    [trace] = noted["device_traces"]
    assert [(one["action"], one["size"], one["frames"][0]["name"], one["frames"][1]["name"]) for one in trace] == [
        ("alloc", 3 << 20, "layer 2 mlp", "forward 0"),
        ("alloc", 400, "layer 2 mlp_bda", "forward 0"),
        ("free_requested", 400, "layer 2 mlp_bda", "forward 0"),
        ("free_completed", 400, "layer 2 mlp_bda", "forward 0"),
        ("alloc", 400, "layer 2 mlp_bda", "backward 0"),
    ]
    assert [one["frames"][0]["filename"] for one in trace] == ["made"] * 4 + ["brought back"]
    assert all(one["time_us"] <= other["time_us"] for one, other in zip(trace, trace[1:], strict=False))
    assert len({one["addr"] for one in trace if one["action"] == "alloc"}) == 3


def test_torch_reads_it(noted):
    text = _memory_viz.trace(noted)
    assert "5 entries" in text and "a = seg_0[0:3.0MiB]" in text and "free completed" in text
    assert "total_allocated: 3.0MiB" in _memory_viz.segsum(noted)
    lines = _memory_viz.memory(noted, format_flamegraph=str).splitlines()
    assert "stream_0;active_allocated;pass:0:forward 0;made:0:layer 2 mlp 3145728" in lines
    assert "viz" in _memory_viz.trace_plot(noted)


def test_an_empty_step_is_a_file_as_well():
    found = memory_file.snapshot([])
    assert found["segments"] == [] and found["device_traces"] == [[]]
    assert "total_reserved: 0.0B" in _memory_viz.segsum(found)
