# SPDX-License-Identifier: Apache-2.0
"""Largest errors of the Gaussians of a file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gaussian_splatting.cloud import GaussianCloud, rotation_matrices
from gaussian_splatting.formats.packing import columns, sigmoid
from gaussian_splatting.rasterization.spherical_harmonics import sh_to_rgb


@dataclass(frozen=True)
class Fidelity:
    """Largest differences of all Gaussians."""

    position: float
    scale: float
    rotation: float  # of axes, weighted by how much longer than the shortest they are; degrees
    color: float
    opacity: float
    harmonics: float

    def line(self) -> str:
        """The differences in words."""
        return (
            f"largest errors: position {self.position:.2g}, size {self.scale:.2%}, rotation "
            f"{self.rotation:.2g} degrees, colour {self.color:.2g} and opacity {self.opacity:.2g} "
            f"of 255; view-dependent colour {self.harmonics:.2g} on average"
        )


def fidelity(written: GaussianCloud, found: GaussianCloud) -> Fidelity:
    """Compare Gaussian by Gaussian, in the same order."""
    a = columns(written)
    b = columns(found)
    difference = {name: np.abs(a[name] - b[name]) for name in a}
    scales = np.exp(a["log_scales"])
    shortest, longest = (end(scales, axis=1, keepdims=True) for end in (np.min, np.max))
    axes = [rotation_matrices(torch.from_numpy(values["quats"])) for values in (a, b)]
    cosines = (axes[0] * axes[1]).sum(dim=1).abs().clamp(max=1).numpy()
    # Rotations of Gaussians that are round say nothing, so only what turns a long axis counts.
    turned = np.degrees(np.arccos(cosines)) * (1 - shortest / scales)
    opacities = np.abs(sigmoid(a["opacity_logits"]) - sigmoid(b["opacity_logits"]))
    colors = [np.clip(sh_to_rgb(c["sh_dc"]), 0, 1) for c in (a, b)]
    sizes = np.abs(np.exp(b["log_scales"]) - scales) / longest
    return Fidelity(
        position=float(difference["means"].max()),
        scale=float(sizes.max()),
        rotation=float(turned.max()),
        color=255 * float(np.abs(colors[0] - colors[1]).max()),
        opacity=255 * float(opacities.max()),
        harmonics=float(np.sqrt((difference["sh_rest"] ** 2).mean())),
    )
