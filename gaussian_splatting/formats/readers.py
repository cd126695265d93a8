# SPDX-License-Identifier: Apache-2.0
"""Readers of the files of Gaussians that need no other package, by their suffix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

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
from sugar_utils.device import float32_tensor
from sugar_utils.errors import Notify, UserError

READERS: dict[str, Callable[[Path, Notify], GaussianCloud]] = {
    ".ply": read_gaussian_ply,
    ".spz": read_spz,
    ".sog": read_sog,
    ".splat": read_splat,
}
"""Readers of Gaussians in the axes of the file; they report what they change or leave out."""


ReadAsWritten = Callable[[Path, Notify, np.ndarray | None], GaussianCloud]
"""Reads a file in its own axes, less an offset that its coordinates may have. (3,)"""


def read_as_written(path: Path, notify: Notify, offset: np.ndarray | None = None) -> GaussianCloud:
    """Read a file of Gaussians in its own axes.

    Args:
        path: The file.
        notify: Called with lines about what is changed or left out.
        offset: That is subtracted from coordinates far from the origin. (3,)
    """
    refuse_other_kinds(path)
    suffix = path.suffix.lower()
    if suffix not in READERS:
        raise UserError(
            f"{path}: not one of {', '.join(READERS)}; make one of it with "
            f"{command_text('export', path, '--to', 'ply')}"
        )
    return near_cloud(READERS[suffix], path, notify, offset)


def read_gaussians(
    path: Path,
    notify: Notify,
    world_offset: np.ndarray | None = None,
    read: ReadAsWritten = read_as_written,
) -> GaussianCloud:
    """Read Gaussians into the scene: from where their record says that they stand.

    Args:
        path: Without a record it has the coordinates of the scene, or of the original.
        notify: Called with lines about what is changed or left out.
        world_offset: Of the scene: what is subtracted from the coordinates of the original, (3,);
            None: the one that the file was made with.
        read: Reads the file; the usual one reads files of Gaussians alone.
    """
    placement = Placement.of(path)
    offset = placement.offset if placement.is_recorded else world_offset
    return moved_cloud(read(path, notify, offset), placement.to_scene(world_offset))


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
    return replace(cloud, means=float32_tensor(moved))
