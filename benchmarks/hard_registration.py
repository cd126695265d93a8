# SPDX-License-Identifier: Apache-2.0
"""Captures that are hard to register: ``python benchmarks/hard_registration.py FOLDER``.

The knot of the demo on its disc, of which the poses are known: from few sides, with hardly any
texture beside the noise of the sensor, at night, and by day and night; and with ``--faulty SCENE``
every second photograph of a capture, a third of them dark, blurred or pale.
``registration_steps.py`` measures how many photographs each step of the ladder of features
registers, and how well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter, ImageOps

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.colmap import read_reconstruction
from gaussian_splatting.data.color_spaces import light_of_srgb, srgb_of_light
from sugar_pipeline.demo.demo_surface import make_disc, make_knot
from sugar_pipeline.demo.demo_texture import knot_chart, picture, textured_surface
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh
from sugar_utils.entrypoint import run_main
from sugar_utils.errors import UserError
from sugar_utils.files import write_json_atomic
from sugar_utils.flags import Parser

TRUTH = "truth.json"  # by name of the photograph: rotation, (3, 3), and translation, (3,)
WIDTH = 640
HEIGHT = 480
FOCAL = 600.0
DETAIL = 2.0  # of the texture
TARGET = np.array([0.0, 0.0, 0.3])
DISTANCE = 2.0
SWAY = 2.0  # of the elevation, degrees
SEED = 17
READ_NOISE = 0.0015  # standard deviation in linear light, of which 1 saturates
FULL_WELL = 4000.0  # electrons that saturate a pixel

Develop = Callable[[np.ndarray, np.random.Generator], np.ndarray]
"""From linear light, (H, W, 3), to the pixels of a photograph, (H, W, 3) uint8."""


def linear_of(pixels: np.ndarray) -> np.ndarray:
    """Linear light of sRGB pixels. (H, W, 3) uint8 -> float64"""
    return light_of_srgb(pixels / 255)


def srgb_of(linear: np.ndarray) -> np.ndarray:
    """Pixels of linear light. (H, W, 3) -> uint8"""
    return srgb_of_light(linear.clip(0, 1))


def exposed(linear: np.ndarray, light: float, rng: np.random.Generator) -> np.ndarray:
    """Linear light as a sensor counts it: shot noise and read noise."""
    electrons = rng.poisson(FULL_WELL * light * linear)
    return electrons / FULL_WELL + READ_NOISE * rng.normal(size=linear.shape)


def day(linear: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Full light."""
    return srgb_of(exposed(linear, 1.0, rng))


def low_texture(contrast: float) -> Develop:
    """Paint of hardly any contrast, in full light."""

    def develop(linear: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        mean = linear.mean()
        return srgb_of(exposed(mean + contrast * (linear - mean), 1.0, rng))

    return develop


def night(light: float) -> Develop:
    """A share of the light, and no longer exposure."""

    def develop(linear: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return srgb_of(exposed(linear, light, rng))

    return develop


@dataclass(frozen=True)
class Kind:
    """A capture: where it is taken from, and in which light."""

    n_views: int
    elevation: float  # degrees above the disc
    develop: Sequence[Develop]  # of the views, in turns


KINDS = {
    "wide": Kind(10, 18.0, [day]),
    "low_texture": Kind(24, 35.0, [low_texture(0.14)]),
    "night": Kind(24, 35.0, [night(0.01)]),
    "mixed": Kind(24, 35.0, [day, day, night(0.01)]),
}


def camera_at(azimuth: float, elevation: float, name: str) -> Camera:
    """Return a camera that looks at the object, from a direction in degrees."""
    turn = np.radians(azimuth)
    rise = np.radians(elevation)
    level = np.array([np.cos(turn), np.sin(turn), 0.0])
    away = np.cos(rise) * level + [0.0, 0.0, np.sin(rise)]
    right = np.array([-np.sin(turn), np.cos(turn), 0.0])
    rotation = np.stack([right, np.cross(-away, right), -away])
    return Camera(
        name=name,
        width=WIDTH,
        height=HEIGHT,
        fx=FOCAL,
        fy=FOCAL,
        cx=WIDTH / 2,
        cy=HEIGHT / 2,
        rotation=rotation,
        translation=-rotation @ (TARGET + DISTANCE * away),
    )


def cameras_of(kind: Kind) -> list[Camera]:
    """Return cameras around the object, at the same angle from each other."""
    cameras = []
    for number in range(kind.n_views):
        azimuth = 360 / kind.n_views * number + 3
        elevation = kind.elevation + SWAY * np.cos(2 * number)
        cameras.append(camera_at(azimuth, elevation, f"view_{number:02d}.png"))
    return cameras


def write_truth(folder: Path, cameras: Sequence[Camera]) -> None:
    """Write the poses of a capture."""
    poses = {}
    for camera in cameras:
        poses[camera.name] = [camera.rotation.tolist(), camera.translation.tolist()]
    write_json_atomic(folder / TRUTH, poses)


def make_capture(folder: Path, kind: Kind, mesh: TexturedMesh) -> None:
    """Write the photographs of a capture and their poses."""
    (folder / "input").mkdir(parents=True)
    cameras = cameras_of(kind)
    for number, camera in enumerate(cameras):
        rng = np.random.default_rng([SEED, number])
        develop = kind.develop[number % len(kind.develop)]
        pixels = develop(linear_of(picture(mesh, camera)), rng)
        Image.fromarray(pixels).save(folder / "input" / camera.name)
    write_truth(folder, cameras)


def make_faulty_copy(scene: Path, folder: Path) -> None:
    """Copy every second photograph of a capture with poses.

    Every third of them becomes dark, blurred, or pale, in turns.
    """
    (folder / "input").mkdir(parents=True)
    model = read_reconstruction(scene / "sparse" / "0")
    images = sorted((model.images[n] for n in model.reg_image_ids()), key=lambda item: item.name)
    cameras = []
    for number, image in enumerate(images[::2]):
        with Image.open(scene / "images" / image.name) as opened:
            original = opened.convert("RGB")
        rng = np.random.default_rng([SEED, number])
        if number % 3 == 1:
            original = FAULTS[number // 3 % len(FAULTS)](original, rng)
        original.save(folder / "input" / Path(image.name).with_suffix(".png").name)
        pose = image.cam_from_world()
        camera = camera_at(0.0, 0.0, Path(image.name).with_suffix(".png").name)
        moved = replace(camera, rotation=pose.rotation.matrix(), translation=pose.translation)
        cameras.append(moved)
    write_truth(folder, cameras)


def darkened(photograph: Image.Image, rng: np.random.Generator) -> Image.Image:
    """A hundredth of the light."""
    return Image.fromarray(srgb_of(exposed(linear_of(np.asarray(photograph)), 0.01, rng)))


def blurred(photograph: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Out of focus by three pixels."""
    return photograph.filter(ImageFilter.GaussianBlur(3))


def pale(photograph: Image.Image, rng: np.random.Generator) -> Image.Image:
    """A tenth of the contrast, as in haze."""
    return Image.fromarray(low_texture(0.1)(linear_of(np.asarray(photograph)), rng))


def add_foreign(folder: Path, images: Sequence[Path]) -> None:
    """Add photographs of other places, in the size of the others."""
    for number, path in enumerate(images):
        with Image.open(path) as opened:
            cropped = ImageOps.fit(opened.convert("RGB"), (WIDTH, HEIGHT))
        cropped.save(folder / "input" / f"foreign_{number}.png")


FAULTS = (darkened, blurred, pale)


def run(folder: Path, kinds: Sequence[str], faulty: Path | None, foreign: Sequence[Path]) -> None:
    for name in kinds:
        if (folder / name).exists():
            raise UserError(f"{folder / name} exists; choose a new folder")
    knot = make_knot()
    mesh = textured_surface(knot, knot_chart(knot, DETAIL), make_disc(), SEED, DETAIL)
    for name in kinds:
        make_capture(folder / name, KINDS[name], mesh)
        add_foreign(folder / name, foreign)
    if faulty is not None:
        make_faulty_copy(faulty, folder / "faulty")


if __name__ == "__main__":
    flags = Parser(description="Make captures that are hard to register.")
    flags.add_argument("folder", type=Path, metavar="FOLDER", help="of the captures")
    flags.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    flags.add_argument("--faulty", type=Path, help="a capture with poses, to copy with faults")
    flags.add_argument(
        "--foreign", type=Path, nargs="*", default=[], help="photographs of other places, to add"
    )
    args = flags.parse_args()
    sys.exit(run_main(lambda: run(args.folder, args.kinds, args.faulty, args.foreign)))
