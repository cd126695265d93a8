# SPDX-License-Identifier: Apache-2.0
"""From the parts of the blocks to the results of the whole capture.

::

    OUTPUT/SCENE/mesh.ply              all triangles, with colours at the vertices
    OUTPUT/SCENE/mesh.obj, .mtl        the same with textures, a picture for each block
    OUTPUT/SCENE/mesh_00.png ...
    OUTPUT/SCENE/splats.ply            all Gaussians
    OUTPUT/SCENE/tiles/tileset.json    3D Tiles: a GLB for each block
    OUTPUT/SCENE/transform.json        from the world of the scene to that of these files: upright
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.data.ply import (
    concatenate_gaussian_plys,
    read_gaussian_ply,
    write_gaussian_ply,
)
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.engine.model import cloud_from_state
from gaussian_splatting.formats.moved import moved_cloud
from sugar_extractors.mesh.meshing_backends import choose_backend
from sugar_extractors.result_folder import write_transform
from sugar_extractors.results import read_state
from sugar_extractors.texture.placed_export import PlacementOptions, moved_points, placement
from sugar_extractors.texture.textured_mesh_io import MeshStyle, TexturedMesh, write_glb
from sugar_pipeline.blocks import tiles
from sugar_pipeline.blocks.block_plan import Block, BlockPlan
from sugar_pipeline.blocks.joined_mesh import welded
from sugar_pipeline.blocks.joined_refinement import (
    RefinedPart,
    SharedVertices,
    refined_part,
    shared_vertices,
    textured_part,
)
from sugar_pipeline.blocks.paged_obj import write_paged_obj
from sugar_scene import triangle_mesh
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path, check_writable

MESH = "mesh.ply"
TEXTURED = "mesh.obj"
SPLATS = "splats.ply"
TILES = "tiles"
OVERVIEW_FACES = 100_000  # of the coarse model above the tiles
_WELD = 1e-6  # of the longest side of the meshed space; borders are equal to the bit
_PLACED_POINTS = 200_000  # vertices that say where the whole stands


@dataclass(frozen=True)
class JoinedParts:
    """The parts of all blocks, and where they are placed."""

    plan: BlockPlan
    refined: Sequence[RefinedPart]  # empty where nothing was refined
    matrix: np.ndarray  # from the world of the scene to that of the results, (4, 4)
    shared: SharedVertices

    @classmethod
    def of(cls, plan: BlockPlan, refined: Sequence[RefinedPart], scene: Scene) -> JoinedParts:
        """Read where the parts are; upright is where the whole stands.

        Raises:
            UserError: No block has a surface.
        """
        vertices = [triangle_mesh.read_mesh_ply(block.mesh).vertices for block in plan.blocks]
        points = np.concatenate(vertices)
        if len(points) == 0:
            raise UserError(f"{plan.folder}: no block has a surface; train the blocks longer")
        sample = points[:: max(1, len(points) // _PLACED_POINTS)]
        upright = PlacementOptions(orient="up")
        matrix = placement(scene.calibrated_cameras, scene.points, sample, upright)
        return cls(plan, refined, matrix, shared_vertices(refined))

    def mesh(self) -> TriangleMesh:
        """Return the mesh of all blocks, placed."""
        parts = []
        if not self.refined:
            parts = [triangle_mesh.read_mesh_ply(block.mesh) for block in self.plan.blocks]
        for part in self.refined:
            coarse = triangle_mesh.read_mesh_ply(part.block.mesh)
            vertices = refined_part(part, self.shared).vertices.double().numpy()
            parts.append(TriangleMesh(vertices, coarse.faces, coarse.colors))
        sides = np.subtract(self.plan.bounds.high, self.plan.bounds.low)
        joined = welded([part for part in parts if part.n_faces], _WELD * float(sides.max()))
        placed = moved_points(joined.vertices, self.matrix)
        return triangle_mesh.with_vertex_normals(replace(joined, vertices=placed, normals=None))

    def textured(self) -> Iterator[TexturedMesh]:
        """Yield the textured mesh of each block, placed."""
        for part in self.refined:
            mesh = textured_part(part, refined_part(part, self.shared))
            placed = moved_points(mesh.vertices.double().numpy(), self.matrix)
            yield replace(mesh, vertices=torch.from_numpy(placed.astype(np.float32)))

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
        for part in self.refined:
            yield part.block, refined_part(part, self.shared).to_gaussians()
        if not self.refined:
            for block in self.plan.blocks:
                yield block, read_gaussian_ply(block.splats)


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
    mesh_path = folder / MESH
    triangle_mesh.write_mesh_ply(mesh_path, mesh)
    files = [mesh_path]
    console.headline(f"{mesh_path}: {mesh.n_faces:,} triangles of {len(parts.plan.blocks)} blocks")
    if any(part.textured is not None for part in parts.refined):
        files += write_paged_obj(folder / TEXTURED, parts.textured())
        files += _write_tiles(parts, mesh, check_writable(folder / TILES))
    splats_path = folder / SPLATS
    n_gaussians = parts.write_splats(splats_path)
    console.headline(f"{splats_path}: {n_gaussians:,} Gaussians")
    files.append(splats_path)
    files.append(write_transform(folder, parts.matrix, scene))
    return files


def _write_tiles(parts: JoinedParts, mesh: TriangleMesh, folder: Path) -> list[Path]:
    """Write the tiles of all blocks and the tileset."""
    entries = []
    paths = []
    style = MeshStyle(y_up=True)
    for part, textured in zip(parts.refined, parts.textured(), strict=True):
        path = folder / f"tile_{part.block.number:02d}.glb"
        with atomic_path(path) as temporary:
            write_glb(temporary, textured, path, style)
        entries.append((path.name, tiles.box_of(textured.vertices.double().numpy())))
        paths.append(path)
    overview = choose_backend().decimate(replace(mesh, normals=None), OVERVIEW_FACES)
    return [*tiles.write_tileset(folder, overview, entries), *paths]
