# SPDX-License-Identifier: Apache-2.0
"""Reads the files of Gaussians that need no other package, by their suffix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.data.ply import read_gaussian_ply
from gaussian_splatting.formats.moved import GLB_AXES, moved_cloud
from gaussian_splatting.formats.sog import read_sog
from gaussian_splatting.formats.splat_file import read_splat
from gaussian_splatting.formats.spz import read_spz
from sugar_utils.errors import Notify, UserError

READERS: dict[str, Callable[[Path, Notify], GaussianCloud]] = {
    ".ply": read_gaussian_ply,
    ".spz": read_spz,
    ".sog": lambda path, notify: read_sog(path),
    ".splat": lambda path, notify: read_splat(path),
}
"""Readers of Gaussians in the axes of the file; they say what they changed or left out."""

Y_UP = (".spz",)  # files whose y points up


def read_gaussians(path: Path, notify: Notify) -> GaussianCloud:
    """Read a file of Gaussians in a capture's axes, y down."""
    suffix = path.suffix.lower()
    if suffix not in READERS:
        raise UserError(
            f"{path}: not one of {', '.join(READERS)}; make one of it with "
            f"python export.py {path} --to ply"
        )
    cloud = READERS[suffix](path, notify)
    return moved_cloud(cloud, GLB_AXES) if suffix in Y_UP else cloud
