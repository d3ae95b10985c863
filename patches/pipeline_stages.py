"""--pipeline-stages: becomes Megatron's own layout of a pipeline, wherever Megatron reads one.

Why here: ``TransformerConfig.__post_init__`` checks a layout and takes the number of virtual stages from it, for every
script; what builds layers, numbers them and stores them goes by the layout then, and stays Megatron's. Megatron-LM's
``validate_args`` (not in the megatron-core wheel) comes before: without a layout it refuses splits that are not even.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import NoReturn

from mindspeed_mem import features
from mindspeed_mem.patching import around
from mindspeed_mem.schedule.checks import ScheduleError
from mindspeed_mem.schedule.stages import split

logger = logging.getLogger(__name__)


def when_refused(error: Exception) -> NoReturn:
    """Called with what is wrong with Megatron-LM's arguments; the adaptor puts its own function here."""
    raise error


@around("megatron.core.transformer.transformer_config:TransformerConfig.__post_init__")
def post_init(original, self):
    _lay_out(self, self.num_layers, _virtual_stages(self))
    original(self)


@around("megatron.training.arguments:validate_args")
def validate_args(original, args, *rest, **kwargs):
    try:
        layers = args.num_layers if args.num_layers is not None else args.encoder_num_layers
        if _lay_out(args, layers, args.num_virtual_stages_per_pipeline_rank):
            args.num_virtual_stages_per_pipeline_rank = None  # beside a layout Megatron takes no other word for it
    except features.FeatureError as error:
        when_refused(error)
    return original(args, *rest, **kwargs)


def _lay_out(where, num_layers, virtual_stages) -> bool:
    """Give `where`, a TransformerConfig or Megatron-LM's arguments, the layout if it has none; whether it was given."""
    entries, stages = features.in_force().pipeline_stages, where.pipeline_model_parallel_size
    if entries is None or num_layers is None:
        return False
    if getattr(where, "pipeline_stages", None) is None:
        where.pipeline_stages = entries  # whoever checks a config later sees where its layout comes from
    if stages == 1:
        _check_one_stage(entries, num_layers)
        return False
    problems = features.conflicts(where, ["--pipeline-stages"])
    given = where.pipeline_model_parallel_layout
    if given is None:
        try:
            layout = split(entries, num_layers, stages, virtual_stages, where.mtp_num_layers or 0).layout
        except ScheduleError as error:
            problems.append(str(error))
    if problems:
        raise features.FeatureError(problems)
    if given is None:
        where.pipeline_model_parallel_layout = layout
    return given is None


def _virtual_stages(config):
    """How many virtual stages are settled already, by the config or by Megatron's groups; None if they are not."""
    from megatron.core import parallel_state

    if config.virtual_pipeline_model_parallel_size is not None or not parallel_state.model_parallel_is_initialized():
        return config.virtual_pipeline_model_parallel_size
    if parallel_state.get_pipeline_model_parallel_world_size() != config.pipeline_model_parallel_size:
        return None
    return parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1


@functools.cache
def _check_one_stage(entries, num_layers) -> None:
    """Warn, once, of stages that a model without a pipeline cannot have."""
    try:
        split(entries, num_layers, 1, 1)
    except ScheduleError:
        if os.environ.get("RANK", "0") == "0":
            given = ",".join(map(str, entries))
            logger.warning("--pipeline-stages %s has no effect: the pipeline has one stage", given)
