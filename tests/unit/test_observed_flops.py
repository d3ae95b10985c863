"""FLOPs of the operations that a profiled forward runs: attention of any number of heads, formulas of others."""

import pytest
import torch
from torch.utils.flop_counter import register_flop_formula

from mindspeed_mem.activation.observe.op_recorder import Watch

BATCH, LENGTH, CACHE, CHANNELS, WIDE = 2, 8, 12, 16, 24
KERNELS = {"flash": (), "efficient": (None, False), "cudnn": (None, False)}


def counted(call, *args):
    watch = Watch(lambda: (0, ""), "meta")
    watch.run((0, ""), None, call, *args)
    return sum(step.flops for step in watch.forward.steps)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_with_any_number_of_heads_of_keys(kernel, heads):
    """Grouped queries: an accelerator's kernels take fewer heads of keys as they are."""
    query, key = (
        torch.empty(BATCH, number, length, CHANNELS, dtype=torch.bfloat16, device="meta")
        for number, length in zip(heads, (LENGTH, CACHE), strict=True)
    )
    value = key.new_empty(BATCH, heads[1], CACHE, WIDE)
    attend = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
    products = 2 * BATCH * heads[0] * LENGTH * CACHE * (CHANNELS + WIDE)
    assert counted(attend, query, key, value, *KERNELS[kernel]) == products


def test_formulas_of_others_count_and_one_that_raises_ends_nothing():
    library = torch.library.Library("observed_flops", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    twice = torch.ops.observed_flops.twice
    x = torch.empty(3, 5, device="meta")
    assert counted(twice, x) == 0
    register_flop_formula(twice)(lambda shape, *_, out_shape, **__: 7 * shape[0])
    assert counted(twice, x) == 21
    from torch.utils.flop_counter import flop_registry

    flop_registry[twice] = lambda *_, **__: 1 // 0
    assert counted(twice, x) == 0
    del flop_registry[twice]
    library._destroy()
