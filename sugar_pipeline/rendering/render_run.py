# SPDX-License-Identifier: Apache-2.0
"""Renders results from cameras of the capture or along a path, as a video or as pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from scipy.interpolate import CubicSpline
from scipy.spatial.transform import Rotation, RotationSpline

from gaussian_splatting.compute import Compute, DeviceFlags
from gaussian_splatting.data.cameras import Camera, up_direction, upright_rotation
from gaussian_splatting.data.reference_layout import read_cameras_json
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.shared_flags import white_background
from sugar_extractors.results import scene_of
from sugar_pipeline.rendering import shown_models
from sugar_pipeline.rendering.shown_models import ShownModel
from sugar_trainers.capture import SugarSize
from sugar_trainers.naming import OUTPUT_ROOT, scene_name
from sugar_utils.console import Console, Progress
from sugar_utils.errors import UserError
from sugar_utils.files import check_writable
from sugar_utils.flags import positive_int
from sugar_utils.settings import flag, made_of

VIEWS = ("test", "train", "all")
PATHS = ("turntable", "between")
MAX_FPS = 1_000
_flag = partial(flag, group="pictures")


@dataclass(frozen=True)
class RenderOptions:
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
        parse=str, choices=shown_models.SHOWS, nargs="+",
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
    compute: Compute = made_of(DeviceFlags, Compute)

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
        suffix = "" if self.path in VIEWS else shown_models.VIDEO_SUFFIX
        return OUTPUT_ROOT / "renders" / scene_name(self.scene_path) / f"{name}{suffix}"


def turntable(cameras: Sequence[Camera], points: np.ndarray, n: int) -> list[Camera]:
    """A circle around what the cameras look at, upright, at their middle height and distance."""
    target = looked_at(cameras)
    centers = np.stack([camera.center for camera in cameras])
    up = up_direction(np.stack([camera.rotation for camera in cameras]), points)
    # Rows: to the right, up, and towards the first camera.
    axes = upright_rotation(up, cameras[0].center - target)
    offsets = (centers - target) @ axes.T
    height = float(np.median(offsets[:, 1]))
    radius = float(np.median(np.hypot(offsets[:, 0], offsets[:, 2])))
    angles = 2 * np.pi * np.arange(n) / n
    level = np.stack([np.sin(angles), np.zeros(n), np.cos(angles)], axis=1)
    places = target + (radius * level + [0.0, height, 0.0]) @ axes
    return [
        _placed(cameras[0], k, looking(place, target, up), place) for k, place in enumerate(places)
    ]


def looked_at(cameras: Sequence[Camera]) -> np.ndarray:
    """The point that is nearest to all lines of sight, in the sense of least squares. (3,)

    Where all look the same way, it is one distance of the outermost cameras ahead of their middle.
    """
    centers = np.stack([camera.center for camera in cameras])
    ahead = np.stack([camera.rotation[2] for camera in cameras])
    across = np.eye(3) - ahead[:, :, None] * ahead[:, None, :]
    total = across.sum(axis=0)
    if np.linalg.eigvalsh(total)[0] > 1e-3 * len(cameras):
        return np.linalg.solve(total, np.einsum("nij,nj->i", across, centers))
    middle, mean = centers.mean(axis=0), ahead.mean(axis=0)
    reach = np.linalg.norm(centers - middle, axis=1).max()
    return middle + reach * mean / np.linalg.norm(mean)


def looking(place: np.ndarray, target: np.ndarray, up: np.ndarray) -> np.ndarray:
    """World-to-camera rotation, x right, y down, of a look at a target without roll. (3, 3)"""
    ahead = (target - place) / np.linalg.norm(target - place)
    right = np.cross(ahead, up)
    if np.linalg.norm(right) < 1e-9:
        # Straight up or down: any level direction will do.
        right = np.cross(ahead, np.eye(3)[np.abs(up).argmin()])
    right = right / np.linalg.norm(right)
    return np.stack([right, np.cross(ahead, right), ahead])


def between(cameras: Sequence[Camera], n: int) -> list[Camera]:
    """A path through cameras, in their order: a cubic spline of places, and one of rotations."""
    if len(cameras) < 2:
        raise UserError(f"a path needs at least 2 cameras to pass through, not {len(cameras)}")
    times = np.arange(len(cameras), dtype=float)
    at = np.linspace(0, len(cameras) - 1, n)
    places = CubicSpline(times, np.stack([camera.center for camera in cameras]))(at)
    turns = Rotation.from_matrix(np.stack([camera.rotation for camera in cameras]))
    rotations = RotationSpline(times, turns)(at).as_matrix()
    both = zip(rotations, places, strict=True)
    return [_placed(cameras[0], k, turn, place) for k, (turn, place) in enumerate(both)]


def _placed(camera: Camera, number: int, rotation: np.ndarray, place: np.ndarray) -> Camera:
    """A frame of a path: a camera's size and lens, and no photograph."""
    return replace(
        camera, name=f"{number:05d}", rotation=rotation, translation=-rotation @ place,
        image_path=None, source_path=None, mask_path=None, mask=None,
    )  # fmt: skip


_PROBES = 8  # cameras that decide which depth is white: one for all pictures, or they would flicker


def render_results(options: RenderOptions, console: Console | None = None) -> Path:
    console, target = console or Console(), options.target
    if options.compute.device_reason:
        console.info(options.compute.device_reason)
    is_video = target.suffix.lower() == shown_models.VIDEO_SUFFIX
    if is_video and target.is_dir():
        raise UserError(f"{target}: is a folder, not a video; choose another --output")
    if not is_video and target.exists() and not target.is_dir():
        raise UserError(f"{target}: is a file; name a folder for the pictures, or NAME.mp4")
    if not is_video and target.suffix and not target.is_dir():
        raise UserError(f"{target}: neither NAME.mp4 nor a folder; choose another --output")
    check_writable(target.parent if is_video else target)
    scene = scene_of(options.scene_path, options.checkpoint_path, options.size, console.info)
    cameras = film_cameras(scene, options)
    look = options.white_background, options.compute.device, console.info
    models = [shown_models.open_model(path, *look) for path in options.results]
    shown_models.require_showable(models, options.show)
    with console.progress("rendering", 1, len(cameras)) as progress:
        pictures = _pictures(models, options.show, cameras, progress)
        if is_video:
            shown_models.write_video(target, pictures, options.fps)
        else:
            names = [Path(camera.name).with_suffix("").as_posix() for camera in cameras]
            shown_models.write_pictures(target, names, pictures)
    console.info(f"{len(cameras)} pictures: {target}")
    return target


def film_cameras(scene: Scene, options: RenderOptions) -> list[Camera]:
    if options.path.endswith(".json"):
        return [stored.camera for stored in read_cameras_json(Path(options.path))]
    both = sorted([*scene.train_cameras, *scene.test_cameras], key=lambda camera: camera.name)
    views = {"test": scene.test_cameras, "train": scene.train_cameras, "all": both}
    if options.path in views:
        if not views[options.path]:
            raise UserError(
                f"--path {options.path}: {options.scene_path} has no such views; use --path all"
            )
        return list(views[options.path])
    if options.path == "turntable":
        return turntable(both, scene.points, options.n_frames)
    passed = both[:: options.every]
    if len(passed) < 2:
        raise UserError(
            f"--every {options.every}: leaves {len(passed)} of {len(both)} photographs, and a path "
            f"passes through 2 or more; use --every {max(1, len(both) - 1)} or less"
        )
    return between(passed, options.n_frames)


def _pictures(
    models: Sequence[ShownModel], shows: Sequence[str], cameras: Sequence[Camera],
    progress: Progress,
) -> Iterator[np.ndarray]:  # fmt: skip
    """One picture per camera: each model side by side, and then what else is to be shown."""
    probes = cameras[:: max(1, len(cameras) // _PROBES)]
    far = (
        max(shown_models.far_depth(model, probes) for model in models)
        if {*shown_models.DEPTHS} & {*shows}
        else 1.0
    )
    for done, camera in enumerate(cameras, start=1):
        row = [shown_models.shown(model, show, camera, far) for show in shows for model in models]
        yield np.concatenate(row, axis=1)
        progress.update(done)
