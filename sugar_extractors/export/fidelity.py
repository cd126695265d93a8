# SPDX-License-Identifier: Apache-2.0
"""How far the Gaussians of a file are from those that it was written from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.rasterization.spherical_harmonics import SH_C0
from sugar_extractors.export.packing import columns, sigmoid
from sugar_utils.quaternions import rotation_matrices


@dataclass(frozen=True)
class Fidelity:
    """Largest differences of all Gaussians.

    Attributes:
        position: World units.
        scale: Of standard deviations, as a share of the largest of the same Gaussian.
        rotation: Of axes, weighted by how much longer than the shortest they are; degrees.
        color: Of what does not depend on the view, of 255.
        opacity: Of 255.
        harmonics: Root mean square of the coefficients beyond band 0.
    """

    position: float
    scale: float
    rotation: float
    color: float
    opacity: float
    harmonics: float

    def line(self) -> str:
        """All of it in one line."""
        return (
            f"largest errors: position {self.position:.2g}, size {self.scale:.2%}, rotation "
            f"{self.rotation:.2g} degrees, colour {self.color:.2g} and opacity {self.opacity:.2g} "
            f"of 255; view-dependent colour {self.harmonics:.2g} on average"
        )


def fidelity(written: GaussianCloud, found: GaussianCloud) -> Fidelity:
    """Compare Gaussians with those that were read back.

    Args:
        written: N Gaussians, in the order of the file.
        found: As many.
    """
    a, b = columns(written), columns(found)
    difference = {name: np.abs(a[name] - b[name]) for name in a}
    # Rotations of Gaussians that are round say nothing, so only what turns a long axis counts.
    scales = np.exp(a["log_scales"])
    axes = [rotation_matrices(_unit(cloud)) for cloud in (written, found)]
    cosines = (axes[0] * axes[1]).sum(dim=1).abs().clamp(max=1).numpy()
    longer = 1 - scales.min(axis=1, keepdims=True) / scales
    longest = scales.max(axis=1, keepdims=True)
    turned = np.degrees(np.arccos(cosines)) * longer
    opacities = np.abs(sigmoid(a["opacity_logits"]) - sigmoid(b["opacity_logits"]))
    colors = [np.clip(c["sh_dc"] * SH_C0 + 0.5, 0, 1) for c in (a, b)]
    return Fidelity(
        position=float(difference["means"].max()),
        scale=float((np.abs(np.exp(b["log_scales"]) - scales) / longest).max()),
        rotation=float(turned.max()),
        color=255 * float(np.abs(colors[0] - colors[1]).max()),
        opacity=255 * float(opacities.max()),
        harmonics=float(np.sqrt((difference["sh_rest"] ** 2).mean())),
    )


def _unit(cloud: GaussianCloud):
    quats = cloud.quats.cpu().double()
    return quats / quats.norm(dim=1, keepdim=True)
