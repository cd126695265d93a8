# SPDX-License-Identifier: Apache-2.0
"""Flags of ``sugar export``."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, dataclass, field
from functools import partial
from pathlib import Path

from gaussian_splatting.formats.placement import Placement
from sugar_extractors.export.engines.colliders import check_collision
from sugar_extractors.export.engines.engine_options import EngineOptions
from sugar_extractors.export.engines.levels import level_files
from sugar_extractors.export.format_types import AnyFormat, World
from sugar_extractors.export.formats import (
    COMBINED,
    FORMATS,
    GAUSSIANS,
    MESH_FORMATS,
    MESHES,
    WITH_COLLIDERS,
    WITH_LEVELS,
    format_help,
    readable_suffixes,
)
from sugar_extractors.placing import PlacementOptions
from sugar_maps.map_placement import MapFlags
from sugar_trainers.naming import OUTPUT_ROOT
from sugar_utils.errors import UserError
from sugar_utils.flags import boolean, positive_int
from sugar_utils.settings import flag, parser_of

_flag = partial(flag, group="export")
# Help of flags of the texture stage that mean something else here.
_PLACEMENT_HELP = {
    "orient": "up: turn it upright, y up and standing on 0; needs the cameras of the capture",
    "scale_factor": "factor that multiplies the size",
    "known_distance": "scale to metres: two photographs or two points x,y,z of the capture, and "
    "how many metres lie between the cameras or points",
}
_WITHOUT_CAMERAS = (
    "without --orient up, --known_distance, --original_frame, --gcp, --gps auto and --targets"
)


@dataclass(frozen=True)
class ExportOptions:
    """Flags of ``sugar export``, checked as far as they can be without the files."""

    result: Path = _flag(
        MISSING,
        f"what to export. Gaussians: a {readable_suffixes()}, a .pt of "
        "any stage, a folder; meshes: a textured .obj; both: an .obj; any of them: a folder of "
        "results",
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
    gaussians: Path | None = _flag(
        None,
        "Gaussians to write with the mesh, as a file or folder that --to spz takes; unset: those "
        "that a run left with it",
        parse=Path,
        no_effect_when="it is an error unless --to writes both",
    )
    max_triangles: int | None = _flag(
        None,
        "limit of triangles; the mesh is decimated, and the texture baked again",
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
        no_effect_when="it is an error without --max_triangles and --lods",
    )
    lit: bool = _flag(
        False,
        "viewers light the mesh, by a plain material (roughness 1, metallic 0); else they "
        "show the colours of the texture as they are",
        no_effect_when="unless --to glb or glb_both",
    )
    repose: Path | None = _flag(
        None,
        "edited mesh of the refined model, an .obj with the same vertices, and the same triangles "
        "or some of them: its Gaussians move along",
        parse=Path,
        no_effect_when="it is an error unless the result is a refined model",
    )
    scene_path: Path | None = _flag(
        None,
        "scene folder, for its cameras; unset: the one that the result's own record names",
        short="-s",
        parse=Path,
        no_effect_when=_WITHOUT_CAMERAS,
    )
    checkpoint_path: Path | None = _flag(
        None,
        "vanilla checkpoint whose cameras.json says where the cameras are, for worlds that "
        "another program moved; unset: that of the record, or the cameras of the scene",
        short="-c",
        parse=Path,
        no_effect_when=_WITHOUT_CAMERAS,
    )
    original_frame: bool = _flag(
        False,
        "in the coordinates of the original capture, where it lies far from the origin, as "
        "in UTM coordinates, or in full coordinates of the map: PLY and OBJ in float64, GLB, glTF "
        "and USD by their node; LAS has those of a map anyway; needs the scene",
        parse=boolean,
        nargs="?",
        const=True,
    )
    overwrite: bool = _flag(False, "replace a file that is there")
    placement: PlacementOptions = field(default_factory=PlacementOptions)
    map_flags: MapFlags = field(default_factory=MapFlags)
    engines: EngineOptions = field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        output = self.output
        # A name of dots has no stem that a suffix could follow.
        has_folder = bool(self.format.file_name)
        is_folder = output is not None and output.is_dir() and not has_folder
        if output is not None and (is_folder or not output.name.strip(".")):
            raise UserError(f"--output {output}: is a folder; name the file to write")
        self._check_kind()
        if self.map_flags.wanted and self.placement.wanted:
            raise UserError(
                "--gcp and --gps put it on a map; leave out --orient, --scale_factor and "
                "--known_distance"
            )
        if self.map_flags.scales and self.placement.is_scaled:
            raise UserError(
                "--target_size gives a scale; leave out --scale_factor and --known_distance"
            )
        if self.original_frame:
            self._check_original_frame()
        is_scaled = self.placement.is_scaled or self.map_flags.wanted or self.map_flags.scales
        if self.format.for_printers and not is_scaled and not Placement.of(self.result).is_metric:
            raise UserError(
                f"--to {self.to} is in millimetres: pass --known_distance, or --scale_factor with "
                "how many metres a unit of the capture is"
            )
        if self.format.check_packages is not None:
            self.format.check_packages()
        for name in ("max_triangles", "texture_size"):
            if getattr(self, name) is not None and not self.format.holds_mesh:
                raise UserError(f"--{name} is for meshes; choose --to {', '.join(MESHES)}")
        if self.normal_map:
            self._check_normal_map()
        self._check_engines()

    def _check_kind(self) -> None:
        """Refuse files of Gaussians and edited meshes with formats that they are not for."""
        is_combined = self.format.holds_mesh and self.format.holds_gaussians
        if self.gaussians is not None and not is_combined:
            raise UserError(f"--gaussians goes with a mesh; choose --to {' or '.join(COMBINED)}")
        makes_gaussians = self.format.holds_gaussians and not is_combined
        if self.repose is None or makes_gaussians:
            return
        advice = f"choose --to {', '.join(GAUSSIANS)}, not {self.to}"
        if is_combined:
            advice += "; then pass what it writes as --gaussians"
        raise UserError(f"--repose makes Gaussians; {advice}")

    def _check_engines(self) -> None:
        """Refuse flags for engines with formats that cannot store them."""
        if self.engines.collision is not None:
            if not self.format.holds_colliders:
                raise UserError(f"--collision goes with --to {', '.join(WITH_COLLIDERS)}")
            check_collision(self.engines)
        if self.engines.lods is not None and not self.holds_levels:
            raise UserError(f"--lods goes with --to {' or '.join(WITH_LEVELS)}")

    def _check_original_frame(self) -> None:
        if not self.format.holds_far_coordinates:
            wide = [entry.name for entry in FORMATS.values() if entry.holds_far_coordinates]
            raise UserError(
                f"--original_frame: {self.to} has too few digits for the coordinates of the "
                f"original; choose --to {', '.join(wide)}"
            )
        if self.placement.wanted or self.map_flags.scales:
            raise UserError(
                "--original_frame leaves everything where it was; leave out --orient, "
                "--scale_factor, --known_distance and --target_size"
            )

    def _check_normal_map(self) -> None:
        suitable = [entry.name for entry in MESH_FORMATS if entry.holds_normal_map]
        is_reduced = self.max_triangles is not None or self.engines.lods is not None
        if not is_reduced or self.to not in suitable:
            names = " or ".join(suitable)
            raise UserError(f"--normal_map needs --max_triangles or --lods, and --to {names}")

    @property
    def format(self) -> AnyFormat:
        """The entry of the table of formats that ``to`` names."""
        return FORMATS[self.to]

    @property
    def file(self) -> Path:
        """The file to read: of a folder of results the one that the format is for."""
        return self.format.file_of(self.result)

    @property
    def main_file(self) -> Path:
        """The file that says where the result stands."""
        return self.repose or self.file

    @property
    def world(self) -> World:
        """The axes of the world in which the result is exported."""
        if self.map_flags.wanted:
            return World.MAP
        return World.UPRIGHT if self.placement.orient == "up" else World.CAPTURE

    @property
    def is_placed(self) -> bool:
        """Whether it is exported in another world than that of the capture."""
        return self.placement.wanted or self.map_flags.wanted

    @property
    def target(self) -> Path:
        """The file to write; a name without the format's suffix gets it."""
        if self.output is not None:
            return self.format.file_path(self.output)
        result = self.result.resolve()
        # The .pt of a run is named after an iteration, an index is like any other; their folders
        # say what they are.
        has_name_of_folder = result.suffix in (".pt", ".json")
        stem = result.parent.name if has_name_of_folder else result.name.split(".")[0]
        if self.format.file_name:
            return OUTPUT_ROOT / "exports" / stem / self.format.file_name
        return OUTPUT_ROOT / "exports" / f"{stem}{self.format.suffix}"

    @property
    def files(self) -> list[Path]:
        """All files with the result, the target first."""
        return [*self.format.files(self.target, self.normal_map), *self.level_files]

    @property
    def holds_levels(self) -> bool:
        """Whether the format holds levels of detail."""
        return self.to in WITH_LEVELS

    @property
    def level_files(self) -> list[Path]:
        """The files of all levels of detail; none where there are no levels."""
        return level_files(self.target, self.engines.lods)

    @property
    def matrix_files(self) -> list[Path]:
        """The JSON files beside the target and its levels with the matrix of a placed export."""
        placed_files = [self.target, *self.level_files]
        return [path.with_name(f"{path.name}.json") for path in placed_files]

    @property
    def binding_file(self) -> Path:
        """Path of the archive with the binding of Gaussians to a mesh."""
        return self.target.with_name(f"{self.target.name}.binding.npz")


def export_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of ``sugar export``; flags of a placement have the help that fits here."""
    changes = {name: {"group": "export", "help": text} for name, text in _PLACEMENT_HELP.items()}
    return parser_of(description, ExportOptions, examples="", **changes)
