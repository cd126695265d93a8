# SPDX-License-Identifier: Apache-2.0
"""Pixels carried through planes to another view and back: float64 twins, finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from sugar_scene import plane_kernels
from sugar_scene.plane_kernels import (
    ALL_PATCHES,
    LARGE_MISMATCH,
    MIN_VARIANCE,
    NO_PATCHES,
    PATCH_RADIUS,
    PATCHES_WHERE_MET,
    RELIABLE_GAIN,
    SMALL_MISMATCH,
    UNCOUNTED,
    ComparedPixels,
    pair_numbers,
)
from sugar_scene.reprojection import ViewPair
from tests.support.plane_reference import cycle_of, patch_correlation, plane_depth, rays_of
from tests.support.random_scenes import look_at

DISTANCE, TILT = 3.0, 0.3


def texture(points: Tensor) -> Tensor:
    """Grey values of a smooth solid texture. (..., 3) -> (...)"""
    x, y, z = points.unbind(-1)
    waves = torch.sin(4.2 * x + 1) * torch.cos(3.5 * y) + torch.sin(2.8 * (x + y) + z)
    return 0.5 + 0.2 * waves


def cameras() -> tuple[Camera, Camera]:
    reference = look_at((0.3, -0.2, 3.0), width=60, height=50, focal=60.0, principal=(2.0, -1.5))
    other = look_at((1.1, 0.4, 2.8), width=64, height=48, focal=66.0, principal=(-3.0, 2.0))
    return reference, other


def world_plane() -> tuple[np.ndarray, float]:
    """n . X = d of a tilted plane through the origin's neighbourhood."""
    normal = np.array([math.sin(TILT), 0.1, math.cos(TILT)])
    return normal / np.linalg.norm(normal), 0.05


def plane_in(camera: Camera) -> Tensor:
    """The plane in camera axes, n towards the camera, and n . X there. (4,) float64"""
    normal, d = world_plane()
    turned = camera.rotation @ normal
    distance = d + turned @ camera.translation
    sign = -1.0 if distance > 0 else 1.0
    return torch.tensor([*(sign * turned), sign * distance])


def all_pixels(camera: Camera) -> Tensor:
    x, y = torch.meshgrid(torch.arange(camera.width), torch.arange(camera.height), indexing="xy")
    return torch.stack([x, y], dim=-1).reshape(-1, 2).int()


def picture(camera: Camera) -> Tensor:
    """Render the plane. (H, W) float64"""
    rays = rays_of(all_pixels(camera), camera, torch.float64)
    depth, known = plane_depth(plane_in(camera).expand(len(rays), 4), rays)
    assert known.all()
    local = rays * depth[:, None] - torch.tensor(camera.translation)
    gray = texture(local @ torch.tensor(camera.rotation))
    return gray.reshape(camera.height, camera.width)


def numbers_of(pair: ViewPair, tolerance: float | None = None) -> Tensor:
    """The pair as kernels on the CPU read it."""
    return pair_numbers(pair, torch.device("cpu"), tolerance)


def compared(planes: Tensor, pixels: Tensor, gray: Tensor, gray2: Tensor, pair: ViewPair):
    """Correlations on planes m . X = 1, and where there are any."""
    given = torch.cat([-planes, -torch.ones_like(planes[:, :1])], dim=1)
    maps = (gray, gray2, torch.zeros_like(gray2))
    _, _, mismatches, matched = ComparedPixels.apply(
        given, pixels, maps, numbers_of(pair), ALL_PATCHES
    )
    return torch.where(matched > 0, 1 - mismatches, 0.0), matched > 0


def true_planes(pixels: Tensor, camera: Camera) -> Tensor:
    """m of m . X = 1. (n, 3) float64"""
    plane = plane_in(camera)
    return (plane[:3] / plane[3]).expand(len(pixels), 3).clone()


@pytest.fixture(autouse=True, params=[8, 1])
def lanes(request, monkeypatch):
    """Run the comparison of a CPU and that of a GPU."""
    monkeypatch.setattr(plane_kernels, "lanes_of", lambda device: request.param)


@pytest.fixture
def case():
    pair = ViewPair.of(*cameras())
    gray, gray2 = (picture(camera) for camera in cameras())
    pixels = all_pixels(pair.reference)[::7].contiguous()
    return pair, gray, gray2, pixels


def test_the_homography_of_a_known_plane_meets_the_same_texture(case):
    pair, gray, gray2, pixels = case
    planes = true_planes(pixels, pair.reference).float()
    value, counted = compared(planes, pixels, gray.float(), gray2.float(), pair)
    assert int(counted.sum()) > 100
    assert float(value[counted].min()) > 0.99
    assert not value[~counted].any()
    # A plane that lies elsewhere meets other texture.
    off, counted = compared(1.3 * planes, pixels, gray.float(), gray2.float(), pair)
    assert float(off[counted].mean()) < 0.9


def test_values_and_gradients_match_the_float64_patch_correlation(case):
    pair, gray, gray2, pixels = case
    rng = torch.Generator().manual_seed(0)
    noise = 0.02 * torch.randn(len(pixels), 3, generator=rng, dtype=torch.float64)
    start = true_planes(pixels, pair.reference) + noise
    planes = start.float().requires_grad_(True)
    value, counted = compared(planes, pixels, gray.float(), gray2.float(), pair)
    weights = torch.randn(len(pixels), generator=rng, dtype=torch.float64)
    (value * weights.float()).sum().backward()
    assert int(counted.sum()) > 80
    exact = start[counted].requires_grad_(True)
    expected = patch_correlation(exact, pixels[counted], gray, gray2, pair)
    (expected * weights[counted]).sum().backward()
    torch.testing.assert_close(value[counted].double(), expected, rtol=0, atol=2e-5)
    scale = float(exact.grad.abs().max())
    assert float((planes.grad[counted] - exact.grad).abs().max()) < 1e-3 * scale
    assert not planes.grad[~counted].any()


def test_the_gradient_is_that_of_finite_differences(case):
    pair, gray, gray2, pixels = case
    pixels = pixels[len(pixels) // 2 :: 9].contiguous()
    start = true_planes(pixels, pair.reference) * 1.02

    def value(planes: Tensor) -> Tensor:
        return patch_correlation(planes, pixels[counted], gray, gray2, pair)

    leaf = start.float().requires_grad_(True)
    found, counted = compared(leaf, pixels, gray.float(), gray2.float(), pair)
    found.sum().backward()
    assert int(counted.sum()) > 5
    step = 1e-6
    for axis in range(3):
        move = torch.zeros(3, dtype=torch.float64)
        move[axis] = step
        numeric = (value(start[counted] + move) - value(start[counted] - move)) / (2 * step)
        gradient = leaf.grad[counted, axis].double()
        # Between two texels the slope of what is read jumps; few patches have a tap just there.
        close = (numeric - gradient).abs() < 2e-2 * numeric.abs().max()
        assert float(close.double().mean()) > 0.8


def test_correlation_leaves_gain_and_offset_alone(case):
    pair, gray, gray2, pixels = case
    planes = true_planes(pixels, pair.reference).float() * 1.02
    plain, counted = compared(planes, pixels, gray.float(), gray2.float(), pair)
    brighter = (0.7 * gray2 + 0.1).float()
    other, also = compared(planes, pixels, gray.float(), brighter, pair)
    assert torch.equal(counted, also)
    # But for the epsilon beside small variances.
    torch.testing.assert_close(other, plain, rtol=0, atol=1e-2)


def test_masks_and_flat_patches_do_not_count(case):
    pair, gray, gray2, pixels = case
    planes = true_planes(pixels, pair.reference).float()
    _, counted = compared(planes, pixels, gray.float(), gray2.float(), pair)
    masked = gray.float()
    masked[:, :30] = UNCOUNTED
    _, fewer = compared(planes, pixels, masked, gray2.float(), pair)
    assert bool(fewer.any())
    assert not fewer[pixels[:, 0] < 30 + PATCH_RADIUS].any()
    assert torch.equal(fewer, counted & (pixels[:, 0] >= 30 + PATCH_RADIUS))
    nothing = torch.full_like(gray2.float(), UNCOUNTED)
    _, none = compared(planes, pixels, gray.float(), nothing, pair)
    assert not none.any()
    flat = 0.5 + 0.5 * MIN_VARIANCE * gray.float()
    _, none = compared(planes, pixels, flat, gray2.float(), pair)
    assert not none.any()


@pytest.mark.parametrize("tolerance", [1.0, 2.5])
def test_gradients_grow_where_patches_agree_and_fade_where_highlights_move(case, tolerance):
    pair, gray, gray2, pixels = case
    maps = (gray.float(), (1 - gray2).float(), torch.zeros_like(gray2).float())
    maps[1][:, 30:] = gray2[:, 30:]
    start = (
        true_planes(pixels, pair.reference).float() * torch.linspace(1, 1.5, len(pixels))[:, None]
    )
    values, gradients = [], []
    for given in (None, tolerance):
        planes = torch.cat([-start, -torch.ones_like(start[:, :1])], dim=1).requires_grad_(True)
        found = ComparedPixels.apply(planes, pixels, maps, numbers_of(pair, given), ALL_PATCHES)[2]
        found.sum().backward()
        values.append(found.detach())
        gradients.append(planes.grad.double())
    assert torch.equal(*values)
    mismatches = values[0].double()
    small, large = mismatches / SMALL_MISMATCH, mismatches / (LARGE_MISMATCH * tolerance)
    factors = torch.exp(-(large**4)) * (1 + RELIABLE_GAIN / (1 + small**2))
    assert float(factors[mismatches > 0].min()) < 0.01
    assert float(factors[mismatches > 0].max()) > 2.9
    expected = factors[:, None] * gradients[0]
    torch.testing.assert_close(gradients[1], expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("plane", [(0.0, 0.0, -0.3), (0.0, 0.0, 0.0), (math.nan, 0.0, 0.3)])
def test_planes_behind_the_camera_or_without_numbers_do_not_count(case, plane):
    pair, gray, gray2, pixels = case
    planes = torch.tensor(plane).expand(len(pixels), 3).clone().requires_grad_(True)
    value, counted = compared(planes, pixels, gray.float(), gray2.float(), pair)
    value.sum().backward()
    assert not counted.any()
    assert not value.any()
    assert not planes.grad.any()


def test_no_patches_are_no_work(case):
    pair, gray, gray2, pixels = case
    value, counted = compared(torch.zeros(0, 3), pixels[:0], gray.float(), gray2.float(), pair)
    assert value.shape == counted.shape == (0,)


def test_misses_weights_and_their_gradients_match_the_float64_twin(case):
    pair, gray, gray2, pixels = case
    rng = torch.Generator().manual_seed(0)
    noise = 0.002 * torch.randn(len(pixels), 4, generator=rng, dtype=torch.float64)
    start = plane_in(pair.reference).expand(len(pixels), 4) * 1.001 + noise
    there = all_pixels(pair.neighbor)
    rays = rays_of(there, pair.neighbor, torch.float64)
    depth, _ = plane_depth(plane_in(pair.neighbor).expand(len(there), 4), rays)
    depth = depth.reshape(pair.neighbor.height, pair.neighbor.width)
    depth[:, :20] = 0.0
    planes, exact = start.float().requires_grad_(True), start.clone().requires_grad_(True)
    maps = (gray.float(), gray2.float(), depth.float())
    weights, misses, _, matched = ComparedPixels.apply(
        planes, pixels, maps, numbers_of(pair), NO_PATCHES
    )
    assert not matched.any()
    expected, expected_weights = cycle_of(exact, pixels, depth, pair)
    met = expected_weights > 0
    assert 100 < int(met.sum()) < len(pixels)
    torch.testing.assert_close(weights.double(), expected_weights, rtol=0, atol=1e-3)
    torch.testing.assert_close(misses[met].double(), expected[met], rtol=0, atol=1e-3)
    misses[met].sum().backward()
    expected[met].sum().backward()
    scale = float(exact.grad.abs().max())
    assert float((planes.grad - exact.grad).abs().max()) < 5e-3 * scale
    planes.grad = None
    _, again, mismatches, _ = ComparedPixels.apply(
        planes, pixels, maps, numbers_of(pair), PATCHES_WHERE_MET
    )
    assert torch.equal(again, misses)
    mismatches.sum().backward()
    # Planes are the same however long N and D are.
    along, size = (planes.grad * planes.detach()).sum(dim=1), planes.grad.abs().amax(dim=1)
    assert float(size.max()) > 0
    assert float((along.abs() / size.clamp_min(1e-6)).max()) < 1e-4
    every = ComparedPixels.apply(planes, pixels, maps, numbers_of(pair), plane_kernels.ALL_PATCHES)[
        2
    ]
    assert torch.equal(mismatches, torch.where(weights > 0, every, 0.0))
