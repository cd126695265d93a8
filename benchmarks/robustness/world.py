# SPDX-License-Identifier: Apache-2.0
"""A small valid copy of every file that the program reads or resumes, and commands that read them.

::

    scene/    images, binary COLMAP model                  text/   the same model as text
    nerf/     transforms_train.json, transforms_test.json  ngp/    transforms.json, points
    vanilla/  checkpoint of a vanilla trainer              masks/  of the images of scene/
    v/ c/ r/  runs of each stage, killed half-way          v0/ c0/ r0/ the same, complete
    out/      everything that the whole pipeline makes     room/   images and their poses
    exports/  every export format that is read again       new0/   exports to be replaced
    *.ply, scenes.json, path.json, known.xml (cameras of room/ by another program)
    zipped.zip (scene/), settings.toml
"""

from __future__ import annotations

import functools
import importlib.util
import io
import json
import math
import os
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import sugar_utils  # noqa: F401  before torch

# isort: split
import numpy as np
import pycolmap
import torch
from PIL import Image

from benchmarks.robustness.child import Limits, Main, Outcome, run_child
from gaussian_splatting.formats.ply import write_gaussian_ply, write_point_ply
from sugar_capture.scene_folder import RECORD, WORK
from sugar_pipeline import command_line
from sugar_scene.triangle_mesh import write_mesh_ply
from sugar_viewer import view_run
from sugar_viewer.page_server import load_viser
from tests.support.camera_files import metashape
from tests.support.mesh_scenes import icosahedron
from tests.support.photographed_room import FOCAL, HEIGHT, WIDTH, camera_poses, write_photographs
from tests.support.tiny_scene import TinyScene, make_tiny_checkpoint, make_tiny_scene, run_cli

SCRIPTS = (
    "gaussian_splatting/train.py",
    "gaussian_splatting/convert.py",
    "train.py",
    "train_coarse_density.py",
    "train_coarse_sdf.py",
    "train_full_pipeline.py",
    "train_refined.py",
    "extract_mesh.py",
    "extract_refined_mesh_with_texture.py",
    "metrics.py",
    "scan",
    "targets",
    "export",
    "render",
    "view",
)


def main_of(script: str) -> Main:
    main = command_line.main_of(script, None)
    return functools.partial(_view, main) if script == "view" else main


def _view(main: Main) -> None:
    """``sugar view`` at a free port, ended after three rounds of work."""
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        sys.argv[1:1] = ["--no_open", "--port", str(taken.getsockname()[1])]
    rounds = iter(range(3))
    ended = functools.partial(view_run.view, until=lambda: next(rounds, None) is None)
    with patch.object(view_run, "view", ended):
        main()


EXPORTS = {
    "cloud.spz": "spz",
    "cloud4.spz": "spz4",
    "cloud.splat": "splat",
    "cloud.gltf.glb": "gltf",
    "cloud.usd": "usd",
    "mesh.glb": "glb",
}
"""Files of ``exports/``, and their formats."""

RUNS = {"v": "resume vanilla", "c": "resume coarse", "r": "resume refine"}
"""Folder of a killed run, and the command that continues it."""

# Threads of a solver would be missing in a forked child.
_MACROS = {
    "@mesh": "--surface_points 400 --poisson_depth 4 --background_mesh False"
    " --meshing_backend pycolmap --poisson_threads 1",
    "@in": "-s scene -c vanilla",
    "@vanilla": "gaussian_splatting/train.py -m new --iterations 2",
    "@again": "--keep_checkpoints 9 --checkpoint_interval 2",
    "@coarse": "train.py -s scene -c vanilla -r density --stop_after coarse --schedule_scale 0.0005"
    " --sdf_samples 50 --checkpoint_interval 4000 --checkpoint_milestones []"
    " --keep_checkpoints 9 --force True --output_dir",
    "@short": "-v 100 -r density --schedule_scale 0.0003 --sdf_samples 50 --square_size 6"
    " --force True",
    "@one": "-s scene -c vanilla --schedule_scale 0.0005 --sdf_samples 50 --output_dir new",
    "@refine": "train_refined.py -s scene -c vanilla -m mesh.ply -g 1 -v 1000",
    "@metrics": "metrics.py --scene_config scenes.json -r density -v 100 -f 1 --output_dir out",
    "@convert": f"gaussian_splatting/convert.py -s room --extraction_size {WIDTH}"
    " --max_features 600",
    "@export": "export -o new/result",
    "@render": "render -s scene -o new --n_frames 2",
    "@view": "view --picture_size 64 --path_file new/path.json",
    "@refined": "out/refined/scene/{refined}",
    "@textured": "out/refined_mesh/scene/{textured}",
}
_TABLE = """
vanilla           @vanilla -s scene
vanilla eval      @vanilla -s scene --eval -r 1
vanilla masked    @vanilla -s scene --masks masks
vanilla ignoring  @vanilla -s scene --masks masks --mask_mode ignore
vanilla text      @vanilla -s text
vanilla nerf      @vanilla -s nerf --max_gaussians 60
vanilla ngp       @vanilla -s ngp --max_gaussians 60
vanilla points    @vanilla -s scene --init_ply points.ply
vanilla cloud     @vanilla -s scene --init_ply cloud.ply
vanilla zip       @vanilla -s zipped.zip
vanilla settings  gaussian_splatting/train.py --config settings.toml
doctor            train.py @in --doctor
doctor masked     train.py @in --masks masks --doctor
doctor text       train.py -s text --doctor
doctor nerf       train.py -s nerf --doctor
doctor ngp        train.py -s ngp --doctor
coarse            @coarse new
coarse density    train_coarse_density.py @one
coarse sdf        train_coarse_sdf.py @one
refine            @refine -f 2 --keep_checkpoints 9 -o new
resume vanilla    gaussian_splatting/train.py -s scene -m v --iterations 6 @again
resume coarse     @coarse c
resume refine     @refine -f 6 -o r @again
pipeline          train.py @in @short @mesh -f 2 --output_dir out
full              train_full_pipeline.py -s scene @short @mesh --vanilla_iterations 7000\
 --stop_after coarse --init_ply cloud.ply --output_dir new
mesh              extract_mesh.py @in @mesh -m out/coarse/scene/{coarse} -o new -l 0.3 -d 100
texture           extract_refined_mesh_with_texture.py @in -m @refined -o new --square_size 6
metrics           @metrics
metrics texture   @metrics --use_uv_texture True
convert           @convert
convert given     @convert --skip_matching
convert known     @convert --cameras known.xml
export spz        @export @refined --to spz
export placed     @export @refined --to ply @in --orient up --known_distance view_00.png\
 view_01.png 2
export cloud      @export cloud.ply --to gltf
export vanilla    @export vanilla --to ply
export glb        @export @textured --to glb --max_triangles 60
export obj        @export @textured --to obj --texture_size 64
export stl        @export @textured --to stl --scale_factor 2
export usdz       @export @textured --to usdz --orient up @in
render model      @render @refined --path test --show image depth normal alpha
render capture    @render @refined -c vanilla --path between
render video      @render cloud.ply -o new/video.mp4
render path       @render @refined --path path.json
render mesh       @render mesh.ply --show clay normal
render textured   @render @textured --show image clay depth
view model        @view @refined @in
view output       @view out
view cloud        @view cloud.ply mesh.ply
view textured     @view @textured --scale_factor 2
"""
_ALSO = {
    "out": ("scene", "vanilla"),
    "scenes.json": ("scene", "vanilla"),
    "exports": ("scene",),
    "settings.toml": ("scene",),
}
"""Parts of the world that others refer to."""


@dataclass(frozen=True)
class Command:
    """An entry point with flags that work on the valid world; paths are relative to its root."""

    name: str
    script: str
    flags: tuple[str, ...]

    @property
    def needs(self) -> tuple[str, ...]:
        named = [flag.split("/")[0] for flag in self.flags]
        parts = [part for part in named if part in PARTS]
        parts += [also for part in parts for also in _ALSO.get(part, ())]
        return tuple(dict.fromkeys(parts))


PARTS = (
    "scene",
    "text",
    "nerf",
    "ngp",
    "vanilla",
    "masks",
    "points.ply",
    "cloud.ply",
    "mesh.ply",
    "scenes.json",
    "out",
    "v",
    "c",
    "r",
    "room",
    "exports",
    "path.json",
    "known.xml",
    "zipped.zip",
    "settings.toml",
)


def _commands() -> dict[str, Command]:
    lines = [(line[:18].strip(), line[18:]) for line in _TABLE.strip().splitlines()]
    if importlib.util.find_spec("pxr") is None:
        lines = [(name, words) for name, words in lines if name != "export usdz"]
        EXPORTS.pop("cloud.usd", None)
    for name in EXPORTS:
        lines.append((f"view {name}", f"@view exports/{name}"))
        if name.startswith("cloud"):
            lines.append((f"export {name}", f"@export exports/{name} --to splat"))
            lines.append((f"render {name}", f"@render exports/{name} --path test"))
    found = {}
    for name, text in lines:
        words = [w for word in text.split() for w in _MACROS.get(word, word).split()]
        script = next(word for word in words if word in SCRIPTS)
        words.remove(script)
        found[name] = Command(name, script, tuple(words))
    return found


COMMANDS = _commands()
"""By name."""


def words_of(command: Command, root: Path) -> list[str]:
    """The flags of a command, with names of results that only this world knows."""
    if not any("{" in flag for flag in command.flags):
        return list(command.flags)
    out = root / "out"
    found = {k: next((out / k / "scene").glob("sugar*/")).name for k in ("coarse", "refined")}
    found["textured"] = next((out / "refined_mesh" / "scene").glob("sugar*.obj")).name
    return [flag.format(**found) for flag in command.flags]


def run_command(
    command: Command, root: Path, notes: Path, limits: Limits, words: Sequence[str] | None = None
) -> Outcome:
    words = words_of(command, root) if words is None else words
    return run_child(main_of(command.script), words, root, notes, limits, script=command.script)


def warm_up(root: Path, every_command: bool) -> None:
    """Make a world in this process, so that children find loaded what they need.

    Args:
        root: Folder of the world.
        every_command: Run all commands as well, which is worth its time before many cases.
    """
    torch.set_num_threads(1)
    options = pycolmap.MeshSimplificationOptions

    def in_one_thread() -> pycolmap.MeshSimplificationOptions:
        made = options()
        made.num_threads = 1
        return made

    pycolmap.MeshSimplificationOptions = in_one_thread
    make_world(root, run=_run_here)
    load_viser()  # A page served by this process would leave threads behind.
    if not every_command:
        return
    for name, command in COMMANDS.items():
        if name not in RUNS.values() and command.script != "view":
            shutil.rmtree(root / "new", ignore_errors=True)
            _run_here(command, root)


def _run_here(command: Command, root: Path) -> None:
    said, before = io.StringIO(), Path.cwd()
    try:
        os.chdir(root)
        with redirect_stdout(said), redirect_stderr(said):
            code = run_cli(main_of(command.script), *words_of(command, root))
    finally:
        os.chdir(before)
    if code != 0:
        raise RuntimeError(f"{command.name} fails without a fault: {said.getvalue()}")


def make_world(root: Path, run: Callable[[Command, Path], None]) -> None:
    """Write a world; its results work under this path only. ``run`` runs an entry point."""
    tiny = make_tiny_scene(root / "scene", 4, 60)
    make_tiny_checkpoint(root / "vanilla", tiny)
    write_gaussian_ply(root / "cloud.ply", tiny.cloud)
    write_point_ply(root / "points.ply", tiny.points.astype(np.float32), tiny.points_rgb)
    write_mesh_ply(root / "mesh.ply", icosahedron())
    (root / "scenes.json").write_text(json.dumps({"scene": "vanilla"}), encoding="utf-8")
    shutil.copy(root / "vanilla" / "cameras.json", root / "path.json")
    shutil.make_archive(str(root / "zipped"), "zip", root, "scene")
    settings = 'source_path = "scene"\nmodel_path = "new"\niterations = 2\nresolution = 1.0\n'
    (root / "settings.toml").write_text(f"{settings}save_iterations = [1, 2]\n", encoding="utf-8")
    write_masks(root)
    write_text_model(root)
    write_transforms(tiny, root)

    run(COMMANDS["pipeline"], root)
    for folder, name in RUNS.items():
        run(COMMANDS[name], root)
        shutil.copytree(root / folder, root / f"{folder}0")
        _kill_half_way(root / folder)
    write_photographs(root / "room" / "input", 5)
    labels, size = [f"IMG {k}" for k in range(1, 6)], (WIDTH, HEIGHT)
    poses = camera_poses(5)
    (root / "known.xml").write_text(metashape(poses, labels, FOCAL, size), encoding="utf-8")
    run(COMMANDS["convert"], root)
    record = root / "room" / WORK / RECORD
    noted = json.loads(record.read_text(encoding="utf-8"))
    unfinished = {k: v for k, v in noted.items() if k not in ("models", "flattened", "finished")}
    record.write_text(json.dumps(unfinished), encoding="utf-8")
    (root / "exports").mkdir()
    made = [("@refined", "ply", "new0/result"), ("@textured", "obj", "new0/result")]
    for name, to in EXPORTS.items():
        made.append(("@textured" if to == "glb" else "cloud.ply", to, f"exports/{name}"))
    for result, to, output in made:
        flags = (_MACROS.get(result, result), "--to", to, "-o", output)
        run(Command(f"export {output}", "export", flags), root)


def newest_checkpoint(folder: Path) -> Path:
    return max(folder.rglob("*.pt"), key=lambda path: int(path.stem))


def _kill_half_way(folder: Path) -> None:
    """Turn a finished run into one that ended after its last checkpoint but one."""
    newest_checkpoint(folder).unlink()
    for ply in [*folder.rglob("point_cloud.ply"), *folder.glob("*.ply")]:
        ply.unlink()
    path = next(folder.rglob("run.json"))
    record = json.loads(path.read_text(encoding="utf-8")) | {"status": "running"}
    path.write_text(json.dumps(record, indent=2), encoding="utf-8")


def write_masks(root: Path) -> None:
    """An object in the middle of every image."""
    (root / "masks").mkdir()
    for path in sorted((root / "scene" / "images").iterdir()):
        with Image.open(path) as image:
            width, height = image.size
        mask = Image.new("L", (width, height))
        mask.paste(255, (width // 8, height // 8, width - width // 8, height - height // 8))
        mask.save(root / "masks" / f"{path.name}.png")


def write_text_model(root: Path) -> None:
    shutil.copytree(root / "scene" / "images", root / "text" / "images")
    (root / "text" / "sparse" / "0").mkdir(parents=True)
    model = pycolmap.Reconstruction()
    model.read_binary(str(root / "scene" / "sparse" / "0"))
    # Not that of a path, which would need an encoding.
    write_as_text = model.write_text
    write_as_text(str(root / "text" / "sparse" / "0"))


def write_transforms(scene: TinyScene, root: Path) -> None:
    """The views as NeRF-synthetic and instant-ngp write them."""
    frames = []
    for camera in scene.cameras:
        pose = np.eye(4)
        pose[:3, :3] = camera.rotation.T * (1, -1, -1)
        pose[:3, 3] = camera.center
        frames.append((camera.name, pose.tolist()))
        for folder in ("nerf/train", "nerf/test", "ngp/images"):
            (root / folder).mkdir(parents=True, exist_ok=True)
            shutil.copy(camera.image_path, root / folder / camera.name)

    def write(path: str, facts: dict, names: list[str]) -> None:
        both = zip(names, frames, strict=False)
        own = [{"file_path": name, "transform_matrix": pose} for name, (_, pose) in both]
        text = json.dumps({**facts, "frames": own}, indent=1)
        (root / path).write_text(text, encoding="utf-8")

    view = scene.cameras[0]
    angle = {"camera_angle_x": 2 * math.atan(view.width / (2 * view.fx))}
    for part, n in (("train", len(frames)), ("test", 2)):
        names = [f"./{part}/{Path(name).stem}" for name, _ in frames[:n]]
        write(f"nerf/transforms_{part}.json", angle, names)
    lens = {"w": view.width, "h": view.height, "fl_x": view.fx, "fl_y": view.fy}
    lens |= {"cx": view.cx, "cy": view.cy, "k1": 0.0, "camera_model": "OPENCV"}
    lens["ply_file_path"] = "points.ply"
    write("ngp/transforms.json", lens, [f"images/{name}" for name, _ in frames])
    shutil.copy(root / "points.ply", root / "ngp" / "points.ply")


def copy_parts(source: Path, target: Path, parts: Sequence[str]) -> None:
    """Copy parts of a world into an empty folder."""
    for part in dict.fromkeys(parts):
        copy = shutil.copytree if (source / part).is_dir() else shutil.copy
        copy(source / part, target / part)
