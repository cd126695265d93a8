# SPDX-License-Identifier: Apache-2.0
"""Readers of the files of Gaussians that need no other package, by their suffix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.moved import moved_cloud
from gaussian_splatting.data.world_offset import offset_for
from gaussian_splatting.formats.file_kinds import refuse_other_kinds
from gaussian_splatting.formats.placement import Placement
from gaussian_splatting.formats.ply import read_gaussian_ply
from gaussian_splatting.formats.sog import read_sog
from gaussian_splatting.formats.splat_file import read_splat
from gaussian_splatting.formats.spz import read_spz
from sugar_utils.command_text import command_text
from sugar_utils.errors import Notify, UserError

READERS: dict[str, Callable[[Path, Notify], GaussianCloud]] = {
    ".ply": read_gaussian_ply,
    ".spz": read_spz,
    ".sog": read_sog,
    ".splat": read_splat,
}
"""Readers of Gaussians in the axes of the file; they report what they change or leave out."""


def read_gaussians(
    path: Path, notify: Notify, world_offset: np.ndarray | None = None
) -> GaussianCloud:
    """Read a file of Gaussians into the scene, by the placement of its record.

    Args:
        path: The file; without a record it has the coordinates of the scene, or of the original.
        notify: Called with lines about what is changed or left out.
        world_offset: Of the scene: what is subtracted from the coordinates of the original. (3,)
    """
    refuse_other_kinds(path)
    suffix = path.suffix.lower()
    if suffix not in READERS:
        raise UserError(
            f"{path}: not one of {', '.join(READERS)}; make one of it with "
            f"{command_text('export', path, '--to', 'ply')}"
        )
    placement = Placement.of(path)
    offset = placement.offset if placement.is_recorded else world_offset
    cloud = near_cloud(READERS[suffix], path, notify, offset)
    to_scene = placement.to_scene(world_offset)
    return cloud if np.array_equal(to_scene, np.eye(4)) else moved_cloud(cloud, to_scene)


def near_cloud(
    reader: Callable[[Path, Notify], GaussianCloud],
    path: Path,
    notify: Notify,
    offset: np.ndarray | None,
) -> GaussianCloud:
    """Read Gaussians in the axes of the file, less an offset that its coordinates may have. (3,)"""
    if reader is read_gaussian_ply:
        # Its coordinates may have more digits than float32.
        return read_gaussian_ply(path, notify, offset)
    cloud = reader(path, notify)
    if offset is None or not offset.any():
        return cloud
    means = cloud.means.double().numpy()
    moved = means - offset_for(means, offset)
    return replace(cloud, means=torch.from_numpy(moved.astype(np.float32)))
