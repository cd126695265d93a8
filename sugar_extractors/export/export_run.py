# SPDX-License-Identifier: Apache-2.0
"""Write a result in the format of another program, upright, in metres or on a map if wanted.

::

    read ─► placement ─► write, by the format ─► publish
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from gaussian_splatting.formats.placement import KEY, Placement, earlier_record, note_unknown
from sugar_extractors.export.engines.levels import further_level_files
from sugar_extractors.export.export_options import ExportOptions
from sugar_extractors.export.export_placement import ExportPlacement
from sugar_extractors.export.export_reading import ResultFiles
from sugar_extractors.export.format_types import Output
from sugar_maps import map_records
from sugar_maps.map_placement import MapFlags
from sugar_maps.placing import metric_scale, place_on_map
from sugar_utils.console import Console
from sugar_utils.errors import Notify, UserError
from sugar_utils.files import atomic_path, check_writable, write_json_atomic
from sugar_utils.memory import format_bytes


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
    file_format = options.format
    present = [path for path in options.files if path.exists()]
    if present and not options.overwrite:
        raise UserError(f"{present[0]}: is there already; pass --overwrite True, or --output")
    check_writable(target.parent)
    placement, extra_notes = _placement_of(options, console.info)
    content = file_format.read(ResultFiles(placement))
    matrix = placement.matrix(content.positions)
    content = content.moved(file_format.writer_matrix(placement.world) @ matrix)
    files = _files_of(placement)
    earlier = _earlier_files(options)
    with ExitStack() as stack:
        # They appear in reverse order, so that the target is the last.
        paths = {path: stack.enter_context(atomic_path(path)) for path in files}
        output = _output(placement, paths)
        file_format.write(content, output)
        offset = file_format.add_offset(output)
        total = file_format.matrix(placement.world) @ matrix
        _write_records(placement, paths, placement.target(total, offset), extra_notes)
    folders = file_format.folders(target)
    for path in set(earlier) - set(files) - set(folders):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    written = [*options.files, *(path for folder in folders for path in folder.iterdir())]
    n_bytes = sum(path.stat().st_size for path in written)
    console.info(f"{format_bytes(n_bytes)}: {target}")
    return target


def _placement_of(
    options: ExportOptions, notify: Notify
) -> tuple[ExportPlacement, dict[str, object]]:
    """Return where the result stands and its export will, and notes about it for the record."""
    placement = ExportPlacement(options, Placement.as_read(options.main_file), notify)
    notes: dict[str, object] = {}
    if options.map_flags.wanted:
        placement.place = place_on_map(placement.scene, options.map_flags, notify)
    if options.map_flags.scales:
        scale = metric_scale(placement.scene, options.map_flags, notify)
        notes["metres"] = scale.record()
        scaled = replace(options.placement, scale_factor=scale.metres)
        placement.options = replace(options, placement=scaled, map_flags=MapFlags())
        placement.is_in_metres = True
    if placement.starts_in_scene:
        note_unknown(placement.main_file, placement.source, notify)
    return placement, notes


def _output(placement: ExportPlacement, paths: Mapping[Path, Path]) -> Output:
    """Return how the files of an export are written.

    Args:
        paths: For each file the path to write to.
    """
    options = placement.options
    return Output(
        name=options.to,
        target=options.target,
        levels=tuple(options.level_files),
        binding_file=options.binding_file,
        paths=paths,
        world=placement.world,
        lit=options.lit,
        normal_map=options.normal_map,
        engines=options.engines,
        offset=placement.offset,
        original_frame=options.original_frame,
        system=None if placement.place is None else placement.place.system,
        is_metric=placement.is_metric,
        notify=placement.notify,
    )


def _has_record(placement: ExportPlacement) -> bool:
    """Whether the export stands elsewhere than the capture, or its source has a record."""
    is_recorded = placement.options.is_placed or placement.source.is_recorded
    return is_recorded or bool(placement.offset.any())


def _offset_text(placement: ExportPlacement) -> Path | None:
    """Return the text file with the offset of an OBJ on a map; None where there is none."""
    options = placement.options
    if placement.place is None or options.to != "obj" or options.original_frame:
        return None
    return map_records.offset_file(options.target)


def _files_of(placement: ExportPlacement) -> list[Path]:
    """Return all files of an export, the target first."""
    options = placement.options
    files = [*options.files]
    if _has_record(placement):
        files += options.matrix_files
    if options.repose is not None:
        files.append(options.binding_file)
    offset_text = _offset_text(placement)
    return files if offset_text is None else [*files, offset_text]


def _earlier_files(options: ExportOptions) -> list[Path]:
    """Return what an earlier export to the same target left beside it.

    Records of it would be taken for those of this one.
    """
    earlier = [path for path in options.matrix_files if earlier_record(path)]
    if "map" in earlier_record(options.matrix_files[0]):
        earlier.append(map_records.offset_file(options.target))
    if options.holds_levels and options.target.exists():
        earlier += further_level_files(options.target, options.engines.lods)
    return [*earlier, *options.format.folders(options.target)]


def _write_records(
    placement: ExportPlacement,
    paths: Mapping[Path, Path],
    target: Placement,
    notes: Mapping[str, object],
) -> None:
    """Write where an export stands, beside its files and into those whose format holds it."""
    options = placement.options
    if not _has_record(placement):
        return
    record = target.record(options.target.parent)
    on_map = None if options.original_frame else placement.place
    if options.format.note_in_file is not None:
        values: dict[str, object] = {KEY: record}
        if on_map is not None:
            values |= map_records.note_values(on_map)
        for path in (options.target, *options.level_files):
            options.format.note_in_file(paths[path], values)
    for path in options.matrix_files:
        write_json_atomic(paths[path], {**record, **notes})
    offset_text = _offset_text(placement)
    if placement.place is not None and offset_text is not None:
        map_records.write_offset_text(paths[offset_text], placement.place)
