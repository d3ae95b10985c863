"""Which device is chosen, and what is said when it cannot be had."""

import subprocess
import sys

import pytest
import torch

from mindspeed_mem.device import DeviceError, available_backends, get_backend


@pytest.fixture(autouse=True)
def no_choice_in_environment(monkeypatch):
    monkeypatch.delenv("MINDSPEED_MEM_DEVICE", raising=False)


@pytest.mark.parametrize("name", ["cpu", "simulated"])
def test_devices_that_are_always_there(name):
    backend = get_backend(name)
    assert backend.type == name
    assert get_backend(name) is backend
    assert name in available_backends()


def test_the_best_device_present_is_chosen_and_never_the_simulated_one():
    assert get_backend().type == available_backends()[0]
    assert get_backend("auto") is get_backend(None)
    assert get_backend().type != "simulated"


def test_the_environment_decides_when_nothing_is_asked_for(monkeypatch):
    monkeypatch.setenv("MINDSPEED_MEM_DEVICE", "simulated")
    assert get_backend().type == "simulated"
    assert get_backend("cpu").type == "cpu"
    monkeypatch.setenv("MINDSPEED_MEM_DEVICE", "auto")
    assert get_backend().type == available_backends()[0]


def test_an_unknown_device_is_refused_with_what_is_allowed(monkeypatch):
    with pytest.raises(DeviceError, match=r"'tpu' is unknown; allowed: auto, npu, cuda, cpu; present here: .*cpu"):
        get_backend("tpu")
    monkeypatch.setenv("MINDSPEED_MEM_DEVICE", "gpu")
    with pytest.raises(DeviceError, match=r"'gpu' \(from MINDSPEED_MEM_DEVICE\) is unknown"):
        get_backend()


@pytest.mark.parametrize("name", ["cuda", "npu"])
def test_an_absent_device_is_refused_with_a_reason_and_a_way_out(name):
    if name in available_backends():
        pytest.skip(f"{name} is present here")
    with pytest.raises(ValueError, match=rf"'{name}' is not available: .*; present here: .*cpu.*; choose one of these"):
        get_backend(name)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch is built for CUDA")
def test_host_stand_ins_in_torch_cuda_do_not_make_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert "cuda" not in available_backends()
    with pytest.raises(DeviceError, match="built without CUDA"):
        get_backend("cuda")


def test_asking_for_the_cpu_loads_no_accelerator_code():
    code = (
        "import sys; from mindspeed_mem.device import get_backend; get_backend('cpu'); "
        "print([m for m in sys.modules if m.startswith(('torch_npu', 'mindspeed_mem.device.npu', "
        "'mindspeed_mem.device.cuda'))])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
