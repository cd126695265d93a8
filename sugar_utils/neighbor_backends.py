# SPDX-License-Identifier: Apache-2.0
"""Other libraries behind the call of :func:`sugar_utils.neighbors.nearest_neighbors`."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch
from torch import Tensor

from sugar_utils.errors import UserError
from sugar_utils.neighbors import BATCH, Neighbors, nearest_neighbors
from sugar_utils.random import generator

NEIGHBOR_SEARCHES = ("auto", "warp", "pytorch3d")


class NeighborSearch(Protocol):
    """Finds the k nearest points of every point, as ``nearest_neighbors`` describes it."""

    def __call__(self, points: Tensor, k: int = 16, *, query_batch: int | None = None) -> Neighbors:
        """Indices and squared distances, (N, min(k, N)) each, the point itself first."""
        ...


class Pytorch3dNeighbors:
    """``pytorch3d.ops.knn_points`` in batches of queries.

    Among points at equal distances pytorch3d's order is its own; the point itself is put first
    here, whatever duplicates it has.

    Args:
        ops: The module ``pytorch3d.ops``.
    """

    def __init__(self, ops: Any) -> None:
        self._knn = ops.knn_points

    def __call__(self, points: Tensor, k: int = 16, *, query_batch: int | None = None) -> Neighbors:
        """See :class:`NeighborSearch`.

        Raises:
            UserError: If a coordinate is NaN or infinite.
        """
        points = points.detach().float().contiguous()
        # pytorch3d puts such points anywhere without a word.
        if not bool(points.isfinite().all()):
            raise UserError(
                "some points have a NaN or infinite coordinate, so they have no neighbours; the "
                "training diverged or the input file is damaged"
            )
        n, device = points.shape[0], points.device
        k = min(k, n)
        if k == 0:
            empty = torch.empty(n, 0, device=device)
            return Neighbors(empty.int(), empty)
        indices = torch.empty(n, k, dtype=torch.int32, device=device)
        sq_distances = torch.empty(n, k, device=device)
        query_batch = query_batch or BATCH
        for first in range(0, n, query_batch):
            queries = points[first : first + query_batch]
            found = self._knn(queries[None], points[None], K=k)
            rows = torch.arange(first, first + queries.shape[0], device=device)
            order, squares = _self_first(found.idx[0], found.dists[0], rows)
            indices[first : first + query_batch] = order.int()
            sq_distances[first : first + query_batch] = squares
        return Neighbors(indices, sq_distances)


def choose_neighbor_search(name: str, device: torch.device) -> tuple[NeighborSearch, str]:
    """The neighbour search of a run, and a line about it where it is not the built-in one.

    Args:
        name: One of ``NEIGHBOR_SEARCHES``; ``auto`` is the built-in one, which is exact, breaks
            ties in one way on every device and needs O(N) memory.
        device: Where it will be used.

    Raises:
        UserError: pytorch3d was asked for and is missing or wrong.
    """
    if name in ("auto", "warp"):
        return nearest_neighbors, ""
    try:
        ops = importlib.import_module("pytorch3d.ops")
    except ImportError as error:
        raise UserError(
            f"--neighbors pytorch3d: it cannot be imported ({' '.join(str(error).split())}); "
            "install pytorch3d or leave the flag out"
        ) from error
    search = Pytorch3dNeighbors(ops)
    _self_test(search, device)
    return search, "neighbours by pytorch3d: --neighbors pytorch3d, self-test passed"


def _self_first(indices: Tensor, sq_distances: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Move each point's own row to the first column; it pushes out the last one if missing."""
    own = indices == rows[:, None]
    columns = torch.arange(indices.shape[1], device=rows.device)
    at = torch.where(own.any(dim=1), own.int().argmax(dim=1), columns[-1])
    # The columns before the own one move up by one place.
    source = torch.where((columns >= 1) & (columns <= at[:, None]), columns - 1, columns)
    indices, sq_distances = indices.gather(1, source), sq_distances.gather(1, source)
    indices[:, 0], sq_distances[:, 0] = rows, 0.0
    return indices, sq_distances


def _self_test(search: NeighborSearch, device: torch.device) -> None:
    """Compare with the built-in search on random points.

    Raises:
        UserError: They differ, or the library fails.
    """
    n, k = 500, 9
    points = torch.rand(n, 3, generator=generator(0, "neighbour self-test"), device="cpu")
    points = points.to(device)
    try:
        found = search(points, k, query_batch=200)
    # Another library's failure, whatever it is, is a reason not to use it.
    except Exception as error:
        raise UserError(
            f"--neighbors pytorch3d: it fails on {device} ({' '.join(str(error).split())}); "
            "install a build for this torch and GPU or leave the flag out"
        ) from error
    expected = nearest_neighbors(points, k)
    if not torch.allclose(found.sq_distances, expected.sq_distances, rtol=1e-3, atol=1e-6):
        raise UserError(
            "--neighbors pytorch3d: its results differ from exact ones in the self-test; leave "
            "the flag out"
        )
