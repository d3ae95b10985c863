"""Checkpoints that discard their outputs and compute them again: Megatron's, and MindSpeed's two of that name.

Why here: ``CheckpointWithoutOutput`` empties its outputs' storages and refills them in place before backward, so they
must stay where they are: a copy out could race with the emptying. Its inputs it saves as leaves that need gradients,
which autograd never lets go of: saved without that, they can leave the device, and become leaves when they are read.
"""

from __future__ import annotations

from mindspeed_mem.activation.rerun import module_rerun
from mindspeed_mem.activation.storage.marks import mark_managed
from mindspeed_mem.patching import around

_MEGATRON = "megatron.core.tensor_parallel.random:"
_MINDSPEED = ("mindspeed.core.memory.recompute.recompute_common:", "mindspeed.core.tensor_parallel.random:")
_HELD = ("ctx", "outputs", "run_function", "rng_states") + tuple(
    f"fwd_{name}_rng_state{of}" for name, of in (("cpu", ""), ("cuda", ""), ("cuda", "_tracker"))
)


class _Context:
    """The context as the checkpoint sees it."""

    __slots__ = ("_ctx",)

    def __init__(self, ctx):
        object.__setattr__(self, "_ctx", ctx)

    def __getattr__(self, name):
        return getattr(self._ctx, name)

    def __setattr__(self, name, value):
        setattr(self._ctx, name, value)

    def save_for_backward(self, *tensors):
        self._ctx._mem_wants = [one is not None and one.requires_grad for one in tensors]
        self._ctx._mem_leaves = None
        self._ctx.save_for_backward(*(None if one is None else one.detach() for one in tensors))

    @property
    def saved_tensors(self):
        """Leaves, the same ones for the second run and for backward, which asks them for their gradients."""
        ctx = self._ctx
        if ctx._mem_leaves is None:
            found = zip(ctx.saved_tensors, ctx._mem_wants, strict=True)
            ctx._mem_leaves = tuple(one if one is None else one.detach().requires_grad_(wants) for one, wants in found)
        return ctx._mem_leaves


def forward(original, ctx, run_function, *args):
    return original(_Context(ctx), run_function, *args)


def backward(original, ctx, *gradients):
    try:
        return original(_Context(ctx), *gradients)
    finally:
        ctx._mem_leaves = None


def checkpoint(original, self, run_function, *args):
    outputs = original(self, run_function, *args)
    if module_rerun.running():  # its backward never comes, nor does what would empty it
        vars(self).update(dict.fromkeys(vars(self).keys() & set(_HELD)))
    else:
        mark_managed(outputs)
    return outputs


def discard(original, self, *args):
    if not module_rerun.running():
        original(self, *args)


for _module, _function, _discard in (
    (_MEGATRON, "CheckpointWithoutOutputFunction", "discard_output_and_register_recompute"),
    *((module, "CheckpointFunctionWithoutOutput", "discard_output") for module in _MINDSPEED),
):
    for _method, _ours in (
        (f"{_function}.forward", forward),
        (f"{_function}.backward", backward),
        ("CheckpointWithoutOutput.checkpoint", checkpoint),
        (f"CheckpointWithoutOutput.{_discard}", discard),
    ):
        around(_module + _method, optional=_module in _MINDSPEED)(_ours)
