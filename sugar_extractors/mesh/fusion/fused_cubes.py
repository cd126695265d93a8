# SPDX-License-Identifier: Apache-2.0
"""Cubes of voxels in which the depth of views is fused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sugar_extractors.mesh.fusion.fused_distances import BLOCK, FusedDistances
from sugar_extractors.mesh.fusion.marching_cubes import SparseField
from sugar_scene.depth_view import DepthView
from sugar_scene.regions import Corner
from sugar_utils.console import Console


def n_cubes(low: Corner, high: Corner, voxel: float) -> tuple[int, int, int]:
    """Return the cubes along the sides of a box, at least one. Corners and voxels in world units"""
    sides = np.subtract(high, low) / (voxel * BLOCK)
    x, y, z = np.ceil(sides).astype(int).clip(min=1).tolist()
    return x, y, z


@dataclass(frozen=True)
class FusedCubes:
    """Cubes of ``BLOCK`` voxels along each side, in which distances to views are averaged.

    Places are counted from the corner of the whole grid: the same numbers, and bits, in every part
    of it.
    """

    low: tuple[float, float, float]  # corner of cube (0, 0, 0), world units
    voxel: float  # side of a voxel, world units
    reach: float  # of a view before and behind its depth, world units
    first: tuple[int, int, int] = (0, 0, 0)  # the lowest cube of the part

    def mark(self, view: DepthView, reached: Tensor) -> None:
        """Mark the cubes that the depth of a view reaches.

        Args:
            reached: Cubes from ``first`` on, (X, Y, Z) bool; changed.
        """
        cube_side = self.voxel * BLOCK
        n_steps = math.ceil(2 * self.reach / (cube_side / 2)) + 1
        is_known = view.depth.flatten() > 0
        shape = torch.tensor(reached.shape, device=reached.device)
        first = torch.tensor(self.first, device=reached.device)
        for offset in torch.linspace(-self.reach, self.reach, n_steps, device="cpu").tolist():
            points = view.world_points(view.depth + offset)[is_known]
            cubes = (points - points.new_tensor(self.low)) / cube_side
            cubes = cubes.floor().long() - first
            is_inside = ((cubes >= 0) & (cubes < shape)).all(dim=1)
            x, y, z = cubes[is_inside].unbind(1)
            reached[x, y, z] = True

    def averaged(
        self,
        views: Sequence[Callable[[], DepthView]],
        reached: Tensor,
        console: Console,
        name: str = "fusion",
    ) -> SparseField:
        """Return the means of all views at the corners of the cubes that are reached.

        Args:
            views: Makes the depth of each view, one after the other.
            reached: Cubes from ``first`` on. (X, Y, Z) bool
            name: Of the progress that is shown.
        """
        n = int(reached.sum()) * BLOCK**3
        means = FusedDistances.empty(n, self.voxel, self.reach, reached.device)
        first = torch.tensor(self.first, dtype=torch.int32, device=reached.device)
        cubes = (reached.nonzero().int() + first).contiguous()
        with console.progress(name, 1, max(1, len(views))) as progress:
            for done, view in enumerate(views, start=1):
                means.add_at_corners(view(), cubes, self.low)
                progress.update(done, fields={"voxels": f"{n:,}"})
        x, y, z = (np.array(self.low) + np.array(self.first) * (self.voxel * BLOCK)).tolist()
        numbers = reached.flatten().cumsum(0).int() - 1
        return SparseField(
            origin=(x, y, z),
            voxel=self.voxel,
            table=torch.where(reached, numbers.reshape(reached.shape), -1).int(),
            distances=means.fused(),
            weights=means.weights,
            colors=means.colors,
        )
