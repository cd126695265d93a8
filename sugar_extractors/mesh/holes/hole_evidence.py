# SPDX-License-Identifier: Apache-2.0
"""Evidence of photographs for and against a surface that would fill a hole.

A mask contradicts what lies outside of the object, and the depth of a view what stands before the
surface that it shows. As of masks, single views are outvoted: some are wrong.

Depth is that of the model, which lacks what the mesh lacks: a view may look through the hole at the
inner side of the surface behind it. No camera ever saw that, so it says nothing about the hole.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera, Pixels, pixels_of
from gaussian_splatting.data.masks import OVERVIEW_SIDE, is_outside
from sugar_extractors.mesh.holes.hole_shapes import Judgement
from sugar_scene.depth_view import FusedViews
from sugar_scene.regions import Box
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_scene.triangle_rasterizer import mesh_tensors, rasterize_triangles

FRONT_VOXELS = 4.0  # by which a point stands before a surface: the reach of fused distances
FRONT_PIXELS = 2  # all pixels this near to a point have to show a deeper surface: edges are blurred


@dataclass(frozen=True)
class ViewEvidence:
    """Evidence of training views about a filling; hole filling calls :meth:`judge`."""

    views: FusedViews
    box: Box  # the foreground
    inner_voxel: float  # side of a voxel in the box, world units
    outer_voxel: float  # the same outside of it
    mesh: TriangleMesh  # whose holes are filled

    @torch.no_grad()
    def judge(self, points: np.ndarray) -> Judgement:
        """Return how many views show the places of points, and whether views contradict them.

        Args:
            points: (N, 3) world units
        """
        positions = torch.from_numpy(points.astype(np.float32)).to(self.views.device)
        voxels = np.where(self.box.contains(points), self.inner_voxel, self.outer_voxel)
        reach = FRONT_VOXELS * torch.from_numpy(voxels.astype(np.float32)).to(self.views.device)
        n_views = torch.zeros(len(points), dtype=torch.int64, device=self.views.device)
        votes = torch.zeros(len(points), device=self.views.device)
        shown_by = torch.zeros_like(votes)
        render = self.views.renderer()
        for camera in self.views.cameras:
            small = camera.reduced(OVERVIEW_SIDE)
            small_pixels = pixels_of(small.coordinates(positions), small)
            n_views += self._covers(small, small_pixels)
            view_points = camera.coordinates(positions)
            pixels = pixels_of(view_points, camera)
            if not bool(pixels.inside.any()):
                continue
            surface = _least_depth(render(camera).depth, pixels)
            distance = surface - view_points[:, 2]
            is_informed = pixels.inside & (surface > 0) & (distance >= -reach)
            shows_inner_side = self._inner_sides[camera.name][
                small_pixels.rows, small_pixels.columns
            ]
            is_informed &= ~(small_pixels.inside & shows_inner_side)
            shown_by += is_informed
            votes += is_informed & (distance > reach)
        is_contradicted = is_outside(votes, shown_by)
        if self.views.hull is not None:
            is_contradicted |= ~self.views.hull.contains(positions)
        return Judgement(n_views.cpu().numpy(), is_contradicted.cpu().numpy())

    @functools.cached_property
    def _inner_sides(self) -> dict[str, Tensor]:
        """Pixels of each small view, by its name, that show the inner side of the mesh. (H, W) bool

        They are found when a hole is judged: most meshes have none that could be filled.
        """
        vertices, faces = mesh_tensors(self.mesh, self.views.device)
        shown = {}
        for camera in self.views.cameras:
            hits = rasterize_triangles(vertices, faces, camera.reduced(OVERVIEW_SIDE))
            shown[camera.name] = hits.cosines < 0
        return shown

    def _covers(self, small: Camera, pixels: Pixels) -> Tensor:
        """Return which points a small view shows, inside of its mask if it has one. (N,) bool"""
        silhouette = None if self.views.hull is None else self.views.hull.silhouette(small)
        if silhouette is None:
            return pixels.inside
        return pixels.inside & silhouette[pixels.rows, pixels.columns]


def _least_depth(depth: Tensor, pixels: Pixels) -> Tensor:
    """Return the least depth around pixels, 0 where some is unknown. (H, W), (N,) -> (N,)"""
    height, width = depth.shape
    offsets = range(-FRONT_PIXELS, FRONT_PIXELS + 1)
    least = depth[pixels.rows, pixels.columns]
    for down in offsets:
        rows = (pixels.rows + down).clamp(0, height - 1)
        for right in offsets:
            columns = (pixels.columns + right).clamp(0, width - 1)
            least = torch.minimum(least, depth[rows, columns])
    return least
