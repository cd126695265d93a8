# SPDX-License-Identifier: Apache-2.0
"""Kinds of export formats: Gaussians, textured meshes, both in one file, points.

A kind reads what its formats hold of a result, and writes it by the writer of the format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from gaussian_splatting.core.cloud import NO_CUTOFF, GaussianCloud
from gaussian_splatting.formats.fidelity import fidelity
from gaussian_splatting.formats.spz import SpzFit
from sugar_extractors.export.engines.colliders import collider_of
from sugar_extractors.export.engines.levels import level_file
from sugar_extractors.export.format_types import ExportFormat, Output, World
from sugar_extractors.export.mesh_and_gaussians import gaussians_of, mesh_of, points_of
from sugar_extractors.export.reposing import write_binding
from sugar_extractors.export_contents import (
    Collider,
    CombinedContent,
    CombinedExport,
    GaussianContent,
    MeshContent,
    MeshExport,
    PointCloud,
    PointExport,
)
from sugar_extractors.texture.mesh_reduction import shape_of
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh
from sugar_utils.errors import Notify

if TYPE_CHECKING:
    from sugar_extractors.export.export_reading import ResultFiles

Writer = Callable[[Path, GaussianCloud], np.ndarray | None]
"""Writes Gaussians; returns the order in which it wrote them, (N,), None for the cloud's order."""
Reader = Callable[[Path, Notify], GaussianCloud]
"""Reads Gaussians in the axes of the file."""
Fit = Callable[[Path, GaussianCloud], SpzFit]
"""Compares Gaussians with the ranges of a format."""


@dataclass(frozen=True, kw_only=True)
class GaussianFormat(ExportFormat[GaussianContent]):
    """A format of Gaussians."""

    holds_gaussians: ClassVar[bool] = True
    writer: Writer
    reader: Reader  # of files that the writer wrote
    read_suffixes: tuple[str, ...] = ()  # of all files that ``reader`` reads, lower case
    holds_antialiasing: bool = False  # whether other programs can read that Gaussians are such
    # Folders that a file needs beside it, which the writer makes under names not in use.
    parts_of: Callable[[Path], list[Path]] | None = None
    fit: Fit | None = None  # None where it holds all values

    def file_of(self, result: Path) -> Path:
        """Return the Gaussians of a folder of results, or the result itself."""
        return gaussians_of(result)

    def folders(self, target: Path) -> list[Path]:
        """Return the folders that the target needs beside it."""
        if self.parts_of is None or not target.is_file():
            return []
        return [folder for folder in self.parts_of(target) if folder.is_dir()]

    def read(self, reader: ResultFiles) -> GaussianContent:
        """Read the Gaussians of a result."""
        return reader.gaussians()

    def write(self, content: GaussianContent, output: Output) -> None:
        """Write Gaussians, and report what the file holds of them."""
        cloud = content.cloud
        if content.bound is not None:
            write_binding(output.paths[output.binding_file], content.bound)
            output.notify(f"where each Gaussian sits on the mesh: {output.binding_file}")
        is_held = _held_rows(cloud, output, self.fit, self.holds_antialiasing)
        order = self.writer(output.path, cloud)
        written = self.reader(output.path, output.notify)
        if len(written) == len(cloud) and is_held.any():
            expected = cloud if order is None else cloud.select(torch.from_numpy(order))
            _report_gaussians(expected, written, is_held, output)


@dataclass(frozen=True, kw_only=True)
class MeshFormat(ExportFormat[MeshContent]):
    """A format of textured meshes."""

    holds_mesh: ClassVar[bool] = True
    writer: Callable[[MeshExport], None]
    # All files of an export, the target first: (target, normal_map) -> files; None: the target.
    files_of: Callable[[Path, bool], list[Path]] | None = None
    writer_turns: bool = False  # whether the writer gets the mesh before :meth:`matrix`
    holds_normal_map: bool = False
    holds_levels: bool = False  # whether there may be several levels of detail

    def file_of(self, result: Path) -> Path:
        """Return the textured mesh of a folder of results, or the result itself."""
        return mesh_of(result) if result.is_dir() else result

    def files(self, target: Path, normal_map: bool) -> list[Path]:
        """Return the files of an export without levels of detail, the target first."""
        return [target] if self.files_of is None else self.files_of(target, normal_map)

    def writer_matrix(self, world: World) -> np.ndarray:
        """Return the matrix from the world that was exported to the axes of the writer. (4, 4)"""
        return np.eye(4) if self._is_turned_by_writer(world) else self.matrix(world)

    def _is_turned_by_writer(self, world: World) -> bool:
        return self.writer_turns and world is World.CAPTURE

    def read(self, reader: ResultFiles) -> MeshContent:
        """Read the textured mesh of a result."""
        return reader.mesh()

    def write(self, content: MeshContent, output: Output) -> None:
        """Write a textured mesh with its levels of detail."""
        mesh, *coarser = content.levels
        self.writer(
            MeshExport(
                mesh=mesh,
                target=output.target,
                paths=output.paths,
                upright=not self._is_turned_by_writer(output.world),
                lit=output.lit,
                normal_map=output.normal_map,
                notify=output.notify,
                collider=_collider(mesh, output),
                coarser=tuple(coarser),
            )
        )
        if not self.for_printers:
            # Of a closed body its writer has reported the numbers.
            _report_mesh(output.target, mesh, output)
        for number, level in enumerate(coarser, start=1):
            _report_mesh(level_file(output.target, number), level, output)


@dataclass(frozen=True, kw_only=True)
class CombinedFormat(ExportFormat[CombinedContent]):
    """A format of files with a textured mesh and its Gaussians."""

    holds_mesh: ClassVar[bool] = True
    holds_gaussians: ClassVar[bool] = True
    writer: Callable[[CombinedExport], None]
    reader: Reader  # of the Gaussians
    holds_antialiasing: bool = False  # whether other programs can read that Gaussians are such
    fit: Fit | None = None  # None where it holds all values

    def file_of(self, result: Path) -> Path:
        """Return the textured mesh of a result."""
        return mesh_of(result)

    def read(self, reader: ResultFiles) -> CombinedContent:
        """Read the textured mesh of a result and its Gaussians."""
        return reader.combined()

    def write(self, content: CombinedContent, output: Output) -> None:
        """Write a textured mesh and its Gaussians."""
        (mesh,) = content.mesh.levels
        cloud = content.cloud
        is_held = _held_rows(cloud, output, self.fit, self.holds_antialiasing)
        self.writer(
            CombinedExport(
                mesh=mesh,
                cloud=cloud,
                target=output.target,
                path=output.path,
                lit=output.lit,
                collider=_collider(mesh, output),
            )
        )
        written = self.reader(output.path, output.notify)
        _report_mesh(output.target, mesh, output)
        _report_gaussians(cloud, written, is_held, output)


@dataclass(frozen=True, kw_only=True)
class PointFormat(ExportFormat[PointCloud]):
    """A format of points, to which meshes and Gaussians can be exported."""

    writer: Callable[[PointExport], None]

    @property
    def holds_far_coordinates(self) -> bool:
        """Whether files have digits enough for coordinates far from the origin."""
        return True

    def file_of(self, result: Path) -> Path:
        """Return the file of a result whose points are exported."""
        return points_of(result)

    def add_offset(self, output: Output) -> np.ndarray:
        """Return the offset that the writer has added. (3,)"""
        return output.offset

    def read(self, reader: ResultFiles) -> PointCloud:
        """Read the points of a result."""
        return reader.points()

    def write(self, content: PointCloud, output: Output) -> None:
        """Write points in full coordinates."""
        self.writer(
            PointExport(
                points=content,
                offset=output.offset,
                system=output.system,
                is_metric=output.is_metric,
                path=output.path,
                notify=output.notify,
            )
        )
        output.notify(f"{output.target.name}: {len(content.positions):,} points")


def _held_rows(
    cloud: GaussianCloud, output: Output, fit: Fit | None, holds_antialiasing: bool
) -> np.ndarray:
    """Return which Gaussians a format holds as they are, and report the others. (N,) bool

    What other programs ignore is reported, too.
    """
    if cloud.antialiased and not holds_antialiasing:
        output.notify(
            f"note: these Gaussians are antialiased, which other programs cannot read from "
            f"{output.name}: they show those below a pixel too large; use --to spz or sog"
        )
    if cloud.cutoff_deviations != NO_CUTOFF:
        output.notify(
            f"note: these Gaussians end at {cloud.cutoff_deviations:g} standard deviations, which "
            "other programs do not know: they show them a little larger and more opaque"
        )
    if fit is None:
        return np.ones(len(cloud), bool)
    result = fit(output.target, cloud)
    for line in result.notes:
        output.notify(line)
    return result.is_held


def _report_gaussians(
    expected: GaussianCloud, written: GaussianCloud, is_held: np.ndarray, output: Output
) -> None:
    """Report how far written Gaussians are from those that were to be written."""
    rows = torch.from_numpy(is_held)
    errors = fidelity(expected.select(rows), written.select(rows))
    output.notify(f"{len(expected):,} Gaussians; {errors.line()}")


def _report_mesh(path: Path, mesh: TexturedMesh, output: Output) -> None:
    side = mesh.texture.shape[1]
    output.notify(f"{path.name}: {mesh.n_faces:,} triangles, {side} texels a side")


def _collider(mesh: TexturedMesh, output: Output) -> Collider | None:
    """Return the shapes to collide with of a mesh, where they are wanted."""
    if output.engines.collision is None:
        return None
    return collider_of(shape_of(mesh), output.engines, output.notify)
