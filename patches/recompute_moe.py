"""megatron.core.transformer.moe: an expert layer that runs again leaves statistics alone.

Why here: Megatron counts a checkpointed router's losses and tokens in its second run, since its first has gradients
off. Here the first run counts, as without recompute, and the second must not. A loss over all micro-batches so far, and
all data-parallel ranks, is that of the first run: counts are held as they were, and ranks are not asked again.
"""

from __future__ import annotations

from mindspeed_mem.activation import engine as engines
from mindspeed_mem.activation.rerun import module_rerun
from mindspeed_mem.patching import around


def _in_first_run(original, *args, **kwargs):
    if not module_rerun.running():
        original(*args, **kwargs)


_MOE = "megatron.core.transformer.moe."
around(_MOE + "moe_utils:save_to_aux_losses_tracker", before="0.18")(_in_first_run)
around(_MOE + "moe_logging:MoEMetricsTracker.record", since="0.18")(_in_first_run)
around(_MOE + "router:TopKRouter._apply_expert_bias", since="0.16")(_in_first_run)


@around(_MOE + "router:TopKRouter.routing", before="0.16")
def routing(original, self, *args, **kwargs):
    """Counts the tokens of each expert among all that it does."""
    counted = self.local_tokens_per_expert
    if counted is None or not module_rerun.running():
        return original(self, *args, **kwargs)
    self.local_tokens_per_expert = counted.clone()
    try:
        return original(self, *args, **kwargs)
    finally:
        self.local_tokens_per_expert = counted


@around(_MOE + "router_replay:RouterReplay.get_replay_topk", since="0.16")
def get_replay_topk(original, self, *args, **kwargs):
    """Experts that the caller has chosen: those of the micro-batch that runs again, whatever it has chosen since; and
    what is recorded is of first runs. Where it says that a backward replays, as for Megatron's recompute, its own list
    has them."""
    engine = engines.current()
    if engine is None:
        return original(self, *args, **kwargs)
    now = self.router_replay_action, self.target_topk_idx
    action, target = engine.second_runs.once(lambda: now)
    if not module_rerun.running() or _named(now[0]) == "REPLAY_BACKWARD":
        return original(self, *args, **kwargs)
    self.router_replay_action, self.target_topk_idx = None if _named(action) == "RECORD" else action, target
    try:
        return original(self, *args, **kwargs)
    finally:
        self.router_replay_action, self.target_topk_idx = now


def _named(action) -> str:
    return "" if action is None else action.name


_over_all_ranks = [False]
"""Whether the loss that is being computed is that over all data-parallel ranks."""


@around(_MOE + "router:TopKRouter._apply_global_aux_loss", since="0.15")
def apply_global_aux_loss(original, self, *args, **kwargs):
    engine = engines.current()
    if engine is None or self.global_tokens_per_expert is None:
        return original(self, *args, **kwargs)
    now = self.global_tokens_per_expert, self.ga_steps
    before = engine.second_runs.once(lambda: [count.clone() for count in now])
    _over_all_ranks[0] = True
    try:
        if not module_rerun.running():
            return original(self, *args, **kwargs)
        self.global_tokens_per_expert, self.ga_steps = (count.clone() for count in before)
        try:
            return original(self, *args, **kwargs)
        finally:
            self.global_tokens_per_expert, self.ga_steps = now
    finally:
        _over_all_ranks[0] = False


@around(_MOE + "router:reduce_from_tensor_model_parallel_region", since="0.15", before="0.16")
@around(_MOE + "moe_utils:get_tokens_per_expert_and_token_count", since="0.16")
def tokens_per_expert(original, *args, **kwargs):
    engine = engines.current()
    if engine is None or not _over_all_ranks[0]:  # others' ranks have the same plan, and ask again together
        return original(*args, **kwargs)
    return engine.second_runs.once(lambda: original(*args, **kwargs))
