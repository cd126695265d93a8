# SPDX-License-Identifier: Apache-2.0
"""The demo: a small scene made on the spot as a COLMAP capture, taken all the way, and measured.

It needs no download, so a fresh installation can be tried out and measured at once. The folder::

    images/view_000.png ...     sRGB photographs
    sparse/0/*.bin              COLMAP model: cameras, poses, points with their tracks
    gt_object.ply, gt_mesh.ply  the triangles: the knot; the knot, then the ground disc
    gt_visible.ply              surface samples that three views or more see, the knot's first
    gt.json                     bounding boxes and counts
    demo.json                   the parameters; written last, so its presence means completeness
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from plyfile import PlyData, PlyElement

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.colmap import write_model
from gaussian_splatting.data.images import IMAGE_SUFFIXES
from gaussian_splatting.optim.densification import DensificationConfig
from gaussian_splatting.optim.schedule import LearningRates
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from sugar_pipeline.demo.ray_tracer import DemoGeometry, DemoRenderer, make_geometry
from sugar_pipeline.pipeline_flags import full_parser
from sugar_pipeline.pipeline_run import PipelineResult, run_stages
from sugar_pipeline.plan import PipelinePlan, full_plan
from sugar_utils.errors import UserError
from sugar_utils.files import check_writable, read_json, remove_stale_temporaries, write_json_atomic
from sugar_utils.libraries import load_pycolmap
from sugar_utils.random import derive_seed, generator

_VERSION = 1
_MARKER = "demo.json"
_MODEL_PARTS = ("cameras", "images", "points3D", "rigs", "frames")
_GT_FILES = ("gt_mesh.ply", "gt_object.ply", "gt_visible.ply", "gt.json")

_SAMPLES_PER_SIDE = 3
_MIN_VIEWS = 3
_N_KNOT_SAMPLES, _N_DISC_SAMPLES = 28_000, 12_000
_N_KNOT_POINTS, _N_DISC_POINTS = 2_100, 900
_POINT_NOISE = 0.002

_FOCAL = 1.16
_OFF_CENTER = (0.016, -0.0125)
"""Offset of the principal point from the middle, in image widths and heights."""

_TARGET = (0.0, 0.0, 0.42)
_DISTANCE, _DISTANCE_SPREAD = 2.0, 0.07
_ELEVATIONS = (8.0, 66.0)


@dataclass(frozen=True)
class DemoScene:
    """Where the demo scene lies, and whether it was there already."""

    root: Path
    reused: bool


@dataclass(frozen=True)
class _Samples:
    """Surface samples and the views that see them: (P, 3), (P, 3), (V, P) and (V, P, 2) pixels."""

    points: np.ndarray
    normals: np.ndarray
    visible: np.ndarray
    pixels: np.ndarray
    n_knot: int

    def pick(self, rows: np.ndarray, n_knot: int) -> _Samples:
        return _Samples(
            self.points[rows],
            self.normals[rows],
            self.visible[:, rows],
            self.pixels[:, rows],
            n_knot,
        )


def make_demo_scene(
    root: Path | str,
    *,
    n_views: int = 40,
    width: int = 320,
    height: int = 240,
    seed: int = 0,
    device: torch.device | str = "cpu",
    notify: Callable[[str], None] = print,
) -> DemoScene:
    """Render the demo scene into a folder, unless it is there already.

    On one device the same parameters give the same bytes.
    """
    root = Path(root)
    parameters = {
        "version": _VERSION,
        "n_views": n_views,
        "width": width,
        "height": height,
        "seed": seed,
    }
    if n_views < _MIN_VIEWS or min(width, height) < 16:
        raise UserError(
            f"the demo scene cannot have {n_views} views of {width} x {height} pixels; "
            f"it needs at least {_MIN_VIEWS} views of 16 x 16"
        )
    if _is_complete(root, parameters):
        notify(f"using the demo scene in {root}")
        return DemoScene(root, reused=True)
    notify(f"making the demo scene in {root}: {n_views} views of {width} x {height} pixels")
    _clear(root)
    try:
        _build(root, parameters, torch.device(device))
        files = {name: (root / name).stat().st_size for name in _file_names(n_views)}
    except OSError as error:
        raise UserError(
            f"cannot write the demo scene in {root}: {error.strerror or error}; "
            "free some space or choose another folder"
        ) from error
    write_json_atomic(root / _MARKER, {"parameters": parameters, "files": files})
    return DemoScene(root, reused=False)


def _view_name(view: int) -> str:
    return f"view_{view:03d}.png"


def _file_names(n_views: int) -> list[str]:
    """Every file of a complete scene but the marker, relative to the scene's folder."""
    images = [f"images/{_view_name(view)}" for view in range(n_views)]
    return [*images, *(f"sparse/0/{part}.bin" for part in _MODEL_PARTS), *_GT_FILES]


def _is_complete(root: Path, parameters: dict[str, int]) -> bool:
    """Whether the folder holds the scene of these parameters, and every file has its length."""
    try:
        marker = read_json(root / _MARKER)
        if marker["parameters"] != parameters:
            return False
        return all(
            (root / name).stat().st_size == marker["files"][name]
            for name in _file_names(parameters["n_views"])
        )
    except (UserError, OSError, KeyError, TypeError):
        return False


def _clear(root: Path) -> None:
    """Remove an older or half-written demo scene, and nothing that is not one."""
    images = root / "images"
    ours = sorted(images.glob("view_*.png"))
    model = [root / "sparse" / "0" / f"{part}.bin" for part in _MODEL_PARTS]
    foreign = [path for path in images.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES]
    foreign = sorted(set(foreign) - set(ours))
    if not ours and not (root / _MARKER).is_file():
        foreign += [path for path in model if path.is_file()]
    if foreign:
        raise UserError(
            f"{root} holds another capture ({foreign[0].name}); choose a new folder for the demo"
        )
    check_writable(root)
    # Readers cache the points as a PLY file beside the model. The pictures, by which the folder
    # is known as ours, go last.
    cache = root / "sparse" / "0" / "points3D.ply"
    for path in [root / _MARKER, *model, cache, *(root / name for name in _GT_FILES), *ours]:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"cannot remove {path}: {error.strerror}; remove {root}") from error
    remove_stale_temporaries(root)
    for folder in (images, root / "sparse" / "0"):
        check_writable(folder)


def _build(root: Path, parameters: dict[str, int], device: torch.device) -> None:
    seed = parameters["seed"]
    geometry = make_geometry()
    cameras = _cameras(parameters)
    eyes = np.stack([camera.center for camera in cameras])
    first = cameras[0]
    paint_seed = derive_seed(seed, "demo", "paint") % 2**30
    detail = min(4.0, max(first.width, first.height) / 320)
    renderer = DemoRenderer(geometry, paint_seed, detail, device)
    pictures = renderer.pictures(
        eyes,
        np.stack([camera.rotation for camera in cameras]),
        (first.fx, first.cx, first.cy),
        first.width,
        first.height,
        _SAMPLES_PER_SIDE,
    )
    _write_pictures(root / "images", pictures)
    samples = _visible_samples(geometry, renderer, cameras, eyes, seed)
    points = _picked_points(samples, seed)
    _write_model(root / "sparse" / "0", cameras, points, pictures, seed)
    _write_ground_truth(root, geometry, samples, parameters, len(points.points))


def _cameras(parameters: dict[str, int]) -> list[Camera]:
    n_views, width, height = (parameters[key] for key in ("n_views", "width", "height"))
    draws = torch.rand(
        n_views + 1,
        generator=generator(parameters["seed"], "demo", "cameras"),
        dtype=torch.float64,
        device="cpu",
    ).numpy()
    low, high = np.sin(np.radians(_ELEVATIONS))
    focal = _FOCAL * min(width, height * 4 / 3)
    cameras = []
    for view in range(n_views):
        rise = low + (high - low) * (view + 0.5) / n_views
        turn = math.pi * (3 - math.sqrt(5)) * view + 2 * math.pi * draws[-1]
        flat = math.sqrt(1 - rise**2)
        away = np.array([flat * math.cos(turn), flat * math.sin(turn), rise])
        distance = _DISTANCE + _DISTANCE_SPREAD * (2 * draws[view] - 1)
        right = np.array([-math.sin(turn), math.cos(turn), 0.0])
        rotation = np.stack([right, np.cross(-away, right), -away])
        cameras.append(
            Camera(
                name=_view_name(view),
                width=width,
                height=height,
                fx=focal,
                fy=focal,
                cx=width * (0.5 + _OFF_CENTER[0]),
                cy=height * (0.5 + _OFF_CENTER[1]),
                rotation=rotation,
                translation=-rotation @ (np.array(_TARGET) + distance * away),
            )
        )
    return cameras


def _write_pictures(folder: Path, pictures: np.ndarray) -> None:
    def write(view: int) -> None:
        Image.fromarray(pictures[view]).save(folder / _view_name(view), compress_level=4)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(write, range(len(pictures))))


def _visible_samples(
    geometry: DemoGeometry,
    renderer: DemoRenderer,
    cameras: list[Camera],
    eyes: np.ndarray,
    seed: int,
) -> _Samples:
    up = np.tile([0.0, 0.0, 1.0], (len(geometry.disc_points), 1))
    parts = [
        _spread(geometry.points, geometry.normals, geometry.faces, _N_KNOT_SAMPLES, seed, "knot"),
        _spread(geometry.disc_points, up, geometry.disc_faces, _N_DISC_SAMPLES, seed, "disc"),
    ]
    points, normals = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    visible = renderer.visible(points, normals, eyes)
    pixels = np.empty((*visible.shape, 2))
    for view, camera in enumerate(cameras):
        x, y, z = camera.rotation @ points.T + camera.translation[:, None]
        pixels[view, :, 0] = camera.fx * x / z + camera.cx
        pixels[view, :, 1] = camera.fy * y / z + camera.cy
        edge = np.array([camera.width, camera.height]) - 1
        visible[view] &= (z > 0) & ((pixels[view] > 1) & (pixels[view] < edge)).all(axis=1)
    rows = np.flatnonzero(visible.sum(axis=0) >= _MIN_VIEWS)
    everything = _Samples(points, normals, visible, pixels, _N_KNOT_SAMPLES)
    return everything.pick(rows, int((rows < _N_KNOT_SAMPLES).sum()))


def _spread(
    points: np.ndarray, normals: np.ndarray, faces: np.ndarray, count: int, seed: int, label: str
) -> tuple[np.ndarray, np.ndarray]:
    """Random points of a mesh, uniform in area, with interpolated unit normals. (count, 3) each"""
    a, b, c = (points[faces[:, k]] for k in range(3))
    area = np.cumsum(np.linalg.norm(np.cross(b - a, c - a), axis=1))
    draws = torch.rand(
        3, count, generator=generator(seed, "demo", label), dtype=torch.float64, device="cpu"
    ).numpy()
    chosen = np.minimum(np.searchsorted(area, draws[0] * area[-1], "right"), len(faces) - 1)
    root = np.sqrt(draws[1])
    weights = np.stack([1 - root, root * (1 - draws[2]), root * draws[2]], axis=1)
    sampled = np.einsum("nk,nkd->nd", weights, points[faces[chosen]])
    normal = np.einsum("nk,nkd->nd", weights, normals[faces[chosen]])
    return sampled, normal / np.linalg.norm(normal, axis=1, keepdims=True)


def _picked_points(samples: _Samples, seed: int) -> _Samples:
    """The samples that become points of the COLMAP model, the knot's first."""
    n_disc = len(samples.points) - samples.n_knot
    random = generator(seed, "demo", "points")
    knot = torch.randperm(samples.n_knot, generator=random, device="cpu").numpy()[:_N_KNOT_POINTS]
    disc = torch.randperm(n_disc, generator=random, device="cpu").numpy()[:_N_DISC_POINTS]
    return samples.pick(np.concatenate([knot, disc + samples.n_knot]), len(knot))


def _write_model(
    folder: Path, cameras: list[Camera], points: _Samples, pictures: np.ndarray, seed: int
) -> None:
    """Write the COLMAP model: exact poses and observations, points with a little noise."""
    pycolmap = load_pycolmap()

    model = pycolmap.Reconstruction()
    first = cameras[0]
    lens = pycolmap.Camera(
        model="PINHOLE",
        width=first.width,
        height=first.height,
        params=[first.fx, first.fy, first.cx, first.cy],
    )
    lens.camera_id = 1
    model.add_camera_with_trivial_rig(lens)
    rank = np.cumsum(points.visible, axis=1) - 1
    for view, camera in enumerate(cameras):
        keypoints = points.pixels[view, points.visible[view]]
        image = pycolmap.Image(
            name=camera.name, keypoints=keypoints, camera_id=1, image_id=view + 1
        )
        pose = pycolmap.Rigid3d(pycolmap.Rotation3d(camera.rotation), camera.translation)
        model.add_image_with_trivial_frame(image, pose)
    noise = torch.randn(
        points.points.shape,
        generator=generator(seed, "demo", "noise"),
        dtype=torch.float64,
        device="cpu",
    ).numpy()
    positions = points.points + _POINT_NOISE * noise
    colors = _observed_colors(points, pictures)
    for row, (position, color) in enumerate(zip(positions, colors, strict=True)):
        track = pycolmap.Track()
        for view in np.flatnonzero(points.visible[:, row]):
            track.add_element(int(view) + 1, int(rank[view, row]))
        model.add_point3D(position, track, color)
    model.update_point_3d_errors()
    write_model(model, folder)


def _observed_colors(points: _Samples, pictures: np.ndarray) -> np.ndarray:
    total = np.zeros((len(points.points), 3))
    for view, picture in enumerate(pictures):
        seen = points.visible[view]
        x, y = (points.pixels[view, seen] - 0.5).T
        i, j = np.floor(y).astype(int), np.floor(x).astype(int)
        down, right = (y - i)[:, None], (x - j)[:, None]
        upper = picture[i, j] * (1 - right) + picture[i, j + 1] * right
        lower = picture[i + 1, j] * (1 - right) + picture[i + 1, j + 1] * right
        total[seen] += upper * (1 - down) + lower * down
    return np.round(total / points.visible.sum(axis=0)[:, None]).astype(np.uint8)


def _write_ground_truth(
    root: Path, geometry: DemoGeometry, samples: _Samples, parameters: dict[str, int], n_points: int
) -> None:
    knot, disc = geometry.points, geometry.disc_points
    faces = np.concatenate([geometry.faces, geometry.disc_faces + len(knot)])
    up = np.tile([0.0, 0.0, 1.0], (len(disc), 1))
    everything = np.concatenate([knot, disc]), np.concatenate([geometry.normals, up])
    _write_ply(root / "gt_mesh.ply", *everything, faces)
    _write_ply(root / "gt_object.ply", knot, geometry.normals, geometry.faces)
    _write_ply(root / "gt_visible.ply", samples.points, samples.normals)
    facts: dict[str, Any] = {
        "up": "+z",
        "unit": "longest side of the object",
        "object_size": 1.0,
        "object_bbox": [knot.min(axis=0).tolist(), knot.max(axis=0).tolist()],
        "ground_bbox": [disc.min(axis=0).tolist(), disc.max(axis=0).tolist()],
        "object_vertices": len(knot),
        "object_faces": len(geometry.faces),
        "ground_vertices": len(disc),
        "ground_faces": len(geometry.disc_faces),
        "gt_visible_samples": len(samples.points),
        "gt_visible_object_samples": samples.n_knot,
        "points3D": n_points,
        "point_noise": _POINT_NOISE,
        "parameters": parameters,
    }
    write_json_atomic(root / "gt.json", facts)


def _write_ply(
    path: Path, points: np.ndarray, normals: np.ndarray, faces: np.ndarray | None = None
) -> None:
    """Write vertices with normals, and triangles if there are any, as a binary PLY."""
    names = ("x", "y", "z", "nx", "ny", "nz")
    table = np.ascontiguousarray(np.concatenate([points, normals], axis=1), dtype="<f4")
    vertices = table.view([(name, "<f4") for name in names]).reshape(-1)
    elements = [PlyElement.describe(vertices, "vertex")]
    if faces is not None:
        record = np.ascontiguousarray(faces, dtype="<i4").view([("vertex_indices", "<i4", (3,))])
        elements.append(PlyElement.describe(record.reshape(-1), "face"))
    PlyData(elements, text=False, byte_order="<").write(str(path))


VANILLA_ITERATIONS = 1_500
FLAGS = "-r dn_consistency --schedule_scale 0.08 -v 20000 -f 7500"
"""Settings of the stages: short schedules, small meshes."""


def run_demo(args: argparse.Namespace) -> PipelineResult:
    """Make the scene and run every stage on it; its true geometry is known, so it is measured."""
    # A GPU draws the same scene with other roundings, so the scene comes from the CPU everywhere.
    root = args.output_dir / "demo_scene"
    plan = demo_plan(args, root)
    group = plan.coarse.compute.group
    with group.single_report():
        if group.is_first:
            make_demo_scene(root, seed=args.random_seed, notify=print)
        group.barrier()
    return run_stages(plan)


def demo_plan(args: argparse.Namespace, scene: Path) -> PipelinePlan:
    """The plan of ``train_full_pipeline.py`` with a vanilla stage that suits the small scene."""
    own = full_parser(None).parse_args(FLAGS.split())
    own.scene_path = scene
    for name in (
        "output_dir", "force", "stop_after", "resume", "overwrite", "keep_checkpoints",
        "random_seed", "device", "gpu", "rasterizer", "views_per_step",
    ):  # fmt: skip
        setattr(own, name, getattr(args, name))
    own.vanilla_iterations = round(VANILLA_ITERATIONS / own.schedule_scale)
    plan = full_plan(own)
    config = VanillaConfig(
        preset=plan.vanilla.config.preset,
        iterations=VANILLA_ITERATIONS,
        rates=LearningRates(position_lr_max_steps=VANILLA_ITERATIONS),
        sh_interval=VANILLA_ITERATIONS // 2,
        densification=DensificationConfig(
            densify_from_iter=100, densify_until_iter=1_000, densification_interval=100
        ),
        optimizer=plan.vanilla.config.optimizer,
        random_seed=args.random_seed,
        robustness=plan.vanilla.config.robustness,
    )
    return replace(plan, vanilla=replace(plan.vanilla, config=config))
