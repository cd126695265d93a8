# SPDX-License-Identifier: Apache-2.0
"""Reads the Gaussians of a USD file in a process apart, which a damaged file can end.

``python -m sugar_extractors.export.usd_process FILE.usd ARRAYS.npz``
"""

from __future__ import annotations

import sys

import numpy as np

from sugar_utils.libraries import load_package

WIDTHS = {
    "positions": 3, "orientations": 4, "scales": 3, "opacities": 1,
    "radiance:sphericalHarmonicsCoefficients": 3,
}  # fmt: skip
"""Attributes of a field of Gaussians, and how many numbers an element has; also in halves."""


def save_arrays(path: str, target: str) -> None:
    """Save the attributes of the first field of Gaussians, and its degree, as float64."""
    usd, vol, sdf = load_package(path, "usd-core", "pxr.Usd", "pxr.UsdVol", "pxr.Sdf")
    stage = usd.Stage.Open(sdf.Layer.OpenAsAnonymous(path))
    prims = (p for p in stage.Traverse() if p.IsA(vol.ParticleField3DGaussianSplat))
    field = next(prims, None)
    if field is None:
        raise ValueError("no ParticleField3DGaussianSplat")
    found = {
        name: np.array(
            field.GetAttribute(name).Get() or field.GetAttribute(f"{name}h").Get(), float
        )
        for name in WIDTHS
    }
    degree = field.GetAttribute("radiance:sphericalHarmonicsDegree").Get()
    np.savez(target, degree=int(degree), **found)


if __name__ == "__main__":
    save_arrays(*sys.argv[1:])
