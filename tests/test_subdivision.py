# SPDX-License-Identifier: Apache-2.0
"""Triangles that cover many pixels are split, and the surface stays as it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sugar_extractors.mesh.subdivision import covered_pixels, split_to_pixels, with_split_faces
from sugar_scene.triangle_mesh import TriangleMesh, doubled_area_normals, open_edge_share
from tests.support.mesh_scenes import cameras_around, icosahedron

CPU = torch.device("cpu")


def volume(mesh: TriangleMesh) -> float:
    corners = mesh.vertices[mesh.faces]
    return float(np.linalg.det(corners).sum() / 6)


def area(mesh: TriangleMesh) -> float:
    return float(np.linalg.norm(doubled_area_normals(mesh.vertices, mesh.faces), axis=1).sum() / 2)


@pytest.mark.parametrize("marked", [[3], [0, 1], [0, 7, 12], list(range(20))])
def test_splitting_opens_no_gap_and_moves_nothing(marked):
    mesh = icosahedron()
    split = with_split_faces(mesh, np.array(marked))
    assert split.n_faces >= mesh.n_faces + 3 * len(marked)
    assert open_edge_share(split) == 0
    assert volume(split) == pytest.approx(volume(mesh))
    assert area(split) == pytest.approx(area(mesh))
    if len(marked) == 20:
        assert split.n_faces == 80


def test_midpoints_have_the_mean_colour_of_their_edge():
    triangle = TriangleMesh(np.eye(3), np.array([[0, 1, 2]]), np.diag([200, 100, 50]).astype("u1"))
    split = with_split_faces(triangle, np.array([0]))
    assert split.vertices[3:].tolist() == [[0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]]
    assert split.colors[3:].tolist() == [[100, 50, 0], [100, 0, 25], [0, 50, 25]]


def test_the_largest_are_split_until_they_are_small_or_many():
    mesh, cameras = icosahedron(), cameras_around()
    covered = covered_pixels(mesh, cameras, CPU)
    fine = split_to_pixels(mesh, cameras, 6.0, 100_000, CPU)
    assert (covered_pixels(fine, cameras, CPU) > 6).mean() < 0.01 < (covered > 6).mean()
    for n_faces in (20, 26, 100, 500):
        some = split_to_pixels(mesh, cameras, 6.0, n_faces, CPU)
        assert some.n_faces <= n_faces
        assert covered_pixels(some, cameras, CPU).max() <= covered.max()
    assert split_to_pixels(mesh, cameras, float(covered.max()), 100_000, CPU) is mesh
