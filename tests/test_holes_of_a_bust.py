# SPDX-License-Identifier: Apache-2.0
"""Holes on top of a bust that few photographs show, with rough masks, are closed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.masks import VisualHull
from sugar_extractors.mesh.holes.hole_filling import FilledMesh, HoleCounts, fill_holes
from sugar_extractors.mesh.holes.loose_pieces import without_loose_pieces
from sugar_scene.depth_view import DepthView, Renderer
from sugar_scene.regions import Region
from sugar_scene.triangle_mesh import (
    TriangleMesh,
    border_loops,
    keep_vertices,
    merge_meshes,
    topology,
    with_corners_in,
)
from tests.support.bust import N_EYE_LEVEL, bust, rough_mask, visitors_cameras, without_top
from tests.support.mesh_evidence import (
    BOX,
    depth_renderer,
    evidence_of,
    hull_of_masks,
    pierced,
    silhouettes,
)
from tests.support.mesh_scenes import mesh_of, sphere

PLACES = [(0, 0, 1), (0.45, 0, 1), (-0.3, 0.4, 1), (-0.2, -0.5, 1), (0.6, 0.7, 0.8)]
"""Directions in which the mesh lacks a place, each of a tenth of its height."""
HOLE_ANGLE = 7.0
CAMERAS = visitors_cameras()


def hull_of_rough_masks(low: float, high: float, cut=(7,)) -> VisualHull:
    """The hull of masks with outlines between pixels outside; some lack the top of the head."""
    masks = []
    for number, silhouette in enumerate(silhouettes(bust(), CAMERAS)):
        mask = rough_mask(silhouette, number, low, high)
        masks.append(without_top(mask) if number in cut else mask)
    return hull_of_masks(masks, CAMERAS)


def torn_bust(hull: VisualHull, places=PLACES) -> TriangleMesh:
    """The bust without what masks cut off, and without places."""
    mesh = bust()
    mesh = with_corners_in(mesh, hull.contains(torch.tensor(mesh.vertices)).numpy())
    for place in places:
        mesh = pierced(mesh, place, HOLE_ANGLE)
    return mesh


def filled(torn: TriangleMesh, hull: VisualHull, render: Renderer) -> FilledMesh:
    judge = evidence_of(CAMERAS, render, torn, hull).judge
    return fill_holes(torn, judge, is_object=True, region=Region(BOX))


def deeper(render: Renderer, numbers, by: float) -> Renderer:
    """A renderer whose depth is wrong in some views."""
    names = {CAMERAS[number].name for number in numbers}

    def wrong(camera: Camera) -> DepthView:
        view = render(camera)
        if camera.name not in names:
            return view
        return replace(view, depth=torch.where(view.depth > 0, view.depth + by, 0.0))

    return wrong


def cap(axis, degrees: float) -> TriangleMesh:
    """The part of the bust within an angle around an axis."""
    mesh = bust()
    directions = mesh.vertices / np.linalg.norm(mesh.vertices, axis=1, keepdims=True)
    cosines = directions @ (np.array(axis) / np.linalg.norm(axis))
    return keep_vertices(mesh, cosines > np.cos(np.radians(degrees)))


def holes_on_top(mesh: TriangleMesh) -> int:
    """Number of holes of the upper half."""
    return sum(mesh.vertices[loop][:, 2].mean() > 0 for loop in border_loops(mesh))


@pytest.mark.parametrize("lacks_top", [False, True])
def test_rough_masks_and_one_wrong_one_close_the_top(lacks_top):
    """The model has the top, or lacks the places that the mesh lacks."""
    hull = hull_of_rough_masks(-4, 4)
    torn = torn_bust(hull)
    assert holes_on_top(torn) == len(PLACES)
    mesh, counts = filled(torn, hull, depth_renderer(torn if lacks_top else bust()))
    assert counts == HoleCounts(filled=len(PLACES))
    assert topology(mesh).holes == 0
    assert abs(mesh.vertices[mesh.filled][:, 2].max() - 1) < 0.01


@pytest.mark.parametrize(("low", "high", "cut"), [(-5, 0, (7,)), (-4, 4, (7, 17, 27))])
def test_masks_that_cut_a_rim_are_wrong_inside_of_it(low, high, cut):
    """A tenth of the masks decides what is outside, but these leave out the mesh beside a hole."""
    hull = hull_of_rough_masks(low, high, cut)
    torn = torn_bust(hull)
    assert torn.n_faces < torn_bust(hull_of_rough_masks(0, 4)).n_faces
    _, counts = filled(torn, hull, depth_renderer(bust()))
    assert counts.contradicted == 0
    assert counts.filled >= len(PLACES)


def test_most_depth_decides():
    hull = hull_of_rough_masks(-3, 3)
    torn = torn_bust(hull)
    for numbers in ((N_EYE_LEVEL,), (3, 25), (1, 9, 17, 25, 33)):
        render = deeper(depth_renderer(bust()), numbers, 0.15)
        assert filled(torn, hull, render).counts == HoleCounts(filled=len(PLACES))


def test_a_dent_that_most_views_show_stays():
    """The mesh has its floor, which faces the views."""
    hull = hull_of_rough_masks(-3, 3)
    torn = torn_bust(hull, PLACES[-1:])
    floor = cap(PLACES[-1], 2 * HOLE_ANGLE)
    dented = merge_meshes([torn, replace(floor, vertices=0.8 * floor.vertices)])
    judge = evidence_of(CAMERAS, depth_renderer(dented), dented, hull).judge
    counts = fill_holes(torn, judge, is_object=True, region=Region(BOX)).counts
    assert counts == HoleCounts(contradicted=1)


@pytest.mark.parametrize("radius", [0.11, 0.13, 0.18])
@pytest.mark.parametrize(("low", "high"), [(0, 0.5), (-3, 3)])
def test_an_opening_that_masks_show_stays(low, high, radius):
    """A tunnel through a flat object, 9 pixels in radius or more, whose ends the masks cut open."""
    ball = sphere(1.0, rings=90)
    flat = replace(ball, vertices=ball.vertices * (0.12, 0.9, 1.0))
    distances = np.linalg.norm(flat.vertices[:, 1:] - (0.0, 0.2), axis=1)
    wall = sphere(1.0, rings=20)
    wall = keep_vertices(wall, np.abs(wall.vertices[:, 2]) < 0.99)
    around = wall.vertices[:, :2] / np.linalg.norm(wall.vertices[:, :2], axis=1, keepdims=True)
    wall_vertices = np.column_stack([0.12 * wall.vertices[:, 2], radius * around + (0.0, 0.2)])
    with_tunnel = merge_meshes(
        [keep_vertices(flat, distances > radius), replace(wall, vertices=wall_vertices)]
    )
    masks = [
        rough_mask(silhouette, number, low, high)
        for number, silhouette in enumerate(silhouettes(with_tunnel, CAMERAS))
    ]
    hull = hull_of_masks(masks, CAMERAS)
    torn = with_corners_in(flat, hull.contains(torch.tensor(flat.vertices)).numpy())
    counts = filled(torn, hull, depth_renderer(with_tunnel)).counts
    assert counts == HoleCounts(contradicted=2)


def test_a_wide_hole_is_closed_unless_views_look_into_it():
    hull = hull_of_rough_masks(-1, 1)
    torn = pierced(bust(), (0, 0, 1), 16)
    assert filled(torn, hull, depth_renderer(bust())).counts == HoleCounts(filled=1)
    assert filled(torn, hull, depth_renderer(torn)).counts == HoleCounts(contradicted=1)


def test_loose_pieces_without_a_size_in_any_photograph_go():
    pixel = 3.2 / CAMERAS[0].fx  # about the size of a pixel at the front of the head
    place = np.array([0.0, 0.0, 1.2])
    flake = mesh_of(place + 12 * pixel * np.eye(3), [[0, 1, 2]])
    speck = sphere(2 * pixel, place + 0.2, rings=2)
    rod = sphere(1.0, rings=2)
    rod = replace(rod, vertices=rod.vertices * (pixel, pixel, 9 * pixel) + place - 0.4)
    two_sided = mesh_of(flake.vertices - 0.2, [[0, 1, 2], [0, 2, 1]])
    large_flake = mesh_of(place + 60 * pixel * np.eye(3), [[0, 1, 2]])
    head = bust()
    mesh = merge_meshes([head, flake, two_sided, speck, rod, large_flake])
    nowhere = np.zeros(mesh.n_vertices, dtype=bool)
    left = without_loose_pieces(mesh, CAMERAS, nowhere)
    assert left.n_faces == head.n_faces + rod.n_faces + large_flake.n_faces
    assert without_loose_pieces(mesh, CAMERAS, ~nowhere).n_faces == mesh.n_faces
    alone = without_loose_pieces(flake, CAMERAS, nowhere[:3])
    assert alone.n_faces == 1
