"""megatron.core.tensor_parallel.random: outputs that Megatron itself discards and recomputes are not swapped.

Why here: ``CheckpointWithoutOutput`` empties its outputs' storages and refills them in place before backward, so they
must stay where they are: a copy out could race with the emptying.
"""

from __future__ import annotations

from mindspeed_mem.activation import replay
from mindspeed_mem.activation.static import mark_managed
from mindspeed_mem.patching import around


@around("megatron.core.tensor_parallel.random:CheckpointWithoutOutput.checkpoint")
def checkpoint(original, self, *args, **kwargs):
    outputs = original(self, *args, **kwargs)
    if replay.running():  # its backward never comes, nor does what would empty it
        self.ctx = self.outputs = self.run_function = self.rng_states = None
    else:
        mark_managed(outputs)
    return outputs


@around("megatron.core.tensor_parallel.random:CheckpointWithoutOutput.discard_output_and_register_recompute")
def discard(original, self, hook_tensor):
    if not replay.running():
        original(self, hook_tensor)
