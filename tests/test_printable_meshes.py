# SPDX-License-Identifier: Apache-2.0
"""Meshes for printers are closed and have a thickness everywhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import trimesh
from scipy.spatial.transform import Rotation

from sugar_scene import triangle_mesh
from sugar_scene.mesh_files.printable_meshes import BASE_THICKNESS, closed_body, write_printable
from sugar_scene.triangle_mesh import TriangleMesh


def cap(height: float, degrees: float) -> TriangleMesh:
    """The part of a ball of 20 mm radius above a height, then turned about the x axis."""
    ball = trimesh.creation.icosphere(subdivisions=3, radius=20.0)
    is_above = ball.vertices[:, 2] > height
    faces = np.asarray(ball.faces[is_above[ball.faces].all(axis=1)])
    vertices = Rotation.from_euler("x", degrees, degrees=True).apply(ball.vertices)
    colors = np.full((len(vertices), 3), 100, np.uint8)
    return triangle_mesh.without_unused_vertices(TriangleMesh(vertices, faces, colors))


def solid(mesh: TriangleMesh) -> trimesh.Trimesh:
    body = closed_body(mesh)
    return trimesh.Trimesh(body.vertices, body.faces, process=False)


def growth(mesh: TriangleMesh) -> np.ndarray:
    """Return how much larger the closed body is. (3,) mm"""
    return solid(mesh).extents - np.ptp(mesh.vertices, axis=0)


@pytest.mark.parametrize("degrees", [0, 20])
def test_what_is_open_below_stands_on_a_flat_base(degrees):
    mesh = cap(8.0, degrees)
    body = solid(mesh)
    assert body.is_watertight
    assert body.volume > 0
    np.testing.assert_allclose(growth(mesh), [0, 0, BASE_THICKNESS], atol=1e-9)
    heights = body.vertices[:, 2]
    is_foot = heights < mesh.vertices[:, 2].min() - 1
    assert is_foot.sum() > 20
    np.testing.assert_allclose(heights[is_foot], heights.min())


def test_a_sheet_of_ground_has_a_thickness():
    x, y = np.meshgrid(np.linspace(0, 50, 20), np.linspace(0, 30, 20))
    points = np.stack([x, y, np.zeros_like(x)], axis=-1).reshape(-1, 3)
    at = np.arange(400).reshape(20, 20)
    quads = np.stack([at[:-1, :-1], at[:-1, 1:], at[1:, 1:], at[1:, :-1]], axis=-1).reshape(-1, 4)
    faces = np.concatenate([quads[:, [0, 1, 2]], quads[:, [0, 2, 3]]])
    body = solid(TriangleMesh(points, faces, np.zeros((400, 3), np.uint8)))
    assert body.is_watertight
    assert body.volume == pytest.approx(50 * 30 * BASE_THICKNESS)


def test_what_is_open_behind_gets_its_base_there():
    mesh = cap(8.0, 90)
    assert solid(mesh).is_watertight
    np.testing.assert_allclose(growth(mesh), [0, BASE_THICKNESS, 0], atol=0.1)


@pytest.mark.parametrize("degrees", [160, 180])
def test_what_is_open_above_gets_a_lid_alone(degrees):
    mesh = cap(8.0, degrees)
    assert solid(mesh).is_watertight
    np.testing.assert_allclose(growth(mesh), 0, atol=1e-9)


def test_a_small_hole_below_is_covered_without_a_base():
    mesh = cap(-19.5, 0)
    assert solid(mesh).is_watertight
    np.testing.assert_allclose(growth(mesh), 0, atol=1e-9)


def damaged_ball() -> TriangleMesh:
    """A ball with faces inside out, a hole, flaps at a vertex and at an edge, and a loose piece."""
    ball = trimesh.creation.icosphere(subdivisions=3, radius=20.0)
    faces = np.asarray(ball.faces).copy()
    faces[100:112] = faces[100:112, ::-1]
    faces = np.delete(faces, [300, 301, 302], axis=0)
    n = len(ball.vertices)
    more = np.array([[0, 0, 40], [3, 0, 40], [0, 3, 40], [30, 30, 0], [33, 30, 0], [30, 33, 0]])
    tip = int(ball.vertices[:, 2].argmax())
    flaps = [[tip, n, n + 1], [tip, n + 1, n + 2], [faces[0, 0], faces[0, 1], n + 2]]
    loose = [[n + 3, n + 4, n + 5]]
    vertices = np.concatenate([ball.vertices, more])
    faces = np.concatenate([faces, flaps, loose])
    return TriangleMesh(vertices, faces, np.zeros((len(vertices), 3), np.uint8))


@pytest.mark.parametrize("inwards", [False, True])
def test_a_body_is_one_part_whose_faces_look_outwards(inwards):
    mesh = damaged_ball()
    if inwards:
        mesh = replace(mesh, faces=mesh.faces[:, ::-1].copy())
    body = solid(mesh)
    assert body.is_watertight
    assert body.is_winding_consistent
    assert len(body.split(only_watertight=False)) == 1
    ball = trimesh.creation.icosphere(subdivisions=3, radius=20.0)
    assert body.volume == pytest.approx(ball.volume, rel=0.01)
    np.testing.assert_allclose(body.extents, 40, atol=1e-6)


@pytest.mark.parametrize("kind", ["stl", "3mf"])
def test_the_written_file_is_what_is_returned(tmp_path, kind):
    if kind == "3mf":
        pytest.importorskip("lxml")
    path = tmp_path / f"a.{kind}"
    written = write_printable(path, closed_body(damaged_ball()), kind)
    again = trimesh.load_mesh(path)
    assert len(again.faces) == written.n_faces
    assert again.is_watertight
    assert triangle_mesh.open_edge_share(written) == 0
    assert triangle_mesh.signed_volume(written) == pytest.approx(again.volume)
