"""Tensors that Megatron puts on "cuda" by name land on the host, and look to it like a device's.

At torch's own functions, because the literal stands in many places (schedules, clip_grads, optimizer, grad_scaler,
initialize, the user's forward step) that have nothing else in common.
"""

from __future__ import annotations

from types import BuiltinFunctionType

import torch
import torch.utils._device

from mindspeed_mem.patching import around

# Those with `device=` that Megatron or a training script calls.
_FACTORIES = """arange as_tensor empty empty_like empty_strided eye full full_like linspace normal ones ones_like rand
rand_like randint randint_like randn randn_like randperm tensor tril_indices triu_indices zeros zeros_like""".split()

# `with torch.device("meta")` looks the factories up by identity, in a set made at its first use: fill it beforehand.
getattr(torch.utils._device, "_device_constructors", lambda: None)()


def _factory(original, *args, **kwargs):
    """Without pinning, too: it raises on a build without a device, and host memory needs none."""
    device = kwargs.get("device")
    if device is not None and _is_cuda(device):
        kwargs["device"] = "cpu"
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    return original(*args, **kwargs)


for _name in _FACTORIES:
    around(f"torch:{_name}")(_factory)


@around("torch.jit._builtins:_find_builtin")
def _find_builtin(original, fn, *args, **kwargs):
    """TorchScript knows the operators behind these by the identity of torch's own functions."""
    found, inside = original(fn, *args, **kwargs), getattr(fn, "__wrapped__", None)
    return original(inside) if found is None and isinstance(inside, BuiltinFunctionType) else found


@around("torch:Tensor.cuda")
def _cuda(original, self, *args, **kwargs):
    """The tensor itself, as for one that is on the device already; Module.cuda follows."""
    return self


def _to(original, self, *args, **kwargs):
    """Its first argument may be a device, or a dtype or a tensor."""
    if args and not isinstance(args[0], bool) and _is_cuda(args[0]):
        args = ("cpu", *args[1:])
    if kwargs.get("device") is not None and _is_cuda(kwargs["device"]):
        kwargs["device"] = "cpu"
    return original(self, *args, **kwargs)


around("torch:Tensor.to")(_to)
around("torch.nn.modules.module:Module.to")(_to)


def _type(original, self, dtype=None, *args, **kwargs):
    """Named as a device's: the optimizers, clip_grads and distrib_optimizer compare with 'torch.cuda.FloatTensor'."""
    if dtype is None:
        name = original(self)
        return name if not name.startswith("torch.") or ".cuda." in name else "torch.cuda." + name[len("torch.") :]
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.")
    return original(self, dtype, *args, **kwargs)


around("torch:Tensor.type")(_type)
around("torch.nn.parameter:Parameter.type")(_type)  # MindSpeed gives parameters one of their own


def _is_cuda(device) -> bool:
    """Whether this ``device=`` means a GPU (a bare number does)."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return device.startswith("cuda") if isinstance(device, str) else isinstance(device, int)
