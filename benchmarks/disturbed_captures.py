# SPDX-License-Identifier: Apache-2.0
"""Training on disturbed photographs: ``python benchmarks/disturbed_captures.py SCENE --out DIR``.

A scene is copied, and the photographs that are trained on get other tone curves and colour casts,
and a third of them shadows, a third persons in front. Held-out photographs stay as they are. The
vanilla stage is trained on the clean copy and, in several ways, on the disturbed one. Held-out PSNR
is that after a gain and an offset per channel; masks that were found are compared with where the
persons are.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
import numpy as np
from PIL import Image

from benchmarks.faulty_captures import Row, run_logged, score_in
from benchmarks.rasterizer import print_machine, print_table
from gaussian_splatting.formats.ply import read_gaussian_ply
from gaussian_splatting.scenes.scene import TEST_INTERVAL, VanillaSize, load_scene
from sugar_utils.entrypoint import run_main
from sugar_utils.flags import Parser, integer, name_list, positive_float, positive_int
from tests.support.disturbances import occluded, shaded, toned
from tests.support.faulty_captures import view_names

ALL = ("tones", "shadows", "persons")
TRUTH = "truth"  # folder of masks, dark where something is wrong
PERSON = 0
SHADOW = 64


@dataclass(frozen=True)
class Way:
    """A way to train: on which photographs, with which flags."""

    disturbances: tuple[str, ...]
    flags: tuple[str, ...]


WAYS = {
    "clean": Way((), ("--exposure_compensation", "auto", "--transients", "False")),
    "clean with masks": Way((), ("--exposure_compensation", "auto", "--transients", "True")),
    "disturbed": Way(ALL, ("--exposure_compensation", "False", "--transients", "False")),
    "exposures": Way(ALL, ("--exposure_compensation", "True", "--transients", "False")),
    "masks": Way(ALL, ("--exposure_compensation", "False", "--transients", "True")),
    "both": Way(ALL, ("--exposure_compensation", "True", "--transients", "True")),
    "true masks": Way(
        ALL,
        (
            *("--exposure_compensation", "True", "--transients", "False"),
            *("--masks", TRUTH, "--mask_mode", "ignore"),
        ),
    ),
}


def make_capture(source: Path, target: Path, side: int, ways: tuple[str, ...], seed: int) -> None:
    """Write a scene with photographs of at most ``side`` pixels, disturbed where trained on."""
    shutil.rmtree(target, ignore_errors=True)
    for folder in ("images", TRUTH):
        (target / folder).mkdir(parents=True)
    shutil.copytree(source / "sparse", target / "sparse")
    names = view_names(source)
    trained = [index for index in range(len(names)) if index % TEST_INTERVAL]
    choice = np.random.default_rng(seed)
    third = len(trained) // 3
    has_shadow = set(choice.permutation(trained)[:third])
    has_person = set(choice.permutation(trained)[:third])
    for index, name in enumerate(names):
        image = Image.open(source / "images" / name).convert("RGB")
        image.thumbnail((side, side), Image.Resampling.LANCZOS)
        pixels = np.asarray(image) / 255.0
        truth = np.full(pixels.shape[:2], 255, np.uint8)
        rng = np.random.default_rng((seed, index))
        if "shadows" in ways and index in has_shadow:
            pixels, is_dark = shaded(pixels, rng)
            truth[is_dark] = SHADOW
        rng = np.random.default_rng((seed, index, 1))
        if "persons" in ways and index in has_person:
            pixels, is_person = occluded(pixels, rng)
            truth[is_person] = PERSON
        rng = np.random.default_rng((seed, index, 2))
        if "tones" in ways and index % TEST_INTERVAL:
            pixels = toned(pixels, rng)
        values = np.round(255 * pixels).astype(np.uint8)
        Image.fromarray(values).save(target / "images" / name, quality=97)
        Image.fromarray(truth).save(target / TRUTH / f"{name}.png")


def train(capture: Path, out: Path, flags: tuple[str, ...]) -> None:
    """Train the vanilla stage."""
    program = ["gaussian_splatting/train.py", "-s", str(capture), "-m", str(out), "--eval"]
    command = [sys.executable, *program, "--overwrite", "True", *flags]
    code, lines = run_logged(command, out.with_suffix(".log"))
    if code:
        raise SystemExit("\n".join(lines[-20:]))


def measure(capture: Path, out: Path) -> Row:
    """Held-out figures of a model, and how well its masks lie on the persons."""
    scene = load_scene(capture, size_rule=VanillaSize(-1), notify=lambda line: None)
    paths = out.glob("point_cloud/*/point_cloud.ply")
    path = max(paths, key=lambda path: int(path.parent.name.split("_")[1]))
    cloud = read_gaussian_ply(path, lambda line: None).activate()
    result = score_in(scene.test_cameras, cloud, fitted=True)
    row = {"psnr": result.psnr, "fitted": result.fitted_psnr, "gaussians": len(cloud.means)}
    return row | compare_masks(capture, out)


def compare_masks(capture: Path, out: Path) -> Row:
    """Shares of persons, shadows and all other pixels that masks cover."""
    kinds = {"persons": PERSON, "shadows": SHADOW, "wrong": 255}
    n_all = dict.fromkeys(kinds, 0)
    n_masked = dict.fromkeys(kinds, 0)
    folders = sorted(out.glob("point_cloud/*/transient_masks"))
    for truth_path in sorted((capture / TRUTH).glob("*.png")):
        truth = np.asarray(Image.open(truth_path))
        masked = np.zeros(truth.shape, bool)
        path = folders[-1] / truth_path.name if folders else truth_path
        if folders and path.is_file():
            mask = Image.open(path).resize(truth.shape[::-1], Image.Resampling.BOX)
            masked = np.asarray(mask) < 128
        for kind, value in kinds.items():
            n_all[kind] += int((truth == value).sum())
            n_masked[kind] += int((masked & (truth == value)).sum())
    return {kind: n_masked[kind] / max(n_all[kind], 1) for kind in kinds}


def run(args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    rows_path = args.out / "rows.json"
    rows: dict[str, Row] = {}
    for name in args.ways or WAYS:
        way = WAYS[name]
        kinds = tuple(kind for kind in way.disturbances if kind in args.disturbances)
        capture = args.out / ("_".join(kinds) or "clean")
        if not capture.is_dir():
            make_capture(args.scene, capture, args.side, kinds, args.seed)
        out = args.out / f"run_{name.replace(' ', '_').replace(',', '')}"
        shutil.rmtree(out, ignore_errors=True)
        start = time.monotonic()
        iterations = round(7_000 * args.schedule_scale)
        schedule = ("--preset", "fast", "--schedule_scale", str(args.schedule_scale))
        limits = ("--iterations", str(iterations), "--max_gaussians", str(args.max_gaussians))
        train(capture, out, (*schedule, *limits, *way.flags, *args.flags))
        rows[name] = measure(capture, out) | {"seconds": time.monotonic() - start}
        print(name, rows[name], flush=True)
        rows_path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print_machine()
    cells = []
    for name, row in rows.items():
        shares = [f"{row[key]:.1%}" for key in ("persons", "shadows", "wrong")]
        figures = [f"{row['fitted']:.2f}", f"{row['psnr']:.2f}"]
        cells.append([name, *figures, *shares, f"{row['gaussians']}", f"{row['seconds']:.0f}"])
    headings = ["way", "PSNR after gain and offset", "PSNR"]
    print_table([*headings, "persons", "shadows", "wrong", "Gaussians", "seconds"], cells)


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scene", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ways", type=name_list, default=(), help="separated by commas")
    parser.add_argument("--disturbances", type=name_list, default=ALL)
    parser.add_argument("--side", type=positive_int, default=320, help="longest, pixels")
    parser.add_argument("--schedule_scale", type=positive_float, default=0.2)
    parser.add_argument("--max_gaussians", type=positive_int, default=30_000)
    parser.add_argument("--seed", type=integer, default=0)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="of the trainer")
    run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(run_main(main))
