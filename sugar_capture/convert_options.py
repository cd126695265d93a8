# SPDX-License-Identifier: Apache-2.0
"""The flags of ``convert.py``."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from gaussian_splatting.data.masks import MaskOptions
from gaussian_splatting.shared_flags import InertFlags, inert
from sugar_capture.features.feature_kinds import LastFeatures
from sugar_capture.pairs.chosen_pairs import MAX_EXHAUSTIVE, SIMILAR_UNORDERED, Matcher
from sugar_utils import flags
from sugar_utils.settings import flag

Mapper = Literal["auto", "incremental", "global"]

_posing = partial(flag, group="camera positions")
_convert = partial(flag, group="scene")


@dataclass(frozen=True)
class SfmOptions:
    """Flags of ``convert.py`` for finding camera poses; train_full_pipeline.py has them, too."""

    frames: int = _posing(
        150,
        "frames of a video at most: the sharpest of as many intervals, without those in which "
        "nothing moved",
        parse=flags.positive_int,
        no_effect_when="with photographs",
    )
    camera: str | None = _posing(
        None,
        "COLMAP's model of the lens; unset: OPENCV, and SIMPLE_RADIAL for cameras that took "
        "fewer than 10 of the photographs",
        parse=flags.optional_str,
    )
    cameras: str | None = _posing(
        None,
        "file or folder with the cameras of another program, which are kept; none: ignore "
        "them; unset: those in the scene folder",
        parse=flags.optional_str,
    )
    extraction_size: int = _posing(
        1600,
        "longest side in pixels at which features are looked for; time and memory grow with "
        "its square",
        parse=flags.positive_int,
    )
    masked_features: bool | Literal["auto"] = _posing(
        "auto",
        "True: look for features only where masks count; False: everywhere, for an object "
        "that stood still; auto: where masks count, and everywhere if that registers more",
        parse=flags.boolean_or_auto,
        metavar="{auto,True,False}",
        no_effect_when="without masks",
    )
    features: LastFeatures = _posing(
        "auto",
        "last kind of features that is tried for photographs without a pose, in this order. sift: "
        "no further ones; contrast: less noise and more contrast, for dark photographs; affine: "
        "faint and slanted features, for few sides; learned: ALIKED and LightGlue, needs "
        "onnxruntime and weights; auto: all that are installed",
        choices=get_args(LastFeatures),
    )
    feature_weights: Path | None = _posing(
        None,
        "folder with aliked-n16rot.onnx and aliked-lightglue.onnx of COLMAP; unset: "
        "~/.cache/colmap, where COLMAP keeps them",
        parse=Path,
    )
    max_features: int = _posing(8192, "features per photograph at most", parse=flags.positive_int)
    matcher: Matcher = _posing(
        "auto",
        "pairs of photographs that are matched. exhaustive: all; sequential: neighbours in "
        f"order, and similar ones; similar: each with the {SIMILAR_UNORDERED} most similar ones, "
        "and with those taken near it or after it; photographs without a pose with all, among "
        "thousands with the most similar; auto: "
        f"exhaustive up to {MAX_EXHAUSTIVE}, beyond that sequential for videos, else similar",
        choices=get_args(Matcher),
    )
    panoramas: bool | Literal["auto"] = _posing(
        "auto",
        "True: the photographs, or the video, are equirectangular panoramas, which become "
        "six square views each; False: they are not; auto: where XMP says so, or all are twice as "
        "wide as high and show the same texture at their left and right border",
        parse=flags.boolean_or_auto,
        metavar="{auto,True,False}",
    )
    photographer: float | None = _posing(
        None,
        "degrees around straight down of a panorama that show the photographer or the tripod and "
        "do not count; needs --mask_mode ignore",
        parse=flags.acute_angle,
        no_effect_when="without panoramas",
    )
    mapper: Mapper = _posing(
        "auto",
        "incremental: one photograph after the other; global: all at once, for thousands; "
        "auto: incremental up to 500, and beyond that where global registers too few",
        choices=get_args(Mapper),
    )


@dataclass(frozen=True)
class PoseTimeLimit:
    """The time for camera poses as a part of a run."""

    seconds: float  # in which features are looked for that suit
    most_seconds: float  # up to which further steps are made for photographs without a pose
    run_seconds: float  # of the whole run


@dataclass(frozen=True)
class InertConvertFlags(InertFlags):
    """Flags of the original that have no effect; using one prints a message that says so."""

    no_gpu: bool = inert(False, "it runs on the processor anyway", action="store_true")
    colmap_executable: str | None = inert(None, "COLMAP's Python edition does the work")
    magick_executable: str | None = inert(None, "Pillow does the resizing")


@dataclass(frozen=True)
class ConvertOptions:
    """All flags of ``convert.py``."""

    source_path: Path = _convert(
        MISSING,
        "folder with photographs in input/, images/ or the folder itself, or a video; the "
        "scene of VIDEO.mp4 is the folder VIDEO",
        short="-s",
        parse=Path,
        missing="name a folder with photographs, or a video",
    )
    resize: bool = _convert(
        False,
        "write images_2, images_4 and images_8 as well, at a half, a quarter, an eighth",
        action="store_true",
    )
    skip_matching: bool = _convert(
        False,
        "take the cameras from distorted/sparse/0, by COLMAP or an earlier call",
        action="store_true",
    )
    overwrite: bool = _convert(
        False, "find cameras anew; old ones of other programs are kept in distorted/"
    )
    random_seed: int = _convert(0, "seed of matching and mapping", parse=flags.non_negative_int)
    sfm: SfmOptions = field(default_factory=SfmOptions)
    time_limit: PoseTimeLimit | None = None
    masks: MaskOptions = field(default_factory=MaskOptions)
    inert: InertConvertFlags = field(default_factory=InertConvertFlags)
