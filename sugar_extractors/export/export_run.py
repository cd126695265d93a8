# SPDX-License-Identifier: Apache-2.0
"""Write a result in the format of another program, upright, in metres or on a map if wanted."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from gaussian_splatting.cloud import NO_CUTOFF, GaussianCloud
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.formats.fidelity import fidelity
from gaussian_splatting.formats.moved import moved_cloud
from gaussian_splatting.formats.packing import require_gaussians
from gaussian_splatting.formats.spz import SpzFit
from sugar_capture.georeference.map_placement import MapFlags, MapPlacement
from sugar_capture.georeference.placing import metric_scale, place_on_map
from sugar_extractors.export import map_records
from sugar_extractors.export.companions import companions_of, mesh_of
from sugar_extractors.export.engines.colliders import Collider, collider_of
from sugar_extractors.export.engines.levels import (
    coarser_levels,
    further_level_files,
    level_file,
    level_files,
)
from sugar_extractors.export.export_options import ExportOptions
from sugar_extractors.export.exported_frame import CAPTURE_AXES, UP, matrix_to_scene, stands_upright
from sugar_extractors.export.format_types import (
    Axes,
    CombinedExport,
    CombinedFormat,
    GaussianFormat,
    MeshExport,
    MeshFormat,
    PointExport,
    PointFormat,
    World,
)
from sugar_extractors.export.formats import WITH_LEVELS, readable_suffixes
from sugar_extractors.export.mesh_reduction import shape_of, simplified
from sugar_extractors.export.point_clouds import read_points
from sugar_extractors.export.reading import (
    has_gaussians,
    read_any_gaussians,
    read_as_written,
    read_bound_gaussians,
)
from sugar_extractors.export.reposing import (
    read_edited,
    reposed,
    with_triangles,
    write_binding,
)
from sugar_extractors.results import capture_of, scene_of
from sugar_extractors.texture.placed_export import (
    moved_points,
    placement,
)
from sugar_extractors.texture.textured_mesh_io import TexturedMesh, read_textured_mesh
from sugar_scene.mesh_bound import BoundCloud
from sugar_trainers.capture import SugarSize
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path, check_writable, read_json, write_json_atomic
from sugar_utils.memory import format_bytes

Paths = Mapping[Path, Path]  # for each file the path to write to

_MATRIX_MEANING = "exported = matrix x (x, y, z, 1) of the capture; rows of 4"


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
    place = None
    if options.map_flags.wanted:
        place = place_on_map(_scene(options, console), options.map_flags, console.info)
    scale = None
    if options.map_flags.scales:
        scale = metric_scale(_scene(options, console), options.map_flags, console.info)
        options = _in_metres(options, scale.metres)
    source_matrix = _source_matrix(options)
    has_record = options.is_placed or not np.array_equal(source_matrix, np.eye(4))
    all_files = [*files]
    if has_record:
        all_files += options.matrix_files
    if options.repose is not None:
        all_files.append(options.binding_file)
    offset_text = map_records.offset_file(target)
    has_offset_text = place is not None and options.to == "obj" and not options.original_frame
    if has_offset_text:
        all_files.append(offset_text)
    was_on_map = "map" in _earlier_record(options.matrix_files[0])
    earlier_folders = _folders_of(options)
    earlier_levels = []
    if target in present and options.to in WITH_LEVELS:
        earlier_levels = further_level_files(target, options.engines.lods)
    with ExitStack() as stack:
        # They appear in reverse order, so that the target is the last.
        temporary = {path: stack.enter_context(atomic_path(path)) for path in all_files}
        matrix = _write_result(options, temporary, place, console)
        if has_record:
            note = _record(options, matrix @ source_matrix, place)
            if scale is not None:
                note["metres"] = scale.record()
            for path in options.matrix_files:
                write_json_atomic(temporary[path], note)
        if place is not None and has_offset_text:
            map_records.write_offset_text(temporary[offset_text], place)
    # Records of an earlier export would be taken for those of this one.
    for path in options.matrix_files:
        if not has_record and _earlier_record(path):
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


def _in_metres(options: ExportOptions, metres: float) -> ExportOptions:
    """Return options that place a result in metres; it may be in metres already.

    Args:
        metres: In a unit of the capture.
    """
    unit = float(np.cbrt(np.linalg.det(_source_matrix(options)[:3, :3])))
    placement_options = replace(options.placement, scale_factor=metres / unit)
    return replace(options, placement=placement_options, map_flags=MapFlags())


def _folders_of(options: ExportOptions) -> list[Path]:
    """Return the folders that belong to the target as it is now."""
    file_format = options.format
    if not isinstance(file_format, GaussianFormat) or file_format.parts_of is None:
        return []
    if not options.target.is_file():
        return []
    return [folder for folder in file_format.parts_of(options.target) if folder.is_dir()]


def _write_result(
    options: ExportOptions, temporary: Paths, place: MapPlacement | None, console: Console
) -> np.ndarray:
    """Write the files of a format and return the matrix from the capture to them. (4, 4)"""
    file_format = options.format
    offset = np.zeros(3)
    if place is not None:
        offset = place.offset
    elif options.original_frame:
        offset = _scene(options, console).offset
    if isinstance(file_format, PointFormat):
        return _export_points(options, file_format, temporary, place, offset, console)
    if isinstance(file_format, MeshFormat):
        matrix = _export_mesh(options, file_format, temporary, place, console)
    elif isinstance(file_format, GaussianFormat):
        matrix = _export_gaussians(options, file_format, temporary, place, console)
    elif isinstance(file_format, CombinedFormat):
        matrix = _export_combined(options, file_format, temporary, place, console)
    else:
        raise TypeError(f"--to {options.to} is neither a mesh nor Gaussians")
    paths = [temporary[options.target]]
    paths += [temporary[file] for file in level_files(options.target, options.engines.lods)]
    if options.original_frame and file_format.move_to_original is not None:
        turned_offset = file_format.matrix(_world(options))[:3, :3] @ offset
        for path in paths:
            file_format.move_to_original(path, turned_offset)
        if place is not None:
            matrix = map_records.in_full_coordinates(matrix, turned_offset)
    elif place is not None and file_format.note_in_file is not None:
        for path in paths:
            file_format.note_in_file(path, map_records.note_values(place))
    return matrix


def _record(
    options: ExportOptions, matrix: np.ndarray, place: MapPlacement | None
) -> dict[str, object]:
    """Return the record of where a file stands, by the matrix from the capture to it. (4, 4)"""
    note: dict[str, object] = {"matrix": matrix.tolist(), "meaning": _MATRIX_MEANING}
    if _world(options) is World.UPRIGHT and options.format.axes is not Axes.Z_UP:
        note["up"] = UP
    if place is not None:
        note["map"] = place.record()
    return note


def _earlier_record(path: Path) -> dict[str, object]:
    """Return the record beside a file that an earlier export left; empty without one."""
    if path.is_file():
        with contextlib.suppress(UserError):
            record = read_json(path)
            if isinstance(record, dict) and record.get("meaning") == _MATRIX_MEANING:
                return record
    return {}


def _export_points(
    options: ExportOptions,
    file_format: PointFormat,
    temporary: Paths,
    place: MapPlacement | None,
    offset: np.ndarray,
    console: Console,
) -> np.ndarray:
    """Write points in full coordinates and return the matrix that placed them. (4, 4)"""
    points = read_points(options.result, console.info)
    if _starts_in_scene(options):
        points = points.moved(matrix_to_scene(options.result, console.info))
    matrix = _placement_matrix(options, points.positions, place, console)
    matrix = file_format.matrix(_world(options)) @ matrix
    file_format.writer(
        PointExport(
            points=points.moved(matrix),
            offset=offset,
            system=None if place is None else place.system,
            is_metric=place is not None or options.placement.known_distance is not None,
            path=temporary[options.target],
            notify=console.info,
        )
    )
    console.info(f"{options.target.name}: {len(points.positions):,} points")
    # Offsets of a capture are noticed by who reads the file; those of a map are part of its world.
    return matrix if place is None else map_records.in_full_coordinates(matrix, offset)


def _export_gaussians(
    options: ExportOptions,
    file_format: GaussianFormat,
    temporary: Paths,
    place: MapPlacement | None,
    console: Console,
) -> np.ndarray:
    """Write Gaussians and return the matrix that placed them. (4, 4)"""
    cloud = _read_result(options, temporary, console)
    require_gaussians(options.result, cloud)
    if _starts_in_scene(options):
        cloud = _moved_gaussians(cloud, matrix_to_scene(_main_file(options), console.info))
    matrix = _placement_matrix(options, cloud.means.double().numpy(), place, console)
    matrix = file_format.matrix(_world(options)) @ matrix
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
    """Say what other programs cannot know of Gaussians."""
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


def _read_result(options: ExportOptions, temporary: Paths, console: Console) -> GaussianCloud:
    """Read the Gaussians to export; for ``--repose``, move them and write their binding."""
    if options.repose is not None:
        bound = read_bound_gaussians(options.result)
        cloud = _reposed_gaussians(bound, options.repose, console)
        write_binding(temporary[options.binding_file], bound)
        console.info(f"where each Gaussian sits on the mesh: {options.binding_file}")
        return cloud
    if not has_gaussians(options.result):
        raise UserError(
            f"{options.result}: holds no Gaussians, which are read from {readable_suffixes()}; "
            "choose --to glb or obj for a mesh"
        )
    return read_any_gaussians(options.result, console.info)


def _reposed_gaussians(bound: BoundCloud, path: Path, console: Console) -> GaussianCloud:
    """Return the Gaussians of a refined model on its edited mesh, in the world of that mesh."""
    edited = read_edited(path, bound)
    to_scene = matrix_to_scene(path, console.info)
    vertices = moved_points(edited.vertices.numpy(), to_scene)
    cloud = reposed(bound, torch.from_numpy(vertices))
    if edited.triangles is not None:
        n_deleted = len(bound.faces) - len(edited.triangles)
        console.info(f"{n_deleted:,} triangles are left out with their Gaussians")
        cloud = with_triangles(cloud, edited.triangles)
    return _moved_gaussians(cloud.to_gaussians(), np.linalg.inv(to_scene))


def _export_mesh(
    options: ExportOptions,
    file_format: MeshFormat,
    temporary: Paths,
    place: MapPlacement | None,
    console: Console,
) -> np.ndarray:
    """Write a textured mesh and return the matrix that placed it. (4, 4)"""
    if options.result.suffix.lower() != ".obj":
        raise UserError(
            f"{options.result}: --to {options.to} needs the textured .obj of a refined model"
        )
    (finest, *coarser), matrix = _placed_levels(options, options.result, place, console)
    total = file_format.matrix(_world(options)) @ matrix
    is_turned_by_writer = file_format.writer_turns and _world(options) is World.CAPTURE
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


def _export_combined(
    options: ExportOptions,
    file_format: CombinedFormat,
    temporary: Paths,
    place: MapPlacement | None,
    console: Console,
) -> np.ndarray:
    """Write a textured mesh and its Gaussians and return the matrix that placed both. (4, 4)"""
    companions = companions_of(options.result, options.gaussians)
    if not has_gaussians(companions.gaussians):
        raise UserError(f"{companions.gaussians}: holds no Gaussians; pass others as --gaussians")
    cloud = read_any_gaussians(companions.gaussians, console.info)
    require_gaussians(companions.gaussians, cloud)
    to_mesh = companions.to_mesh(console.info)
    if _starts_in_scene(options):
        to_mesh = matrix_to_scene(companions.gaussians, console.info)
    (mesh,), matrix = _placed_levels(options, companions.mesh, place, console)
    matrix = file_format.matrix(_world(options)) @ matrix
    mesh = _moved_mesh(mesh, matrix)
    cloud = _moved_gaussians(cloud, matrix @ to_mesh)
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


def _placed_levels(
    options: ExportOptions, path: Path, place: MapPlacement | None, console: Console
) -> tuple[list[TexturedMesh], np.ndarray]:
    """Return the levels of detail of a mesh and the matrix that places them. (4, 4)

    There is one level unless more are wanted. The first is simplified where that is wanted.
    """
    mesh = read_textured_mesh(path)
    if _starts_in_scene(options):
        mesh = _moved_mesh(mesh, matrix_to_scene(path, console.info))
    matrix = _placement_matrix(options, mesh.vertices.double().numpy(), place, console)
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


def _starts_in_scene(options: ExportOptions) -> bool:
    """Return whether a result is brought to the world of the cameras before it is placed."""
    is_upright = options.placement.orient == "up"
    return is_upright or options.map_flags.wanted or options.original_frame


def _world(options: ExportOptions) -> World:
    """Return the axes of the world in which the result is exported, from where it stands itself."""
    if options.world is not World.CAPTURE or _starts_in_scene(options):
        return options.world
    return World.UPRIGHT if stands_upright(_main_file(options)) else World.CAPTURE


def _source_matrix(options: ExportOptions) -> np.ndarray:
    """Return the matrix from the capture to the result as it is placed. (4, 4)"""
    path = _main_file(options)
    if _starts_in_scene(options) or path.suffix.lower() not in CAPTURE_AXES:
        return np.eye(4)
    to_scene = matrix_to_scene(path, lambda line: None)
    return to_scene if np.array_equal(to_scene, np.eye(4)) else np.linalg.inv(to_scene)


def _main_file(options: ExportOptions) -> Path:
    """Return the file that says where the result stands."""
    if isinstance(options.format, CombinedFormat):
        return mesh_of(options.result)
    return options.repose or options.result


def _scene(options: ExportOptions, console: Console) -> Scene:
    """Return the capture that the result was made from."""
    capture = capture_of([options.result], options.scene_path, options.checkpoint_path)
    if capture.scene is None:
        raise UserError(
            "--gcp, --gps, --targets, --original_frame, --orient up, and --known_distance where it "
            "is not by points x,y,z, need -s/--scene_path"
        )
    return scene_of(capture.scene, capture.checkpoint, SugarSize(), console.info)


def _placement_matrix(
    options: ExportOptions, points: np.ndarray, place: MapPlacement | None, console: Console
) -> np.ndarray:
    """Return the matrix that places points, (P, 3), near zero as is wanted. (4, 4)"""
    if place is not None:
        return place.matrix
    if not options.placement.needs_cameras:
        return placement([], np.zeros((0, 3)), points, options.placement)
    scene = _scene(options, console)
    return placement(scene.calibrated_cameras, scene.points, points, options.placement)
