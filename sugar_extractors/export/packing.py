# SPDX-License-Identifier: Apache-2.0
"""Numbers in few bits, as the compact formats of Gaussians have them in common."""

from __future__ import annotations

import numpy as np
import torch

from gaussian_splatting.cloud import GaussianCloud

_NEARLY = 0.25 / 255


def shares(values: np.ndarray, bits: int) -> np.ndarray:
    """Numbers from 0 to 1 as whole numbers of so many bits; others become the nearest. uint32"""
    most = (1 << bits) - 1
    return np.clip(np.floor(values * most + 0.5), 0, most).astype(np.uint32)


def smallest_three(quats: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quaternions without their largest part, which the others tell.

    Args:
        quats: Of any length but zero. (N, 4)

    Returns:
        Place of the largest part (N,) int64; and the others of the unit quaternion in their order,
        the signs such that the largest is positive: within +-sqrt(1/2). (N, 3)
    """
    unit = quats / np.linalg.norm(quats, axis=1, keepdims=True)
    largest = np.abs(unit).argmax(axis=1)
    rows = np.arange(len(unit))
    unit = unit * np.where(unit[rows, largest] < 0, -1.0, 1.0)[:, None]
    others = np.arange(4) != largest[:, None]
    return largest, unit[others].reshape(-1, 3)


def from_smallest_three(largest: np.ndarray, three: np.ndarray) -> np.ndarray:
    """Unit quaternions again. (N,), (N, 3) -> (N, 4)"""
    quats = np.empty((len(three), 4))
    others = np.arange(4) != largest[:, None]
    quats[others] = three.ravel()
    rest = np.sqrt(np.maximum(0.0, 1.0 - (three**2).sum(axis=1)))
    quats[np.arange(len(quats)), largest] = rest
    return quats / np.linalg.norm(quats, axis=1, keepdims=True)


def columns(cloud: GaussianCloud) -> dict[str, np.ndarray]:
    """Parameters of a cloud by name, float64 on the host."""
    return {name: tensor.cpu().double().numpy() for name, tensor in cloud.tensors().items()}


def cloud_of(
    means: np.ndarray,
    quats: np.ndarray,
    log_scales: np.ndarray,
    opacities: np.ndarray,
    sh_dc: np.ndarray,
    sh_rest: np.ndarray | None = None,
) -> GaussianCloud:
    """A cloud of what a compact file holds.

    Args:
        means: (N, 3)
        quats: wxyz. (N, 4)
        log_scales: (N, 3)
        opacities: In [0, 1]; the ends, whose logits are infinite, move inwards by less than the
            8 bits of the formats tell. (N,)
        sh_dc: (N, 3)
        sh_rest: Bands 1 to 3 as far as there are; None for none. (N, K, 3)
    """
    opacities = np.clip(opacities, _NEARLY, 1 - _NEARLY)
    rest = np.zeros((len(means), 15, 3))
    if sh_rest is not None:
        rest[:, : sh_rest.shape[1]] = sh_rest
    arrays = {
        "means": means,
        "sh_dc": sh_dc[:, None],
        "sh_rest": rest,
        "opacity_logits": np.log(opacities / (1 - opacities))[:, None],
        "log_scales": log_scales,
        "quats": quats,
    }
    return GaussianCloud(
        **{name: torch.from_numpy(a.astype(np.float32)) for name, a in arrays.items()}
    )


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * logits))
