# SPDX-License-Identifier: Apache-2.0
"""Evidence of photographs for and against a surface that would fill a hole.

A mask contradicts what lies outside of the object. As of masks, single views are outvoted: some are
wrong. A mask that leaves out the rim of a hole, which photographs showed, is as wrong inside of it;
but where many do, one that leaves out more than the rim shows an opening.

The depth of a view contradicts what stands before the surface that it shows, and a view that shows
a surface at the place itself speaks for it. Views that see their surface best weigh most, and most
of the weight decides. Depth is that of the model, which lacks what the mesh lacks: a view may look
through the hole at the inner side of the surface behind it. No camera ever saw that, so it says
nothing about a small hole. Neither does depth of an object that the mesh has nowhere. A wide hole
that views look into may be an opening.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera, Pixels, pixels_of
from gaussian_splatting.data.masks import OVERVIEW_SIDE, KnownSurface, VisualHull
from sugar_extractors.mesh.holes.hole_shapes import Judgement, Rims
from sugar_scene.depth_view import FusedViews
from sugar_scene.regions import Box
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_scene.triangle_rasterizer import mesh_tensors, rasterize_triangles
from sugar_utils.device import float32_tensor

FRONT_VOXELS = 4.0  # by which a point stands before a surface: the reach of fused distances
FRONT_PIXELS = 2  # all pixels this near to a point have to show a deeper surface: edges are blurred
BEYOND_RIM_VOTES = 0.5  # of the masks that leave out more than the rim of a hole
MAJORITY = 0.5  # of the weight of the views whose depth tells something about a point


@dataclass(frozen=True)
class ViewEvidence:
    """Evidence of training views about a filling; hole filling calls :meth:`judge`."""

    views: FusedViews
    box: Box  # the foreground
    inner_voxel: float  # side of a voxel in the box, world units
    outer_voxel: float  # the same outside of it
    mesh: TriangleMesh  # whose holes are filled

    @torch.no_grad()
    def judge(self, points: np.ndarray, rims: Rims) -> Judgement:
        """Return how many views show the places of points, and whether views contradict them.

        Args:
            points: (N, 3) world units
            rims: Which of them lie on the mesh.
        """
        device = self.views.device
        positions = float32_tensor(points).to(device)
        n_views = torch.zeros(len(points), dtype=torch.int64, device=device)
        for camera in self.views.cameras:
            small = camera.reduced(OVERVIEW_SIDE)
            n_views += self._covers(small, pixels_of(small.coordinates(positions), small))
        is_contradicted = self._is_before_surfaces(positions, rims.is_wide)
        if self.views.hull is not None:
            is_contradicted |= self._is_outside_of_masks(self.views.hull, positions, rims)
        return Judgement(n_views.cpu().numpy(), is_contradicted.cpu().numpy())

    def _is_outside_of_masks(self, hull: VisualHull, positions: Tensor, rims: Rims) -> Tensor:
        """Return which points too many masks exclude, and some farther than the rim. (N,) bool"""
        parts = torch.from_numpy(rims.holes).to(positions.device)
        known = KnownSurface(parts, torch.from_numpy(rims.is_rim).to(positions.device))
        votes_beyond_rim, _ = hull.votes(positions, known)
        return ~hull.contains(positions) & (votes_beyond_rim > BEYOND_RIM_VOTES)

    def _is_before_surfaces(self, positions: Tensor, is_wide: np.ndarray) -> Tensor:
        """Return which points stand before the surfaces that most views show. (N, 3) -> (N,)

        Args:
            is_wide: Points against which an inner side of the mesh is evidence, too. (N,) bool
        """
        counts_always = torch.from_numpy(is_wide).to(positions.device)
        is_inner = self.box.contains(positions.cpu().numpy())
        voxels = np.where(is_inner, self.inner_voxel, self.outer_voxel)
        reach = FRONT_VOXELS * torch.from_numpy(voxels).to(positions)
        weight_before = torch.zeros_like(reach)
        weight_at_surface = torch.zeros_like(reach)
        render = self.views.renderer()
        for camera in self.views.cameras:
            view_points = camera.coordinates(positions)
            pixels = pixels_of(view_points, camera)
            if not bool(pixels.inside.any()):
                continue
            view = render(camera)
            surface = _least_depth(view.depth, pixels)
            distance = surface - view_points[:, 2]
            weight = view.weight[pixels.rows, pixels.columns] * (pixels.inside & (surface > 0))
            weight_at_surface += weight * (distance.abs() <= reach)
            small = camera.reduced(OVERVIEW_SIDE)
            small_pixels = pixels_of(small.coordinates(positions), small)
            is_evidence = self._shows_evidence(small, small_pixels)
            weight_before += weight * ((is_evidence | counts_always) & (distance > reach))
        return weight_before > MAJORITY * (weight_before + weight_at_surface)

    def _shows_evidence(self, small: Camera, pixels: Pixels) -> Tensor:
        """Return at which pixels the depth of a small view may contradict a filling. (N,) bool"""
        cosines = self._cosines[small.name][pixels.rows, pixels.columns]
        # Of an object all that is there should be in the mesh; beside it may be a background.
        is_evidence = cosines >= 0 if self.views.hull is None else cosines > 0
        return is_evidence | ~pixels.inside

    @functools.cached_property
    def _cosines(self) -> dict[str, Tensor]:
        """Cosines between the mesh and the lines of sight of each small view, by its name. (H, W)

        They are found when a hole is judged: most meshes have none that could be filled.
        """
        vertices, faces = mesh_tensors(self.mesh, self.views.device)
        cosines = {}
        for camera in self.views.cameras:
            hits = rasterize_triangles(vertices, faces, camera.reduced(OVERVIEW_SIDE))
            cosines[camera.name] = hits.cosines
        return cosines

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
