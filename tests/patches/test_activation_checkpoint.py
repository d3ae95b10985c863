"""MindSpeed's checkpoints that discard their output, beside our saved-tensor hooks: no gradient is lost."""

from __future__ import annotations

from typing import Any

import pytest

from tests.discarding import MODULES, mindspeed, recomputed_activation
from tests.swap_runs import EVERYTHING, again
from tests.worlds import on_ranks, parallel

PLANS = {
    "swapped": EVERYTHING,
    "its layers recomputed": again(recompute=True),
    "its operator recomputed": again(["mlp"]),
    "its input recomputed": again([r"mlp\.linear_fc1"]),
}


def differences(name: str) -> list[str]:
    from mindspeed_mem.megatron_adaptor import activation_meter
    from mindspeed_mem.patching import REGISTRY
    from tests.limited_runs import surviving
    from tests.swap_runs import SDPA, difference, listening, patched, swap

    found = []
    with patched(SDPA), listening() as messages:
        with recomputed_activation(None):
            native = trained()
        with mindspeed(name) as module, recomputed_activation(module):
            for plan, settings in PLANS.items():
                with swap(settings) as engine:
                    found += [f"{plan}: {what}" for what in difference(trained(), native)]
                moved = [row.op for row in engine.report().moved_by_operator]
                if plan == "swapped" and not any(op.startswith("mlp") for op in moved):
                    found.append(f"the checkpoint's input stays on the device: only {moved} are moved")
            with surviving():
                found += [f"survived: {what}" for what in difference(trained(), native)]
            try:
                with activation_meter(engine.backend):
                    found += [f"metered: {what}" for what in difference(trained(), native)]
            finally:
                REGISTRY.undo(["mindspeed_mem.patches.activation_saved_tensors"])
    return found + messages


def trained() -> Any:
    from tests.models import build_gpt, train_step

    with parallel():
        return train_step(build_gpt("swiglu_gqa_rope", layers=2), micro_batches=2)


@pytest.mark.distributed
@pytest.mark.parametrize("name", MODULES)
def test_gradients_reach_what_is_before_the_checkpoint(name):
    assert on_ranks(1, differences, name) == [[]]
