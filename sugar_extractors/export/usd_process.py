# SPDX-License-Identifier: Apache-2.0
"""Reads the Gaussians of a USD file in a process apart, which a damaged file can end.

``python -m sugar_extractors.export.usd_process FILE.usd ARRAYS.npz``
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from sugar_utils.libraries import load_package

WIDTHS = {
    "positions": 3,
    "orientations": 4,
    "scales": 3,
    "opacities": 1,
    "radiance:sphericalHarmonicsCoefficients": 3,
}
"""Attributes of a field of Gaussians, and how many numbers an element has; also in halves."""

ANTIALIASED_KEY = "antialiased"  # of the field's custom data, for which there is no attribute


def save_arrays(path: str, target: str) -> None:
    """Save the attributes of the first field of Gaussians as float64.

    And its degree, and whether it is antialiased.
    """
    usd, vol, sdf = load_package(path, "usd-core", "pxr.Usd", "pxr.UsdVol", "pxr.Sdf")
    stage = usd.Stage.Open(sdf.Layer.OpenAsAnonymous(path))
    prims = (p for p in stage.Traverse() if p.IsA(vol.ParticleField3DGaussianSplat))
    field = next(prims, None)
    if field is None:
        raise ValueError("no ParticleField3DGaussianSplat")

    def value(name: str) -> Any:
        return field.GetAttribute(name).Get()

    found = {name: np.array(value(name) or value(f"{name}h"), float) for name in WIDTHS}
    degree = int(value("radiance:sphericalHarmonicsDegree"))
    antialiased = field.GetCustomDataByKey(ANTIALIASED_KEY) is True
    np.savez(target, degree=degree, antialiased=antialiased, **found)


if __name__ == "__main__":
    save_arrays(*sys.argv[1:])
