# SPDX-License-Identifier: Apache-2.0
"""The image terms of one view, one horizontal strip after the other, and the cut of the graph.

Gaussians are projected and sorted into tiles once. Each strip is blended with a halo of rows, its
shares of all terms are backpropagated to the projected splats, and everything as large as its
pixels is freed; one backward pass through the projection follows. Shares are divided by the size
of the whole image, so only the rounding of the sums depends on the number of strips.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gaussian_splatting import rasterization
from gaussian_splatting.engine.gradients import cut
from gaussian_splatting.engine.loss_terms import LossTerm
from gaussian_splatting.engine.training_views import ImageStrip, TrainingView
from gaussian_splatting.rasterization.projection import (
    IntersectionPrediction,
    PredictedCount,
)


@dataclass(frozen=True)
class ImageSplit:
    """Division of an image into strips: less memory, and a result that differs by rounding only."""

    strips: int = 1

    def rows(self, height: int) -> list[rasterization.Rows]:
        """The strips of an image, from the top, equally high but for one row."""
        n = min(self.strips, height)
        return [rasterization.Rows(height * i // n, height * (i + 1) // n) for i in range(n)]


WHOLE_IMAGE = ImageSplit()


class _SortedSplats(NamedTuple):
    """Splats in tiles, ready to be blended."""

    splats: Tensor
    tiles: object  # of the rasterizer's own kind
    background: Tensor


class PassResult(NamedTuple):
    """Values that terms report of the whole image, and the gradient of the centres."""

    values: dict[str, Tensor]  # detached scalars by name
    d_means2d: Tensor  # (N, 2) per pixel


class ViewPass:
    """One view, projected once and blended strip by strip.

    A pass owns everything that is as large as the image; :meth:`backpropagate` is its last call.

    Args:
        view: The view in training. Its background is black when None.
        farthest_depth_behind: Whether pixels that show nothing have the largest depth of all.
        intersections: Numbers of tile intersections at earlier visits; None: the host waits for
            the number of this view.
    """

    def __init__(
        self,
        projection: rasterization.Projection,
        view: TrainingView,
        split: ImageSplit,
        *,
        farthest_depth_behind: bool = False,
        rasterizer: rasterization.Rasterizer = rasterization.WARP,
        intersections: IntersectionPrediction | None = None,
    ) -> None:
        self._view = view
        self._split = split
        self._farthest_depth_behind = farthest_depth_behind
        self._rasterizer = rasterizer
        self._intersections = intersections
        self._projection: rasterization.Projection | None = projection
        self._sorted: _SortedSplats | None = None
        self._blended: rasterization.BlendedRows | None = None
        # What was taken for the number of intersections; to be checked with the step's numbers.
        self.predictions: tuple[PredictedCount, ...] = ()
        self.radii = projection.radii
        self.depths = projection.depths

    @functools.cached_property
    def visible(self) -> Tensor:
        """Gaussians that were not culled. (N,) bool"""
        return self.radii > 0

    def depth(self) -> Tensor:
        """Depth map of the whole image, without a gradient. (H, W) world units"""
        projection = self._open_projection()
        strips = self._split.rows(projection.camera.height)
        column = projection.layout.depth
        if len(strips) == 1:
            blended = self._blend(strips[0])
            # Kept for the terms, which blend the same rows.
            self._blended = blended
            return blended.pixels[..., column].clone()
        depth = projection.depths.new_empty(projection.camera.height, projection.camera.width)
        for rows in strips:
            depth[rows.start : rows.stop] = self._blend(rows).pixels[..., column]
        return depth

    def backpropagate(self, terms: Sequence[LossTerm], d_depth: Tensor | None = None) -> PassResult:
        """Backpropagate the gradient of all terms to the projection.

        Args:
            d_depth: A further gradient of the depth map. (H, W)
        """
        projection = self._open_projection()
        gradients = rasterization.SplatGradients.zeros(projection)
        halo = max(term.halo for term in terms)
        values: dict[str, Tensor] = {}
        for rows in self._split.rows(projection.camera.height):
            shares = self._backpropagate_strip(rows, halo, terms, d_depth, gradients)
            for name, share in shares.items():
                values[name] = values[name] + share if name in values else share
        self._projection = None
        self._sorted = None
        projection.backpropagate(gradients.means2d, gradients.splats)
        return PassResult(values, gradients.means2d)

    def _open_projection(self) -> rasterization.Projection:
        """The projection, which :meth:`backpropagate` lets go of."""
        if self._projection is None:
            raise ValueError("the pass is over: it was backpropagated")
        return self._projection

    def _sorted_splats(self) -> _SortedSplats:
        """Splats in tiles; sorted when they are needed first."""
        if self._sorted is None:
            projection = self._open_projection()
            tiles, self.predictions = sort_into_tiles(
                projection, self._rasterizer, self._intersections
            )
            background = rasterization.channel_background(
                projection,
                self._view.background,
                farthest_depth_behind=self._farthest_depth_behind,
            )
            self._sorted = _SortedSplats(projection.splats, tiles, background)
        return self._sorted

    def _blend(self, rows: rasterization.Rows) -> rasterization.BlendedRows:
        blended = self._blended
        self._blended = None
        if blended is not None:
            return blended
        return self._rasterizer.blend_rows(*self._sorted_splats(), rows)

    def _backpropagate_strip(
        self,
        rows: rasterization.Rows,
        halo: int,
        terms: Sequence[LossTerm],
        d_depth: Tensor | None,
        gradients: rasterization.SplatGradients,
    ) -> dict[str, Tensor]:
        """Add one strip's gradients of splats; return the values of its terms."""
        projection = self._open_projection()
        rows_with_halo = rows.widened(halo, projection.camera.height)
        blended = self._blend(rows_with_halo)
        counted_rows = slice(rows.start - rows_with_halo.start, rows.stop - rows_with_halo.start)
        strip = ImageStrip(
            self._view,
            rows_with_halo,
            counted_rows,
            _map_leaves(blended.pixels, projection.layout),
        )
        values: dict[str, Tensor] = {}
        for term in terms:
            values |= term.backpropagate(strip)
        d_pixels = _pixel_gradient(strip, blended.pixels, projection.layout)
        blended = replace(blended, pixels=d_pixels)
        if d_depth is not None:
            d_pixels[counted_rows, :, projection.layout.depth] += d_depth[rows.start : rows.stop]
        del strip
        self._rasterizer.backpropagate_rows(
            projection.splats,
            self._sorted_splats().tiles,
            blended,
            d_pixels,
            torch.zeros_like(blended.transmittance),
            gradients,
        )
        return values


def sort_into_tiles(
    projection: rasterization.Projection,
    rasterizer: rasterization.Rasterizer,
    intersections: IntersectionPrediction | None,
) -> tuple[Any, tuple[PredictedCount, ...]]:
    """Sort splats into tiles; the host waits for their number where it cannot be predicted.

    Args:
        intersections: Numbers at earlier visits of views; None: the host waits.

    Returns:
        Tiles of the rasterizer's own kind, and the prediction that their lists were made with, to
        be checked with the step's numbers; empty if their length is exact.
    """
    camera = projection.camera
    n_gaussians = len(projection.radii)
    if intersections is not None:
        projection.prediction = intersections.predict(camera, n_gaussians)
    tiles = rasterizer.build_tile_lists(projection)
    prediction = projection.prediction
    if prediction is not None and prediction.excess is not None:
        return tiles, (prediction,)
    if intersections is not None and isinstance(tiles, rasterization.TileLists):
        intersections.record(camera, n_gaussians, tiles.ids.shape[0])
    return tiles, ()


class _MapColumns(NamedTuple):
    """Where the channels of a rendered map are among all blended channels."""

    name: str  # key of ``ImageStrip.maps``
    start: int
    width: int


def _map_columns(layout: rasterization.ChannelLayout) -> list[_MapColumns]:
    """The maps that are rendered."""
    possible = (
        ("color", layout.rgb, 3),
        ("depth", layout.depth, 1),
        ("normal_xy", layout.normal, 2),
        ("plane", layout.plane, 4),
        ("features", layout.features, layout.n_features),
    )
    columns = []
    for name, start, width in possible:
        if start is not None:
            columns.append(_MapColumns(name, start, width))
    return columns


def _map_leaves(pixels: Tensor, layout: rasterization.ChannelLayout) -> dict[str, Tensor]:
    """Leaves with the values of the rendered maps; they share the memory of the channels."""
    leaves = {}
    for name, start, width in _map_columns(layout):
        channels = pixels[..., start] if name == "depth" else pixels[..., start : start + width]
        leaves[name] = cut(channels)
    return leaves


def _pixel_gradient(
    strip: ImageStrip, pixels: Tensor, layout: rasterization.ChannelLayout
) -> Tensor:
    """Gradients of all maps, written over the blended channels; that of a single one. (R, W, C)"""
    columns = _map_columns(layout)
    gradients = {column: strip.maps[column.name].grad for column in columns}
    if len(gradients) == 1:
        (gradient,) = gradients.values()
        if gradient is not None:
            return gradient.reshape(pixels.shape)
    n_written = sum(c.width for c, gradient in gradients.items() if gradient is not None)
    if n_written < pixels.shape[-1]:
        pixels.zero_()
    for column, gradient in gradients.items():
        if gradient is not None:
            channels = pixels[..., column.start : column.start + column.width]
            channels.copy_(gradient.reshape(channels.shape))
    return pixels
