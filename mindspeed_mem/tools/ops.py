"""``python -m mindspeed_mem ops``: watch a script's first training step, print what its operators keep, and end."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
from types import ModuleType
from typing import Any, NoReturn

from mindspeed_mem.tools import run

DESCRIPTION = """\
Runs a training script for one step, records what every operator keeps for backward, prints a table of the
operators and exits. Operators are listed by Megatron's and by MindFormers' names; a memory plan may use either:

    python -m mindspeed_mem ops pretrain_gpt.py --num-layers 2 ...
"""
_NO_STEP = "the script ended without a training step of megatron-core, so there is nothing to print"

_printed = False
"""Whether a training step has been watched and this rank has done its part of the table."""

add_arguments = run.add_arguments


class Finished(SystemExit):
    """Ends the script after its first training step; its own clean-up runs."""


def main(given: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    from mindspeed_mem import ranks

    adaptor = run.prepare(given)
    if adaptor is None:
        return 2
    _watch(adaptor)
    with contextlib.suppress(Finished):  # torch's @record swallows it on its way here
        run.start(given.script)
    if _printed:
        ranks.leave()
        return 0
    print(f"mindspeed_mem ops: {_NO_STEP}", file=sys.stderr)
    return 1


def _watch(adaptor: ModuleType) -> None:
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
    from mindspeed_mem import ranks
    from mindspeed_mem.activation import engine as engines
    from mindspeed_mem.activation import regions

    tree = {layer: sorted(paths) for layer, paths in regions.tagged_layers().items()}
    engine = engines.current()
    assert engine is not None and engine.observation.census is not None  # `observe` has started it
    census = engine.observation.census
    everyone = ranks.gather((census.storages(), census.choices(), tree, regions.layer_classes()))
    if ranks.number() == 0:
        print(_merged(everyone), flush=True)
    global _printed
    _printed = True
    raise Finished(0)


def _merged(everyone: list[tuple[Any, ...]]) -> str:
    """Each layer as the first rank sees it that has it: data and tensor parallel ranks hold the same operators."""
    from mindspeed_mem.plan import llama_names
    from mindspeed_mem.report.ops_table import ChoiceRow, StorageRow, format_operators

    storages: list[StorageRow] = []
    choices: list[ChoiceRow] = []
    operators: dict[int, list[str]] = {}
    classes: dict[int, str] = {}
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
    return format_operators(storages, operators, classes, llama_names, choices)
