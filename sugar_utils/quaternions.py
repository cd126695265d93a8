# SPDX-License-Identifier: Apache-2.0
"""Unit quaternions in the order w, x, y, z (real part first)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotation_matrices(quats: Tensor) -> Tensor:
    """Rotation matrices of unit quaternions, differentiable.

    The gradient is that of the polynomial below. It is the true one after normalisation: the
    part along the quaternion itself, where the polynomial depends on the norm, is removed by the
    derivative of the normalisation.

    Args:
        quats: Unit quaternions, wxyz. (..., 4)

    Returns:
        Matrices that take local to world coordinates; columns are the local axes. (..., 3, 3)
    """
    w, x, y, z = quats.unbind(-1)
    rows = (
        1 - 2 * (y * y + z * z),
        2 * (x * y - w * z),
        2 * (x * z + w * y),
        2 * (x * y + w * z),
        1 - 2 * (x * x + z * z),
        2 * (y * z - w * x),
        2 * (x * z - w * y),
        2 * (y * z + w * x),
        1 - 2 * (x * x + y * y),
    )
    return torch.stack(rows, dim=-1).reshape(*quats.shape[:-1], 3, 3)
