# SPDX-License-Identifier: Apache-2.0
"""Gaussians on a mesh start with the colours that photographs show at their places."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from gaussian_splatting.core.spherical_harmonics import SH_C0, sh_basis_of
from sugar_scene.mesh_bound import BoundCloud, bind_to_mesh
from sugar_scene.triangle_rasterizer import to_camera
from sugar_trainers.initial_colors import (
    MIN_SHAPE,
    SHAPE_SIZE,
    with_photograph_colors,
    with_shapes_of_triangles,
)
from tests.support.random_scenes import look_at

# A square in the plane z = 0, and a small one behind it.
LARGE = [[-1.0, -1, 0], [1, -1, 0], [1, 1, 0], [-1, 1, 0]]
VERTICES = torch.tensor([*LARGE, [-0.1, -0.1, -1], [0.1, -0.1, -1], [0, 0.1, -1]])
FACES = torch.tensor([[0, 1, 2], [0, 2, 3], [4, 5, 6]])
CAMERAS = [look_at((x, 0.3, 4.0)) for x in (-0.5, 0.5)]


def square() -> BoundCloud:
    return bind_to_mesh(VERTICES, FACES, torch.full((7, 3), 0.25), 6, 1.0)


def colors_of(cloud: BoundCloud) -> torch.Tensor:
    return 0.5 + SH_C0 * cloud.sh_dc[:, 0]


def painted(camera, level: int) -> torch.Tensor:
    """Red where the plane's x is positive, green where not."""
    rows, columns = torch.meshgrid(
        torch.arange(camera.height), torch.arange(camera.width), indexing="ij"
    )
    pixels = torch.stack([columns + 0.5 - camera.cx, rows + 0.5 - camera.cy], dim=-1).double()
    rays = torch.cat([pixels / camera.fx, torch.ones_like(pixels[..., :1])], dim=-1)
    rotation, center = torch.tensor(camera.rotation), torch.tensor(camera.center)
    world = rays @ rotation
    x = center[0] - world[..., 0] * center[2] / world[..., 2]
    image = torch.zeros(camera.height, camera.width, 3, dtype=torch.uint8)
    image[..., 0][x > 0] = level
    image[..., 1][x <= 0] = level
    return image


def test_each_gaussian_gets_the_mean_of_the_views_that_show_it():
    photographs = [
        (CAMERAS[0], painted(CAMERAS[0], 100), None),
        (CAMERAS[1], painted(CAMERAS[1], 200), None),
    ]
    cloud = square()
    found, means = colors_of(with_photograph_colors(cloud, photographs)), cloud.activate().means
    front, right = means[:, 2] == 0, means[:, 0] > 0.1
    torch.testing.assert_close(
        found[front & right, 0], torch.full_like(found[front & right, 0], 150 / 255)
    )
    left = front & (means[:, 0] < -0.1)
    torch.testing.assert_close(found[left, 1], torch.full_like(found[left, 1], 150 / 255))
    # The square hides what is behind it, which keeps the colour of its vertices.
    torch.testing.assert_close(found[~front], torch.full_like(found[~front], 0.25))


def test_colours_that_change_with_the_direction_are_fitted():
    angles = torch.linspace(-1.2, 1.2, 9).tolist()
    cameras = [look_at((4 * math.sin(a), 0.3, 4 * math.cos(a))) for a in angles]
    photographs = [
        (camera, torch.full((camera.height, camera.width, 3), round(128 + 60 * angle)).byte(), None)
        for camera, angle in zip(cameras, angles, strict=True)
    ]
    cloud = with_photograph_colors(square(), photographs)
    points = cloud.activate().means
    front = points[:, 2] == 0
    for camera, angle in zip(cameras, angles, strict=True):
        directions = normalize(points - torch.tensor(camera.center).float(), dim=1)
        coefficients = torch.cat([cloud.sh_dc, cloud.sh_rest], dim=1)
        shown = 0.5 + (sh_basis_of(directions)[..., None] * coefficients).sum(dim=1)
        expected = torch.full_like(shown[front], (128 + 60 * angle) / 255)
        torch.testing.assert_close(shown[front], expected, atol=0.1, rtol=0)
    assert not bool(cloud.sh_rest[:, 3:].any())


def test_masked_pixels_and_exposures_are_taken_out():
    image = torch.full((CAMERAS[0].height, CAMERAS[0].width, 4), 204, dtype=torch.uint8)
    cloud = square()
    column = to_camera(cloud.activate().means, CAMERAS[0])[:, 0]
    image[:, : image.shape[1] // 2, 3] = 0
    darker = torch.tensor([[-0.5] * 3, [0.1] * 3])
    found = colors_of(with_photograph_colors(cloud, [(CAMERAS[0], image, darker)]))
    front = cloud.activate().means[:, 2] == 0
    expected = min(1.0, (0.8 - 0.1) / torch.tensor(-0.5).exp())
    torch.testing.assert_close(found[front & (column > 0.1)].amin(), torch.as_tensor(expected))
    assert float(found[front & (column < -0.1)].amax()) == 0.25


def triangle(corners, per_triangle: int = 1) -> BoundCloud:
    vertices = torch.tensor(corners)
    return bind_to_mesh(vertices, torch.tensor([[0, 1, 2]]), torch.ones(3, 3), per_triangle, 1.0)


@pytest.mark.parametrize("per_triangle", [1, 3, 4, 6])
def test_on_an_equilateral_triangle_shapes_are_circles(per_triangle):
    cloud = triangle([[0.0, 0, 1], [2, 0, 1], [1, math.sqrt(3), 1]], per_triangle)
    found = with_shapes_of_triangles(cloud)
    torch.testing.assert_close(found.log_scales, cloud.log_scales + math.log(SHAPE_SIZE))


def test_on_a_long_triangle_they_are_ellipses_along_it():
    """A right triangle of 8 by 1: moments of the uniform distribution, in closed form."""
    corners = torch.tensor([[0.0, 0, 0], [8, 0, 0], [0, 1, 0]])
    cloud = with_shapes_of_triangles(triangle(corners.tolist()))
    about = (corners - corners.mean(dim=0))[:, :2].double()
    # The ellipse that touches the sides in their middle has a sixth of the sum of squares.
    values, vectors = torch.linalg.eigh(about.T @ about / 6)
    expected = SHAPE_SIZE * values.flip(0).sqrt()
    torch.testing.assert_close(cloud.log_scales.exp()[0].double(), expected, rtol=1e-4, atol=0)
    w, x, y, z = cloud.activate().quats[0].tolist()
    # The second axis of a Gaussian on a mesh; the first one is its normal.
    along = torch.tensor([2 * (x * y - w * z), 1 - 2 * (x * x + z * z)], dtype=torch.float64)
    assert abs(float(along @ vectors[:, 1])) == pytest.approx(1, abs=1e-5)


def test_slivers_and_points_have_finite_shapes():
    for corners in ([[0.0, 0, 0], [1, 0, 0], [2, 0, 0]], [[1.0, 1, 1]] * 3):
        found = with_shapes_of_triangles(triangle(corners))
        assert found.log_scales.isfinite().all()
        assert found.rotations.isfinite().all()
        ratio = (found.log_scales[:, 1] - found.log_scales[:, 0]).exp()
        assert (ratio >= MIN_SHAPE * (1 - 1e-5)).all()
