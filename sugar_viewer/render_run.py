# SPDX-License-Identifier: Apache-2.0
"""Render results from cameras of the capture, along a path, or as an orthophoto."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from gaussian_splatting.core.subsets import about
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.reporting.view_pictures import DepthRange
from gaussian_splatting.rasterization.compute import Compute, DeviceFlags
from gaussian_splatting.scenes.reference_layout import read_cameras_json
from gaussian_splatting.scenes.scene import Scene
from gaussian_splatting.shared_flags import white_background
from sugar_extractors.results import capture_of, scene_of
from sugar_maps.map_placement import MapFlags
from sugar_maps.placing import place_on_map
from sugar_trainers.capture import SugarSize
from sugar_trainers.naming import OUTPUT_ROOT, scene_name
from sugar_utils.console import Console, Progress
from sugar_utils.errors import UserError
from sugar_utils.files import check_writable
from sugar_utils.flags import positive_float, positive_int
from sugar_utils.settings import flag, made_of
from sugar_viewer.camera_paths import between, turntable
from sugar_viewer.geotiff import load_tifffile
from sugar_viewer.orthophoto import (
    DIRECTIONS,
    DOWN,
    height_file,
    heights_of,
    ortho_view,
    ortho_world,
    write_ortho,
)
from sugar_viewer.picture_files import picture_names, write_pictures, write_video
from sugar_viewer.shown_models import (
    SHOWS,
    ShownModel,
    depths_of_views,
    model_of,
    open_model,
    read_in_scene,
    shown,
)

VIDEO_SUFFIX = ".mp4"
ORTHO_SUFFIX = ".tif"
VIEWS = ("test", "train", "all")
PATHS = ("turntable", "between")
MAX_FPS = 1_000
_ORTHO_SUFFIXES = (".tif", ".tiff")
_PROBES = 8  # cameras that decide the colours of depths: one scale for all, or they would flicker
_flag = partial(flag, group="pictures")


@dataclass(frozen=True)
class RenderOptions:
    """Flags of ``sugar render``."""

    results: tuple[Path, ...] = _flag(
        MISSING,
        "what to show, several side by side: Gaussians (a .ply, a .pt of any stage, a "
        "folder), a mesh .ply, a textured .obj",
        positional=True,
        parse=Path,
        nargs="+",
    )
    scene_path: Path = _flag(
        MISSING,
        "scene folder; needed, for its cameras",
        short="-s",
        parse=Path,
        missing="name the scene folder that the result was made of",
    )
    checkpoint_path: Path | None = _flag(
        None,
        "vanilla checkpoint whose cameras.json says where the cameras are, for worlds that "
        "another program moved; unset: those of the scene",
        short="-c",
        parse=Path,
    )
    path: str = _flag(
        "turntable",
        "where to look from. test, train, all: from where the photographs were taken "
        "that were held out, trained on, or both; turntable: once around; between: a smooth path "
        "from photograph to photograph; NAME.json: the cameras of a file in the layout of "
        "cameras.json",
        parse=str,
        metavar="{test,train,all,turntable,between,NAME.json}",
    )
    show: tuple[str, ...] = _flag(
        ("image",),
        "what to show of each result, several side by side. depth: yellow is near, violet far; "
        "normal: red to the right, green up, blue towards the camera; clay: meshes alone; alpha: "
        "white hides what lies behind",
        parse=str,
        choices=SHOWS,
        nargs="+",
    )
    n_frames: int = _flag(
        120,
        "pictures along a path",
        parse=positive_int,
        no_effect_when="with --ortho, and with --path test, train, all and NAME.json",
    )
    every: int = _flag(
        1,
        "pass through every Nth photograph only, which smooths zigzag paths",
        parse=positive_int,
        no_effect_when="without --path between",
    )
    ortho: str | None = _flag(
        None,
        "write an orthophoto and a height model instead, NAME.tif and NAME_height.tif, of what is "
        "seen along a direction: down, up, or an axis of the map or of the upright capture, "
        "where x is to the right of its front, y behind it, and z up",
        choices=DIRECTIONS,
        nargs="?",
        const=DOWN,
    )
    ortho_pixel: float | None = _flag(
        None,
        "side of a pixel of an orthophoto, in metres of the map, else in units of the capture; "
        "unset: 2,000 pixels along the longer side",
        parse=positive_float,
        no_effect_when="it is an error without --ortho",
    )
    fps: int = _flag(
        30,
        f"pictures per second of a video, at most {MAX_FPS}",
        parse=positive_int,
    )
    output: Path | None = _flag(
        None,
        "NAME.mp4 for a video, else a folder for PNG files; unset: a video of a path and PNG "
        "files of views, in output/renders/<scene>",
        short="-o",
        parse=Path,
    )
    white_background: bool = white_background()
    size: SugarSize = field(default_factory=SugarSize)
    map_flags: MapFlags = field(default_factory=MapFlags)
    compute: Compute = made_of(DeviceFlags, Compute)

    def __post_init__(self) -> None:
        if self.fps > MAX_FPS:
            raise UserError(f"--fps {self.fps}: no screen shows so many; use {MAX_FPS} or less")
        if self.path not in (*VIEWS, *PATHS) and not self.path.endswith(".json"):
            raise UserError(
                f"--path {self.path}: choose one of {', '.join((*VIEWS, *PATHS))}, or NAME.json"
            )
        if self.map_flags.scales:
            raise UserError(
                "--targets alone gives a scale, not a map; pass --gcp or --gps auto, too"
            )
        if self.ortho is None:
            if self.ortho_pixel is not None or self.map_flags.wanted:
                raise UserError("--ortho_pixel, --gcp and --gps are for --ortho; pass it, too")
        elif len(self.results) > 1:
            raise UserError(
                f"--ortho shows one result, not {len(self.results)}; run it for each of them"
            )

    @property
    def target(self) -> Path:
        """The video, the folder of pictures, or the orthophoto to write."""
        if self.output is not None:
            if self.ortho is not None and self.output.suffix.lower() not in _ORTHO_SUFFIXES:
                return self.output.with_name(f"{self.output.name}{ORTHO_SUFFIX}")
            return self.output
        if self.ortho is not None:
            name = f"{self.results[0].stem}_{self.ortho}{ORTHO_SUFFIX}"
            return OUTPUT_ROOT / "renders" / scene_name(self.scene_path) / name
        distinct_shows = dict.fromkeys(self.show)
        name = "_".join([Path(self.path).stem, *distinct_shows])
        suffix = "" if self.path in VIEWS else VIDEO_SUFFIX
        return OUTPUT_ROOT / "renders" / scene_name(self.scene_path) / f"{name}{suffix}"


def render_results(options: RenderOptions, console: Console | None = None) -> Path:
    """Render results as a video, as pictures or as an orthophoto; return the file or folder."""
    console = console or Console()
    if options.ortho is not None:
        return _render_ortho(options, options.ortho, console)
    target = options.target
    options.compute.report(console.info)
    is_video = target.suffix.lower() == VIDEO_SUFFIX
    _check_target(target, is_video)
    check_writable(target.parent if is_video else target)
    scene = _scene_of(options, console)
    cameras = path_cameras(scene, options)
    models = []
    for path in options.results:
        white = options.white_background
        device = options.compute.device
        models.append(open_model(path, white, device, console.info, scene.offset))
    without_mesh = [model.name for model in models if model.mesh is None]
    if "clay" in options.show and without_mesh:
        raise UserError(
            f"--show clay: {without_mesh[0]} has no mesh; show image, depth or normal of it"
        )
    with console.progress("rendering", 1, len(cameras)) as progress:
        pictures = _pictures(models, options.show, cameras, progress)
        if is_video:
            write_video(target, pictures, options.fps)
        else:
            names = picture_names([camera.name for camera in cameras])
            write_pictures(target, names, pictures)
    console.info(f"{len(cameras)} pictures: {target}")
    return target


def _render_ortho(options: RenderOptions, direction: str, console: Console) -> Path:
    """Write an orthophoto and a height model of a result, and return the orthophoto."""
    target = options.target
    load_tifffile("--ortho")
    for path in (target, height_file(target)):
        if path.is_dir():
            raise UserError(f"{path}: is a folder; choose another --output")
    options.compute.report(console.info)
    check_writable(target.parent)
    scene = _scene_of(options, console)
    place = None
    if options.map_flags.wanted:
        place = place_on_map(scene, options.map_flags, console.info)
    result_path = options.results[0]
    result = read_in_scene(result_path, scene.offset, console.info)
    world = ortho_world(scene, place)
    view = ortho_view(world, direction, options.ortho_pixel, result, scene)
    result = view.shown(result)
    model = model_of(result_path.name, result, False, options.compute.device)
    heights_in = heights_of(view, result, model, options.compute.device)
    write_ortho(target, model, heights_in, view, console)
    return target


def _scene_of(options: RenderOptions, console: Console) -> Scene:
    """Return the capture in the world that the records of the results name."""
    capture = capture_of(options.results, options.scene_path, options.checkpoint_path)
    return scene_of(capture, options.size, console.info)


def _check_target(target: Path, is_video: bool) -> None:
    if is_video:
        if target.is_dir():
            raise UserError(f"{target}: is a folder, not a video; choose another --output")
    elif not target.is_dir():
        if target.exists():
            raise UserError(f"{target}: is a file; name a folder for the pictures, or NAME.mp4")
        if target.suffix:
            raise UserError(f"{target}: neither NAME.mp4 nor a folder; choose another --output")


def path_cameras(scene: Scene, options: RenderOptions) -> list[Camera]:
    """Return the cameras that ``--path`` names.

    Raises:
        UserError: There are none, or too few for a path.
    """
    if options.path.endswith(".json"):
        return [stored.camera for stored in read_cameras_json(Path(options.path))]
    all_cameras = scene.cameras
    all_cameras.sort(key=lambda camera: camera.name)
    views = {"test": scene.test_cameras, "train": scene.train_cameras, "all": all_cameras}
    if options.path in views:
        if not views[options.path]:
            raise UserError(
                f"--path {options.path}: {options.scene_path} has no such views; use --path all"
            )
        return list(views[options.path])
    if options.path == "turntable":
        return turntable(all_cameras, scene.points, options.n_frames)
    waypoints = all_cameras[:: options.every]
    if len(waypoints) < 2:
        n_cameras = len(all_cameras)
        raise UserError(
            f"--every {options.every}: leaves {len(waypoints)} of {n_cameras} photographs, and a "
            f"path passes through 2 or more; use --every {max(1, n_cameras - 1)} or less"
        )
    return between(waypoints, options.n_frames)


def _pictures(
    models: Sequence[ShownModel],
    shows: Sequence[str],
    cameras: Sequence[Camera],
    progress: Progress,
) -> Iterator[np.ndarray]:
    """Yield one picture per camera: for each map, all models side by side."""
    depths = None
    if "depth" in shows:
        probes = about(cameras, _PROBES)
        ranges = [depths_of_views(model, probes) for model in models]
        depths = DepthRange(min(r.near for r in ranges), max(r.far for r in ranges))
    for done, camera in enumerate(cameras, start=1):
        row = []
        for show in shows:
            row += [shown(model, show, camera, depths) for model in models]
        yield np.concatenate(row, axis=1)
        progress.update(done)
