# SPDX-License-Identifier: Apache-2.0
"""Comparing a view with a neighbour: what terms see beside a render, and pictures of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gaussian_splatting.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.engine.reporting.view_findings import grey_picture
from gaussian_splatting.engine.strips import ImageSplit
from gaussian_splatting.engine.training_views import is_counted
from gaussian_splatting.rasterization import WARP, Rasterizer, rasterize
from sugar_scene.reprojection import REACH, NeighborViews, ViewPair
from sugar_trainers.terms import (
    Comparison,
    SurfaceView,
    all_pixels,
    gray_of,
    planes_depth_map,
    spread_pixels,
    surface_view,
)
from sugar_utils.device import upload
from sugar_utils.random import draw_labels, generator


class ViewComparer:
    """Finds for each view of a step the neighbour and the pixels that it is compared by.

    Attributes:
        reach: Gaussians up to this depth are planes. World units
    """

    def __init__(
        self,
        neighbors: NeighborViews,
        images: ImageStore,
        extent: float,
        pixels: int,
        seed: int,
        rasterizer: Rasterizer = WARP,
    ) -> None:
        self.reach = REACH * extent
        self._neighbors = neighbors
        self._images = images
        self._pixels = pixels
        self._seed = seed
        self._rasterizer = rasterizer

    def surface_view(
        self,
        gaussians: Gaussians,
        camera: Camera,
        photograph: Tensor,
        split: ImageSplit,
        iteration: int,
        view_index: int,
    ) -> SurfaceView:
        """What terms see beside a render; arguments as of :meth:`comparison`."""
        compared = None
        if self._pixels:
            depth_of = partial(self._planes_depth, gaussians, split)
            compared = self.comparison(camera, photograph, depth_of, iteration, view_index)
        return surface_view(gray_of(photograph), compared)

    def comparison(
        self,
        camera: Camera,
        photograph: Tensor,
        depth_of: Callable[[Camera], Tensor],
        iteration: int,
        view_index: int,
    ) -> Comparison | None:
        """What a view is compared with; None where it has no neighbour.

        Args:
            photograph: (H, W, 3), or (H, W, 4) uint8 with a mask of the pixels to choose from
            depth_of: Depth of the surface in a view, 0 where unknown. (H', W') world units
            iteration: Absolute; neighbour and pixels follow from it, the seed and ...
            view_index: ... the number of the view in its step.
        """
        neighbor = self._neighbors.draw(camera.name, self._seed, iteration, view_index)
        if neighbor is None:
            return None
        gray, counted = gray_of(photograph), is_counted(photograph)
        counted = torch.ones_like(gray, dtype=torch.bool) if counted is None else counted
        rng = generator(self._seed, "compared pixels", *draw_labels(iteration, view_index))
        pixels = spread_pixels(counted, camera.width, self._pixels, rng)
        return self._compared(camera, gray, neighbor, pixels, depth_of(neighbor))

    @torch.no_grad()
    def pictures(
        self, gaussians: Gaussians, camera: Camera, split: ImageSplit
    ) -> dict[str, Tensor]:
        """Where the best neighbour's photograph and depth agree with a view: white is agreement.

        Returns:
            ``correlation`` and ``cycle``. (H, W, 3) uint8 each, on the CPU
        """
        gray = gray_of(upload(self._images.get(camera), gaussians.means.device))
        shape = (camera.height, camera.width)
        correlation, weights = gray.new_zeros(shape), gray.new_zeros(shape)
        neighbors = self._neighbors.of(camera.name) or self._neighbors.among(camera)
        if neighbors:
            pixels = all_pixels(camera, gray.device)
            depth = self._planes_depth(gaussians, split, neighbors[0])
            comparison = self._compared(camera, gray, neighbors[0], pixels, depth)
            output = rasterize(gaussians, camera, rgb=False, plane_reach=self.reach)
            planes = output.plane.reshape(-1, 4)
            mismatch, counted = comparison.mismatch(planes, pixels)
            correlation = torch.where(counted, 1 - mismatch, 0.0).reshape(shape)
            weights = comparison.cycle(planes, pixels)[1].reshape(shape)
        maps = {"correlation": correlation, "cycle": weights}
        return {name: grey_picture(values).cpu() for name, values in maps.items()}

    def _planes_depth(self, gaussians: Gaussians, split: ImageSplit, camera: Camera) -> Tensor:
        return planes_depth_map(gaussians, camera, self.reach, split, self._rasterizer)

    def _compared(
        self, camera: Camera, gray: Tensor, neighbor: Camera, pixels: Tensor, depth: Tensor
    ) -> Comparison:
        other = gray_of(upload(self._images.get(neighbor), gray.device))
        return Comparison(ViewPair.of(camera, neighbor), gray, other, depth, pixels)
