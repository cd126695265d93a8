# SPDX-License-Identifier: Apache-2.0
"""Facts that every estimator of depth has in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch


class Photograph(NamedTuple):
    """A photograph as an estimator gets it."""

    pixels: np.ndarray  # (h, w, 3) uint8
    focal: float  # focal length in pixels of this size


Estimate = Callable[[Photograph], np.ndarray]
"""Depths of a photograph along the view axis, 0 where unknown. Of any size, (h', w') float32"""


@dataclass(frozen=True)
class Estimator:
    """A program that estimates depth.

    Attributes:
        label: The program, for messages.
        weights: Name of the weights that are loaded.
        licence: Of the weights.
        install: How to install it.
        packages: Names under which Python imports it, or what it needs.
        load: Loads the weights onto a device.
    """

    label: str
    weights: str
    licence: str
    install: str
    packages: tuple[str, ...]
    load: Callable[[torch.device], Estimate]
