# SPDX-License-Identifier: Apache-2.0
"""From the parts of the blocks to the results of the whole capture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.data.ply import concatenate_gaussian_plys, write_gaussian_ply
from gaussian_splatting.engine.model import cloud_from_state
from sugar_extractors.results import read_state
from sugar_pipeline.blocks.block_plan import Block, BlockPlan
from sugar_pipeline.blocks.joined_mesh import welded
from sugar_scene import triangle_mesh
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import check_writable

MESH = "mesh.ply"
SPLATS = "splats.ply"
_WELD = 1e-6  # of the longest side of the meshed space; borders are equal to the bit


def own_gaussians(block: Block, cloud: GaussianCloud) -> GaussianCloud:
    """Return the Gaussians whose centres lie in a block, and not in its margin."""
    centers = cloud.means.detach().cpu().numpy().astype(np.float64)
    is_own = torch.from_numpy(block.box.contains(centers))
    return cloud.select(is_own.to(cloud.means.device))


def write_block_splats(block: Block, model: Path) -> None:
    """Write the Gaussians of a block's coarse model that lie in the block."""
    cloud = own_gaussians(block, read_state(model, cloud_from_state))
    write_gaussian_ply(block.splats, cloud)


def join_results(plan: BlockPlan, folder: Path, console: Console) -> list[Path]:
    """Write the mesh and the Gaussians of all blocks; return the files.

    Raises:
        UserError: No block has a surface.
    """
    check_writable(folder)
    meshes = [triangle_mesh.read_mesh_ply(block.mesh) for block in plan.blocks]
    meshes = [mesh for mesh in meshes if mesh.n_faces]
    if not meshes:
        raise UserError(f"{plan.folder}: no block has a surface; train the blocks longer")
    sides = np.subtract(plan.bounds.high, plan.bounds.low)
    mesh = welded(meshes, _WELD * float(sides.max()))
    mesh_path = folder / MESH
    triangle_mesh.write_mesh_ply(mesh_path, triangle_mesh.with_vertex_normals(mesh))
    splats_path = folder / SPLATS
    n_gaussians = concatenate_gaussian_plys(_splats_of(plan.blocks), splats_path)
    console.headline(f"{mesh_path}: {mesh.n_faces:,} triangles of {len(meshes)} blocks")
    console.headline(f"{splats_path}: {n_gaussians:,} Gaussians")
    return [mesh_path, splats_path]


def _splats_of(blocks: Sequence[Block]) -> list[Path]:
    return [block.splats for block in blocks]
