# SPDX-License-Identifier: Apache-2.0
"""Malformed numbers stop training and are named; good ones cost one synchronisation."""

import math
from dataclasses import replace

import pytest
import torch

from gaussian_splatting.engine.guard import (
    StepNumbers,
    check_gradients,
    check_losses,
    check_population,
    check_scales,
    check_step,
)
from sugar_utils.errors import TrainingError
from tests.support.launches import counting

INF, NAN = math.inf, math.nan


def good_step(n: int = 20, **changes) -> StepNumbers:
    numbers = StepNumbers(
        losses={"l1": torch.tensor(0.1), "ssim": torch.tensor(0.2, requires_grad=True)},
        gradients={"means": torch.ones(n, 3), "quats": None, "sh_rest": torch.zeros(n, 15, 3)},
        parameters={"log_scales": torch.full((n, 3), -3.0)},
        extent=2.0,
        radii=torch.arange(n, dtype=torch.int32),
    )
    return replace(numbers, **changes)


def check(numbers: StepNumbers) -> bool:
    return check_step(numbers, 9001, "a/[b].jpg")


def test_good_step_passes_with_one_synchronisation():
    with counting() as counts:
        check(good_step())
    assert counts.waits.total() == 1


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_bad_loss_term_is_named_with_value_iteration_and_camera(value):
    terms = {"l1": torch.tensor(0.1), "entropy": torch.tensor(value)}
    with pytest.raises(TrainingError, match=f"loss term entropy is {value} at iteration 9001") as e:
        check_losses(terms, 9001, "a/[b].jpg")
    assert "camera a/[b].jpg" in str(e.value)
    assert "last good checkpoint is kept" in str(e.value)
    assert "\n" not in str(e.value)


def test_bad_gradient_is_named_with_its_rows():
    gradients = {"means": torch.ones(10, 3), "sh_rest": torch.zeros(10, 15, 3)}
    gradients["sh_rest"][3, 4, 1] = NAN
    gradients["sh_rest"][3, 5, 1] = INF
    gradients["sh_rest"][7, 0, 0] = -INF
    with pytest.raises(
        TrainingError, match="gradient of sh_rest is not finite in 2 of 10 rows"
    ) as e:
        check_gradients(gradients, 12, "x.jpg")
    assert "first: 3, 7" in str(e.value)
    assert "iteration 12, camera x.jpg" in str(e.value)


def test_infinities_of_both_signs_do_not_cancel():
    with pytest.raises(TrainingError):
        check_gradients({"means": torch.tensor([[INF, -INF, 0.0]])}, 1, "x")


def test_huge_but_finite_gradients_pass_although_their_sum_overflows():
    check_gradients({"means": torch.full((100, 3), 3e38)}, 1, "x")
    check_gradients({"half": torch.full((100, 3), 6e4, dtype=torch.float16)}, 1, "x")


def test_empty_and_absent_gradients_pass():
    check_gradients({"means": torch.empty(0, 3), "quats": None}, 1, "x")
    check_gradients({}, 1, "x")
    check_losses({}, 1, "x")
    check_scales(torch.empty(0, 3), 1.0, 1, "x")


def test_scales_stop_at_ten_thousand_extents():
    log_scales = torch.zeros(5, 3)
    log_scales[2, 1] = math.log(0.99e4 * 3)
    check_scales(log_scales, 3.0, 1, "x")
    log_scales[2, 1] = math.log(1.01e4 * 3)
    with pytest.raises(TrainingError, match=r"bad in 1 of 5 rows \(first: 2\)"):
        check_scales(log_scales, 3.0, 1, "x")
    check_scales(log_scales, 0.0, 1, "x")


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("extent", [0.0, 5.0])
def test_scales_that_are_not_finite_stop(value, extent):
    log_scales = torch.zeros(4, 3)
    log_scales[1, 0] = value
    with pytest.raises(TrainingError, match="scales out of bounds.*in 1 of 4 rows"):
        check_scales(log_scales, extent, 1, "x")


def test_a_step_tells_whether_its_view_shows_anything():
    assert check(good_step())
    assert not check(good_step(radii=torch.zeros(7, dtype=torch.int32)))
    assert not check(good_step(radii=torch.zeros(0, dtype=torch.int32)))


def test_empty_population_stops():
    check_population(1, 9001)
    with pytest.raises(TrainingError, match="no Gaussians left after the prune at iteration 9001"):
        check_population(0, 9001, "the prune")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("losses", "loss term l1"),
        ("gradients", "gradient of means"),
        ("log_scales", "scales out of bounds"),
    ],
)
def test_step_names_what_failed(part, message):
    step = good_step()
    if part == "losses":
        step.losses["l1"] = torch.tensor(NAN)
    elif part == "gradients":
        step.gradients["means"][0, 0] = INF
    else:
        step.parameters["log_scales"][0, 0] = 50.0
    with pytest.raises(TrainingError, match=message):
        check(step)
