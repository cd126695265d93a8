# SPDX-License-Identifier: Apache-2.0
"""Captures whose models may split: ``python benchmarks/split_captures.py FOLDER``.

Two rooms that four photographs through a door join, without and with walls that look alike; a walk
around a house whose last photographs alone show its beginning again; and a dark figure on black, in
masks, with four photographs from above. All poses are known. Each capture is made once, registered
without poses, and what is printed is how many photographs the largest model has, and the errors of
its poses.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
import torch

from benchmarks.rasterizer import print_machine, print_table
from benchmarks.town_scene import N_PATCHES, camera_at, painted, turn_about_z
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.colmap import read_reconstruction
from gaussian_splatting.data.color_spaces import srgb_of_light
from sugar_capture.conversion.convert_run import convert
from sugar_capture.convert_options import ConvertOptions, PoseTimeLimit
from sugar_pipeline.demo.demo_paint import make_noise
from sugar_pipeline.demo.demo_texture import picture
from sugar_pipeline.pipeline.plan import MOST_POSE_SHARE, POSE_SHARE
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh, render_colored
from sugar_scene.triangle_mesh import TriangleMesh, read_mesh_ply, vertex_normals
from sugar_utils.entrypoint import run_main
from sugar_utils.errors import UserError
from sugar_utils.flags import Parser, positive_float
from tests.support.pose_errors import pose_errors

REPOSITORY = Path(__file__).resolve().parent.parent
FOCAL = 0.8  # in image widths
CELL = 0.5  # side of the quadrangles that a wall is painted in, world units
PART = 0.96  # used share of the side of a part of the texture
SEED = 5
PAINT = 0.22  # contrast of the figure's paint
EXPOSURE = 0.11  # share of the light of a good exposure
FULL_WELL = 8000.0  # electrons that saturate a pixel
READ_NOISE = 0.001  # standard deviation, in linear light of which 1 saturates


@dataclass(frozen=True)
class Capture:
    """A capture: from where it is taken, and how one of its views becomes a file."""

    cameras: list[Camera]
    write: Callable[[Path, list[Camera]], None]


def view_at(number: int, center: np.ndarray, target: np.ndarray, width: int) -> Camera:
    """Return the camera of a photograph that looks at a target."""
    return camera_at(f"view_{number:03d}.jpg", center, target, width, FOCAL)


def rectangle(corner: np.ndarray, across: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Divide a rectangle into quadrangles of about CELL. (Q, 4, 3)"""
    n_across, n_up = (max(1, round(np.linalg.norm(side) / CELL)) for side in (across, up))
    i, j = np.indices((n_across, n_up)).reshape(2, -1, 1)
    steps = [(i, j), (i + 1, j), (i + 1, j + 1), (i, j + 1)]
    corners = [corner + a / n_across * across + b / n_up * up for a, b in steps]
    return np.stack(corners, axis=1)


def box(low: tuple[float, float, float], high: tuple[float, float, float]) -> np.ndarray:
    """Return the sides and the top of a box. (Q, 4, 3)"""
    x, y, z = np.diag(np.subtract(high, low))
    base = np.array(low)
    return np.concatenate(
        [
            rectangle(base, x, z),
            rectangle(base + x, y, z),
            rectangle(base + x + y, -x, z),
            rectangle(base + y, -y, z),
            rectangle(base + z, x, y),
        ]
    )


def two_rooms() -> np.ndarray:
    """Return two rooms with furniture, joined by a door. (Q, 4, 3)"""
    x, y, z = np.eye(3)
    height = 1.3
    parts = [
        rectangle(np.array([-2.0, -1.0, 0.0]), 4 * x, 2 * y),
        rectangle(np.array([-2.0, -1.0, height]), 4 * x, 2 * y),
        rectangle(np.array([-2.0, -1.0, 0.0]), 4 * x, height * z),
        rectangle(np.array([-2.0, 1.0, 0.0]), 4 * x, height * z),
        rectangle(np.array([-2.0, -1.0, 0.0]), 2 * y, height * z),
        rectangle(np.array([2.0, -1.0, 0.0]), 2 * y, height * z),
        # The wall between them, on both sides of the door and above it.
        box((-0.06, -1.0, 0.0), (0.06, -0.25, height)),
        box((-0.06, 0.25, 0.0), (0.06, 1.0, height)),
        rectangle(np.array([-0.06, -0.25, 1.0]), 0.5 * y, 0.3 * z),
        rectangle(np.array([0.06, -0.25, 1.0]), 0.5 * y, 0.3 * z),
    ]
    parts += [box((-1.95, 0.5, 0.0), (-1.5, 0.95, 0.5)), box((-0.6, -0.95, 0.0), (-0.2, -0.6, 0.7))]
    parts += [box((1.4, -0.95, 0.0), (1.95, -0.6, 0.4)), box((0.3, 0.6, 0.0), (0.7, 0.95, 0.5))]
    return np.concatenate(parts)


def cameras_of_rooms() -> list[Camera]:
    """Return 21 views across each room, and four from the first one through the door."""
    places = []
    for middle in (-1.0, 1.0):
        for angle in np.arange(28) * 2 * np.pi / 28:
            side = np.array([np.cos(angle), np.sin(angle), 0.0])
            if middle * side[0] > 0.75:
                continue  # It would look through the door.
            center = np.array([middle, 0.0, 0.65 + 0.1 * np.sin(3 * angle)]) + 0.7 * side
            places.append((center, np.array([middle, 0.0, 0.6]) - 0.3 * side))
        if middle < 0:
            for x in (-0.9, -0.5, -0.15, 0.2):
                center = np.array([x, 0.1 * np.sin(20 * x), 0.65])
                places.append((center, center + [1.0, 0.1 * np.cos(9 * x), -0.05]))
    return [view_at(k, *place, width=480) for k, place in enumerate(places)]


def house() -> np.ndarray:
    """Return a house with pillars on ground. (Q, 4, 3)"""
    x, y, _ = np.eye(3)
    parts = [rectangle(np.array([-3.0, -3.0, 0.0]), 6 * x, 6 * y)]
    parts.append(box((-1.5, -1.5, 0.0), (1.5, 1.5, 1.3)))
    rng = np.random.default_rng(SEED)
    for along in np.arange(-1.4, 1.5, 0.4):
        for side in range(4):
            deep, high = rng.uniform(0.05, 0.25), rng.uniform(0.2, 1.2)
            low, top = np.array([along, -1.5 - deep, 0.0]), np.array([along + 0.15, -1.5, high])
            pillar = box(tuple(low), tuple(top))
            parts.append(pillar @ turn_about_z(np.pi / 2 * side).T)
    return np.concatenate(parts)


def cameras_of_walk() -> list[Camera]:
    """Return 48 views of a walk around the house, each of which shows a part of one side or two."""
    half, distance = 1.5, 1.1
    length = 8 * half + 2 * np.pi * distance
    cameras = []
    for number in range(48):
        side, rest = divmod(length * number / 48, length / 4)
        along = min(rest, 2 * half) - half
        bend = max(0.0, rest - 2 * half) / distance
        toward = np.array([-np.sin(bend), np.cos(bend), 0.0])
        center = np.array([along, -half, 0.6 + 0.1 * np.sin(number)]) - distance * toward
        target = center + toward + [0.1 * np.sin(2.0 * number), 0.0, -0.1]
        turn = turn_about_z(np.pi / 2 * side)
        cameras.append(view_at(number, turn @ center, turn @ target, width=480))
    return cameras


def differently_painted(quads: np.ndarray) -> TexturedMesh:
    """Give every quadrangle a part of the texture that no other one has."""
    mesh = painted(quads)
    n_sides = 3 * N_PATCHES  # parts of the texture along each of its sides
    places = np.random.default_rng(SEED).permutation(n_sides**2)[: len(quads)]
    uvs = mesh.uvs.reshape(len(quads), 6, 2)
    low = uvs.min(dim=1, keepdim=True).values
    span = (uvs - low).amax(dim=(1, 2), keepdim=True)
    scale = (PART / n_sides / span).clamp_max(1.0)
    corner = torch.from_numpy(np.stack(np.divmod(places, n_sides), axis=1) / n_sides).float()
    return replace(mesh, uvs=(corner[:, None] + scale * (uvs - low)).reshape(-1, 3, 2))


def write_painted(
    quads: np.ndarray, paint: Callable[[np.ndarray], TexturedMesh]
) -> Callable[[Path, list[Camera]], None]:
    """Return what writes photographs of painted quadrangles."""

    def write(folder: Path, cameras: list[Camera]) -> None:
        mesh = paint(quads)
        for camera in cameras:
            Image.fromarray(picture(mesh, camera)).save(folder / "input" / camera.name, quality=95)

    return write


def cameras_of_figure() -> list[Camera]:
    """Return 36 views around the figure, and four from above."""
    directions = [(10.0 * k, 15.0 + 5 * np.cos(2.0 * k)) for k in range(36)]
    directions += [(90.0 * k + 20, 70.0) for k in range(4)]
    cameras = []
    for number, (azimuth, elevation) in enumerate(directions):
        a, e = np.radians([azimuth, elevation])
        away = np.array([np.cos(a) * np.cos(e), np.sin(a) * np.cos(e), np.sin(e)])
        target = np.array([0.0, 0.0, 0.45])
        cameras.append(view_at(number, target + 1.5 * away, target, width=960))
    return cameras


def figure_colors(mesh: TriangleMesh) -> torch.Tensor:
    """Return linear light of the vertices: paint of little contrast, under a lamp. (V, 3)"""
    points = torch.from_numpy(mesh.vertices).float()
    normals = torch.from_numpy(vertex_normals(mesh)).float()
    noise = make_noise(SEED)
    paint = torch.full((len(points), 1), 0.5)
    for k in range(5):
        paint += PAINT * 0.9**k * noise(12 * 2.0**k * points)
    lamp = torch.nn.functional.normalize(torch.tensor([0.4, -0.5, 0.8]), dim=0)
    light = 0.4 + 0.6 * (normals @ lamp).clamp_min(0)
    return paint.clamp_min(0.03) * light[:, None] * torch.tensor([1.0, 0.9, 0.75])


def write_figure(folder: Path, cameras: list[Camera]) -> None:
    """Write dark photographs of a figure on black, and their masks."""
    path = Path(os.environ.get("SUGAR_SCENES", ".")) / "spot" / "gt_object.ply"
    if not path.is_file():
        raise UserError(f"{path}: not found; name the folder of scenes by SUGAR_SCENES")
    mesh = read_mesh_ply(path)
    colors = figure_colors(mesh)
    faces = torch.from_numpy(mesh.faces)
    vertices = torch.from_numpy(mesh.vertices).float()

    def colors_at(rows: torch.Tensor, barycentrics: torch.Tensor) -> torch.Tensor:
        return (barycentrics[..., None] * colors[faces[rows]]).sum(dim=1)

    (folder / "masks").mkdir()
    for number, camera in enumerate(cameras):
        fine = camera.resized(2 * camera.width, 2 * camera.height)
        rendered = render_colored(vertices, faces, fine, colors_at)
        shape = (camera.height, 2, camera.width, 2, -1)
        light = EXPOSURE * rendered.image.reshape(shape).mean(dim=(1, 3)).numpy()
        covered = rendered.covered.float().reshape(shape).mean(dim=(1, 3))[..., 0].numpy()
        rng = np.random.default_rng([SEED, number])
        counted = rng.poisson(FULL_WELL * light) / FULL_WELL
        counted += READ_NOISE * rng.normal(size=light.shape)
        pixels = srgb_of_light(counted.clip(0, 1))
        Image.fromarray(pixels).save(folder / "input" / camera.name, quality=95)
        mask = (255 * (covered > 0.5)).astype(np.uint8)
        Image.fromarray(mask).save(folder / "masks" / f"{Path(camera.name).stem}.png")


CAPTURES = {
    "rooms": Capture(cameras_of_rooms(), write_painted(two_rooms(), differently_painted)),
    "alike_rooms": Capture(cameras_of_rooms(), write_painted(two_rooms(), painted)),
    "walk": Capture(cameras_of_walk(), write_painted(house(), painted)),
    "figure": Capture(cameras_of_figure(), write_figure),
}


def made(folder: Path, name: str) -> Path:
    """Return the folder of a capture, which is made where it is missing."""
    target = folder / name
    if not target.is_dir():
        scratch = folder / f"{name}_unfinished"
        shutil.rmtree(scratch, ignore_errors=True)
        (scratch / "input").mkdir(parents=True)
        capture = CAPTURES[name]
        capture.write(scratch, capture.cameras)
        scratch.rename(target)
    return target


def register(scene: Path, args: argparse.Namespace) -> None:
    """Find the poses of a scene; with ``--minutes`` in the share of a run that they have."""
    if args.minutes is not None:
        seconds = 60 * args.minutes
        limit = PoseTimeLimit(POSE_SHARE * seconds, MOST_POSE_SHARE * seconds, seconds)
        convert(ConvertOptions(scene, time_limit=limit))
        return
    program = args.checkout / "gaussian_splatting" / "convert.py"
    command = [sys.executable, str(program), "-s", str(scene), *args.flags]
    subprocess.run(command, cwd=args.checkout)


def measure(scene: Path, known: dict[str, Camera]) -> list[str]:
    """Return how many photographs are registered, and the errors of their poses."""
    folder = scene / "sparse" / "0"
    if not folder.is_dir():
        return ["none", "", "", "", ""]
    model = read_reconstruction(folder)
    found = {}
    for number in model.reg_image_ids():
        image = model.images[number]
        pose = image.cam_from_world()
        name = Path(image.name).stem
        found[name] = replace(
            known[name], rotation=pose.rotation.matrix(), translation=pose.translation
        )
    errors = pose_errors(found, known)
    cells = [f"{len(found)} of {len(known)}"]
    for values, unit in ((errors.rotation, " degrees"), (errors.position, " %")):
        cells += [f"{np.median(values):.3f}{unit}", f"{values.max():.3f}{unit}"]
    return cells


def run(args: argparse.Namespace) -> None:
    rows = []
    for name in args.captures:
        scene = args.folder / f"{name}_scene"
        shutil.rmtree(scene, ignore_errors=True)
        shutil.copytree(made(args.folder, name), scene)
        start = time.monotonic()
        register(scene, args)
        seconds = time.monotonic() - start
        known = {Path(camera.name).stem: camera for camera in CAPTURES[name].cameras}
        rows.append([name, *measure(scene, known), f"{seconds:.0f}"])
    print_machine()
    headings = ["registered", "rotation, median", "at most", "position, median", "at most"]
    print_table(["capture", *headings, "seconds"], rows)


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the captures and what is made of them")
    parser.add_argument("--captures", nargs="*", choices=list(CAPTURES), default=list(CAPTURES))
    parser.add_argument("--checkout", type=Path, default=REPOSITORY, help="whose convert.py runs")
    parser.add_argument("--minutes", type=positive_float, help="of the whole run, as --minutes")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="of convert.py")
    run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(run_main(main))
