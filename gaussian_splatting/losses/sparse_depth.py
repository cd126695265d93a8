# SPDX-License-Identifier: Apache-2.0
"""Rendered depth at the points that a photograph observes: sparse, and known beforehand."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.data.observations import SeenPoints
from gaussian_splatting.engine.strips import ImageTerm, StripMaps

TYPICAL_ERROR = 1.0
"""Reprojection error in pixels at which a point counts half."""

SURE_TRACK = 4
"""Photographs that make a point certain; with fewer it counts less."""


def point_weights(errors: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """How far points can be trusted: near 1 for those that many photographs agree on. (n,)"""
    return np.minimum(lengths / SURE_TRACK, 1.0) / (1.0 + (errors / TYPICAL_ERROR) ** 2)


def sparse_depth_loss(
    depth: Tensor, rows: Tensor, columns: Tensor, depths: Tensor, weights: Tensor, total: float
) -> Tensor:
    """Weighted mean of |D - z| / (D + z), the relative error of rendered depth at observed points.

    At most 1, because a shell far outside that shines through is many times farther than the point.
    Blended depth is not divided by alpha: what is half transparent there lies too near, too, and
    becomes solid where it should.

    Args:
        depth: Blended depth, differentiable. (R, W) world units
        rows: Pixel row of each point in ``depth``. (n,)
        columns: Its column. (n,)
        depths: Its depth. (n,) world units
        weights: How much it counts. (n,)
        total: Sum of the weights of all points of the view.
    """
    found = depth[rows, columns]
    error = (found - depths).abs() / (found + depths)
    return (weights * error).sum() / total


def sparse_depth_term(seen: SeenPoints, weight: float, device: torch.device) -> ImageTerm:
    """The term of one view, strip by strip.

    Args:
        seen: Points that its photograph observes.
        weight: Of the term in the loss.
        device: Where to compute.
    """
    pixels = np.floor(seen.pixels).astype(np.int64)
    weights = point_weights(seen.errors, seen.lengths)
    total = float(weights.sum())

    def evaluate(maps: StripMaps) -> tuple[Tensor, dict[str, Tensor]]:
        first = maps.shown.start + maps.counted.start
        last = maps.shown.start + maps.counted.stop
        here = (pixels[:, 1] >= first) & (pixels[:, 1] < last)

        def tensor(values: np.ndarray, dtype: torch.dtype) -> Tensor:
            return torch.as_tensor(values[here], dtype=dtype).to(device)

        value = sparse_depth_loss(
            maps.depth,
            tensor(pixels[:, 1] - maps.shown.start, torch.int64),
            tensor(pixels[:, 0], torch.int64),
            tensor(seen.depths, maps.depth.dtype),
            tensor(weights, maps.depth.dtype),
            total,
        )
        return weight * value, {"points": value}

    return ImageTerm(0, evaluate)
