# SPDX-License-Identifier: Apache-2.0
"""The flags of ``view.py``, and what they mean together."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, dataclass, field, replace
from functools import partial
from pathlib import Path

from gaussian_splatting.compute import Compute, DeviceFlags
from gaussian_splatting.shared_flags import white_background
from gaussian_splatting.viewing.page_server import DEFAULT_PORT, LOCALHOST, port_number
from sugar_extractors.texture.placed_export import PlacementOptions
from sugar_trainers.naming import OUTPUT_ROOT
from sugar_utils.flags import positive_float, positive_int
from sugar_utils.settings import flag, from_args, parser_of, without_flags

_flag = partial(flag, group="viewer")


@dataclass(frozen=True)
class ViewOptions:
    """What ``view.py`` is asked for."""

    results: tuple[Path, ...] = _flag(
        MISSING, "what to show: an output folder, the folder of a run, Gaussians (.ply, .pt, .spz, "
        ".splat), meshes (.ply, .obj, .glb)", positional=True, parse=Path, nargs="+",
    )  # fmt: skip
    scene_path: Path | None = _flag(
        None, "scene folder, for its cameras, photographs and points; unset: the one that the "
        "results' own records name", short="-s", parse=Path,
    )  # fmt: skip
    checkpoint_path: Path | None = _flag(
        None, "vanilla checkpoint whose cameras.json says where the cameras are, for worlds that "
        "another program moved; unset: those of the records, or of the scene", short="-c",
        parse=Path,
    )  # fmt: skip
    port: int = _flag(DEFAULT_PORT, "port of this machine to serve the page on", parse=port_number)
    host: str = _flag(LOCALHOST, "address to serve it on; 0.0.0.0 lets other machines look")
    no_open: bool = _flag(False, "do not open the page in the browser", action="store_true")
    picture_size: int = _flag(
        1280, "longest side of the pictures of the own renderer, in pixels, while nothing moves",
        parse=positive_int,
    )  # fmt: skip
    path_file: Path = _flag(
        OUTPUT_ROOT / "camera_path.json", "file for the camera path that is saved on the page, "
        "for render.py --path", parse=Path,
    )  # fmt: skip
    scale_factor: float | None = _flag(
        None, "how many metres a unit of the capture is, for measuring", parse=positive_float
    )
    known_distance: tuple[str, ...] | None = _flag(
        None, "two photographs or two points x,y,z of the capture, and how many metres lie between "
        "the cameras or points, for measuring", parse=str, nargs=3, metavar=("A", "B", "METRES"),
        no_effect_when="with --scale_factor it is an error",
    )  # fmt: skip
    white_background: bool = white_background()
    compute: Compute = field(default_factory=Compute)
    placement: PlacementOptions = without_flags(PlacementOptions)

    def __post_init__(self) -> None:
        scale = PlacementOptions("none", self.scale_factor, self.known_distance)
        object.__setattr__(self, "placement", scale)


def view_parser(description: str | None) -> argparse.ArgumentParser:
    """All flags of ``view.py``."""
    return parser_of(description, ViewOptions, DeviceFlags)


def view_options(args: argparse.Namespace) -> ViewOptions:
    """What was asked for."""
    return replace(from_args(ViewOptions, args), compute=from_args(DeviceFlags, args).choose())
