# SPDX-License-Identifier: Apache-2.0
"""The largest and the typical errors of a file's Gaussians."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gaussian_splatting.core.cloud import GaussianCloud, rotation_matrices
from gaussian_splatting.core.spherical_harmonics import sh_to_rgb
from gaussian_splatting.formats.packing import columns, sigmoid


@dataclass(frozen=True)
class Fidelity:
    """Largest differences of all Gaussians, and the median of the largest of each."""

    position: float
    scale: float
    rotation: float  # of axes, weighted by how much longer than the shortest they are; degrees
    color: float
    opacity: float
    harmonics: float
    typical: Fidelity | None  # medians; None in those themselves

    def line(self) -> str:
        """Summarise the differences in one line."""
        text = f"largest errors: {self._words()}"
        if self.typical is not None:
            text = f"{text}; typical ones (median): {self.typical._words()}"
        return f"{text}; view-dependent colour {self.harmonics:.2g} on average"

    def _words(self) -> str:
        return (
            f"position {self.position:.2g}, size {self.scale:.2%}, rotation "
            f"{self.rotation:.2g} degrees, colour {self.color:.2g} and opacity {self.opacity:.2g} "
            "of 255"
        )


def fidelity(written: GaussianCloud, read_back: GaussianCloud) -> Fidelity:
    """Compare two clouds Gaussian by Gaussian, in the same order."""
    expected = columns(written)
    actual = columns(read_back)
    position_errors = np.abs(expected["means"] - actual["means"])
    harmonic_errors = expected["sh_rest"] - actual["sh_rest"]
    expected_opacities = sigmoid(expected["opacity_logits"])
    opacity_errors = np.abs(expected_opacities - sigmoid(actual["opacity_logits"]))
    expected_colors = np.clip(sh_to_rgb(expected["sh_dc"]), 0, 1)
    color_errors = np.abs(expected_colors - np.clip(sh_to_rgb(actual["sh_dc"]), 0, 1))
    scales = np.exp(expected["log_scales"])
    longest = scales.max(axis=1, keepdims=True)
    scale_errors = np.abs(np.exp(actual["log_scales"]) - scales) / longest
    rotation_errors = _rotation_errors(expected["quats"], actual["quats"], scales)
    errors = {
        "position": position_errors,
        "scale": scale_errors,
        "rotation": rotation_errors,
        "color": 255 * color_errors,
        "opacity": 255 * opacity_errors,
    }
    of_each = {name: values.reshape(len(values), -1).max(axis=1) for name, values in errors.items()}
    harmonics = float(np.sqrt((harmonic_errors**2).mean()))
    medians = {name: float(np.median(values)) for name, values in of_each.items()}
    largest = {name: float(values.max()) for name, values in of_each.items()}
    typical = Fidelity(**medians, harmonics=harmonics, typical=None)
    return Fidelity(**largest, harmonics=harmonics, typical=typical)


def _rotation_errors(expected: np.ndarray, actual: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the angle of each axis, less for shorter ones: round Gaussians have no rotation.

    (N, 4), (N, 4), (N, 3) -> (N, 3) degrees
    """
    expected_axes = rotation_matrices(torch.from_numpy(expected))
    actual_axes = rotation_matrices(torch.from_numpy(actual))
    cosines = (expected_axes * actual_axes).sum(dim=1).abs().clamp(max=1).numpy()
    shortest = scales.min(axis=1, keepdims=True)
    return np.degrees(np.arccos(cosines)) * (1 - shortest / scales)
