# SPDX-License-Identifier: Apache-2.0
"""Dense points to start from: depth of known planes, what is believed, and runs that begin so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gaussian_splatting import train as vanilla_train
from gaussian_splatting.data.cameras import Camera, pixel_rays
from gaussian_splatting.scenes.scene import Scene
from gaussian_splatting.vanilla.dense_start import dense_points, with_dense_points
from gaussian_splatting.vanilla.initial_gaussians import initial_cloud
from gaussian_splatting.vanilla.plane_sweep import (
    N_DEPTHS,
    NOWHERE,
    GreyView,
    best_plane,
    consistent,
    parallax,
    sweep,
    world_points,
)
from tests.support.random_scenes import look_at
from tests.support.tiny_scene import assert_same_bits, make_tiny_scene, run_cli

SIZE = {"width": 64, "height": 48, "focal": 70.0}


def cameras() -> list[Camera]:
    """Five cameras side by side, four units from the plane y = 0."""
    return [
        look_at((x, -4.0, 0.4 * abs(x)), name=f"{x:.1f}.png", **SIZE)
        for x in (-1.2, -0.6, 0.0, 0.6, 1.2)
    ]


def on_plane(camera: Camera) -> torch.Tensor:
    """Points of the plane y = 0 that the pixels see. (H, W, 3)"""
    rays = pixel_rays(camera, dtype=torch.float64, device="cpu") @ torch.from_numpy(camera.rotation)
    center = torch.from_numpy(camera.center)
    return center + rays * (-center[1] / rays[..., 1:2])


def texture(points: torch.Tensor) -> torch.Tensor:
    """A pattern without repetition. (..., 3) -> (...)"""
    rng = np.random.default_rng(0)
    value = torch.zeros(points.shape[:-1], dtype=torch.float64)
    for fx, fy, phase in rng.normal(size=(24, 3)) * (6.0, 6.0, 3.0):
        value = value + torch.sin(fx * points[..., 0] + fy * points[..., 2] + phase)
    return (0.5 + value / 24).clamp(0, 1)


def photograph(camera: Camera) -> torch.Tensor:
    grey = (texture(on_plane(camera)) * 255).round().to(torch.uint8)
    return grey[..., None].expand(-1, -1, 3).contiguous()


def view(camera: Camera) -> GreyView:
    return GreyView(camera, photograph(camera)[..., 0].float() / 255)


def true_depth(camera: Camera) -> torch.Tensor:
    points = on_plane(camera) @ torch.from_numpy(camera.rotation).T
    return points[..., 2] + float(camera.translation[2])


def test_the_depth_of_a_plane_is_found():
    middle, *others = (cameras()[i] for i in (2, 1, 3))
    depth, agreement = sweep(view(middle), [view(c) for c in others], 2.0, 8.0)
    good = agreement > 0.6
    assert good.float().mean() > 0.8
    error = ((depth - true_depth(middle)).abs() / true_depth(middle))[good]
    assert error.median() < 0.01
    assert error.quantile(0.75) < 0.02


def test_large_images_are_searched_from_coarse_to_fine_and_no_worse():
    size = {"width": 192, "height": 144, "focal": 210.0}
    middle, *others = (look_at((x, -4.0, 0.0), **size) for x in (0.0, -0.6, 0.6))
    one, around = view(middle), [view(c) for c in others]
    planes = torch.linspace(1 / 8, 1 / 2, N_DEPTHS)[:, None, None]
    errors = []
    for depth, agreement in (
        sweep(one, around, 2.0, 8.0),
        (lambda inverse, agreed: (1 / inverse, agreed))(*best_plane(one, around, planes)),
    ):
        assert (agreement > 0.6).float().mean() > 0.9
        errors.append(((depth - true_depth(middle)).abs() / true_depth(middle)).median())
    assert errors[0] < 0.003
    assert errors[0] < 1.5 * errors[1]


def test_a_flat_photograph_has_no_depth():
    camera, other = cameras()[2:4]
    flat = GreyView(camera, torch.full((48, 64), 0.5))
    assert (sweep(flat, [view(other)], 2.0, 8.0)[1] == NOWHERE).all()


def test_depth_counts_where_a_neighbour_agrees():
    camera, other = cameras()[2:4]
    depth, its = true_depth(camera).float(), true_depth(other).float()
    agreed = consistent(view(camera), depth, [(view(other), its)], 0.02)
    assert 0.5 < agreed.float().mean() < 1.0  # not where the neighbour does not look
    for wrong in (its * 1.1, torch.full_like(its, torch.inf)):
        assert not consistent(view(camera), depth, [(view(other), wrong)], 0.02).any()
    assert not consistent(view(camera), depth, [], 0.02).any()


def test_depth_that_other_neighbours_look_through_does_not_count():
    camera, *others = (cameras()[i] for i in (2, 1, 3))
    depth, (first, second) = true_depth(camera).float(), (true_depth(c).float() for c in others)
    both = [(view(c), d) for c, d in zip(others, (first, second), strict=True)]
    through = [both[0], (view(others[1]), second * 1.2)]
    unknown = [both[0], (view(others[1]), torch.full_like(second, torch.inf))]
    seen_by_both = consistent(view(camera), depth, both[1:], 0.02)
    assert not (consistent(view(camera), depth, through, 0.02) & seen_by_both).any()
    kept = consistent(view(camera), depth, unknown, 0.02) & seen_by_both
    assert kept.float().mean() > 0.3


def test_points_of_a_view_lie_where_its_pixels_look():
    camera = cameras()[1]
    found = world_points(camera, true_depth(camera))
    assert torch.allclose(found.double(), on_plane(camera), atol=1e-5)


def test_parallax_is_the_angle_at_the_point():
    a, b = (look_at((x, -4.0, 0.0), **SIZE) for x in (0.0, 4.0))
    assert parallax(a, b, 4.0) == pytest.approx(45.0)
    assert parallax(a, a, 4.0) == 0.0


@pytest.fixture(scope="module")
def wall() -> Scene:
    """Photographs of the plane, and few points of it."""
    views = cameras()
    rng = np.random.default_rng(1)
    points = np.zeros((40, 3), np.float32)
    points[:, ::2] = rng.uniform(-1, 1, (40, 2))
    points[:, 1] = rng.normal(size=40) * 0.3
    return Scene(
        root=None,
        train_cameras=views,
        test_cameras=[],
        original_train_cameras=views,
        original_test_cameras=[],
        points=points,
        points_rgb=np.zeros((40, 3), np.uint8),
        extent=1.5,
        white_background=False,
        description="",
    )


def test_dense_points_lie_on_the_surface_and_have_its_colours(wall):
    points, colors = dense_points(wall, photograph)
    assert len(points) > 1_000
    assert points[:, 1].abs().median() < 0.04
    expected = texture(points.double()) * 255
    assert (colors[:, 0].double() - expected).abs().median() < 20
    again = dense_points(wall, photograph)
    assert torch.equal(points, again[0])


def test_pixels_that_do_not_count_give_no_points(wall):
    def half_masked(camera: Camera) -> torch.Tensor:
        mask = torch.full((48, 64, 1), 255, dtype=torch.uint8)
        mask[:, :32] = 0
        return torch.cat([photograph(camera), mask], dim=2)

    points, _ = dense_points(replace(wall, train_cameras=cameras()[1:4]), half_masked)
    whole, _ = dense_points(replace(wall, train_cameras=cameras()[1:4]), photograph)
    assert 0 < len(points) < 0.7 * len(whole)


def test_there_are_never_more_gaussians_than_allowed(wall):
    cloud = initial_cloud(torch.from_numpy(wall.points), torch.from_numpy(wall.points_rgb))
    told = []
    found = with_dense_points(cloud, wall, photograph, None, 100, told.append)
    assert len(found) == 100
    assert torch.equal(found.means[:40], cloud.means)
    assert torch.allclose(found.sh_dc[:40], cloud.sh_dc, atol=1e-5)
    assert "dense start: 60 of " in told[0]
    assert with_dense_points(cloud, wall, photograph, None, 40, told.append) is cloud


def test_nothing_is_added_outside_of_the_masks(wall):
    class LeftHalf:
        def contains(self, points):
            return points[:, 0] < 0

    cloud = initial_cloud(torch.from_numpy(wall.points), torch.from_numpy(wall.points_rgb))
    found = with_dense_points(cloud, wall, photograph, LeftHalf(), None, lambda line: None)
    assert len(found) > 500
    assert (found.means[40:, 0] < 0).all()


def test_without_sparse_points_there_are_none(wall):
    empty = replace(wall, points=wall.points[:0])
    assert len(dense_points(empty, photograph)[0]) == 0


def run(scene, output, *more: object) -> int:
    return run_cli(
        vanilla_train.main,
        *more,
        s=scene,
        m=output,
        iterations=12,
        checkpoint_interval=6,
        keep_checkpoints=9,
    )


@pytest.mark.slow
def test_a_run_starts_with_them_and_resumes_with_the_same_bits(tmp_path, capsys):
    scene = make_tiny_scene(tmp_path / "scene", n_views=12).root
    assert run(scene, tmp_path / "whole", "--robust", "--verbose") == 0
    assert "dense start: " in capsys.readouterr().out
    assert run(scene, tmp_path / "parts", "--robust") == 0
    last = tmp_path / "parts" / "checkpoints" / "12.pt"
    last.unlink()
    capsys.readouterr()
    assert run(scene, tmp_path / "parts", "--robust") == 0
    assert "dense start" not in capsys.readouterr().out
    assert_same_bits(tmp_path / "whole" / "checkpoints" / "12.pt", last)


def test_the_start_is_part_of_the_settings(tmp_path, capsys):
    scene = make_tiny_scene(tmp_path / "scene").root
    assert run(scene, tmp_path / "a", "--robust", "--init", "sparse") == 0
    assert "dense start" not in capsys.readouterr().out
    assert run(scene, tmp_path / "a", "--robust") == 2
    assert "init" in capsys.readouterr().err
