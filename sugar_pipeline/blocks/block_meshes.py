# SPDX-License-Identifier: Apache-2.0
"""The part of the mesh of one block, decimated so that it still fits its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from scipy.spatial import KDTree

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.scenes.scene import Scene
from sugar_extractors.mesh.holes.hole_evidence import ViewEvidence
from sugar_extractors.mesh.holes.hole_filling import FilledMesh, HoleCounts, fill_holes
from sugar_extractors.mesh.mesh_config import MeshOptions
from sugar_extractors.mesh.meshing_backends import choose_backend
from sugar_extractors.mesh.observed_region import observed_region, without_bare_border
from sugar_extractors.mesh.tsdf import TsdfConfig
from sugar_pipeline.blocks.block_depths import INDEX_FILE, StoredView, stored_views
from sugar_pipeline.blocks.block_plan import Block, BlockPlan
from sugar_pipeline.blocks.joined_mesh import JoinedFusion, VoxelGrid, voxel_size
from sugar_pipeline.blocks.partition import BlockBox
from sugar_scene import triangle_mesh
from sugar_scene.depth_view import DepthView
from sugar_scene.regions import Box
from sugar_scene.subdivision import covered_pixels, visible_part
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_trainers.capture import load_views
from sugar_utils.console import Console
from sugar_utils.errors import UserError, say_nothing
from sugar_utils.files import file_digest
from sugar_utils.recipe import Recipe, note_path

ANCHOR = 3.0  # length of the triangles that hold a border while a mesh is decimated, in edges
_TURN = 0.6  # radians, of these triangles about their edge
_ON_PLANE = 1e-3  # voxels, by which a vertex of the border may lie beside its plane
_MOVED = 0.05  # the same, by which decimation may move it
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
    """Fuse, clean and decimate the part of a block.

    Args:
        options: Of the mesh of the block's coarse model.
    """
    recipe = _recipe(plan, options)
    note = note_path(block.mesh)
    if recipe.is_current(note, [block.mesh]):
        console.headline(f"exists already: {block.mesh}")
        return
    views = stored_views(plan.blocks)
    if not views:
        raise UserError(f"{plan.folder}: no view of any block has a depth; train the blocks longer")
    voxel = voxel_size(views, options.tsdf)
    grid = VoxelGrid.over(plan.bounds, voxel)
    fusion = JoinedFusion(views, grid, options.tsdf, options.compute.device, console)
    region = grid.region_of(block.box)
    mesh = fusion.surface(region)
    _, scene = load_views(options, say_nothing)
    depths = _StoredDepths.of(block, options.compute.device)
    mesh = observed_part(mesh, block, scene, depths, options, voxel)
    planes = planes_of(grid, block.box)
    mesh = cleaned(mesh, planes, voxel, SmallestPart.of(options.tsdf, voxel), options.tsdf.fill)
    n_before = mesh.n_faces
    target = max(options.decimation_targets)
    decimate = choose_backend(options.meshing_backend).decimate
    mesh = snapped(mesh, planes, grid)
    mesh = decimated(mesh, target, planes, voxel, decimate)
    if options.remove_unseen and mesh.n_faces:
        covered = covered_pixels(mesh, scene.train_cameras, options.compute.device)
        mesh = visible_part(mesh, covered)
    if options.fills_holes:
        mesh, counts = holes_filled(mesh, depths, planes, voxel)
        console.info(str(counts))
    console.headline(f"block {block.number}: {mesh.n_faces:,} of {n_before:,} triangles")
    note.unlink(missing_ok=True)
    triangle_mesh.write_mesh_ply(block.mesh, triangle_mesh.with_vertex_normals(mesh))
    recipe.write(note, [block.mesh])


def _recipe(plan: BlockPlan, options: MeshOptions) -> Recipe:
    """Return the recipe of a block's part: settings, and the depths of all blocks."""
    depths = {block.folder.name: file_digest(block.depths / INDEX_FILE) for block in plan.blocks}
    settings = options.identity(0.0, max(options.decimation_targets))
    return Recipe(settings, {"depths": depths})


def observed_part(
    mesh: TriangleMesh,
    block: Block,
    scene: Scene,
    depths: _StoredDepths,
    options: MeshOptions,
    voxel: float,
) -> TriangleMesh:
    """Return the part of a mesh near the observed points, without bare borders.

    Args:
        scene: Of the block, whose points reach into its margin.
    """
    margin = options.tsdf.margin
    if margin is None or mesh.n_faces == 0:
        return mesh
    # Infinite sides end far outside.
    low = np.maximum(block.box.low, mesh.vertices.min(axis=0)) - scene.extent
    high = np.minimum(block.box.high, mesh.vertices.max(axis=0)) + scene.extent
    around = Box.of_corners(low, high)
    region = observed_region(scene.observations, around, margin * scene.extent)
    points_region = observed_region(scene.observations, around, 0.0)
    if region is None or points_region is None:
        return mesh
    mesh = triangle_mesh.keep_vertices(mesh, region.contains(mesh.vertices))
    if mesh.n_faces == 0 or not depths.cameras:
        return mesh
    return without_bare_border(
        mesh,
        points_region,
        depths.read,
        depths.cameras,
        reach=options.tsdf.truncation * voxel,
        min_faces=options.tsdf.min_component,
    )


def holes_filled(
    mesh: TriangleMesh,
    depths: _StoredDepths,
    planes: Sequence[tuple[int, float]],
    voxel: float,
) -> FilledMesh:
    """Fill the holes that the views of a block allow, but none that a neighbour may go on in."""
    if mesh.n_faces == 0 or not depths.cameras:
        return FilledMesh(mesh, HoleCounts())
    evidence = ViewEvidence(
        cameras=depths.cameras,
        hull=None,
        renderer=lambda: depths.read,
        box=Box.of_corners(mesh.vertices.min(axis=0), mesh.vertices.max(axis=0)),
        inner_voxel=voxel,
        outer_voxel=voxel,
        device=depths.device,
    )
    at_border = on_planes(mesh.vertices, planes, voxel)
    return fill_holes(mesh, evidence.judge, is_object=False, goes_on=at_border)


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


class SmallestPart(NamedTuple):
    """The part of a mesh that is just large enough to stay: it has one of the two."""

    n_faces: int
    diagonal: float  # of its box, world units

    @classmethod
    def of(cls, config: TsdfConfig, voxel: float) -> SmallestPart:
        """Return the part that the fusion with voxels of this side leaves."""
        return cls(config.min_component, config.min_diagonal * voxel)


def cleaned(
    mesh: TriangleMesh,
    planes: Sequence[tuple[int, float]],
    voxel: float,
    smallest: SmallestPart,
    longest_hole: int,
) -> TriangleMesh:
    """Remove small parts and fill pinholes, but nothing that goes on in another region.

    Args:
        planes: Axis and place of the planes to the neighbours.
        smallest: Part that just stays.
        longest_hole: Edges of the largest hole that is filled.
    """
    if mesh.n_faces == 0:
        return mesh
    of_vertices = triangle_mesh.component_labels(mesh)
    labels = of_vertices[mesh.faces[:, 0]]
    counts = np.bincount(labels, minlength=mesh.n_vertices)
    diagonals = triangle_mesh.component_diagonals(mesh, of_vertices)
    is_large = (counts >= smallest.n_faces) | (diagonals >= smallest.diagonal)
    goes_on = np.zeros(len(counts), dtype=bool)
    at_border = on_planes(mesh.vertices, planes, voxel)
    goes_on[labels[at_border[mesh.faces].any(axis=1)]] = True
    stays = is_large[labels] | goes_on[labels]
    mesh = triangle_mesh.without_unused_vertices(
        TriangleMesh(mesh.vertices, mesh.faces[stays], mesh.colors)
    )
    if longest_hole == 0 or mesh.n_faces == 0:
        return mesh
    at_border = on_planes(mesh.vertices, planes, voxel)
    loops = []
    for loop in triangle_mesh.border_loops(mesh):
        if len(loop) <= longest_hole and not at_border[loop].any():
            loops.append(loop)
    return triangle_mesh.with_loops_filled(mesh, loops)


def decimated(
    mesh: TriangleMesh,
    n_faces: int,
    planes: Sequence[tuple[int, float]],
    voxel: float,
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
    is_shared = on_planes(mesh.vertices, planes, voxel)
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
        without_anchors = _without_anchors(small, anchored.corners, voxel)
        small = triangle_mesh.without_unused_vertices(without_anchors)
        small, is_lost = _with_border(small, mesh.vertices[border], voxel)
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


def snapped(
    mesh: TriangleMesh, planes: Sequence[tuple[int, float]], grid: VoxelGrid
) -> TriangleMesh:
    """Move vertices on the planes that lie close to a corner of the grid to that corner.

    Short edges would be the first that decimation removes. Where a vertex goes depends on its place
    alone, so that the neighbour's goes there, too.
    """
    if mesh.n_faces == 0 or not planes:
        return mesh
    at_border = on_planes(mesh.vertices, planes, grid.voxel)
    places = (mesh.vertices - np.array(grid.low)) / grid.voxel
    corners = np.rint(places)
    moves = at_border[:, None] & (np.abs(places - corners) < _SNAP)
    on_corners = np.array(grid.low) + corners * grid.voxel
    vertices = np.where(moves, on_corners, mesh.vertices)
    return triangle_mesh.clean_mesh(TriangleMesh(vertices, mesh.faces, mesh.colors))


def on_planes(
    vertices: np.ndarray, planes: Sequence[tuple[int, float]], voxel: float
) -> np.ndarray:
    """Whether vertices lie on one of some planes. (V, 3) -> (V,) bool"""
    distances = [np.abs(vertices[:, axis] - place) for axis, place in planes]
    nearest = np.min([np.full(len(vertices), np.inf), *distances], axis=0)
    return np.asarray(nearest < _ON_PLANE * voxel)


def planes_of(grid: VoxelGrid, box: BlockBox) -> list[tuple[int, float]]:
    """Axis and place of the planes between a block and its neighbours, on the grid."""
    region = grid.region_of(box)
    planes = []
    for axis in range(3):
        if region.first[axis] > 0:
            planes.append((axis, grid.low[axis] + region.first[axis] * grid.cube_side))
        if region.end[axis] < grid.shape[axis]:
            planes.append((axis, grid.low[axis] + region.end[axis] * grid.cube_side))
    return planes


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
    level = _unit(np.cross(along, axes))
    upright = _unit(np.cross(along, level))
    first = np.cos(_TURN) * level + np.sin(_TURN) * upright
    second = np.cos(_TURN) * upright - np.sin(_TURN) * level
    reach = ANCHOR * length
    middle = (a + b) / 2
    places = [middle + reach * first, middle + reach * second]
    for end in (a, b):
        places += [end + reach * first, end + reach * second]
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
    corners = np.concatenate(places)
    anchored = TriangleMesh(
        np.concatenate([mesh.vertices, corners]),
        np.concatenate([mesh.faces, new_faces]),
        np.concatenate([mesh.colors, np.zeros((len(corners), 3), np.uint8)]),
    )
    return _Anchored(anchored, corners, len(new_faces))


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-30)


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
