# SPDX-License-Identifier: Apache-2.0
"""Unit quaternions in the order w, x, y, z (real part first)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotation_matrices(quats: Tensor) -> Tensor:
    """Rotation matrices, local to world, of unit quaternions. (..., 4) -> (..., 3, 3)

    The gradient is that of the polynomial; normalisation removes the part along the quaternion.
    """
    w, x, y, z = quats.unbind(-1)
    entries = (
        1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y),
        2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x),
        2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y),
    )  # fmt: skip
    return torch.stack(entries, dim=-1).reshape(*quats.shape[:-1], 3, 3)


def quaternions_of(matrices: Tensor) -> Tensor:
    """Unit quaternions of rotation matrices, real part not negative. (..., 3, 3) -> (..., 4)

    Of the four equivalent formulas, each row uses the one with the largest pivot.
    """
    m = matrices
    a, b, c = m[..., 0, 0], m[..., 1, 1], m[..., 2, 2]
    yz, syz = m[..., 2, 1] - m[..., 1, 2], m[..., 2, 1] + m[..., 1, 2]
    zx, szx = m[..., 0, 2] - m[..., 2, 0], m[..., 0, 2] + m[..., 2, 0]
    xy, sxy = m[..., 1, 0] - m[..., 0, 1], m[..., 1, 0] + m[..., 0, 1]
    formulas = (
        (1 + a + b + c, yz, zx, xy),
        (yz, 1 + a - b - c, sxy, szx),
        (zx, sxy, 1 - a + b - c, syz),
        (xy, szx, syz, 1 - a - b + c),
    )
    candidates = torch.stack([torch.stack(parts, dim=-1) for parts in formulas], dim=-2)
    pivot = torch.diagonal(candidates, dim1=-2, dim2=-1).argmax(dim=-1)
    chosen = torch.take_along_dim(candidates, pivot[..., None, None], dim=-2).squeeze(-2)
    unit = torch.nn.functional.normalize(chosen, dim=-1)
    return torch.where(unit[..., :1] < 0, -unit, unit)
