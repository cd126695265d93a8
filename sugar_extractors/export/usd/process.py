# SPDX-License-Identifier: Apache-2.0
"""Read the Gaussians of a USD file in a subprocess, which a damaged file can crash.

``python -m sugar_extractors.export.usd.process FILE.usd ARRAYS.npz``
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
"""Numbers per Gaussian of each attribute of a field; files may also have them as halves."""

ANTIALIASED_KEY = "antialiased"  # key of the field's custom data; USD has no attribute for it


def save_arrays(path: str, target: str) -> None:
    """Save the attributes of the first field of Gaussians as float64, in a NumPy archive.

    The archive also has the degree of its spherical harmonics, whether it is antialiased,
    ``matrix``, which brings its Gaussians to the world of the stage, (4, 4), and whether z is up
    there.

    Raises:
        ValueError: The file has no field of Gaussians.
    """
    usd, vol, geom, sdf = load_package(
        path, "usd-core", "pxr.Usd", "pxr.UsdVol", "pxr.UsdGeom", "pxr.Sdf"
    )
    stage = usd.Stage.Open(sdf.Layer.OpenAsAnonymous(path))
    prims = (p for p in stage.Traverse() if p.IsA(vol.ParticleField3DGaussianSplat))
    field = next(prims, None)
    if field is None:
        raise ValueError("no ParticleField3DGaussianSplat")

    def value(name: str) -> Any:
        return field.GetAttribute(name).Get()

    arrays = {}
    for name in WIDTHS:
        array = value(name) or value(f"{name}h")
        arrays[name] = np.array(array, float)
    degree = int(value("radiance:sphericalHarmonicsDegree"))
    antialiased = field.GetCustomDataByKey(ANTIALIASED_KEY) is True
    placement = geom.Xformable(field).ComputeLocalToWorldTransform(usd.TimeCode.Default())
    # USD multiplies rows with its matrices.
    matrix = np.array(placement).T
    is_z_up = geom.GetStageUpAxis(stage) == geom.Tokens.z
    facts = {"degree": degree, "antialiased": antialiased, "matrix": matrix, "is_z_up": is_z_up}
    np.savez(target, **facts, **arrays)


if __name__ == "__main__":
    save_arrays(*sys.argv[1:])
