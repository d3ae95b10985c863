"""megatron.core's CUDA graphs of parts of a layer, by TransformerEngine: the rest of the layer follows the plan.

Why here: once a layer has its graphs this is called in the place of its forward, and runs what is not captured. What a
graph returns lies where its next replay writes, and the version is not raised.
"""

from __future__ import annotations

from mindspeed_mem.activation import engine as engines
from mindspeed_mem.activation import regions
from mindspeed_mem.activation.storage.marks import mark_managed
from mindspeed_mem.patching import around

_TRANSFORMER = "megatron.core.transformer."


@around(_TRANSFORMER + "transformer_layer:TransformerLayer._te_cuda_graph_replay", since="0.15")
def layer_replay(original, self, *args, **kwargs):
    engine = engines.current()
    if engine is None or regions.TAG not in vars(self):
        return original(self, *args, **kwargs)
    return engine.operators.run(original, self, args, kwargs)


@around(_TRANSFORMER + "module:GraphableMegatronModule._te_cuda_graph_replay", since="0.15")
def graph_replay(original, self, *args, **kwargs):
    result = original(self, *args, **kwargs)
    mark_managed(result)
    return result
