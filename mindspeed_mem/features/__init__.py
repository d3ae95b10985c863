"""What can be switched on: the table of flags (table.py), and how they are read and checked (checking.py)."""

from mindspeed_mem.features.checking import (
    FeatureError,
    Settings,
    add_arguments,
    check,
    check_configs,
    conflicts,
    differing,
    for_all_ranks,
    in_force,
    misspelt,
    nothing_of_ours,
    plan_facts,
    put_into_force,
    scan,
    too_old,
)
from mindspeed_mem.features.table import FEATURES, ON_HOST

__all__ = [
    "FEATURES",
    "ON_HOST",
    "FeatureError",
    "Settings",
    "add_arguments",
    "check",
    "check_configs",
    "conflicts",
    "differing",
    "for_all_ranks",
    "in_force",
    "misspelt",
    "nothing_of_ours",
    "plan_facts",
    "put_into_force",
    "scan",
    "too_old",
]
