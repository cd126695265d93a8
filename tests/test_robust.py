# SPDX-License-Identifier: Apache-2.0
"""What keeps the vanilla stage from fog and floaters, part by part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gaussian_splatting import train as vanilla_train
from gaussian_splatting.data.observations import Observations
from gaussian_splatting.engine.strips import ImageSplit
from gaussian_splatting.losses.sparse_depth import point_weights, sparse_depth_loss
from gaussian_splatting.vanilla.robust import (
    SHELL_RADIUS,
    RobustConfig,
    Robustness,
    robustness_of,
    with_shell,
)
from gaussian_splatting.vanilla.vanilla_stage import VanillaConfig, VanillaStage
from tests.support.tiny_scene import (
    assert_same_bits,
    disturbed_cloud,
    make_tiny_scene,
    run_cli,
    tiny_cameras,
    tiny_cloud,
)
from tests.support.tracks import add_tracks

EXTENT = 3.0
ON = RobustConfig(robust=True)


def observed(cameras) -> Observations:
    """All Gaussians of the tiny cloud, observed by all cameras."""
    points = tiny_cloud().means.numpy()
    rows = np.arange(len(points), dtype=np.int32)
    n = len(points)
    return Observations(
        points, np.ones(n, np.float32), np.full(n, 4, np.int32), {c.name: rows for c in cameras}
    )


def robustness(config=ON, cameras=None, iterations=100) -> Robustness:
    cameras = cameras or tiny_cameras(4)
    return Robustness(
        config, cameras, observed(cameras), iterations=iterations, extent=EXTENT, seed=0,
        device=torch.device("cpu"),
    )  # fmt: skip


# Depth at observed points


def test_the_right_depth_costs_nothing_and_half_of_it_a_third():
    depth = torch.tensor([[2.0, 1.0], [3.0, 4.0]])
    rows, columns = torch.tensor([0, 0]), torch.tensor([0, 1])
    weights = torch.ones(2)
    right = sparse_depth_loss(depth, rows, columns, torch.tensor([2.0, 1.0]), weights, 2.0)
    half = sparse_depth_loss(depth, rows, columns, torch.tensor([4.0, 2.0]), weights, 2.0)
    assert float(right) == 0
    assert float(half) == pytest.approx(1 / 3)


def test_the_depth_term_pulls_too_near_a_surface_away_and_agrees_with_differences():
    depth = torch.tensor([[1.0, 3.0]], dtype=torch.float64, requires_grad=True)
    rows, columns = torch.zeros(2, dtype=torch.long), torch.arange(2)
    target = torch.full((2,), 2.0, dtype=torch.float64)
    weights = torch.tensor([1.0, 0.5], dtype=torch.float64)

    def loss(values):
        return sparse_depth_loss(values, rows, columns, target, weights, 1.5)

    loss(depth).backward()
    assert depth.grad[0, 0] < 0 < depth.grad[0, 1]
    assert torch.autograd.gradcheck(loss, (depth.detach().requires_grad_(True),))


def test_points_of_few_photographs_and_large_errors_count_less():
    weights = point_weights(np.array([0.0, 0.0, 2.0]), np.array([8, 2, 8]))
    assert weights.tolist() == [1.0, 0.5, pytest.approx(0.2)]


def test_strips_give_the_depth_term_of_the_whole_image(tmp_path):
    camera, found = tiny_cameras(1)[0], []
    for strips in (1, 3):
        stage = VanillaStage(
            disturbed_cloud(tiny_cloud()), VanillaConfig(split=ImageSplit(strips)), EXTENT,
            tmp_path, robustness=robustness(cameras=[camera]),
        )  # fmt: skip
        result = stage.accumulate(5, camera, torch.full((48, 64, 3), 0.5))
        found.append((result.terms["points"], stage.model.optimizer.gradients()["means"]))
    (first, one), (second, other) = found
    assert float(first) == pytest.approx(float(second), rel=1e-5)
    assert float((one - other).norm()) < 1e-4 * float(one.norm())


def test_the_depth_term_fades():
    guide = robustness()
    assert guide.depth_weight(0) == ON.depth_weight
    assert guide.depth_weight(100) == pytest.approx(0.01 * ON.depth_weight)


# The other parts


def test_guards_keep_what_is_behind_and_remove_what_is_in_front_of_a_camera():
    cameras = tiny_cameras(4)
    center = torch.tensor(cameras[0].center, dtype=torch.float32)
    forward = torch.tensor(cameras[0].rotation[2], dtype=torch.float32)
    means = torch.stack([center + 0.1 * forward, center + 2.5 * forward])
    assert robustness(cameras=cameras).outside_guards(means).tolist() == [False, True]


def test_dropping_depends_on_iteration_and_view_alone():
    gaussians, guide = tiny_cloud().activate(), robustness()
    first, again = (guide.dropped(gaussians, 50, 0).opacities for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, guide.dropped(gaussians, 51, 0).opacities)
    assert not torch.equal(first, guide.dropped(gaussians, 50, 1).opacities)
    assert float((first == 0).float().mean()) == pytest.approx(ON.drop_rate / 2, abs=0.07)
    assert float(first.max()) <= 1
    assert torch.equal(guide.dropped(gaussians, 0, 0).opacities, gaussians.opacities)


def test_the_shell_is_a_sphere_far_outside():
    cameras = tiny_cameras(4)
    points, colors = torch.zeros(3, 3), torch.zeros(3, 3, dtype=torch.uint8)
    more, shades = with_shell(points, colors, cameras, EXTENT, ON)
    shell = more[3:] - torch.tensor(np.mean([c.center for c in cameras], axis=0)).float()
    assert len(shell) == ON.shell_points == len(shades) - 3
    assert torch.allclose(shell.norm(dim=1), torch.tensor(SHELL_RADIUS * EXTENT), rtol=1e-4)
    assert float(shell.mean(dim=0).norm()) < 0.01 * SHELL_RADIUS * EXTENT
    assert robustness(cameras=cameras).far_away(more).sum() == len(shell)
    unasked = with_shell(points, colors, cameras, EXTENT, replace(ON, robust=False))
    assert unasked[0] is points


def test_nothing_is_done_unless_asked_for():
    assert robustness_of(RobustConfig(), [], None) is None
    assert "robust" not in VanillaConfig().identity()
    assert VanillaConfig(robustness=ON).identity()["robust"]["depth_weight"] == ON.depth_weight


# Runs


def vanilla(scene, output, *more) -> None:
    assert run_cli(
        vanilla_train.main, "-s", scene.root, "-m", output, "--eval", "--iterations", 24,
        "--densify_from_iter", 2, "--densification_interval", 4, "--densify_until_iter", 20,
        "--opacity_reset_interval", 9, "--checkpoint_interval", 8, "--robust", *more,
    ) == 0  # fmt: skip


def test_a_continued_robust_run_has_the_same_bits(tmp_path, capsys):
    scene = make_tiny_scene(tmp_path / "scene")
    names = tuple(camera.name for camera in scene.cameras)
    add_tracks(tmp_path / "scene" / "sparse" / "0", 60, names)
    vanilla(scene, tmp_path / "a")
    assert "points" in capsys.readouterr().out
    source = tmp_path / "a" / "checkpoints" / "8.pt"
    vanilla(scene, tmp_path / "b", "--resume", source)
    assert_same_bits(*(tmp_path / name / "checkpoints" / "24.pt" for name in "ab"))


def test_a_scene_without_tracks_says_what_idles(tmp_path, capsys):
    vanilla(make_tiny_scene(tmp_path / "scene"), tmp_path / "out")
    assert "has no tracks" in capsys.readouterr().out
