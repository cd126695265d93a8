# SPDX-License-Identifier: Apache-2.0
"""Types of the entries in the table of formats, ``formats.py``."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.moved import GLB_AXES, Z_UP_AXES
from gaussian_splatting.formats.placement import UP, Z_UP
from gaussian_splatting.formats.spz import SpzFit
from sugar_extractors.export_contents import CombinedExport, MeshExport, PointExport
from sugar_utils.errors import Notify

Writer = Callable[[Path, GaussianCloud], np.ndarray | None]
"""Writes Gaussians; returns the order in which it wrote them, (N,), None for the cloud's order."""
Reader = Callable[[Path, Notify], GaussianCloud]
"""Reads Gaussians in the axes of the file."""


class World(enum.Enum):
    """Axes of the world in which a result is exported."""

    CAPTURE = "capture"  # y down and z forward, as COLMAP has them
    UPRIGHT = "upright"  # y up
    MAP = "map"  # x east, y north, z up


WORLD_OF_UP = {UP: World.UPRIGHT, Z_UP: World.MAP}
"""World of a result by the axis that points up in it."""


class Axes(enum.Enum):
    """Axes of a format's files."""

    CAPTURE = "capture"  # as the result has them
    Y_UP = "y up"
    Z_UP = "z up"  # where the result is upright or on a map; else a capture's


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """A format that results can be exported to; base of the formats of Gaussians and meshes."""

    name: str  # value of --to
    help: str = ""  # what to say of it in the help of --to
    suffix: str  # of its files, with the first dot
    file_name: str = ""  # of its file in a folder of its own; empty where that may have any name
    axes: Axes = Axes.CAPTURE
    units_per_metre: float = 1.0
    # Moves a file to the original frame of a capture, or to a map, by an offset, (3,), in the axes
    # of the file; None where the format has too few digits.
    move_to_original: Callable[[Path, np.ndarray], None] | None = None
    check_packages: Callable[[], object] | None = None  # raises a UserError where one is missing
    holds_colliders: bool = False
    # Writes a few values into a file, for programs that show them beside it; None: it holds none.
    note_in_file: Callable[[Path, Mapping[str, object]], None] | None = None

    @property
    def holds_far_coordinates(self) -> bool:
        """Whether files have digits enough for coordinates far from the origin."""
        return self.move_to_original is not None

    def matrix(self, world: World) -> np.ndarray:
        """Return the matrix from the world that was exported to the format's axes. (4, 4)"""
        turn = np.eye(4)
        if self.axes is Axes.Y_UP and world is World.CAPTURE:
            turn = GLB_AXES
        elif self.axes is Axes.Y_UP and world is World.MAP:
            turn = Z_UP_AXES.T
        elif self.axes is Axes.Z_UP and world is World.UPRIGHT:
            turn = Z_UP_AXES
        scale = self.units_per_metre
        return np.diag([scale, scale, scale, 1.0]) @ turn

    def up(self, world: World) -> str | None:
        """Return the axis that points up in a file of the format; None where that is unknown."""
        if world is World.CAPTURE:
            return None
        if self.axes is Axes.CAPTURE:
            return UP if world is World.UPRIGHT else Z_UP
        return UP if self.axes is Axes.Y_UP else Z_UP

    def file_path(self, path: Path) -> Path:
        """Return the file of the format for a name that may lack the suffix, or end in part of it.

        For a file that has a folder of its own, it is the name of the folder or of the file.
        ``a``, ``a.gltf`` and ``a.gltf.glb`` are the same file for the suffix ``.gltf.glb``, and
        ``a.glb`` is a name that is complete.
        """
        if self.file_name:
            return path if path.name == self.file_name else path / self.file_name
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
    # Folders that a file needs beside it, which the writer makes under names not in use.
    parts_of: Callable[[Path], list[Path]] | None = None
    # Compares a cloud with the ranges of the format; None where it holds all values.
    fit: Callable[[Path, GaussianCloud], SpzFit] | None = None


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
    holds_levels: bool = False  # whether there may be several levels of detail
    for_printers: bool = False  # whether a result has to be scaled to metres


@dataclass(frozen=True, kw_only=True)
class CombinedFormat(ExportFormat):
    """A format of files with a textured mesh and its Gaussians."""

    writer: Callable[[CombinedExport], None]
    reader: Reader  # of the Gaussians
    holds_antialiasing: bool = False  # whether other programs can read that Gaussians are such
    # Compares a cloud with the ranges of the format; None where it holds all values.
    fit: Callable[[Path, GaussianCloud], SpzFit] | None = None


@dataclass(frozen=True, kw_only=True)
class PointFormat(ExportFormat):
    """A format of points, to which meshes and Gaussians can be exported."""

    writer: Callable[[PointExport], None]

    @property
    def holds_far_coordinates(self) -> bool:
        """Whether files have digits enough for coordinates far from the origin."""
        return True
