# SPDX-License-Identifier: Apache-2.0
"""The shell begins in the colours of the photographs: the sky's, where they look at it."""

from __future__ import annotations

import math

import pytest
import torch

from gaussian_splatting.components.sky_sphere import SKY_GREY, RobustConfig, sky_of, with_sky
from gaussian_splatting.core.spherical_harmonics import sh_to_rgb
from gaussian_splatting.data.cameras import Camera, pixel_rays
from gaussian_splatting.vanilla.initial_gaussians import initial_cloud
from gaussian_splatting.vanilla.sky_colors import directional_colors, with_sky_colors
from tests.support.random_scenes import look_at

EXTENT = 1.0
ON = RobustConfig(robust=True)


def outwards(degrees: float, name: str) -> Camera:
    """A wide view away from the middle, level."""
    x, z = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return look_at((x, 0.0, z), (5 * x, 0.0, 5 * z), width=60, height=30, focal=30.0, name=name)


def cameras() -> list[Camera]:
    """Eight views all around; none looks far up or down."""
    return [outwards(45.0 * i, str(i)) for i in range(8)]


def sky(directions: torch.Tensor) -> torch.Tensor:
    """Colours that change slowly with the direction. (..., 3) -> (..., 3) uint8"""
    unit = torch.nn.functional.normalize(directions, dim=-1)
    return ((unit * 0.3 + 0.5) * 255).round().to(torch.uint8)


def rays_of(camera: Camera) -> torch.Tensor:
    return pixel_rays(camera, dtype=torch.float64, device="cpu")


def photograph(camera: Camera) -> torch.Tensor:
    return sky(rays_of(camera) @ torch.from_numpy(camera.rotation))


def shell() -> torch.Tensor:
    points, _ = with_sky(
        torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.uint8), cameras(), EXTENT, ON
    )
    return points[1:].double()


def test_points_have_the_colour_that_the_photographs_show_in_their_direction():
    points = shell()
    found = directional_colors(points, cameras(), photograph).int()
    level = points[:, 1].abs() < 0.2 * points.norm(dim=1)
    assert level.sum() > 150
    assert (found[level] - sky(points[level]).int()).abs().max() <= 8


def test_what_no_photograph_shows_has_the_colour_of_the_nearest_that_one_does():
    points = shell()
    found = directional_colors(points, cameras(), photograph).int()
    above = points[:, 1] > 0.9 * points.norm(dim=1)
    shown = sky(rays_of(cameras()[0])).amax(), sky(rays_of(cameras()[0])).amin()
    assert above.sum() > 20
    # Not grey, and as far up as any photograph shows.
    assert (found[above][:, 1] > 128 + 10).all()
    assert found[above].max() <= max(int(s) for s in shown) + 40


def test_an_object_before_some_of_the_views_does_not_colour_the_shell():
    def with_object(camera: Camera) -> torch.Tensor:
        image = photograph(camera)
        return torch.zeros_like(image) if camera.name == "hidden" else image

    views = [outwards(10.0, "one"), outwards(20.0, "hidden"), outwards(30.0, "another")]
    points = shell()
    clean, disturbed = (directional_colors(points, views, f) for f in (photograph, with_object))
    axis = torch.from_numpy(views[1].rotation[2]).double()
    seen_by_all = points @ axis > math.cos(math.radians(15)) * points.norm(dim=1)
    assert seen_by_all.sum() > 10
    assert (clean.int() - disturbed.int())[seen_by_all].abs().max() <= 16


@pytest.mark.parametrize("alpha", [0, 255])
def test_what_a_mask_leaves_out_has_no_colour(alpha):
    def masked(camera: Camera) -> torch.Tensor:
        image = photograph(camera)
        return torch.cat([image, torch.full_like(image[..., :1], alpha)], dim=-1)

    found = directional_colors(shell(), cameras(), masked)
    assert (found is None) == (alpha == 0)


def test_only_the_shell_is_painted():
    points, colors = with_sky(
        torch.eye(3), torch.zeros(3, 3, dtype=torch.uint8), cameras(), EXTENT, ON
    )
    cloud = initial_cloud(points, colors)
    painted = with_sky_colors(cloud, sky_of(cameras(), EXTENT, ON), cameras(), photograph)
    assert torch.equal(painted.sh_dc[:3], cloud.sh_dc[:3])
    assert not torch.equal(painted.sh_dc[3:], cloud.sh_dc[3:])
    grey = (sh_to_rgb(painted.sh_dc[3:, 0]) - SKY_GREY / 255).abs().amax(dim=1) < 0.01
    assert float(grey.float().mean()) < 0.05
    for name in ("means", "log_scales", "opacity_logits"):
        assert torch.equal(getattr(painted, name), getattr(cloud, name))
