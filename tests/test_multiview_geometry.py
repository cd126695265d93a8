# SPDX-License-Identifier: Apache-2.0
"""Plane depth, reprojection, neighbours and the pure losses of the multi-view mode."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera, pixel_rays
from gaussian_splatting.data.observations import Observations
from gaussian_splatting.rasterization import rasterize
from sugar_extractors.mesh.depth_views import FRONT_TRANSMITTANCE, confirmed_depth, plane_view
from sugar_scene import plane_kernels
from sugar_scene.plane_kernels import UNCOUNTED, NormalErrors, depth_of_planes
from sugar_scene.reprojection import (
    NeighborRule,
    NeighborViews,
    ViewPair,
    triangle_planes,
)
from sugar_scene.triangle_rasterizer import rasterize_triangles
from sugar_trainers.losses import (
    edge_weights,
    flatness_loss,
    gray_values,
)
from tests.support import plane_reference
from tests.support.mesh_scenes import icosahedron
from tests.support.plane_reference import (
    bilinear_depth,
    cycle_error,
    cycle_weights,
    plane_depth,
)
from tests.support.random_scenes import look_at

NORMAL = np.array([0.2, -0.1, 1.0]) / np.linalg.norm([0.2, -0.1, 1.0])


def view(eye=(0.4, 0.2, 3.0), **more) -> Camera:
    return look_at(eye, **{"width": 40, "height": 30, "focal": 40.0, **more})


def disc(n: int = 40, opacity: float = 0.9) -> Gaussians:
    """Flat Gaussians that cover a tilted plane through the origin."""
    rng = torch.Generator().manual_seed(0)
    x, y = (3 * torch.rand(2, n * n, generator=rng) - 1.5).unbind(0)
    z = -(NORMAL[0] * x + NORMAL[1] * y) / NORMAL[2]
    axis = np.cross([0.0, 0.0, 1.0], NORMAL)
    half = math.acos(NORMAL[2]) / 2
    axis = math.sin(half) * axis / np.linalg.norm(axis)
    quat = torch.tensor([math.cos(half), *axis], dtype=torch.float32)
    return Gaussians(
        means=torch.stack([x, y, z], dim=1),
        quats=quat.expand(n * n, 4).clone(),
        scales=torch.tensor([0.1, 0.1, 1e-4]).expand(n * n, 3).clone(),
        opacities=torch.full((n * n,), opacity),
        sh_dc=torch.zeros(n * n, 1, 3),
        sh_rest=torch.zeros(n * n, 15, 3),
    )


def exact_depth(camera: Camera, dtype=torch.float64) -> Tensor:
    """Depth of the plane at every pixel. (H, W)"""
    rays = pixel_rays(camera, dtype=dtype, device=torch.device("cpu"))
    normal = torch.tensor(camera.rotation @ NORMAL, dtype=dtype)
    distance = float(camera.rotation @ NORMAL @ camera.translation)
    return distance / (rays @ normal)


@pytest.mark.parametrize("opacity", [0.9, 0.2])
def test_flat_gaussians_have_the_depth_of_their_plane_however_transparent(opacity):
    camera, gaussians = view(), disc(opacity=opacity)
    output = rasterize(gaussians, camera, rgb=False, depth=True, plane_reach=100.0)
    rays = pixel_rays(camera, dtype=torch.float32, device="cpu")
    depth, _ = plane_depth(output.plane, rays)
    seen = output.alpha > 0.2
    assert float(seen.float().mean()) > 0.3
    error = (depth - exact_depth(camera, torch.float32))[seen].abs()
    assert float(error.max()) < 1e-4
    if opacity < 0.9:
        # Blended depth is drawn towards the camera where there is little to see.
        assert float((output.depth - depth)[seen].abs().max()) > 0.05


def test_rays_along_a_plane_and_planes_behind_have_no_depth():
    rays = torch.tensor([[0.0, 0.0, 1.0]] * 4)
    planes = torch.tensor(
        [
            [0.0, 0.0, -1.0, -2.0],
            [1.0, 0.0, 0.0, -2.0],
            [0.0, 0.0, -1.0, 2.0],
            [0.0, 0.0, 0.0, 0.0],
        ]
    ).requires_grad_(True)
    depth, known = plane_depth(planes, rays)
    assert known.tolist() == [True, False, False, False]
    assert float(depth[0].detach()) == 2.0
    depth.sum().backward()
    assert torch.isfinite(planes.grad).all()
    assert not planes.grad[1:].any()


def test_planes_of_triangles_have_the_depth_of_the_triangles_and_move_with_them():
    ball, camera = icosahedron(), view(width=90, height=70, focal=60.0)
    vertices, faces = torch.tensor(ball.vertices, dtype=torch.float32), torch.tensor(ball.faces)
    hits = rasterize_triangles(vertices, faces, camera)
    rays = pixel_rays(camera, dtype=torch.float32, device=torch.device("cpu"))
    assert int(hits.covered.sum()) > 300
    chosen = hits.face[hits.covered]
    planes = triangle_planes(vertices, faces, camera, chosen)
    depth, known = plane_depth(planes, rays[hits.covered])
    assert known.float().mean() > 0.95
    torch.testing.assert_close(depth[known], hits.depth[hits.covered][known], rtol=1e-4, atol=1e-5)
    some = chosen.unique()[:3]
    assert torch.autograd.gradcheck(
        lambda moved: triangle_planes(moved, faces, camera, some),
        vertices.double().requires_grad_(True),
        atol=1e-5,
    )


def flat_pixels(camera: Camera, dtype=torch.float64) -> Tensor:
    rays = pixel_rays(camera, dtype=dtype, device=torch.device("cpu"))
    return rays.reshape(-1, 3)


def test_the_way_there_and_back_meets_the_same_pixel():
    pair = ViewPair.of(view(), view((1.0, 0.5, 2.8)))
    rays, depth = flat_pixels(pair.reference), exact_depth(pair.reference).flatten()
    error, known = cycle_error(rays, depth, exact_depth(pair.neighbor), pair)
    assert int(known.sum()) > 200
    # The depth map is read linearly, where its inverse is linear.
    assert float(error[known].max()) < 0.01
    weights = cycle_weights(error, known)
    assert float(weights[known].min()) > 0.99
    assert not weights[~known].any()


def test_occluded_and_wrong_points_get_no_weight():
    pair = ViewPair.of(view(), view((1.0, 0.5, 2.8)))
    rays, depth = flat_pixels(pair.reference), exact_depth(pair.reference).flatten()
    nearer = 0.7 * exact_depth(pair.neighbor)
    error, known = cycle_error(rays, depth, nearer, pair)
    assert float(error[known].min()) > 1
    assert not cycle_weights(error, known).any()
    unknown = torch.zeros_like(nearer)
    assert not cycle_error(rays, depth, unknown, pair)[1].any()
    behind = torch.full_like(depth, -1.0)
    assert not cycle_error(rays, behind, exact_depth(pair.neighbor), pair)[1].any()


def test_the_gradient_of_the_cycle_is_that_of_finite_differences():
    pair = ViewPair.of(view(), view((1.0, 0.5, 2.8)))
    rays, depth = flat_pixels(pair.reference), exact_depth(pair.reference).flatten()
    rng = torch.Generator().manual_seed(0)
    there = exact_depth(pair.neighbor)
    there = there * (1 + 0.02 * torch.rand(there.shape, generator=rng, dtype=there.dtype))
    leaf = (1.02 * depth).requires_grad_(True)
    error, known = cycle_error(rays, leaf, there, pair)
    error[known].sum().backward()
    assert not leaf.grad[~known].any()
    step = 1e-7
    above = cycle_error(rays, leaf.detach() + step, there, pair)[0]
    below = cycle_error(rays, leaf.detach() - step, there, pair)[0]
    numeric = (above - below) / (2 * step)
    torch.testing.assert_close(leaf.grad[known], numeric[known], rtol=1e-4, atol=1e-4)


def test_depth_is_read_between_the_middles_of_pixels():
    depth = torch.tensor([[1.0, 2.0, 0.0], [3.0, 4.0, 5.0]])
    at = torch.tensor([[1.0, 1.0], [0.5, 0.5], [2.0, 1.0], [0.4, 1.0], [math.nan, 1.0]])
    values, known = bilinear_depth(depth, at)
    assert known.tolist() == [True, True, False, False, False]
    assert values[:2].tolist() == [2.5, 1.0]


# Depth for a mesh


def test_depth_counts_where_a_neighbour_confirms_it_or_none_sees_the_place():
    camera, other = view(), view((1.0, 0.5, 2.8))
    depth, there = exact_depth(camera, torch.float32), exact_depth(other, torch.float32)
    facing = torch.ones_like(depth)
    assert confirmed_depth(depth, facing, camera, []).all()
    assert confirmed_depth(depth, facing, camera, [(other, there)]).all()
    wrong = confirmed_depth(depth, facing, camera, [(other, 0.3 * there)])
    seen = ~confirmed_depth(depth, facing, camera, [(other, 0.3 * there)])
    assert float(seen.float().mean()) > 0.2
    # Who does not see the place does not speak against it, and one that agrees is enough.
    assert torch.equal(wrong, ~seen)
    both = [(other, 0.3 * there), (other, there)]
    assert confirmed_depth(depth, facing, camera, both).all()
    assert confirmed_depth(depth, facing, camera, [(other, torch.zeros_like(there))]).all()


def test_two_neighbours_may_miss_a_surface_seen_from_the_side_by_more():
    camera, other = view(), view((1.0, 0.5, 2.8))
    depth, there = exact_depth(camera, torch.float32), exact_depth(other, torch.float32)
    facing = torch.ones_like(depth)
    aside = 0.3 * facing

    def missed(cosine, scale, n_neighbors):
        neighbors = [(other, scale * there)] * n_neighbors
        return 1 - float(confirmed_depth(depth, cosine, camera, neighbors).float().mean())

    assert missed(facing, 0.7, 2) > 0.2
    assert missed(facing, 0.7, 2) == missed(facing, 0.7, 1) == missed(aside, 0.7, 1)
    assert missed(aside, 0.7, 2) == 0
    # However steep the angle, there is a limit.
    assert missed(1e-3 * facing, 0.3, 2) == missed(facing, 0.3, 1) > 0.2
    assert missed(0 * facing, 0.7, 2) == 0


def test_what_lies_behind_a_surface_does_not_pull_its_depth_inward():
    camera = view()
    front = disc(opacity=0.5)
    behind = replace(front, means=front.means - 0.3 * torch.tensor(NORMAL, dtype=torch.float32))
    gaussians = front.joined(behind)
    rays = pixel_rays(camera, dtype=torch.float32, device=torch.device("cpu"))
    blended = rasterize(gaussians, camera, rgb=False, plane_reach=100.0)
    is_opaque = rasterize(front, camera).alpha > 1 - FRONT_TRANSMITTANCE
    truth = exact_depth(camera, torch.float32)

    def error(depth: Tensor) -> float:
        return float((depth - truth)[is_opaque].abs().mean())

    assert float(is_opaque.float().mean()) > 0.2
    assert error(plane_depth(blended.plane, rays)[0]) > 5e-4
    assert error(plane_view(gaussians, camera, 100.0).depth) < 1e-5


def test_surfaces_seen_at_a_grazing_angle_have_no_depth():
    gaussians = disc()
    assert float((plane_view(gaussians, view(), 100.0).depth > 0).float().mean()) > 0.3
    along = np.cross([0.0, 1.0, 0.0], NORMAL)
    eye = 3 * (along / np.linalg.norm(along) + math.sin(math.radians(3)) * NORMAL)
    assert not plane_view(gaussians, view(tuple(eye)), 100.0).depth.any()


def test_pixels_without_depth_have_no_weight():
    """Little is before the reach of planes, and all the rest behind it."""
    opaque = disc(opacity=0.99)
    behind = replace(opaque, means=opaque.means - 6 * torch.tensor(NORMAL, dtype=torch.float32))
    shown = plane_view(disc(opacity=0.01).joined(behind), view(), 4.0)
    is_known = shown.depth > 0
    assert 0.05 < float(is_known.float().mean()) < 0.5
    assert torch.equal(shown.weight > 0, is_known)
    assert shown.weight.isfinite().all()


# Neighbours


def ring(n: int, radius: float = 3.0) -> list[Camera]:
    angles = 2 * np.pi * np.arange(n) / n
    return [
        replace(look_at((radius * np.cos(a), radius * np.sin(a), 0.5)), name=f"{i}.png")
        for i, a in enumerate(angles)
    ]


def test_neighbours_are_near_and_look_the_same_way():
    cameras = ring(36)
    neighbors = NeighborViews(cameras, 3.3, NeighborRule(max_baseline=0.4))
    found = [camera.name for camera in neighbors.of("0.png")]
    assert set(found) == {"1.png", "35.png", "2.png", "34.png"}
    assert set(found[:2]) == {"1.png", "35.png"}
    assert not neighbors.without_neighbors
    assert NeighborViews(ring(6), 3.3).without_neighbors == [f"{i}.png" for i in range(6)]


def test_points_in_common_come_before_angles():
    cameras = ring(36)
    rows = {name: np.arange(3, dtype=np.int32) for name in ("0.png", "2.png")}
    seen = Observations(
        np.zeros((3, 3), np.float32), np.zeros(3, np.float32), np.full(3, 2, np.int32), rows
    )
    best = NeighborViews(cameras, 3.3, observations=seen).of("0.png")[0]
    assert best.name == "2.png"


def test_a_draw_depends_on_seed_and_iteration_alone():
    neighbors = NeighborViews(ring(36), 3.3)
    first = [neighbors.draw("0.png", 0, i).name for i in range(40)]
    assert first == [neighbors.draw("0.png", 0, i).name for i in range(40)]
    assert set(first) == {camera.name for camera in neighbors.of("0.png")}
    assert first != [neighbors.draw("0.png", 1, i).name for i in range(40)]
    assert neighbors.draw("0.png", 0, 5, 0).name == first[5]
    assert neighbors.draw("unknown", 0, 0) is None


# Losses


def test_edges_have_no_weight_and_flat_places_all_of_it():
    gray = torch.zeros(9, 12)
    gray[:, 6:] = 1.0
    weights = edge_weights(gray)
    assert not weights[1:-1, 5:7].any()
    assert (weights[1:-1, 1:5] == 1).all()
    assert not weights[0].any()
    gray[4, 2] = UNCOUNTED
    around = edge_weights(gray)
    assert not around[3:6, 2].any()
    assert not around[4, 1:4].any()
    assert float(around[2, 2]) == 1


def test_grey_values_are_those_of_bytes_and_floats():
    photograph = torch.randint(256, (5, 4, 3), dtype=torch.uint8)
    counted = torch.ones(5, 4, dtype=torch.bool)
    counted[0] = False
    gray = gray_values(photograph, counted)
    torch.testing.assert_close(gray[1:], gray_values(photograph.float() / 255, None)[1:])
    assert (gray[0] == UNCOUNTED).all()
    assert float(gray_values(torch.ones(1, 1, 3), None)) == pytest.approx(1.0)


def planes_of(camera: Camera, dtype=torch.float64) -> Tensor:
    normal = camera.rotation @ NORMAL
    distance = normal @ camera.translation
    sign = -1.0 if distance > 0 else 1.0
    plane = torch.tensor([*(sign * normal), sign * distance], dtype=dtype)
    return plane.expand(camera.height, camera.width, 4).clone()


def normal_loss(plane: Tensor, camera: Camera, rows=slice(None), first=0, weights=None) -> Tensor:
    shape = (camera.height, camera.width)
    weights = torch.ones(shape, dtype=plane.dtype) if weights is None else weights
    return plane_reference.plane_normal_loss(
        plane, camera, first, weights, rows=rows, total=camera.height * camera.width
    )


def test_normals_of_a_plane_agree_with_its_depth():
    camera = view()
    assert float(normal_loss(planes_of(camera), camera)) == pytest.approx(0, abs=1e-12)
    assert float(normal_loss(0.3 * planes_of(camera), camera)) == pytest.approx(0, abs=1e-12)


def test_turned_normals_cost_one_minus_the_cosine():
    camera = view()
    plane = planes_of(camera)
    rays = pixel_rays(camera, dtype=plane.dtype, device=plane.device)
    depth, _ = plane_depth(plane, rays)
    turned = torch.tensor([0.0, 0.0, -1.0], dtype=plane.dtype)
    cosine = float(plane[0, 0, :3] @ turned)
    # The same depth, told by planes that face the camera.
    plane = torch.cat([turned.expand_as(rays), -depth[..., None]], dim=-1)
    inner = (camera.height - 2) * (camera.width - 2) / (camera.height * camera.width)
    assert float(normal_loss(plane, camera)) == pytest.approx(inner * (1 - cosine), rel=1e-6)


def test_the_gradient_of_the_normal_term_is_that_of_finite_differences():
    camera = view(width=9, height=8, focal=12.0)
    rng = torch.Generator().manual_seed(0)
    noise = 0.05 * torch.randn(8, 9, 4, generator=rng, dtype=torch.float64)
    weights = torch.rand(8, 9, generator=rng, dtype=torch.float64)
    plane = (planes_of(camera) + noise).requires_grad_(True)
    assert torch.autograd.gradcheck(
        lambda p: normal_loss(p, camera, weights=weights), plane, eps=1e-7, atol=1e-6
    )


def test_strips_of_the_normal_term_add_up():
    camera = view()
    rng = torch.Generator().manual_seed(1)
    shape = (camera.height, camera.width, 4)
    plane = planes_of(camera) + 0.05 * torch.randn(shape, generator=rng, dtype=torch.float64)
    whole, total = float(normal_loss(plane, camera)), 0.0
    for top, end in ((0, 7), (7, 8), (8, 30)):
        low, high = max(0, top - 1), min(camera.height, end + 1)
        rows = slice(top - low, end - low)
        total += float(normal_loss(plane[low:high], camera, rows, low))
    assert total == pytest.approx(whole, rel=1e-9)


def test_pixels_without_a_depth_cost_nothing():
    camera = view()
    plane = planes_of(camera).requires_grad_(True)
    empty = normal_loss(plane * 0, camera)
    empty.backward()
    assert float(empty.detach()) == 0
    assert torch.isfinite(plane.grad).all()


@pytest.mark.parametrize("lanes", [8, 1])
def test_the_fused_normal_term_is_its_float64_twin_whole_and_in_strips(monkeypatch, lanes):
    monkeypatch.setattr(plane_kernels, "lanes_of", lambda device: lanes)
    camera = view(width=43)
    rng = torch.Generator().manual_seed(1)
    shape = (camera.height, camera.width, 4)
    plane = planes_of(camera) + 0.05 * torch.randn(shape, generator=rng, dtype=torch.float64)
    plane[10:12, 7:9] = 0.0
    weights = torch.rand(shape[:2], generator=rng, dtype=torch.float64)
    weights[20] = 0.0
    exact = plane.clone().requires_grad_(True)
    expected = normal_loss(exact, camera, weights=weights)
    expected.backward()
    # Columns of wider pixels, as the rasterizer gives them.
    pixels = torch.cat([torch.ones(*shape[:2], 3), plane.float()], dim=-1)
    rays = pixel_rays(camera, dtype=torch.float64, device="cpu")
    depth, known = plane_depth(plane, rays)
    found = depth_of_planes(pixels[9:25, :, 3:], camera, 9)
    expected_depth = torch.where(known, depth, 0.0)[9:25].float()
    torch.testing.assert_close(found, expected_depth, rtol=1e-5, atol=1e-6)
    for edges in ((0, 30), (0, 7, 8, 30)):
        total, gradient = 0.0, torch.zeros(shape)
        for top, end in itertools.pairwise(edges):
            low, high = max(0, top - 1), min(camera.height, end + 1)
            strip = pixels[low:high, :, 3:].detach().requires_grad_(True)
            rows, n_pixels = slice(top - low, end - low), torch.tensor(weights.numel())
            loss = NormalErrors.apply(strip, camera, low, weights.float(), rows, n_pixels)
            (2 * loss).backward()
            gradient[low:high] += strip.grad / 2
            total += float(loss.detach())
        assert total == pytest.approx(float(expected), rel=1e-5)
        scale = float(exact.grad.abs().max())
        assert float((gradient - exact.grad).abs().max()) < 1e-4 * scale


def test_flatness_is_the_mean_of_the_smallest_scales():
    scales = torch.tensor([[0.3, 0.1, 0.2], [0.5, 0.6, 0.4], [9.0, 9.0, 9.0]])
    scales.requires_grad_(True)
    loss = flatness_loss(scales, 2.0, torch.tensor([True, True, False]))
    loss.backward()
    assert float(loss) == pytest.approx(0.125)
    assert (scales.grad > 0).tolist() == [
        [False, True, False],
        [False, False, True],
        [False, False, False],
    ]
    assert float(flatness_loss(scales[:0], 2.0, torch.ones(0, dtype=torch.bool))) == 0


def test_images_without_an_inner_pixel_have_no_plane_term():
    camera = look_at((3.0, 0.0, 0.0), width=5, height=2, focal=5.0)
    assert not edge_weights(torch.rand(2, 5)).any()
    plane = torch.rand(2, 5, 4, requires_grad=True)
    loss = NormalErrors.apply(plane, camera, 0, torch.ones(2, 5), slice(0, 2), 10)
    loss.backward()
    assert float(loss.detach()) == 0
    assert not plane.grad.any()
