# SPDX-License-Identifier: Apache-2.0
"""Write a result in the format of another program, upright and in metres if wanted."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import MISSING, dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from gaussian_splatting.cloud import NO_CUTOFF, GaussianCloud
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.formats.fidelity import fidelity
from gaussian_splatting.formats.moved import moved_cloud
from gaussian_splatting.formats.packing import require_gaussians
from sugar_extractors.export.format_types import (
    ExportFormat,
    GaussianFormat,
    MeshExport,
    MeshFormat,
)
from sugar_extractors.export.formats import (
    FORMATS,
    GAUSSIANS,
    MESH_FORMATS,
    MESHES,
    format_help,
    readable_suffixes,
)
from sugar_extractors.export.mesh_reduction import simplified
from sugar_extractors.export.reading import (
    has_gaussians,
    read_any_gaussians,
    read_as_written,
    read_bound_gaussians,
)
from sugar_extractors.export.reposing import read_edited, reposed, write_binding
from sugar_extractors.results import capture_of, scene_of
from sugar_extractors.texture.placed_export import (
    PlacementOptions,
    moved_points,
    placement,
)
from sugar_extractors.texture.textured_mesh_io import TexturedMesh, read_textured_mesh
from sugar_trainers.capture import SugarSize
from sugar_trainers.naming import OUTPUT_ROOT
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path, check_writable, read_json, write_json_atomic
from sugar_utils.flags import boolean, positive_int
from sugar_utils.memory import format_bytes
from sugar_utils.settings import flag, parser_of

Paths = Mapping[Path, Path]  # for each file the path to write to

_flag = partial(flag, group="export")
# Help of flags of the texture stage that mean something else here.
_PLACEMENT_HELP = {
    "orient": "up: turn it upright, y up and standing on 0; needs the cameras of the capture",
    "scale_factor": "make it so many times as large",
    "known_distance": "make it metres: two photographs or two points x,y,z of the capture, and how "
    "many metres lie between the cameras or points",
}
_MATRIX_MEANING = "exported = matrix x (x, y, z, 1) of the capture; rows of 4"


@dataclass(frozen=True)
class ExportOptions:
    """Flags of ``export.py``, checked as far as they can be without the files."""

    result: Path = _flag(
        MISSING,
        f"what to export. Gaussians: a {readable_suffixes()}, a .pt of "
        "any stage, a folder; meshes: a textured .obj",
        positional=True,
        parse=Path,
    )
    to: str = _flag(
        MISSING,
        format_help(),
        choices=tuple(FORMATS),
        missing=f"choose one of {', '.join(FORMATS)}",
    )
    output: Path | None = _flag(
        None,
        "file to write, NAME or NAME.FORMAT; unset: output/exports/NAME.FORMAT",
        short="-o",
        parse=Path,
    )
    max_triangles: int | None = _flag(
        None,
        "leave so many triangles of the mesh; the picture is made anew for them",
        parse=positive_int,
        no_effect_when="for Gaussians it is an error",
    )
    texture_size: int | None = _flag(
        None,
        "texels per side of the picture at most",
        parse=positive_int,
        no_effect_when="for Gaussians it is an error",
    )
    normal_map: bool = _flag(
        False,
        "write the normals of the mesh with all its triangles as a picture, for programs "
        "that light it",
        no_effect_when="it is an error without --max_triangles",
    )
    lit: bool = _flag(
        False,
        "viewers light the mesh, by a plain material (roughness 1, metallic 0); else they "
        "show the colours of the texture as they are",
        no_effect_when="unless --to glb",
    )
    repose: Path | None = _flag(
        None,
        "edited mesh of the refined model, an .obj with the same triangles: its Gaussians "
        "move along",
        parse=Path,
        no_effect_when="it is an error unless the result is a refined model",
    )
    scene_path: Path | None = _flag(
        None,
        "scene folder, for its cameras; unset: the one that the result's own record names",
        short="-s",
        parse=Path,
        no_effect_when="without --orient up, --known_distance and --original_frame",
    )
    checkpoint_path: Path | None = _flag(
        None,
        "vanilla checkpoint whose cameras.json says where the cameras are, for worlds that "
        "another program moved; unset: that of the record, or the cameras of the scene",
        short="-c",
        parse=Path,
        no_effect_when="without --orient up, --known_distance and --original_frame",
    )
    original_frame: bool = _flag(
        False,
        "in the coordinates of the original capture, where it lies far from the origin, as "
        "in UTM coordinates: PLY and OBJ in float64, GLB, glTF and USD by their node; needs the "
        "scene",
        parse=boolean,
        nargs="?",
        const=True,
    )
    overwrite: bool = _flag(False, "replace a file that is there")
    placement: PlacementOptions = field(default_factory=PlacementOptions)

    def __post_init__(self) -> None:
        output = self.output
        # A name of dots has no stem that a suffix could follow.
        if output is not None and (output.is_dir() or not output.name.strip(".")):
            raise UserError(f"--output {output}: is a folder; name the file to write")
        mesh_format = self.format if isinstance(self.format, MeshFormat) else None
        if mesh_format is not None and self.repose is not None:
            raise UserError(
                f"--repose makes Gaussians; choose --to {', '.join(GAUSSIANS)}, not {self.to}"
            )
        if self.original_frame:
            self._check_original_frame()
        for_printers = mesh_format is not None and mesh_format.for_printers
        if for_printers and not self.placement.is_scaled:
            raise UserError(
                f"--to {self.to} is in millimetres: pass --known_distance, or --scale_factor with "
                "how many metres a unit of the capture is"
            )
        if self.format.check_packages is not None:
            self.format.check_packages()
        for name in ("max_triangles", "texture_size"):
            if getattr(self, name) is not None and mesh_format is None:
                raise UserError(f"--{name} is for meshes; choose --to {', '.join(MESHES)}")
        if self.normal_map:
            self._check_normal_map()

    def _check_original_frame(self) -> None:
        if self.format.move_to_original is None:
            wide = [entry.name for entry in FORMATS.values() if entry.move_to_original is not None]
            raise UserError(
                f"--original_frame: {self.to} has too few digits for the coordinates of the "
                f"original; choose --to {', '.join(wide)}"
            )
        if self.placement.wanted:
            raise UserError(
                "--original_frame leaves everything where it was; leave out --orient, "
                "--scale_factor and --known_distance"
            )

    def _check_normal_map(self) -> None:
        suitable = [entry.name for entry in MESH_FORMATS if entry.holds_normal_map]
        if self.max_triangles is None or self.to not in suitable:
            names = " or ".join(suitable)
            raise UserError(f"--normal_map needs --max_triangles, and --to {names}")

    @property
    def format(self) -> ExportFormat:
        """The entry of the table of formats that ``to`` names."""
        return FORMATS[self.to]

    @property
    def is_upright(self) -> bool:
        """Whether y is up in what is exported; else it has the axes of the capture."""
        return self.placement.orient == "up"

    @property
    def target(self) -> Path:
        """The file to write; a name without the format's suffix gets it."""
        if self.output is not None:
            return self.format.file_path(self.output)
        result = self.result.resolve()
        # The .pt of a run is named after an iteration; its folder says what it is.
        stem = result.parent.name if result.suffix == ".pt" else result.name.split(".")[0]
        return OUTPUT_ROOT / "exports" / f"{stem}{self.format.suffix}"

    @property
    def matrix_file(self) -> Path:
        """The JSON file beside the target with the matrix of a placed export."""
        return self.target.with_name(f"{self.target.name}.json")

    @property
    def binding_file(self) -> Path:
        """The archive beside the target that says where Gaussians sit on a mesh."""
        return self.target.with_name(f"{self.target.name}.binding.npz")


def export_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of ``export.py``; flags of a placement have the help that fits here."""
    changes = {name: {"group": "export", "help": text} for name, text in _PLACEMENT_HELP.items()}
    return parser_of(description, ExportOptions, examples="", **changes)


def export(options: ExportOptions, console: Console | None = None) -> Path:
    """Write a result in another format and return the file.

    Files appear only when all of them are complete.

    Raises:
        UserError: The result is missing or of another kind than the format, or the file exists.
    """
    console = console or Console()
    if not options.result.exists():
        raise UserError(f"{options.result}: no such file or folder; check the path of the result")
    target = options.target
    files = [target]
    if isinstance(options.format, MeshFormat):
        files = options.format.files_of(target, options.normal_map)
    present = [path for path in files if path.exists()]
    if present and not options.overwrite:
        raise UserError(f"{present[0]}: is there already; pass --overwrite True, or --output")
    check_writable(target.parent)
    all_files = [*files]
    if options.placement.wanted:
        all_files.append(options.matrix_file)
    if options.repose is not None:
        all_files.append(options.binding_file)
    with ExitStack() as stack:
        # They appear in reverse order, so that the target is the last.
        temporary = {path: stack.enter_context(atomic_path(path)) for path in all_files}
        file_format = options.format
        if isinstance(file_format, MeshFormat):
            matrix = _export_mesh(options, file_format, temporary, console)
        elif isinstance(file_format, GaussianFormat):
            matrix = _export_gaussians(options, file_format, temporary, console)
        else:
            raise TypeError(f"--to {options.to} is neither a mesh nor Gaussians")
        if options.original_frame and file_format.move_to_original is not None:
            offset = _scene(options, console).offset
            file_format.move_to_original(temporary[target], offset)
        if options.placement.wanted:
            note = {"matrix": matrix.tolist(), "meaning": _MATRIX_MEANING}
            write_json_atomic(temporary[options.matrix_file], note)
    if not options.placement.wanted:
        _remove_stale_matrix(options.matrix_file)
    n_bytes = sum(path.stat().st_size for path in files)
    console.info(f"{format_bytes(n_bytes)}: {target}")
    return target


def _remove_stale_matrix(path: Path) -> None:
    """Remove the record of an earlier export, which would be taken for that of this one."""
    if not path.is_file():
        return
    with contextlib.suppress(UserError):
        record = read_json(path)
        if isinstance(record, dict) and record.get("meaning") == _MATRIX_MEANING:
            path.unlink()


def _export_gaussians(
    options: ExportOptions, file_format: GaussianFormat, temporary: Paths, console: Console
) -> np.ndarray:
    """Write Gaussians and return the matrix that placed them. (4, 4)"""
    cloud = _read_result(options, temporary, console)
    require_gaussians(options.result, cloud)
    matrix = _placement_matrix(options, cloud.means.double().numpy(), console)
    matrix = file_format.matrix(options.is_upright) @ matrix
    if not np.array_equal(matrix, np.eye(4)):
        cloud = moved_cloud(cloud, matrix)
    if cloud.antialiased and not file_format.holds_antialiasing:
        console.info(
            f"note: these Gaussians are antialiased, which other programs cannot read from "
            f"{options.to}: they show those below a pixel too large; use --to spz or sog"
        )
    if cloud.cutoff_deviations != NO_CUTOFF:
        console.info(
            f"note: these Gaussians end at {cloud.cutoff_deviations:g} standard deviations, which "
            "other programs do not know: they show them a little larger and more opaque"
        )
    is_held = np.ones(len(cloud), bool)
    if file_format.fit is not None:
        fit = file_format.fit(options.target, cloud)
        is_held = fit.is_held
        for line in fit.notes:
            console.info(line)
    path = temporary[options.target]
    order = file_format.writer(path, cloud)
    written = read_as_written(path, console.info)
    if len(written) == len(cloud) and is_held.any():
        expected = cloud if order is None else cloud.select(torch.from_numpy(order))
        rows = torch.from_numpy(is_held)
        errors = fidelity(expected.select(rows), written.select(rows))
        console.info(f"{len(cloud):,} Gaussians; {errors.line()}")
    return matrix


def _read_result(options: ExportOptions, temporary: Paths, console: Console) -> GaussianCloud:
    """Read the Gaussians to export; for ``--repose``, move them and write their binding."""
    if options.repose is not None:
        bound = read_bound_gaussians(options.result)
        cloud = reposed(bound, read_edited(options.repose, bound)).to_gaussians()
        write_binding(temporary[options.binding_file], bound)
        console.info(f"where each Gaussian sits on the mesh: {options.binding_file}")
        return cloud
    if not has_gaussians(options.result):
        raise UserError(f"{options.result}: holds no Gaussians; choose --to glb or obj for a mesh")
    return read_any_gaussians(options.result, console.info)


def _export_mesh(
    options: ExportOptions, file_format: MeshFormat, temporary: Paths, console: Console
) -> np.ndarray:
    """Write a textured mesh and return the matrix that placed it. (4, 4)"""
    if options.result.suffix.lower() != ".obj":
        raise UserError(
            f"{options.result}: --to {options.to} needs the textured .obj of a refined model"
        )
    mesh = read_textured_mesh(options.result)
    matrix = _placement_matrix(options, mesh.vertices.double().numpy(), console)
    if options.max_triangles is not None or options.texture_size is not None:
        mesh = simplified(mesh, options.max_triangles, options.texture_size, options.normal_map)
    total = file_format.matrix(options.is_upright) @ matrix
    mesh = _moved_mesh(mesh, matrix if file_format.writer_turns else total)
    file_format.writer(
        MeshExport(
            mesh=mesh,
            target=options.target,
            paths=temporary,
            upright=options.is_upright,
            lit=options.lit,
            normal_map=options.normal_map,
            notify=console.info,
        )
    )
    side = mesh.texture.shape[1]
    name = options.target.name
    console.info(f"{name}: {mesh.n_faces:,} triangles, {side} texels a side")
    return total


def _moved_mesh(mesh: TexturedMesh, matrix: np.ndarray) -> TexturedMesh:
    vertices = moved_points(mesh.vertices.double().numpy(), matrix)
    return replace(mesh, vertices=torch.from_numpy(vertices.astype(np.float32)))


def _scene(options: ExportOptions, console: Console) -> Scene:
    """Return the capture that the result was made from."""
    capture = capture_of([options.result], options.scene_path, options.checkpoint_path)
    if capture.scene is None:
        raise UserError(
            "--original_frame, --orient up, and --known_distance where it is not by points x,y,z, "
            "need -s/--scene_path"
        )
    return scene_of(capture.scene, capture.checkpoint, SugarSize(), console.info)


def _placement_matrix(options: ExportOptions, points: np.ndarray, console: Console) -> np.ndarray:
    """Return the matrix that makes points, (P, 3), upright and as large as asked for. (4, 4)"""
    if not options.placement.needs_cameras:
        return placement([], np.zeros((0, 3)), points, options.placement)
    scene = _scene(options, console)
    return placement(scene.calibrated_cameras, scene.points, points, options.placement)
