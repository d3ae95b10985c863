"""What `plan` says of a model without a device, against what was measured on one (benchmarks/results)."""

import json
import re
from pathlib import Path

import pytest

from mindspeed_mem.__main__ import main
from mindspeed_mem.adaptive.problem import profile_file

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MODEL = (
    "--num-layers 16 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 8192 "
    "--micro-batch-size 4 --global-batch-size 4 --vocab-size 32000 --swiglu --disable-bias-linear "
    "--normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0 "
    "--attention-dropout 0"
)
"""The model of that adaptive.json."""
ROW = re.compile(r"^(\S.*?) {2,}([\d.]+) +[+-][\d.]+ % +([\d.]+) ", re.MULTILINE)
OURS = {
    "keep all": "keep all, no cap",
    "Megatron's full recompute": "Megatron full recompute",
    "Megatron's --recompute-num-layers 10": "Megatron block recompute, 10 of 16",
}


@pytest.fixture(scope="module")
def measured():
    text = (RESULTS / "nvidia-h200-2026-11-26" / "adaptive.json").read_text()
    return json.loads(text)["caps"]["105GB"]["policies"]


def test_a_dense_model_on_an_h200(measured, capsys, tmp_path):
    file = tmp_path / "profile.json"
    # Room for what 10 layers of recompute leave, with all that an optimizer keeps, which the benchmark does not hold.
    words = [*MODEL.split(), "--device-name", "h200", "--device-memory-gib", "95.2", "--reserve-gib", "0"]
    assert main(["plan", *words, "--write-trace", str(file)]) == 0
    found = {name: (float(seconds), float(gib)) for name, seconds, gib in ROW.findall(capsys.readouterr().out)}
    [stage] = profile_file.read(file).problem.stages
    for name, theirs in OURS.items():
        seconds, peak = found[name][0] - stage.step_seconds, found[name][1] - stage.static_bytes / 2**30
        # It is printed to a hundredth of a GiB: a thousandth of the smallest of these peaks.
        assert peak == pytest.approx(measured[theirs]["device_bytes_at_peak"] / 2**30, rel=0, abs=0.01), name
        assert seconds == pytest.approx(measured[theirs]["median_ms"] / 1e3, rel=0.03), name
