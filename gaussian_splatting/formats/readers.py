# SPDX-License-Identifier: Apache-2.0
"""Readers of the files of Gaussians that need no other package, by their suffix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.data.ply import read_gaussian_ply
from gaussian_splatting.data.world_offset import offset_for
from gaussian_splatting.formats.file_kinds import refuse_other_kinds
from gaussian_splatting.formats.moved import GLB_AXES, moved_cloud
from gaussian_splatting.formats.sog import read_sog
from gaussian_splatting.formats.splat_file import read_splat
from gaussian_splatting.formats.spz import read_spz
from sugar_utils.errors import Notify, UserError

READERS: dict[str, Callable[[Path, Notify], GaussianCloud]] = {
    ".ply": read_gaussian_ply,
    ".spz": read_spz,
    ".sog": read_sog,
    ".splat": read_splat,
}
"""Readers of Gaussians in the axes of the file; they report what they change or leave out."""

Y_UP = (".spz",)  # files whose y points up


def read_gaussians(path: Path, notify: Notify, offset: np.ndarray | None = None) -> GaussianCloud:
    """Read a file of Gaussians in a capture's axes, y down.

    Args:
        offset: Of a capture far from the origin, in world units, (3,); it is subtracted from files
            in the original coordinates.
    """
    refuse_other_kinds(path)
    suffix = path.suffix.lower()
    if suffix not in READERS:
        raise UserError(
            f"{path}: not one of {', '.join(READERS)}; make one of it with "
            f"python export.py {path} --to ply"
        )
    if suffix == ".ply":
        # Its coordinates may have more digits than float32.
        return read_gaussian_ply(path, notify, offset)
    cloud = READERS[suffix](path, notify)
    if suffix in Y_UP:
        cloud = moved_cloud(cloud, GLB_AXES)
    if offset is None or not offset.any():
        return cloud
    means = cloud.means.double().numpy()
    moved = means - offset_for(means, offset)
    return replace(cloud, means=torch.from_numpy(moved.astype(np.float32)))
