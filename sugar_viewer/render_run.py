# SPDX-License-Identifier: Apache-2.0
"""Renders results from cameras of the capture or along a path, as a video or as pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, replace
from functools import partial
from pathlib import Path

import av
import numpy as np
import torch
from PIL import Image, ImageOps
from scipy.interpolate import CubicSpline
from scipy.spatial.transform import Rotation, RotationSpline
from torch import Tensor

from gaussian_splatting.cloud import GaussianCloud, Gaussians
from gaussian_splatting.compute import Compute, DeviceFlags
from gaussian_splatting.data import cameras as poses
from gaussian_splatting.data.cameras import Camera, looked_at
from gaussian_splatting.data.reference_layout import read_cameras_json
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.engine.reporting import view_findings
from gaussian_splatting.engine.reporting.evaluation import to_uint8
from gaussian_splatting.rasterization import plain_background, render_view
from gaussian_splatting.shared_flags import white_background
from sugar_extractors.export.mesh_reduction import shape_of
from sugar_extractors.export.reading import has_gaussians, read_any_gaussians
from sugar_extractors.mesh_pictures import read_any_mesh, shaded_views
from sugar_extractors.results import scene_of
from sugar_extractors.texture import textured_mesh_io as meshes
from sugar_extractors.texture.textured_mesh_io import TexturedMesh
from sugar_scene.mesh_bound import face_normals
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_scene.triangle_rasterizer import rasterize_triangles
from sugar_trainers.capture import SugarSize
from sugar_trainers.naming import OUTPUT_ROOT, scene_name
from sugar_utils.console import Console, Progress
from sugar_utils.errors import Notify, UserError
from sugar_utils.files import atomic_path, check_writable
from sugar_utils.flags import positive_int
from sugar_utils.settings import flag, made_of

Result = GaussianCloud | TexturedMesh | TriangleMesh  # files that can be shown
SHOWS = ("image", "depth", "normal", "clay", "alpha")
_SEEN = 0.5

VIDEO_SUFFIX = ".mp4"
_QUALITY = "18"  # constant rate factor of H.264: what the eye does not tell from the original
_BITS_PER_PIXEL = 4
_SIDES = (2, 16_384)  # least and most pixels a side that libx264 takes
VIEWS = ("test", "train", "all")
PATHS = ("turntable", "between")
MAX_FPS = 1_000
_flag = partial(flag, group="pictures")
_PROBES = 8  # cameras that decide which depth is white: one for all pictures, or they would flicker


@dataclass(frozen=True)
class ShownModel:
    name: str
    picture: Callable[[Camera], Tensor]  # (H, W, 3) in [0, 1]
    # Depth, infinite where there is nothing, (H, W); normals in camera axes, zero there, (H, W, 3).
    geometry: Callable[[Camera], tuple[Tensor, Tensor]]
    alpha: Callable[[Camera], Tensor]  # how much of what lies behind is hidden, (H, W) in [0, 1]
    mesh: TriangleMesh | None = None  # its triangles, to be shown as clay; None of Gaussians


def open_model(path: Path, white: bool, device: torch.device, notify: Notify) -> ShownModel:
    return model_of(path.name, read_result(path, notify), white, device)


def read_result(path: Path, notify: Notify) -> Result:
    """Read Gaussians as ``read_any_gaussians`` does, a mesh ``.ply``, or a textured ``.obj``."""
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; check the path of the result")
    suffix = path.suffix.lower()
    if suffix == ".obj":
        return meshes.read_textured_mesh(path)
    if has_gaussians(path):
        return read_any_gaussians(path, notify)
    if suffix == ".ply":
        mesh = read_any_mesh(path)
        if not mesh.n_faces:
            raise UserError(f"{path}: has no triangles to show; make the mesh again")
        return mesh
    raise UserError(
        f"{path}: cannot be shown; pass Gaussians (.ply, .spz, .splat, .pt, a folder), a mesh "
        ".ply, or a textured .obj"
    )


def model_of(name: str, result: Result, white: bool, device: torch.device) -> ShownModel:
    """A result as something to look at; arguments as for :func:`open_model`."""
    if isinstance(result, GaussianCloud):
        return _of_gaussians(name, result.to(device).activate(), white)
    if isinstance(result, TexturedMesh):
        mesh = result.to(device)
        background = plain_background(white, device)
        picture = partial(meshes.render_textured, mesh, background=background, supersampling=2)
        surface = (mesh.vertices, mesh.faces)
        shape = shape_of(mesh)
    else:
        picture = partial(_own_colors, result, device)
        shape = result
        vertices = torch.tensor(result.vertices, dtype=torch.float32, device=device)
        surface = vertices, torch.tensor(result.faces, device=device)
    geometry = partial(mesh_geometry, *surface)
    # No light goes through a surface.
    return ShownModel(name, picture, geometry, lambda c: geometry(c)[0].isfinite().float(), shape)


def _of_gaussians(name: str, gaussians: Gaussians, white: bool) -> ShownModel:
    render = partial(render_view, gaussians, white=white)

    def geometry(camera: Camera) -> tuple[Tensor, Tensor]:
        output = render(camera, geometry=True)
        seen = output.alpha >= _SEEN
        depth = torch.where(seen, output.depth / output.alpha.clamp_min(_SEEN), torch.inf)
        return depth, output.normal * seen[..., None]

    plain = partial(render, geometry=False)
    return ShownModel(name, lambda c: plain(c).image, geometry, lambda c: plain(c).alpha)


def _own_colors(mesh: TriangleMesh, device: torch.device, camera: Camera) -> Tensor:
    shown = shaded_views(mesh, [camera], _longer_side(camera), colored=True, device=device)
    return torch.from_numpy(shown[0]).float() / 255


def mesh_geometry(vertices: Tensor, faces: Tensor, camera: Camera) -> tuple[Tensor, Tensor]:
    """Depth, (H, W), and normals in camera axes, (H, W, 3), of the first surface of each pixel.

    Without a surface depth is infinite and the normal 0; normals are turned to the camera.
    """
    hits = rasterize_triangles(vertices, faces, camera)
    rotation = torch.tensor(camera.rotation, dtype=torch.float32, device=vertices.device)
    normals = face_normals(vertices[faces]) @ rotation.T
    seen = torch.zeros(*hits.face.shape, 3, device=vertices.device)
    seen[hits.covered] = normals[hits.face[hits.covered].long()]
    rays = poses.pixel_rays(camera, dtype=seen.dtype, device=seen.device)
    return hits.depth, torch.where((seen * rays).sum(dim=2, keepdim=True) > 0, -seen, seen)


def shown(model: ShownModel, show: str, camera: Camera, far: float) -> np.ndarray:
    """A picture of a model. (H, W, 3) uint8"""
    if show == "image":
        return to_uint8(model.picture(camera)).cpu().numpy()
    if show == "clay":
        return shaded_views(model.mesh, [camera], _longer_side(camera))[0]
    if show == "alpha":
        return view_findings.grey_picture(model.alpha(camera)).cpu().numpy()
    depth, normal = model.geometry(camera)
    if show == "depth":
        return view_findings.depth_picture(depth, far).cpu().numpy()
    return view_findings.normal_picture(normal).cpu().numpy()


def far_depth(model: ShownModel, cameras: Sequence[Camera]) -> float:
    """The depth to draw white in pictures of several cameras; see :func:`farthest`. World units"""
    depths = [model.geometry(camera)[0].flatten() for camera in cameras]
    return float(view_findings.farthest(torch.cat(depths)))


def _longer_side(camera: Camera) -> int:
    return max(camera.width, camera.height)


def write_video(path: Path, pictures: Iterable[np.ndarray], frames_per_second: int) -> None:
    """Write an MP4, complete or not at all: H.264 where this build of PyAV has it.

    Args:
        pictures: (H, W, 3) uint8 each. The first one's size is that of the video, less a row or
            column where a side is odd; others are fitted into it.
    """
    try:
        _encode(path, pictures, frames_per_second)
    except av.FFmpegError as error:
        if isinstance(error, OSError):
            raise
        raise UserError(
            f"{path}: the codec failed ({error}); name a folder as --output for PNG files"
        ) from error


def _encode(path: Path, pictures: Iterable[np.ndarray], frames_per_second: int) -> None:
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    stream = None
    with atomic_path(path) as temporary, av.open(str(temporary), "w", format="mp4") as container:
        for picture in pictures:
            if stream is None:
                height, width = picture.shape[:2]
                if not _SIDES[0] <= min(height, width) <= max(height, width) <= _SIDES[1]:
                    raise UserError(
                        f"{path}: a video has {_SIDES[0]} to {_SIDES[1]:,} pixels a side, not "
                        f"{width:,} x {height:,}; show fewer results and maps side by side, set "
                        "the size by --resolution_factor, or name a folder as --output for PNG "
                        "files"
                    )
                stream = container.add_stream(codec, rate=frames_per_second)
                stream.height = height // 2 * 2
                stream.width = width // 2 * 2
                stream.pix_fmt = "yuv420p"
                if codec == "libx264":
                    stream.options = {"crf": _QUALITY}
                else:
                    size = stream.width * stream.height
                    stream.bit_rate = _BITS_PER_PIXEL * size * frames_per_second
            frame = _fitted(picture, stream.width, stream.height)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        if stream is None:
            raise UserError(f"{path}: no pictures to make a video of")
        container.mux(stream.encode())


def _fitted(picture: np.ndarray, width: int, height: int) -> np.ndarray:
    """A picture cut by at most a pixel a side, or else made to fit and put on black."""
    excess = picture.shape[0] - height, picture.shape[1] - width
    if all(0 <= more <= 1 for more in excess):
        return np.ascontiguousarray(picture[:height, :width])
    return np.asarray(ImageOps.pad(Image.fromarray(picture), (width, height)))


def write_pictures(folder: Path, names: Iterable[str], pictures: Iterable[np.ndarray]) -> None:
    """Write ``NAME.png`` files, each complete or not at all. pictures: (H, W, 3) uint8, as many"""
    for name, picture in zip(names, pictures, strict=True):
        with atomic_path(folder / f"{name}.png") as temporary:
            Image.fromarray(picture).save(temporary, format="PNG")


def _flat(name: str) -> str:
    return name.replace("/", "_").replace("\\", "_")


def picture_names(views: Sequence[str]) -> list[str]:
    """A file name without extension for each view, no two alike on any file system.

    That of the photograph, with its folders: ``a/1.jpg`` makes ``a_1``. Where two views would have
    the same name both keep their extension, and those still alike are numbered in their order.
    """
    flat = [_flat(view) for view in views]
    short = [_flat(Path(view).with_suffix("").as_posix()) for view in views]
    counts = Counter(name.lower() for name in short)
    used_names = {name for name, count in counts.items() if count == 1}
    names = []
    for whole, name in zip(flat, short, strict=True):
        if counts[name.lower()] > 1:
            name = whole
            number = 1
            while name.lower() in used_names:
                number += 1
                name = f"{whole}_{number}"
            used_names.add(name.lower())
        names.append(name)
    return names


@dataclass(frozen=True)
class RenderOptions:
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
        "what to show of each result, several side by side. depth: white is far; "
        "normal: red to the right, green up, blue towards the camera; clay: meshes alone; alpha: "
        "white hides what lies behind",
        parse=str,
        choices=SHOWS,
        nargs="+",
    )
    n_frames: int = _flag(
        120,
        "pictures on the way",
        parse=positive_int,
        no_effect_when="with --path test, train, all and NAME.json",
    )
    every: int = _flag(
        1,
        "pass through every Nth photograph only, which calms paths that were taken in zigzag",
        parse=positive_int,
        no_effect_when="without --path between",
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
        if self.output is not None:
            return self.output
        name = "_".join([Path(self.path).stem, *dict.fromkeys(self.show)])
        suffix = "" if self.path in VIEWS else VIDEO_SUFFIX
        return OUTPUT_ROOT / "renders" / scene_name(self.scene_path) / f"{name}{suffix}"


def turntable(cameras: Sequence[Camera], points: np.ndarray, n: int) -> list[Camera]:
    """A circle around what the cameras look at, upright, at their middle height and distance.

    It begins at the front.
    """
    target = looked_at(cameras)
    centers = np.stack([camera.center for camera in cameras])
    axes = poses.upright_axes(cameras, points)
    up = axes[1]
    offsets = (centers - target) @ axes.T
    height = float(np.median(offsets[:, 1]))
    radius = float(np.median(np.hypot(offsets[:, 0], offsets[:, 2])))
    angles = 2 * np.pi * np.arange(n) / n
    level = np.stack([np.sin(angles), np.zeros(n), np.cos(angles)], axis=1)
    places = target + (radius * level + [0.0, height, 0.0]) @ axes
    return [_placed(cameras[0], k, looking(p, target, up), p) for k, p in enumerate(places)]


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
        camera,
        name=f"{number:05d}",
        rotation=rotation,
        translation=-rotation @ place,
        image_path=None,
        source_path=None,
        mask_path=None,
        mask=None,
    )


def render_results(options: RenderOptions, console: Console | None = None) -> Path:
    console = console or Console()
    target = options.target
    if options.compute.device_reason:
        console.info(options.compute.device_reason)
    is_video = target.suffix.lower() == VIDEO_SUFFIX
    if is_video and target.is_dir():
        raise UserError(f"{target}: is a folder, not a video; choose another --output")
    if not is_video and target.exists() and not target.is_dir():
        raise UserError(f"{target}: is a file; name a folder for the pictures, or NAME.mp4")
    if not is_video and target.suffix and not target.is_dir():
        raise UserError(f"{target}: neither NAME.mp4 nor a folder; choose another --output")
    check_writable(target.parent if is_video else target)
    scene = scene_of(options.scene_path, options.checkpoint_path, options.size, console.info)
    cameras = film_cameras(scene, options)
    models = [
        open_model(path, options.white_background, options.compute.device, console.info)
        for path in options.results
    ]
    bare = [model.name for model in models if model.mesh is None]
    if "clay" in options.show and bare:
        raise UserError(f"--show clay: {bare[0]} has no mesh; show image, depth or normal of it")
    with console.progress("rendering", 1, len(cameras)) as progress:
        pictures = _pictures(models, options.show, cameras, progress)
        if is_video:
            write_video(target, pictures, options.fps)
        else:
            names = picture_names([camera.name for camera in cameras])
            write_pictures(target, names, pictures)
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
    models: Sequence[ShownModel],
    shows: Sequence[str],
    cameras: Sequence[Camera],
    progress: Progress,
) -> Iterator[np.ndarray]:
    """One picture per camera: each model side by side, and then what else is to be shown."""
    probes = cameras[:: max(1, len(cameras) // _PROBES)]
    far = max(far_depth(model, probes) for model in models) if "depth" in shows else 1.0
    for done, camera in enumerate(cameras, start=1):
        row = [shown(model, show, camera, far) for show in shows for model in models]
        yield np.concatenate(row, axis=1)
        progress.update(done)
