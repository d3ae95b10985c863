"""megatron.core.transformer.transformer_block: name the operators of every decoder layer when it is built.

Why here: the block knows its layers' global numbers for any pipeline split, and layers that are not the block's
(multi-token prediction) are left alone. What is wrapped is the ``forward`` of each class found below a layer, once per
class; instances without a tag go straight through.
"""

from __future__ import annotations

import torch

from mindspeed_mem.activation import engine as engines
from mindspeed_mem.activation import regions
from mindspeed_mem.patching import REGISTRY, around


def region_forward(original, *args, **kwargs):
    engine = engines.current()
    # compiled code has no regions inside: a compiled module is one operator
    if engine is None or torch.compiler.is_compiling() or regions.TAG not in args[0].__dict__:
        return original(*args, **kwargs)
    return engine.run(original, args[0], args[1:], kwargs)


@around("megatron.core.transformer.transformer_block:TransformerBlock.__init__")
def block_init(original, self, *args, **kwargs):
    original(self, *args, **kwargs)
    classes = set()
    stages = getattr(self.pg_collection, "pp", None)
    place = (stages.rank() if stages is not None else 0, self.vp_stage or 0)
    for layer in self.layers:
        if hasattr(layer, "layer_number"):
            classes |= regions.tag_layer(layer, layer.layer_number - 1, place)
    tail = getattr(self, "final_layernorm", None)
    if tail is not None and len(self.layers):
        classes |= regions.tag_tail(tail, self.layers[-1].layer_number)
    for cls in classes:
        REGISTRY.apply_method(cls, "forward", region_forward, __name__)
    engine = engines.current()
    if engine is not None:
        engine.num_layers = max(engine.num_layers, self.config.num_layers)
