# SPDX-License-Identifier: Apache-2.0
"""How well ``convert.py`` finds cameras that are known, in which time and memory.

``python benchmarks/convert.py SCENE ... [--case photographs|video|masks]`` copies the photographs
of COLMAP scenes into a bare folder, or makes a video of them (H.264, one frame per photograph),
finds the cameras anew, and compares them with those of the scene after the best similarity
transform. With the case masks, ``--widen 24`` grows their white part by so many pixels.

Positions are in % of the extent of the known cameras (1.1 times the largest distance from their
mean), rotations in degrees.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from PIL import Image, ImageFilter

from benchmarks.published.similarity import best_similarity
from gaussian_splatting.data.cameras import Camera, camera_extent
from gaussian_splatting.data.colmap import find_model, read_colmap
from gaussian_splatting.data.images import ImageFolder
from gaussian_splatting.data.masks import MaskOptions
from gaussian_splatting.posing.convert_options import (
    ConvertOptions,
    PosingOptions,
    auto_or_boolean,
)
from gaussian_splatting.posing.convert_run import Converted, convert
from gaussian_splatting.posing.photographs import natural_order
from sugar_pipeline.filming.film_files import write_video
from sugar_utils.console import Console
from sugar_utils.memory import format_bytes

CASES = ("photographs", "video", "masks")
FRAMES_PER_SECOND = 10
_HEADER = ("case", "placed", "rotation median", "max", "position median", "max", "error px",
           "points", "time", "peak memory")  # fmt: skip


@dataclass(frozen=True)
class Errors:
    """How far found cameras are from known ones.

    Attributes:
        rotation: Degrees. (N,)
        position: Percent of the extent of the known cameras. (N,)
    """

    rotation: np.ndarray
    position: np.ndarray


def cameras_of(root: Path) -> dict[str, Camera]:
    """Cameras of a COLMAP scene by the stems of their names."""
    model = read_colmap(
        find_model(root), ImageFolder(root / "images"), missing_ok=True, notify=lambda _: None
    )
    return {Path(camera.name).stem: camera for camera in model.cameras}


def pose_errors(found: dict[str, Camera], known: dict[str, Camera]) -> Errors:
    """Errors of found cameras after the similarity that brings their centres together best."""
    names = sorted(set(found) & set(known))
    a = np.stack([found[name].center for name in names])
    b = np.stack([known[name].center for name in names])
    found_to_known = best_similarity(a, b)
    rotation, moved = found_to_known.rotation, found_to_known.apply(a)
    extent = camera_extent([known[name] for name in names])
    angles = []
    for name in names:
        turned = found[name].rotation @ rotation.T @ known[name].rotation.T
        angles.append(np.degrees(np.arccos(np.clip((np.trace(turned) - 1) / 2, -1, 1))))
    return Errors(np.array(angles), 100 * np.linalg.norm(moved - b, axis=1) / extent)


def read_picture(path: Path) -> np.ndarray:
    """A photograph. (H, W, 3) uint8"""
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"))


def copy_masks(source: Path, target: Path, widened: int) -> None:
    """Copy masks, the part that counts grown by so many pixels on all sides."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        with Image.open(path) as mask:
            wide = mask.convert("L").filter(ImageFilter.MaxFilter(2 * widened + 1))
        wide.save(target / path.name)


def run_case(scene: Path, case: str, folder: Path, args: argparse.Namespace) -> list[str]:
    """One row of the table."""
    files = sorted((scene / "images").iterdir(), key=lambda path: natural_order(path.name))
    target = folder / f"{scene.name}_{case}"
    source = target
    if case == "video":
        source = target.with_suffix(".mp4")
        write_video(source, map(read_picture, files), FRAMES_PER_SECOND)
    else:
        shutil.copytree(scene / "images", target / "images")
    if case == "masks":
        copy_masks(scene / "masks", target / "masks", args.widen)
    options = ConvertOptions(
        source,
        posing=PosingOptions(
            camera=args.camera,
            matcher=args.matcher,
            mapper=args.mapper,
            masked_features=args.masked_features,
        ),
        masks=MaskOptions(masks=None if case == "masks" else "none"),
    )
    result = convert(options, Console())
    found = cameras_of(result.root)
    if case == "video":
        found = {files[int(name.rpartition("_")[2])].stem: c for name, c in found.items()}
    return row(f"{scene.name}, {case}", result, pose_errors(found, cameras_of(scene)))


def row(title: str, result: Converted, errors: Errors) -> list[str]:
    """The figures of one case."""
    return [
        title,
        f"{result.n_registered} of {result.n_photographs}",
        f"{np.median(errors.rotation):.3f}",
        f"{errors.rotation.max():.3f}",
        f"{np.median(errors.position):.3f} %",
        f"{errors.position.max():.3f} %",
        f"{result.reprojection_error:.2f}",
        f"{result.n_points:,}",
        f"{result.seconds:.0f} s",
        format_bytes(result.peak_bytes),
    ]


def main() -> None:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenes", nargs="+", type=Path)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--camera")
    parser.add_argument("--matcher", default="auto")
    parser.add_argument("--mapper", default="auto")
    parser.add_argument("--masked_features", type=auto_or_boolean, default="auto")
    parser.add_argument("--widen", type=int, default=0, help="pixels to grow the masks by")
    parser.add_argument("--keep", type=Path, help="folder to leave the scenes in")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        rows = [
            run_case(scene, case, folder, args)
            for scene in args.scenes
            for case in args.case or ["photographs"]
        ]
    print(f"| {' | '.join(_HEADER)} |\n|{' --- |' * len(_HEADER)}")
    for cells in rows:
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
