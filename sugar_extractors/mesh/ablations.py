# SPDX-License-Identifier: Apache-2.0
"""The paper's two other ways to a mesh, kept for comparison (SuGaR, section 5.3).

Poisson reconstruction on the Gaussians' centres, and marching cubes on the density. Both give
worse surfaces than the level sets. Unlike the original, the grid's corners lie where they are
drawn (not half a voxel off), and boxes count as everywhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.rasterization.spherical_harmonics import SH_C0
from sugar_extractors.mesh.level_sets import LevelSetModel
from sugar_extractors.mesh.marching_cubes import SparseField, extract_surface
from sugar_extractors.mesh.surface_samples import Box, SurfaceSamples
from sugar_scene.fields.reference_fields import density_at
from sugar_scene.mesh.triangle_mesh import TriangleMesh
from sugar_utils.neighbors import nearest_neighbors_of

NORMAL_NEIGHBORS = 32
RESOLUTION = 512
BLOCK = 8
_REACH = 4.0
_CHUNK_BLOCKS = 256
_CHUNK_POINTS = 100_000


def center_samples(model: LevelSetModel, cameras: Sequence[Camera]) -> SurfaceSamples:
    """The Gaussians' centres as oriented points.

    A normal is the direction of least variance of the nearest 32 centres, turned towards the
    nearest camera.

    Args:
        model: N Gaussians.
        cameras: Training cameras, at least one.

    Returns:
        N points with their diffuse colours.
    """
    means = model.gaussians.means
    centers = torch.tensor(np.stack([camera.center for camera in cameras]), device="cpu").to(means)
    normals = torch.empty_like(means)
    for first in range(0, len(means), _CHUNK_POINTS):
        chunk = means[first : first + _CHUNK_POINTS]
        rows = nearest_neighbors_of(chunk, means, NORMAL_NEIGHBORS).indices.long()
        around = means[rows] - means[rows].mean(dim=1, keepdim=True)
        normal = torch.linalg.eigh(around.transpose(1, 2) @ around).eigenvectors[..., 0]
        nearest = nearest_neighbors_of(chunk, centers, 1).indices[:, 0].long()
        facing = (normal * (centers[nearest] - chunk)).sum(dim=-1, keepdim=True)
        normals[first : first + _CHUNK_POINTS] = torch.where(facing < 0, -normal, normal)
    return SurfaceSamples(
        means.cpu().numpy(), normals.cpu().numpy(), _diffuse(model).mul(255).byte().cpu().numpy()
    )


def density_surface(
    model: LevelSetModel,
    box: Box,
    hole: Box | None,
    level: float,
    resolution: int = RESOLUTION,
    on_blocks: Callable[[int, int], None] = lambda done, total: None,
) -> TriangleMesh:
    """Marching cubes on the density of the 16 nearest Gaussians.

    Args:
        model: N Gaussians.
        box: Where to look.
        hole: Within it the density counts as 0; None for nowhere.
        level: Density of the surface.
        resolution: Grid corners along the longest side of the box.
        on_blocks: Told how many blocks of corners are done, and of how many.

    Returns:
        The surface in the box; open where it leaves it.
    """
    sides = [high - low for low, high in zip(box.low, box.high, strict=True)]
    voxel = max(sides) / (resolution - 1)
    shape = tuple(max(1, math.ceil((side / voxel + 1) / BLOCK)) for side in sides)
    blocks = _blocks_in_reach(model, box, voxel, shape)
    table = torch.full(shape, -1, dtype=torch.int32, device="cpu")
    table[tuple(blocks.T)] = torch.arange(len(blocks), dtype=torch.int32, device="cpu")
    distances, colors = [], []
    for first in range(0, len(blocks), _CHUNK_BLOCKS):
        points = _corners(blocks[first : first + _CHUNK_BLOCKS], box, voxel, model)
        density, nearest = _density(model, points)
        if hole is not None:
            low, high = points.new_tensor(hole.low), points.new_tensor(hole.high)
            density[((points > low) & (points < high)).all(dim=1)] = 0.0
        distances.append((level - density).cpu())
        colors.append(_diffuse(model)[nearest].cpu())
        on_blocks(min(first + _CHUNK_BLOCKS, len(blocks)), len(blocks))
    if not distances:
        return TriangleMesh(
            np.zeros((0, 3)), np.zeros((0, 3), np.int64), np.zeros((0, 3), np.uint8)
        )
    flat = torch.cat(distances)
    field = SparseField(box.low, voxel, table, flat, torch.ones_like(flat), torch.cat(colors))
    return extract_surface(field)


def _blocks_in_reach(
    model: LevelSetModel, box: Box, voxel: float, shape: tuple[int, ...]
) -> Tensor:
    """Blocks that a surface can pass: beyond 4 sigma of every Gaussian the density is nearly 0.

    Returns:
        Places of the blocks. (B, 3) int64
    """
    axes = [torch.arange(n, device="cpu") for n in shape]
    places = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, 3)
    means = model.gaussians.means
    # One voxel more than the block: cells reach into the next one.
    half = 0.5 * math.sqrt(3) * (BLOCK + 1) * voxel
    reach = half + _REACH * float(model.gaussians.scales.max())
    low = torch.tensor(box.low, device="cpu")
    kept = []
    for chunk in places.split(_CHUNK_POINTS):
        centers = (low + (chunk + 0.5) * BLOCK * voxel).to(means)
        nearest = nearest_neighbors_of(centers, means, 1).sq_distances[:, 0]
        kept.append(chunk[(nearest <= reach**2).cpu()])
    return torch.cat(kept)


def _corners(blocks: Tensor, box: Box, voxel: float, model: LevelSetModel) -> Tensor:
    """World positions of the corners of blocks, the last axis fastest. (B 8^3, 3)"""
    axis = torch.arange(BLOCK, device="cpu")
    inside = torch.stack(torch.meshgrid(axis, axis, axis, indexing="ij"), dim=-1).reshape(-1, 3)
    corners = (blocks[:, None] * BLOCK + inside).reshape(-1, 3)
    return (torch.tensor(box.low, device="cpu") + voxel * corners).to(model.gaussians.means)


def _density(model: LevelSetModel, points: Tensor) -> tuple[Tensor, Tensor]:
    """Density at points and the nearest Gaussian of each. (S, 3) -> (S,), (S,) int64"""
    gaussians = model.gaussians
    rows = nearest_neighbors_of(points, gaussians.means, model.neighbors.shape[1]).indices
    density = density_at(
        points, rows, gaussians.means, gaussians.quats, gaussians.scales, gaussians.opacities
    )
    return density, rows[:, 0].long()


def _diffuse(model: LevelSetModel) -> Tensor:
    """View-independent colours in [0, 1]. (N, 3)"""
    return (0.5 + SH_C0 * model.gaussians.sh_dc[:, 0]).clamp(0, 1)
