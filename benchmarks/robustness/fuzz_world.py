# SPDX-License-Identifier: Apache-2.0
"""Every file that the program reads or continues, once, small and in order; and who reads it.

::

    scene/    photographs, binary COLMAP model, ground truth     text/   the same model as text
    nerf/     transforms_train.json and transforms_test.json     ngp/    transforms.json, points
    vanilla/  checkpoint of a vanilla trainer                    *.ply, scenes.json
    masks/    of the photographs of scene/
    v/ c/ r/  runs of each stage that were killed half-way       v0/ c0/ r0/ the same, not killed
    out/      everything that the whole pipeline makes           and those of tool_commands.py
"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import sugar_utils  # noqa: F401  before torch

# isort: split
import numpy as np
import pycolmap
import torch
from PIL import Image
from plyfile import PlyData, PlyElement

import extract_mesh
import extract_refined_mesh_with_texture
import metrics
import train
import train_coarse_density
import train_coarse_sdf
import train_full_pipeline
import train_refined
from benchmarks.robustness.child import Command, Limits, Outcome, run_child
from benchmarks.robustness.tool_commands import TOOLS, load_servers, write_inputs
from gaussian_splatting import train as vanilla_train
from gaussian_splatting.data.ply import read_point_ply, write_gaussian_ply, write_point_ply
from gaussian_splatting.data.reference_layout import (
    EXPOSURE_FILE,
    point_cloud_path,
    write_cameras_json,
    write_cfg_args,
    write_exposures,
)
from gaussian_splatting.data.scene import VanillaSize, load_scene
from gaussian_splatting.vanilla.vanilla_stage import initial_cloud
from sugar_extractors.quality.mesh_quality import sample_surface
from sugar_scene.mesh.triangle_mesh import TriangleMesh, write_mesh_ply
from tests.support.mesh_scenes import icosahedron
from tests.support.tiny_scene import TinyScene, make_tiny_checkpoint, make_tiny_scene, run_cli

SHORT = (
    "-r", "density", "--schedule_scale", "0.0003", "--sdf_samples", "50", "-v", "100",
    "--surface_points", "400", "--poisson_depth", "4", "--background_mesh", "False",
    "--square_size", "6", "--meshing_backend", "pycolmap", "--poisson_threads", "1",
    "--force", "True",
)  # fmt: skip
"""The solver's threads would be missing in a forked child, which would wait for them."""

ITERATIONS, INTERVAL = 6, 2
_VIEWS, _POINTS = 4, 60
_SIDE, _MANY_POINTS, _OPAQUE = 96, 500, 3.0


def _vanilla(name: str, scene: str, *more: str, needs: tuple[str, ...] = ()) -> Command:
    flags = ("-s", scene, "-m", "new", "--iterations", "2", *more)
    return Command(name, "gaussian_splatting/train.py", vanilla_train.main, flags, (scene, *needs))


_INPUTS = ("-s", "scene", "-c", "vanilla")
_COARSE = (
    *_INPUTS, "-r", "density", "--stop_after", "coarse", "--schedule_scale", "0.0005",
    "--sdf_samples", "50", "--checkpoint_interval", "4000", "--checkpoint_milestones", "[]",
    "--keep_checkpoints", "9", "--force", "True",
)  # fmt: skip
_SINGLE = (*_INPUTS, "--schedule_scale", "0.0005", "--sdf_samples", "50")
_RESUMED = (
    "--iterations", str(ITERATIONS), "--checkpoint_interval", str(INTERVAL),
    "--keep_checkpoints", "9",
)  # fmt: skip
_REFINE = (
    *_INPUTS, "-m", "mesh.ply", "-g", "1", "-v", "1000", "--keep_checkpoints", "9",
)  # fmt: skip
_MODELS = "out/{}/scene/sugar{}"

COMMANDS = {
    command.name: command
    for command in (
        _vanilla("vanilla", "scene"),
        _vanilla("vanilla eval", "scene", "--eval", "-r", "1"),
        _vanilla("vanilla masked", "scene", "--masks", "masks", needs=("masks",)),
        _vanilla(
            "vanilla ignoring", "scene", "--masks", "masks", "--mask_mode", "ignore",
            needs=("masks",),
        ),
        _vanilla("vanilla text", "text"),
        _vanilla("vanilla nerf", "nerf", "--max_gaussians", "60"),
        _vanilla("vanilla ngp", "ngp", "--max_gaussians", "60"),
        _vanilla("vanilla points", "scene", "--init_ply", "points.ply", needs=("points.ply",)),
        _vanilla("vanilla cloud", "scene", "--init_ply", "cloud.ply", needs=("cloud.ply",)),
        Command(
            "doctor", "train.py", train.main, (*_INPUTS, "--doctor"), ("scene", "vanilla")
        ),
        Command(
            "doctor masked", "train.py", train.main,
            (*_INPUTS, "--masks", "masks", "--doctor"), ("scene", "vanilla", "masks"),
        ),
        Command("doctor text", "train.py", train.main, ("-s", "text", "--doctor"), ("text",)),
        Command("doctor nerf", "train.py", train.main, ("-s", "nerf", "--doctor"), ("nerf",)),
        Command("doctor ngp", "train.py", train.main, ("-s", "ngp", "--doctor"), ("ngp",)),
        Command(
            "coarse", "train.py", train.main, (*_COARSE, "--output_dir", "new"),
            ("scene", "vanilla"),
        ),
        Command(
            "coarse exposed", "train.py", train.main,
            (*_COARSE, "--exposure_compensation", "True", "--output_dir", "new"),
            ("scene", "vanilla"),
        ),
        Command(
            "refine", "train_refined.py", train_refined.main,
            (*_REFINE, "-f", "2", "-o", "new"), ("scene", "vanilla", "mesh.ply"),
        ),
        Command(
            "resume vanilla", "gaussian_splatting/train.py", vanilla_train.main,
            ("-s", "scene", "-m", "v", *_RESUMED), ("scene", "v"),
        ),
        Command(
            "resume coarse", "train.py", train.main, (*_COARSE, "--output_dir", "c"),
            ("scene", "vanilla", "c"),
        ),
        Command(
            "resume refine", "train_refined.py", train_refined.main,
            (*_REFINE, "-f", str(ITERATIONS), "--checkpoint_interval", str(INTERVAL), "-o", "r"),
            ("scene", "vanilla", "mesh.ply", "r"),
        ),
        Command(
            "pipeline", "train.py", train.main,
            (*_INPUTS, *SHORT, "-f", "2", "--output_dir", "out"), ("scene", "vanilla", "out"),
        ),
        Command(
            "full", "train_full_pipeline.py", train_full_pipeline.main,
            ("-s", "scene", *SHORT, "--vanilla_iterations", "7000", "--stop_after", "coarse",
             "--init_ply", "cloud.ply", "--output_dir", "new"), ("scene", "cloud.ply"),
        ),
        Command(
            "coarse density", "train_coarse_density.py", train_coarse_density.main,
            (*_SINGLE, "--output_dir", "new"), ("scene", "vanilla"),
        ),
        Command(
            "coarse sdf", "train_coarse_sdf.py", train_coarse_sdf.main,
            (*_SINGLE, "--output_dir", "new"), ("scene", "vanilla"),
        ),
        Command(
            "mesh", "extract_mesh.py", extract_mesh.main,
            (*_INPUTS, "-m", "out/coarse/scene/{coarse}", "-o", "new", "-l", "0.3", "-d", "100",
             "--surface_points", "400", "--poisson_depth", "4", "--background_mesh", "False",
             "--meshing_backend", "pycolmap", "--poisson_threads", "1"),
            ("scene", "vanilla", "out"),
        ),
        Command(
            "texture", "extract_refined_mesh_with_texture.py",
            extract_refined_mesh_with_texture.main,
            (*_INPUTS, "-m", "out/refined/scene/{refined}", "-o", "new", "--square_size", "6"),
            ("scene", "vanilla", "out"),
        ),
        Command(
            "metrics", "metrics.py", metrics.main,
            ("--scene_config", "scenes.json", "-r", "density", "-v", "100", "-f", "1",
             "--output_dir", "out"),
            ("scene", "vanilla", "out", "scenes.json"),
        ),
        Command(
            "metrics texture", "metrics.py", metrics.main,
            ("--scene_config", "scenes.json", "-r", "density", "-v", "100", "-f", "1",
             "--output_dir", "out", "--use_uv_texture", "True"),
            ("scene", "vanilla", "out", "scenes.json"),
        ),
        *TOOLS,
    )
}  # fmt: skip
"""By name."""

RUNS = {"v": "resume vanilla", "c": "resume coarse", "r": "resume refine"}
"""Folder of a killed run, and the command that continues it."""


def words_of(command: Command, root: Path) -> list[str]:
    """The flags of a command, with the names of models that only the made world knows."""
    if not any("{" in flag for flag in command.flags):
        return list(command.flags)
    found = {
        name: next((root / "out" / name / "scene").glob("sugar*/")).name
        for name in ("coarse", "refined")
    }
    found["textured"] = next((root / "out" / "refined_mesh" / "scene").glob("sugar*.obj")).name
    return [flag.format(**found) for flag in command.flags]


def run_command(
    command: Command, root: Path, notes: Path, limits: Limits, words: Sequence[str] | None = None
) -> Outcome:
    """Run an entry point in a world."""
    words = words_of(command, root) if words is None else words
    return run_child(command.main, words, root, notes, limits, script=command.script)


def warm_up(root: Path) -> None:
    """Load all that a child needs: run every entry point once in this process, in a new folder.

    Raises:
        RuntimeError: An entry point failed on files that are in order.
    """
    torch.set_num_threads(1)
    _decimate_in_one_thread()
    make_world(root, run=_run_here)
    load_servers()
    for name, command in COMMANDS.items():
        if name not in RUNS.values() and command.script != "view.py":
            shutil.rmtree(root / "new", ignore_errors=True)
            _run_here(command, root)


def _decimate_in_one_thread() -> None:
    """pycolmap's threads, too, would be missing in a forked child."""
    original = pycolmap.MeshSimplificationOptions

    def options() -> pycolmap.MeshSimplificationOptions:
        made = original()
        made.num_threads = 1
        return made

    pycolmap.MeshSimplificationOptions = options


def _run_here(command: Command, root: Path) -> None:
    said = io.StringIO()
    before = Path.cwd()
    try:
        os.chdir(root)
        with redirect_stdout(said), redirect_stderr(said):
            code = run_cli(command.main, *words_of(command, root))
    finally:
        os.chdir(before)
    if code != 0:
        raise RuntimeError(f"{command.name} fails without a fault: {said.getvalue()}")


def make_world(root: Path, run: Callable[[Command, Path], None], scene: Path | None = None) -> None:
    """Write a world.

    Args:
        root: Its folder, which results are bound to: a copy works under the same path only.
        run: Runs an entry point.
        scene: A capture to train on in place of a tiny one, with ``images`` and ``sparse/0``;
            its photographs are made small.

    Raises:
        RuntimeError: An entry point failed on files that are in order.
    """
    tiny = make_tiny_scene(root / ("scene" if scene is None else "tiny"), _VIEWS, _POINTS)
    write_gaussian_ply(root / "cloud.ply", tiny.cloud)
    write_point_ply(root / "points.ply", tiny.points.astype(np.float32), tiny.points_rgb)
    mesh = icosahedron()
    if scene is None:
        make_tiny_checkpoint(root / "vanilla", tiny)
        _write_truth(root / "scene")
    else:
        _write_capture(scene, root)
        points = read_point_ply(root / "points.ply")[0]
        middle, size = np.median(points, axis=0), points.std(axis=0).mean()
        mesh = TriangleMesh(mesh.vertices * size + middle, mesh.faces, mesh.colors)
    write_mesh_ply(root / "mesh.ply", mesh)
    _write_exposures(root)
    _write_masks(root)
    (root / "scenes.json").write_text(json.dumps({"scene": "vanilla"}), encoding="utf-8")
    _write_text_model(tiny, root)
    _write_transforms(tiny, root)

    run(COMMANDS["pipeline"], root)
    for folder, name in RUNS.items():
        run(COMMANDS[name], root)
        shutil.copytree(root / folder, root / f"{folder}0")
        kill_half_way(root / folder)
    write_inputs(root, lambda command: run(command, root))


def run_folder(folder: Path) -> Path:
    """Where the checkpoints of a run lie."""
    return next(folder.rglob("run.json")).parent


def kill_half_way(folder: Path) -> None:
    """Turn a finished run into one that ended after its last checkpoint but one."""
    run = run_folder(folder)
    newest = max(run.glob("*.pt"), key=lambda path: int(path.stem))
    newest.unlink()
    for ply in [*folder.rglob("point_cloud.ply"), *folder.glob("*.ply")]:
        ply.unlink()
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    record["status"] = "running"
    (run / "run.json").write_text(json.dumps(record, indent=2), encoding="utf-8")


def _write_capture(scene: Path, root: Path) -> None:
    """A capture with small photographs, some of its points, and opaque Gaussians on them."""
    (root / "scene" / "images").mkdir(parents=True)
    shutil.copytree(scene / "sparse", root / "scene" / "sparse")
    for path in sorted((scene / "images").iterdir()):
        with Image.open(path) as image:
            image.thumbnail((_SIDE, _SIDE))
            image.save(root / "scene" / "images" / path.name)
    loaded = load_scene(root / "scene", size_rule=VanillaSize(), notify=lambda _: None)
    rows = np.linspace(0, len(loaded.points) - 1, min(len(loaded.points), _MANY_POINTS)).astype(int)
    points, colors = loaded.points[rows], loaded.points_rgb[rows]
    write_point_ply(root / "points.ply", points, colors)
    cloud = initial_cloud(torch.from_numpy(points), torch.from_numpy(colors))
    cloud.opacity_logits[:] = _OPAQUE
    write_gaussian_ply(root / "cloud.ply", cloud)
    write_gaussian_ply(point_cloud_path(root / "vanilla", 7000), cloud)
    write_cameras_json(root / "vanilla", loaded.original_train_cameras, [])
    write_cfg_args(root / "vanilla", source_path=root / "scene")


def _write_exposures(root: Path) -> None:
    """Beside the Gaussians, of the first photographs of the scene."""
    names = sorted(path.name for path in (root / "scene" / "images").iterdir())[:3]
    beside = point_cloud_path(root / "vanilla", 7000).with_name(EXPOSURE_FILE)
    write_exposures(beside, dict.fromkeys(names, torch.full((2, 3), 0.1)))


def _write_masks(root: Path) -> None:
    """Of an object in the middle of every photograph."""
    (root / "masks").mkdir()
    for path in sorted((root / "scene" / "images").iterdir()):
        with Image.open(path) as image:
            width, height = image.size
        mask = np.zeros((height, width), np.uint8)
        mask[height // 8 : -height // 8, width // 8 : -width // 8] = 255
        Image.fromarray(mask).save(root / "masks" / f"{path.name}.png")


def _write_text_model(scene: TinyScene, root: Path) -> None:
    shutil.copytree(scene.root / "images", root / "text" / "images")
    (root / "text" / "sparse" / "0").mkdir(parents=True)
    model = pycolmap.Reconstruction()
    model.read_binary(str(scene.root / "sparse" / "0"))
    write_as_text = model.write_text
    write_as_text(str(root / "text" / "sparse" / "0"))


def _write_transforms(scene: TinyScene, root: Path) -> None:
    """The views as NeRF-synthetic and instant-ngp write them."""
    for name in ("nerf/train", "nerf/test", "ngp/images"):
        (root / name).mkdir(parents=True)
    frames: list[dict] = []
    for camera in scene.cameras:
        pose = np.eye(4)
        pose[:3, :3] = camera.rotation.T * (1, -1, -1)
        pose[:3, 3] = camera.center
        frames.append({"file_path": camera.name, "transform_matrix": pose.tolist()})
        for folder in ("nerf/train", "nerf/test", "ngp/images"):
            shutil.copy(camera.image_path, root / folder / camera.name)
    view = scene.cameras[0]
    angle = 2 * math.atan(view.width / (2 * view.fx))
    for part in ("train", "test"):
        own = [{**f, "file_path": f"./{part}/{Path(f['file_path']).stem}"} for f in frames]
        content = {"camera_angle_x": angle, "frames": own[:2] if part == "test" else own}
        (root / "nerf" / f"transforms_{part}.json").write_text(
            json.dumps(content, indent=1), encoding="utf-8"
        )
    lens = {
        **{"w": view.width, "h": view.height, "fl_x": view.fx, "fl_y": view.fy},
        **{"cx": view.cx, "cy": view.cy, "k1": 0.0, "camera_model": "OPENCV"},
        "ply_file_path": "points.ply",
    }
    own = [{**f, "file_path": f"images/{f['file_path']}"} for f in frames]
    (root / "ngp" / "transforms.json").write_text(
        json.dumps({**lens, "frames": own}, indent=1), encoding="utf-8"
    )
    shutil.copy(root / "points.ply", root / "ngp" / "points.ply")


def _write_truth(root: Path) -> None:
    """A known surface, so that the pipeline measures its meshes."""
    mesh = icosahedron()
    write_mesh_ply(root / "gt_object.ply", mesh)
    seen = sample_surface(mesh.vertices, mesh.faces, 300)
    table = np.concatenate([seen.points, seen.normals], axis=1).astype("<f4")
    names = [(name, "<f4") for name in ("x", "y", "z", "nx", "ny", "nz")]
    rows = np.ascontiguousarray(table).view(names).reshape(-1)
    PlyData([PlyElement.describe(rows, "vertex")]).write(str(root / "gt_visible.ply"))
    facts = {
        "object_bbox": [mesh.vertices.min(axis=0).tolist(), mesh.vertices.max(axis=0).tolist()],
        "ground_bbox": None,
        "up": "+z",
        "gt_visible_object_samples": 300,
    }
    (root / "gt.json").write_text(json.dumps(facts), encoding="utf-8")


def copy_parts(source: Path, target: Path, parts: Sequence[str]) -> None:
    """Copy parts of a world into an empty folder."""
    for part in dict.fromkeys(parts):
        copy = shutil.copytree if (source / part).is_dir() else shutil.copy
        copy(source / part, target / part)
