"""How much of a step's copying is hidden, and where."""

from __future__ import annotations

import random

from mindspeed_mem.report.hidden import Hidden, hidden


def test_by_what_runs_at_the_time():
    passes = [(0, 10), (20, 30), (25, 28)]  # the second with gradients of weights inside
    copies = [(8, 12), (15, 24), (28, 33), (40, 41)]
    stalls = [(22, 23)]
    #                  8-10, 20-22 and 23-24, 28-30;  10-12, 15-20, 30-33, 40-41;  22-23
    assert hidden(copies, passes, stalls) == Hidden(7, 11, 1)
    assert hidden(copies, passes, stalls, blocking=True) == Hidden(0, 11, 8)
    assert hidden(copies, [], []) == Hidden(0, 19, 0)
    assert hidden(copies, [], [(22, 23)]) == Hidden(0, 18, 1)  # a copy that a pass waits for before it begins
    assert hidden(copies, passes, stalls).words() == (
        "37 % of copying behind compute, 58 % in idle time, 5 % in stalls"
    )
    assert not hidden([], passes, stalls).words()


def test_nothing_is_lost_or_counted_twice():
    draw = random.Random(3)
    for _ in range(50):
        copies, passes, stalls = (
            [(begin, begin + draw.randrange(9)) for begin in draw.choices(range(40), k=6)] for _ in range(3)
        )
        found = hidden(copies, passes, stalls)
        assert found.total == sum(end - begin for begin, end in copies)
        inside = sum(any(a <= moment < b for a, b in stalls) for one in copies for moment in range(*one))
        outside = sum(
            not any(a <= moment < b for a, b in [*passes, *stalls]) for one in copies for moment in range(*one)
        )
        assert (found.stall, found.idle) == (inside, outside)
