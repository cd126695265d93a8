# SPDX-License-Identifier: Apache-2.0
"""The interface of export formats, and the inputs of its methods."""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np

from gaussian_splatting.core.moved import GLB_AXES, Z_UP_AXES
from gaussian_splatting.formats.placement import UP, Z_UP
from sugar_extractors.export.engines.engine_options import EngineOptions
from sugar_extractors.export_contents import CoordinateSystem
from sugar_utils.errors import Notify

if TYPE_CHECKING:
    from sugar_extractors.export.export_reading import ResultFiles

AnyContent = TypeVar("AnyContent")


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


@dataclass(frozen=True)
class Output:
    """The files of an export, and how they are written."""

    name: str  # of the format
    target: Path  # file that is exported
    levels: tuple[Path, ...]  # files of its levels of detail
    binding_file: Path  # for the binding of Gaussians to their mesh
    paths: Mapping[Path, Path]  # where to write each file for now
    world: World
    lit: bool  # whether viewers light a mesh
    normal_map: bool
    engines: EngineOptions
    offset: np.ndarray  # from coordinates near the origin to full ones, (3,)
    original_frame: bool  # whether files get full coordinates
    system: CoordinateSystem | None  # of the map; None where there is none
    is_metric: bool  # whether a unit is a metre
    notify: Notify

    @property
    def path(self) -> Path:
        """Where to write the target for now."""
        return self.paths[self.target]


@dataclass(frozen=True, kw_only=True)
class ExportFormat(abc.ABC, Generic[AnyContent]):
    """Abstract base of the formats that results can be exported to."""

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
    holds_mesh: ClassVar[bool] = False
    holds_gaussians: ClassVar[bool] = False
    for_printers: bool = False  # whether a result has to be scaled to metres
    holds_colliders: bool = False
    # Writes a few values into a file, for programs that show them beside it; None: it holds none.
    note_in_file: Callable[[Path, Mapping[str, object]], None] | None = None

    @property
    def holds_far_coordinates(self) -> bool:
        """Whether files have digits enough for coordinates far from the origin."""
        return self.move_to_original is not None

    @abc.abstractmethod
    def read(self, reader: ResultFiles) -> AnyContent:
        """Read what the format holds of a result.

        Raises:
            UserError: The result is of another kind.
        """

    @abc.abstractmethod
    def write(self, content: AnyContent, output: Output) -> None:
        """Write a content, which was moved by :meth:`writer_matrix`, and report it."""

    @abc.abstractmethod
    def file_of(self, result: Path) -> Path:
        """Return the file to read of a result, which may be a folder of results."""

    def files(self, target: Path, normal_map: bool) -> list[Path]:
        """Return all files of an export without levels of detail, the target first."""
        return [target]

    def folders(self, target: Path) -> list[Path]:
        """Return the folders that belong to a target as it is now."""
        return []

    def writer_matrix(self, world: World) -> np.ndarray:
        """Return the matrix from the world that was exported to the axes of the writer. (4, 4)"""
        return self.matrix(world)

    def add_offset(self, output: Output) -> np.ndarray | None:
        """Add the offset to full coordinates to written files, if they are to have them.

        Returns:
            The offset that they have now, in their axes, (3,); None for none.
        """
        if not output.original_frame or self.move_to_original is None:
            return None
        offset = self.matrix(output.world)[:3, :3] @ output.offset
        for file in (output.target, *output.levels):
            self.move_to_original(output.paths[file], offset)
        return offset

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


AnyFormat = ExportFormat[Any]
"""A format of any kind."""
