# SPDX-License-Identifier: Apache-2.0
"""Colours as band 0 of the spherical harmonics: colour = 0.5 + C0 * coefficient."""

from __future__ import annotations

from torch import Tensor

SH_C0 = 0.28209479177387814
"""The constant basis function, 1 / (2 sqrt(pi))."""


def rgb_to_sh(colors: Tensor) -> Tensor:
    """Band-0 coefficients of colours in [0, 1]; any shape."""
    return (colors - 0.5) / SH_C0
