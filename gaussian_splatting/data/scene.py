# SPDX-License-Identifier: Apache-2.0
"""Scenes: posed photographs at their training size, held-out views, and points to start from."""

from __future__ import annotations

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
from gaussian_splatting.data.consistency import checked_views
from gaussian_splatting.data.depth_maps import (
    NO_DEPTHS,
    NOTHING_KNOWN,
    DepthOptions,
    KnownDepths,
    known_depths,
)
from gaussian_splatting.data.masks import FOUND, NO_MASKS, MaskOptions, require_counted_pixels
from gaussian_splatting.data.names import (
    VIDEO_SUFFIXES,
    CamerasByName,
    ImageFolder,
    ImagePlaces,
    missing_images,
)
from gaussian_splatting.data.observations import KEEP_ALL, CaptureModel, Observations, ViewOptions
from gaussian_splatting.data.reference_layout import ReferenceCheckpoint, StoredCamera
from gaussian_splatting.data.transforms_json import find_transforms, read_transforms
from gaussian_splatting.data.world_offset import moved_back, read_offset
from sugar_utils.errors import Notify, UserError

TEST_INTERVAL = 8
POSE_TOLERANCE = 1e-3
_SAME_OFFSET = 1e-6  # world units; offsets have few digits
_SYNTHETIC_SCENES = {"chair", "drums", "ficus", "hotdog", "lego", "materials", "mic", "ship"}
_SYNTHETIC_TEST_CAMERAS = 200
_SEEN = "trained on by the checkpoint, so figures on them are too good"

DIVISORS = (1, 2, 4, 8)
_MAX_SIDE = 1 << 16


@dataclass(frozen=True)
class Scene:
    root: Path
    train_cameras: list[Camera]
    test_cameras: list[Camera]
    # The training cameras at their calibrated size, for cameras.json; those that were left out
    # included.
    original_train_cameras: list[Camera]
    original_test_cameras: list[Camera]
    points: np.ndarray  # points of the reconstruction, (P, 3) float32 world units; P may be 0
    points_rgb: np.ndarray  # their colours, (P, 3) uint8
    # 1.1 times the largest distance of a training camera from their mean, world units
    extent: float
    white_background: bool
    description: str
    # What figures of held-out views must be read with; empty where nothing is.
    held_out_note: str = ""
    # Points that photographs observe; None where the reconstruction has no tracks.
    observations: Observations | None = None
    dropped_views: dict[str, str] = field(default_factory=dict)
    dropped_test_cameras: list[Camera] = field(default_factory=list)
    object_masks: str = ""
    # Of the photographs' exposures, standard deviations in stops; nan where they are unknown.
    exposure_spread: float = math.nan  # of all
    exposure_noise: float = math.nan  # of what neighbouring views do not share
    depths: KnownDepths = NOTHING_KNOWN
    # What results lack for the coordinates of the original capture, world units. (3,) float64
    offset: np.ndarray = field(default_factory=partial(np.zeros, 3))

    @property
    def calibrated_cameras(self) -> list[Camera]:
        """Training and held-out cameras at their calibrated size, without dropped ones."""
        both = (*self.original_train_cameras, *self.original_test_cameras)
        return [camera for camera in both if camera.name not in self.dropped_views]

    @property
    def held_out_views(self) -> list[str]:
        """Names of the views that are not trained on, those that were left out included."""
        return sorted(camera.name for camera in self.original_test_cameras)

    def record(self) -> dict[str, Any]:
        optional: dict[str, Any] = {
            "held_out_note": self.held_out_note,
            "object_masks": self.object_masks,
            "world_offset": self.offset.tolist() if self.offset.any() else None,
        }
        return {
            "held_out_views": self.held_out_views,
            "dropped_views": self.dropped_views,
            **{name: value for name, value in optional.items() if value},
        }


@dataclass(frozen=True)
class SceneOptions:
    """How a scene is read: the keywords of :func:`load_scene`."""

    size_rule: SizeRule
    images_dir: str = "images"  # folder of the images inside the scene folder
    eval_split: bool = True  # hold out every 8th view
    white_background: bool = False  # behind transparent images
    seed: int = 0  # of random points where the scene has none
    masks: MaskOptions = NO_MASKS
    depths: DepthOptions = NO_DEPTHS
    view_options: ViewOptions = KEEP_ALL  # views to leave out
    notify: Notify = print  # told what is noteworthy


def load_scene(root: Path | str, **options: Any) -> Scene:
    """Read a scene folder: a COLMAP model, or else NeRF ``transforms*.json``.

    Cameras are sorted by image name. With ``eval_split`` every 8th one, beginning with the first,
    is held out; scenes with a ``transforms_test.json`` hold out those instead. The options are
    fields of :class:`SceneOptions`.
    """
    root = _checked_root(root)
    how = SceneOptions(**options)
    source = _read_source(root, how)
    if source is None:
        raise UserError(
            f"{root}: no scene found; looked for a COLMAP model in sparse/0, sparse and "
            "colmap/sparse/0 (cameras and images, .bin or .txt), and for transforms_train.json and "
            "transforms.json; find cameras with gaussian_splatting/convert.py, or check -s"
        )
    train, test = (
        sorted(cameras, key=lambda c: c.name)
        for cameras in (source.train_cameras, source.test_cameras or [])
    )
    if source.test_cameras is None:
        train, test = split_cameras(train, how.eval_split)
    elif not how.eval_split:
        train = [*train, *test]
        test = []
    return _finish(root, train, test, source, how)


def load_scene_for_checkpoint(
    root: Path | str,
    checkpoint: ReferenceCheckpoint,
    *,
    require_images: bool = True,
    **options: Any,
) -> Scene:
    """Read a scene in the world in which the Gaussians of a checkpoint live.

    Poses come from the checkpoint's ``cameras.json``. Its intrinsics count if it stores principal
    points; otherwise the scene's own model supplies them for every camera that it poses alike,
    because other programs drop the principal point. Without ``cameras.json`` this is
    ``load_scene``, whose options it has.
    """
    root = _checked_root(root)
    how = SceneOptions(**options)
    notify = how.notify
    if how.masks.masks in FOUND and checkpoint.object_masks is None:
        raise UserError(
            f"--masks {how.masks.masks}: {checkpoint.root} has no estimated masks; train it with "
            "this flag, as train_full_pipeline.py does"
        )
    if checkpoint.cameras is None:
        notify(f"{checkpoint.root} has no cameras.json; taking the cameras of {root}")
        return load_scene(root, **options)
    stored = _unique(_without_synthetic_test(root, checkpoint.cameras, notify), notify)
    try:
        source = _read_source(root, how, missing_ok=True)
    except UserError as error:
        notify(f"{error}; going on with the cameras of {checkpoint.root} alone")
        source = None
    if source is not None:
        source = _in_world_of(source, checkpoint, read_offset(root))
    cameras, own = _merge(stored, source, notify)
    cameras = _with_images(cameras, root, how.images_dir, require_images)
    held_out = checkpoint.held_out_views or frozenset()
    if not held_out and source and all(own):
        held_out = {camera.name for camera in (source.test_cameras or [])}
    if how.eval_split and any(camera.name in held_out for camera in cameras):
        test = [camera for camera in cameras if camera.name in held_out]
        train = [camera for camera in cameras if camera.name not in held_out]
    else:
        train, test = split_cameras(cameras, how.eval_split)
    empty = np.zeros((0, 3), np.float32), np.zeros((0, 3), np.uint8)
    points, points_rgb = (source.points, source.points_rgb) if source else empty
    described = f"{len(cameras)} cameras of {checkpoint.root / 'cameras.json'}"
    seen = _observed(cameras, source)
    offset = source.offset if source is not None else checkpoint.subtracted
    merged = CaptureModel(cameras, None, points, points_rgb, described, seen, offset)
    scene = _finish(
        root, train, test, merged, how, checkpoint.dropped_views, checkpoint.object_masks
    )
    if not test or checkpoint.settings.get("eval") is not False:
        return scene
    advice = "train the checkpoint with --eval, or pass --eval False"
    notify(f"note: the held-out views were {_SEEN}; {advice}")
    return replace(scene, held_out_note=_SEEN)


def _in_world_of(
    source: CaptureModel, checkpoint: ReferenceCheckpoint, of_scene: np.ndarray | None
) -> CaptureModel:
    """Shift a scene's own cameras and points to where a checkpoint's cameras and Gaussians are.

    Both had an offset subtracted, of the same kind but perhaps of other cameras.

    Args:
        of_scene: What the coordinates of the scene folder lack themselves, (3,); None: nothing.
    """
    if checkpoint.recorded_offset is None:
        offset = checkpoint.subtracted
    else:
        offset = checkpoint.recorded_offset - (np.zeros(3) if of_scene is None else of_scene)
    if np.allclose(offset, source.offset, rtol=0, atol=_SAME_OFFSET):
        return source
    shift = offset - source.offset
    test = source.test_cameras
    observations = source.observations
    return replace(
        source,
        train_cameras=moved_back(source.train_cameras, shift),
        test_cameras=None if test is None else moved_back(test, shift),
        points=(source.points - shift).astype(np.float32),
        observations=None if observations is None else observations.moved_back(shift),
        offset=offset,
    )


def split_cameras(cameras: Sequence[Camera], eval_split: bool) -> tuple[list[Camera], list[Camera]]:
    train = [c for i, c in enumerate(cameras) if not eval_split or i % TEST_INTERVAL]
    test = [c for i, c in enumerate(cameras) if eval_split and not i % TEST_INTERVAL]
    return train, test


def _checked_root(root: Path | str) -> Path:
    root = Path(root)
    if root.suffix.lower() in VIDEO_SUFFIXES and root.is_file():
        raise UserError(
            f"{root}: a video has no cameras yet; find them with gaussian_splatting/convert.py -s "
            f"{root}, then use -s {root.with_suffix('')}"
        )
    if not root.is_dir():
        raise UserError(f"{root}: no such scene folder; check -s")
    return root


def _read_source(root: Path, how: SceneOptions, missing_ok: bool = False) -> CaptureModel | None:
    """The scene's own cameras and points; None if the folder has no model."""
    place = find_model(root)
    if place is not None:
        folder = _image_folder(root, how.images_dir)
        if not folder.root.is_dir() and not missing_ok:
            raise UserError(f"{folder.root}: no such image folder; name it with --images")
        larger = larger_model(place)
        if larger is not None:
            how.notify(f"note: {larger}")
        return read_colmap(
            place,
            folder,
            cache_root=root,
            missing_ok=missing_ok,
            repair=not how.view_options.keeps_all,
            notify=how.notify,
        )
    if not find_transforms(root):
        return None
    return read_transforms(
        root,
        seed=how.seed,
        images_dir=how.images_dir,
        missing_ok=missing_ok,
        notify=how.notify,
    )


def _image_folder(root: Path, images_dir: str) -> ImageFolder:
    # Path.resolve fails at links that lead to themselves.
    inside = Path(os.path.realpath(root / images_dir)).is_relative_to(os.path.realpath(root))
    return ImageFolder(root / images_dir, recursive=inside)


def _without_synthetic_test(
    root: Path, cameras: Sequence[StoredCamera], notify: Notify
) -> Sequence[StoredCamera]:
    """Drop the test views of the NeRF-synthetic scenes from another program's cameras.json."""
    foreign = not any(stored.has_principal_point for stored in cameras)
    known = root.resolve().name in _SYNTHETIC_SCENES and find_model(root) is None
    if not (foreign and known) or len(cameras) <= _SYNTHETIC_TEST_CAMERAS:
        return cameras
    notify(f"NeRF-synthetic scene: left out its {_SYNTHETIC_TEST_CAMERAS} test cameras")
    return cameras[_SYNTHETIC_TEST_CAMERAS:]


def _unique(cameras: Sequence[StoredCamera], notify: Notify) -> list[StoredCamera]:
    by_name = {stored.camera.name: stored for stored in cameras}
    if len(by_name) < len(cameras):
        notify(
            f"cameras.json names {len(cameras) - len(by_name)} images more than once; "
            "the last entry of each counts"
        )
    return [by_name[name] for name in sorted(by_name)]


def _merge(
    stored: Sequence[StoredCamera], source: CaptureModel | None, notify: Notify
) -> tuple[list[Camera], list[bool]]:
    """Cameras of cameras.json completed by the scene's own, and which of them the scene knows."""
    own = (source.train_cameras, source.test_cameras or []) if source else ([], [])
    find = CamerasByName(*own)
    # A single camera has no extent; a world unit then stands in for it.
    limit = POSE_TOLERANCE * (camera_extent([entry.camera for entry in stored]) or 1.0)
    cameras = []
    known = []
    apart = []
    centred = 0
    for entry in stored:
        camera = entry.camera
        own = find(entry.camera.name)
        known.append(own is not None)
        if own is not None:
            if _same_pose(camera, own, limit):
                intrinsics = camera if entry.has_principal_point else own
                # An undistorted copy has the intrinsics of its own size.
                pose = {"rotation": camera.rotation, "translation": camera.translation}
                cameras.append(replace(intrinsics, **pose, **_photograph(own)))
                continue
            apart.append(camera.name)
            same_size = (own.width, own.height) == (camera.width, camera.height)
            photograph = _photograph(own) if same_size else {"name": own.name}
            camera = replace(camera, **photograph)
        centred += not entry.has_principal_point
        cameras.append(camera)
    if apart:
        notify(
            f"{len(apart)} of {len(stored)} cameras (first: {apart[0]}) are posed differently in "
            "cameras.json and in the scene's own model; using cameras.json for them, because the "
            "Gaussians live in its world"
        )
    if centred and source is not None:
        notify(f"{centred} cameras have no known principal point; the image centre is assumed")
    return cameras, known


def _observed(cameras: Sequence[Camera], source: CaptureModel | None) -> Observations | None:
    if source is None or source.observations is None:
        return None
    own = {camera.name: camera for camera in source.cameras}
    limit = POSE_TOLERANCE * (camera_extent(cameras) or 1.0)
    return source.observations.only(
        c.name for c in cameras if c.name in own and _same_pose(c, own[c.name], limit)
    )


def _photograph(camera: Camera) -> dict[str, Any]:
    names = ("name", "image_path", "source_path", "lens", "mask_path", "depth_path")
    return {name: getattr(camera, name) for name in names}


def _same_pose(a: Camera, b: Camera, limit: float) -> bool:
    apart = np.linalg.norm(a.center - b.center)
    return bool(apart <= limit and np.abs(a.rotation - b.rotation).max() <= POSE_TOLERANCE)


def _with_images(
    cameras: Sequence[Camera], root: Path, images_dir: str, required: bool
) -> list[Camera]:
    """Find the photographs that are not known yet; all that are missing make one error."""
    places = ImagePlaces(
        _image_folder(root, images_dir),
        ImageFolder(root, recursive=False),
        ImageFolder(root / "train", recursive=False),
    )
    found = places.find_all(camera.name for camera in cameras if camera.image_path is None)
    missing = [name for name, path in found.items() if path is None]
    if missing and required:
        raise missing_images(missing, len(cameras), places)
    return [replace(c, image_path=c.image_path or found.get(c.name)) for c in cameras]


def _finish(
    root: Path,
    train: list[Camera],
    test: list[Camera],
    source: CaptureModel,
    how: SceneOptions,
    dropped: dict[str, str] | None = None,
    object_masks: Path | None = None,
) -> Scene:
    """Check the views, and bring all cameras to their training size, with their masks."""
    near = near_plane([*train, *test], source.points)
    train = [replace(camera, near=near) for camera in train]
    test = [replace(camera, near=near) for camera in test]
    checked = checked_views(
        [*train, *test],
        root,
        points=source.points,
        observations=source.observations,
        masks=how.masks,
        options=how.view_options,
        notify=how.notify,
        known=dropped,
        estimated=object_masks,
    )
    depths = known_depths(checked.cameras, root, how.depths, source.observations, how.notify)
    rule = how.size_rule
    sized = {c.name: c.resized(*rule.target(c.width, c.height)) for c in checked.cameras}
    kept = {name: camera for name, camera in sized.items() if name not in checked.dropped}
    train_cameras = [kept[c.name] for c in train if c.name in kept]
    test_cameras = [kept[c.name] for c in test if c.name in kept]
    left_out = [sized[c.name] for c in test if c.name in sized and c.name not in kept]
    if not train_cameras:
        raise UserError(f"{root}: no training cameras are left; add images or use --eval False")
    require_counted_pixels(train_cameras)
    extent = camera_extent(train_cameras)
    of_scene = read_offset(root)
    if of_scene is None:
        of_scene = np.zeros(3)
    if extent == 0:
        how.notify(f"{root}: all training cameras stand in one place; the scene has no extent")
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
        white_background=how.white_background,
        description=f"{source.description}; {counts}",
        observations=source.observations,
        dropped_views=checked.dropped,
        exposure_spread=checked.exposure_spread,
        exposure_noise=checked.exposure_noise,
        dropped_test_cameras=left_out,
        depths=depths,
        offset=source.offset + of_scene,
    )


class SizeRule(Protocol):
    def target(self, width: int, height: int) -> tuple[int, int]:
        """Width and height in pixels for a file of the given size."""


def whole_pixels(width: float, height: float) -> tuple[int, int]:
    if max(width, height) > _MAX_SIDE:
        raise UserError(
            f"images of {width:.6g} x {height:.6g} px cannot be worked at, a side has at most "
            f"{_MAX_SIDE:,} px; use another --resolution or --resolution_factor"
        )
    return max(1, round(width)), max(1, round(height))


@dataclass(frozen=True)
class VanillaSize:
    resolution: float = -1
    """-1: at most 1600 px wide; 1, 2, 4, 8: divisor; another positive number: width in pixels."""

    def __post_init__(self) -> None:
        if self.resolution != -1 and not (math.isfinite(self.resolution) and self.resolution > 0):
            raise UserError(
                f"--resolution must be -1, a divisor (1, 2, 4, 8) or a width, not {self.resolution}"
            )

    def target(self, width: int, height: int) -> tuple[int, int]:
        if self.resolution in DIVISORS:
            return whole_pixels(width / self.resolution, height / self.resolution)
        wanted = min(width, 1600) if self.resolution == -1 else min(self.resolution, 2 * _MAX_SIDE)
        wanted = max(1, int(wanted))
        return whole_pixels(wanted, height * wanted // width)
