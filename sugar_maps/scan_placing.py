# SPDX-License-Identifier: Apache-2.0
"""Bring a laser scan from a map to the world of a capture, as points to start a training from."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from gaussian_splatting.data.scans.scan_files import (
    E57_SUFFIX,
    MAX_SCAN_POINTS,
    ToWorld,
    scan_system,
)
from gaussian_splatting.data.scans.scan_frame import ScanFrame, scan_in_scene, without_offset
from gaussian_splatting.formats.ply import write_point_ply
from gaussian_splatting.scenes.scene import Scene, VanillaSize, load_scene
from sugar_maps import map_systems
from sugar_maps.map_conversion import conversion
from sugar_maps.map_placement import MapFlags, MapPlacement
from sugar_maps.placing import place_on_map
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import check_writable, require_regular_file
from sugar_utils.flags import positive_int
from sugar_utils.settings import flag

_flag = partial(flag, group="scan")


@dataclass(frozen=True)
class ScanOptions:
    """Flags of ``sugar scan``."""

    scan: Path = _flag(
        MISSING,
        "scan: .las, .laz, .e57 or .ply, in coordinates of the map with --gcp or --gps auto, else "
        "in the world of the scene",
        positional=True,
        parse=Path,
    )
    scene_path: Path = _flag(
        MISSING,
        "scene folder; needed",
        short="-s",
        parse=Path,
        missing="name the scene folder whose photographs show what was scanned",
    )
    output: Path | None = _flag(
        None,
        "PLY to write, for --init_ply and --depths; unset: scan.ply in the scene folder",
        short="-o",
        parse=Path,
    )
    max_points: int = _flag(
        MAX_SCAN_POINTS, "points to keep; more are thinned by a grid", parse=positive_int
    )
    overwrite: bool = _flag(False, "replace a file that is there")
    map_flags: MapFlags = field(default_factory=MapFlags)

    def __post_init__(self) -> None:
        if self.output is not None and self.output.suffix.lower() != ".ply":
            raise UserError(f"--output {self.output}: points are written as PLY; name it NAME.ply")
        if self.map_flags.scales:
            raise UserError(
                "--targets alone gives a scale, not a map; pass --gcp or --gps auto, too"
            )


def place_scan(options: ScanOptions, console: Console | None = None) -> Path:
    """Write a scan's points in the world of a capture, thinned, and return the PLY.

    Raises:
        UserError: The scan or the scene cannot be read, or the scan lies elsewhere.
    """
    console = console or Console()
    require_regular_file(options.scan)
    target = options.output or options.scene_path / "scan.ply"
    if target.exists() and not options.overwrite:
        raise UserError(f"{target}: is there already; pass --overwrite True, or --output")
    check_writable(target.parent)
    scene = load_scene(
        options.scene_path, size_rule=VanillaSize(), eval_split=False, notify=console.info
    )
    frame = ScanFrame.of(scene.calibrated_cameras, scene.points)
    to_world = _to_world(scene, options, console)
    scan = scan_in_scene(options.scan, frame, options.max_points, console.info, to_world)
    write_point_ply(target, scan.positions, scan.colors)
    console.info(
        f"{len(scan.positions):,} points in the world of the scene: {target}; start from them with "
        "--init_ply, or use them as depth with --depths"
    )
    return target


def _to_world(scene: Scene, options: ScanOptions, console: Console) -> ToWorld:
    """Return the way from the coordinates of the scan to the world of the scene."""
    if not options.map_flags.wanted:
        return without_offset(scene.offset)
    place = place_on_map(scene, options.map_flags, console.info)
    definition = scan_system(options.scan)
    target = place.system
    if definition is None or target is None:
        console.info(
            f"note: {options.scan.name} is taken to be in the system of the map, and in metres: "
            f"{place.system_name}"
        )
        return partial(_from_map, place)
    scan = str(options.scan)
    source = map_systems.system_of_text(definition, scan)
    if options.scan.suffix.lower() == E57_SUFFIX:
        # The format has metres, whatever its system says.
        map_systems.require_metres(source, scan)
    way = conversion(source, target, target, place.offset, scan)
    if way.transformer is not None:
        console.info(f"{options.scan.name}: converted from {source.name} to {target.name}")
    for note in way.notes:
        console.info(f"note: {options.scan.name}: {note}")

    def to_world(positions: np.ndarray) -> np.ndarray:
        return _from_map(place, way.apply(positions))

    return to_world


def _from_map(place: MapPlacement, positions: np.ndarray) -> np.ndarray:
    """Return positions of the map, (N, 3), in the world of the capture. (N, 3)"""
    return place.similarity.inverse.moved(positions - place.offset)
