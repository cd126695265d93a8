# SPDX-License-Identifier: Apache-2.0
"""From the parts of the blocks to the results of the whole capture.

::

    OUTPUT/SCENE/mesh.ply              all triangles, with colours at the vertices
    OUTPUT/SCENE/mesh.obj, .mtl        the same with textures, a picture for each block
    OUTPUT/SCENE/mesh_00.png ...
    OUTPUT/SCENE/splats.ply            all Gaussians
    OUTPUT/SCENE/tiles/tileset.json    3D Tiles: a GLB for each block, and levels of detail
    OUTPUT/SCENE/photographs.json      cameras of the photographs, in the world of these files
    OUTPUT/SCENE/transform.json        from the world of the scene to that of these files: upright
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.moved import moved_cloud, moved_points
from gaussian_splatting.core.subsets import about
from gaussian_splatting.engine.model import cloud_from_state
from gaussian_splatting.formats.placement import Placement
from gaussian_splatting.formats.ply import (
    concatenate_gaussian_plys,
    read_gaussian_ply,
    write_gaussian_ply,
)
from gaussian_splatting.scenes.scene import Scene
from sugar_extractors.outputs.result_folder import TILE_FOLDER, remove_results, write_transform
from sugar_extractors.outputs.result_photographs import write_photographs
from sugar_extractors.placing import PlacementOptions
from sugar_extractors.results import read_state
from sugar_extractors.texture.placed_copy import placement_in
from sugar_pipeline.blocks import tiles
from sugar_pipeline.blocks.block_plan import Block, BlockPlan
from sugar_pipeline.blocks.joined_mesh import welded
from sugar_pipeline.blocks.joined_refinement import RefinedPart, agreed_vertices
from sugar_pipeline.blocks.paged_obj import paged_obj
from sugar_pipeline.pipeline.plan import PipelinePlan
from sugar_scene import triangle_mesh
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import check_writable

MESH = "mesh.ply"
TEXTURED = "mesh.obj"
SPLATS = "splats.ply"
_WELD = 1e-6  # of the longest side of the meshed space; borders are equal to the bit
_PLACED_POINTS = 200_000  # vertices that say where the whole stands


@dataclass(frozen=True)
class JoinedParts:
    """The parts of all blocks, and where they are placed."""

    plan: BlockPlan
    meshes: Sequence[TriangleMesh]  # of the blocks with a surface; refined where they are
    refined: Sequence[RefinedPart]  # of the same blocks; empty where nothing was refined
    placement: Placement  # of the results

    @property
    def matrix(self) -> np.ndarray:
        """From the world of the scene to that of the results. (4, 4)"""
        return self.placement.matrix

    @classmethod
    def of(
        cls,
        plan: BlockPlan,
        stages: Sequence[PipelinePlan],
        scene: Scene,
        options: PlacementOptions,
    ) -> JoinedParts:
        """Read the parts, and place the whole.

        Args:
            stages: Of the run of each block.
            options: Where the whole stands; upright where they do not say.

        Raises:
            UserError: No block has a surface.
        """
        meshes = []
        refined = []
        for block, of_block in zip(plan.blocks, stages, strict=True):
            mesh = triangle_mesh.read_mesh_ply(block.mesh)
            part = RefinedPart.of(block, mesh, of_block)
            if mesh.n_faces:
                meshes.append(mesh)
            if part is not None:
                refined.append(part)
        if not meshes:
            raise UserError(f"{plan.folder}: no block has a surface; train the blocks longer")
        points = np.concatenate([mesh.vertices for mesh in meshes])
        sample = about(points, _PLACED_POINTS)
        if options.orient is None:
            options = replace(options, orient="up")
        placement = placement_in(scene, sample, options)
        if refined:
            agreed = agreed_vertices(refined)
            meshes = [
                replace(mesh, vertices=vertices, normals=None)
                for mesh, vertices in zip(meshes, agreed, strict=True)
            ]
        return cls(plan, meshes, refined, placement)

    @property
    def weld_distance(self) -> float:
        """Distance of vertices that are one, world units."""
        sides = np.subtract(self.plan.bounds.high, self.plan.bounds.low)
        return _WELD * float(sides.max())

    def mesh(self) -> TriangleMesh:
        """Return the mesh of all blocks, placed."""
        joined = welded(self.meshes, self.weld_distance)
        placed = moved_points(joined.vertices, self.matrix)
        return triangle_mesh.with_vertex_normals(replace(joined, vertices=placed, normals=None))

    @property
    def are_textured(self) -> bool:
        """Whether the parts have textures."""
        return any(part.textured is not None for part in self.refined)

    def textured(self) -> Iterator[tuple[Block, TexturedMesh, TriangleMesh]]:
        """Yield the textured mesh of each block, and that with colours at the vertices, placed."""
        for part, mesh in zip(self.refined, self.meshes, strict=True):
            vertices = moved_points(mesh.vertices, self.matrix)
            placed = replace(mesh, vertices=vertices, normals=None)
            yield part.block, part.read_textured(vertices), placed

    def write_splats(self, path: Path) -> int:
        """Write the Gaussians of all blocks, one after the other; return their number."""
        pieces = []
        try:
            for block, cloud in self._clouds():
                piece = path.with_name(f".{path.name}.{block.number:02d}")
                pieces.append(piece)
                write_gaussian_ply(piece, moved_cloud(cloud, self.matrix))
            return concatenate_gaussian_plys(pieces, path)
        finally:
            for piece in pieces:
                piece.unlink(missing_ok=True)

    def _clouds(self) -> Iterator[tuple[Block, GaussianCloud]]:
        """Yield the Gaussians of each block."""
        if not self.refined:
            for block in self.plan.blocks:
                yield block, read_gaussian_ply(block.splats)
        else:
            for part, mesh in zip(self.refined, self.meshes, strict=True):
                yield part.block, part.read_cloud(mesh.vertices).to_gaussians()


def own_gaussians(block: Block, cloud: GaussianCloud) -> GaussianCloud:
    """Return the Gaussians whose centres lie in a block, and not in its margin."""
    centers = cloud.means.detach().cpu().numpy().astype(np.float64)
    is_own = torch.from_numpy(block.box.contains(centers))
    return cloud.select(is_own.to(cloud.means.device))


def write_block_splats(block: Block, model: Path) -> None:
    """Write the Gaussians of a block's coarse model that lie in the block."""
    cloud = own_gaussians(block, read_state(model, cloud_from_state))
    write_gaussian_ply(block.splats, cloud)


def join_results(parts: JoinedParts, scene: Scene, folder: Path, console: Console) -> list[Path]:
    """Write the results of the whole capture; return the files, the mesh first."""
    check_writable(folder)
    mesh = parts.mesh()
    remove_results(folder)
    mesh_path = folder / MESH
    triangle_mesh.write_mesh_ply(mesh_path, mesh)
    files = [mesh_path]
    console.headline(f"{mesh_path}: {mesh.n_faces:,} triangles of {len(parts.plan.blocks)} blocks")
    if parts.are_textured:
        files += _write_textured(parts, folder)
    splats_path = folder / SPLATS
    n_gaussians = parts.write_splats(splats_path)
    console.headline(f"{splats_path}: {n_gaussians:,} Gaussians")
    files.append(splats_path)
    files.append(write_photographs(folder, scene.calibrated_cameras, parts.matrix))
    files.append(write_transform(folder, parts.placement))
    return files


def _write_textured(parts: JoinedParts, folder: Path) -> list[Path]:
    """Write the pages of the OBJ, the tiles and the tileset."""
    tile_folder = check_writable(folder / TILE_FOLDER)
    written = []
    with paged_obj(folder / TEXTURED) as obj:
        for block, textured, placed in parts.textured():
            obj.add(textured)
            written.append(tiles.write_tile(tile_folder, block.number, textured, placed))
    record = parts.placement.record(tile_folder)
    level_files = tiles.write_tileset(tile_folder, written, parts.weld_distance, record)
    tile_files = [tile_folder / level.name for tile in written for level in tile.levels]
    return [*obj.files, *level_files, *tile_files]
