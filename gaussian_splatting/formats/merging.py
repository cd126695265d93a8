# SPDX-License-Identifier: Apache-2.0
"""Fewer Gaussians in the place of many: neighbours are merged by their moments."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from scipy.spatial import KDTree
from scipy.spatial.transform import Rotation

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.formats.packing import columns, sigmoid

_MOST_OPAQUE = 0.999
_LEAST_OPAQUE = 1e-4
_TINY = 1e-30


def merged_gaussians(cloud: GaussianCloud, group: int) -> GaussianCloud:
    """Merge groups of neighbouring Gaussians into one each.

    Mean and covariance are those of the neighbours together, weighted by how much they cover: the
    opacity times the product of the two larger axes. Colours are weighted alike. The opacity is
    such that the merged one covers as much as they did.

    Args:
        cloud: The Gaussians.
        group: How many become one; the last group may be smaller.
    """
    values = columns(cloud)
    order = KDTree(values["means"], leafsize=group).indices
    starts = np.arange(0, len(cloud), group)
    scales = np.exp(values["log_scales"][order])
    weights = sigmoid(values["opacity_logits"][order, 0]) * _area(scales) + _TINY
    sums = np.add.reduceat(weights, starts)
    sizes = np.diff(starts, append=len(cloud))
    shares = weights / np.repeat(sums, sizes)

    def mean(rows: np.ndarray) -> np.ndarray:
        """Return the weighted mean of the rows of each group. (N, ...) -> (G, ...)"""
        factors = shares.reshape(-1, *[1] * (rows.ndim - 1))
        return np.add.reduceat(rows * factors, starts, axis=0)

    means = values["means"][order]
    centers = mean(means)
    rotations = Rotation.from_quat(np.roll(values["quats"][order], -1, axis=1)).as_matrix()
    axes = rotations * scales[:, None]
    offsets = means - np.repeat(centers, sizes, axis=0)
    spreads = offsets[:, :, None] * offsets[:, None]
    covariances = mean(axes @ axes.transpose(0, 2, 1) + spreads)
    variances, directions = np.linalg.eigh(covariances)
    # Eigenvectors may be a mirror image of axes.
    directions[:, :, 0] *= np.sign(np.linalg.det(directions))[:, None]
    merged_scales = np.sqrt(np.maximum(variances, _TINY))
    opacities = np.clip(sums / _area(merged_scales), _LEAST_OPAQUE, _MOST_OPAQUE)
    quats = np.roll(Rotation.from_matrix(directions).as_quat(), 1, axis=1)
    arrays = {
        "means": centers,
        "sh_dc": mean(values["sh_dc"][order]),
        "sh_rest": mean(values["sh_rest"][order]),
        "opacity_logits": np.log(opacities / (1 - opacities))[:, None],
        "log_scales": np.log(merged_scales),
        "quats": quats,
    }
    tensors = {name: torch.from_numpy(array).float() for name, array in arrays.items()}
    return replace(cloud, **tensors)


def _area(scales: np.ndarray) -> np.ndarray:
    """Return the product of the two larger axes of Gaussians. (N, 3) -> (N,)"""
    ordered = np.sort(scales, axis=1)
    return ordered[:, 1] * ordered[:, 2]
