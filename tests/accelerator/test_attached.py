"""What `attach` refuses on accelerators: devices other than the current one, several of them, captured graphs."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch

import mindspeed_mem
from mindspeed_mem.activation import engine as engines
from tests.attachment.plain_models import SWAP, Net, accumulated, loss_of, results
from tests.models import DEVICE
from tests.worlds import on_ranks

pytestmark = pytest.mark.distributed


def refused(*placed: str, buffer: str | None = None) -> str:
    """What `attach` says of a model whose blocks are on these devices, the last one with all else."""
    model = Net(len(placed)).to(placed[-1])
    for block, device in zip(model.blocks, placed, strict=True):
        block.to(device)
    if buffer is not None:
        model.register_buffer("counted", torch.zeros(1, device=buffer))
    try:
        mindspeed_mem.attach(model, SWAP, device_memory_gib=1, host_memory_gib=0).detach()
    except ValueError as error:
        assert engines.current() is None
        return str(error)
    return ""


def of_places(kind: str) -> dict[str, str]:
    module = torch.get_device_module(kind)
    first, second = f"{kind}:0", f"{kind}:1"
    found = {
        "other": refused(second, second),
        "both": refused(first, second),
        "a buffer": refused(first, first, buffer=second),
        "host": refused("cpu", first),
    }
    module.set_device(1)
    try:
        found["made current"] = refused(second, second)
        found["the first"] = refused(first, first)
    finally:
        module.set_device(0)
    return found


@pytest.mark.host
@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_a_model_is_on_the_current_device(kind):
    [found] = on_ranks(1, of_places, kind, device=kind)
    assert all("host_memory_gib: got 0" in text for text in found.values())  # said with all else
    assert f"on {kind}:1, and the current device is {kind}:0; call torch.{kind}.set_device(1)" in found["other"]
    assert f"on {kind}:0, and the current device is {kind}:1; call torch.{kind}.set_device(0)" in found["the first"]
    for several in ("both", "a buffer"):
        assert f"it is on {kind}:0 and {kind}:1; allowed: one device" in found[several]
        assert "FSDP2" in found[several] and "DistributedDataParallel" in found[several]
        assert "set_device" not in found[several]
    assert "it is on cpu and " + kind in found["host"] and "one kind of device" in found["host"]
    assert "model:" not in found["made current"]


def captured() -> str:
    """What a forward says in a capture, after one without; nothing of that is left."""
    model = Net().to(DEVICE)
    with mindspeed_mem.attach(model, SWAP) as attached:
        results(model, accumulated, times=1)
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
            with torch.no_grad():
                loss_of(model)  # nothing is kept, the plan has nothing to do
            with pytest.raises(RuntimeError) as caught:
                loss_of(model)
        results(model, accumulated, times=1)
        moved = attached.engine.report()
        assert moved.bytes_out and not moved.held_bytes
    with mindspeed_mem.attach(model, None), mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
        loss_of(model).backward()
    return str(caught.value)


CAPTURED = "a CUDA graph is being captured .* parts of its layers, .* or detach"


@pytest.mark.host
def test_a_forward_with_a_plan_is_not_captured():
    [text] = on_ranks(1, captured, device="cuda")
    assert re.search(CAPTURED, text)


class Given(torch.nn.Module):
    """Takes numbers, which graphs need."""

    def __init__(self):
        super().__init__()
        self.blocks = Net().blocks

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.gpu
def test_graphs_of_whole_models_are_refused():
    given = torch.randn(2, 5, 16, device="cuda")
    model = Given().cuda()
    with mindspeed_mem.attach(model, SWAP):
        with pytest.raises(RuntimeError, match=CAPTURED):
            torch.cuda.make_graphed_callables(model, (given,))
        torch.cuda.synchronize()
        model(given).backward()
