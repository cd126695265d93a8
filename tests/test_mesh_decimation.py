# SPDX-License-Identifier: Apache-2.0
"""Meshes with few triangles: so many, or as few as an error in pixels allows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gaussian_splatting.data.cameras import nearest_pixel_sizes
from sugar_extractors.mesh.decimation import decimated
from sugar_extractors.mesh.mesh_finishing import decimated_to_error
from sugar_scene.surface_queries import Surface
from sugar_scene.triangle_mesh import TriangleMesh, topology
from tests.support.mesh_scenes import cameras_around, sphere


def wall(n: int = 60) -> TriangleMesh:
    """A square of side 2, flat but for a hemisphere of radius 0.4 in its middle."""
    side = np.linspace(-1, 1, n)
    x, y = np.meshgrid(side, side, indexing="ij")
    z = np.sqrt(np.maximum(0, 0.4**2 - x**2 - y**2))
    row = np.arange(n * n).reshape(n, n)
    a, b, c, d = (part.ravel() for part in (row[:-1, :-1], row[1:, :-1], row[1:, 1:], row[:-1, 1:]))
    faces = np.concatenate([np.stack([a, b, c], axis=1), np.stack([a, c, d], axis=1)])
    vertices = np.stack([x, y, z], axis=-1).reshape(-1, 3)
    return TriangleMesh(vertices, faces, np.full(vertices.shape, 128, np.uint8))


def to_error(mesh: TriangleMesh, pixels: float, n_faces: int = 10**9) -> TriangleMesh:
    return decimated_to_error(mesh, pixels, cameras_around(8), n_faces)


def test_a_pixel_is_measured_in_the_nearest_camera():
    cameras = cameras_around(8)
    point = cameras[3].center + 0.5 * (np.zeros(3) - cameras[3].center)
    distances = [np.linalg.norm(point - camera.center) for camera in cameras]
    expected = min(d / camera.fx for d, camera in zip(distances, cameras, strict=True))
    assert nearest_pixel_sizes(point[None], cameras)[0] == pytest.approx(expected)


@pytest.mark.parametrize("pixels", [0.2, 1.0])
def test_vertices_stay_within_the_error(pixels):
    mesh = sphere(rings=60)
    small = to_error(mesh, pixels)
    distances = Surface(small.vertices, small.faces).nearest(mesh.vertices).distances
    within = distances <= pixels * nearest_pixel_sizes(mesh.vertices, cameras_around(8))
    assert within.mean() >= 0.95
    assert small.n_faces < mesh.n_faces / 2


@pytest.mark.slow
def test_a_larger_error_leaves_fewer_triangles():
    counts = [to_error(sphere(rings=30), pixels).n_faces for pixels in (0.1, 0.5, 2.0)]
    assert counts[0] > counts[1] > counts[2]


def test_flat_parts_get_few_triangles_and_the_border_stays():
    small = to_error(wall(), 0.3)
    middles = small.vertices[small.faces].mean(axis=1)
    on_ball = np.hypot(*middles[:, :2].T) < 0.45
    assert on_ball.sum() > 2 * (~on_ball).sum()
    assert np.abs(small.vertices[:, :2]).max(axis=0) == pytest.approx([1, 1], abs=0.02)
    assert topology(small).holes == 1


def test_the_number_of_triangles_is_a_limit():
    assert to_error(sphere(rings=60), 1e-6, n_faces=500).n_faces <= 500


def volume(mesh: TriangleMesh) -> float:
    a, b, c = mesh.vertices[mesh.faces].transpose(1, 0, 2)
    return float((a * np.cross(b, c)).sum() / 6)


def test_a_closed_surface_stays_closed_and_keeps_its_volume():
    ball = sphere(rings=60)
    small = decimated(ball, 600)
    assert 590 <= small.n_faces <= 600
    found = topology(small)
    assert (found.components, found.open_edge_share) == (1, 0)
    assert volume(small) == pytest.approx(volume(ball), rel=0.01)
    a, b, c = small.vertices[small.faces].transpose(1, 0, 2)
    assert ((np.cross(b - a, c - a) * (a + b + c)).sum(axis=1) > 0).all()


def test_decimation_stops_where_another_collapse_would_change_what_the_surface_is():
    small = decimated(sphere(rings=12), 1)
    assert 4 <= small.n_faces < 20
    assert topology(small).open_edge_share == 0


def test_flat_surfaces_with_a_border_keep_their_outline():
    n = 30
    x, y = np.mgrid[:n, :n] / (n - 1.0)
    flat = wall(n)
    flat = TriangleMesh(
        np.stack([x.ravel(), y.ravel(), np.zeros(n * n)], axis=1), flat.faces, flat.colors
    )
    small = decimated(flat, 20)
    assert small.n_faces <= 20
    assert np.abs(small.vertices[:, 2]).max() < 1e-12
    a, b, c = small.vertices[small.faces].transpose(1, 0, 2)
    areas = np.cross(b - a, c - a)[:, 2] / 2
    assert (areas > 0).all()
    assert areas.sum() == pytest.approx(1, rel=1e-3)


def test_fixed_vertices_stay_bit_for_bit():
    mesh = wall(30)
    rng = np.random.default_rng(0)
    fixed = rng.uniform(size=mesh.n_vertices) < 0.1
    small = decimated(mesh, 300, fixed=fixed)
    assert small.n_faces <= 300
    kept = set(map(tuple, small.vertices))
    assert all(tuple(vertex) in kept for vertex in mesh.vertices[fixed])


def test_triangles_remain_where_distances_count():
    ball = sphere(rings=60)
    weights = np.where(ball.vertices[:, 2] > 0, 100.0, 1.0)
    share = []
    for small in (decimated(ball, 600), decimated(ball, 600, weights)):
        share.append((small.vertices[small.faces].mean(axis=1)[:, 2] > 0).mean())
    assert share[0] == pytest.approx(0.5, abs=0.05)
    assert share[1] > 0.75


def test_the_number_of_threads_does_not_change_a_bit():
    ball = sphere(rings=40)
    meshes = []
    for n_threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(n_threads)
        try:
            meshes.append(decimated(ball, 500))
        finally:
            torch.set_num_threads(before)
    assert np.array_equal(meshes[0].vertices, meshes[1].vertices)
    assert np.array_equal(meshes[0].faces, meshes[1].faces)


def test_colours_are_means_of_what_is_joined():
    ball = sphere(rings=40)
    colors = (255 * (ball.vertices * 0.5 + 0.5).clip(0, 1)).astype(np.uint8)
    small = decimated(TriangleMesh(ball.vertices, ball.faces, colors), 800)
    assert np.abs(small.colors / 255 - (small.vertices / 2 + 0.5)).mean() < 0.05


def test_a_mesh_that_is_small_enough_is_left_alone():
    mesh = TriangleMesh(np.eye(3), np.array([[0, 1, 2]]), np.zeros((3, 3), np.uint8))
    assert decimated(mesh, 10) is mesh
