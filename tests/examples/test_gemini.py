"""examples/train_gpt_gemini.py as a user runs it, and the errors that it tells."""

import os
import re

import pytest

from tests import warm
from tests.examples.jobs import EXAMPLES, ROOT, start

SMALL = """--model_type gpt2_tiny --vocab_size 257 --batch_size 2 --sequence_length 128 --device cpu --num_steps 5
--learning_rate 3e-3 --search_range_mb 0.01 --min_chunk_size_mb 0.03 --memory_limit_gib 2""".split()


def run(*arguments, ranks=1, before=()):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [warm.python(), *launch, EXAMPLES / "train_gpt_gemini.py", *SMALL, *arguments]
    path = os.pathsep.join(filter(None, [*before, str(ROOT), os.environ.get("PYTHONPATH")]))
    return start(command, {"PYTHONPATH": path})


def losses(job):
    return [float(loss) for loss in re.findall(r"loss ([\d.]+),", job.output)]


@pytest.mark.slow
def test_layers_split_over_ranks_learn_as_whole_ones():
    pytest.importorskip("transformers")
    whole = run("--precision", "fp32").succeeded()
    split = run("--precision", "fp32", "--tp_degree", "2", "--checkpoint_activations", ranks=2).succeeded()
    assert "2 ranks: 2 tensor-parallel x 1 data-parallel" in split.output
    assert losses(split) == pytest.approx(losses(whole), abs=2e-4) and len(losses(whole)) == 5
    elements = [re.search(r"gpt2_tiny: ([\d,]+) parameters", job.output).group(1) for job in (whole, split)]
    assert elements[0] == elements[1]


@pytest.mark.slow
@pytest.mark.sweep
def test_it_learns_with_less_device_memory_on_two_ranks_and_the_host():
    pytest.importorskip("transformers")
    peaks = []
    for job in (run("--placement", "cuda"), run("--placement", "cpu", "--checkpoint_activations", ranks=2)):
        job.succeeded()
        assert len(losses(job)) == 5 and losses(job)[-1] < losses(job)[0] - 0.2
        assert re.search(r"step 5: .* [\d.]+ s, [\d.]+ TFLOP/s", job.output)
        peak, gathers = re.search(r"peak device memory ([\d,]+) bytes; ([\d.]+) gathers", job.output).groups()
        assert float(gathers) > 0
        peaks.append(int(peak.replace(",", "")))
    assert peaks[1] < peaks[0]


def test_errors_are_told(tmp_path):
    run("--batch_size", "0", "--tp_degree", "3").refused(
        "are at least 1", "--tp_degree 3 does not divide 2 attention heads, 256 feed-forward columns, 1 ranks"
    )
    (tmp_path / "transformers.py").write_text("raise ModuleNotFoundError(name='transformers')")
    run(before=[str(tmp_path)]).refused('pip install "mindspeed-mem[gemini]"')


def test_a_placement_that_there_is_not_is_refused():
    pytest.importorskip("transformers")
    run("--placement", "nowhere").refused("placement_policy is one of device")
