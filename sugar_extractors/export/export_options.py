# SPDX-License-Identifier: Apache-2.0
"""The flags of ``export.py``, and what they mean together."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, dataclass, field
from functools import partial
from pathlib import Path

from sugar_extractors.export.mesh_formats import load_usd, require_lxml
from sugar_extractors.texture.placed_export import PlacementOptions
from sugar_trainers.naming import OUTPUT_ROOT
from sugar_utils.errors import UserError
from sugar_utils.flags import positive_int
from sugar_utils.settings import add_flags, flag, from_args, parser_of

PRINTED = ("stl", "3mf")
GAUSSIANS = ("spz", "splat", "ply", "gltf")
MESHES = ("glb", "obj", "usdz", *PRINTED)

_flag = partial(flag, group="export")
_PLACEMENT = {
    "orient": {
        "group": "export",
        "help": "up: turn it upright, y up and standing on 0; needs the cameras of the capture",
    },
    "scale_factor": {"group": "export", "help": "make it so many times as large"},
    "known_distance": {
        "group": "export",
        "help": "make it metres: two photographs or two points x,y,z of the capture, and how many "
        "metres lie between the cameras or points",
    },
}
"""What flags of the texture stage mean here, where they are not about a copy beside the mesh."""


@dataclass(frozen=True)
class ExportOptions:
    """What ``export.py`` is asked for."""

    result: Path = _flag(
        MISSING, "what to export. Gaussians: a .ply, .spz, .splat or .glb, a .pt of any stage, a "
        "folder; meshes: a textured .obj", positional=True, parse=Path,
    )  # fmt: skip
    to: str = _flag(
        MISSING, "format. Gaussians: spz, for phones and web pages, a tenth of the size; splat, "
        "for web pages, without view-dependent colour; ply; gltf, for programs that know "
        "KHR_gaussian_splatting, y up, as NAME.gltf.glb. Textured meshes: glb, obj; usdz, for "
        "phones; stl and 3mf, for printers",
        choices=(*GAUSSIANS, *MESHES),
        missing=f"choose one of {', '.join((*GAUSSIANS, *MESHES))}",
    )  # fmt: skip
    output: Path | None = _flag(
        None, "file to write, NAME or NAME.FORMAT; unset: output/exports/NAME.FORMAT", short="-o",
        parse=Path,
    )  # fmt: skip
    max_triangles: int | None = _flag(
        None, "leave so many triangles of the mesh; the picture is made anew for them",
        parse=positive_int, no_effect_when="for Gaussians it is an error",
    )  # fmt: skip
    texture_size: int | None = _flag(
        None, "texels per side of the picture at most", parse=positive_int,
        no_effect_when="for Gaussians it is an error",
    )  # fmt: skip
    repose: Path | None = _flag(
        None, "edited mesh of the refined model, an .obj with the same triangles: its Gaussians "
        "move along", parse=Path,
        no_effect_when="it is an error unless the result is a refined model",
    )  # fmt: skip
    scene_path: Path | None = _flag(
        None, "scene folder, for its cameras; unset: the one that the result's own record names",
        short="-s", parse=Path, no_effect_when="without --orient up and --known_distance",
    )  # fmt: skip
    checkpoint_path: Path | None = _flag(
        None, "vanilla checkpoint whose cameras.json says where the cameras are, for worlds that "
        "another program moved; unset: that of the record, or the cameras of the scene",
        short="-c", parse=Path, no_effect_when="without --orient up and --known_distance",
    )  # fmt: skip
    overwrite: bool = _flag(False, "replace a file that is there")
    placement: PlacementOptions = field(default_factory=PlacementOptions)

    def __post_init__(self) -> None:
        output = self.output
        # A name of dots has no name that endings could be put behind.
        if output is not None and (output.is_dir() or not output.name.strip(".")):
            raise UserError(f"--output {output}: is a folder; name the file to write")
        if self.repose is not None and self.to not in GAUSSIANS:
            raise UserError(
                f"--repose makes Gaussians; choose --to {', '.join(GAUSSIANS)}, not {self.to}"
            )

        scaled = self.placement.scale_factor or self.placement.known_distance
        if self.to in PRINTED and not scaled:
            raise UserError(
                f"--to {self.to} is in millimetres: pass --known_distance, or --scale_factor with "
                "how many metres a unit of the capture is"
            )
        if self.to == "3mf":
            require_lxml()
        if self.to == "usdz":
            load_usd()
        given = [n for n in ("max_triangles", "texture_size") if getattr(self, n) is not None]
        if given and self.to in GAUSSIANS:
            raise UserError(f"--{given[0]} is for meshes; choose --to {', '.join(MESHES)}")

    @property
    def target(self) -> Path:
        """The file to write; the format's suffix is put behind a name that lacks it."""
        suffix = "gltf.glb" if self.to == "gltf" else self.to
        output = self.output
        if output is None:
            name = self.result.resolve()
            # The .pt of a run is called by an iteration; its folder says what it is.
            stem = name.parent.name if name.suffix == ".pt" else name.name.split(".")[0]
            return OUTPUT_ROOT / "exports" / f"{stem}.{suffix}"
        if output.suffix.lower() == Path(f"a.{suffix}").suffix:
            return output.with_suffix(output.suffix.lower())
        return output.with_name(f"{output.name}.{suffix}")


def export_parser(description: str | None) -> argparse.ArgumentParser:
    """All flags of ``export.py``."""
    parser = parser_of(description)
    add_flags(parser, ExportOptions, **_PLACEMENT)
    return parser


def export_options(args: argparse.Namespace) -> ExportOptions:
    """What was asked for."""
    return from_args(ExportOptions, args)
