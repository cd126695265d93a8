# SPDX-License-Identifier: Apache-2.0
"""The table of export formats. A new format is one entry of :data:`GAUSSIAN_FORMATS` or
:data:`MESH_FORMATS`; flags, help texts, suffixes, readers and writers follow from it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.data.ply import write_gaussian_ply
from gaussian_splatting.formats import readers, spz
from gaussian_splatting.formats.moved import GLB_AXES
from gaussian_splatting.formats.sog import write_sog
from gaussian_splatting.formats.splat_file import write_splat
from gaussian_splatting.formats.spz import SpzFit
from sugar_extractors.export import gltf_gaussians, original_frame, printable_meshes, usd_files
from sugar_extractors.export.mesh_reduction import shape_of
from sugar_extractors.texture import textured_mesh_io
from sugar_extractors.texture.textured_mesh_io import MeshStyle, TexturedMesh, mesh_files
from sugar_scene.triangle_mesh import open_edge_share
from sugar_utils.errors import Notify
from sugar_utils.libraries import load_package

Writer = Callable[[Path, GaussianCloud], np.ndarray | None]
"""Writes Gaussians; returns the order in which it wrote them, (N,), None for the cloud's order."""
Reader = Callable[[Path, Notify], GaussianCloud]
"""Reads Gaussians in the axes of the file."""

_MILLIMETRES_PER_METRE = 1000.0
_Z_UP = np.array([[1.0, 0, 0, 0], [0, 0, -1, 0], [0, 1, 0, 0], [0, 0, 0, 1]])  # from y up to z up


class Axes(enum.Enum):
    """Axes of a format's files."""

    CAPTURE = "capture"  # as the result has them: a capture's, y down, or y up where it is upright
    Y_UP = "y up"
    Z_UP = "z up"  # where the result is upright; else a capture's


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """What is the same for Gaussians and meshes: one format that results can be exported to."""

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


def _write_glb(export: MeshExport) -> None:
    style = MeshStyle(y_up=export.upright, lit=export.lit)
    textured_mesh_io.write_glb(export.path, export.mesh, export.target, style)


def _write_obj(export: MeshExport) -> None:
    files = mesh_files(export.target, glb=False, normal_map=export.normal_map)
    targets = {file: export.paths[file] for file in files}
    textured_mesh_io.write_mesh_files(targets, export.mesh, MeshStyle(obj_normals=True))


def _obj_files(target: Path, normal_map: bool) -> list[Path]:
    return mesh_files(target, glb=False, normal_map=normal_map)[::-1]


def _write_usdz(export: MeshExport) -> None:
    usd_files.write_usdz(export.path, export.mesh)


def _write_printable(export: MeshExport, kind: str) -> None:
    body = printable_meshes.closed_body(shape_of(export.mesh))
    sides = " x ".join(f"{side:.1f}" for side in np.ptp(body.vertices, axis=0))
    open_share = open_edge_share(body)
    state = "closed"
    if open_share:
        state = f"{open_share:.2%} of its edges are open: close it before printing"
    export.notify(f"{body.n_faces:,} triangles, {sides} mm, {state}")
    printable_meshes.write_printable(export.path, body, kind)


def _read_usd(path: Path, notify: Notify) -> GaussianCloud:
    return usd_files.read_usd_gaussians(path)


def _read_gltf(path: Path, notify: Notify) -> GaussianCloud:
    return gltf_gaussians.read_gltf_gaussians(path)


GAUSSIAN_FORMATS = (
    GaussianFormat(
        name="spz",
        help="for phones and web pages, a tenth of the size",
        suffix=".spz",
        axes=Axes.Y_UP,
        writer=spz.write_spz,
        reader=readers.READERS[".spz"],
        read_suffixes=(".spz",),
        holds_antialiasing=True,
        fit=spz.spz_fit,
    ),
    GaussianFormat(
        name="spz4",
        help="its version 4",
        suffix=".spz",
        axes=Axes.Y_UP,
        writer=partial(spz.write_spz, version=4),
        holds_antialiasing=True,
        fit=spz.spz_fit,
    ),
    GaussianFormat(
        name="sog",
        help="for PlayCanvas",
        suffix=".sog",
        writer=write_sog,
        reader=readers.READERS[".sog"],
        read_suffixes=(".sog",),
        holds_antialiasing=True,
    ),
    GaussianFormat(
        name="splat",
        help="without view-dependent colour",
        suffix=".splat",
        writer=write_splat,
        reader=readers.READERS[".splat"],
        read_suffixes=(".splat",),
    ),
    GaussianFormat(
        name="ply",
        suffix=".ply",
        writer=write_gaussian_ply,
        reader=readers.READERS[".ply"],
        read_suffixes=(".ply",),
        move_to_original=original_frame.move_ply,
    ),
    GaussianFormat(
        name="gltf",
        help="with KHR_gaussian_splatting, y up, as NAME.gltf.glb",
        suffix=".gltf.glb",
        axes=Axes.Y_UP,
        writer=gltf_gaussians.write_gltf_gaussians,
        reader=_read_gltf,
        read_suffixes=(".glb",),
        move_to_original=original_frame.move_glb,
    ),
    GaussianFormat(
        name="usd",
        help="a ParticleField",
        suffix=".usd",
        axes=Axes.Y_UP,
        writer=usd_files.write_usd_gaussians,
        reader=_read_usd,
        read_suffixes=(".usd", ".usda", ".usdc"),
        move_to_original=original_frame.move_usd,
        check_packages=partial(usd_files.load_usd, "--to usd"),
    ),
)
MESH_FORMATS = (
    MeshFormat(
        name="glb",
        suffix=".glb",
        axes=Axes.Y_UP,
        writer=_write_glb,
        writer_turns=True,
        holds_normal_map=True,
        move_to_original=original_frame.move_glb,
    ),
    MeshFormat(
        name="obj",
        suffix=".obj",
        writer=_write_obj,
        files_of=_obj_files,
        holds_normal_map=True,
        move_to_original=original_frame.move_obj,
    ),
    MeshFormat(
        name="usdz",
        help="for phones",
        suffix=".usdz",
        axes=Axes.Y_UP,
        writer=_write_usdz,
        check_packages=partial(usd_files.load_usd, "--to usdz"),
    ),
    MeshFormat(
        name="stl",
        help="for printers",
        suffix=".stl",
        axes=Axes.Z_UP,
        units_per_metre=_MILLIMETRES_PER_METRE,
        writer=partial(_write_printable, kind="stl"),
        for_printers=True,
    ),
    MeshFormat(
        name="3mf",
        help="for printers",
        suffix=".3mf",
        axes=Axes.Z_UP,
        units_per_metre=_MILLIMETRES_PER_METRE,
        writer=partial(_write_printable, kind="3mf"),
        for_printers=True,
        check_packages=partial(
            load_package, "--to 3mf", "lxml", "lxml.etree", instead="use --to stl"
        ),
    ),
)
FORMATS: dict[str, ExportFormat] = {
    entry.name: entry for entry in (*GAUSSIAN_FORMATS, *MESH_FORMATS)
}
GAUSSIANS = tuple(entry.name for entry in GAUSSIAN_FORMATS)
MESHES = tuple(entry.name for entry in MESH_FORMATS)


def format_help() -> str:
    """Return the help of ``--to``: all formats with what there is to say of each."""
    gaussians = "; ".join(_described(entry) for entry in GAUSSIAN_FORMATS)
    meshes = "; ".join(_described(entry) for entry in MESH_FORMATS)
    return f"format. Gaussians: {gaussians}. Textured meshes: {meshes}"


def _described(entry: ExportFormat) -> str:
    return f"{entry.name}, {entry.help}" if entry.help else entry.name


def readable_suffixes() -> str:
    """Return the main suffix of each readable format of Gaussians, as words of a sentence."""
    suffixes = [entry.read_suffixes[0] for entry in GAUSSIAN_FORMATS if entry.read_suffixes]
    return f"{', '.join(suffixes[:-1])} or {suffixes[-1]}"
