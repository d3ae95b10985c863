"""Chunk-based ZeRO: parameters, gradients and optimizer states, split over data-parallel ranks chunk by chunk.

| where | what |
|---|---|
| `layout` | which parameters lie in which chunk, by sizes alone: cutting, the search for sizes, how a layout is shown |
| `core` | a chunk, its shard and where that lies, who is gathered when, in which order; reduced gradients |
| `optimizer` | the step where a master rests: on the device, brought there, or by Adam on the host |
| `buffers` | on Megatron's parameter-and-gradient buffers, whose buckets are the chunks; what runs in this process |
| `plain` | on any torch module, for `mindspeed_mem.gemini` |

`core` and `optimizer` do not know whose chunks they are.
"""
