# SPDX-License-Identifier: Apache-2.0
"""The image terms of one view, one horizontal strip after the other, and the cut of the graph.

Gaussians are projected and sorted into tiles once. Each strip is blended with a halo of rows, its
shares of all terms are backpropagated to the projected splats, and everything as large as its
pixels is freed; one backward pass through the projection follows. Shares are divided by the size
of the whole image, so only the rounding of the sums depends on the number of strips.

Each term is differentiated down to the cut as soon as it is known and its graph is freed; the
gradients meet in the leaves at the cut, and the shared half runs backward once with their sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gaussian_splatting import rasterization
from gaussian_splatting.rasterization.projection import (
    IntersectionPrediction,
    PredictedIntersections,
)
from sugar_utils.device import constants


@dataclass(frozen=True)
class ImageSplit:
    """How the memory of one view is saved; the result does not depend on it but for rounding."""

    strips: int = 1

    def rows(self, height: int) -> list[rasterization.Rows]:
        """The strips of an image, from the top, equally high but for one row."""
        n = min(self.strips, height)
        return [rasterization.Rows(height * i // n, height * (i + 1) // n) for i in range(n)]


WHOLE_IMAGE = ImageSplit()


@dataclass(frozen=True)
class StripMaps:
    """What a term sees of a strip: leaves that collect gradients, None where not rendered."""

    shown: rasterization.Rows
    counted: slice  # rows of these maps that count; the others are their neighbours
    height: int
    image: Tensor | None = None  # colour, (R, W, 3)
    depth: Tensor | None = None  # depth along the view axis, (R, W) world units
    # Camera-space x and y of the normals; see ``complete_normals``, (R, W, 2).
    normal_xy: Tensor | None = None
    plane: Tensor | None = None  # blended normals and distances of the Gaussians' planes, (R, W, 4)
    features: Tensor | None = None  # blended free features, (R, W, F)

    @property
    def share(self) -> float:
        return (self.counted.stop - self.counted.start) / self.height

    def part_of(self, photograph: Tensor) -> Tensor:
        """The shown rows of a photograph as floats in [0, 1]. (H, W, 3) -> (R, W, 3)"""
        rows = photograph[self.shown.start : self.shown.stop]
        return rows / 255.0 if rows.dtype == torch.uint8 else rows


@dataclass(frozen=True)
class ImageTerm:
    halo: int
    evaluate: Callable[[StripMaps], tuple[Tensor, dict[str, Tensor]]]
    weight: float = 1.0


class ViewPass:
    """One view, projected once and blended strip by strip.

    Args:
        color: Colour behind the image; black when None. (3,)
        pairs: What views had when they were seen last; None: the host waits for the number.
    """

    def __init__(
        self,
        projection: rasterization.Projection,
        color: Tensor | None,
        split: ImageSplit,
        *,
        farthest_depth_behind: bool = False,
        rasterizer: rasterization.Rasterizer = rasterization.WARP,
        pairs: IntersectionPrediction | None = None,
    ) -> None:
        self._color = color
        self._split = split
        self._farthest_depth_behind = farthest_depth_behind
        self._rasterizer = rasterizer
        self._pairs = pairs
        self.guess: PredictedIntersections | None = None
        self._projection: rasterization.Projection | None = projection
        self._tiles: Any = None
        self._background: Tensor | None = None
        self._blended: rasterization.BlendedRows | None = None
        self._n_pairs: int | None = None
        self.radii = projection.radii
        self.depths = projection.depths

    @functools.cached_property
    def visible(self) -> Tensor:
        """Gaussians that were not culled. (N,) bool"""
        return self.radii > 0

    def count(self) -> int:
        """How many Gaussians the view shows; the host waits, and learns the number of pairs."""
        counts = self._projection.tile_counts
        shown, self._n_pairs = torch.stack([self.visible.sum(), counts.sum()]).tolist()
        return shown

    def depth(self) -> Tensor:
        """Depth map of the whole image, without a gradient. (H, W) world units"""
        projection = self._prepare()
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

    def backpropagate(
        self, terms: Sequence[ImageTerm], d_depth: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Send the gradient of all terms to what was projected; the last thing a pass does.

        ``d_depth`` is a further gradient of the depth map, (H, W). Returns what the terms report of
        the whole image, and the gradient of the centres. (N, 2)
        """
        projection = self._prepare()
        gradients = rasterization.SplatGradients.zeros(projection)
        halo = max(term.halo for term in terms)
        totals: dict[str, Tensor] = {}
        for rows in self._split.rows(projection.camera.height):
            found = self._backpropagate_strip(rows, halo, terms, d_depth, gradients)
            for name, share in found.items():
                totals[name] = totals[name] + share if name in totals else share
        self._projection = self._tiles = self._background = None
        torch.autograd.backward(
            [projection.means2d, projection.splats], [gradients.means2d, gradients.splats]
        )
        return totals, gradients.means2d

    def _prepare(self) -> rasterization.Projection:
        """Sort into tiles, if that is still to be done."""
        if self._tiles is None:
            self._tiles = self._sort_into_tiles(self._projection)
            self._background = rasterization.channel_background(
                self._projection, self._color, farthest_depth_behind=self._farthest_depth_behind
            )
        return self._projection

    def _sort_into_tiles(self, projection: rasterization.Projection) -> Any:
        projection.n_pairs = self._n_pairs
        forecast = self._pairs
        if self._n_pairs is None and forecast is not None:
            projection.guess = forecast.guess(projection.camera, len(projection.radii))
        tiles = self._rasterizer.build_tile_lists(projection)
        if projection.guess is not None and projection.guess.excess is not None:
            self.guess = projection.guess
        elif forecast is not None and isinstance(tiles, rasterization.TileLists):
            forecast.note(projection.camera, len(projection.radii), tiles.ids.shape[0])
        return tiles

    def _blend(self, rows: rasterization.Rows) -> rasterization.BlendedRows:
        kept = self._blended
        self._blended = None
        if kept is not None:
            return kept
        return self._rasterizer.blend_rows(
            self._projection.splats, self._tiles, self._background, rows
        )

    def _backpropagate_strip(
        self,
        rows: rasterization.Rows,
        halo: int,
        terms: Sequence[ImageTerm],
        d_depth: Tensor | None,
        gradients: rasterization.SplatGradients,
    ) -> dict[str, Tensor]:
        """Add one strip's gradients of splats, and return what its terms report."""
        layout = self._projection.layout
        height = self._projection.camera.height
        shown = rows.widened(halo, height)
        blended = self._blend(shown)
        pixels = blended.pixels
        counted = slice(rows.start - shown.start, rows.stop - shown.start)
        # They share the memory of the blended channels.
        leaves = {
            name: cut(pixels[..., start] if name == "depth" else pixels[..., start : start + width])
            for name, (start, width) in _columns(layout).items()
        }
        maps = StripMaps(shown=shown, counted=counted, height=height, **leaves)
        totals: dict[str, Tensor] = {}
        for term in terms:
            loss, shares = term.evaluate(maps)
            backpropagate_weighted([loss], [term.weight])
            totals.update({name: share.detach() for name, share in shares.items()})
            # Its graph would live on beside that of the next term.
            del loss, shares
        d_pixels = _pixel_gradient(maps, pixels, layout)
        if d_depth is not None:
            d_pixels[counted, :, layout.depth] += d_depth[rows.start : rows.stop]
        del maps, leaves, pixels
        self._rasterizer.backpropagate_rows(
            self._projection.splats,
            self._tiles,
            self._background,
            blended,
            d_pixels,
            torch.zeros_like(blended.transmittance),
            gradients,
        )
        return totals


def _columns(layout: rasterization.ChannelLayout) -> dict[str, tuple[int, int]]:
    """First channel, and how many there are, of each of the maps that are rendered."""
    found = {
        "image": (layout.rgb, 3),
        "depth": (layout.depth, 1),
        "normal_xy": (layout.normal, 2),
        "plane": (layout.plane, 4),
        "features": (layout.features, layout.n_features),
    }
    return {name: place for name, place in found.items() if place[0] is not None}


def _pixel_gradient(maps: StripMaps, pixels: Tensor, layout: rasterization.ChannelLayout) -> Tensor:
    """Gradients of all blended channels. (R, W, C)"""
    leaves = [(*place, getattr(maps, name)) for name, place in _columns(layout).items()]
    known = [(start, width, leaf.grad) for start, width, leaf in leaves if leaf.grad is not None]
    if sum(width for _, width, _ in known) < pixels.shape[-1]:
        pixels.zero_()
    for start, width, gradient in known:
        channels = pixels[..., start : start + width]
        channels.copy_(gradient.reshape(channels.shape))
    return pixels


def cut(tensor: Tensor) -> Tensor:
    """A leaf with the values of ``tensor`` that collects gradients for it."""
    return tensor.detach().requires_grad_(True)


def backpropagate_weighted(values: Sequence[Tensor], weights: Sequence[float]) -> None:
    """Backpropagate the weighted sum of scalars; the sum itself is never formed."""
    chosen = constants(tuple(map(float, weights)), values[0].device)
    torch.autograd.backward(list(values), [w.to(v) for v, w in zip(values, chosen, strict=True)])


def backward_through(tensors: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Send the gradients collected by ``leaves`` on through the tensors they were cut from."""
    pairs = [
        (tensor, leaf.grad)
        for tensor, leaf in zip(tensors, leaves, strict=True)
        if leaf is not tensor and leaf.grad is not None and tensor.requires_grad
    ]
    if pairs:
        torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
