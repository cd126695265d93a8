# SPDX-License-Identifier: Apache-2.0
"""Refinement and texture of one block, on its part of the mesh with surroundings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from gaussian_splatting.data.images import ImageStore
from sugar_extractors.texture.texturing import extract_textured_mesh
from sugar_pipeline.blocks.block_plan import Block, BlockPlan
from sugar_pipeline.pipeline.plan import PipelinePlan
from sugar_pipeline.pipeline.watched_stage import run_watched_stage
from sugar_scene import triangle_mesh
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import file_digest

SURROUNDED = "surrounded_mesh.ply"  # what is refined: the part of a block, then what is around it


def with_surrounded_mesh(plan: PipelinePlan, block: Block) -> PipelinePlan:
    """Return the plan of a block's run; its refinement starts from the mesh with surroundings."""
    if plan.refine is None:
        return plan
    refine = replace(plan.refine, mesh_path=block.folder / SURROUNDED)
    texture = plan.texture
    if texture is not None:
        texture = replace(texture, refined_model_path=refine.result)
    return replace(plan, refine=refine, texture=texture)


def refine_block(plan: BlockPlan, block: Block, stages: PipelinePlan, console: Console) -> None:
    """Refine and texture the part of a block; a block without a surface is left out.

    Args:
        stages: Of the block's run, as of :func:`with_surrounded_mesh`.
    """
    mesh = surrounded_mesh(plan, block)
    if mesh is None:
        console.headline(f"block {block.number} has no surface")
        return
    write_if_new(block.folder / SURROUNDED, mesh)
    if stages.refine is None:
        return
    with ImageStore(stages.coarse.config.white_background) as images:
        run_watched_stage(stages.refine, images=images, console=console)
        if stages.texture is not None:
            extract_textured_mesh(stages.texture, console, images)


def surrounded_mesh(plan: BlockPlan, block: Block) -> TriangleMesh | None:
    """Return a block's part of the mesh and, behind it, its neighbours' within the margin.

    None where the block has no surface. Vertices and triangles of the block come first, in their
    order.
    """
    block_mesh = triangle_mesh.read_mesh_ply(block.mesh)
    if block_mesh.n_faces == 0:
        return None
    parts = [block_mesh]
    for other in plan.blocks:
        if other.number == block.number:
            continue
        mesh = triangle_mesh.read_mesh_ply(other.mesh)
        is_near = block.box.contains(mesh.vertices, plan.margin)
        parts.append(triangle_mesh.keep_vertices(mesh, is_near))
    return joined_in_order(parts)


def joined_in_order(parts: list[TriangleMesh]) -> TriangleMesh:
    """Join meshes at equal vertices; the first one keeps its numbers."""
    joined = triangle_mesh.merge_meshes(parts)
    _, first, numbers = np.unique(joined.vertices, axis=0, return_index=True, return_inverse=True)
    # Of equal vertices the first one counts; the others go, and those behind them move up.
    representative = first[numbers.reshape(-1)]
    is_kept = representative == np.arange(joined.n_vertices)
    rows = np.cumsum(is_kept) - 1
    faces = rows[representative[joined.faces]]
    mesh = TriangleMesh(joined.vertices[is_kept], faces, joined.colors[is_kept])
    if mesh.n_vertices < parts[0].n_vertices:
        raise ValueError("the first mesh has equal vertices")
    return mesh


def write_if_new(path: Path, mesh: TriangleMesh) -> None:
    """Write a mesh, unless the file holds it: results that were made from it stay valid."""
    fresh = path.with_name(f"new_{path.name}")
    triangle_mesh.write_mesh_ply(fresh, triangle_mesh.with_vertex_normals(mesh))
    if path.is_file() and file_digest(path) == file_digest(fresh):
        fresh.unlink()
    else:
        fresh.replace(path)


def require_same_faces(n_own: int, n_faces: int, path: Path) -> None:
    """Check that a result has the triangles of the block and more.

    Raises:
        UserError: It is of another mesh.
    """
    if n_faces < n_own:
        raise UserError(
            f"{path}: has {n_faces:,} triangles, its block {n_own:,}; pass --overwrite True"
        )
