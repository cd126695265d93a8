# SPDX-License-Identifier: Apache-2.0
"""Gradients of colours before they are spread over the coefficients of spherical harmonics.

From one view, the gradient of the 16 coefficients of a Gaussian is an outer product: basis
functions at the direction of view times the gradient of its colour. The factors are 6 numbers
instead of 48, so they are kept in place of the product, which an optimiser forms where it needs it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

MIN_FACTORED = 50_000
"""Gaussians from which on factors are kept; for fewer, one more launch costs more than bytes do."""


@dataclass(frozen=True)
class ColorGradient:
    """The factors of the gradient of all coefficients, from one view."""

    colors: Tensor  # gradient of the colours before their clamp at zero, (N, 3) float32
    means: Tensor  # centres that the view saw, (N, 3) world units; may share memory with parameters
    camera_record: Tensor  # of the view, see ``projection_kernels.camera_record``
    sh_degree: int  # at which colours were evaluated
