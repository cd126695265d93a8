# SPDX-License-Identifier: Apache-2.0
"""First-hit triangle rasterization against a brute-force twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gaussian_splatting.data.cameras import Camera
from sugar_scene import triangle_rasterizer
from sugar_scene.triangle_rasterizer import (
    rasterize_camera_triangles,
    rasterize_triangles,
    to_camera,
)


def camera(width=70, height=51, fx=60.0, fy=65.0, cx=31.0, cy=28.0) -> Camera:
    angle = 0.3
    rotation = np.array(
        [[np.cos(angle), 0, np.sin(angle)], [0, 1, 0], [-np.sin(angle), 0, np.cos(angle)]]
    )
    return Camera("c", width, height, fx, fy, cx, cy, rotation, np.array([0.2, -0.1, 0.5]))


def brute_force(vertices: np.ndarray, faces: np.ndarray, cam: Camera, near: float = 0.0):
    """Möller-Trumbore on every (pixel, face) pair in float64, in camera space."""
    ys, xs = np.mgrid[: cam.height, : cam.width]
    rays = np.stack(
        [(xs + 0.5 - cam.cx) / cam.fx, (ys + 0.5 - cam.cy) / cam.fy, np.ones(xs.shape)], axis=-1
    )
    best = np.full(xs.shape, np.inf, np.float32)
    hit = np.full(xs.shape, -1)
    weights = np.zeros((*xs.shape, 3))
    for index, (a, b, c) in enumerate(vertices.astype(np.float64)[faces]):
        e1, e2 = b - a, c - a
        p = np.cross(rays, e2)
        determinant = p @ e1
        with np.errstate(divide="ignore", invalid="ignore"):
            u = -(p @ a) / determinant
            q = np.cross(-a, e1)
            v = rays @ q / determinant
            t = (e2 @ q / determinant).astype(np.float32)
            inside = (u >= 0) & (v >= 0) & (u + v <= 1) & (t > near) & (t < best)
        best[inside], hit[inside] = t[inside], index
        weights[inside] = np.stack([1 - u - v, u, v], axis=-1)[inside]
    return hit, best, weights


def soup(n: int, seed: int = 0, size: float = 0.5, behind: bool = True):
    rng = np.random.default_rng(seed)
    centers = rng.uniform([-3, -3, -1 if behind else 1], [3, 3, 6], (n, 1, 3))
    vertices = (centers + rng.normal(0, size, (n, 3, 3))).reshape(-1, 3).astype(np.float32)
    return torch.from_numpy(vertices), torch.arange(3 * n).reshape(n, 3)


@pytest.mark.parametrize(("size", "n"), [(0.05, 400), (0.5, 120), (3.0, 60)])
def test_hits_equal_brute_force_also_across_the_camera_plane(size, n):
    cam = camera()
    vertices, faces = soup(n, size=size)
    result = rasterize_triangles(vertices, faces, cam)
    hit, depth, weights = brute_force(to_camera(vertices, cam).numpy(), faces.numpy(), cam)
    assert (hit >= 0).mean() > 0.02
    # Rays that graze an edge may fall on either side of it in the two formulas.
    assert (result.face.numpy() != hit).mean() < 1e-3
    same = (result.face.numpy() == hit) & (hit >= 0)
    np.testing.assert_allclose(result.depth.numpy()[same], depth[same], rtol=2e-6)
    np.testing.assert_allclose(result.barycentrics.numpy()[same], weights[same], atol=2e-4)
    assert torch.isinf(result.depth[result.face < 0]).all()
    assert (result.barycentrics[result.face < 0] == 0).all()


def test_barycentrics_and_depth_reproduce_the_point_on_the_ray():
    cam = camera()
    vertices, faces = soup(80, behind=False)
    result = rasterize_triangles(vertices, faces, cam)
    moved = to_camera(vertices, cam)
    y, x = torch.nonzero(result.covered, as_tuple=True)
    corners = moved[faces[result.face[y, x].long()]]
    point = (corners * result.barycentrics[y, x][..., None]).sum(1)
    ray = torch.stack([(x + 0.5 - cam.cx) / cam.fx, (y + 0.5 - cam.cy) / cam.fy, 0 * x + 1], -1)
    torch.testing.assert_close(point, ray * result.depth[y, x][:, None], rtol=1e-4, atol=1e-4)


def test_a_closed_mesh_has_no_pinholes():
    # A fine grid of shared vertices that fills the image: every ray must hit something.
    cam = camera(width=64, height=48, fx=50.0, fy=50.0, cx=32.0, cy=24.0)
    n = 65
    # Edges and vertices pass exactly through pixel centres.
    xs, ys = np.meshgrid((np.arange(n) + 0.5 - 32.5) / 50.0, (np.arange(n) + 0.5 - 32.5) / 50.0)
    z = 2.0 + 0.1 * np.sin(7 * xs) * np.cos(5 * ys)
    vertices = torch.tensor(np.stack([xs * z, ys * z, z], -1).reshape(-1, 3), dtype=torch.float32)
    index = np.arange(n * n).reshape(n, n)
    a, b, c, d = index[:-1, :-1], index[:-1, 1:], index[1:, 1:], index[1:, :-1]
    quads = np.stack([np.stack([a, b, c], -1), np.stack([a, c, d], -1)], 2).reshape(-1, 3)
    assert rasterize_camera_triangles(vertices, torch.from_numpy(quads), cam).covered.all()


def test_ties_go_to_the_lowest_face_and_order_of_work_does_not_matter(monkeypatch):
    cam = camera()
    vertices, faces = soup(100)
    doubled = torch.cat([faces, faces.flip(1)])
    once = rasterize_triangles(vertices, faces, cam)
    twice = rasterize_triangles(vertices, doubled, cam)
    assert torch.equal(once.face, twice.face)
    assert torch.equal(once.depth, twice.depth)
    monkeypatch.setattr(triangle_rasterizer, "MAX_PAIRS", 50)
    monkeypatch.setattr(triangle_rasterizer, "_CPU_CELL", 4)
    chunked = rasterize_triangles(vertices, doubled, cam)
    assert torch.equal(once.face, chunked.face)
    assert torch.equal(once.depth, chunked.depth)


def test_empty_degenerate_and_broken_triangles_hit_nothing():
    cam = camera()
    empty = rasterize_triangles(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.long), cam)
    assert not empty.covered.any()
    faces = torch.as_tensor(np.empty((0, 3), dtype=np.int64))
    assert not rasterize_triangles(torch.zeros(3, 3), faces, cam).covered.any()
    vertices = torch.tensor([[0.0, 0, 3], [1, 0, 3], [2, 0, 3], [torch.nan, 1, 3], [0, 1, 1e38]])
    faces = torch.tensor([[0, 1, 2], [0, 1, 3], [0, 0, 0], [0, 1, 4]])
    assert not rasterize_triangles(vertices, faces[:3], cam).covered.any()


def test_threads_do_not_change_bits():
    cam = camera(width=200, height=120, cx=100.0, cy=60.0)
    vertices, faces = soup(500)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(rasterize_triangles(vertices, faces, cam))
    finally:
        torch.set_num_threads(before)
    for name in ("face", "depth", "barycentrics"):
        assert torch.equal(getattr(results[0], name), getattr(results[1], name))
