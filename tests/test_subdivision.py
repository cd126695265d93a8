# SPDX-License-Identifier: Apache-2.0
"""Triangles that cover many pixels are split, and the surface stays as it is."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from sugar_scene.subdivision import covered_pixels, split_to_pixels, with_split_faces
from sugar_scene.triangle_mesh import (
    TriangleMesh,
    doubled_area_normals,
    merge_meshes,
    open_edge_share,
)
from tests.support.mesh_scenes import cameras_around, icosahedron, sphere
from tests.support.random_scenes import look_at

CPU = torch.device("cpu")


def volume(mesh: TriangleMesh) -> float:
    corners = mesh.vertices[mesh.faces]
    return float(np.linalg.det(corners).sum() / 6)


def area(mesh: TriangleMesh) -> float:
    return float(np.linalg.norm(doubled_area_normals(mesh.vertices, mesh.faces), axis=1).sum() / 2)


@pytest.mark.parametrize("marked", [[3], [0, 1], [0, 7, 12], list(range(20))])
def test_splitting_opens_no_gap_and_moves_nothing(marked):
    mesh = icosahedron()
    split, shares, parents = with_split_faces(mesh, np.array(marked))
    areas, before = (
        np.linalg.norm(doubled_area_normals(m.vertices, m.faces), axis=1) for m in (split, mesh)
    )
    np.testing.assert_allclose(areas, shares * before[parents])
    assert split.n_faces >= mesh.n_faces + 3 * len(marked)
    assert open_edge_share(split) == 0
    assert volume(split) == pytest.approx(volume(mesh))
    assert area(split) == pytest.approx(area(mesh))
    if len(marked) == 20:
        assert split.n_faces == 80


def test_midpoints_have_the_mean_colour_of_their_edge():
    triangle = TriangleMesh(np.eye(3), np.array([[0, 1, 2]]), np.diag([200, 100, 50]).astype("u1"))
    split, _, _ = with_split_faces(triangle, np.array([0]))
    assert split.vertices[3:].tolist() == [[0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]]
    assert split.colors[3:].tolist() == [[100, 50, 0], [100, 0, 25], [0, 50, 25]]


def test_the_largest_are_split_until_they_are_small_or_many():
    mesh, covered_by = icosahedron(), partial(covered_pixels, cameras=cameras_around(), device=CPU)
    covered = covered_by(mesh)
    fine = split_to_pixels(mesh, covered, 6.0, 100_000)
    assert (covered_by(fine) > 6).mean() < 0.01 < (covered > 6).mean()
    for n_faces in (20, 26, 100, 500):
        some = split_to_pixels(mesh, covered, 6.0, n_faces)
        assert some.n_faces <= n_faces
        assert covered_by(some).max() <= covered.max()
    assert split_to_pixels(mesh, covered, float(covered.max()), 100_000) is mesh


def test_pixels_are_covered_by_what_nothing_hides():
    outer, inner = sphere(1.0), sphere(0.5)
    mesh = merge_meshes([outer, inner])
    eyes = [sign * axis + 0.1 for axis in 4 * np.eye(3) for sign in (1, -1)]
    around = [look_at(eye, width=160, height=120, focal=130.0) for eye in eyes]
    covered, middles = covered_pixels(mesh, around, CPU), mesh.vertices[mesh.faces].mean(axis=1)
    n = outer.n_faces
    assert (covered[:n] > 0).mean() > 0.9
    assert not covered[n:].any()
    seen = np.isin(np.arange(mesh.n_vertices), mesh.faces[covered > 0])
    assert seen[: outer.n_vertices].mean() > 0.99
    assert not seen[outer.n_vertices :].any()
    # One view sees the half of the sphere that faces it.
    one = covered_pixels(mesh, around[:1], CPU)
    assert not one[middles[:, 0] < 0].any()
    assert (one[:n][middles[:n, 0] > 0.7] > 0).mean() > 0.9
    assert not covered_pixels(mesh, [], CPU).any()


def test_large_photographs_are_counted_in_smaller_views():
    mesh, (camera,) = icosahedron(), cameras_around()[:1]
    small, large = camera.resized(1280, 960), camera.resized(5120, 3840)
    counted = covered_pixels(mesh, [small], CPU)
    np.testing.assert_allclose(covered_pixels(mesh, [large], CPU), 16 * counted)
