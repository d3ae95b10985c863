"""Training on where memory runs out, with the delegating allocator in front of limited memory.

What it rescues, the guard of operators never sees: it makes room inside of them.
"""

from __future__ import annotations

import os
import subprocess

import pytest

from mindspeed_mem.device import get_backend
from mindspeed_mem.experimental import delegating
from tests import warm
from tests.worlds import on_ranks, parallel

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def folder(tmp_path_factory, limited_memory) -> str:
    place = tmp_path_factory.mktemp("allocator")
    delegating.build(place)
    return str(place)


def plain(kind: str) -> list:
    from tests.limited_runs import Training, counted

    with parallel(), counted() as memory:
        training = Training(memory, kind)
        return [training.step() for _ in range(3)]


def with_less_memory(kind: str, share: float, folder: str) -> tuple[list, int, int]:
    """Three steps, two of them with this share of the memory that the first needs: what they computed, and how often
    the allocator and the guard of operators have rescued them."""
    from mindspeed_mem.device.op_needs import OpNeeds
    from tests.limited_runs import Training, counted, surviving

    with parallel(), counted() as memory, surviving() as engine, pytest.MonkeyPatch.context() as patch:
        patch.setenv(delegating.FOLDER_VARIABLE, folder)  # only now: an engine that finds it installs it for good
        training = Training(memory, kind)
        steps = [training.step()]
        limit, before = int(share * training.peak), delegating.retries()
        undo = delegating.install(get_backend("cpu"), lambda nbytes: engine.mover.make_room(nbytes, set()) or 0)
        patch.setattr(OpNeeds, "of", lambda *_: 0)  # else room is made before the allocator has to ask
        try:
            steps += [training.step(limit) for _ in range(2)]
        finally:
            undo()
        assert training.peak <= limit
        return steps, delegating.retries() - before, engine.survival.guard.retries


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_every_bit_is_the_same_with_half_the_memory(folder, kind):
    from tests.limited_runs import different

    (expected,) = on_ranks(1, plain, kind)
    ((found, rescued, by_guard),) = on_ranks(1, with_less_memory, kind, 0.5, folder)
    assert [different(one, other) for one, other in zip(expected, found, strict=True)] == [[], [], []]
    assert rescued > 0 and by_guard == 0


@pytest.mark.parametrize("built", [True, False])
def test_the_flag_takes_it_where_it_is_built(folder, tmp_path, built):
    code = "import mindspeed_mem.megatron_adaptor as mem; mem.configure({})"
    environment = {**os.environ, "MINDSPEED_MEM_ALLOCATOR": folder if built else str(tmp_path)}
    command = [warm.python(), "-c", code, "--survive-oom", "--device", "cpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ("device memory is asked for by the delegating allocator" in done.stdout + done.stderr) == built
