"""Watch the first training step of a script, print what its operators keep and what recompute would do, and end."""

from __future__ import annotations

import os
import socket
from types import ModuleType
from typing import NoReturn

from mindspeed_mem import ranks
from mindspeed_mem.activation import engine as engines
from mindspeed_mem.activation import regions
from mindspeed_mem.plan import both_names
from mindspeed_mem.report.ops_table import format_operators

NO_STEP = "the script ended without a training step of megatron-core, so there is nothing to print"


printed = False
"""Whether a training step has been watched and this rank has done its part of the table."""


class Finished(SystemExit):
    """Ends the script after its first training step; its own clean-up runs."""


def start(adaptor: ModuleType) -> None:
    """Before the script runs: let the engine watch everything, and end the process after one training step.

    Without torchrun the script becomes the only rank of a job of one.
    """
    from mindspeed_mem.patches import first_step

    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ.update(alone, MASTER_ADDR="localhost", MASTER_PORT=port)
    adaptor.observe()
    first_step.after(_print_and_leave)


def _print_and_leave() -> NoReturn:
    tree = {layer: sorted(paths) for layer, paths in regions.tagged_layers().items()}
    census = engines.current().observation.census
    everyone = ranks.gather((census.storages(), census.choices(), tree, regions.layer_classes()))
    if ranks.number() == 0:
        print(_merged(everyone), flush=True)
    global printed
    printed = True
    raise Finished(0)


def _merged(everyone: list[tuple]) -> str:
    """Each layer as the first rank sees it that has it: data and tensor parallel ranks hold the same operators."""
    storages, choices, operators, classes = [], [], {}, {}
    for rows, again, tree, labels in everyone:
        new = set(tree) - set(operators)
        # What comes from outside the layers belongs to the layers that need it.
        storages += [
            row
            for row in rows
            if row["layer"] in new or (row["layer"] < 0 and {layer for layer, _ in row["saved_by"]} & new)
        ]
        choices += [row for row in again if row["layer"] in new]
        operators.update({layer: tree[layer] for layer in new})
        classes.update({layer: labels[layer] for layer in new if layer in labels})
    return format_operators(storages, operators, classes, lambda op: both_names(op)[1], choices)
