# SPDX-License-Identifier: Apache-2.0
"""Reads results and their capture, and serves the page that shows them."""

from __future__ import annotations

import io
import math
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.compute import Compute, DeviceFlags
from gaussian_splatting.data.cameras import Camera, looked_at, upright_axes
from gaussian_splatting.data.ply import holds_gaussians
from gaussian_splatting.data.reference_layout import CHECKPOINT_FOLDER
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.engine.observer import DEFAULT_PORT, LOCALHOST, port_number
from gaussian_splatting.formats.moved import GLB_AXES
from gaussian_splatting.shared_flags import white_background
from sugar_extractors.export.gltf_gaussians import holds_gltf_gaussians
from sugar_extractors.result_folder import MESH, SPLATS, TRANSFORM
from sugar_extractors.results import capture_of, scene_of
from sugar_extractors.texture.placed_export import PlacementOptions, moved_points, scale_of
from sugar_extractors.texture.textured_mesh_io import TexturedMesh
from sugar_trainers.capture import SugarSize
from sugar_trainers.naming import OUTPUT_ROOT
from sugar_utils.console import Console
from sugar_utils.errors import Notify, UserError
from sugar_utils.files import read_json
from sugar_utils.flags import positive_float, positive_int
from sugar_utils.settings import flag, made_of, without_flags
from sugar_viewer import page_server as pages
from sugar_viewer.render_run import Result, looking, model_of, read_result
from sugar_viewer.tool_panels import box_around, inside
from sugar_viewer.view_page import GlbFile, Layer, SceneContext, ViewPage

_flag = partial(flag, group="viewer")

# Rows: to the right, up, and towards who looks.
_AXES_WITHOUT_CAMERAS = np.diag([1.0, -1.0, -1.0])
_UPRIGHT_AXES = np.eye(3)
_VIEW_SIDE = 640, 480  # pixels of the first view; the browser takes its height alone
_VIEW_FOCAL = 520.0
_FILLED = 0.8  # of the first view
_LOWEST_VIEW = math.radians(0)
_HIGHEST_VIEW = math.radians(35)
_USUAL_VIEW = math.radians(15)
_BEHIND = 1.25  # how much farther than the cameras Gaussians are looked at
_STRAYS = 0.005  # of the vertices of a mesh on each side, which the first view may leave out
HANDED_OUT = "Gaussians"
FILES = (".ply", ".pt", ".spz", ".splat", ".obj", ".glb")
_DEPTH = 4
_PASSED_OVER = ("sparse", "images", "masks", "tensorboard", "renders", "exports", "refined_ply")


@dataclass(frozen=True)
class ViewOptions:
    results: tuple[Path, ...] = _flag(
        MISSING,
        "what to show: an output folder, the folder of a run, Gaussians (.ply, .pt, .spz, "
        ".splat), meshes (.ply, .obj, .glb)",
        positional=True,
        parse=Path,
        nargs="+",
    )
    scene_path: Path | None = _flag(
        None,
        "scene folder, for its cameras, photographs and points; unset: the one that the "
        "results' own records name",
        short="-s",
        parse=Path,
    )
    checkpoint_path: Path | None = _flag(
        None,
        "vanilla checkpoint whose cameras.json says where the cameras are, for worlds that "
        "another program moved; unset: those of the records, or of the scene",
        short="-c",
        parse=Path,
    )
    port: int = _flag(DEFAULT_PORT, "port of this machine to serve the page on", parse=port_number)
    host: str = _flag(LOCALHOST, "address to serve it on; 0.0.0.0 lets other machines look")
    no_open: bool = _flag(False, "do not open the page in the browser", action="store_true")
    picture_size: int = _flag(
        1280,
        "longest side of SuGaR's exact pictures, in pixels, while nothing moves",
        parse=positive_int,
    )
    path_file: Path = _flag(
        OUTPUT_ROOT / "camera_path.json",
        "file for the camera path that is saved on the page, for render.py --path",
        parse=Path,
    )
    scale_factor: float | None = _flag(
        None, "how many metres a unit of the capture is, for measuring", parse=positive_float
    )
    known_distance: tuple[str, ...] | None = _flag(
        None,
        "two photographs or two points x,y,z of the capture, and how many metres lie between "
        "the cameras or points, for measuring",
        parse=str,
        nargs=3,
        metavar=("A", "B", "METRES"),
        no_effect_when="with --scale_factor it is an error",
    )
    white_background: bool = white_background()
    compute: Compute = made_of(DeviceFlags, Compute)
    placement: PlacementOptions = without_flags(PlacementOptions)

    def __post_init__(self) -> None:
        scale = PlacementOptions("none", self.scale_factor, self.known_distance)
        object.__setattr__(self, "placement", scale)


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
    matrix = common_placement(paths)
    capture = capture_of(paths, options.scene_path, options.checkpoint_path)
    scene = None
    if capture.scene is None:
        console.info("no capture is known, so there are no cameras; name its folder with -s")
    else:
        if options.scene_path is None:
            console.info(f"the capture, by the records of the runs: {capture.scene}")
        scene = scene_of(capture.scene, capture.checkpoint, SugarSize(), console.info)
        if matrix is not None:
            scene = moved_scene(scene, matrix)
    layers = [_layer(one, options, console, matrix is not None) for one in found]
    around = scene_context(layers, scene, options)
    place = pages.address(options.host, options.port)
    with pages.closing(pages.open_server(options.host, options.port, "SuGaR")) as server:
        axes = _UPRIGHT_AXES if matrix is not None else _AXES_WITHOUT_CAMERAS
        pages.stand_at(server, *first_view(layers, scene, axes))
        page = ViewPage(server, layers, around, console.warn)
        console.info(f"viewer: {place} (Ctrl-C ends it)")
        if not options.no_open:
            webbrowser.open(place)
        while not until():
            page.work()


def common_placement(paths: Sequence[Path]) -> np.ndarray | None:
    """The matrix from the capture to where results stand upright; None where they do not. (4, 4)"""
    matrices = [placement_of(path) for path in paths]
    for path, matrix in zip(paths, matrices, strict=True):
        same = matrix is None if matrices[0] is None else np.array_equal(matrix, matrices[0])
        if not same:
            raise UserError(
                f"{paths[0]} and {path} stand in different places: files that were turned upright "
                "are shown apart from others; name one folder"
            )
    return matrices[0]


def _layer(one: FoundResult, options: ViewOptions, console: Console, upright: bool) -> Layer:
    console.info(f"{one.title}: {one.path}")
    if one.path.suffix.lower() != ".glb" or holds_gltf_gaussians(one.path):
        result = read_result(one.path, console.info)
        return layer_of(one.title, result, options.white_background, options.compute.device)
    content = one.path.read_bytes()
    if not content.startswith(b"glTF"):
        raise UserError(f"{one.path}: is no GLB file; write it again, or pass the .obj")
    turn = np.eye(4) if upright else GLB_AXES
    # The browser alone can draw it, and no box cuts it.
    shape = GlbFile(content, upright)
    points = moved_points(glb_points(content), turn)
    whole = Layer(one.title, shape, None, points, lambda low, high: whole)
    return whole


def glb_points(content: bytes) -> np.ndarray:
    """Corners of the boxes around the meshes of a GLB, in its axes. (P, 3)

    None where the file does not say where its vertices are.
    """
    # It comes with viser, whose absence is told elsewhere.
    import trimesh

    try:
        scene = trimesh.load_scene(io.BytesIO(content), file_type="glb", process=False)
        return np.asarray(scene.to_mesh().vertices, dtype=np.float64).reshape(-1, 3)
    # The browser says what is wrong with the file; without its places it is looked at from afar.
    except Exception:
        return np.zeros((0, 3))


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
        scene=scene,
        extent=extent or float(np.linalg.norm(high - low)),
        box=(low, high),
        metres_per_unit=scale,
        white=options.white_background,
        path_file=options.path_file,
        picture_size=options.picture_size,
    )


def first_view(
    layers: Sequence[Layer], scene: Scene | None, axes: np.ndarray = _AXES_WITHOUT_CAMERAS
) -> tuple[Camera, np.ndarray, float]:
    """First camera of the browser, what is up, (3,), and the distance that it turns around.

    It sees the last result from the front, whole and in the middle.

    Args:
        axes: Directions to the right, up and to the front where no cameras tell them. (3, 3)
    """
    points = layers[-1].points
    cameras = [] if scene is None else scene.calibrated_cameras
    elevation = _USUAL_VIEW
    if cameras:
        axes = upright_axes(cameras, scene.points)
        ahead = np.stack([camera.rotation[2] for camera in cameras])
        mean = float(np.arcsin(np.clip(-ahead @ axes[1], -1, 1)).mean())
        elevation = float(np.clip(mean, _LOWEST_VIEW, _HIGHEST_VIEW))
    backwards = np.cos(elevation) * axes[2] + np.sin(elevation) * axes[1]
    rotation = looking(backwards, np.zeros(3), axes[1])
    if cameras and isinstance(layers[-1].result, GaussianCloud):
        # Gaussians reach far beyond what the photographs are about.
        target = looked_at(cameras)
        centers = np.stack([camera.center for camera in cameras])
        distance = _BEHIND * float(np.median(np.linalg.norm(centers - target, axis=1)))
    else:
        target, distance = _fitting_distance(points, rotation)
    if cameras and _looks_around(cameras, target):
        # From outside of a room one sees the backs of its walls.
        return cameras[0], axes[1], max(distance, 1e-3)
    distance = max(distance, 1e-3)
    place = target + distance * backwards
    width, height = _VIEW_SIDE
    camera = Camera(
        name="first",
        width=width,
        height=height,
        fx=_VIEW_FOCAL,
        fy=_VIEW_FOCAL,
        cx=width / 2,
        cy=height / 2,
        rotation=rotation,
        translation=-rotation @ place,
    )
    return camera, axes[1], distance


def _fitting_distance(points: np.ndarray, rotation: np.ndarray) -> tuple[np.ndarray, float]:
    """The middle of points, (P, 3), and how far from it a camera sees all of them."""
    finite = points[np.isfinite(points).all(axis=1)]
    if not len(finite):
        finite = np.array([-np.ones(3), np.ones(3)])
    turned = finite @ rotation.T
    low, high = np.quantile(turned, (_STRAYS, 1 - _STRAYS), axis=0)
    half = (high - low) / 2
    width, height = _VIEW_SIDE
    across = max(half[0] / width, half[1] / height) * 2 * _VIEW_FOCAL / _FILLED
    return rotation.T @ ((low + high) / 2), float(half[2] + across)


def _looks_around(cameras: Sequence[Camera], target: np.ndarray) -> bool:
    """Whether most cameras turn their backs to a point, as in the middle of a room."""
    towards = [(target - camera.center) @ camera.rotation[2] for camera in cameras]
    return float(np.median(towards)) < 0


def placement_of(path: Path) -> np.ndarray | None:
    """The matrix that turned a file or folder of results upright; None for others. (4, 4)"""
    folder = path if path.is_dir() else path.parent
    notes = [folder / TRANSFORM]
    if path.stem.removesuffix("_gaussians").endswith("_placed"):
        notes.append(folder / f"{path.stem.removesuffix('_gaussians')}.json")
    for note in notes:
        content = read_json(note) if note.is_file() else None
        if isinstance(content, dict) and content.get("up") == "+y":
            try:
                return np.array(content.get("matrix"), dtype=np.float64).reshape(4, 4)
            except (TypeError, ValueError) as error:
                raise UserError(f"{note}: has no matrix of 4 x 4; write it again") from error
    return None


def moved_scene(scene: Scene, matrix: np.ndarray) -> Scene:
    """A capture in the world of results that were placed, by a rotation, a scale and a shift."""
    scale = float(np.cbrt(np.linalg.det(matrix[:3, :3])))
    turn = matrix[:3, :3] / scale

    def moved(cameras: Sequence[Camera]) -> list[Camera]:
        placed = []
        for camera in cameras:
            rotation = camera.rotation @ turn.T
            center = matrix[:3, :3] @ camera.center + matrix[:3, 3]
            pose = {"rotation": rotation, "translation": -rotation @ center}
            placed.append(replace(camera, near=camera.near * scale, **pose))
        return placed

    return replace(
        scene,
        train_cameras=moved(scene.train_cameras),
        test_cameras=moved(scene.test_cameras),
        original_train_cameras=moved(scene.original_train_cameras),
        original_test_cameras=moved(scene.original_test_cameras),
        points=moved_points(scene.points, matrix).astype(np.float32),
        extent=scene.extent * scale,
    )


VANILLA = "vanilla Gaussians"
COARSE = "coarse Gaussians"
COARSE_MESH = "coarse mesh"
REFINED = "refined Gaussians"
TEXTURED = "textured mesh"
# What a folder of results holds at most one of each, in the order in which they are made.
STAGES = (VANILLA, COARSE, COARSE_MESH, REFINED, HANDED_OUT, TEXTURED)


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
        if _stage_of(path) is not None:
            yield path
        elif path.is_dir() and depth > 1 and not (path / TRANSFORM).is_file():
            # Copies that stand upright are elsewhere than what they are copies of.
            yield from _results_below(path, depth - 1)


def _stage_of(path: Path) -> str | None:
    suffix = path.suffix.lower()
    name = path.name
    if path.is_dir():
        if (path / "point_cloud").is_dir():
            return VANILLA
        if not any(file.stem.isdigit() for file in path.glob("*.pt")):
            return None
    elif suffix == ".pt":
        name = path.resolve().parent.name
    elif suffix == ".obj":
        return None if path.stem.endswith("_placed") else TEXTURED
    elif (path.parent / TRANSFORM).is_file():
        return {SPLATS: HANDED_OUT, f"{MESH}.ply": COARSE_MESH}.get(name)
    else:
        is_mesh = suffix == ".ply" and name.startswith("sugarmesh_") and not holds_gaussians(path)
        return COARSE_MESH if is_mesh else None
    if name.startswith("sugarfine_"):
        return REFINED
    if name.startswith("sugarcoarse_"):
        return COARSE
    return VANILLA if name == CHECKPOINT_FOLDER else None
