# SPDX-License-Identifier: Apache-2.0
"""Sorting splats into tiles: by tile, then depth, then index, the same on every device.

Each splat owns a run of pairs, one for each tile it reaches. Splats are sorted by depth and their
runs laid out in that order; a stable sort of the pairs by tile does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.rasterization.blend_cpu import sort_pairs, sort_splats
from gaussian_splatting.rasterization.projection import MIN_ITEMS, Projection
from gaussian_splatting.rasterization.projection_kernels import n_tiles
from gaussian_splatting.rasterization.tile_coverage import list_tiles, place_pairs
from sugar_utils.errors import UserError
from sugar_utils.warp_launch import as_array, launch, on_stream_of

_MAX_PAIRS = 2**31 - 1


@dataclass(frozen=True)
class TileLists:
    """Which splats each tile blends, front to back."""

    offsets: Tensor  # start of each tile's run in ``ids``, (tiles + 1,) int32
    # Splats by tile, then depth, then index; M may be more than there are pairs, (M,) int32.
    ids: Tensor
    first_pairs: Tensor  # where each splat's run begins in ``places``, (N,) int32
    counts: Tensor  # how long it is, (N,) int32
    places: Tensor  # places of a splat in ``ids``, ascending within its run, (M,) int32
    across: int
    width: int  # image width in pixels
    height: int  # image height in pixels


def build_tile_lists(projection: Projection, *, blocks: bool | None = None) -> TileLists:
    """Sort the (tile, splat) pairs of a projection; ``blocks`` as of ``blend_rows``."""
    # Native code learns the number for nothing.
    blocks = projection.splats.device.type != "cpu" if blocks is None else blocks
    camera, counts = projection.camera, projection.tile_counts
    across, down = n_tiles(camera)
    order, first_pairs, n_pairs = (_runs_by_sort if blocks else _runs_natively)(projection)
    if n_pairs > _MAX_PAIRS:
        raise UserError(
            f"{camera.name} ({camera.width} x {camera.height}) needs {n_pairs} (tile, Gaussian) "
            "pairs, more than 2^31; render a smaller image, or prune Gaussians that cover it all."
        )
    # The radix sort wants room for as much again behind its keys.
    pair_tiles = _ints((2 if blocks else 1) * n_pairs, counts.device)
    if blocks and projection.guess is not None:
        # What is left over is sorted behind all tiles.
        pair_tiles.fill_(across * down)
    owners = _ints(n_pairs if blocks else 0, counts.device)
    launch(
        list_tiles,
        counts.shape[0],
        [
            across, n_pairs, projection.splats.detach(), as_array(projection.tile_rects, wp.vec4i),
            first_pairs, pair_tiles, owners,
        ],
        min_items=MIN_ITEMS,
    )  # fmt: skip
    if blocks:
        offsets, ids, places = _sort_by_radix(pair_tiles, owners, across * down)
    else:
        offsets, ids, places = _sort_natively(order, counts, pair_tiles, across * down)
    return TileLists(offsets, ids, first_pairs, counts, places, across, camera.width, camera.height)


def _ints(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.int32, device=device)


def _runs_natively(projection: Projection) -> tuple[Tensor, Tensor, int]:
    """Splats with pairs by depth, where each splat's run begins, and the number of pairs."""
    counts, device = projection.tile_counts, projection.tile_counts.device
    n, total = counts.shape[0], torch.zeros(1, dtype=torch.int64, device=device)
    order, first_pairs = _ints(n, device), _ints(n, device)
    launch(
        sort_splats, 1, [n, projection.depths, counts, order, _ints(n, device), first_pairs, total]
    )
    return order, first_pairs, int(total)


def _runs_by_sort(projection: Projection) -> tuple[Tensor, Tensor, int]:
    """The same on any device."""
    counts = projection.tile_counts
    order = projection.depths.sort(stable=True).indices
    sizes = counts[order]
    ends = sizes.cumsum(0)
    starts, n_pairs, guess = ends - sizes, projection.n_pairs, projection.guess
    if n_pairs is None and counts.shape[0] == 0:
        n_pairs = 0
    elif n_pairs is None and guess is not None:
        n_pairs, guess.excess = guess.capacity, ends[-1] - guess.capacity
        starts.clamp_(max=guess.capacity)
    elif n_pairs is None:
        # The one number that must reach the host: it is the size of all that comes next.
        n_pairs = int(ends[-1])
    first_pairs = torch.empty_like(counts)
    first_pairs[order] = starts.int()
    return order, first_pairs, n_pairs


def _sort_natively(
    order: Tensor, counts: Tensor, pair_tiles: Tensor, n_all: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets, ids and places."""
    n_pairs, device = pair_tiles.shape[0], pair_tiles.device
    offsets, ids, places = _ints(n_all + 1, device), _ints(n_pairs, device), _ints(n_pairs, device)
    cursor = _ints(n_all + 1, device)
    launch(sort_pairs, 1, [n_pairs, n_all, counts, order, pair_tiles, offsets, cursor, ids, places])
    return offsets, ids, places


def _sort_by_radix(pair_tiles: Tensor, owners: Tensor, n_all: int) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets, ids and places, on any device; pairs of a tile stay in the order of their runs."""
    device, n_pairs = pair_tiles.device, owners.shape[0]
    pairs = _ints(2 * n_pairs, device)
    torch.arange(n_pairs, dtype=torch.int32, device=device, out=pairs[:n_pairs])
    with on_stream_of(device):
        wp.utils.radix_sort_pairs(
            wp.from_torch(pair_tiles), wp.from_torch(pairs), n_pairs, end_bit=n_all.bit_length()
        )
    edges = torch.arange(n_all + 1, dtype=torch.int32, device=device)
    offsets = torch.searchsorted(pair_tiles[:n_pairs], edges, out_int32=True)
    ids, places = _ints(n_pairs, device), _ints(n_pairs, device)
    inputs = [pairs, owners, places, ids]
    launch(place_pairs, n_pairs, inputs, min_items=MIN_ITEMS)
    return offsets, ids, places
