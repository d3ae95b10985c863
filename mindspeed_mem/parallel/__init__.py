"""Parallel modes on plain torch modules: what is split how is said by the user, or searched; the rest is derived.

    from mindspeed_mem import parallel

    mesh = parallel.mesh(dp=2, tp=2)
    model = parallel.semi_auto(model, mesh, {
        "": {"in_strategy": (("dp", None),)},
        "fc1": {"parameter_plan": {"weight": ("tp", None), "bias": ("tp",)}},
        "fc2": {"parameter_plan": {"weight": (None, "tp")}, "out_strategy": (("dp", None),)},
    })

| mode | what the user says |
|---|---|
| semi-automatic: `semi_auto`, `shard` | strategies of modules and operators |
| automatic: `auto` | the mesh and the memory: a plan of `semi_auto` is searched |
| hybrid: `local` and the collectives | each collective, in regions that see this rank's parts |
| by layer: `pipeline`, `recompute` | ``layer.pipeline_stage = k``, ``layer.recompute()`` |
"""

from mindspeed_mem.parallel.auto import Found, auto
from mindspeed_mem.parallel.collectives import all_gather, all_reduce, all_to_all, broadcast, copy, reduce_scatter
from mindspeed_mem.parallel.meshes import mesh
from mindspeed_mem.parallel.options import Machine
from mindspeed_mem.parallel.pipeline import Pipeline, pipeline
from mindspeed_mem.parallel.plan import Plan, Row
from mindspeed_mem.parallel.recompute import recompute, swap
from mindspeed_mem.parallel.regions import local
from mindspeed_mem.parallel.report import Move, Report, recording
from mindspeed_mem.parallel.semi_auto import report, semi_auto, shard
from mindspeed_mem.parallel.strategy import Layout, StrategyError, placements, strategy_of
from mindspeed_mem.patching import dynamo

__all__ = [
    "Found",
    "Layout",
    "Machine",
    "Move",
    "Pipeline",
    "Plan",
    "Report",
    "Row",
    "StrategyError",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "auto",
    "broadcast",
    "copy",
    "local",
    "mesh",
    "pipeline",
    "placements",
    "recompute",
    "recording",
    "reduce_scatter",
    "report",
    "semi_auto",
    "shard",
    "strategy_of",
    "swap",
]

dynamo.keep_out()  # what compares ranks, and stands around each operator of a split model
