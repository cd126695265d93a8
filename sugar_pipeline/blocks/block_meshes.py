# SPDX-License-Identifier: Apache-2.0
"""The part of the mesh of one block, decimated so that it still fits its neighbours."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from scipy.spatial import KDTree

from gaussian_splatting.core.moved import unit_vectors
from gaussian_splatting.data.cameras import Camera
from sugar_extractors.mesh import mesh_steps
from sugar_extractors.mesh.mesh_config import MeshOptions
from sugar_extractors.mesh.mesh_finishing import finish_mesh
from sugar_extractors.mesh.mesh_steps import Extraction, Figures
from sugar_extractors.mesh.meshing_backends import choose_backend
from sugar_extractors.mesh.observed_region import observed_region
from sugar_extractors.mesh.tsdf import cleaned
from sugar_pipeline.blocks.block_depths import INDEX_FILE, StoredView, stored_views
from sugar_pipeline.blocks.block_plan import Block, BlockPlan
from sugar_pipeline.blocks.joined_mesh import JoinedFusion, VoxelGrid, voxel_size
from sugar_pipeline.blocks.partition import BlockBox
from sugar_scene import triangle_mesh
from sugar_scene.depth_view import DepthView, FusedViews
from sugar_scene.regions import EVERYWHERE, Box, Region, SharedPlane
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_trainers.capture import load_views
from sugar_utils.console import Console
from sugar_utils.errors import UserError, say_nothing
from sugar_utils.files import file_digest
from sugar_utils.recipe import Recipe, note_path

ANCHOR = 3.0  # length of the triangles that hold a border while a mesh is decimated, in edges
_TURN = 0.6  # radians, of these triangles about their edge
_MOVED = 0.05  # voxels, by which decimation may move a vertex of the border
_SNAP = 0.15  # the same, by which it moves to a corner of the grid: no edge there is much shorter
_TRIES = 16
_RINGS = 2  # of triangles around a vertex that was lost
Decimate = Callable[[TriangleMesh, int], TriangleMesh]


class _Anchored(NamedTuple):
    """A mesh with triangles that keep some of its edges where they are."""

    mesh: TriangleMesh
    corners: np.ndarray  # far corners of the added triangles, (C, 3)
    n_added: int  # triangles


def write_block_mesh(plan: BlockPlan, block: Block, options: MeshOptions, console: Console) -> None:
    """Fuse, clean and decimate the part of a block, by the steps of the mesh stage.

    Args:
        options: Of the mesh of the block's coarse model.
    """
    recipe = _recipe(plan, options)
    if recipe.is_current(note_path(block.mesh), [block.mesh]):
        console.headline(f"exists already: {block.mesh}")
        return
    views = stored_views(plan.blocks)
    if not views:
        raise UserError(f"{plan.folder}: no view of any block has a depth; train the blocks longer")
    voxel = voxel_size(views, options.tsdf)
    grid = VoxelGrid.over(plan.bounds, voxel)
    extraction = _extraction(block, grid, options, console)
    region = extraction.region
    fusion = JoinedFusion(views, grid, options.tsdf, options.compute.device, console)
    mesh = fusion.surface(grid.region_of(block.box))
    mesh = observed_part(extraction, mesh, block.box)
    mesh = cleaned(mesh, options.tsdf, options.tsdf.min_diagonal * voxel, region)
    n_before = mesh.n_faces
    n_faces = max(options.decimation_targets)

    def decimate(mesh: TriangleMesh) -> TriangleMesh:
        return decimated(
            with_aligned_boundary(mesh, region, grid), n_faces, region, extraction.backend.decimate
        )

    mesh = finish_mesh([mesh], decimate, surface=None, box=None)
    figures: Figures = {"foreground_voxel": voxel}
    if options.remove_unseen and mesh.n_faces:
        mesh = mesh_steps.without_unseen(extraction, mesh)
    if options.fills_holes and mesh.n_faces:
        voxels = {"foreground": voxel}
        mesh, hole_figures = mesh_steps.with_holes_filled(extraction, mesh, voxels)
        figures.update(hole_figures)
    console.headline(f"block {block.number}: {mesh.n_faces:,} of {n_before:,} triangles")
    mesh = triangle_mesh.with_vertex_normals(mesh)
    mesh_steps.write(extraction, block.mesh, recipe, mesh, figures)


def _recipe(plan: BlockPlan, options: MeshOptions) -> Recipe:
    """Return the recipe of a block's part: settings, and the depths of all blocks."""
    depths = {block.folder.name: file_digest(block.depths / INDEX_FILE) for block in plan.blocks}
    of_depths = replace(options, photometric_refinement="none")
    settings = of_depths.identity(0.0, max(options.decimation_targets))
    return Recipe(settings, {"depths": depths})


def _extraction(
    block: Block, grid: VoxelGrid, options: MeshOptions, console: Console
) -> Extraction:
    """Return what the steps read for a block: its scene, and its views with their stored depth."""
    start = time.monotonic()
    _, scene = load_views(options, say_nothing)
    device = options.compute.device
    depths = _StoredDepths.of(block, device)
    return Extraction(
        options=options,
        console=console,
        scene=scene,
        region=region_of(grid, block.box),
        views=FusedViews(depths.cameras, lambda: depths.read, hull=None, device=device),
        backend=choose_backend(options.meshing_backend),
        photograph=None,
        start=start,
    )


def observed_part(extraction: Extraction, mesh: TriangleMesh, box: BlockBox) -> TriangleMesh:
    """Return the part of a mesh near the observed points, without bare borders.

    Args:
        box: The space of the block, into whose margin the points of its scene reach.
    """
    scene = extraction.scene
    margin = extraction.options.tsdf.margin
    if margin is None or mesh.n_faces == 0:
        return mesh
    # Infinite sides end far outside.
    low = np.maximum(box.low, mesh.vertices.min(axis=0)) - scene.extent
    high = np.minimum(box.high, mesh.vertices.max(axis=0)) + scene.extent
    around = Box.of_corners(low, high)
    observed = observed_region(scene.observations, around, margin * scene.extent)
    if observed is None:
        return mesh
    mesh = triangle_mesh.keep_vertices(mesh, observed.contains(mesh.vertices))
    render = extraction.views.renderer()
    voxel = extraction.region.voxel
    return mesh_steps.without_bare_border(extraction, mesh, render, around, voxel)


@dataclass(frozen=True)
class _StoredDepths:
    """The depths of a block on the disk, as a renderer of its views."""

    views: Mapping[str, StoredView]  # by name of the camera
    cameras: list[Camera]
    device: torch.device

    @classmethod
    def of(cls, block: Block, device: torch.device) -> _StoredDepths:
        views = {view.path.stem: view for view in stored_views([block])}
        return cls(views, [view.camera() for view in views.values()], device)

    def read(self, camera: Camera) -> DepthView:
        """Read depth and colour of a view."""
        return self.views[camera.name].read(self.device)


def decimated(
    mesh: TriangleMesh,
    n_faces: int,
    region: Region,
    decimate: Decimate,
) -> TriangleMesh:
    """Decimate a mesh; vertices on the planes to its neighbours are fixed.

    Each edge on a plane gets long triangles, whose planes resist every move of the edge. They are
    removed afterwards. Around a vertex that was lost all the same, as of a splinter, triangles
    are left out of the decimation in another try. Their own border lies within the block: where
    decimation moves it, they follow.
    """
    if mesh.n_faces <= n_faces:
        return mesh
    is_shared = region.shared(mesh.vertices)
    is_fixed = is_shared.copy()
    is_left_out = np.zeros(mesh.n_faces, dtype=bool)
    for _ in range(_TRIES):
        rest = TriangleMesh(mesh.vertices, mesh.faces[~is_left_out], mesh.colors)
        edges = triangle_mesh.border_edges(rest)
        edges = edges[is_fixed[edges].all(axis=1)]
        if len(edges) == 0:
            return decimate(mesh, n_faces)
        border = np.unique(edges)
        anchored = _with_anchors(rest, edges)
        n_small = max(n_faces - int(is_left_out.sum()), 0) + anchored.n_added
        small = decimate(triangle_mesh.without_unused_vertices(anchored.mesh), n_small)
        without_anchors = _without_anchors(small, anchored.corners, region.voxel)
        small = triangle_mesh.without_unused_vertices(without_anchors)
        small, is_lost = _with_border(small, mesh.vertices[border], region.voxel)
        lost_rows = border[is_lost]
        lost_shared = lost_rows[is_shared[lost_rows]]
        if len(lost_shared) == 0:
            patch = TriangleMesh(mesh.vertices, mesh.faces[is_left_out], mesh.colors)
            return _joined(small, _moved_to(small, patch, lost_rows))
        is_around = _around(mesh, lost_shared)
        is_left_out |= is_around
        is_fixed[mesh.faces[is_around]] = True
    return mesh


def _moved_to(small: TriangleMesh, patch: TriangleMesh, rows: np.ndarray) -> TriangleMesh:
    """Move some vertices of a patch to the nearest ones of a decimated mesh."""
    if len(rows) == 0:
        return patch
    _, nearest = KDTree(small.vertices).query(patch.vertices[rows])
    vertices = patch.vertices.copy()
    vertices[rows] = small.vertices[nearest]
    return TriangleMesh(vertices, patch.faces, patch.colors)


def _joined(small: TriangleMesh, patch: TriangleMesh) -> TriangleMesh:
    merged = triangle_mesh.merge_meshes([small, patch])
    return triangle_mesh.clean_mesh(triangle_mesh.without_unused_vertices(merged))


def _around(mesh: TriangleMesh, vertices: np.ndarray) -> np.ndarray:
    """Which triangles lie around vertices, some rings wide. (F,) bool"""
    is_near = np.zeros(mesh.n_vertices, dtype=bool)
    is_near[vertices] = True
    is_around = np.zeros(mesh.n_faces, dtype=bool)
    for _ in range(_RINGS):
        is_around = np.asarray(is_near[mesh.faces].any(axis=1))
        is_near[mesh.faces[is_around]] = True
    return is_around


def with_aligned_boundary(mesh: TriangleMesh, region: Region, grid: VoxelGrid) -> TriangleMesh:
    """Move vertices on the planes that lie close to a corner of the grid to that corner.

    Short edges would be the first that decimation removes. Where a vertex goes depends on its place
    alone, so that the neighbour's goes there, too.
    """
    if mesh.n_faces == 0 or not region.planes:
        return mesh
    is_shared = region.shared(mesh.vertices)
    in_voxels = (mesh.vertices - np.array(grid.low)) / grid.voxel
    corners = np.rint(in_voxels)
    moves = is_shared[:, None] & (np.abs(in_voxels - corners) < _SNAP)
    on_corners = np.array(grid.low) + corners * grid.voxel
    vertices = np.where(moves, on_corners, mesh.vertices)
    return triangle_mesh.clean_mesh(TriangleMesh(vertices, mesh.faces, mesh.colors))


def region_of(grid: VoxelGrid, box: BlockBox) -> Region:
    """Return the region of a block, with the planes on the grid between it and its neighbours."""
    cubes = grid.region_of(box)
    planes = []
    for axis in range(3):
        if cubes.first[axis] > 0:
            planes.append(SharedPlane(axis, grid.low[axis] + cubes.first[axis] * grid.cube_side))
        if cubes.end[axis] < grid.shape[axis]:
            planes.append(SharedPlane(axis, grid.low[axis] + cubes.end[axis] * grid.cube_side))
    return Region(EVERYWHERE, tuple(planes), grid.voxel)


def _with_anchors(mesh: TriangleMesh, edges: np.ndarray) -> _Anchored:
    """Add constraint triangles that fix edges during decimation.

    Two triangles at an edge are square to each other: their planes resist all moves but those along
    the edge. A triangle at each end is square to the edge and resists these, which straight borders
    would allow.
    """
    a = mesh.vertices[edges[:, 0]]
    b = mesh.vertices[edges[:, 1]]
    along = b - a
    length = np.median(np.linalg.norm(along, axis=1))
    # The axis that an edge follows least, and what is square to both, turned off the axes: on flat
    # ground far corners would lie where vertices are, and would not be told from them.
    axes = np.eye(3)[np.abs(along).argmin(axis=1)]
    level = unit_vectors(np.cross(along, axes))
    upright = unit_vectors(np.cross(along, level))
    first = np.cos(_TURN) * level + np.sin(_TURN) * upright
    second = np.cos(_TURN) * upright - np.sin(_TURN) * level
    reach = ANCHOR * length
    middle = (a + b) / 2
    positions = [middle + reach * first, middle + reach * second]
    for end in (a, b):
        positions += [end + reach * first, end + reach * second]
    n = len(edges)
    numbers = mesh.n_vertices + np.arange(6 * n).reshape(6, n)
    starts = edges[:, 0]
    ends = edges[:, 1]
    new_faces = np.concatenate(
        [
            np.column_stack([ends, starts, numbers[0]]),
            np.column_stack([ends, starts, numbers[1]]),
            np.column_stack([starts, numbers[2], numbers[3]]),
            np.column_stack([ends, numbers[4], numbers[5]]),
        ]
    )
    corners = np.concatenate(positions)
    anchored = TriangleMesh(
        np.concatenate([mesh.vertices, corners]),
        np.concatenate([mesh.faces, new_faces]),
        np.concatenate([mesh.colors, np.zeros((len(corners), 3), np.uint8)]),
    )
    return _Anchored(anchored, corners, len(new_faces))


def _without_anchors(mesh: TriangleMesh, corners: np.ndarray, voxel: float) -> TriangleMesh:
    """Remove the triangles that reach to the far corners."""
    distances, _ = KDTree(corners).query(mesh.vertices)
    return triangle_mesh.keep_vertices(mesh, distances > _MOVED * voxel)


def _with_border(
    small: TriangleMesh, border: np.ndarray, voxel: float
) -> tuple[TriangleMesh, np.ndarray]:
    """Move the vertices that decimation left of a border to where they were.

    Args:
        border: Places of its vertices before. (B, 3)

    Returns:
        The mesh, and which vertices of the border are lost, (B,) bool.
    """
    if small.n_vertices == 0:
        return small, np.ones(len(border), dtype=bool)
    distances, found_rows = KDTree(small.vertices).query(border)
    rows = np.asarray(found_rows)
    is_lost = distances > _MOVED * voxel
    _, counted_as, counts = np.unique(rows, return_inverse=True, return_counts=True)
    is_lost |= counts[counted_as] > 1
    vertices = small.vertices.copy()
    vertices[rows[~is_lost]] = border[~is_lost]
    return TriangleMesh(vertices, small.faces, small.colors), is_lost
