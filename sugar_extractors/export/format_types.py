# SPDX-License-Identifier: Apache-2.0
"""Types of the entries in the table of formats, ``formats.py``."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.formats.moved import GLB_AXES
from gaussian_splatting.formats.spz import SpzFit
from sugar_extractors.texture.textured_mesh_io import TexturedMesh
from sugar_utils.errors import Notify

Writer = Callable[[Path, GaussianCloud], np.ndarray | None]
"""Writes Gaussians; returns the order in which it wrote them, (N,), None for the cloud's order."""
Reader = Callable[[Path, Notify], GaussianCloud]
"""Reads Gaussians in the axes of the file."""

_Z_UP = np.array([[1.0, 0, 0, 0], [0, 0, -1, 0], [0, 1, 0, 0], [0, 0, 0, 1]])  # from y up to z up


class Axes(enum.Enum):
    """Axes of a format's files."""

    CAPTURE = "capture"  # as the result has them: a capture's, y down, or y up where it is upright
    Y_UP = "y up"
    Z_UP = "z up"  # where the result is upright; else a capture's


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """A format that results can be exported to; base of the formats of Gaussians and meshes."""

    name: str  # value of --to
    help: str = ""  # what to say of it in the help of --to
    suffix: str  # of its files, with the first dot
    axes: Axes = Axes.CAPTURE
    units_per_metre: float = 1.0
    # Moves a file to the original frame of a capture by an offset, (3,), in the capture's axes;
    # None where the format has too few digits.
    move_to_original: Callable[[Path, np.ndarray], None] | None = None
    check_packages: Callable[[], object] | None = None  # raises a UserError where one is missing

    def matrix(self, upright: bool) -> np.ndarray:
        """Return the matrix from the world that was exported to the format's axes. (4, 4)

        Args:
            upright: Whether that world has y up; else it has a capture's axes.
        """
        if self.axes is Axes.Y_UP and not upright:
            turn = GLB_AXES
        elif self.axes is Axes.Z_UP and upright:
            turn = _Z_UP
        else:
            turn = np.eye(4)
        scale = self.units_per_metre
        return np.diag([scale, scale, scale, 1.0]) @ turn

    def file_path(self, path: Path) -> Path:
        """Return the file of the format for a name that may lack the suffix, or end in part of it.

        ``a``, ``a.gltf`` and ``a.gltf.glb`` are the same file for the suffix ``.gltf.glb``, and
        ``a.glb`` is a name that is complete.
        """
        parts = Path(f"a{self.suffix}").suffixes
        last_part = parts[-1]
        ending = path.suffix.lower()
        if ending == last_part:
            return path.with_suffix(last_part)
        if len(parts) > 1 and ending == parts[0]:
            return path.with_suffix(f"{ending}{last_part}")
        return path.with_name(f"{path.name}{self.suffix}")


@dataclass(frozen=True, kw_only=True)
class GaussianFormat(ExportFormat):
    """A format of Gaussians."""

    writer: Writer
    reader: Reader | None = None  # None where another entry reads its files
    read_suffixes: tuple[str, ...] = ()  # of files that ``reader`` reads, lower case
    holds_antialiasing: bool = False  # whether other programs can read that Gaussians are such
    # Compares a cloud with the ranges of the format; None where it holds all values.
    fit: Callable[[Path, GaussianCloud], SpzFit] | None = None


@dataclass(frozen=True)
class MeshExport:
    """A mesh on its way into a file."""

    mesh: TexturedMesh  # in the axes that the format's writer expects
    target: Path  # file that is exported
    paths: Mapping[Path, Path]  # where to write each of ``files_of(target)`` for now
    upright: bool  # whether y is up already
    lit: bool  # whether viewers light the mesh
    normal_map: bool
    notify: Notify

    @property
    def path(self) -> Path:
        """Where to write the target for now."""
        return self.paths[self.target]


def _only_target(target: Path, normal_map: bool) -> list[Path]:
    return [target]


@dataclass(frozen=True, kw_only=True)
class MeshFormat(ExportFormat):
    """A format of textured meshes."""

    writer: Callable[[MeshExport], None]
    # All files of an export, the target first: (target, normal_map) -> files.
    files_of: Callable[[Path, bool], list[Path]] = _only_target
    writer_turns: bool = False  # whether the writer gets the mesh before :meth:`matrix`
    holds_normal_map: bool = False
    for_printers: bool = False  # whether a result has to be scaled to metres
