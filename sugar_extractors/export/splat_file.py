# SPDX-License-Identifier: Apache-2.0
"""``.splat`` files, which viewers on web pages open: 32 bytes per Gaussian, no view-dependent part.

Position and scale are 3 + 3 float32; colour, opacity and rotation (wxyz) are bytes. The Gaussians
that cover most come first, because pages show what has arrived.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.rasterization.spherical_harmonics import SH_C0
from sugar_extractors.export.packing import cloud_of, columns, shares, sigmoid
from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path, require_regular_file

ROW = np.dtype([("mean", "<f4", 3), ("scale", "<f4", 3), ("rgba", "u1", 4), ("rotation", "u1", 4)])


def write_splat(path: Path, cloud: GaussianCloud) -> np.ndarray:
    """Write a ``.splat`` file, complete or not at all.

    Returns:
        Rows of the cloud in the order of the file. (N,)

    Raises:
        UserError: The file cannot be written.
    """
    values = columns(cloud)
    opacities = sigmoid(values["opacity_logits"][:, 0])
    rows = np.zeros(len(cloud), ROW)
    rows["mean"], rows["scale"] = values["means"], np.exp(values["log_scales"])
    colors = values["sh_dc"][:, 0] * SH_C0 + 0.5
    rows["rgba"] = shares(np.concatenate([colors, opacities[:, None]], axis=1), 8)
    unit = values["quats"] / np.linalg.norm(values["quats"], axis=1, keepdims=True)
    rows["rotation"] = np.clip(np.rint(unit * 128) + 128, 0, 255)
    weight = values["log_scales"].sum(axis=1) + np.log(np.maximum(opacities, 1e-12))
    order = np.argsort(-weight, kind="stable")
    with atomic_path(path) as temporary:
        temporary.write_bytes(rows[order].tobytes())
    return order


def read_splat(path: Path) -> GaussianCloud:
    """Read a ``.splat`` file.

    Raises:
        UserError: It is missing or damaged.
    """
    content = require_regular_file(path).read_bytes()
    if not content or len(content) % ROW.itemsize:
        raise UserError(f"{path}: damaged, or no .splat file (rows have 32 bytes); export it again")
    rows = np.frombuffer(content, ROW)
    finite = all(np.isfinite(rows[name]).all() for name in ("mean", "scale"))
    if not (finite and (rows["scale"] > 0).all()):
        raise UserError(f"{path}: holds numbers that make no sense; export it again")
    quats = (rows["rotation"].astype(float) - 128) / 128
    quats[~quats.any(axis=1)] = (1, 0, 0, 0)
    colors = rows["rgba"][:, :3] / 255
    return cloud_of(
        rows["mean"].astype(float),
        quats,
        np.log(rows["scale"].astype(float)),
        rows["rgba"][:, 3] / 255,
        (colors - 0.5) / SH_C0,
    )
