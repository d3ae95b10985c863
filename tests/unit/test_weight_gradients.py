"""Gradients of weights that are put off: what is added up, and what is left where computing them fails."""

from __future__ import annotations

import pytest
import torch

from mindspeed_mem.schedule.weight_gradients import WeightGradients


def put_off(computes: list, had: torch.Tensor | None = None) -> tuple[WeightGradients, torch.nn.Parameter]:
    """A weight whose gradients ``computes`` make, beside one that it ``had`` from elsewhere in the pass."""
    weights, parameter = WeightGradients(), torch.nn.Parameter(torch.zeros(3))
    with weights.collect("pass"):
        for compute in computes:
            weights.put_off(parameter, compute)
        parameter.grad = had
        assert weights.awaits(parameter) and parameter.grad is None
    return weights, parameter


def test_what_was_put_off_is_added_to_what_came_from_elsewhere():
    weights, parameter = put_off([lambda: torch.ones(3), lambda: torch.full((3,), 2.0)], torch.full((3,), 4.0))
    weights.run("pass")
    assert parameter.grad.tolist() == [7.0] * 3 and weights.clear() == 0


@pytest.mark.parametrize("fails_at", [0, 1])
def test_where_it_fails_no_part_of_a_gradient_is_left(fails_at):
    def fails():
        raise ValueError("in a product")

    computes = [lambda: torch.ones(3), lambda: torch.ones(3)]
    computes[fails_at] = fails
    weights, parameter = put_off(computes, torch.full((3,), 4.0))
    with pytest.raises(ValueError, match="in a product"):
        weights.run("pass")
    assert parameter.grad is None and weights.clear() == 0
