# SPDX-License-Identifier: Apache-2.0
"""The flags of ``render.py``, and what they mean together."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, dataclass, field, replace
from functools import partial
from pathlib import Path

from gaussian_splatting.compute import Compute, DeviceFlags
from gaussian_splatting.shared_flags import white_background
from sugar_pipeline.rendering.shown_models import SHOWS, VIDEO_SUFFIX
from sugar_trainers.capture import SugarSize
from sugar_trainers.naming import OUTPUT_ROOT, scene_name
from sugar_utils.errors import UserError
from sugar_utils.flags import positive_int
from sugar_utils.settings import flag, from_args, parser_of

VIEWS = ("test", "train", "all")
PATHS = ("turntable", "between")
MAX_FPS = 1_000
_flag = partial(flag, group="pictures")


@dataclass(frozen=True)
class RenderOptions:
    """What ``render.py`` is asked for."""

    results: tuple[Path, ...] = _flag(
        MISSING, "what to show, several side by side: Gaussians (a .ply, a .pt of any stage, a "
        "folder), a mesh .ply, a textured .obj", positional=True, parse=Path, nargs="+",
    )  # fmt: skip
    scene_path: Path = _flag(
        MISSING, "scene folder; needed, for its cameras", short="-s", parse=Path,
        missing="name the scene folder that the result was made of",
    )  # fmt: skip
    checkpoint_path: Path | None = _flag(
        None, "vanilla checkpoint whose cameras.json says where the cameras are, for worlds that "
        "another program moved; unset: those of the scene", short="-c", parse=Path,
    )  # fmt: skip
    path: str = _flag(
        "turntable", "where to look from. test, train, all: from where the photographs were taken "
        "that were held out, trained on, or both; turntable: once around; between: a smooth path "
        "from photograph to photograph; NAME.json: the cameras of a file in the layout of "
        "cameras.json", parse=str, metavar="{test,train,all,turntable,between,NAME.json}",
    )  # fmt: skip
    show: tuple[str, ...] = _flag(
        ("image",), "what to show of each result, several side by side. depth: white is far; "
        "median_depth: of the Gaussian that leaves less than half of the light, no mean of many; "
        "normal: red to the right, green up, blue towards the camera; clay: meshes alone; alpha: "
        "white hides what lies behind",
        parse=str, choices=SHOWS, nargs="+",
    )  # fmt: skip
    n_frames: int = _flag(
        120, "pictures on the way", parse=positive_int,
        no_effect_when="with --path test, train, all and NAME.json",
    )  # fmt: skip
    every: int = _flag(
        1, "pass through every so manieth photograph only: calmer where they were taken in zigzag",
        parse=positive_int, no_effect_when="without --path between",
    )  # fmt: skip
    fps: int = _flag(
        30, f"pictures per second of a video, at most {MAX_FPS}", parse=positive_int,
    )  # fmt: skip
    output: Path | None = _flag(
        None, "NAME.mp4 for a video, else a folder for PNG files; unset: a video of a path and PNG "
        "files of views, in output/renders/<scene>", short="-o", parse=Path,
    )  # fmt: skip
    white_background: bool = white_background()
    size: SugarSize = field(default_factory=SugarSize)
    compute: Compute = field(default_factory=Compute)

    def __post_init__(self) -> None:
        if self.fps > MAX_FPS:
            raise UserError(f"--fps {self.fps}: no screen shows so many; use {MAX_FPS} or less")
        if self.path not in (*VIEWS, *PATHS) and not self.path.endswith(".json"):
            raise UserError(
                f"--path {self.path}: choose one of {', '.join((*VIEWS, *PATHS))}, or NAME.json"
            )

    @property
    def target(self) -> Path:
        """The video, or the folder of the pictures."""
        if self.output is not None:
            return self.output
        name = "_".join([Path(self.path).stem, *dict.fromkeys(self.show)])
        suffix = "" if self.path in VIEWS else VIDEO_SUFFIX
        return OUTPUT_ROOT / "renders" / scene_name(self.scene_path) / f"{name}{suffix}"


def render_parser(description: str | None) -> argparse.ArgumentParser:
    """All flags of ``render.py``."""
    return parser_of(description, RenderOptions, DeviceFlags)


def render_options(args: argparse.Namespace) -> RenderOptions:
    """What was asked for."""
    return replace(from_args(RenderOptions, args), compute=from_args(DeviceFlags, args).choose())
