# SPDX-License-Identifier: Apache-2.0
"""Sizes of pixels and of octree cells at the points of a surface."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from gaussian_splatting.core.subsets import about, longest_side
from gaussian_splatting.data.cameras import Camera, nearest_pixel_sizes
from sugar_utils.device import float32_tensor
from sugar_utils.neighbors import nearest_neighbors_of

SCALE = 1.1  # side of the solver's cube in sides of the points' bounding cube
LEAST_DEPTH = 4  # of octrees whose depth is chosen by the program
MOST_DEPTH = 10
_SAMPLED_POINTS = 10_000


def pixel_size(points: np.ndarray, cameras: Sequence[Camera]) -> float:
    """Return the median size of a pixel at points, (P, 3), in the view nearest to each."""
    sizes = nearest_pixel_sizes(about(points, _SAMPLED_POINTS), cameras)
    return float(np.median(sizes))


def automatic_depth(points: np.ndarray, pixel: float) -> int:
    """Return the octree depth for ``--poisson_depth auto``.

    The cells are as small as a pixel, the finest detail of the images; a surface that crosses the
    whole cube, six sides of it, still has a point in each.

    Args:
        points: Of the surface. (P, 3) world units
        pixel: Size of a pixel on the surface, in world units.
    """
    side = SCALE * longest_side(points)
    by_pixel = MOST_DEPTH
    if pixel > 0:
        by_pixel = math.ceil(math.log2(max(side, pixel) / pixel))
    by_points = round(math.log(max(len(points), 6) / 6, 4))
    return max(LEAST_DEPTH, min(by_pixel, by_points, MOST_DEPTH))


def cell_size(points: np.ndarray, depth: int) -> float:
    """Return the side of the finest octree cell around points, (P, 3), in world units."""
    return SCALE * longest_side(points) / 2**depth


def gaps(vertices: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return the distance of each vertex to the nearest surface point.

    (V, 3), (P, 3) -> (V,) world units
    """
    queries = float32_tensor(vertices)
    squares = nearest_neighbors_of(queries, torch.from_numpy(points), 1).sq_distances
    return squares[:, 0].sqrt().numpy()


def nearest_rows(queries: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return the row of the point that is nearest to each query. (Q, 3), (P, 3) -> (Q,)"""
    query_tensor = float32_tensor(queries)
    point_tensor = float32_tensor(points)
    neighbors = nearest_neighbors_of(query_tensor, point_tensor, 1)
    return neighbors.indices[:, 0].numpy()
