# SPDX-License-Identifier: Apache-2.0
"""Gaussians as ``ParticleField3DGaussianSplat`` of USD."""

from __future__ import annotations

import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.moved import Z_UP_AXES
from gaussian_splatting.formats.file_placement import placed_cloud
from gaussian_splatting.formats.packing import (
    Columns,
    cloud_of,
    columns,
    logarithms,
    require_gaussians,
    sigmoid,
)
from sugar_extractors.export.usd.library import load_usd, new_stage
from sugar_extractors.export.usd.process import ANTIALIASED_KEY, WIDTHS
from sugar_utils.errors import Notify, UserError, reason_of
from sugar_utils.files import atomic_path, require_regular_file
from sugar_utils.libraries import run_alone

_REACH = 3  # extent of a Gaussian in standard deviations
_READ_ERRORS = (
    OSError,
    TypeError,
    UserError,
    ValueError,
    LookupError,
    EOFError,
    zipfile.BadZipFile,
)


def write_usd_gaussians(path: Path, cloud: GaussianCloud) -> None:
    """Write a USD crate file with a ``ParticleField3DGaussianSplat``, complete or not at all."""
    require_gaussians(path, cloud)
    usd = load_usd("--to usd")
    stage = new_stage(usd)
    stage.SetDefaultPrim(define_field(usd, stage, "/Gaussians", cloud))
    with tempfile.TemporaryDirectory() as folder, atomic_path(path) as temporary:
        # USD goes by the suffix, and the temporary file has none.
        file = Path(folder) / "gaussians.usdc"
        if not stage.GetRootLayer().Export(str(file)):
            raise UserError(f"{path}: usd-core could not write it; free some space in {folder}")
        temporary.write_bytes(file.read_bytes())


def define_field(usd: ModuleType, stage: Any, place: str, cloud: GaussianCloud) -> Any:
    """Add a field of Gaussians to a stage and return its prim.

    Args:
        usd: The package, by :func:`load_usd`.
        stage: The stage.
        place: Path of the prim.
        cloud: The Gaussians, y up.
    """
    field = usd.UsdVol.ParticleField3DGaussianSplat.Define(stage, place).GetPrim()
    values = columns(cloud)
    scales = np.exp(values["log_scales"])
    harmonics = np.concatenate([values["sh_dc"], values["sh_rest"]], axis=1)
    arrays = {
        "positions": values["means"],
        "orientations": np.roll(values["quats"], -1, axis=1),
        "scales": scales,
        "opacities": sigmoid(values["opacity_logits"][:, 0]),
        "radiance:sphericalHarmonicsCoefficients": harmonics.reshape(-1, 3),
    }
    types = {1: usd.Vt.FloatArray, 3: usd.Vt.Vec3fArray, 4: usd.Vt.QuatfArray}
    for name, width in WIDTHS.items():
        array = arrays[name].astype(np.float32)
        field.GetAttribute(name).Set(types[width].FromNumpy(array))
    reach = _REACH * scales.max(axis=1, keepdims=True)
    low = (values["means"] - reach).min(axis=0)
    high = (values["means"] + reach).max(axis=0)
    extent = np.stack([low, high]).astype(np.float32)
    field.GetAttribute("extent").Set(usd.Vt.Vec3fArray.FromNumpy(extent))
    field.GetAttribute("sortingModeHint").Set("cameraDistance")
    if cloud.antialiased:
        field.SetCustomDataByKey(ANTIALIASED_KEY, True)
    return field


def read_usd_gaussians(path: Path, notify: Notify = print) -> GaussianCloud:
    """Read the first field of Gaussians of a USD file, where its stage places it, y up.

    Attributes are float or half. Units stay those of the stage.

    Args:
        path: The file.
        notify: Called with a line for what was left out.

    Raises:
        UserError: The file is damaged, has no field of Gaussians, or places it by other than a
            similarity.
    """
    load_usd(str(require_regular_file(path)))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "arrays.npz"
        try:
            run_alone("sugar_extractors.export.usd.process", [str(path.resolve()), str(file)])
            with np.load(file) as arrays:
                means, quats, scales, opacities, harmonics = (arrays[name] for name in WIDTHS)
                n_coefficients = (int(arrays["degree"]) + 1) ** 2
                antialiased = bool(arrays["antialiased"])
                matrix = arrays["matrix"]
                if arrays["is_z_up"]:
                    matrix = Z_UP_AXES.T @ matrix
            harmonics = harmonics.reshape(len(means), n_coefficients, 3)[:, :16]
            quats = np.roll(quats.reshape(len(means), 4), 1, axis=1)
            log_scales = logarithms(scales.reshape(len(means), 3))
        except _READ_ERRORS as error:
            reason = reason_of(error)[:200]
            raise UserError(f"{path}: damaged, or no field of Gaussians ({reason})") from error
    sh_dc = harmonics[:, 0]
    sh_rest = harmonics[:, 1:]
    values = Columns(means, quats, log_scales, opacities, sh_dc, sh_rest)
    cloud = cloud_of(path, values, notify)
    return placed_cloud(replace(cloud, antialiased=antialiased), matrix, path, notify)
