# SPDX-License-Identifier: Apache-2.0
"""Parts too thin for the voxels: they are found by what views show, and fused of smaller voxels."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from sugar_extractors.mesh.fusion.fused_cubes import FusedCubes
from sugar_extractors.mesh.fusion.fused_distances import BLOCK
from sugar_extractors.mesh.fusion.marching_cubes import SparseField
from sugar_extractors.mesh.fusion.thin_parts import ThinParts, lost_places, thin_vertices
from sugar_extractors.mesh.fusion.tsdf import Fusion, TsdfConfig
from sugar_scene.depth_view import DepthView
from sugar_scene.regions import Box
from sugar_scene.triangle_mesh import TriangleMesh, keep_vertices, topology
from sugar_utils.console import Console
from tests.support.mesh_scenes import cameras_around
from tests.test_depth_fusion import RADIUS, ellipsoid_view

PIXEL = 3.5 / 96  # on the surface
VOXEL = 1.5 * PIXEL
# Beside the middle of the voxels: there even a rod of one pixel would be found.
BOX = Box.cube(np.array([0.45 * VOXEL, 0.45 * VOXEL, 0.0]), 1.2)
LENGTH = 1.4  # of the rod
ROD = (PIXEL, PIXEL, LENGTH / 2)


def ellipsoid(half_axes, n: int = 40) -> TriangleMesh:
    """Triangles of an ellipsoid around the origin."""
    heights = np.pi * np.arange(1, n) / n
    turns = 2 * np.pi * np.arange(2 * n) / (2 * n)
    sine = np.sin(heights)[:, None]
    rings = np.stack(
        [sine * np.cos(turns), sine * np.sin(turns), np.cos(heights)[:, None] + 0 * turns], axis=-1
    )
    vertices = rings.reshape(-1, 3) * half_axes
    row, column = np.indices((n - 2, 2 * n))
    a = row * 2 * n + column
    b = row * 2 * n + (column + 1) % (2 * n)
    faces = np.stack([a, a + 2 * n, b, b, a + 2 * n, b + 2 * n], axis=-1).reshape(-1, 3)
    return TriangleMesh(vertices, faces, np.zeros(vertices.shape, np.uint8))


def fusion_of(render) -> Fusion:
    config = TsdfConfig(tsdf_voxel_size=VOXEL, min_component=10)
    return Fusion(render, cameras_around(24), BOX, config, Console())


def finer_cubes(render) -> ThinParts:
    """Voxels of a pixel in the whole box."""
    views = [partial(render, camera) for camera in cameras_around(24)]
    return ThinParts(BOX, 2 * PIXEL, 4.0, views, torch.device("cpu"), Console())


def test_rows_of_corners_are_those_of_their_blocks():
    table = torch.tensor([[[0], [-1]], [[1], [2]]], dtype=torch.int32)
    n = 3 * BLOCK**3
    field = SparseField(
        (0.0, 0.0, 0.0), 0.5, table, torch.zeros(n), torch.ones(n), torch.ones(n, 3)
    )
    for x, y, z in [(0, 0, 0), (7, 7, 7), (8, 0, 3), (15, 15, 1), (9, 8, 0)]:
        number = int(table[x // BLOCK, y // BLOCK, z // BLOCK])
        row = number * BLOCK**3 + (x % BLOCK * BLOCK + y % BLOCK) * BLOCK + z % BLOCK
        rows = field.rows_of(torch.tensor([[x, y, z]]))
        assert rows.tolist() == [row]
        assert field.positions(rows).tolist() == [[x / 2, y / 2, z / 2]]
    missing = torch.tensor([[0, 8, 0], [-1, 0, 0], [16, 0, 0], [0, 0, 8]])
    assert (field.rows_of(missing) == -1).all()
    points = torch.tensor([[0.3, 0.1, 3.9]])
    assert field.nearest_corners(points).tolist() == [[1, 0, 8]]


@pytest.mark.parametrize(("thickness", "share"), [(0.1, 1.0), (0.4, 1.0), (1.2, 0.0)])
def test_a_part_is_thin_up_to_a_thickness(thickness, share):
    """The limit is 0.6; the disc is thinner than at its middle towards its rim."""
    mesh = ellipsoid((3.0, 3.0, thickness / 2))
    is_central = np.linalg.norm(mesh.vertices[:, :2], axis=1) < 1.0
    assert thin_vertices(mesh, 0.6)[is_central].mean() == share
    assert not thin_vertices(keep_vertices(mesh, np.zeros(mesh.n_vertices, bool)), 0.6).any()


def rod_before_a_wall(camera) -> DepthView:
    """Depth of a rod, and of what is far behind it."""
    view = ellipsoid_view(camera, half_axes=ROD)
    return replace(view, depth=torch.where(view.depth > 0, view.depth, 6.0))


def covered_share(mesh: TriangleMesh) -> float:
    """Share of the rod's length at which a mesh has triangles."""
    middles = mesh.vertices[mesh.faces].mean(axis=1)
    return len(np.unique(np.floor(middles[:, 2] / PIXEL))) * PIXEL / LENGTH


def test_a_rod_of_two_pixels_is_there_if_asked_for():
    fusion = fusion_of(rod_before_a_wall)
    assert covered_share(fusion.surface().mesh) < 0.5
    mesh = fusion.surface(thin_parts=True).mesh
    assert covered_share(mesh) > 0.9
    assert np.linalg.norm(mesh.vertices[:, :2], axis=1).max() < 1.2 * PIXEL


def test_only_depth_of_planes_is_exact_enough():
    assert TsdfConfig(tsdf_depth="plane").adds_thin_parts
    assert not TsdfConfig().adds_thin_parts


def test_a_box_without_depth_has_no_thin_parts():
    config = TsdfConfig(tsdf_voxel_size=VOXEL, tsdf_depth="plane")
    empty = Box.cube(np.array([0.0, 0.0, 50.0]), 0.5)
    fusion = Fusion(rod_before_a_wall, cameras_around(9), empty, config, Console())
    assert fusion.surface(thin_parts=True).mesh.n_faces == 0


def test_nothing_is_lost_of_a_surface_that_is_whole():
    fusion = fusion_of(ellipsoid_view)
    mesh = fusion_of(ellipsoid_view).surface().mesh
    views = [partial(ellipsoid_view, camera) for camera in fusion.cameras]
    cubes = FusedCubes(BOX.low, VOXEL, 4 * VOXEL)
    reached = torch.ones((6, 6, 6), dtype=torch.bool)
    field = cubes.averaged(views, reached, Console())
    assert len(lost_places(mesh, field, views)) == 0
    # The upper part is missing.
    lost = lost_places(keep_vertices(mesh, mesh.vertices[:, 2] < 0.3), field, views)
    assert len(lost) > 200
    assert lost[:, 2].min() > 0.3
    assert np.abs(np.linalg.norm(lost, axis=1) - RADIUS).max() < 1.5 * VOXEL


def test_what_is_thick_stays_as_it_is():
    mesh = fusion_of(ellipsoid_view).surface().mesh
    same = finer_cubes(ellipsoid_view).added_to(mesh, mesh.vertices)
    assert np.array_equal(same.vertices, mesh.vertices)
    assert np.array_equal(same.faces, mesh.faces)


def test_thin_parts_take_the_place_of_their_pieces():
    piece = ellipsoid((PIXEL, PIXEL, 0.2))
    lost = np.linspace([0, 0, 0.25], [0, 0, 0.6], 60)
    mesh = finer_cubes(rod_before_a_wall).added_to(piece, lost)
    assert covered_share(piece) < 0.4
    assert covered_share(mesh) > 0.9
    assert np.linalg.norm(mesh.vertices[:, :2], axis=1).max() < 1.2 * PIXEL
    assert topology(mesh).non_manifold_edge_share == 0


def test_what_has_to_fit_others_stays_at_the_sides():
    side = PIXEL * BLOCK
    # The rod goes on above the box.
    x, y, _ = BOX.high
    box = Box(BOX.low, (x, y, BOX.low[2] + 6 * side))
    parts = replace(finer_cubes(rod_before_a_wall), box=box)
    lost = np.linspace([0, 0, -0.6], [0, 0, 0.6], 60)
    nothing = keep_vertices(ellipsoid(ROD), np.zeros(2 * 40 * 39, bool))
    for keeps_sides, n in ((False, 6), (True, 5)):
        mesh = replace(parts, keeps_sides=keeps_sides).added_to(nothing, lost)
        highest = BOX.low[2] + n * side
        assert mesh.vertices[:, 2].max() == pytest.approx(highest, abs=PIXEL)
