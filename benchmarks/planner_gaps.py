"""How far the planner's plans are from the best there are: ``python benchmarks/planner_gaps.py``.

Random problems of four kinds. Of the first three all plans are tried (every letter of every layer with every distance
that the search knows); of those with layers like a 7B model's, long annealing from several plans stands for that. Needs
neither Megatron nor a device. The goal is 0.5 % for the worst of 500 and 0.05 % on average.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy

from mindspeed_mem.adaptive import Problem, Search, StagePlan
from mindspeed_mem.adaptive.problem import from_shape
from mindspeed_mem.adaptive.problem.definition import Group, LayerClass, Link, Part, Pipeline, PlannedOperator, Stage
from mindspeed_mem.adaptive.problem.shape import Degrees, Machine, Shape
from mindspeed_mem.adaptive.search import many
from mindspeed_mem.adaptive.search.decisions import is_valid
from mindspeed_mem.adaptive.search.search import Found
from mindspeed_mem.schedule.simulation import play

MB = 10**6
LINKS = (0.3, 1.0, 3.0, 30.0)
"""GB/s."""
_LANES = 128
_STEPS = 400


def small(chance: random.Random, stages: int, virtual: int, groups: int, layers: int, micro_batches: int) -> Problem:
    """Layers of four operators, of which the first ones keep something."""
    operators = tuple(PlannedOperator(name=name, forward_seconds=0.1, backward_seconds=0.2) for name in "abcd")
    needs = chance.random() < 0.5
    made = []
    for place in range(groups):
        again = chance.choice([0.0, 0.005, 0.02, 0.1, 0.3])
        made.append(
            Group(
                name="abc"[place],
                bytes=chance.randint(20, 400) * MB,
                operators=("abc"[place],),
                used_by=("bcd"[place],),
                recompute_seconds=again or None,
                needs=("abc"[place - 1],) if needs and place else (),
            )
        )
    kind = LayerClass(name="layer", operators=operators, groups=tuple(made))
    of_stage = [
        tuple(Part(layers=("layer",) * layers, first_layer=(v * stages + n) * layers) for v in range(virtual))
        for n in range(stages)
    ]
    speed = chance.choice(LINKS)
    return Problem(
        classes=(kind,),
        stages=tuple(Stage(parts=parts, static_bytes=500 * MB) for parts in of_stage),
        pipeline=Pipeline(micro_batches=micro_batches),
        link=Link(out=speed, back=speed, blocking=chance.random() < 0.25),
        device_limit=10**12,
        host_limit=chance.choice([None, 300 * MB]),
    )


def one_stage(chance: random.Random) -> Problem:
    return small(chance, 1, 1, 3, chance.randint(1, 2), chance.randint(1, 2))


def two_stages(chance: random.Random) -> Problem:
    return small(chance, 2, 1, 2, 1, chance.randint(1, 5))


def two_parts(chance: random.Random) -> Problem:
    return small(chance, 2, 2, 1, 1, 2 * chance.randint(1, 2))


def like_7b(chance: random.Random) -> Problem:
    """A few layers of a 7B model on one device."""
    shape = Shape(
        num_layers=chance.randint(2, 8),
        hidden_size=4096,
        num_attention_heads=32,
        seq_length=chance.choice([4096, 8192]),
        micro_batch_size=chance.choice([1, 2, 4]),
        ffn_hidden_size=11008,
        num_query_groups=32,
        kv_channels=128,
        vocab_size=32000,
        swiglu=True,
        normalization="RMSNorm",
        rope=True,
        bias=False,
    )
    machine = Machine(
        memory_bytes=10**12,
        tflops=chance.choice([200, 400, 700]),
        link_gbps=chance.choice([12, 25, 50]),
        memory_gbps=3000,
    )
    return from_shape.problem(shape, Degrees(micro_batches=chance.randint(1, 3)), machine)


KINDS: dict[str, Callable[[random.Random], Problem]] = {
    "one stage": one_stage,
    "two stages": two_stages,
    "two stages of two parts": two_parts,
    "7B shapes": like_7b,
}


def best_of_all(problem: Problem, limit: int, search: Search) -> float:
    """Seconds of the fastest of all plans that fit."""
    best = math.inf
    for letters, distances, hosts in every_plan(problem, search):
        for first in range(0, len(hosts), many.LANES):
            some = [one[first : first + many.LANES] for one in letters]
            pairs = zip(some, distances, strict=True)
            tracks = [many.ManyTracks(problem, number, *one) for number, one in enumerate(pairs)]
            play(tracks, problem.placement, 0.0)
            fits = numpy.all([one.peaks <= limit for one in tracks], axis=0) & hosts[first : first + many.LANES]
            seconds = numpy.max([one.now for one in tracks], axis=0)
            best = min(best, float(seconds[fits].min(initial=math.inf)))
    return best


def every_plan(problem: Problem, search: Search) -> Iterator[tuple[list[numpy.ndarray], list[int], numpy.ndarray]]:
    """All plans of a problem of one class; those of the same distances together, with whether the host has room."""
    [kind] = problem.classes
    far = [stage.distances for stage in search._stages]
    texts = ["".join(text) for text in itertools.product("KSR", repeat=len(kind.groups))]
    layers = [sum(len(part.layers) for part in stage.parts) for stage in problem.stages]
    for inputs_move in (False, True) if any(group.needs for group in kind.groups) else (False,):
        fine = [text for text in texts if is_valid(kind, text, inputs_move)]
        of_stage = [["".join(some) for some in itertools.product(fine, repeat=count)] for count in layers]
        rows = list(itertools.product(*of_stage))
        letters = [_letters([row[number] for row in rows]) for number in range(len(layers))]
        hosts = numpy.all([_has_room(problem, number, one) for number, one in enumerate(letters)], axis=0)
        for distances in itertools.product(*far):
            yield letters, list(distances), hosts


def _letters(rows: list[str]) -> numpy.ndarray:
    return numpy.frombuffer("".join(rows).encode(), numpy.uint8).reshape(len(rows), -1)


def _has_room(problem: Problem, number: int, letters: numpy.ndarray) -> numpy.ndarray:
    if problem.host_limit is None:
        return numpy.ones(len(letters), bool)
    stage, first, parts = problem.stages[number], 0, []
    for part in stage.parts:
        sizes = [group.bytes for name in part.layers for group in problem.class_of[name].groups]
        parts.append((letters[:, first : first + len(sizes)] == ord("S")) @ numpy.array(sizes))
        first += len(sizes)
    most = [sum(n * one for n, one in zip(held, parts, strict=True)) for held in problem.in_flight[number]]
    return numpy.max(most, axis=0) <= problem.host_limit


def annealed(problem: Problem, limit: int, found: Found, chance: random.Random) -> float:
    """Seconds of the fastest plan that annealing finds, from the plan that was found and from the simpler ones."""
    best = found.simulated.seconds
    once = problem.stages[0].step_seconds
    starts = [(found.plan.stages[0], found.plan.inputs_move), (Search(problem).keep_all.stages[0], False)]
    for plan, inputs_move in starts:
        for far in {plan.distance, max(1, plan.distance // 2), plan.distance + 8}:
            best = min(best, once + _anneal(problem, limit, plan, far, inputs_move, chance))
    return best


def _anneal(
    problem: Problem, limit: int, plan: StagePlan, distance: int, inputs_move: bool, chance: random.Random
) -> float:
    random_numbers = numpy.random.default_rng(chance.getrandbits(32))
    [kind] = problem.classes
    size = len(kind.groups)
    rows = numpy.repeat(many.letters_of([plan]), _LANES, axis=0)
    lanes, layers = numpy.arange(_LANES), rows.shape[1] // size
    letters = numpy.frombuffer(b"KSR", numpy.uint8)
    best = math.inf

    def energy(some: numpy.ndarray, fine: numpy.ndarray) -> numpy.ndarray:
        nonlocal best
        played = many.alone(problem, 0, some, distance)
        fits = fine & (played.peaks <= limit)
        best = min(best, float(played.seconds[fits].min(initial=math.inf)))
        return played.seconds + numpy.maximum(0, played.peaks - limit) / 1e9 * scale

    scale = 0.02 * float(many.alone(problem, 0, rows[:1], distance).seconds[0])
    energies = energy(rows, numpy.ones(_LANES, bool))
    for step in range(_STEPS):
        heat = 0.1 * scale * (1 - step / _STEPS) ** 2 + 1e-9
        other = rows.copy()
        for _ in range(int(random_numbers.integers(1, 4))):
            place = random_numbers.integers(0, rows.shape[1], _LANES)
            other[lanes, place] = numpy.where(
                other[lanes, place] == ord("-"), ord("-"), letters[random_numbers.integers(0, 3, _LANES)]
            )
        fine = _valid(kind, other.reshape(_LANES, layers, size), inputs_move)
        now = energy(other, fine)
        chances = numpy.exp(numpy.minimum(0, (energies - now) / heat))
        taken = fine & (random_numbers.random(_LANES) < chances)
        rows[taken], energies[taken] = other[taken], now[taken]
    return best


def _valid(kind: LayerClass, rows: numpy.ndarray, inputs_move: bool) -> numpy.ndarray:
    fine = numpy.ones(rows.shape[:2], bool)
    for place, group in enumerate(kind.groups):
        again = rows[:, :, place] == ord("R")
        fine &= ~again if group.recompute_seconds is None else True
        fine &= ~(rows[:, :, place] == ord("S")) if not group.swappable else True
        for name in group.needs:
            fine &= ~(again & (rows[:, :, kind.group_index[name]] == ord("K" if inputs_move else "S")))
    return fine.all(axis=1)


def gap(make: Callable[[random.Random], Problem], seed: int) -> float:
    """By what share of its time the plan that is found is slower than the best one."""
    chance = random.Random(seed)
    problem = make(chance)
    search = Search(problem)
    low, high = search.floor(), max(search.simulated(search.keep_all).peaks)
    limit = round(low + (high - low) * chance.random()) + 1
    searching = Search(problem)
    found = searching.best(limit)
    if make is like_7b:
        best = annealed(problem, limit, found, chance)
    else:
        best = best_of_all(problem, limit, searching)
    return max(0.0, found.simulated.seconds / best - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--count", type=int, default=125, help="problems of each kind")
    parser.add_argument("--first", type=int, default=0, help="number of the first of them, to go on from another run")
    parser.add_argument("--kind", choices=list(KINDS), action="append", help="only these")
    parser.add_argument("--json", type=Path, help="file for all gaps")
    given = parser.parse_args()
    rows = {}
    print("kind | problems | worst % | mean % | above 0.5 % | CPU s")
    for name in given.kind or KINDS:
        cpu = time.process_time()
        gaps = [gap(KINDS[name], seed) for seed in range(given.first, given.first + given.count)]
        worst, mean = 100 * max(gaps), 100 * sum(gaps) / len(gaps)
        over = [seed for seed, one in enumerate(gaps, given.first) if one > 0.005]
        rows[name] = {"problems": len(gaps), "worst_percent": worst, "mean_percent": mean, "above_half_percent": over}
        print(f"{name} | {len(gaps)} | {worst:.3f} | {mean:.4f} | {over} | {time.process_time() - cpu:.0f}", flush=True)
    if given.json:
        of = {"machine": f"{platform.processor() or platform.machine()}, CPU", "date": time.strftime("%Y-%m-%d")}
        given.json.write_text(json.dumps(of | {"kinds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
