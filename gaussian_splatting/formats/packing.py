# SPDX-License-Identifier: Apache-2.0
"""Packing the numbers of Gaussians in few bits, and building clouds from unpacked numbers."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from gaussian_splatting.core.cloud import MAX_LOG_SCALE, GaussianCloud
from gaussian_splatting.core.moved import unit_vectors
from sugar_utils.errors import Notify, UserError

BANDS = {0: 0, 1: 3, 2: 8, 3: 15, 4: 24}
"""Coefficients of spherical harmonics above band 0, by degree."""

_NEARLY = 0.25 / 255  # least distance of an opacity from 0 and 1


def shares(values: np.ndarray, bits: int) -> np.ndarray:
    """Return numbers from 0 to 1 as whole numbers of some bits; others are clipped. uint32"""
    largest = (1 << bits) - 1
    rounded = np.floor(values * largest + 0.5)
    return np.clip(rounded, 0, largest).astype(np.uint32)


def smallest_three(quats: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of the largest part of quaternions, (N,), and the other parts, (N, 3).

    The others are of unit quaternions and in their order. Signs are such that the largest part is
    positive, so they are within +-sqrt(1/2).
    """
    unit = unit_vectors(quats)
    largest = np.abs(unit).argmax(axis=1)
    is_negative = unit[np.arange(len(unit)), largest] < 0
    unit = unit * np.where(is_negative, -1.0, 1.0)[:, None]
    is_other = np.arange(4) != largest[:, None]
    return largest, unit[is_other].reshape(-1, 3)


def from_smallest_three(largest: np.ndarray, three: np.ndarray) -> np.ndarray:
    """Return the unit quaternions of :func:`smallest_three`. (N,), (N, 3) -> (N, 4)"""
    quats = np.empty((len(three), 4))
    quats[np.arange(4) != largest[:, None]] = three.ravel()
    squared = (three**2).sum(axis=1)
    quats[np.arange(len(quats)), largest] = np.sqrt(np.maximum(0.0, 1.0 - squared))
    return unit_vectors(quats)


def columns(cloud: GaussianCloud) -> dict[str, np.ndarray]:
    """Return the parameters of a cloud by name, float64 on the host; quaternions of unit length."""
    values = {name: tensor.cpu().double().numpy() for name, tensor in cloud.tensors().items()}
    values["quats"] = unit_vectors(values["quats"])
    return values


def require_gaussians(path: Path, cloud: GaussianCloud) -> None:
    """Raise a ``UserError`` if a file would hold no Gaussians, which no program opens."""
    if len(cloud) == 0:
        raise UserError(f"{path}: there are no Gaussians to write; choose another result")


class Columns(NamedTuple):
    """The numbers of Gaussians as files have them."""

    means: np.ndarray  # (N, 3)
    quats: np.ndarray  # wxyz, of any length, (N, 4)
    log_scales: np.ndarray  # (N, 3)
    opacities: np.ndarray  # (N,) in [0, 1]
    sh_dc: np.ndarray  # (N, 3)
    sh_rest: np.ndarray | None = None  # (N, B, 3), B at most 15; None for none


def usable_rows(
    path: Path,
    is_finite: np.ndarray,
    log_scales: np.ndarray,
    quats: np.ndarray,
    notify: Notify,
) -> np.ndarray:
    """Return which rows of a file are Gaussians, and count the others. (N,) bool

    Programs fill up files with rows of zeros: a rotation of length zero is none.

    Args:
        is_finite: Whether all numbers of a row are finite. (N,) bool
        log_scales: (N, 3)
        quats: (N, 4)

    Raises:
        UserError: No row is a Gaussian.
    """
    n = len(is_finite)
    has_rotation = quats.any(axis=1)
    is_finite = is_finite & (log_scales <= MAX_LOG_SCALE).all(axis=1)
    is_usable = has_rotation & is_finite
    if not is_usable.any():
        raise UserError(
            f"{path}: holds no Gaussians: its {n} rows hold numbers that make no sense, or no "
            "rotation; export it again"
        )
    n_zero = n - int(has_rotation.sum())
    if n_zero:
        notify(f"{path}: dropped {n_zero} of {n} Gaussians without a rotation (rows of zeros)")
    n_infinite = int((has_rotation & ~is_finite).sum())
    if n_infinite:
        notify(f"{path}: dropped {n_infinite} of {n} Gaussians with NaN or infinity")
    return is_usable


def cloud_of(path: Path, values: Columns, notify: Notify) -> GaussianCloud:
    """Build the cloud of a file, without the rows that :func:`usable_rows` drops.

    Opacities of 0 and 1, whose logits are infinite, move inwards by less than the 8 bits of the
    formats tell.

    Args:
        path: For messages.

    Raises:
        UserError: There is no Gaussian in it.
    """
    opacities = values.opacities
    rest = np.zeros((len(values.means), 15, 3))
    if values.sh_rest is not None:
        rest[:, : values.sh_rest.shape[1]] = values.sh_rest
    inner = np.clip(opacities, _NEARLY, 1 - _NEARLY)
    logits = np.log(inner / (1 - inner))[:, None]
    parameters = []
    with np.errstate(over="ignore"):
        colors = values.sh_dc[:, None]
        for array in (values.means, colors, rest, logits, values.log_scales, values.quats):
            parameters.append(array.astype(np.float32))
    is_finite = (opacities >= 0) & (opacities <= 1)
    for array in parameters:
        # Numbers that float32 cannot hold are infinite now.
        is_finite &= np.isfinite(array).reshape(len(array), -1).all(axis=1)
    is_usable = usable_rows(path, is_finite, values.log_scales, values.quats, notify)
    tensors = [torch.from_numpy(array[is_usable]) for array in parameters]
    return GaussianCloud(*tensors, antialiased=False)


def logarithms(scales: np.ndarray) -> np.ndarray:
    """Return natural logarithms; not finite where a scale is not positive."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(scales)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + exp(-x)), without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * logits))
