# SPDX-License-Identifier: Apache-2.0
"""The part of the mesh of one block, decimated so that it still fits its neighbours."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.engine.run_identity import scene_inputs
from gaussian_splatting.scenes.scene import Scene
from sugar_extractors.mesh import mesh_steps
from sugar_extractors.mesh.decimation import decimated
from sugar_extractors.mesh.fusion.tsdf import cleaned
from sugar_extractors.mesh.mesh_config import MeshOptions
from sugar_extractors.mesh.mesh_finishing import finish_mesh
from sugar_extractors.mesh.mesh_steps import Extraction
from sugar_extractors.mesh.meshing_backends import choose_backend
from sugar_extractors.mesh.surfaces import Surfaces, refine
from sugar_extractors.photographs import Photograph, photo_source
from sugar_pipeline.blocks.block_depths import INDEX_FILE, StoredView, stored_views
from sugar_pipeline.blocks.block_plan import Block, BlockPlan
from sugar_pipeline.blocks.joined_mesh import JoinedFusion, SearchOfThinParts, VoxelGrid, voxel_size
from sugar_pipeline.blocks.partition import BlockBox
from sugar_scene import triangle_mesh
from sugar_scene.depth_view import DepthView, FusedViews, Renderer
from sugar_scene.regions import Box
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_trainers.capture import load_views
from sugar_utils.console import Console
from sugar_utils.errors import UserError, say_nothing
from sugar_utils.files import file_digest
from sugar_utils.recipe import Recipe, note_path


def write_block_mesh(plan: BlockPlan, block: Block, options: MeshOptions, console: Console) -> None:
    """Fuse, clean, refine and decimate the part of a block, by the steps of the mesh stage.

    Args:
        options: Of the mesh of the block's coarse model.
    """
    _, scene = load_views(options, say_nothing)
    recipe = _recipe(plan, scene, options)
    if recipe.is_current(note_path(block.mesh), [block.mesh]):
        console.headline(f"exists already: {block.mesh}")
        return
    views = stored_views(plan.blocks)
    if not views:
        raise UserError(f"{plan.folder}: no view of any block has a depth; train the blocks longer")
    voxel = voxel_size(views, options.tsdf)
    grid = VoxelGrid.over(plan.bounds, voxel)
    extraction = _extraction(block, grid, scene, options, console)
    region = extraction.region
    mesh = _fused(extraction, plan, block, grid, views)
    n_before = mesh.n_faces
    surfaces = Surfaces([mesh], {"foreground_voxel": voxel}, voxels={"foreground": voxel})
    if options.refines_vertices and mesh.n_faces:
        surfaces = _refined(extraction, block.box, surfaces)
    (mesh,) = surfaces.meshes
    weights = surfaces.weights[0] if surfaces.weights else None
    n_faces = max(options.decimation_targets)
    small = decimated(mesh, n_faces, weights, fixed=region.shared(mesh.vertices))
    mesh = finish_mesh([small], surface=None, box=None)
    figures = dict(surfaces.figures)
    if options.remove_unseen and mesh.n_faces:
        mesh = mesh_steps.without_unseen(extraction, mesh)
    if options.fills_holes and mesh.n_faces:
        mesh, hole_figures = mesh_steps.with_holes_filled(extraction, mesh, surfaces.voxels)
        figures.update(hole_figures)
    console.headline(f"block {block.number}: {mesh.n_faces:,} of {n_before:,} triangles")
    mesh = triangle_mesh.with_vertex_normals(mesh)
    mesh_steps.write(extraction, block.mesh, recipe, mesh, figures)


def _recipe(plan: BlockPlan, scene: Scene, options: MeshOptions) -> Recipe:
    """Return the recipe of a block's part: settings, the depths of all blocks, its photographs."""
    depths = {block.folder.name: file_digest(block.depths / INDEX_FILE) for block in plan.blocks}
    inputs: dict[str, dict[str, str] | str] = {"depths": depths}
    if options.refines_vertices:
        inputs.update(scene_inputs(scene))
    return Recipe(options.identity(0.0, max(options.decimation_targets)), inputs)


def _extraction(
    block: Block, grid: VoxelGrid, scene: Scene, options: MeshOptions, console: Console
) -> Extraction:
    """Return what the steps read for a block: its scene, and its views with their stored depth."""
    start = time.monotonic()
    device = options.compute.device
    depths = _StoredDepths.of(block, scene, device)
    return Extraction(
        options=options,
        console=console,
        scene=scene,
        region=grid.ends_of(grid.region_of(block.box)),
        views=FusedViews(depths.cameras, lambda: depths.read, hull=None, device=device),
        backend=choose_backend(options.meshing_backend),
        photograph=None,
        start=start,
    )


def _fused(
    extraction: Extraction,
    plan: BlockPlan,
    block: Block,
    grid: VoxelGrid,
    views: Sequence[StoredView],
) -> TriangleMesh:
    """Return the surface of a block near the points that its photographs observe.

    Args:
        views: Of all blocks.
    """
    config = extraction.options.tsdf
    extent = extraction.scene.extent
    # Infinite sides end far outside. Points of its scene reach into the margin of a block.
    low = np.maximum(block.box.low, plan.bounds.low) - extent
    high = np.minimum(block.box.high, plan.bounds.high) + extent
    around = Box.of_corners(low, high)
    observed = mesh_steps.observed_space(extraction, around)
    search = None
    if observed is not None and config.adds_thin_parts:
        search = SearchOfThinParts(observed.without_margin(), stored_views([block]))
    device = extraction.views.device
    fusion = JoinedFusion(views, grid, config, device, extraction.console, search)
    mesh = fusion.surface(grid.region_of(block.box))
    if observed is not None and mesh.n_faces:
        mesh = triangle_mesh.keep_vertices(mesh, observed.contains(mesh.vertices))
        render = extraction.views.renderer()
        mesh = mesh_steps.without_bare_border(extraction, mesh, render, around, grid.voxel)
    return cleaned(mesh, config, config.min_diagonal * grid.voxel, extraction.region)


def _refined(extraction: Extraction, box: BlockBox, fused: Surfaces) -> Surfaces:
    """Move the vertices of a block's mesh until its photographs agree; its borders stay."""
    views = extraction.views
    with ImageStore() as store:
        photograph = photo_source(store, views.device, exposures={})
        of_block = photograph_of(box, photograph, views.renderer())
        return refine(replace(extraction, photograph=of_block), fused)


def photograph_of(box: BlockBox, photograph: Photograph, render: Renderer) -> Photograph:
    """Return photographs in which only pixels count that show a block.

    Others show its neighbours, whose meshes do not hide parts of its own.

    Args:
        render: Depth of their pixels.
    """

    def read(camera: Camera) -> Tensor:
        view = render(camera)
        points = view.world_points(view.depth).cpu().numpy()
        is_inside = torch.from_numpy(box.contains(points)).to(view.depth.device)
        shows = (view.depth > 0) & is_inside.reshape(view.depth.shape)
        pixels = photograph(camera)
        weights = pixels[..., 3:] * shows[..., None]
        return torch.cat([pixels[..., :3], weights], dim=2)

    return read


@dataclass(frozen=True)
class _StoredDepths:
    """The depths of a block on the disk, as a renderer of its views."""

    views: Mapping[str, StoredView]  # by name of the camera
    cameras: list[Camera]
    device: torch.device

    @classmethod
    def of(cls, block: Block, scene: Scene, device: torch.device) -> _StoredDepths:
        views = {}
        cameras = []
        for view in stored_views([block]):
            camera = scene.train_cameras[view.number]
            views[camera.name] = view
            cameras.append(camera)
        return cls(views, cameras, device)

    def read(self, camera: Camera) -> DepthView:
        """Read depth and colour of a view."""
        return self.views[camera.name].read(self.device)
