"""`make device` as on a machine with a GPU: each of its pieces, tiny, in processes that have one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator.building import library

ROOT = Path(__file__).parents[2]
STARTS = f"""
import pathlib, sys
sys.path.append({str(ROOT)!r})
from tests.accelerator import stand_in
stand_in.start("cuda", pathlib.Path({{library!r}}), 4.0)
"""
OF_TIME = ("- MISSED: cap 0.5: ", "- MISSED: each of Megatron's is matched with no more memory, and no more than 1.02 ")


@pytest.mark.sweep
def test_every_piece_runs_and_no_bit_is_another(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(STARTS.format(library=str(library("cuda"))))
    results = tmp_path / "results"
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "on_device.py"), "--device", "cuda", "--tiny", "--results", results],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    page = (results / "README.md").read_text()
    assert done.returncode in (0, 1), done.stderr  # 1: times that say nothing here miss goals
    missed = [line for line in page.splitlines() if line.startswith("- MISSED: ")]
    assert all(line.startswith(OF_TIME) for line in missed), missed
    records = {path.stem: json.loads(path.read_text()) for path in results.glob("*.json")}
    assert {name for name, record in records.items() if record["status"] != "done"} == set(), page
    assert {"doctor", "gpu-tests", "bits-activations", "bits-chunks", "bits-gemini", "bits-pipeline"} <= set(records)
    assert {"swap", "recompute", "host_cost", "adaptive", "chunk_zero"} <= set(records)
