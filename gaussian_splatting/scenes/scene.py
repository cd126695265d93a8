# SPDX-License-Identifier: Apache-2.0
"""Scenes: posed images at their training size, held-out views, and points to start from."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gaussian_splatting.data.cameras import Camera, camera_extent, near_plane
from gaussian_splatting.data.colmap import find_model, larger_model, read_colmap
from gaussian_splatting.data.consistency import (
    NO_EARLIER_CHECKS,
    CheckedViews,
    EarlierChecks,
    checked_views,
)
from gaussian_splatting.data.maps.depth_maps import (
    NO_DEPTHS,
    NOTHING_KNOWN,
    DepthOptions,
    KnownDepths,
    ScanWorld,
    known_depths,
)
from gaussian_splatting.data.maps.normal_maps import (
    NO_NORMALS,
    NO_NORMALS_KNOWN,
    KnownNormals,
    NormalOptions,
    known_normals,
)
from gaussian_splatting.data.masks import (
    FOUND,
    NO_MASKS,
    MaskOptions,
    require_counted_pixels,
    with_transient_masks,
)
from gaussian_splatting.data.names import (
    HEIF_SUFFIXES,
    IMAGE_SUFFIXES,
    RAW_SUFFIXES,
    VIDEO_SUFFIXES,
    ImageFolder,
    ImagePlaces,
    missing_images,
)
from gaussian_splatting.data.observations import KEEP_ALL, CaptureModel, Observations, ViewOptions
from gaussian_splatting.data.world_offset import offset_for, read_offset
from gaussian_splatting.scenes.checkpoint_cameras import (
    in_world_of,
    merge_cameras,
    model_offset,
    observations_of,
    unique_cameras,
    without_synthetic_test,
)
from gaussian_splatting.scenes.reference_layout import ReferenceCheckpoint
from gaussian_splatting.scenes.transforms_json import find_transforms, read_transforms
from sugar_utils.command_text import command_text
from sugar_utils.errors import Notify, UserError

TEST_INTERVAL = 8
DIVISORS = (1, 2, 4, 8)
_MAX_SIDE = 1 << 16
_DEFAULT_MAX_WIDTH = 1600  # pixels
_MAX_LISTED = 10_000  # files among which photographs are looked for
_TRAINED_ON = "trained on by the checkpoint, so figures on them are too good"


class SizeRule(Protocol):
    """A rule for the size at which images are used."""

    def target(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height in pixels for a file of a size."""
        ...


def whole_pixels(width: float, height: float) -> tuple[int, int]:
    """Round a size to whole pixels, at least one.

    Raises:
        UserError: A side has more pixels than can be worked with.
    """
    if max(width, height) > _MAX_SIDE:
        raise UserError(
            f"images of {width:.6g} x {height:.6g} px cannot be worked at, a side has at most "
            f"{_MAX_SIDE:,} px; use another --resolution or --resolution_factor"
        )
    return max(1, round(width)), max(1, round(height))


@dataclass(frozen=True)
class VanillaSize:
    """The size rule of 3DGS and its flag ``--resolution``."""

    resolution: float = -1
    """-1: at most 1600 px wide; 1, 2, 4, 8: divisor; another positive number: width in pixels."""

    def __post_init__(self) -> None:
        if self.resolution != -1 and not (math.isfinite(self.resolution) and self.resolution > 0):
            raise UserError(
                f"--resolution must be -1, a divisor (1, 2, 4, 8) or a width, not {self.resolution}"
            )

    def target(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height in pixels for a file of a size."""
        if self.resolution in DIVISORS:
            return whole_pixels(width / self.resolution, height / self.resolution)
        target_width = min(self.resolution, 2 * _MAX_SIDE)
        if self.resolution == -1:
            target_width = min(width, _DEFAULT_MAX_WIDTH)
        target_width = max(1, int(target_width))
        return whole_pixels(target_width, height * target_width // width)


@dataclass(frozen=True)
class Scene:
    """A scene as stages use it: cameras with their images and masks, points, and measurements."""

    root: Path  # scene folder
    # Cameras at their training size, without dropped ones.
    train_cameras: list[Camera]
    test_cameras: list[Camera]
    # All cameras at their calibrated size, for cameras.json, dropped ones included.
    original_train_cameras: list[Camera]
    original_test_cameras: list[Camera]
    points: np.ndarray  # points of the reconstruction, (P, 3) float32 world units; P may be 0
    points_rgb: np.ndarray  # their colours, (P, 3) uint8
    # 1.1 times the largest distance of a training camera from their mean, world units
    extent: float
    white_background: bool
    description: str
    # Caveat for figures of held-out views; empty where there is none.
    held_out_note: str = ""
    # Points that images observe; None where the reconstruction has no tracks.
    observations: Observations | None = None
    dropped_views: dict[str, str] = field(default_factory=dict)  # reasons by name
    dropped_test_cameras: list[Camera] = field(default_factory=list)
    object_masks: str = ""  # name of the folder of estimated masks; empty without them
    # Of the images' exposures, standard deviations in stops; nan where they are unknown.
    exposure_spread: float = math.nan  # of all
    exposure_noise: float = math.nan  # of what neighbouring views do not share
    depths: KnownDepths = NOTHING_KNOWN
    normals: KnownNormals = NO_NORMALS_KNOWN
    # Add it to results for the coordinates of the original capture, world units. (3,) float64
    offset: np.ndarray = field(default_factory=partial(np.zeros, 3))
    # The part of it that is subtracted where files of the scene folder are read; the rest was
    # subtracted before they were written. (3,) float64
    model_offset: np.ndarray = field(default_factory=partial(np.zeros, 3))

    @property
    def cameras(self) -> list[Camera]:
        """Training and held-out cameras at their training size, without dropped ones."""
        return [*self.train_cameras, *self.test_cameras]

    @property
    def calibrated_cameras(self) -> list[Camera]:
        """Training and held-out cameras at their calibrated size, without dropped ones."""
        cameras = (*self.original_train_cameras, *self.original_test_cameras)
        return [camera for camera in cameras if camera.name not in self.dropped_views]

    def offset_in_folder(self, points: np.ndarray) -> np.ndarray:
        """Return the offset from files of the scene folder to the scene. (3,) float64

        The file has the coordinates of the other files there, or those of the original capture.

        Args:
            points: Its points, (P, 3); the result is to be subtracted from them.
        """
        earlier = self.offset - self.model_offset
        return self.model_offset + offset_for(points - self.model_offset, earlier)

    @property
    def held_out_views(self) -> list[str]:
        """Names of the views that are not trained on, dropped ones included."""
        return sorted(camera.name for camera in self.original_test_cameras)

    def record(self) -> dict[str, Any]:
        """Return the scene's entries for the record of a run."""
        record: dict[str, Any] = {
            "held_out_views": self.held_out_views,
            "dropped_views": self.dropped_views,
        }
        if self.held_out_note:
            record["held_out_note"] = self.held_out_note
        if self.object_masks:
            record["object_masks"] = self.object_masks
        if self.offset.any():
            record["world_offset"] = self.offset.tolist()
        return record


@dataclass(frozen=True)
class SceneOptions:
    """Options for reading a scene: the keywords of :func:`load_scene`."""

    size_rule: SizeRule
    images_dir: str = "images"  # folder of the images inside the scene folder
    eval_split: bool = True  # hold out every 8th view
    white_background: bool = False  # behind transparent images
    seed: int = 0  # of random points where the scene has none
    masks: MaskOptions = NO_MASKS
    depths: DepthOptions = NO_DEPTHS
    normals: NormalOptions = NO_NORMALS
    view_options: ViewOptions = KEEP_ALL  # views to leave out
    notify: Notify = print  # called with messages for the user


def load_scene(root: Path | str, **options: Any) -> Scene:
    """Read a scene folder: a COLMAP model, or else NeRF ``transforms*.json``.

    Cameras are sorted by image name. With ``eval_split`` every 8th one, beginning with the first,
    is held out; scenes with a ``transforms_test.json`` hold out those instead.

    Args:
        options: Fields of :class:`SceneOptions`.

    Raises:
        UserError: There is no scene, or it cannot be used.
    """
    root = _checked_root(root)
    scene_options = SceneOptions(**options)
    source = _read_source(root, scene_options)
    if source is None and not _has_photographs(root):
        raise UserError(
            f"{root}: no scene found, there are no photographs in it; put them, or a video, into "
            f"{root / 'input'}, or check -s"
        )
    if source is None:
        raise UserError(
            f"{root}: no scene found; looked for a COLMAP model in sparse/0, sparse and "
            "colmap/sparse/0 (cameras and images, .bin or .txt), and for transforms_train.json and "
            f"transforms.json; find cameras with {command_text('convert', '-s', root)}, or check -s"
        )
    train = sorted(source.train_cameras, key=lambda camera: camera.name)
    if source.test_cameras is None:
        train, test = split_cameras(train, scene_options.eval_split)
    else:
        test = sorted(source.test_cameras, key=lambda camera: camera.name)
        if not scene_options.eval_split:
            train = [*train, *test]
            test = []
    return _finish(root, train, test, source, scene_options)


def load_scene_for_checkpoint(
    root: Path | str,
    checkpoint: ReferenceCheckpoint,
    *,
    require_images: bool = True,
    **options: Any,
) -> Scene:
    """Read a scene in the world of a checkpoint's Gaussians.

    Poses come from the checkpoint's ``cameras.json``. Its intrinsics count if it stores principal
    points; otherwise the scene's own model supplies them for every camera with the same pose,
    because other programs drop the principal point. Without ``cameras.json`` this is
    ``load_scene``.

    Args:
        require_images: Raise an error if images are missing.
        options: Fields of :class:`SceneOptions`.
    """
    root = _checked_root(root)
    scene_options = SceneOptions(**options)
    notify = scene_options.notify
    if scene_options.masks.masks in FOUND and checkpoint.object_masks is None:
        raise UserError(
            f"--masks {scene_options.masks.masks}: {checkpoint.root} has no estimated masks; train "
            f"it with this flag, as {command_text('run')} does"
        )
    if checkpoint.cameras is None:
        notify(f"{checkpoint.root} has no cameras.json; taking the cameras of {root}")
        return load_scene(root, **options)
    stored = without_synthetic_test(root, checkpoint.cameras, notify)
    stored = unique_cameras(stored, notify)
    source = _read_source_for_checkpoint(root, checkpoint, scene_options)
    merged = merge_cameras(stored, source, notify)
    cameras = _with_images(merged.cameras, root, scene_options.images_dir, require_images)
    held_out = checkpoint.held_out_views or frozenset()
    if not held_out and source is not None and merged.all_in_source:
        held_out = frozenset(camera.name for camera in source.test_cameras or [])
    test = []
    if scene_options.eval_split:
        test = [camera for camera in cameras if camera.name in held_out]
    if test:
        train = [camera for camera in cameras if camera.name not in held_out]
    else:
        train, test = split_cameras(cameras, scene_options.eval_split)
    model = _model_of_checkpoint(root, checkpoint, cameras, source)
    earlier = EarlierChecks(
        checkpoint.dropped_views, checkpoint.object_masks, checkpoint.transient_masks
    )
    scene = _finish(root, train, test, model, scene_options, earlier)
    if not test or checkpoint.settings.get("eval") is not False:
        return scene
    advice = "train the checkpoint with --eval, or pass --eval False"
    notify(f"note: the held-out views were {_TRAINED_ON}; {advice}")
    return replace(scene, held_out_note=_TRAINED_ON)


def _read_source_for_checkpoint(
    root: Path, checkpoint: ReferenceCheckpoint, options: SceneOptions
) -> CaptureModel | None:
    """Read the scene's own model into the world of a checkpoint; None where that is impossible."""
    try:
        source = _read_source(root, options, missing_ok=True)
    except UserError as error:
        options.notify(f"{error}; going on with the cameras of {checkpoint.root} alone")
        return None
    if source is None:
        return None
    return in_world_of(source, checkpoint, read_offset(root))


def _model_of_checkpoint(
    root: Path,
    checkpoint: ReferenceCheckpoint,
    cameras: list[Camera],
    source: CaptureModel | None,
) -> CaptureModel:
    """Return the cameras of a checkpoint with the points of the scene's own model."""
    description = f"{len(cameras)} cameras of {checkpoint.root / 'cameras.json'}"
    if source is None:
        return CaptureModel(
            train_cameras=cameras,
            test_cameras=None,
            points=np.zeros((0, 3), np.float32),
            points_rgb=np.zeros((0, 3), np.uint8),
            description=description,
            offset=model_offset(checkpoint, read_offset(root)),
        )
    return CaptureModel(
        train_cameras=cameras,
        test_cameras=None,
        points=source.points,
        points_rgb=source.points_rgb,
        description=description,
        observations=observations_of(cameras, source),
        offset=source.offset,
    )


def split_cameras(cameras: Sequence[Camera], eval_split: bool) -> tuple[list[Camera], list[Camera]]:
    """Split cameras into those to train on and, with ``eval_split``, every 8th to hold out."""
    if not eval_split:
        return list(cameras), []
    train = [camera for index, camera in enumerate(cameras) if index % TEST_INTERVAL != 0]
    return train, list(cameras[::TEST_INTERVAL])


def _checked_root(root: Path | str) -> Path:
    root = Path(root)
    if root.suffix.lower() in VIDEO_SUFFIXES and root.is_file():
        raise UserError(
            f"{root}: a video has no cameras yet; find them with "
            f"{command_text('convert', '-s', root)}, then use -s {root.with_suffix('')}"
        )
    if not root.is_dir():
        raise UserError(f"{root}: no such scene folder; check -s")
    return root


def _has_photographs(root: Path) -> bool:
    """Whether there are images or videos in a folder, or in a folder of it."""
    suffixes = (*IMAGE_SUFFIXES, *HEIF_SUFFIXES, *RAW_SUFFIXES, *VIDEO_SUFFIXES)
    files = itertools.islice(root.rglob("*"), _MAX_LISTED)
    return any(path.suffix.lower() in suffixes for path in files)


def _read_source(
    root: Path, options: SceneOptions, missing_ok: bool = False
) -> CaptureModel | None:
    """Read the scene's own cameras and points; None if the folder has no model."""
    model_folder = find_model(root)
    if model_folder is not None:
        folder = _image_folder(root, options.images_dir)
        if not folder.root.is_dir() and not missing_ok:
            raise UserError(f"{folder.root}: no such image folder; name it with --images")
        larger = larger_model(model_folder)
        if larger is not None:
            options.notify(f"note: {larger}")
        return read_colmap(
            model_folder,
            folder,
            cache_root=root,
            missing_ok=missing_ok,
            repair=not options.view_options.keeps_all,
            notify=options.notify,
        )
    if not find_transforms(root):
        return None
    return read_transforms(
        root,
        seed=options.seed,
        images_dir=options.images_dir,
        missing_ok=missing_ok,
        notify=options.notify,
    )


def _image_folder(root: Path, images_dir: str) -> ImageFolder:
    # Path.resolve fails at links that lead to themselves.
    resolved = Path(os.path.realpath(root / images_dir))
    is_inside = resolved.is_relative_to(os.path.realpath(root))
    return ImageFolder(root / images_dir, recursive=is_inside)


def _with_images(
    cameras: Sequence[Camera], root: Path, images_dir: str, required: bool
) -> list[Camera]:
    """Find the images of cameras that have none yet.

    Raises:
        UserError: Images are required and missing.
    """
    places = ImagePlaces(
        _image_folder(root, images_dir),
        ImageFolder(root, recursive=False),
        ImageFolder(root / "train", recursive=False),
    )
    paths = places.find_all(camera.name for camera in cameras if camera.image_path is None)
    missing = [name for name, path in paths.items() if path is None]
    if missing and required:
        raise missing_images(missing, len(cameras), places)
    return [replace(c, image_path=c.image_path or paths.get(c.name)) for c in cameras]


def _finish(
    root: Path,
    train: list[Camera],
    test: list[Camera],
    source: CaptureModel,
    options: SceneOptions,
    earlier: EarlierChecks = NO_EARLIER_CHECKS,
) -> Scene:
    """Check the views, and bring all cameras to their training size, with their masks."""
    near_depth = near_plane([*train, *test], source.points)
    train = [replace(camera, near=near_depth) for camera in train]
    test = [replace(camera, near=near_depth) for camera in test]
    checked = checked_views(
        [*train, *test],
        root,
        source,
        masks=options.masks,
        options=options.view_options,
        notify=options.notify,
        earlier=earlier,
    )
    if earlier.transient_masks is not None:
        masked = with_transient_masks(checked.cameras, earlier.transient_masks)
        checked = replace(checked, cameras=masked)
        options.notify(
            "left out what the checkpoint's training found to be transient, black in "
            f"{earlier.transient_masks}"
        )
    folder_offset = read_offset(root)
    if folder_offset is None:
        folder_offset = np.zeros(3)
    offset = source.offset + folder_offset
    depths = known_depths(
        checked.cameras,
        root,
        options.depths,
        source.observations,
        options.notify,
        ScanWorld(source.points, offset),
    )
    normals = known_normals(checked.cameras, root, options.normals, options.notify)
    sized = _resize(checked, options.size_rule)
    dropped = checked.dropped
    train_cameras = _select(sized, [c.name for c in train if c.name not in dropped])
    test_cameras = _select(sized, [c.name for c in test if c.name not in dropped])
    dropped_test_cameras = _select(sized, [c.name for c in test if c.name in dropped])
    if not train_cameras:
        raise UserError(f"{root}: no training cameras are left; add images or use --eval False")
    require_counted_pixels(train_cameras)
    extent = camera_extent(train_cameras)
    if extent == 0:
        options.notify(f"{root}: all training cameras stand in one place; the scene has no extent")
    counts = f"{len(train_cameras)} to train on, {len(test_cameras)} held out"
    return Scene(
        root=root,
        train_cameras=train_cameras,
        test_cameras=test_cameras,
        original_train_cameras=train,
        original_test_cameras=test,
        points=source.points,
        points_rgb=source.points_rgb,
        extent=extent,
        white_background=options.white_background,
        description=f"{source.description}; {counts}",
        observations=source.observations,
        dropped_views=dropped,
        exposure_spread=checked.exposure_spread,
        exposure_noise=checked.exposure_noise,
        dropped_test_cameras=dropped_test_cameras,
        depths=depths,
        normals=normals,
        offset=offset,
        model_offset=source.offset,
    )


def _resize(checked: CheckedViews, rule: SizeRule) -> dict[str, Camera]:
    """Return the cameras at the size that a rule gives, by name."""
    sized = {}
    for camera in checked.cameras:
        width, height = rule.target(*camera.size)
        sized[camera.name] = camera.resized(width, height)
    return sized


def _select(cameras: dict[str, Camera], names: Sequence[str]) -> list[Camera]:
    return [cameras[name] for name in names if name in cameras]
