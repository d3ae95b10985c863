"""The pipeline schedule as data: the order of passes on each stage, its peak in closed form, its course over time."""

from mindspeed_mem.schedule.checks import ScheduleError, problems
from mindspeed_mem.schedule.order import order, warm_up, without_virtual_stages
from mindspeed_mem.schedule.peak import in_flight, peak
from mindspeed_mem.schedule.placement import Placement
from mindspeed_mem.schedule.simulation import DeadlockError, Span, Timeline, simulate

__all__ = [
    "DeadlockError",
    "Placement",
    "ScheduleError",
    "Span",
    "Timeline",
    "in_flight",
    "order",
    "peak",
    "problems",
    "simulate",
    "warm_up",
    "without_virtual_stages",
]
