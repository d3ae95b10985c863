"""``python -m mindspeed_mem demo``, in an empty folder."""

import re

import pytest

from tests import warm
from tests.examples.jobs import ROOT, rows, start

DEMO = ["-m", "mindspeed_mem", "demo"]
BESIDE = {"PYTHONPATH": ROOT}


@pytest.mark.slow
def test_it_shows_what_is_saved_and_that_no_bit_changes(tmp_path):
    pytest.importorskip("scipy")
    pytest.importorskip("plotly")
    command = [warm.python(), *DEMO, "--device", "cpu", "--steps", 12, "--folder", tmp_path / "demo"]
    job = start(command, BESIDE).succeeded()
    found = re.findall(r"^(\S.*?)  +([\d.]+)  +([\d.]+)  +(\d+)  +([\d.]+)  ?(yes|NO|)$", job.output, re.MULTILINE)
    assert [(row[0], row[5]) for row in found] == [
        ("without the package", ""),
        ("Megatron's full recompute", "yes"),
        ("swap of all activations", "yes"),
        ("planned, in 60% of the memory", "yes"),
    ]
    kept, full, swapped, planned = (float(row[1]) for row in found)
    assert max(full, swapped, planned) < kept / 2
    assert [float(row[2]) > 0 for row in found] == [False, False, True, True]
    assert [len(rows(tmp_path / "demo" / f"{name}.jsonl")) for name in ("without", "adaptive")] == [12, 12]
    assert f"metrics and logs: {tmp_path}/demo/" in job.output and f"{ROOT}/examples/" in job.output
    page = (tmp_path / "demo" / "page.html").read_text(encoding="utf-8")
    assert (
        "<h2>Compared</h2>" in page
        and page.count("Memory over a step</h3>") == 2
        and 'class="none">There is no ' not in page
    )


def test_wrong_usage_is_refused_before_anything_runs(tmp_path):
    job = start([warm.python(), *DEMO, "--device", "gpu", "--steps", "3", "--folder", tmp_path / "demo"], BESIDE)
    job.refused("--steps: got 3, must be at least 12", "--device: ")
    assert job.status == 2 and not (tmp_path / "demo").exists()
