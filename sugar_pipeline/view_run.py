# SPDX-License-Identifier: Apache-2.0
"""Reads results and their capture, and serves the page that shows them."""

from __future__ import annotations

import webbrowser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.compute import Compute, DeviceFlags
from gaussian_splatting.data.cameras import Camera, looked_at, up_direction
from gaussian_splatting.data.ply import holds_gaussians
from gaussian_splatting.data.reference_layout import CHECKPOINT_FOLDER
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.shared_flags import white_background
from gaussian_splatting.viewing import page_server as pages
from sugar_extractors.export.gltf_gaussians import holds_gltf_gaussians
from sugar_extractors.result_folder import MESH, SPLATS, TRANSFORM, is_upright
from sugar_extractors.results import capture_of, scene_of
from sugar_extractors.texture.placed_export import PlacementOptions, scale_of
from sugar_extractors.texture.textured_mesh_io import TexturedMesh
from sugar_pipeline.render_run import Result, looking, model_of, read_result
from sugar_pipeline.tool_panels import box_around, inside
from sugar_pipeline.view_page import Layer, SceneContext, ViewPage
from sugar_trainers.capture import SugarSize
from sugar_trainers.naming import OUTPUT_ROOT
from sugar_utils.console import Console
from sugar_utils.errors import Notify, UserError
from sugar_utils.flags import positive_float, positive_int
from sugar_utils.settings import flag, made_of, without_flags

_flag = partial(flag, group="viewer")


@dataclass(frozen=True)
class ViewOptions:
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
    port: int = _flag(
        pages.DEFAULT_PORT, "port of this machine to serve the page on", parse=pages.port_number
    )
    host: str = _flag(pages.LOCALHOST, "address to serve it on; 0.0.0.0 lets other machines look")
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
    compute: Compute = made_of(DeviceFlags, Compute)
    placement: PlacementOptions = without_flags(PlacementOptions)

    def __post_init__(self) -> None:
        scale = PlacementOptions("none", self.scale_factor, self.known_distance)
        object.__setattr__(self, "placement", scale)


_UP_WITHOUT_CAMERAS = np.array([0.0, -1.0, 0.0])


def view(
    options: ViewOptions, console: Console | None = None, until: Callable[[], bool] = lambda: False
) -> None:
    console = console or Console()
    pages.load_viser()
    pages.check_free(options.host, options.port, "--port")
    if options.compute.device_reason:
        console.info(options.compute.device_reason)
    found = find_results(options.results, console.info)
    paths = [one.path for one in found]
    capture, scene = capture_of(paths, options.scene_path, options.checkpoint_path), None
    upright = all(is_upright(path.parent) for path in paths)
    if upright:
        console.info(
            "these copies stand upright, not where the cameras are; for cameras pass the folders "
            "of the run, such as output/refined"
        )
    elif capture.scene is None:
        console.info("no capture is known, so there are no cameras; name its folder with -s")
    else:
        if options.scene_path is None:
            console.info(f"the capture, by the records of the runs: {capture.scene}")
        scene = scene_of(capture.scene, capture.checkpoint, SugarSize(), console.info)
    layers = [_layer(one, options, console) for one in found]
    around = scene_context(layers, scene, options)
    place = pages.address(options.host, options.port)
    with pages.closing(pages.open_server(options.host, options.port, "SuGaR")) as server:
        pages.stand_at(server, *first_view(layers, scene, upright))
        page = ViewPage(server, layers, around, console.warn)
        console.info(f"viewer: {place} (Ctrl-C ends it)")
        if not options.no_open:
            webbrowser.open(place)
        while not until():
            page.work()


def _layer(one: FoundResult, options: ViewOptions, console: Console) -> Layer:
    console.info(f"{one.title}: {one.path}")
    if one.path.suffix.lower() != ".glb" or holds_gltf_gaussians(one.path):
        result = read_result(one.path, console.info)
        return layer_of(one.title, result, options.white_background, options.compute.device)
    content = one.path.read_bytes()
    if not content.startswith(b"glTF"):
        raise UserError(f"{one.path}: is no GLB file; write it again, or pass the .obj")
    # The browser alone can draw it, and no box cuts it.
    whole = Layer(one.title, content, None, np.zeros((0, 3)), lambda low, high: whole)
    return whole


def layer_of(title: str, result: Result, white: bool, device: torch.device) -> Layer:
    def cut(one: np.ndarray, other: np.ndarray) -> Layer | None:
        inside_of = cut_result(result, one, other)
        return None if inside_of is None else layer_of(title, inside_of, white, device)

    return Layer(title, result, model_of(title, result, white, device), places_of(result), cut)


def places_of(result: Result) -> np.ndarray:
    """Where a result is: centres of its Gaussians, or vertices. (P, 3) float64"""
    if isinstance(result, GaussianCloud):
        return result.means.double().cpu().numpy()
    if isinstance(result, TexturedMesh):
        return result.vertices.double().cpu().numpy()
    return result.vertices


def cut_result(result: Result, one: np.ndarray, other: np.ndarray) -> Result | None:
    """What of a result lies in a box between two corners: centres of Gaussians, and whole faces."""
    keep = inside(places_of(result), one, other)
    if isinstance(result, GaussianCloud):
        return result.select(torch.from_numpy(keep)) if keep.any() else None
    rows = keep[np.asarray(result.faces)].all(axis=1)
    parts = {"faces": result.faces[rows]}
    if isinstance(result, TexturedMesh):
        parts["uvs"] = result.uvs[rows]
    return replace(result, **parts) if rows.any() else None


def scene_context(
    layers: Sequence[Layer], scene: Scene | None, options: ViewOptions
) -> SceneContext:
    cameras = [] if scene is None else [*scene.train_cameras, *scene.test_cameras]
    low, high = box_around(layers[-1].points)
    if not cameras and options.placement.needs_cameras:
        raise UserError("photographs of --known_distance need a capture; name its folder with -s")
    extent = scene.extent if scene is not None and scene.extent > 0 else None
    scale = scale_of(cameras, options.placement) if options.placement.is_scaled else None
    return SceneContext(
        scene=scene, extent=extent or float(np.linalg.norm(high - low)), box=(low, high),
        metres_per_unit=scale, white=options.white_background, path_file=options.path_file,
        picture_size=options.picture_size,
    )  # fmt: skip


def first_view(
    layers: Sequence[Layer], scene: Scene | None, upright: bool = False
) -> tuple[Camera, np.ndarray, float]:
    """First camera of the browser, what is up, (3,), and the distance that it turns around.

    Args:
        upright: Whether y points up and the front is towards +z; else y points down.
    """
    if scene is not None and scene.train_cameras:
        cameras = scene.train_cameras
        up = up_direction(np.stack([camera.rotation for camera in cameras]), scene.points)
        first = cameras[0]
        away = float((looked_at(cameras) - first.center) @ first.rotation[2])
        return first, up, away if away > 0 else max(scene.extent, 1e-3)
    low, high = box_around(layers[-1].points)
    distance = 1.5 * max(float(np.linalg.norm(high - low)), 1e-3)
    target = (low + high) / 2
    up = -_UP_WITHOUT_CAMERAS if upright else _UP_WITHOUT_CAMERAS
    ahead = np.array([0.0, 0.0, 1.0 if upright else -1.0])
    place = target + distance * (0.3 * up + ahead) / np.hypot(0.3, 1.0)
    rotation = looking(place, target, up)
    camera = Camera("first", 640, 480, 600, 600, 320, 240, rotation, -rotation @ place)
    return camera, up, distance


VANILLA, COARSE, COARSE_MESH = "vanilla Gaussians", "coarse Gaussians", "coarse mesh"
REFINED, TEXTURED = "refined Gaussians", "textured mesh"
GAUSSIANS = "Gaussians"  # of a folder of results, whichever stage made them
# What a folder of results holds at most one of each, in the order in which they are made.
STAGES = (VANILLA, COARSE, COARSE_MESH, REFINED, TEXTURED)
FILES = (".ply", ".pt", ".spz", ".splat", ".obj", ".glb")
_DEPTH = 4
_PASSED_OVER = ("sparse", "images", "masks", "tensorboard", "renders", "exports", "refined_ply")


@dataclass(frozen=True)
class FoundResult:
    title: str
    path: Path


def find_results(paths: Sequence[Path], notify: Notify) -> list[FoundResult]:
    """What is to be shown of files and folders; of several in a folder the newest of each stage."""
    found: list[FoundResult] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: no such file or folder; check the path of the result")
        if path.is_file():
            if path.suffix.lower() not in FILES:
                raise UserError(f"{path}: cannot be shown; pass one of {', '.join(FILES)}")
            found.append(FoundResult(_stage_of(path) or path.name, path))
        else:
            found += _newest(path, notify)
    taken: dict[str, int] = {}
    for place, result in enumerate(found):
        taken[result.title] = number = taken.get(result.title, 0) + 1
        if number > 1:
            found[place] = FoundResult(f"{result.title} ({number})", result.path)
    return found


def _newest(folder: Path, notify: Notify) -> list[FoundResult]:
    if (folder / TRANSFORM).is_file():
        names = {SPLATS: GAUSSIANS, f"{MESH}.ply": COARSE_MESH, f"{MESH}.obj": TEXTURED}
        files = {folder / name: title for name, title in names.items()}
        return [FoundResult(title, path) for path, title in files.items() if path.is_file()]
    own = _stage_of(folder)
    if own is not None:
        return [FoundResult(own, folder)]
    of_stage: dict[str, list[Path]] = {stage: [] for stage in STAGES}
    for path in _results_below(folder, _DEPTH):
        of_stage.setdefault(_stage_of(path) or path.name, []).append(path)
    for stage, paths in of_stage.items():
        paths.sort(key=lambda path: path.stat().st_mtime)
        for other in paths[:-1]:
            notify(f"not shown, an older one: {other} ({stage})")
    newest = [FoundResult(stage, paths[-1]) for stage, paths in of_stage.items() if paths]
    if not newest:
        raise UserError(f"{folder}: holds no result of any stage; name an output folder or a file")
    return newest


def _results_below(folder: Path, depth: int) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in _PASSED_OVER:
            continue
        if (path / TRANSFORM).is_file():
            # Upright copies of what is found elsewhere.
            continue
        if _stage_of(path) is not None:
            yield path
        elif path.is_dir() and depth > 1:
            yield from _results_below(path, depth - 1)


def _stage_of(path: Path) -> str | None:
    suffix, name = path.suffix.lower(), path.name
    if path.is_dir():
        if (path / "point_cloud").is_dir():
            return VANILLA
        if not any(file.stem.isdigit() for file in path.glob("*.pt")):
            return None
    elif suffix == ".pt":
        name = path.resolve().parent.name
    elif suffix == ".obj":
        return None if path.stem.endswith("_placed") else TEXTURED
    else:
        is_mesh = suffix == ".ply" and name.startswith("sugarmesh_") and not holds_gaussians(path)
        return COARSE_MESH if is_mesh else None
    if name.startswith("sugarfine_"):
        return REFINED
    if name.startswith("sugarcoarse_"):
        return COARSE
    return VANILLA if name == CHECKPOINT_FOLDER else None
