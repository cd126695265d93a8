# SPDX-License-Identifier: Apache-2.0
"""The demo: a small synthetic scene as a COLMAP capture, taken through all stages, and measured.

It needs no download, so a fresh installation can be tried out and measured at once. The folder of
the scene::

    images/view_000.png ...     sRGB photographs
    sparse/0/*.bin              COLMAP model: cameras, poses, points with their tracks
    gt_object.ply, gt_mesh.ply  the triangles: the knot; the knot, then the ground disc
    gt_visible.ply              surface samples that three views or more see, the knot's first
    gt.json                     bounding boxes and counts
    demo.json                   the parameters; written last, so its presence means completeness
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from gaussian_splatting.components.densification import DensificationConfig
from gaussian_splatting.core.random import derive_seed, generator
from gaussian_splatting.data.cameras import Camera, centers_of
from gaussian_splatting.data.colmap import PARTS
from gaussian_splatting.data.colmap_writing import TrackedPoints, ViewTracks, write_capture
from gaussian_splatting.data.names import IMAGE_SUFFIXES
from gaussian_splatting.engine.runner import kernels_ahead
from gaussian_splatting.optim.schedule import LearningRates
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from sugar_pipeline.demo.demo_surface import GOLDEN_ANGLE, make_disc, make_knot, visible
from sugar_pipeline.demo.demo_texture import Chart, knot_chart, picture, textured_surface
from sugar_pipeline.pipeline.pipeline_flags import DEMO_FLAGS, full_parser
from sugar_pipeline.pipeline.pipeline_result import PipelineResult
from sugar_pipeline.pipeline.pipeline_run import run_stages
from sugar_pipeline.pipeline.plan import PipelinePlan, plan_of
from sugar_scene import triangle_mesh as meshes
from sugar_scene.surface_queries import sample_surface
from sugar_utils.console import Console
from sugar_utils.errors import Notify, UserError, explained
from sugar_utils.files import check_writable, remove_stale_temporaries, write_json_atomic
from sugar_utils.flags import FlagValues
from sugar_utils.recipe import Recipe

_VERSION = 2
_MARKER = "demo.json"
_GT_FILES = ("gt_mesh.ply", "gt_object.ply", "gt_visible.ply", "gt.json")
_MIN_VIEWS_OF_SAMPLE = 3  # views that see a surface sample; fewer and it is left out
_MIN_SIDE = 16  # pixels
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
_ELEVATIONS = (8.0, 66.0)  # lowest and highest camera, degrees

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
        """Number of samples of the knot; those of the disc have z = 0."""
        return int((self.points[:, 2] != 0).sum())

    def pick(self, rows: np.ndarray) -> _Samples:
        """Select samples by their rows."""
        return _Samples(
            points=self.points[rows],
            normals=self.normals[rows],
            visible=self.visible[:, rows],
            pixels=self.pixels[:, rows],
        )


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
    if n_views < _MIN_VIEWS_OF_SAMPLE or min(width, height) < _MIN_SIDE:
        raise UserError(
            f"the demo scene cannot have {n_views} views of {width} x {height} pixels; "
            f"it needs at least {_MIN_VIEWS_OF_SAMPLE} views of {_MIN_SIDE} x {_MIN_SIDE}"
        )
    names = [f"images/view_{view:03d}.png" for view in range(n_views)]
    names += [f"sparse/0/{part}.bin" for part in PARTS]
    names += _GT_FILES
    recipe = Recipe(parameters)
    files = [root / name for name in names]
    if recipe.is_current(root / _MARKER, files):
        notify(f"using the demo scene in {root}")
        return False
    notify(f"making the demo scene in {root}: {n_views} views of {width} x {height} pixels")
    _clear(root)
    advice = "free some space or choose another folder"
    with explained(f"cannot write the demo scene in {root}:", advice):
        _build(root, parameters)
        recipe.write(root / _MARKER, files)
    return True


def _clear(root: Path) -> None:
    """Remove an older or half-written demo scene, and nothing else.

    Raises:
        UserError: The folder holds another capture.
    """
    images = root / "images"
    sparse = root / "sparse" / "0"
    demo_images = sorted(images.glob("view_*.png"))
    model = [sparse / f"{part}.bin" for part in PARTS]
    foreign = {path for path in images.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES}
    foreign -= set(demo_images)
    if not demo_images and not (root / _MARKER).is_file():
        foreign |= {path for path in model if path.is_file()}
    if foreign:
        raise UserError(
            f"{root} holds another capture ({min(foreign).name}); choose a new folder for the demo"
        )
    check_writable(root)
    # Readers cache the points as a PLY file. The images identify the folder as a demo scene, so
    # they go last.
    obsolete = [root / name for name in (_MARKER, *_GT_FILES)]
    obsolete += [*model, sparse / "points3D.ply", *demo_images]
    for path in obsolete:
        with explained(f"cannot remove {path}:", f"remove {root}"):
            path.unlink(missing_ok=True)
    remove_stale_temporaries(root)
    check_writable(images)
    check_writable(sparse)


def _build(root: Path, parameters: dict[str, int]) -> None:
    """Write all files of the demo scene but the marker."""
    knot = make_knot()
    detail = min(4.0, max(parameters["width"], parameters["height"]) / 320)
    write_scene(root, knot, knot_chart(knot, detail), detail, parameters)


def write_scene(
    root: Path,
    knot: meshes.TriangleMesh,
    chart: Chart,
    detail: float,
    parameters: dict[str, int],
) -> None:
    """Write photographs, COLMAP model and geometry of an object on the disc.

    Args:
        root: Folder, with ``images`` and ``sparse/0`` in it.
        knot: The object, of longest side 1 or less.
        chart: All of its surface, painted.
        detail: As of :func:`~sugar_pipeline.demo.demo_texture.textured_surface`.
        parameters: Number of views, width, height and seed, as of :func:`make_demo_scene`.
    """
    seed = parameters["seed"]
    disc = make_disc()
    cameras = _cameras(parameters)
    mesh = textured_surface(knot, chart, disc, seed, detail)
    pictures = [picture(mesh, camera) for camera in cameras]
    for camera, pixels in zip(cameras, pictures, strict=True):
        Image.fromarray(pixels).save(root / "images" / camera.name, compress_level=4)
    samples = _visible_samples(knot, disc, cameras, seed)
    points = _drawn_points(samples, seed)
    write_capture(root / "sparse" / "0", cameras, tracked_points(points, pictures))

    scene_mesh = meshes.with_vertex_normals(meshes.merge_meshes([knot, disc]))
    meshes.write_mesh_ply(root / "gt_mesh.ply", scene_mesh)
    meshes.write_mesh_ply(root / "gt_object.ply", knot)
    no_faces = np.zeros((0, 3), np.int64)
    grey = np.full(samples.points.shape, 128, np.uint8)
    sample_cloud = meshes.TriangleMesh(samples.points, no_faces, grey, samples.normals)
    meshes.write_mesh_ply(root / "gt_visible.ply", sample_cloud)
    facts = {
        "up": "+z",
        "unit": "longest side of the object",
        "object_size": 1.0,
        "object_bbox": _bounding_box(knot),
        "ground_bbox": _bounding_box(disc),
        "object_vertices": knot.n_vertices,
        "object_faces": knot.n_faces,
        "ground_vertices": disc.n_vertices,
        "ground_faces": disc.n_faces,
        "gt_visible_samples": len(samples.points),
        "gt_visible_object_samples": samples.n_knot,
        "points3D": len(points.points),
        "point_noise": _POINT_NOISE,
        "parameters": parameters,
    }
    write_json_atomic(root / "gt.json", facts)


def _bounding_box(mesh: meshes.TriangleMesh) -> list[list[float]]:
    """Low and high corner. (2, 3)"""
    low = mesh.vertices.min(axis=0)
    high = mesh.vertices.max(axis=0)
    return [low.tolist(), high.tolist()]


def _cameras(parameters: dict[str, int]) -> list[Camera]:
    """Cameras on a spiral around the object that look at its middle, from low to high."""
    n_views = parameters["n_views"]
    width = parameters["width"]
    height = parameters["height"]
    source = generator(parameters["seed"], "demo", "cameras")
    draws = torch.rand(n_views + 1, generator=source, dtype=torch.float64, device="cpu").numpy()
    first_angle = 2 * math.pi * draws[-1]
    low, high = np.sin(np.radians(_ELEVATIONS))
    focal = _FOCAL * min(width, height * 4 / 3)
    cameras = []
    for view in range(n_views):
        # unit vector from the object to the camera
        z = low + (high - low) * (view + 0.5) / n_views
        angle = GOLDEN_ANGLE * view + first_angle
        horizontal = math.sqrt(1 - z**2)
        away = np.array([horizontal * math.cos(angle), horizontal * math.sin(angle), z])
        distance = _DISTANCE + _DISTANCE_SPREAD * (2 * draws[view] - 1)
        right = np.array([-math.sin(angle), math.cos(angle), 0.0])
        down = np.cross(-away, right)
        rotation = np.stack([right, down, -away])
        center = np.array(_TARGET) + distance * away
        camera = Camera(
            name=f"view_{view:03d}.png",
            width=width,
            height=height,
            fx=focal,
            fy=focal,
            cx=width * (0.5 + _OFF_CENTER[0]),
            cy=height * (0.5 + _OFF_CENTER[1]),
            rotation=rotation,
            translation=-rotation @ center,
        )
        cameras.append(camera)
    return cameras


def _visible_samples(
    knot: meshes.TriangleMesh, disc: meshes.TriangleMesh, cameras: list[Camera], seed: int
) -> _Samples:
    """Draw samples of both surfaces; keep those that enough views see."""
    knot_samples = sample_surface(
        knot.vertices, knot.faces, _N_KNOT_SAMPLES, derive_seed(seed, "demo", "knot")
    )
    disc_samples = sample_surface(
        disc.vertices, disc.faces, _N_DISC_SAMPLES, derive_seed(seed, "demo", "disc")
    )
    points = np.concatenate([knot_samples.points, disc_samples.points])
    normals = np.concatenate([knot_samples.normals, disc_samples.normals])
    centers = centers_of(cameras)
    visibility = visible(knot, points, normals, centers)
    pixels = np.empty((*visibility.shape, 2))
    for view, camera in enumerate(cameras):
        x, y, z = camera.rotation @ points.T + camera.translation[:, None]
        pixels[view, :, 0] = camera.fx * x / z + camera.cx
        pixels[view, :, 1] = camera.fy * y / z + camera.cy
        last_pixel = np.array(camera.size) - 1
        inside = (pixels[view] > 1) & (pixels[view] < last_pixel)
        visibility[view] &= (z > 0) & inside.all(axis=1)
    rows = np.flatnonzero(visibility.sum(axis=0) >= _MIN_VIEWS_OF_SAMPLE)
    return _Samples(points, normals, visibility, pixels).pick(rows)


def _drawn_points(samples: _Samples, seed: int) -> _Samples:
    """Draw the samples that become points of the COLMAP model, with a little noise."""
    source = generator(seed, "demo", "points")
    n_knot = samples.n_knot
    n_disc = len(samples.points) - n_knot
    knot_order = torch.randperm(n_knot, generator=source, device="cpu")
    disc_order = torch.randperm(n_disc, generator=source, device="cpu")
    rows = torch.cat([knot_order[:_N_KNOT_POINTS], disc_order[:_N_DISC_POINTS] + n_knot])
    noise = torch.randn(len(rows), 3, generator=source, dtype=torch.float64, device="cpu")
    drawn = samples.pick(rows.numpy())
    return drawn._replace(points=drawn.points + _POINT_NOISE * noise.numpy())


def tracked_points(points: _Samples, pictures: Sequence[np.ndarray]) -> TrackedPoints:
    """Points with exact observations, and the mean colour of the pixels that show them."""
    views = []
    color_sums = np.zeros(points.points.shape)
    for view, pixels in enumerate(pictures):
        rows = np.flatnonzero(points.visible[view])
        keypoints = points.pixels[view, rows]
        columns, lines = keypoints.astype(int).T
        color_sums[rows] += pixels[lines, columns]
        views.append(ViewTracks(rows, keypoints))
    n_views_of_point = points.visible.sum(axis=0)
    colors = np.round(color_sums / n_views_of_point[:, None]).astype(np.uint8)
    return TrackedPoints(points.points, colors, views)


def run_demo(flags: FlagValues) -> PipelineResult:
    """Make the scene, run every stage on it, and measure the meshes against its geometry."""
    root = flags["output_dir"] / "demo_scene"
    plan = demo_plan(flags, root)
    group = plan.coarse.compute.group
    with group.single_report():
        if group.is_first:
            with kernels_ahead(plan.coarse.compute.device):
                make_demo_scene(root, seed=flags["random_seed"])
        group.barrier()
    console = Console(verbose=flags["verbose"]) if group.is_first else Console.silent()
    return run_stages(plan, console)


def timed_demo(flags: FlagValues) -> FlagValues:
    """Make the scene; return flags of ``train_full_pipeline.py`` for it, with ``--minutes``."""
    scene = flags["output_dir"] / "demo_scene"
    make_demo_scene(scene, seed=flags["random_seed"])
    return _full_flags(flags, scene, "-r multiview")


def _full_flags(flags: FlagValues, scene: Path, words: str) -> FlagValues:
    """Flags of ``train_full_pipeline.py``: those of words, and those that the demo shares."""
    shared = {name: flags[name] for name in DEMO_FLAGS[1:]}
    return full_parser(None).parse_flags(words.split()).replaced(scene_path=scene, **shared)


def demo_plan(flags: FlagValues, scene: Path) -> PipelinePlan:
    """Plan ``train_full_pipeline.py`` with a vanilla stage that suits the small scene."""
    full_flags = _full_flags(flags, scene, FLAGS)
    iterations = round(VANILLA_ITERATIONS / full_flags["schedule_scale"])
    plan = plan_of(full_flags.replaced(vanilla_iterations=iterations))
    assert plan.vanilla is not None, "the demo gives no checkpoint, so it trains one"
    planned = plan.vanilla.config
    config = VanillaConfig(
        preset=planned.preset,
        iterations=VANILLA_ITERATIONS,
        rates=LearningRates(position_lr_max_steps=VANILLA_ITERATIONS),
        sh_interval=VANILLA_ITERATIONS // 2,
        densification=DensificationConfig(
            densify_from_iter=100,
            densify_until_iter=VANILLA_ITERATIONS * 2 // 3,
            densification_interval=100,
        ),
        optimizer=planned.optimizer,
        random_seed=flags["random_seed"],
        robustness=planned.robustness,
    )
    # No flags repeat it.
    return replace(plan, vanilla=replace(plan.vanilla, config=config), flags=FlagValues())
