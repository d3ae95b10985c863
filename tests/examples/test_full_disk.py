"""A disk that is full when a checkpoint is due: path and reason, no half checkpoint, and the last one loads."""

import os
import re

import pytest

from tests.examples.jobs import EXAMPLES, train, train_by

SAVES = ["--num-layers", "2", "--train-iters", "4", "--save-interval", "2"]
# No file may grow beyond some bytes from the moment on at which the checkpoint of iteration 4 begins.
FILLS_UP = f"""
import os, resource, runpy, sys

original = os.mkdir

def mkdir(path, *more, **named):
    original(path, *more, **named)
    if "iter_0000004" in os.fspath(path):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["ROOM"]), resource.RLIM_INFINITY))

os.mkdir = mkdir
sys.argv[0] = {str(EXAMPLES / "pretrain_gpt.py")!r}
sys.path.insert(0, {str(EXAMPLES)!r})
if __name__ == "__main__":
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    program, saved = tmp_path / "fills_up.py", tmp_path / "saved"
    program.write_text(FILLS_UP)
    both = [*SAVES, "--save", saved, "--load", saved]
    # The first is met by Megatron's writers, in their own writing or in torch's; the second by torch.save.
    by_writers = r"rank 0: (Worker failure: \[Errno 27\] File too large|torch could not write a file)"
    for room, reason in ((30000, by_writers), (500, "torch could not write a file")):
        job = train_by(program, *both, ROOM=room)
        job.refused(f"error: cannot save {saved}/iter_0000004: ", f"MiB are free in {saved})")
        assert re.search(f"iter_0000004: {reason} ", job.output)
        assert "Traceback" not in job.output and job.status == 2
        assert sorted(os.listdir(saved)) == ["iter_0000002", "latest_checkpointed_iteration.txt"]
    job = train(*both).succeeded()
    assert "continuing after iteration 2" in job.output
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "4"


def test_a_metrics_file_that_cannot_be_written_is_named(tmp_path):
    train("--metrics-file", "/dev/full", "--num-layers", "1", "--train-iters", "2").refused(
        "error: --metrics-file /dev/full: No space left on device"
    )
