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
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from gaussian_splatting.components.densification import DensificationConfig
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.colmap import PARTS, write_model
from gaussian_splatting.data.names import IMAGE_SUFFIXES
from gaussian_splatting.optim.schedule import LearningRates
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from sugar_extractors.mesh_quality import sample_surface
from sugar_pipeline.demo_surface import make_disc, make_knot, visible
from sugar_pipeline.demo_texture import picture, textured_surface
from sugar_pipeline.pipeline_flags import DEMO_FLAGS, full_parser
from sugar_pipeline.pipeline_run import PipelineResult, run_stages
from sugar_pipeline.plan import PipelinePlan, full_plan
from sugar_scene import triangle_mesh as meshes
from sugar_utils.console import Console
from sugar_utils.errors import Notify, UserError, explained
from sugar_utils.files import check_writable, read_json, remove_stale_temporaries, write_json_atomic
from sugar_utils.libraries import load_pycolmap
from sugar_utils.random import derive_seed, generator

_VERSION = 2
_MARKER = "demo.json"
_GT_FILES = ("gt_mesh.ply", "gt_object.ply", "gt_visible.ply", "gt.json")
_MIN_VIEWS = 3
_N_KNOT_SAMPLES = 28_000
_N_DISC_SAMPLES = 12_000
_N_KNOT_POINTS = 2_100
_N_DISC_POINTS = 900
_POINT_NOISE = 0.002
_FOCAL = 1.16
_OFF_CENTER = (0.016, -0.0125)  # of the principal point, in image widths and heights
_TARGET = (0.0, 0.0, 0.42)
_DISTANCE = 2.0
_DISTANCE_SPREAD = 0.07
_ELEVATIONS = (8.0, 66.0)

VANILLA_ITERATIONS = 850
# Settings of the stages: short schedules, of which none is cut further, and small meshes.
FLAGS = (
    "-r multiview --short_multiview False --schedule_scale 0.025 -v 46000 -g 1 -f 14000 "
    "--test_iterations 20000 --checkpoint_interval 4000 --texture_size 1280"
)


class _Samples(NamedTuple):
    """Surface samples, those of the knot first, and the views that see them."""

    points: np.ndarray  # (P, 3)
    normals: np.ndarray  # (P, 3)
    visible: np.ndarray  # (V, P) bool
    pixels: np.ndarray  # (V, P, 2)

    @property
    def n_knot(self) -> int:
        return int((self.points[:, 2] != 0).sum())

    def pick(self, rows: np.ndarray) -> _Samples:
        points, normals, visible, pixels = self
        return _Samples(points[rows], normals[rows], visible[:, rows], pixels[:, rows])


def make_demo_scene(
    root: Path | str,
    *,
    n_views: int = 40,
    width: int = 320,
    height: int = 240,
    seed: int = 0,
    notify: Notify = print,
) -> bool:
    """Render the demo scene, always the same bytes; False where it was there already."""
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
    images = [f"images/view_{view:03d}.png" for view in range(n_views)]
    names = [*images, *(f"sparse/0/{part}.bin" for part in PARTS), *_GT_FILES]
    if _is_complete(root, parameters, names):
        notify(f"using the demo scene in {root}")
        return False
    notify(f"making the demo scene in {root}: {n_views} views of {width} x {height} pixels")
    _clear(root)
    advice = "free some space or choose another folder"
    with explained(f"cannot write the demo scene in {root}:", advice):
        _build(root, parameters)
        files = {name: (root / name).stat().st_size for name in names}
    write_json_atomic(root / _MARKER, {"parameters": parameters, "files": files})
    return True


def _is_complete(root: Path, parameters: dict[str, int], names: list[str]) -> bool:
    """Whether the folder holds the scene of these parameters, and every file has its length."""
    try:
        files = {name: (root / name).stat().st_size for name in names}
        return read_json(root / _MARKER) == {"parameters": parameters, "files": files}
    except (UserError, OSError):
        return False


def _clear(root: Path) -> None:
    """Remove an older or half-written demo scene, and nothing that is not one."""
    images = root / "images"
    sparse = root / "sparse" / "0"
    ours = sorted(images.glob("view_*.png"))
    model = [sparse / f"{part}.bin" for part in PARTS]
    foreign = {path for path in images.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES}
    foreign -= set(ours)
    if not ours and not (root / _MARKER).is_file():
        foreign |= {path for path in model if path.is_file()}
    if foreign:
        raise UserError(
            f"{root} holds another capture ({min(foreign).name}); choose a new folder for the demo"
        )
    check_writable(root)
    # Readers cache the points as a PLY file. The pictures, by which it is known as ours, go last.
    old = [root / name for name in (_MARKER, *_GT_FILES)]
    for path in [*old, *model, sparse / "points3D.ply", *ours]:
        with explained(f"cannot remove {path}:", f"remove {root}"):
            path.unlink(missing_ok=True)
    remove_stale_temporaries(root)
    for folder in (images, sparse):
        check_writable(folder)


def _build(root: Path, parameters: dict[str, int]) -> None:
    seed = parameters["seed"]
    knot = make_knot()
    disc = make_disc()
    cameras = _cameras(parameters)
    detail = min(4.0, max(parameters["width"], parameters["height"]) / 320)
    mesh = textured_surface(knot, disc, seed, detail)
    pictures = [picture(mesh, camera) for camera in cameras]
    for camera, pixels in zip(cameras, pictures, strict=True):
        Image.fromarray(pixels).save(root / "images" / camera.name, compress_level=4)
    samples = _visible_samples(knot, disc, cameras, seed)
    n_points = _write_model(root / "sparse" / "0", cameras, samples, pictures, seed)

    both = meshes.with_vertex_normals(meshes.merge_meshes([knot, disc]))
    meshes.write_mesh_ply(root / "gt_mesh.ply", both)
    meshes.write_mesh_ply(root / "gt_object.ply", knot)
    none = np.zeros((0, 3), np.int64)
    grey = np.full(samples.points.shape, 128, np.uint8)
    points = meshes.TriangleMesh(samples.points, none, grey, samples.normals)
    meshes.write_mesh_ply(root / "gt_visible.ply", points)
    boxes = [
        [m.vertices.min(axis=0).tolist(), m.vertices.max(axis=0).tolist()] for m in (knot, disc)
    ]
    facts = {
        "up": "+z",
        "unit": "longest side of the object",
        "object_size": 1.0,
        "object_bbox": boxes[0],
        "ground_bbox": boxes[1],
        "object_vertices": knot.n_vertices,
        "object_faces": knot.n_faces,
        "ground_vertices": disc.n_vertices,
        "ground_faces": disc.n_faces,
        "gt_visible_samples": len(samples.points),
        "gt_visible_object_samples": samples.n_knot,
        "points3D": n_points,
        "point_noise": _POINT_NOISE,
        "parameters": parameters,
    }
    write_json_atomic(root / "gt.json", facts)


def _cameras(parameters: dict[str, int]) -> list[Camera]:
    n_views, width, height = (parameters[key] for key in ("n_views", "width", "height"))
    source = generator(parameters["seed"], "demo", "cameras")
    draws = torch.rand(n_views + 1, generator=source, dtype=torch.float64, device="cpu").numpy()
    low, high = np.sin(np.radians(_ELEVATIONS))
    focal = _FOCAL * min(width, height * 4 / 3)
    cx = width * (0.5 + _OFF_CENTER[0])
    cy = height * (0.5 + _OFF_CENTER[1])
    cameras = []
    for view in range(n_views):
        rise = low + (high - low) * (view + 0.5) / n_views
        turn = math.pi * (3 - math.sqrt(5)) * view + 2 * math.pi * draws[-1]
        flat = math.sqrt(1 - rise**2)
        away = np.array([flat * math.cos(turn), flat * math.sin(turn), rise])
        distance = _DISTANCE + _DISTANCE_SPREAD * (2 * draws[view] - 1)
        right = np.array([-math.sin(turn), math.cos(turn), 0.0])
        rotation = np.stack([right, np.cross(-away, right), -away])
        translation = -rotation @ (np.array(_TARGET) + distance * away)
        lens = width, height, focal, focal, cx, cy
        cameras.append(Camera(f"view_{view:03d}.png", *lens, rotation, translation))
    return cameras


def _visible_samples(
    knot: meshes.TriangleMesh, disc: meshes.TriangleMesh, cameras: list[Camera], seed: int
) -> _Samples:
    parts = [
        sample_surface(mesh.vertices, mesh.faces, count, derive_seed(seed, "demo", name))
        for mesh, count, name in ((knot, _N_KNOT_SAMPLES, "knot"), (disc, _N_DISC_SAMPLES, "disc"))
    ]
    points, normals = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("points", "normals")
    )
    seen = visible(knot, points, normals, np.stack([camera.center for camera in cameras]))
    pixels = np.empty((*seen.shape, 2))
    for view, camera in enumerate(cameras):
        x, y, z = camera.rotation @ points.T + camera.translation[:, None]
        pixels[view, :, 0] = camera.fx * x / z + camera.cx
        pixels[view, :, 1] = camera.fy * y / z + camera.cy
        edge = np.array([camera.width, camera.height]) - 1
        seen[view] &= (z > 0) & ((pixels[view] > 1) & (pixels[view] < edge)).all(axis=1)
    rows = np.flatnonzero(seen.sum(axis=0) >= _MIN_VIEWS)
    return _Samples(points, normals, seen, pixels).pick(rows)


def _write_model(
    folder: Path, cameras: list[Camera], samples: _Samples, pictures: list[np.ndarray], seed: int
) -> int:
    """Write the COLMAP model: exact poses and observations, points with a little noise."""
    source = generator(seed, "demo", "points")
    n_knot = samples.n_knot
    n_disc = len(samples.points) - n_knot
    knot, disc = (torch.randperm(n, generator=source, device="cpu") for n in (n_knot, n_disc))
    rows = torch.cat([knot[:_N_KNOT_POINTS], disc[:_N_DISC_POINTS] + n_knot])
    points = samples.pick(rows.numpy())
    noise = torch.randn(len(rows), 3, generator=source, dtype=torch.float64, device="cpu")
    positions = points.points + _POINT_NOISE * noise.numpy()

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
    colors = np.zeros(positions.shape)
    for view, (camera, pixels) in enumerate(zip(cameras, pictures, strict=True)):
        seen = points.visible[view]
        keypoints = points.pixels[view, seen]
        image = pycolmap.Image(
            name=camera.name, keypoints=keypoints, camera_id=1, image_id=view + 1
        )
        pose = pycolmap.Rigid3d(pycolmap.Rotation3d(camera.rotation), camera.translation)
        model.add_image_with_trivial_frame(image, pose)
        column, row = keypoints.astype(int).T
        colors[seen] += pixels[row, column]
    colors = np.round(colors / points.visible.sum(axis=0)[:, None]).astype(np.uint8)
    rank = np.cumsum(points.visible, axis=1) - 1
    for number, (position, color) in enumerate(zip(positions, colors, strict=True)):
        track = pycolmap.Track()
        for view in np.flatnonzero(points.visible[:, number]):
            track.add_element(int(view) + 1, int(rank[view, number]))
        model.add_point3D(position, track, color)
    model.update_point_3d_errors()
    write_model(model, folder)
    return len(rows)


def run_demo(args: argparse.Namespace) -> PipelineResult:
    """Make the scene and run every stage on it; its true geometry is known, so it is measured."""
    root = args.output_dir / "demo_scene"
    plan = demo_plan(args, root)
    group = plan.coarse.compute.group
    with group.single_report():
        if group.is_first:
            make_demo_scene(root, seed=args.random_seed)
        group.barrier()
    first = plan.coarse.compute.group.is_first
    console = Console(verbose=args.verbose) if first else Console.silent()
    return run_stages(plan, console)


def timed_demo(args: argparse.Namespace) -> argparse.Namespace:
    """Make the scene; flags of ``train_full_pipeline.py`` that reconstruct it in some minutes."""
    scene = args.output_dir / "demo_scene"
    make_demo_scene(scene, seed=args.random_seed)
    return _full_flags(args, scene, "-r multiview")


def _full_flags(args: argparse.Namespace, scene: Path, flags: str) -> argparse.Namespace:
    own = full_parser(None).parse_args(flags.split())
    own.scene_path = scene
    for name in DEMO_FLAGS[1:]:
        setattr(own, name, getattr(args, name))
    return own


def demo_plan(args: argparse.Namespace, scene: Path) -> PipelinePlan:
    """The plan of ``train_full_pipeline.py`` with a vanilla stage that suits the small scene."""
    own = _full_flags(args, scene, FLAGS)
    own.vanilla_iterations = round(VANILLA_ITERATIONS / own.schedule_scale)
    plan = full_plan(own)
    until = VANILLA_ITERATIONS * 2 // 3
    config = VanillaConfig(
        preset=plan.vanilla.config.preset,
        iterations=VANILLA_ITERATIONS,
        rates=LearningRates(position_lr_max_steps=VANILLA_ITERATIONS),
        sh_interval=VANILLA_ITERATIONS // 2,
        densification=DensificationConfig(
            densify_from_iter=100,
            densify_until_iter=until,
            densification_interval=100,
        ),
        optimizer=plan.vanilla.config.optimizer,
        random_seed=args.random_seed,
        robustness=plan.vanilla.config.robustness,
    )
    return replace(plan, vanilla=replace(plan.vanilla, config=config))
