"""The delegating allocator: it is built, and the CPU's under a limit really asks for room."""

import gc
import shutil
import threading
import weakref

import pytest
import torch

from mindspeed_mem.__main__ import main
from mindspeed_mem.device import DeviceError, get_backend
from mindspeed_mem.device.limited_cpu import LimitedMemory
from mindspeed_mem.device.native_build import CompilerError
from mindspeed_mem.experimental import delegating

MB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("allocator")
    try:
        delegating.build(place)
    except CompilerError as error:
        if not any(map(shutil.which, ("c++", "g++", "clang++"))):
            pytest.skip(str(error))
        raise
    return place


@pytest.fixture
def installed(folder, monkeypatch):
    """A function that installs the CPU's allocator over limited memory with a given `make_room`; undone at the end."""
    monkeypatch.setenv(delegating.FOLDER_VARIABLE, str(folder))
    with LimitedMemory() as memory:
        undo = []

        def install(make_room):
            undo.append(delegating.install(get_backend("cpu"), make_room))
            return memory, undo[0]

        yield install
        for one in undo:
            one()


def empty(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8)


def test_room_is_asked_for_and_the_request_made_again(installed):
    held, asked = [], []

    def make_room(nbytes):
        asked.append(nbytes)
        return held.pop().nbytes if held else 0

    memory, _ = installed(make_room)
    before = delegating.retries()
    held += [empty(MB) for _ in range(8)]
    memory.limit = memory.allocated
    got = torch.ones(MB // 2)  # 2 MiB: two of those held
    assert asked == [2 * MB, 4 * MB] and delegating.retries() == before + 2  # more each time
    assert len(held) == 6
    memory.limit = None
    assert float(got.sum()) == MB // 2


def test_where_no_room_can_be_made_the_error_is_torchs_own(installed):
    asked = []
    memory, undo = installed(lambda nbytes: asked.append(nbytes) or 0)
    memory.limit = memory.allocated
    with pytest.raises(torch.OutOfMemoryError, match=f"Tried to allocate {MB} bytes") as caught:
        empty(MB)
    assert asked == [MB] and get_backend("cpu").is_out_of_memory(caught.value)
    undo()
    with pytest.raises(torch.OutOfMemoryError):
        empty(MB)
    assert asked == [MB]


def test_undone_it_keeps_nothing_of_who_made_room(installed):
    class Engine:
        def make_room(self, nbytes):
            return 0

    engine = Engine()
    gone = weakref.ref(engine)
    _, undo = installed(engine.make_room)
    undo()
    del engine
    gc.collect()
    assert gone() is None


def test_an_exception_while_making_room_is_logged_and_the_request_fails(installed, caplog):
    def make_room(nbytes):
        raise KeyError("what")

    memory, _ = installed(make_room)
    memory.limit = memory.allocated
    with pytest.raises(torch.OutOfMemoryError):
        empty(MB)
    assert "making room for 1048576 bytes failed" in caplog.text


def test_who_makes_room_is_not_asked_for_its_own_requests(installed):
    asked = []

    def make_room(nbytes):
        asked.append(nbytes)
        with pytest.raises(torch.OutOfMemoryError):
            empty(MB)
        return 0

    memory, _ = installed(make_room)
    memory.limit = memory.allocated
    with pytest.raises(torch.OutOfMemoryError):
        empty(MB)
    assert len(asked) == 1


def test_it_works_in_the_middle_of_a_backward(installed):
    """Gradients are bit-identical though what was held leaves while an operator of backward allocates."""

    def gradients():
        torch.manual_seed(5)
        layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
        layers(torch.randn(64, 256)).square().sum().backward()
        return [parameter.grad.numpy().copy() for parameter in layers.parameters()]

    expected, held = gradients(), []
    gc.collect()
    memory, _ = installed(lambda nbytes: held.pop().nbytes if held else 0)
    held += [empty(64 << 10) for _ in range(100)]
    memory.limit = memory.allocated + MB  # the parameters alone have that
    found = gradients()
    assert all((one == other).all() for one, other in zip(found, expected, strict=True)) and 0 < len(held) < 100


def test_threads_do_not_wait_for_each_other(installed):
    """Some allocate, which makes room under the GIL, while others free: with a lock held meanwhile they would hang."""
    held, lock = [], threading.Lock()

    def make_room(nbytes):
        with lock:
            gone = [held.pop() for _ in range(min(len(held), 2))]
        return sum(one.nbytes for one in gone)

    memory, _ = installed(make_room)
    memory.limit = memory.allocated + 16 * MB
    failures = []

    def work():
        try:
            for _ in range(60):
                one = torch.ones(MB // 4).mul(2).add(1)
                assert float(one[0]) == 3.0
                with lock:
                    held.append(one)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads) and not failures


def test_what_is_not_built_is_not_available(monkeypatch, tmp_path):
    monkeypatch.setenv(delegating.FOLDER_VARIABLE, str(tmp_path))
    assert delegating.available() is None and delegating.retries() == 0
    with pytest.raises(DeviceError, match="not built for torch .*: run python -m mindspeed_mem build-allocator"):
        delegating.install(get_backend("cpu"), lambda nbytes: 0)


def test_the_command_builds_it_where_asked(folder, tmp_path, capsys, monkeypatch):
    assert main(["build-allocator", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1] == f"where you train: export MINDSPEED_MEM_ALLOCATOR={tmp_path}"
    monkeypatch.setenv("MINDSPEED_MEM_ALLOCATOR", str(tmp_path))
    assert str(delegating.available()) == printed[0]


def test_a_folder_that_does_not_exist_is_refused(capsys, tmp_path):
    assert main(["build-allocator", "--output", str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_the_simulated_device_has_no_allocator_of_its_own(folder, monkeypatch):
    monkeypatch.setenv(delegating.FOLDER_VARIABLE, str(folder))
    assert not delegating.install_if_built(get_backend("simulated"), lambda nbytes: 0)


def test_no_room_is_made_for_an_error_that_only_looks_like_a_lack_of_memory(installed, monkeypatch):
    """torch_npu's queue, once lost, says so at the next allocation: with room made it would silently do nothing."""
    asked, said = [], []
    memory, _ = installed(lambda nbytes: asked.append(nbytes) or 0)
    monkeypatch.setattr(type(get_backend("cpu")), "is_out_of_memory", lambda self, error: said.append(str(error)))
    memory.limit = memory.allocated
    with pytest.raises(torch.OutOfMemoryError):
        empty(MB)
    assert not asked and "Tried to allocate 1048576 bytes" in said[0]


def test_another_torch_needs_another_library(folder, monkeypatch):
    monkeypatch.setenv(delegating.FOLDER_VARIABLE, str(folder))
    assert delegating.available() is not None
    monkeypatch.setattr(torch, "__version__", "2.14.0")
    assert delegating.available() is None


@pytest.mark.gpu
def test_a_gpu_asks_for_room(tmp_path, monkeypatch):
    """Built and installed for real; the limit makes the GPU small."""
    try:
        delegating.build(tmp_path)
    except DeviceError as error:
        pytest.skip(str(error))
    monkeypatch.setenv(delegating.FOLDER_VARIABLE, str(tmp_path))
    backend, held = get_backend("cuda"), []
    torch.cuda.empty_cache()
    undo = delegating.install(backend, lambda nbytes: held.pop().nbytes if held else 0)
    try:
        backend.limit_memory(backend.allocated() + 512 * MB)
        held += [backend.empty(64 * MB) for _ in range(6)]
        stats = torch.cuda.memory_stats()
        got = backend.empty(256 * MB).fill_(3)
        assert int(got[-1]) == 3 and len(held) < 6
        assert torch.cuda.memory_stats()["num_ooms"] > stats["num_ooms"]
        with pytest.raises(torch.OutOfMemoryError):
            backend.empty(1024 * MB)
    finally:
        undo()
        backend.limit_memory(None)
