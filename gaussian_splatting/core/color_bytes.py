# SPDX-License-Identifier: Apache-2.0
"""Colours as bytes, rounded to nearest."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def color_bytes(colors: Tensor) -> Tensor:
    """Return colours from 0 to 1 as bytes. uint8, of the same shape"""
    return (colors * 255).round().to(torch.uint8)


def rounded_bytes(values: np.ndarray) -> np.ndarray:
    """Return values, clipped to 0 to 255, as bytes. uint8, of the same shape"""
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)
