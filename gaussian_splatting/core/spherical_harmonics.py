# SPDX-License-Identifier: Apache-2.0
"""Real spherical harmonics up to degree 3 as Warp functions, with their gradients.

Signs and constants are those that 3DGS files use: colour = max(0, sum_k Y_k(direction) c_k + 0.5).
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false

from typing import TypeVar

import numpy as np
import torch
import warp as wp
from torch import Tensor

Values = TypeVar("Values", Tensor, np.ndarray)
"""Arrays of any shape."""

SH_C0 = 0.28209479177387814  # the constant basis function, 1 / (2 sqrt(pi))
vec16 = wp.types.vector(length=16, dtype=wp.float32)
C0 = wp.constant(SH_C0)
C1 = wp.constant(0.4886025119029199)
C2_0 = wp.constant(1.0925484305920792)
C2_2 = wp.constant(0.31539156525252005)
C2_4 = wp.constant(0.5462742152960396)
C3_0 = wp.constant(0.5900435899266435)
C3_1 = wp.constant(2.890611442640554)
C3_2 = wp.constant(0.4570457994644658)
C3_3 = wp.constant(0.3731763325901154)
C3_5 = wp.constant(1.445305721320277)


def rgb_to_sh(colors: Values) -> Values:
    """Return band-0 coefficients of colours in [0, 1]: colour = 0.5 + C0 * coefficient."""
    return (colors - 0.5) / SH_C0


def sh_to_rgb(sh_dc: Values) -> Values:
    """Return the colours of band-0 coefficients, in [0, 1] or beyond."""
    return sh_dc * SH_C0 + 0.5


def sh_basis_of(directions: Tensor) -> Tensor:
    """Evaluate the basis functions in torch. (N, 3) unit directions of any dtype -> (N, 16)"""
    x, y, z = directions.unbind(-1)
    xx = x * x
    yy = y * y
    zz = z * z
    bands = [
        torch.full_like(x, SH_C0),
        -C1 * y,
        C1 * z,
        -C1 * x,
        C2_0 * x * y,
        -C2_0 * y * z,
        C2_2 * (2 * zz - xx - yy),
        -C2_0 * x * z,
        C2_4 * (xx - yy),
        -C3_0 * y * (3 * xx - yy),
        C3_1 * x * y * z,
        -C3_2 * y * (4 * zz - xx - yy),
        C3_3 * z * (2 * zz - 3 * xx - 3 * yy),
        -C3_2 * x * (4 * zz - xx - yy),
        C3_5 * z * (xx - yy),
        -C3_0 * x * (xx - 3 * yy),
    ]
    return torch.stack(bands, dim=-1)


@wp.func
def sh_basis(d: wp.vec3, degree: int) -> vec16:
    """Return the 16 basis functions; those above ``degree`` are zero."""
    y = vec16()
    y[0] = C0
    if degree > 0:
        y[1] = -C1 * d[1]
        y[2] = C1 * d[2]
        y[3] = -C1 * d[0]
    if degree > 1:
        xx = d[0] * d[0]
        yy = d[1] * d[1]
        zz = d[2] * d[2]
        y[4] = C2_0 * d[0] * d[1]
        y[5] = -C2_0 * d[1] * d[2]
        y[6] = C2_2 * (2.0 * zz - xx - yy)
        y[7] = -C2_0 * d[0] * d[2]
        y[8] = C2_4 * (xx - yy)
        if degree > 2:
            y[9] = -C3_0 * d[1] * (3.0 * xx - yy)
            y[10] = C3_1 * d[0] * d[1] * d[2]
            y[11] = -C3_2 * d[1] * (4.0 * zz - xx - yy)
            y[12] = C3_3 * d[2] * (2.0 * zz - 3.0 * xx - 3.0 * yy)
            y[13] = -C3_2 * d[0] * (4.0 * zz - xx - yy)
            y[14] = C3_5 * d[2] * (xx - yy)
            y[15] = -C3_0 * d[0] * (xx - 3.0 * yy)
    return y


@wp.func
def sh_direction_gradient(d: wp.vec3, degree: int, g: vec16) -> wp.vec3:
    """Differentiate sum_k g_k Y_k(d) with respect to the (unnormalised) direction ``d``."""
    x = d[0]
    y = d[1]
    z = d[2]
    gx = 0.0
    gy = 0.0
    gz = 0.0
    if degree > 0:
        gy -= C1 * g[1]
        gz += C1 * g[2]
        gx -= C1 * g[3]
    if degree > 1:
        gx += C2_0 * (y * g[4] - z * g[7]) + 2.0 * x * (C2_4 * g[8] - C2_2 * g[6])
        gy += C2_0 * (x * g[4] - z * g[5]) - 2.0 * y * (C2_4 * g[8] + C2_2 * g[6])
        gz += -C2_0 * (y * g[5] + x * g[7]) + 4.0 * C2_2 * z * g[6]
    if degree > 2:
        xx = x * x
        yy = y * y
        zz = z * z
        gx += (
            -6.0 * C3_0 * x * y * g[9]
            + C3_1 * y * z * g[10]
            + 2.0 * C3_2 * x * y * g[11]
            - 6.0 * C3_3 * x * z * g[12]
            - C3_2 * (4.0 * zz - 3.0 * xx - yy) * g[13]
            + 2.0 * C3_5 * x * z * g[14]
            - 3.0 * C3_0 * (xx - yy) * g[15]
        )
        gy += (
            -3.0 * C3_0 * (xx - yy) * g[9]
            + C3_1 * x * z * g[10]
            - C3_2 * (4.0 * zz - xx - 3.0 * yy) * g[11]
            - 6.0 * C3_3 * y * z * g[12]
            + 2.0 * C3_2 * x * y * g[13]
            - 2.0 * C3_5 * y * z * g[14]
            + 6.0 * C3_0 * x * y * g[15]
        )
        gz += (
            C3_1 * x * y * g[10]
            - 8.0 * C3_2 * y * z * g[11]
            + C3_3 * (6.0 * zz - 3.0 * xx - 3.0 * yy) * g[12]
            - 8.0 * C3_2 * x * z * g[13]
            + C3_5 * (xx - yy) * g[14]
        )
    return wp.vec3(gx, gy, gz)
