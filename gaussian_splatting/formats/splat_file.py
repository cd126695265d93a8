# SPDX-License-Identifier: Apache-2.0
"""``.splat`` files: 3 + 3 float32 for position and scale, bytes for colour, opacity and rotation.

The largest and most opaque come first, because pages draw what has arrived. Axes as in a PLY.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.spherical_harmonics import rgb_to_sh, sh_to_rgb
from gaussian_splatting.formats.packing import (
    Columns,
    cloud_of,
    columns,
    logarithms,
    require_gaussians,
    shares,
    sigmoid,
)
from sugar_utils.errors import Notify, UserError
from sugar_utils.files import atomic_path, require_regular_file

ROW = np.dtype([("mean", "<f4", 3), ("scale", "<f4", 3), ("rgba", "u1", 4), ("rotation", "u1", 4)])


def write_splat(path: Path, cloud: GaussianCloud) -> np.ndarray:
    """Write a ``.splat`` file, complete or not at all; return its order of the Gaussians. (N,)"""
    require_gaussians(path, cloud)
    values = columns(cloud)
    opacities = sigmoid(values["opacity_logits"][:, 0])
    rows = np.zeros(len(cloud), ROW)
    rows["mean"] = values["means"]
    rows["scale"] = np.exp(values["log_scales"])
    colors = sh_to_rgb(values["sh_dc"][:, 0])
    rows["rgba"] = shares(np.column_stack([colors, opacities]), 8)
    rows["rotation"] = np.clip(np.rint(values["quats"] * 128) + 128, 0, 255)
    log_volumes = values["log_scales"].sum(axis=1)
    log_opacities = np.log(np.maximum(opacities, 1e-12))
    order = np.argsort(-(log_volumes + log_opacities), kind="stable")
    with atomic_path(path) as temporary:
        temporary.write_bytes(rows[order].tobytes())
    return order


def read_splat(path: Path, notify: Notify = print) -> GaussianCloud:
    """Read a ``.splat`` file; rows of zeros are dropped."""
    content = require_regular_file(path).read_bytes()
    if not content or len(content) % ROW.itemsize:
        raise UserError(f"{path}: damaged, or no .splat file (rows have 32 bytes); export it again")
    rows = np.frombuffer(content, ROW)
    quats = (rows["rotation"].astype(float) - 128) / 128
    # Of a row of zeros this would be four times -1.
    quats[~rows["rotation"].any(axis=1)] = 0
    rgba = rows["rgba"] / 255
    values = Columns(
        means=rows["mean"].astype(float),
        quats=quats,
        log_scales=logarithms(rows["scale"].astype(float)),
        opacities=rgba[:, 3],
        sh_dc=rgb_to_sh(rgba[:, :3]),
    )
    return cloud_of(path, values, notify)
