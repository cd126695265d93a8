# SPDX-License-Identifier: Apache-2.0
"""Comparison of a view with a neighbour: inputs of loss terms, and pictures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.core.random import draw_labels, generator
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.engine.memory_plan import MemoryPlan
from gaussian_splatting.engine.reporting.view_pictures import grey_picture
from gaussian_splatting.engine.stage import StepResources
from gaussian_splatting.engine.strips import ImageSplit, sort_into_tiles
from gaussian_splatting.engine.training_views import TrainingView, is_counted
from gaussian_splatting.engine.view_sampling import UploadedViews
from gaussian_splatting.rasterization import (
    WARP,
    Rasterizer,
    channel_background,
    project,
    rasterize,
)
from gaussian_splatting.rasterization.projection import PredictedCount
from sugar_scene.plane_kernels import (
    ALL_PATCHES,
    NO_PATCHES,
    PATCHES_WHERE_MET,
    ComparedMaps,
    ComparedPixels,
    depth_of_planes,
    pair_numbers,
)
from sugar_scene.reprojection import REACH, NeighborViews, ViewPair
from sugar_trainers.losses import edge_weights, gray_values
from sugar_utils.device import upload

GRADUATION = 500  # iterations until the tolerance is 1: at first, planes are off


@dataclass(frozen=True)
class Comparison:
    """Two views, and the pixels of the first that are compared."""

    numbers: Tensor  # see pair_numbers; (23,)
    gray: Tensor  # see gray_values; (H, W)
    neighbor_gray: Tensor  # (H', W')
    neighbor_depth: Tensor  # 0 where unknown. (H', W') world units
    pixels: Tensor  # columns and rows, in the order of rows. (n, 2) int32

    @functools.cached_property
    def places(self) -> Tensor:
        """Of the pixels in the flattened image. (n,) int64"""
        return (self.pixels[:, 1] * self.gray.shape[1] + self.pixels[:, 0]).long()

    def of(self, planes: Tensor, pixels: Tensor, patches: int) -> tuple[Tensor, ...]:
        """Compare pixels of the first view, (n, 2), that lie on planes, (n, 4).

        Returns:
            Weights, misses of the way to the neighbour and back in pixels, mismatches of patches
            (1 - NCC), and which patches were compared. (n,) each
        """
        maps = ComparedMaps(self.gray, self.neighbor_gray, self.neighbor_depth)
        return ComparedPixels.apply(planes, pixels, maps, self.numbers, patches)


def view_errors(
    comparison: Comparison, planes: Tensor, pixels: Tensor, photometric: float, geometric: float
) -> Tensor:
    """Errors of pixels times two factors, and by how well the views agree there. (n,)

    Photometric is 1 - NCC of the patches, geometric the pixels by which the way to the neighbour
    and back misses. Where a highlight moves, patches differ whatever the surface is: the
    photometric gradient fades there. Where they agree, there is little noise in it: it grows.
    """
    patches = PATCHES_WHERE_MET if photometric > 0 else NO_PATCHES
    weights, misses, mismatches, _ = comparison.of(planes, pixels, patches)
    return weights * (photometric * mismatches + geometric * misses)


@dataclass(frozen=True)
class Neighbor:
    """A neighbouring view, and the pixels that a view and it are compared by."""

    camera: Camera
    photograph: Tensor  # as the image store gives it
    pixels: Tensor  # of the view: columns and rows, in the order of rows. (n, 2) int32
    numbers: Tensor  # of the pair, see pair_numbers; (23,)


@dataclass(frozen=True)
class SurfaceInputs:
    """The inputs of a :class:`SurfaceView`, chosen before anything is rendered."""

    # The photograph with its mask, as the image store gives it; None where it has none and is that
    # of the view. (H, W, 4) uint8
    masked: Tensor | None
    neighbor: Neighbor | None  # None where nothing is compared, or the view has no neighbour


@dataclass(frozen=True)
class SurfaceView:
    """Rendered surface of a view; see ``TrainingView.surface``."""

    edges: Tensor  # see edge_weights; (H, W)
    comparison: Comparison | None  # None where the view has no neighbour
    # What was taken for the neighbour's number of tile intersections.
    predicted: tuple[PredictedCount, ...] = ()


class _PlanesDepth(NamedTuple):
    """Depth of a view's planes, with the predicted number of tile intersections."""

    depth: Tensor  # 0 where unknown. (H, W) world units
    predicted: tuple[PredictedCount, ...]


@dataclass(frozen=True)
class ComparisonRule:
    """Which pixels are compared."""

    n_pixels: int  # of a view; 0 compares nothing
    seed: int  # of the draws
    first: int = 0  # iteration at which planes begin to settle


class ViewComparer:
    """Chooses neighbour and pixels for the comparison of each view of a step.

    It is :class:`~gaussian_splatting.engine.stage.FurtherImages` of its stage.

    Args:
        device: Where photographs of neighbours are compared.
    """

    def __init__(
        self,
        neighbors: NeighborViews,
        images: ImageStore,
        extent: float,
        rule: ComparisonRule,
        rasterizer: Rasterizer = WARP,
        *,
        device: torch.device,
    ) -> None:
        self.reach = REACH * extent  # Gaussians up to this depth are planes
        self._neighbors = neighbors
        self._views = UploadedViews(images, device)
        self.rasterizer = rasterizer
        self._pixels = rule.n_pixels
        self._seed = rule.seed
        self._first = rule.first

    def inputs(self, view: TrainingView) -> SurfaceInputs:
        """Choose the neighbour of a view and the pixels to compare; read its photograph."""
        masked = view.target if view.target.shape[-1] == 4 else None
        return SurfaceInputs(masked, self._neighbor(view) if self._pixels else None)

    def surface_view(
        self, gaussians: Gaussians, view: TrainingView, resources: StepResources
    ) -> SurfaceView:
        """Edges of the image, and the neighbour for the planes of Gaussians.

        Args:
            view: Its surface is what :meth:`inputs` returned.
        """
        inputs: SurfaceInputs = view.surface
        gray = gray_of(view.target if inputs.masked is None else inputs.masked)
        neighbor = inputs.neighbor
        if neighbor is None:
            return SurfaceView(edge_weights(gray), None)
        planes = self._planes_depth(gaussians, resources, neighbor.camera)
        comparison = _comparison(gray, neighbor, planes.depth)
        return SurfaceView(edge_weights(gray), comparison, planes.predicted)

    def comparison(
        self, view: TrainingView, depth_of: Callable[[Camera], Tensor]
    ) -> Comparison | None:
        """Choose the neighbour of a view; None if it has none.

        Args:
            view: Pixels are chosen from those that the mask of its photograph counts.
            depth_of: Depth of the surface in a view, 0 where unknown. (H', W') world units
        """
        neighbor = self._neighbor(view)
        if neighbor is None:
            return None
        return _comparison(gray_of(view.target), neighbor, depth_of(neighbor.camera))

    def _neighbor(self, view: TrainingView) -> Neighbor | None:
        camera = self._drawn(view.camera, view.iteration, view.index)
        if camera is None:
            return None
        rng = generator(self._seed, "compared pixels", *draw_labels(view.iteration, view.index))
        pixels = spread_pixels(view.counted_pixels, view.target[..., 0], self._pixels, rng)
        tolerance = max(1.0, GRADUATION / max(1, view.iteration - self._first))
        return self._neighbor_of(view.camera, camera, pixels, tolerance)

    def _drawn(self, camera: Camera, iteration: int, view_index: int) -> Camera | None:
        """The neighbour that a view is compared with."""
        return self._neighbors.draw(camera.name, self._seed, iteration, view_index)

    def prefetch(self, camera: Camera, iteration: int, view_index: int) -> None:
        """Have the photograph of a view's neighbour decoded in the background."""
        neighbor = self._drawn(camera, iteration, view_index) if self._pixels else None
        if neighbor is not None:
            self._views.prefetch(neighbor)

    def send_ahead(self, camera: Camera, iteration: int, view_index: int) -> None:
        """Begin to send the photograph of a view's neighbour to the device."""
        neighbor = self._drawn(camera, iteration, view_index) if self._pixels else None
        if neighbor is not None:
            self._views.send_ahead(neighbor, 1.0)

    def _neighbor_of(
        self, camera: Camera, neighbor: Camera, pixels: Tensor, tolerance: float | None = None
    ) -> Neighbor:
        device = pixels.device
        _, photograph = self._views.get(neighbor, 1.0)
        numbers = pair_numbers(ViewPair.of(camera, neighbor), device, tolerance)
        return Neighbor(neighbor, photograph, pixels, numbers)

    @torch.no_grad()
    def pictures(
        self, gaussians: Gaussians, camera: Camera, split: ImageSplit
    ) -> dict[str, Tensor]:
        """Agreement of colour and depth with the best neighbour; white is best. (H, W, 3) uint8"""
        gray = gray_of(self._views.get(camera, 1.0)[1])
        correlation = torch.zeros_like(gray)
        weights = torch.zeros_like(gray)
        neighbors = self._neighbors.of(camera.name) or self._neighbors.among(camera)
        if neighbors:
            pixels = all_pixels(camera, gray.device)
            resources = StepResources(MemoryPlan(split))
            depth = self._planes_depth(gaussians, resources, neighbors[0]).depth
            neighbor = self._neighbor_of(camera, neighbors[0], pixels)
            comparison = _comparison(gray, neighbor, depth)
            output = rasterize(gaussians, camera, rgb=False, plane_reach=self.reach)
            planes = output.plane.reshape(-1, 4)
            weights, _, mismatches, matched = comparison.of(planes, pixels, ALL_PATCHES)
            correlation = (matched * (1 - mismatches)).view_as(gray)
            weights = weights.view_as(gray)
        maps = {"correlation": correlation, "cycle": weights}
        return {name: grey_picture(values).cpu() for name, values in maps.items()}

    @torch.no_grad()
    def _planes_depth(
        self, gaussians: Gaussians, resources: StepResources, camera: Camera
    ) -> _PlanesDepth:
        """Render the depth of a view's planes strip by strip."""
        projection = project(gaussians, camera, rgb=False, plane_reach=self.reach, graph=False)
        tiles, predicted = sort_into_tiles(projection, self.rasterizer, resources.intersections)
        behind = channel_background(projection)
        depth = projection.depths.new_empty(camera.height, camera.width)
        for rows in resources.memory.split.rows(camera.height):
            planes = self.rasterizer.blend_rows(projection.splats, tiles, behind, rows).pixels
            depth[rows.start : rows.stop] = depth_of_planes(planes, camera, rows.start)
        return _PlanesDepth(depth, predicted)


def _comparison(gray: Tensor, neighbor: Neighbor, depth: Tensor) -> Comparison:
    """Compare grey values of a view with a neighbour, whose depth is known."""
    neighbor_gray = gray_of(neighbor.photograph)
    return Comparison(neighbor.numbers, gray, neighbor_gray, depth, neighbor.pixels)


def gray_of(photograph: Tensor) -> Tensor:
    """Grey values of an image of the image store; masked pixels are marked."""
    return gray_values(photograph[..., :3], is_counted(photograph))


def all_pixels(camera: Camera, device: torch.device) -> Tensor:
    """Columns and rows of every pixel, row by row. (H W, 2) int32"""
    x = torch.arange(camera.width, dtype=torch.int32, device=device)
    y = torch.arange(camera.height, dtype=torch.int32, device=device)
    return torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1).reshape(-1, 2)


def spread_pixels(candidates: Tensor | None, image: Tensor, n: int, rng: torch.Generator) -> Tensor:
    """Columns and rows of at most ``n`` of the candidates, ascending by row. (n, 2) int32

    One is drawn from each of n equally long runs of the candidates, (H, W) bool or None for all of
    an image, so no two are equal.
    """
    places = None if candidates is None else candidates.reshape(-1).nonzero()[:, 0]
    total = image.numel() if places is None else len(places)
    width = image.shape[1]
    n = min(n, total)
    if n == 0:
        return torch.zeros(0, 2, dtype=torch.int32, device=image.device)
    # By NumPy, which takes half as long for so few numbers.
    runs = np.arange(n + 1) * total // n
    lengths = np.diff(runs)
    offsets = torch.rand(n, generator=rng, dtype=torch.float64, device="cpu").numpy()
    rows = runs[:-1] + np.minimum((offsets * lengths).astype(np.int64), lengths - 1)
    if places is None:
        pixels = np.stack([rows % width, rows // width], axis=1).astype(np.int32)
        return upload(torch.from_numpy(pixels), image.device)
    chosen = places[upload(torch.from_numpy(rows), image.device)]
    return torch.stack([chosen % width, chosen // width], dim=1).int()
