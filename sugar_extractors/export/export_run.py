# SPDX-License-Identifier: Apache-2.0
"""Write a result in the format of another program, upright, in metres or on a map if wanted."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from gaussian_splatting.core.cloud import NO_CUTOFF, GaussianCloud
from gaussian_splatting.core.moved import moved_cloud, moved_points
from gaussian_splatting.formats.fidelity import fidelity
from gaussian_splatting.formats.packing import require_gaussians
from gaussian_splatting.formats.placement import (
    KEY,
    METRE,
    Origin,
    Placement,
    earlier_record,
    note_unknown,
)
from gaussian_splatting.formats.spz import SpzFit
from gaussian_splatting.scenes.scene import Scene
from sugar_extractors.export.companions import companions_of
from sugar_extractors.export.engines.colliders import collider_of
from sugar_extractors.export.engines.levels import (
    coarser_levels,
    further_level_files,
    level_file,
    level_files,
)
from sugar_extractors.export.export_options import ExportOptions
from sugar_extractors.export.format_types import (
    WORLD_OF_UP,
    CombinedFormat,
    GaussianFormat,
    MeshFormat,
    PointFormat,
    World,
)
from sugar_extractors.export.formats import WITH_LEVELS, readable_suffixes
from sugar_extractors.export.point_clouds import read_points
from sugar_extractors.export.reading import (
    has_gaussians,
    open_gaussians,
    open_textured_mesh,
    read_as_written,
    read_bound_gaussians,
)
from sugar_extractors.export.reposing import (
    read_edited,
    reposed,
    with_triangles,
    write_binding,
)
from sugar_extractors.export_contents import Collider, CombinedExport, MeshExport, PointExport
from sugar_extractors.placing import PlacementOptions, placing_matrix, scale_of
from sugar_extractors.results import Capture, capture_of, scene_of
from sugar_extractors.texture.mesh_reduction import shape_of, simplified
from sugar_maps import map_records
from sugar_maps.map_placement import MapFlags, MapPlacement
from sugar_maps.placing import metric_scale, place_on_map
from sugar_scene.mesh_bound import BoundCloud
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh
from sugar_trainers.capture import SugarSize
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path, check_writable, write_json_atomic
from sugar_utils.memory import format_bytes

Paths = Mapping[Path, Path]  # for each file the path to write to


@dataclass
class _Export:
    """One export: its options, the placement of the input and that of the output.

    A result starts from where its file stands, or from the scene where it is turned upright, put
    on a map, or brought back to the original frame.
    """

    options: ExportOptions
    source: Placement  # of the result as it is read
    console: Console
    place: MapPlacement | None = None  # on the map; None for other worlds
    is_in_metres: bool = False  # whether the scale that is asked for is that to metres

    @cached_property
    def capture(self) -> Capture:
        """The folders that the result was made from, by the flags and the records."""
        options = self.options
        return capture_of([self.main_file], options.scene_path, options.checkpoint_path)

    @cached_property
    def scene(self) -> Scene:
        """The capture that the result was made from."""
        if self.capture.scene is None:
            raise UserError(
                "--gcp, --gps, --targets, --original_frame, --orient up, and --known_distance "
                "where it is not by points x,y,z, need -s/--scene_path"
            )
        return scene_of(self.capture, SugarSize(), self.console.info)

    @property
    def main_file(self) -> Path:
        """The file that says where the result stands."""
        return _main_file(self.options)

    @property
    def starts_in_scene(self) -> bool:
        """Whether the result is brought to the world of the cameras before it is placed."""
        options = self.options
        is_upright = options.placement.orient == "up"
        return is_upright or options.map_flags.wanted or options.original_frame

    def to_start(self, placement: Placement) -> np.ndarray:
        """Return the matrix from where a file stands to where the export starts. (4, 4)"""
        if self.starts_in_scene:
            return placement.to_scene(self.scene.offset)
        if np.array_equal(placement.matrix, self.source.matrix):
            return np.eye(4)
        return self.source.matrix @ placement.to_scene(self.source.origin.world_offset)

    @property
    def world(self) -> World:
        """Axes of the world in which the result is exported."""
        world = self.options.world
        if world is not World.CAPTURE or self.starts_in_scene:
            return world
        return WORLD_OF_UP.get(self.source.up or "", World.CAPTURE)

    @property
    def keeps_metres(self) -> bool:
        """Whether a result in metres stays so."""
        options = self.options
        is_rescaled = options.placement.is_scaled or options.map_flags.wanted
        return self.source.is_metric and not is_rescaled and not options.original_frame

    @property
    def is_metric(self) -> bool:
        """Whether a unit of the exported file is a metre."""
        is_known = self.is_in_metres or self.options.placement.known_distance is not None
        return self.place is not None or is_known or self.keeps_metres

    @property
    def scales_capture(self) -> bool:
        """Whether the scale is that of the capture, however large the result is already.

        It is where it leads to metres; else it makes the result so many times as large.
        """
        file_format = self.options.format
        is_for_printers = isinstance(file_format, MeshFormat) and file_format.for_printers
        is_known = self.is_in_metres or self.options.placement.known_distance is not None
        return is_known or is_for_printers or self.source.is_metric

    @property
    def offset(self) -> np.ndarray:
        """Offset from coordinates near the origin to full coordinates. (3,)"""
        if self.place is not None:
            return self.place.offset
        return self.scene.offset if self.options.original_frame else np.zeros(3)

    def matrix(self, points: np.ndarray) -> np.ndarray:
        """Return the matrix that places points, (P, 3), from where the export starts. (4, 4)"""
        if self.place is not None:
            return self.place.matrix
        options = self.options.placement
        cameras = self.scene.calibrated_cameras if options.needs_cameras else []
        scale = None
        if options.is_scaled:
            world_offset = self.scene.offset if cameras else None
            scale = scale_of(cameras, options, world_offset)
            if self.scales_capture and not self.starts_in_scene:
                scale /= self.source.scale
        elif self.keeps_metres and self.starts_in_scene:
            scale = self.source.scale
        placement = PlacementOptions(options.orient, scale)
        if options.orient != "up":
            return placing_matrix([], np.zeros((0, 3)), points, placement)
        return placing_matrix(cameras, self.scene.points, points, placement)

    def target(self, matrix: np.ndarray, offset: np.ndarray | None = None) -> Placement:
        """Return where a file stands that is written.

        Args:
            matrix: From where the export starts to its coordinates near the origin. (4, 4)
            offset: That its coordinates have in addition, in its axes, (3,); None: none.
        """
        file_format = self.options.format
        from_scene = matrix if self.starts_in_scene else matrix @ self.source.matrix
        capture = self.capture
        origin = self.source.origin
        world_offset = origin.world_offset
        if self.starts_in_scene:
            world_offset = self.scene.offset
        unit = None
        if self.is_metric or file_format.units_per_metre != 1:
            unit = METRE if file_format.units_per_metre == 1 else "millimetre"
        return Placement(
            from_scene,
            np.zeros(3) if offset is None else offset,
            up=file_format.up(self.world),
            unit=unit,
            map=None if self.place is None else self.place.record(),
            origin=Origin(
                origin.model or self.main_file, capture.scene, capture.checkpoint, world_offset
            ),
        )


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
    files = options.files
    present = [path for path in files if path.exists()]
    if present and not options.overwrite:
        raise UserError(f"{present[0]}: is there already; pass --overwrite True, or --output")
    check_writable(target.parent)
    job = _Export(options, Placement.as_read(_main_file(options)), console)
    if options.map_flags.wanted:
        job.place = place_on_map(job.scene, options.map_flags, console.info)
    extra_notes: dict[str, object] = {}
    if options.map_flags.scales:
        scale = metric_scale(job.scene, options.map_flags, console.info)
        extra_notes["metres"] = scale.record()
        placement = replace(options.placement, scale_factor=scale.metres)
        job.options = replace(options, placement=placement, map_flags=MapFlags())
        job.is_in_metres = True
    if job.starts_in_scene:
        note_unknown(job.main_file, job.source, console.info)
    has_record = job.options.is_placed or job.source.is_recorded or job.offset.any()
    all_files = [*files]
    if has_record:
        all_files += options.matrix_files
    if options.repose is not None:
        all_files.append(options.binding_file)
    offset_text = map_records.offset_file(target)
    has_offset_text = job.place is not None and options.to == "obj" and not options.original_frame
    if has_offset_text:
        all_files.append(offset_text)
    was_on_map = "map" in earlier_record(options.matrix_files[0])
    earlier_folders = _folders_of(options)
    earlier_levels = []
    if target in present and options.to in WITH_LEVELS:
        earlier_levels = further_level_files(target, options.engines.lods)
    with ExitStack() as stack:
        # They appear in reverse order, so that the target is the last.
        temporary = {path: stack.enter_context(atomic_path(path)) for path in all_files}
        standing = _write_result(job, temporary)
        if has_record:
            record = standing.record(target.parent)
            _note_in_files(job, temporary, record)
            for path in options.matrix_files:
                write_json_atomic(temporary[path], {**record, **extra_notes})
        if job.place is not None and has_offset_text:
            map_records.write_offset_text(temporary[offset_text], job.place)
    # Records of an earlier export would be taken for those of this one.
    for path in options.matrix_files:
        if not has_record and earlier_record(path):
            path.unlink()
    if was_on_map and not has_offset_text:
        offset_text.unlink(missing_ok=True)
    for path in earlier_levels:
        path.unlink()
    folders = _folders_of(options)
    for folder in set(earlier_folders) - set(folders):
        shutil.rmtree(folder, ignore_errors=True)
    files += [path for folder in folders for path in folder.iterdir()]
    n_bytes = sum(path.stat().st_size for path in files)
    console.info(f"{format_bytes(n_bytes)}: {target}")
    return target


def _main_file(options: ExportOptions) -> Path:
    return options.repose or options.file


def _note_in_files(job: _Export, temporary: Paths, record: Mapping[str, object]) -> None:
    """Write the record into the target and its levels, where their format holds it."""
    options = job.options
    if options.format.note_in_file is None:
        return
    values = {KEY: record}
    if job.place is not None and not options.original_frame:
        values |= map_records.note_values(job.place)
    for path in (options.target, *level_files(options.target, options.engines.lods)):
        options.format.note_in_file(temporary[path], values)


def _folders_of(options: ExportOptions) -> list[Path]:
    """Return the folders that belong to the target as it is now."""
    file_format = options.format
    if not isinstance(file_format, GaussianFormat) or file_format.parts_of is None:
        return []
    if not options.target.is_file():
        return []
    return [folder for folder in file_format.parts_of(options.target) if folder.is_dir()]


def _write_result(job: _Export, temporary: Paths) -> Placement:
    """Write the files of a format and return where they stand."""
    options = job.options
    file_format = options.format
    if isinstance(file_format, PointFormat):
        return _export_points(job, file_format, temporary)
    if isinstance(file_format, MeshFormat):
        matrix = _export_mesh(job, file_format, temporary)
    elif isinstance(file_format, GaussianFormat):
        matrix = _export_gaussians(job, file_format, temporary)
    elif isinstance(file_format, CombinedFormat):
        matrix = _export_combined(job, file_format, temporary)
    else:
        raise TypeError(f"--to {options.to} is neither a mesh nor Gaussians")
    if not options.original_frame or file_format.move_to_original is None:
        return job.target(matrix)
    offset = file_format.matrix(job.world)[:3, :3] @ job.offset
    for file in (options.target, *level_files(options.target, options.engines.lods)):
        file_format.move_to_original(temporary[file], offset)
    return job.target(matrix, offset)


def _export_points(job: _Export, file_format: PointFormat, temporary: Paths) -> Placement:
    """Write points in full coordinates and return where they stand."""
    options = job.options
    points = read_points(options.file, job.console.info)
    to_start = job.to_start(job.source)
    if not np.array_equal(to_start, np.eye(4)):
        points = points.moved(to_start)
    matrix = file_format.matrix(job.world) @ job.matrix(points.positions)
    file_format.writer(
        PointExport(
            points=points.moved(matrix),
            offset=job.offset,
            system=None if job.place is None else job.place.system,
            is_metric=job.is_metric,
            path=temporary[options.target],
            notify=job.console.info,
        )
    )
    job.console.info(f"{options.target.name}: {len(points.positions):,} points")
    return job.target(matrix, job.offset)


def _export_gaussians(job: _Export, file_format: GaussianFormat, temporary: Paths) -> np.ndarray:
    """Write Gaussians and return the matrix that placed them. (4, 4)"""
    options = job.options
    console = job.console
    cloud = _read_result(job, temporary)
    require_gaussians(options.file, cloud)
    cloud = _moved_gaussians(cloud, job.to_start(job.source))
    matrix = file_format.matrix(job.world) @ job.matrix(cloud.means.double().numpy())
    cloud = _moved_gaussians(cloud, matrix)
    _note_losses(options, cloud, file_format.holds_antialiasing, console)
    is_held = _held_rows(options, cloud, file_format.fit, console)
    path = temporary[options.target]
    order = file_format.writer(path, cloud)
    written = read_as_written(path, console.info)
    if len(written) == len(cloud) and is_held.any():
        expected = cloud if order is None else cloud.select(torch.from_numpy(order))
        rows = torch.from_numpy(is_held)
        errors = fidelity(expected.select(rows), written.select(rows))
        console.info(f"{len(cloud):,} Gaussians; {errors.line()}")
    return matrix


def _held_rows(
    options: ExportOptions,
    cloud: GaussianCloud,
    compare: Callable[[Path, GaussianCloud], SpzFit] | None,
    console: Console,
) -> np.ndarray:
    """Return which Gaussians a format holds as they are, and report the others. (N,) bool"""
    if compare is None:
        return np.ones(len(cloud), bool)
    fit = compare(options.target, cloud)
    for line in fit.notes:
        console.info(line)
    return fit.is_held


def _note_losses(
    options: ExportOptions, cloud: GaussianCloud, holds_antialiasing: bool, console: Console
) -> None:
    """Print a message about properties of Gaussians that other programs ignore."""
    if cloud.antialiased and not holds_antialiasing:
        console.info(
            f"note: these Gaussians are antialiased, which other programs cannot read from "
            f"{options.to}: they show those below a pixel too large; use --to spz or sog"
        )
    if cloud.cutoff_deviations != NO_CUTOFF:
        console.info(
            f"note: these Gaussians end at {cloud.cutoff_deviations:g} standard deviations, which "
            "other programs do not know: they show them a little larger and more opaque"
        )


def _read_result(job: _Export, temporary: Paths) -> GaussianCloud:
    """Read the Gaussians to export; for ``--repose``, move them and write their binding."""
    options = job.options
    if options.repose is not None:
        bound = read_bound_gaussians(options.result)
        cloud = _reposed_gaussians(bound, options.repose, job)
        write_binding(temporary[options.binding_file], bound)
        job.console.info(f"where each Gaussian sits on the mesh: {options.binding_file}")
        return cloud
    if not has_gaussians(options.file):
        raise UserError(
            f"{options.file}: holds no Gaussians, which are read from {readable_suffixes()}; "
            "choose --to glb or obj for a mesh"
        )
    cloud, _ = open_gaussians(options.file, job.console.info)
    return cloud


def _reposed_gaussians(bound: BoundCloud, path: Path, job: _Export) -> GaussianCloud:
    """Return the Gaussians of a refined model on its edited mesh, where that mesh stands."""
    note_unknown(path, job.source, job.console.info)
    edited = read_edited(path, bound, job.console.info, job.source.offset)
    vertices = moved_points(edited.vertices.numpy(), job.source.to_scene())
    cloud = reposed(bound, torch.from_numpy(vertices))
    if edited.triangles is not None:
        n_deleted = len(bound.faces) - len(edited.triangles)
        job.console.info(f"{n_deleted:,} triangles are left out with their Gaussians")
        cloud = with_triangles(cloud, edited.triangles)
    return _moved_gaussians(cloud.to_gaussians(), job.source.matrix)


def _export_mesh(job: _Export, file_format: MeshFormat, temporary: Paths) -> np.ndarray:
    """Write a textured mesh and return the matrix that placed it. (4, 4)"""
    options = job.options
    console = job.console
    if options.file.suffix.lower() != ".obj":
        raise UserError(
            f"{options.file}: --to {options.to} needs the textured .obj of a refined model"
        )
    (finest, *coarser), matrix = _placed_levels(job, options.file)
    total = file_format.matrix(job.world) @ matrix
    is_turned_by_writer = file_format.writer_turns and job.world is World.CAPTURE
    to_writer = matrix if is_turned_by_writer else total
    mesh = _moved_mesh(finest, to_writer)
    file_format.writer(
        MeshExport(
            mesh=mesh,
            target=options.target,
            paths=temporary,
            upright=not is_turned_by_writer,
            lit=options.lit,
            normal_map=options.normal_map,
            notify=console.info,
            collider=_collider(options, mesh, console),
            coarser=tuple(_moved_mesh(level, to_writer) for level in coarser),
        )
    )
    if not file_format.for_printers:
        # Of a closed body its writer has reported the numbers.
        _report_mesh(options.target.name, mesh, console)
    for number, level in enumerate(coarser, start=1):
        _report_mesh(level_file(options.target, number).name, level, console)
    return total


def _export_combined(job: _Export, file_format: CombinedFormat, temporary: Paths) -> np.ndarray:
    """Write a textured mesh and its Gaussians and return the matrix that placed both. (4, 4)"""
    options = job.options
    console = job.console
    companions = companions_of(options.result, options.gaussians)
    if not has_gaussians(companions.gaussians):
        raise UserError(f"{companions.gaussians}: holds no Gaussians; pass others as --gaussians")
    cloud, standing = open_gaussians(companions.gaussians, console.info)
    require_gaussians(companions.gaussians, cloud)
    (mesh,), matrix = _placed_levels(job, companions.mesh)
    matrix = file_format.matrix(job.world) @ matrix
    mesh = _moved_mesh(mesh, matrix)
    cloud = _moved_gaussians(cloud, matrix @ job.to_start(standing))
    _note_losses(options, cloud, file_format.holds_antialiasing, console)
    is_held = _held_rows(options, cloud, file_format.fit, console)
    path = temporary[options.target]
    file_format.writer(
        CombinedExport(
            mesh=mesh,
            cloud=cloud,
            target=options.target,
            path=path,
            lit=options.lit,
            collider=_collider(options, mesh, console),
        )
    )
    rows = torch.from_numpy(is_held)
    written = file_format.reader(path, console.info)
    errors = fidelity(cloud.select(rows), written.select(rows))
    _report_mesh(options.target.name, mesh, console)
    console.info(f"{len(cloud):,} Gaussians; {errors.line()}")
    return matrix


def _placed_levels(job: _Export, path: Path) -> tuple[list[TexturedMesh], np.ndarray]:
    """Return the levels of detail of a mesh and the matrix that places them. (4, 4)

    There is one level unless more are wanted. The first is simplified where that is wanted.
    """
    options = job.options
    mesh, _ = open_textured_mesh(path, job.console.info)
    to_start = job.to_start(job.source)
    if not np.array_equal(to_start, np.eye(4)):
        mesh = _moved_mesh(mesh, to_start)
    matrix = job.matrix(mesh.vertices.double().numpy())
    finest = mesh
    normal_map = options.normal_map
    if options.max_triangles is not None or options.texture_size is not None:
        is_reduced = options.max_triangles is not None
        finest = simplified(
            mesh, options.max_triangles, options.texture_size, normal_map and is_reduced
        )
    if options.engines.lods is None:
        return [finest], matrix
    return [finest, *coarser_levels(mesh, finest, options.engines.lods, normal_map)], matrix


def _collider(options: ExportOptions, mesh: TexturedMesh, console: Console) -> Collider | None:
    """Return the shapes to collide with of a mesh, where they are wanted."""
    if options.engines.collision is None:
        return None
    return collider_of(shape_of(mesh), options.engines, console.info)


def _report_mesh(name: str, mesh: TexturedMesh, console: Console) -> None:
    side = mesh.texture.shape[1]
    console.info(f"{name}: {mesh.n_faces:,} triangles, {side} texels a side")


def _moved_gaussians(cloud: GaussianCloud, matrix: np.ndarray) -> GaussianCloud:
    """Return Gaussians after a matrix, (4, 4); those that stay keep all their bits."""
    return cloud if np.array_equal(matrix, np.eye(4)) else moved_cloud(cloud, matrix)


def _moved_mesh(mesh: TexturedMesh, matrix: np.ndarray) -> TexturedMesh:
    vertices = moved_points(mesh.vertices.double().numpy(), matrix)
    return replace(mesh, vertices=torch.from_numpy(vertices.astype(np.float32)))
