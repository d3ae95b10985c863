"""megatron.core.optimizer.DistributedOptimizer: reads gradients from chunks' shards, and writes parameters to them.

Why here: these three methods are the only way between a model's buffers and the optimizer's masters. Everything else
(unscaling, norm, clipping, the step itself, checkpoints) works on the masters, and stays Megatron's.
"""

from __future__ import annotations

import torch

from mindspeed_mem.patches import _distributed_optimizer as masters
from mindspeed_mem.patching import around
from mindspeed_mem.zero.buffers import runtime

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer."


@around(_OPTIMIZER + "__init__")
def init(original, self, *args, **kwargs):
    now = runtime.current()
    original(self, *args, **kwargs)
    if not masters.all_chunks(self):
        return
    for _, master in masters.of_fp32(self):
        # A view of its parameter, whose graph would keep the model, and so its chunks, for ever. (Of one made without
        # a graph torch 2.15 takes no gradient once it was written.) Others have it already: it stays the same object.
        plain = master.detach().requires_grad_(master.requires_grad)
        vars(plain).update(vars(master))
        torch.utils.swap_tensors(master, plain)
    assert now is not None, "whoever made the chunks"
    stores = now.stores(self.buffers)
    for chunks in masters.all_chunks(self):
        chunks.seal(self.buffers, stores)
    if _sharded_parameters(self):
        # In fp32 the masters are views of the model's own memory, which is gone: the shards are the masters now.
        for model_param, master in masters.of_fp32(self):
            master.data = masters.chunks_of(self, model_param).shard(model_param)
        for chunks in masters.all_chunks(self):
            pairs = masters.of_16_bit(self)
            chunks.follow({param: master for param, master in pairs if masters.chunks_of(self, param) is chunks})


@around(_OPTIMIZER + "_copy_model_grads_to_main_grads")
def copy_model_grads_to_main_grads(original, self):
    if not masters.all_chunks(self):
        return original(self)
    for model_param, master in masters.every(self):
        master.grad = masters.chunks_of(self, model_param).gradient(model_param).float().to(master.device)


@around(_OPTIMIZER + "_copy_main_params_to_model_params")
def copy_main_params_to_model_params(original, self):
    if not _sharded_parameters(self):
        return original(self)
    for chunks in masters.all_chunks(self):
        chunks.gathering.release_all()  # what is still gathered is out of date now
    for model_param, master in masters.of_16_bit(self):
        shard = masters.chunks_of(self, model_param).shard(model_param)
        if shard is not master:
            shard.copy_(master)


@around(_OPTIMIZER + "_copy_model_params_to_main_params")
def copy_model_params_to_main_params(original, self, state_dict=None):
    if state_dict is not None or not _sharded_parameters(self):
        return original(self, state_dict)
    for model_param, master in masters.of_16_bit(self):
        shard = masters.chunks_of(self, model_param).shard(model_param)
        master.data.copy_(master.to(model_param.dtype) if shard is master else shard)


def _sharded_parameters(optimizer):
    return any(chunks.stage == 3 for chunks in masters.all_chunks(optimizer))
