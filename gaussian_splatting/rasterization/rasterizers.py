# SPDX-License-Identifier: Apache-2.0
"""The built-in rasterizer, and the interface that other packages' rasterizers implement.

Projection is always ours. A rasterizer sorts splats into tiles once per view, blends rows of the
image, which need not end where tiles do, and propagates gradients back. A pixel has the same bits
whatever rows are blended with it.

Sorting is by tile, then depth, then index, the same on every device. Each splat owns a run of
intersections, one for each tile it reaches. Splats are sorted by depth and their runs laid out in
that order; a stable sort of the intersections by tile does the rest.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.rasterization.blend_cpu import (
    sort_intersections,
    sort_splats,
    tile_kernels,
)
from gaussian_splatting.rasterization.blend_cuda import block_kernels
from gaussian_splatting.rasterization.blend_inputs import (
    BackwardInputs,
    BlendKernels,
    ForwardInputs,
    SumInputs,
)
from gaussian_splatting.rasterization.gradient_sums_cuda import SPLAT_COLUMNS
from gaussian_splatting.rasterization.projection import MIN_ITEMS, Projection
from gaussian_splatting.rasterization.projection_kernels import TILE, n_tiles
from gaussian_splatting.rasterization.tile_coverage import (
    list_tiles,
    place_intersections,
    start_runs,
)
from sugar_utils.errors import UserError
from sugar_utils.warp_launch import as_array, launch, on_stream_of

_MAX_INTERSECTIONS = 2**31 - 1


@dataclass(frozen=True)
class TileLists:
    """Splats that each tile blends, front to back."""

    offsets: Tensor  # start of each tile's run in ``ids``, (tiles + 1,) int32
    # Splats by tile, then depth, then index; M may exceed the intersections, (M,) int32.
    ids: Tensor
    first_intersections: Tensor  # start of each splat's run in ``places``, (N,) int32
    counts: Tensor  # length of the run, (N,) int32
    places: Tensor  # places of a splat in ``ids``, ascending within its run, (M,) int32
    across: int  # tiles in a row
    width: int  # image width in pixels
    height: int  # image height in pixels


class _SplatRuns(NamedTuple):
    """Splats by depth with the runs of their intersections."""

    order: Tensor  # splats by depth, (N,) int32 or int64
    first_intersections: Tensor  # start of each splat's run, (N,) int32
    n_intersections: int


class _SortedLists(NamedTuple):
    """Tile lists as of :class:`TileLists`."""

    offsets: Tensor  # (tiles + 1,) int32
    ids: Tensor  # (M,) int32
    places: Tensor  # (M,) int32


def build_tile_lists(projection: Projection, *, blocks: bool | None = None) -> TileLists:
    """Sort the (tile, splat) intersections of a projection; ``blocks`` as of ``blend_rows``.

    Raises:
        UserError: There are more intersections than 32 bits can number.
    """
    camera = projection.camera
    counts = projection.tile_counts
    across, down = n_tiles(camera)
    if blocks is None:
        blocks = counts.device.type != "cpu"
    # Native code reads the number of intersections at no cost.
    runs = _runs_by_sort(projection) if blocks else _runs_natively(projection)
    n_intersections = runs.n_intersections
    if n_intersections > _MAX_INTERSECTIONS:
        raise UserError(
            f"{camera.name} ({camera.width} x {camera.height}) needs {n_intersections} "
            "(tile, Gaussian) pairs, more than 2^31; render a smaller image, or prune Gaussians "
            "that cover it all."
        )
    # The radix sort needs as much room again behind its keys.
    capacity = 2 * n_intersections if blocks else n_intersections
    tiles = _ints(capacity, counts.device)
    if blocks and projection.prediction is not None:
        # Unused entries carry a tile index behind all tiles.
        tiles.fill_(across * down)
    owners = _ints(n_intersections if blocks else 0, counts.device)
    inputs = [
        across,
        projection.splats.detach(),
        as_array(projection.tile_rects, wp.vec4i),
        runs.first_intersections,
        tiles[:n_intersections],
        owners,
    ]
    launch(list_tiles, counts.shape[0], inputs, min_items=MIN_ITEMS)
    if blocks:
        lists = _sort_by_radix(tiles, owners, across * down)
    else:
        lists = _sort_natively(runs.order, counts, tiles, across * down)
    return TileLists(
        offsets=lists.offsets,
        ids=lists.ids,
        first_intersections=runs.first_intersections,
        counts=counts,
        places=lists.places,
        across=across,
        width=camera.width,
        height=camera.height,
    )


def _ints(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.int32, device=device)


def _runs_natively(projection: Projection) -> _SplatRuns:
    """Sort splats that reach a tile by depth, in native code on the CPU."""
    counts = projection.tile_counts
    device = counts.device
    n = counts.shape[0]
    order = _ints(n, device)
    spare = _ints(n, device)
    first_intersections = _ints(n, device)
    total = torch.zeros(1, dtype=torch.int64, device=device)
    inputs = [projection.depths, counts, order, spare, first_intersections, total]
    launch(sort_splats, 1, inputs)
    return _SplatRuns(order, first_intersections, int(total))


def _runs_by_sort(projection: Projection) -> _SplatRuns:
    """Sort splats by depth on any device."""
    counts = projection.tile_counts
    order = projection.depths.sort(stable=True).indices
    ends = counts[order].cumsum(0)
    excess = torch.empty(1, device=counts.device)
    prediction = projection.prediction
    if counts.shape[0] == 0:
        n_intersections = 0
    elif prediction is not None:
        n_intersections = prediction.capacity
        prediction.excess = excess[0]
    else:
        # The one number that the host has to wait for: it is the size of all later buffers.
        n_intersections = int(ends[-1])
    first_intersections = torch.empty_like(counts)
    inputs = [order, ends, counts, n_intersections, first_intersections, excess]
    launch(start_runs, counts.shape[0], inputs, min_items=MIN_ITEMS)
    return _SplatRuns(order, first_intersections, n_intersections)


def _sort_natively(order: Tensor, counts: Tensor, tiles: Tensor, n_all_tiles: int) -> _SortedLists:
    """Sort intersections by tile, in native code on the CPU."""
    n_intersections = tiles.shape[0]
    device = tiles.device
    offsets = torch.empty(2, n_all_tiles + 1, dtype=torch.int32, device=device)
    ids = _ints(n_intersections, device)
    places = _ints(n_intersections, device)
    launch(sort_intersections, 1, [counts, order, tiles, offsets, ids, places])
    return _SortedLists(offsets[0], ids, places)


def _sort_by_radix(tiles: Tensor, owners: Tensor, n_all_tiles: int) -> _SortedLists:
    """Sort intersections by tile on any device; those of a tile keep the order of their runs."""
    device = tiles.device
    n_intersections = owners.shape[0]
    numbers = _ints(2 * n_intersections, device)
    torch.arange(n_intersections, dtype=torch.int32, device=device, out=numbers[:n_intersections])
    keys = wp.from_torch(tiles)
    values = wp.from_torch(numbers)
    with on_stream_of(device):
        wp.utils.radix_sort_pairs(keys, values, n_intersections, end_bit=n_all_tiles.bit_length())
    offsets = _ints(n_all_tiles + 1, device)
    ids = _ints(n_intersections, device)
    places = _ints(n_intersections, device)
    inputs = [numbers, tiles, owners, places, ids, offsets]
    launch(place_intersections, n_intersections + 1, inputs, min_items=MIN_ITEMS)
    return _SortedLists(offsets, ids, places)


class Rows(NamedTuple):
    """A range of pixel rows."""

    start: int
    stop: int

    def widened(self, halo: int, height: int) -> Rows:
        """Add up to ``halo`` rows on each side, inside an image of ``height`` rows."""
        return Rows(max(0, self.start - halo), min(height, self.stop + halo))


@dataclass(frozen=True)
class BlendedRows:
    """Pixels of some rows, with the state of their backward pass."""

    pixels: Tensor  # blended channels, (R, W, C)
    transmittance: Tensor  # at the end of each ray, (R, W)
    last: Tensor  # place in the tile lists of the last splat that each pixel blended, (R, W) int32
    rows: Rows
    background: Tensor  # value behind everything, (C,)


class ViewSize(Protocol):
    """Anything with the size of an image in pixels, as tile lists of any rasterizer have it."""

    @property
    def width(self) -> int: ...

    @property
    def height(self) -> int: ...


Tiles = TypeVar("Tiles", bound=ViewSize)
Blended = TypeVar("Blended", bound=BlendedRows)


@dataclass(frozen=True)
class SplatGradients:
    """Gradients of splats, to which every strip of an image adds its part."""

    means2d: Tensor  # (N, 2) per pixel
    splats: Tensor  # columns as in ``projection_kernels``, (N, 9 + C)

    @classmethod
    def zeros(cls, projection: Projection) -> SplatGradients:
        """Return zero gradients for the splats of a projection."""
        return cls(torch.zeros_like(projection.means2d), torch.zeros_like(projection.splats))


def blend_rows(
    splats: Tensor,
    tiles: TileLists,
    background: Tensor,
    rows: Rows,
    *,
    blocks: bool | None = None,
    front_transmittance: float = 0.0,
) -> BlendedRows:
    """Blend splats front to back over a background, without a gradient.

    Args:
        splats: As projected, C channels each. (N, 9 + C)
        background: Value behind everything. (C,) float32
        blocks: Run the kernels of GPUs, which a CPU can do as well, slowly; None: on a GPU.
        front_transmittance: A pixel blends nothing more once its transmittance is below; 0: all.
    """
    device = splats.device
    shape = (rows.stop - rows.start, tiles.width)
    n_channels = background.shape[0]
    pixels = torch.empty(*shape, n_channels, device=device)
    transmittance = torch.empty(shape, device=device)
    last = torch.empty(shape, dtype=torch.int32, device=device)
    first, count = _tiles_of(rows, tiles)
    inputs = ForwardInputs(
        first_tile=first,
        width=tiles.width,
        top_row=rows.start,
        end_row=rows.stop,
        tiles_x=tiles.across,
        front_transmittance=front_transmittance,
        offsets=tiles.offsets,
        ids=tiles.ids,
        splats=splats.detach(),
        background=background,
        image=pixels,
        transmittance=transmittance,
        last=last,
    )
    _kernels(device, blocks, n_channels).launch_forward(count, inputs)
    return BlendedRows(pixels, transmittance, last, rows, background)


def backpropagate_rows(
    splats: Tensor,
    tiles: TileLists,
    blended: BlendedRows,
    d_pixels: Tensor,
    d_transmittance: Tensor,
    gradients: SplatGradients,
    *,
    blocks: bool | None = None,
) -> None:
    """Add the gradients of some rows to those of splats, always in the same order.

    Args:
        splats: As given to :func:`blend_rows`. (N, 9 + C)
        blended: Result of :func:`blend_rows`; its pixels are not read.
        d_pixels: (R, W, C)
        d_transmittance: (R, W)
        blocks: As of :func:`blend_rows`.
    """
    device = splats.device
    rows = blended.rows
    n_channels = blended.background.shape[0]
    kernels = _kernels(device, blocks, n_channels)
    first, count = _tiles_of(rows, tiles)
    n_rows = _n_intersections(tiles, first, count)
    gradient_sums = torch.empty(n_rows, SPLAT_COLUMNS + n_channels, device=device)
    inputs = BackwardInputs(
        first_tile=first,
        width=tiles.width,
        top_row=rows.start,
        end_row=rows.stop,
        tiles_x=tiles.across,
        offsets=tiles.offsets,
        ids=tiles.ids,
        splats=splats.detach(),
        background=blended.background,
        transmittance=blended.transmittance,
        last=blended.last,
        d_image=d_pixels.contiguous(),
        d_transmittance=d_transmittance.contiguous(),
        gradient_sums=gradient_sums,
    )
    kernels.launch_backward(count, inputs)
    sums = SumInputs(
        first_tile=first,
        end_tile=first + count,
        offsets=tiles.offsets,
        first_intersections=tiles.first_intersections,
        counts=tiles.counts,
        places=tiles.places,
        gradient_sums=gradient_sums,
        d_means2d=gradients.means2d,
        d_splats=gradients.splats,
    )
    kernels.launch_sums(splats.shape[0], sums)


def _kernels(device: torch.device, blocks: bool | None, n_channels: int) -> BlendKernels:
    if blocks is None:
        blocks = device.type != "cpu"
    return block_kernels(n_channels) if blocks else tile_kernels(n_channels)


def _tiles_of(rows: Rows, tiles: TileLists) -> tuple[int, int]:
    """First tile of some rows, and the number of tiles."""
    top = rows.start // TILE
    bottom = -(-rows.stop // TILE)
    return top * tiles.across, (bottom - top) * tiles.across


def _n_intersections(tiles: TileLists, first: int, count: int) -> int:
    """Intersections in some tiles; unless these are all tiles, the host waits for two numbers."""
    if count == tiles.offsets.shape[0] - 1:
        return tiles.ids.shape[0]
    return int(tiles.offsets[first + count] - tiles.offsets[first])


class Rasterizer(abc.ABC, Generic[Tiles, Blended]):
    """Interface of a rasterizer; see :class:`WarpRasterizer` for the built-in one.

    Its three steps sort a view's splats into tiles, blend some rows of the image without a
    gradient, and add the gradients of some rows to those of splats.
    """

    name: str  # as the flag ``--rasterizer`` spells it
    ends_splats: bool = False  # whether it can render Gaussians with ``cutoff_deviations``

    @abc.abstractmethod
    def build_tile_lists(self, projection: Projection) -> Tiles:
        """Return the state of blending a view; opaque to callers."""

    @abc.abstractmethod
    def blend_rows(self, splats: Tensor, tiles: Tiles, background: Tensor, rows: Rows) -> Blended:
        """Blend splats, (N, 9 + C), over a background, (C,), without a gradient."""

    @abc.abstractmethod
    def backpropagate_rows(
        self,
        splats: Tensor,
        tiles: Tiles,
        blended: Blended,
        d_pixels: Tensor,
        d_transmittance: Tensor,
        gradients: SplatGradients,
    ) -> None:
        """Add the gradients of some rows to those of splats.

        Args:
            blended: Result of :meth:`blend_rows`; its pixels may have been overwritten since.
            d_pixels: (R, W, C)
            d_transmittance: (R, W)
        """


class WarpRasterizer(Rasterizer[TileLists, BlendedRows]):
    """The built-in rasterizer: any device, the same bits on every run."""

    name = "warp"
    ends_splats = True

    def __init__(self, blocks: bool | None = None, front_transmittance: float = 0.0) -> None:
        self.blocks = blocks  # both as of :func:`blend_rows`
        self.front_transmittance = front_transmittance

    def build_tile_lists(self, projection: Projection) -> TileLists:
        """See :func:`build_tile_lists`."""
        return build_tile_lists(projection, blocks=self.blocks)

    def blend_rows(
        self, splats: Tensor, tiles: TileLists, background: Tensor, rows: Rows
    ) -> BlendedRows:
        """See :func:`blend_rows`."""
        return blend_rows(
            splats,
            tiles,
            background,
            rows,
            blocks=self.blocks,
            front_transmittance=self.front_transmittance,
        )

    def backpropagate_rows(
        self,
        splats: Tensor,
        tiles: TileLists,
        blended: BlendedRows,
        d_pixels: Tensor,
        d_transmittance: Tensor,
        gradients: SplatGradients,
    ) -> None:
        """See :func:`backpropagate_rows`."""
        backpropagate_rows(
            splats,
            tiles,
            blended,
            d_pixels,
            d_transmittance,
            gradients,
            blocks=self.blocks,
        )


WARP = WarpRasterizer()


class _Blend(torch.autograd.Function):
    """Centres, splats, background, tile lists, rasterizer -> pixels and transmittance."""

    @staticmethod
    def forward(
        ctx,
        means2d: Tensor,
        splats: Tensor,
        background: Tensor,
        tiles: ViewSize,
        rasterizer: Rasterizer,
    ):
        blended = rasterizer.blend_rows(splats, tiles, background, Rows(0, tiles.height))
        ctx.rasterizer = rasterizer
        ctx.tiles = tiles
        ctx.n_splats = means2d.shape[0]
        # Autograd keeps the results; a reference from here would be a cycle.
        nothing = splats.new_empty(0)
        ctx.blended = replace(
            blended, pixels=nothing, transmittance=nothing, last=nothing, background=nothing
        )
        ctx.save_for_backward(splats, background, blended.transmittance, blended.last)
        return blended.pixels, blended.transmittance

    @staticmethod
    def backward(ctx, d_pixels: Tensor, d_transmittance: Tensor):
        splats, background, transmittance, last = ctx.saved_tensors
        gradients = SplatGradients(splats.new_zeros(ctx.n_splats, 2), torch.zeros_like(splats))
        blended = replace(
            ctx.blended,
            pixels=d_pixels,
            transmittance=transmittance,
            last=last,
            background=background,
        )
        ctx.rasterizer.backpropagate_rows(
            splats, ctx.tiles, blended, d_pixels, d_transmittance, gradients
        )
        return gradients.means2d, gradients.splats, None, None, None


def blend(
    projection: Projection, background: Tensor, rasterizer: Rasterizer = WARP
) -> tuple[Tensor, Tensor]:
    """Blend a whole image: pixels (H, W, C) and transmittance (H, W), differentiable."""
    tiles = rasterizer.build_tile_lists(projection)
    behind = background.detach().float().contiguous()
    return _Blend.apply(projection.means2d, projection.splats, behind, tiles, rasterizer)
