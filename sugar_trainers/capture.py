# SPDX-License-Identifier: Apache-2.0
"""The inputs of every SuGaR stage: a checkpoint, and the scene in its world."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gaussian_splatting.data.maps.depth_maps import NO_DEPTHS, DepthOptions
from gaussian_splatting.data.maps.normal_maps import NO_NORMALS, NormalOptions
from gaussian_splatting.data.masks import MaskOptions
from gaussian_splatting.data.observations import ViewOptions
from gaussian_splatting.rasterization.compute import Compute, DeviceFlags
from gaussian_splatting.scenes.reference_layout import (
    ReferenceCheckpoint,
    load_reference_checkpoint,
)
from gaussian_splatting.scenes.scene import DIVISORS, Scene, load_scene_for_checkpoint, whole_pixels
from sugar_utils.errors import UserError
from sugar_utils.flags import positive_float, positive_int
from sugar_utils.settings import flag, made_of

_flag = partial(flag, group="image size")


@dataclass(frozen=True)
class SugarSize:
    """The size rule of SuGaR's stages: a divisor, and a cap on the long side.

    As in the original, the cap is compared with the size of the file and multiplies the divisor:
    a 5187 px image with divisor 2 and cap 1920 is trained on at 960 px.
    """

    img_resolution: int = _flag(
        1,
        "divide the size by this. As upstream, the limit below is compared with the size of "
        "the file and multiplies the divisor",
        choices=DIVISORS,
        no_effect_when="with --resolution_factor",
    )
    img_size_limit: int = _flag(
        1920,
        "shrink images whose long side is larger to this many pixels",
        parse=positive_int,
        no_effect_when="with --resolution_factor",
    )
    resolution_factor: float | None = _flag(
        None,
        "divide the size of the original images by this number; --img_size_limit has no "
        "effect then",
        parse=positive_float,
        task="input",
    )

    def __post_init__(self) -> None:
        if self.img_resolution not in DIVISORS:
            raise UserError(
                f"--img_resolution must be 1, 2, 4 or 8, not {self.img_resolution}; "
                "use --resolution_factor for other divisors"
            )
        if self.img_size_limit < 1:
            raise UserError(f"--img_size_limit must be at least 1, not {self.img_size_limit}")
        factor = self.resolution_factor
        if factor is not None and not (math.isfinite(factor) and factor > 0):
            raise UserError(f"--resolution_factor must be a positive number, not {factor}")

    def target(self, width: int, height: int) -> tuple[int, int]:
        """Width and height in pixels for a file of the given size."""
        if self.resolution_factor is not None:
            divisor = self.resolution_factor
        else:
            divisor = float(self.img_resolution)
            if max(width, height) > self.img_size_limit:
                divisor *= max(width, height) / self.img_size_limit
        return whole_pixels(width / divisor, height / divisor)

    @property
    def messages(self) -> tuple[str, ...]:
        """One line for each flag that was given but has no effect."""
        default = SugarSize(resolution_factor=self.resolution_factor)
        if self.resolution_factor is None or self == default:
            return ()
        return ("--img_resolution and --img_size_limit have no effect beside --resolution_factor",)


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """Flags that say which photographs and which checkpoint a stage reads."""

    scene_path: Path = flag(
        MISSING,
        "scene folder (images/ and sparse/0/); needed. train_full_pipeline.py takes a "
        "folder of photographs without cameras, a video, a folder of scenes, and several -s, too",
        group="input",
        short="-s",
        parse=Path,
        no_effect_when="with --demo",
        task="input",
    )
    checkpoint_path: Path = flag(
        MISSING,
        "vanilla 3DGS checkpoint folder, or its Gaussians as .ply, .spz, .sog or .splat; needed",
        group="checkpoint",
        short="-c",
        parse=Path,
        no_effect_when="with --demo",
        task="input",
    )
    iteration_to_load: int = flag(
        7_000,
        "iteration of the checkpoint to start from; part of the result's folder name",
        group="checkpoint",
        short="-i",
        no_effect_when="for a lone PLY it only enters that name",
        task="input",
    )
    eval: bool = flag(
        True,
        "hold out every 8th view by name, beginning with the first; a scene with "
        "transforms_test.json holds out that",
        group="input",
        task="input",
    )
    images: str | None = flag(
        None,
        "folder of the photographs inside the scene folder; unset: as the checkpoint was "
        "trained, else images",
        group="input",
        parse=str,
    )
    # Identified by the masks' contents.
    mask_options: MaskOptions = field(default_factory=MaskOptions)
    # Identified by the photographs that are left out.
    view_options: ViewOptions = field(default_factory=ViewOptions)
    size: SugarSize = field(default_factory=SugarSize)
    compute: Compute = made_of(DeviceFlags, Compute)

    def sources(self) -> dict[str, Any]:
        """Paths of the inputs, for the record of the run."""
        return {"scene": self.scene_path.resolve(), "checkpoint": self.checkpoint_path.resolve()}

    def capture_identity(self) -> dict[str, Any]:
        """The settings above that decide a result, as JSON values."""
        return {
            "iteration_to_load": self.iteration_to_load,
            "eval": self.eval,
            "images": self.images,
            **asdict(self.size),
        }


def load_views(
    options: CaptureOptions,
    notify: Callable[[str], None],
    *,
    white_background: bool = False,
    seed: int = 0,
    require_images: bool = False,
    depths: DepthOptions = NO_DEPTHS,
    normals: NormalOptions = NO_NORMALS,
) -> tuple[ReferenceCheckpoint, Scene]:
    """Find the checkpoint and read the scene; no Gaussians and no photographs yet."""
    checkpoint = load_reference_checkpoint(
        options.checkpoint_path, options.iteration_to_load, notify
    )
    scene = load_scene_for_checkpoint(
        options.scene_path,
        checkpoint,
        size_rule=options.size,
        images_dir=options.images or checkpoint.images_dir,
        eval_split=options.eval,
        white_background=white_background,
        seed=seed,
        require_images=require_images,
        masks=options.mask_options,
        depths=depths,
        normals=normals,
        view_options=options.view_options,
        notify=notify,
    )
    return checkpoint, scene


def model_file(path: Path, flag: str) -> Path:
    """The ``.pt`` of a path: the file itself, or the last one of a run's folder.

    Raises:
        UserError: There is none; the message names the flag.
    """
    if path.is_dir():
        files = [p for p in path.glob("*.pt") if p.stem.isdigit()]
        if not files:
            raise UserError(f"{path}: holds no .pt file; check {flag}")
        return max(files, key=lambda p: int(p.stem))
    if not path.is_file():
        raise UserError(f"{path}: no such file; check {flag}")
    return path
