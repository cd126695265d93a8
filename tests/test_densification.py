# SPDX-License-Identifier: Apache-2.0
"""Clone, split, prune and opacity reset on Gaussians made by hand."""

import math

import numpy as np
import pytest
import torch

from gaussian_splatting.components.densification import (
    FINEST_ANGLE,
    SPLIT_SHRINK,
    DensificationConfig,
    DensificationStatistics,
    RoundLimits,
    densify_and_prune,
    reset_opacity,
)
from gaussian_splatting.components.sky_sphere import SkySphere
from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.optim.adam import GroupedAdam
from gaussian_splatting.optim.schedule import LearningRates
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_stage import VanillaSchedule
from tests.support.random_scenes import look_at

EXTENT = 10.0
SMALL, LARGE, HUGE = 0.05, 0.5, 2.0
"""Below and above a hundredth of the extent, and above a tenth of it."""


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def make(sizes: list[float], opacities: list[float] | None = None) -> GroupedAdam:
    """An optimiser in mid-training: every moment is 1, every step count 1."""
    n = len(sizes)
    opacities = opacities or [0.5] * n
    rows = torch.arange(n, dtype=torch.float32)
    scales = torch.tensor(sizes)[:, None] * torch.tensor([1.0, 0.5, 0.1])
    cloud = GaussianCloud(
        means=rows[:, None] * torch.ones(3),
        sh_dc=rows[:, None, None].expand(n, 1, 3).clone(),
        sh_rest=rows[:, None, None].expand(n, 15, 3).clone(),
        opacity_logits=torch.tensor([[logit(p)] for p in opacities]),
        log_scales=scales.log(),
        quats=torch.tensor([[1.0, 0, 0, 0]]).expand(n, 4).clone(),
    )
    adam = GroupedAdam(cloud.tensors(), LearningRates().by_name(0, EXTENT))
    for parameter in adam.parameters.values():
        parameter.grad = torch.ones_like(parameter) * 1e-3
    learned = {name: p.detach().clone() for name, p in adam.parameters.items()}
    adam.step()
    for name, value in learned.items():
        adam.parameters[name].data.copy_(value)
    return adam


def densify(adam, gradients, *, remove_large=False, seed=0, sky=None, **rules) -> None:
    config = DensificationConfig(**rules)
    rng = torch.Generator().manual_seed(seed)
    limits = RoundLimits(EXTENT, remove_large, sky)
    densify_and_prune(adam, torch.tensor(gradients), config, rng, limits)


def moments(adam: GroupedAdam) -> list[torch.Tensor]:
    return [
        value
        for state in adam.state_dict()["state"].values()
        for value in (state["exp_avg"], state["exp_avg_sq"])
    ]


def test_small_gaussian_that_pulls_hard_is_cloned():
    adam = make([SMALL, SMALL, SMALL])
    densify(adam, [1e-5, 2e-4, 1e-5])
    for name, value in adam.parameters.items():
        assert value.shape[0] == 4, name
        assert torch.equal(value[3], value[1]), name


def test_large_gaussian_that_pulls_hard_becomes_two_smaller_ones():
    adam = make([LARGE, LARGE])
    densify(adam, [1e-5, 1e-3])
    parameters = {name: value.detach() for name, value in adam.parameters.items()}
    assert parameters["means"].shape[0] == 3
    parent = torch.tensor([LARGE, LARGE / 2, LARGE / 10])
    torch.testing.assert_close(
        parameters["log_scales"][1:].exp(), (parent / SPLIT_SHRINK).expand(2, 3)
    )
    for name in ("sh_dc", "sh_rest", "opacity_logits", "quats"):
        assert torch.equal(parameters[name][1], parameters[name][2]), name
        assert torch.equal(parameters["sh_dc"][1], torch.ones(1, 3))
    assert not torch.equal(parameters["means"][1], parameters["means"][2])


def test_children_of_a_split_are_drawn_from_their_parent():
    n = 2000
    adam = make([LARGE] * n)
    adam.parameters["means"].data.zero_()
    # A quarter turn about z takes the local x axis to y.
    adam.parameters["quats"].data[:] = torch.tensor([math.sqrt(0.5), 0, 0, math.sqrt(0.5)]) * 3
    densify(adam, [1.0] * n)
    means = adam.parameters["means"].detach()
    assert means.shape[0] == 2 * n
    expected = torch.tensor([LARGE / 2, LARGE, LARGE / 10])
    torch.testing.assert_close(means.std(dim=0), expected, rtol=0.06, atol=0)
    assert means.mean(dim=0).abs().max() < 0.05


def test_threshold_is_inclusive_and_uses_the_mean_over_views():
    below, at = 2e-4 * 0.999, 2e-4
    for gradient, expected in ((below, 1), (at, 2)):
        adam = make([SMALL])
        densify(adam, [gradient])
        assert adam.parameters["means"].shape[0] == expected


def test_gaussian_that_no_view_saw_stays_as_it_is():
    adam = make([SMALL])
    unseen = DensificationStatistics(1, torch.device("cpu"))
    unseen.total = torch.tensor([[5.0, 0.0]])
    limits = RoundLimits(EXTENT, remove_large=False)
    rules = DensificationConfig()
    densify_and_prune(adam, unseen.mean(), rules, torch.Generator(), limits)
    assert adam.parameters["means"].shape[0] == 1


def test_new_rows_have_zero_moments_and_old_rows_keep_theirs():
    adam = make([SMALL, LARGE, SMALL])
    before = [value.clone() for value in moments(adam)]
    densify(adam, [1.0, 1.0, 0.0])
    for old, new in zip(before, moments(adam), strict=True):
        # Row 1 was split: its place is taken by the clone of row 0 and its two children.
        assert new.shape[0] == 5
        assert torch.equal(new[:2], old[[0, 2]])
        assert not new[2:].any()
    assert {float(s["step"]) for s in adam.state_dict()["state"].values()} == {1.0}


def test_faint_gaussians_are_removed():
    adam = make([SMALL] * 3, opacities=[0.0049, 0.0051, 0.5])
    densify(adam, [0.0, 0.0, 0.0])
    assert adam.parameters["sh_dc"].detach()[:, 0, 0].tolist() == [1.0, 2.0]


def test_clones_of_faint_gaussians_do_not_survive():
    adam = make([SMALL, SMALL], opacities=[0.001, 0.5])
    densify(adam, [1.0, 0.0])
    assert adam.parameters["sh_dc"].detach()[:, 0, 0].tolist() == [1.0]


@pytest.mark.parametrize(("remove_large", "expected"), [(False, [0.0, 1.0]), (True, [0.0])])
def test_oversized_gaussians_are_removed_once_it_is_time(remove_large, expected):
    adam = make([LARGE, HUGE])
    densify(adam, [0.0, 0.0], remove_large=remove_large)
    assert adam.parameters["sh_dc"].detach()[:, 0, 0].tolist() == expected


def test_what_is_infinitely_far_grows_and_stays_by_its_angle():
    """A sky at distance 100: two degrees are split, half a degree is left, none is too large."""
    adam = make([200 * FINEST_ANGLE, 50 * FINEST_ANGLE, 200 * FINEST_ANGLE])
    middle = torch.tensor([1.0, 2.0, 3.0])
    adam.parameters["means"].data[:2] = middle + torch.tensor([0.0, 60.0, 80.0])
    adam.parameters["means"].data[2] = 0.0
    sky = SkySphere(middle.numpy(), 50.0)
    densify(adam, [1.0, 1.0, 0.0], remove_large=True, sky=sky)
    sizes = adam.parameters["log_scales"].detach().amax(dim=1).exp() / FINEST_ANGLE
    torch.testing.assert_close(sizes, torch.tensor([50.0, 125.0, 125.0]))
    means = adam.parameters["means"].detach()
    torch.testing.assert_close(sky.distance(means), torch.tensor([100.0, 100.0, 100.0]))
    assert (means[1:] - means[0]).norm(dim=1).gt(0.1).all(), "children stand beside their parent"


def test_children_of_a_shell_stay_on_it_and_others_are_untouched():
    sky = SkySphere(np.zeros(3), 50.0)
    means = torch.tensor([[0.0, 0.0, 20.0], [3.0, 4.0, 0.0]])
    back = sky.returned(means, torch.tensor([100.0, 0.0]))
    torch.testing.assert_close(back, torch.tensor([[0.0, 0.0, 100.0], [3.0, 4.0, 0.0]]))


def test_number_never_exceeds_the_budget_and_the_strongest_grow_first():
    adam = make([SMALL, SMALL, LARGE, SMALL])
    densify(adam, [3e-4, 5e-4, 4e-4, 1e-5], max_gaussians=6)
    # Row 1 is cloned, row 2 is split; row 0 would be the seventh.
    assert sorted(adam.parameters["sh_dc"].detach()[:, 0, 0].tolist()) == [0, 1, 1, 2, 2, 3]


def test_budget_below_the_present_number_only_stops_growth():
    adam = make([SMALL] * 4)
    densify(adam, [1.0] * 4, max_gaussians=2)
    assert adam.parameters["means"].shape[0] == 4


def test_statistics_start_afresh_for_the_new_number():
    watched = DensificationStatistics(2, torch.device("cpu"))
    watched.total += 1
    watched.restart(4)
    assert watched.total.shape == (4, 2)
    assert not watched.total.any()


def test_same_generator_gives_the_same_children():
    first, second = make([LARGE]), make([LARGE])
    densify(first, [1.0], seed=3)
    densify(second, [1.0], seed=3)
    assert torch.equal(first.parameters["means"], second.parameters["means"])


def test_opacity_reset_leaves_what_is_infinitely_far():
    adam = make([SMALL] * 3, opacities=[0.9, 0.9, 0.9])
    adam.parameters["means"].data[1] = 100.0
    reset_opacity(adam, SkySphere(np.zeros(3), 50.0))
    opacities = adam.parameters["opacity_logits"].detach().sigmoid().flatten()
    torch.testing.assert_close(opacities, torch.tensor([0.01, 0.9, 0.01]))


def test_opacity_reset_lowers_to_a_hundredth_and_clears_those_moments_only():
    adam = make([SMALL] * 3, opacities=[0.9, 0.01, 0.002])
    reset_opacity(adam)
    opacities = adam.parameters["opacity_logits"].detach().sigmoid().flatten()
    torch.testing.assert_close(opacities, torch.tensor([0.01, 0.01, 0.002]))
    index = list(adam.parameters).index("opacity_logits")
    for number, state in adam.state_dict()["state"].items():
        assert bool(state["exp_avg"].any()) == (number != index)
        assert bool(state["exp_avg_sq"].any()) == (number != index)


def test_statistics_count_gradients_in_half_image_sizes_of_visible_gaussians():
    camera = look_at((3.0, 0.0, 0.0), width=80, height=40)
    watched = DensificationStatistics(3, torch.device("cpu"))
    gradient = torch.tensor([[0.3, 0.0], [0.0, 0.4], [9.0, 9.0]])
    visible = torch.tensor([True, True, False])
    watched.see(gradient, visible, camera)
    watched.see(gradient / 3, torch.tensor([True, False, False]), camera)
    watched.count_step()
    torch.testing.assert_close(watched.total[:, 0], torch.tensor([12.0 + 4.0, 8.0, 0.0]))
    assert watched.total[:, 1].tolist() == [2, 1, 0]
    torch.testing.assert_close(watched.mean(), torch.tensor([8.0, 8.0, 0.0]))


@pytest.mark.parametrize(
    ("iterations", "resets"),
    [(30_000, [3000, 6000, 9000, 12_000]), (7_000, [3000, 6000]), (6_900, [3000]), (3_015, [])],
)
def test_no_reset_comes_so_late_that_opacities_do_not_come_back(iterations, resets):
    schedule = VanillaSchedule(VanillaConfig(iterations=iterations))
    assert [i for i in range(1, iterations + 1) if schedule.reset_due(i)] == resets


def test_rounds_and_resets_fall_on_the_published_iterations():
    rules = DensificationConfig()
    due = [i for i in range(1, 30_001) if rules.due(i)]
    assert (due[0], due[1], due[-1]) == (600, 700, 14_900)
    assert [i for i in range(1, 30_001) if rules.reset_due(i)] == [3000, 6000, 9000, 12_000]
