"""What is predicted for published layouts, against what was reached: one set of constants, of the table of devices."""

import dataclasses

import pytest

from mindspeed_mem.adaptive.layout import closed_form
from mindspeed_mem.adaptive.problem import from_shape
from mindspeed_mem.adaptive.search.baselines import full_recompute, keep_all
from tests.published import FULL, SELECTIVE, cluster

ROWS = FULL + SELECTIVE


def predicted(row, **changes):
    split = dataclasses.replace(row.split, **changes)
    problem = from_shape.problem(row.shape, split, cluster(row.devices).machine_for(split))
    return problem, closed_form.seconds(problem, row.again)


def test_published_layouts_take_what_was_reached():
    errors = {row.name: predicted(row)[1] / row.seconds - 1 for row in ROWS}
    assert sum(map(abs, errors.values())) / len(errors) <= 0.06, errors
    assert max(map(abs, errors.values())) <= 0.12, errors


@pytest.mark.parametrize("row", ROWS[:8] + SELECTIVE[:2], ids=lambda row: row.name)
def test_the_closed_form_is_what_playing_the_step_takes(row):
    problem, seconds = predicted(row)
    if row.selective:
        assert closed_form.seconds(problem) == pytest.approx(keep_all(problem).seconds, rel=1e-9)
    else:
        assert seconds == pytest.approx(full_recompute(problem).seconds, rel=1e-9)


def test_shapes_of_the_second_paper_give_its_step_times():
    for row, seconds in zip(SELECTIVE, (1.10, 13.75, 37.83, 71.49), strict=True):
        assert row.seconds == pytest.approx(seconds, rel=0.005)
