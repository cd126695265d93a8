# SPDX-License-Identifier: Apache-2.0
"""Renders results from cameras of the capture or along a path, as a video or as pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.reference_layout import read_cameras_json
from gaussian_splatting.data.scene import Scene
from sugar_extractors.results import scene_of
from sugar_pipeline.filming.camera_paths import between, turntable
from sugar_pipeline.filming.film_files import VIDEO_SUFFIX, write_pictures, write_video
from sugar_pipeline.filming.film_options import FilmOptions
from sugar_pipeline.filming.shown_models import (
    DEPTHS,
    ShownModel,
    far_depth,
    open_model,
    require_showable,
    shown,
)
from sugar_utils.console import Console, Progress
from sugar_utils.errors import UserError
from sugar_utils.files import check_writable

_PROBES = 8
"""Cameras that decide which depth is white: one for all pictures, or they would flicker."""


def film(options: FilmOptions, console: Console | None = None) -> Path:
    """Render what was asked for."""
    console = console or Console()
    if options.compute.device_reason:
        console.info(options.compute.device_reason)
    target = options.target
    _check_target(target)
    scene = scene_of(options.scene_path, options.checkpoint_path, options.size, console.info)
    cameras = film_cameras(scene, options)
    device = options.compute.device
    models = [open_model(p, options.white_background, device, console.info)
              for p in options.results]  # fmt: skip
    require_showable(models, options.show)
    with console.progress("rendering", 1, len(cameras)) as progress:
        pictures = _pictures(models, options.show, cameras, progress)
        if target.suffix.lower() == VIDEO_SUFFIX:
            write_video(target, pictures, options.fps)
        else:
            names = [Path(camera.name).with_suffix("").as_posix() for camera in cameras]
            write_pictures(target, names, pictures)
    console.info(f"{len(cameras)} pictures: {target}")
    return target


def _check_target(target: Path) -> None:
    is_video = target.suffix.lower() == VIDEO_SUFFIX
    if is_video and target.is_dir():
        raise UserError(f"{target}: is a folder, not a video; choose another --output")
    if not is_video and target.exists() and not target.is_dir():
        raise UserError(f"{target}: is a file; name a folder for the pictures, or NAME.mp4")
    if not is_video and target.suffix and not target.is_dir():
        raise UserError(f"{target}: neither NAME.mp4 nor a folder; choose another --output")
    check_writable(target.parent if is_video else target)


def film_cameras(scene: Scene, options: FilmOptions) -> list[Camera]:
    """Where to look from."""
    if options.path.endswith(".json"):
        return [stored.camera for stored in read_cameras_json(Path(options.path))]
    both = sorted([*scene.train_cameras, *scene.test_cameras], key=lambda camera: camera.name)
    views = {"test": scene.test_cameras, "train": scene.train_cameras, "all": both}
    if options.path in views:
        if not views[options.path]:
            raise UserError(f"--path {options.path}: {options.scene_path} has no such views; "
                            "use --path all")  # fmt: skip
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
    models: Sequence[ShownModel],
    shows: Sequence[str],
    cameras: Sequence[Camera],
    progress: Progress,
) -> Iterator[np.ndarray]:
    """One picture per camera: each model side by side, and then what else is to be shown."""
    probes = cameras[:: max(1, len(cameras) // _PROBES)]
    far = max(far_depth(model, probes) for model in models) if {*DEPTHS} & {*shows} else 1.0
    for done, camera in enumerate(cameras, start=1):
        row = [shown(model, show, camera, far) for show in shows for model in models]
        yield np.concatenate(row, axis=1)
        progress.update(done)
