# SPDX-License-Identifier: Apache-2.0
"""Meshes with as few triangles as an error in pixels allows."""

from __future__ import annotations

import numpy as np
import pytest

from gaussian_splatting.data.cameras import nearest_pixel_sizes
from sugar_extractors.mesh.mesh_finishing import decimated_to_error
from sugar_extractors.mesh.meshing_backends import PycolmapBackend
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


def decimated(mesh: TriangleMesh, pixels: float, n_faces: int = 10**9) -> TriangleMesh:
    decimate = PycolmapBackend().decimate
    return decimated_to_error(mesh, pixels, cameras_around(8), n_faces, decimate)


def test_a_pixel_is_measured_in_the_nearest_camera():
    cameras = cameras_around(8)
    point = cameras[3].center + 0.5 * (np.zeros(3) - cameras[3].center)
    distances = [np.linalg.norm(point - camera.center) for camera in cameras]
    expected = min(d / camera.fx for d, camera in zip(distances, cameras, strict=True))
    assert nearest_pixel_sizes(point[None], cameras)[0] == pytest.approx(expected)


@pytest.mark.parametrize("pixels", [0.2, 1.0])
def test_vertices_stay_within_the_error(pixels):
    mesh = sphere(rings=60)
    small = decimated(mesh, pixels)
    distances = Surface(small.vertices, small.faces).nearest(mesh.vertices).distances
    within = distances <= pixels * nearest_pixel_sizes(mesh.vertices, cameras_around(8))
    assert within.mean() >= 0.95
    assert small.n_faces < mesh.n_faces / 2


@pytest.mark.slow
def test_a_larger_error_leaves_fewer_triangles():
    counts = [decimated(sphere(rings=60), pixels).n_faces for pixels in (0.1, 0.5, 2.0)]
    assert counts[0] > counts[1] > counts[2]


def test_flat_parts_get_few_triangles_and_the_border_stays():
    small = decimated(wall(), 0.3)
    middles = small.vertices[small.faces].mean(axis=1)
    on_ball = np.hypot(*middles[:, :2].T) < 0.45
    assert on_ball.sum() > 2 * (~on_ball).sum()
    assert np.abs(small.vertices[:, :2]).max(axis=0) == pytest.approx([1, 1], abs=0.02)
    assert topology(small).holes == 1


def test_the_number_of_triangles_is_a_limit():
    assert decimated(sphere(rings=60), 1e-6, n_faces=500).n_faces <= 500
