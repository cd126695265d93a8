# SPDX-License-Identifier: Apache-2.0
"""Nearest neighbours by brute force: what the search is compared with."""

from torch import Tensor

from sugar_utils.neighbors import Neighbors


def nearest_neighbors_reference(queries: Tensor, points: Tensor, k: int) -> Neighbors:
    """The same order of operations as in the search. O(Q N) memory."""
    offset = points[None] - queries[:, None]
    x, y, z = offset.unbind(-1)
    sq_distances = (x * x + y * y) + z * z
    values, order = sq_distances.sort(dim=1, stable=True)
    n_columns = min(k, points.shape[0])
    return Neighbors(order[:, :n_columns].int(), values[:, :n_columns])
