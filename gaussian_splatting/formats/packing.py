# SPDX-License-Identifier: Apache-2.0
"""Numbers of Gaussians in few bits, and clouds of what files hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from gaussian_splatting.cloud import MAX_LOG_SCALE, GaussianCloud
from sugar_utils.errors import UserError

BANDS = {0: 0, 1: 3, 2: 8, 3: 15, 4: 24}
"""Coefficients of spherical harmonics above band 0, by degree."""

_NEARLY = 0.25 / 255


def shares(values: np.ndarray, bits: int) -> np.ndarray:
    """Numbers from 0 to 1 as whole numbers of so many bits; others become the nearest. uint32"""
    most = (1 << bits) - 1
    return np.clip(np.floor(values * most + 0.5), 0, most).astype(np.uint32)


def smallest_three(quats: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Place of the largest part of quaternions, (N,), and the others of unit length, (N, 3).

    Their order stays; their signs are such that the largest is positive: within +-sqrt(1/2).
    """
    unit = _unit(quats)
    largest = np.abs(unit).argmax(axis=1)
    unit = unit * np.where(unit[np.arange(len(unit)), largest] < 0, -1.0, 1.0)[:, None]
    return largest, unit[np.arange(4) != largest[:, None]].reshape(-1, 3)


def from_smallest_three(largest: np.ndarray, three: np.ndarray) -> np.ndarray:
    """Unit quaternions again. (N,), (N, 3) -> (N, 4)"""
    quats = np.empty((len(three), 4))
    quats[np.arange(4) != largest[:, None]] = three.ravel()
    rest = np.sqrt(np.maximum(0.0, 1.0 - (three**2).sum(axis=1)))
    quats[np.arange(len(quats)), largest] = rest
    return _unit(quats)


def columns(cloud: GaussianCloud) -> dict[str, np.ndarray]:
    """Parameters of a cloud by name, float64 on the host; quaternions of unit length."""
    values = {name: tensor.cpu().double().numpy() for name, tensor in cloud.tensors().items()}
    return {**values, "quats": _unit(values["quats"])}


def require_gaussians(path: Path, cloud: GaussianCloud) -> None:
    """Raise a ``UserError`` if a file would hold no Gaussians, which no program opens."""
    if len(cloud) == 0:
        raise UserError(f"{path}: there are no Gaussians to write; choose another result")


def _unit(quats: np.ndarray) -> np.ndarray:
    return quats / np.linalg.norm(quats, axis=1, keepdims=True)


def cloud_of(
    path: Path,
    means: np.ndarray,
    quats: np.ndarray,
    log_scales: np.ndarray,
    opacities: np.ndarray,
    sh_dc: np.ndarray,
    sh_rest: np.ndarray | None = None,
) -> GaussianCloud:
    """A cloud of what a file holds, (N, ...) each; ``sh_rest`` None for none, quats wxyz.

    Opacities are in [0, 1]; the ends, whose logits are infinite, move inwards by less than the 8
    bits of the formats tell.
    """
    rest = np.zeros((len(means), 15, 3))
    if sh_rest is not None:
        rest[:, : sh_rest.shape[1]] = sh_rest
    inside = ((opacities >= 0) & (opacities <= 1)).all() and quats.any(axis=1).all()
    inside = inside and (log_scales <= MAX_LOG_SCALE).all()
    opacities = np.clip(opacities, _NEARLY, 1 - _NEARLY)
    logits = np.log(opacities / (1 - opacities))[:, None]
    with np.errstate(over="ignore"):
        arrays = [
            array.astype(np.float32)
            for array in (means, sh_dc[:, None], rest, logits, log_scales, quats)
        ]
    # What float32 cannot hold is infinite now.
    if not (inside and all(np.isfinite(array).all() for array in arrays)):
        raise UserError(f"{path}: holds numbers that make no sense; export it again")
    return GaussianCloud(*map(torch.from_numpy, arrays))


def logarithms(scales: np.ndarray) -> np.ndarray:
    """Natural logarithms; not finite where a scale is not positive."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(scales)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * logits))
