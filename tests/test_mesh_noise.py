# SPDX-License-Identifier: Apache-2.0
"""Noise of a mesh that photographs do not tell from its shape."""

from dataclasses import replace

import numpy as np
import pytest

from sugar_extractors.mesh.decimation import decimated
from sugar_extractors.mesh.refinement.noise import error_weights, without_noise
from sugar_extractors.mesh.refinement.thin_plate import ThinPlate, free_vertices, neighbor_mean
from sugar_scene.triangle_mesh import TriangleMesh, border_edges, merge_meshes, vertex_normals

UNCLEAR = 0.01
CLEAR = 10.0


def sheet(heights: np.ndarray, spacing: float = 3.0) -> TriangleMesh:
    """A height field over a square grid; lengths are in pixels."""
    rows, columns = heights.shape
    y, x = np.mgrid[:rows, :columns] * spacing
    vertices = np.stack([x, y, heights], axis=-1).reshape(-1, 3)
    numbers = np.arange(rows * columns).reshape(rows, columns)
    a = numbers[:-1, :-1].ravel()
    b = numbers[:-1, 1:].ravel()
    c = numbers[1:, 1:].ravel()
    d = numbers[1:, :-1].ravel()
    faces = np.concatenate([np.stack([a, b, c], axis=1), np.stack([a, c, d], axis=1)])
    return TriangleMesh(vertices, faces, np.zeros((rows * columns, 3), np.uint8))


def tube(radius: float, n_around: int = 8, length: int = 60) -> TriangleMesh:
    """An open tube along z; lengths are in pixels."""
    angles = np.arange(n_around) * 2 * np.pi / n_around
    ring = np.stack([np.cos(angles), np.sin(angles)], axis=1) * radius
    spacing = 2 * np.pi * radius / n_around
    rings = [np.column_stack([ring, np.full(n_around, z * spacing)]) for z in range(length)]
    faces = []
    for z in range(length - 1):
        for k in range(n_around):
            a = z * n_around + k
            b = z * n_around + (k + 1) % n_around
            faces += [(a, b, b + n_around), (a, b + n_around, a + n_around)]
    vertices = np.concatenate(rings)
    return TriangleMesh(vertices, np.array(faces), np.zeros((len(vertices), 3), np.uint8))


def noise(shape: tuple[int, ...], deviation: float) -> np.ndarray:
    return deviation * np.random.default_rng(0).standard_normal(shape)


def smoothed(mesh: TriangleMesh, certainty: float | np.ndarray) -> TriangleMesh:
    n = mesh.n_vertices
    return without_noise(mesh, np.broadcast_to(certainty, n) * np.ones(n), np.ones(n))


def inner(heights: np.ndarray) -> np.ndarray:
    return heights[8:-8, 8:-8]


def test_offsets_have_the_least_energy():
    mesh = sheet(noise((6, 7), 1.0))
    n = mesh.n_vertices
    random = np.random.default_rng(1)
    mean = neighbor_mean(mesh)
    is_free = free_vertices(mesh)
    plate = ThinPlate(mean, random.random(n), random.random(n) + 0.1, is_free)
    slope = random.standard_normal(n)
    offsets = plate.minimum(slope, 200)
    dense = mean.toarray()
    matrix = dense.T @ np.diag(plate.plate) @ dense + np.diag(plate.own)
    free = is_free > 0
    expected = np.zeros(n)
    expected[free] = np.linalg.solve(matrix[np.ix_(free, free)], -slope[free])
    assert offsets == pytest.approx(expected, abs=3e-3 * np.abs(expected).max())


def test_noise_that_photographs_do_not_see_goes():
    heights = noise((60, 60), 0.4)
    after = smoothed(sheet(heights), UNCLEAR).vertices[:, 2].reshape(60, 60)
    assert inner(after).std() < 0.2 * inner(heights).std()


def test_what_photographs_see_stays():
    heights = noise((60, 60), 0.4)
    mesh = sheet(heights)
    after = smoothed(mesh, CLEAR)
    along_normal = ((after.vertices - mesh.vertices) * vertex_normals(after)).sum(axis=1)
    assert np.abs(along_normal).max() < 0.11


def test_a_step_of_two_pixels_that_photographs_see_stays_sharp():
    heights = np.zeros((40, 40))
    heights[:, 20:] = 2.0
    after = smoothed(sheet(heights), CLEAR).vertices[:, 2].reshape(40, 40)
    assert inner(np.abs(after - heights)).max() < 0.1


def test_a_wire_keeps_its_radius():
    after = smoothed(tube(radius=2.0), UNCLEAR).vertices
    is_inner = (after[:, 2] > 20) & (after[:, 2] < 70)
    radii = np.linalg.norm(after[is_inner, :2], axis=1)
    assert radii.min() > 1.8


def test_a_gentle_bend_keeps_its_shape():
    x = np.arange(80) * 3.0
    heights = np.broadcast_to(400 - np.sqrt(400**2 - (x - x.mean()) ** 2), (80, 80))
    after = smoothed(sheet(heights), UNCLEAR).vertices[:, 2].reshape(80, 80)
    assert inner(np.abs(after - heights)).max() < 0.5


def test_borders_and_topology_stay():
    mesh = sheet(noise((30, 30), 0.4))
    after = smoothed(mesh, UNCLEAR)
    border = np.unique(border_edges(mesh))
    assert (after.faces == mesh.faces).all()
    assert (after.vertices[border] == mesh.vertices[border]).all()


def test_decimation_keeps_triangles_on_what_photographs_see():
    """A ground whose noise nobody sees, and a wavy object of a fifth of its area that all see."""
    ground = sheet(noise((100, 100), 0.5))
    y, x = np.mgrid[:45, :45]
    object_ = sheet(2 * np.sin(x / 3) * np.cos(y / 3))
    object_ = replace(object_, vertices=object_.vertices + [0, 0, 100])
    mesh = merge_meshes([ground, object_])
    certainty = np.where(np.arange(mesh.n_vertices) < ground.n_vertices, UNCLEAR, CLEAR)
    shares = []
    weights = error_weights(mesh, certainty)
    for candidate, of_candidate in ((mesh, None), (smoothed(mesh, certainty), weights)):
        small = decimated(candidate, 1500, of_candidate)
        centers = small.vertices[small.faces].mean(axis=1)
        shares.append((centers[:, 2] > 50).mean())
    assert shares[1] > 5 * shares[0]
