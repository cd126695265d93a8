# SPDX-License-Identifier: Apache-2.0
"""Foreground and background meshes are cut at the box and joined without a crack."""

from __future__ import annotations

import numpy as np
import pytest

from sugar_extractors.mesh.seams import cut_at_box, joined_at_box
from sugar_scene.regions import Box
from sugar_scene.triangle_mesh import TriangleMesh, border_edges, doubled_area_normals

BOX = Box((-1.0, -1.1, -0.9), (1.2, 1.0, 1.0))


def wavy_sheet(spacing: float, half: float = 3.0, offset: float = 0.0) -> TriangleMesh:
    """Triangles of a surface z = f(x, y), which faces up, over a square."""
    ticks = np.arange(-half, half + spacing / 2, spacing)
    x, y = np.meshgrid(ticks, ticks, indexing="ij")
    z = 0.3 * np.sin(2 * x) * np.cos(y) + offset
    n = len(ticks)
    a = (np.arange(n - 1)[:, None] * n + np.arange(n - 1)).reshape(-1)
    faces = np.concatenate([np.stack([a, a + n, a + 1], 1), np.stack([a + n, a + n + 1, a + 1], 1)])
    vertices = np.stack([x, y, z], axis=-1).reshape(-1, 3)
    shade = np.rint(255 * (vertices - vertices.min()) / np.ptp(vertices)).astype(np.uint8)
    return TriangleMesh(vertices, faces, shade)


def open_edges(mesh: TriangleMesh) -> np.ndarray:
    """Middles of the sides that belong to one face. (E, 3)"""
    return mesh.vertices[border_edges(mesh)].mean(axis=1)


def area(mesh: TriangleMesh) -> float:
    return float(np.linalg.norm(doubled_area_normals(mesh.vertices, mesh.faces), axis=1).sum() / 2)


def test_cut_parts_make_up_the_whole() -> None:
    mesh = wavy_sheet(0.17)
    inner, outer = (cut_at_box(mesh, BOX, inside=inside) for inside in (True, False))
    assert area(inner) + area(outer) == pytest.approx(area(mesh), rel=1e-12)
    low, high = np.array(BOX.low), np.array(BOX.high)
    assert (inner.vertices >= low).all()
    assert (inner.vertices <= high).all()
    strictly_inside = ((outer.vertices > low) & (outer.vertices < high)).all(axis=1)
    assert not strictly_inside.any()


def test_cutting_keeps_what_the_box_does_not_touch() -> None:
    mesh = wavy_sheet(0.5, offset=5.0)
    assert cut_at_box(mesh, BOX, inside=True).n_faces == 0
    assert area(cut_at_box(mesh, BOX, inside=False)) == pytest.approx(area(mesh), rel=1e-12)


def test_cut_triangles_have_no_cracks_between_them() -> None:
    mesh = wavy_sheet(0.17)
    inner = cut_at_box(mesh, BOX, inside=True)
    low, high = np.array(BOX.low), np.array(BOX.high)
    edges = open_edges(inner)
    on_box = (np.minimum(np.abs(edges - low), np.abs(edges - high)).min(axis=1)) < 1e-9
    assert on_box.all()


@pytest.mark.parametrize("spacing", [0.31, 0.1, 0.83])
@pytest.mark.parametrize("gap", [0.0, 0.02])
def test_borders_at_the_box_are_joined(spacing: float, gap: float) -> None:
    inner = cut_at_box(wavy_sheet(0.07, offset=gap), BOX, inside=True)
    outer = cut_at_box(wavy_sheet(spacing), BOX, inside=False)
    mesh = joined_at_box(inner, outer, BOX)
    outside = np.abs(open_edges(mesh)[:, :2]).max(axis=1) > 2.8
    assert outside.all()  # only the rim of the sheet is open
    # Each edge is used once in each direction, so that all faces show the same side.
    sides = np.stack([mesh.faces, np.roll(mesh.faces, -1, axis=1)], axis=-1).reshape(-1, 2)
    assert len(np.unique(sides, axis=0)) == len(sides)


def test_borders_that_are_far_apart_stay_open() -> None:
    inner = cut_at_box(wavy_sheet(0.07), BOX, inside=True)
    outer = cut_at_box(wavy_sheet(0.1, offset=0.6), BOX, inside=False)
    mesh = joined_at_box(inner, outer, BOX)
    assert mesh.n_faces == inner.n_faces + outer.n_faces


def test_an_empty_part_is_left_alone() -> None:
    inner = cut_at_box(wavy_sheet(0.2), BOX, inside=True)
    empty = TriangleMesh(np.zeros((0, 3)), np.zeros((0, 3), np.int64), np.zeros((0, 3), np.uint8))
    assert joined_at_box(inner, empty, BOX).n_faces == inner.n_faces
    assert cut_at_box(empty, BOX, inside=True).n_faces == 0
