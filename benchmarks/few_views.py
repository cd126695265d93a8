# SPDX-License-Identifier: Apache-2.0
"""Reference and robust vanilla training on few photographs: ``python benchmarks/few_views.py``.

Of a scene with a COLMAP model some photographs, evenly spaced by name, are trained on and the
others held out, at the same budget and seed for every variant. Points that fewer than two of the
training photographs observe are left out, as a reconstruction of those photographs would not have
them. Variants are ``reference``, ``robust`` and its parts ``shell`` and ``dense``, ``exposure``, or
several joined by ``+``.

Shown are the PSNR of held-out views, that of training views beside it, and the share of held-out
pixels in front of every point that their photograph observes. Look at ``views.png`` of each run
before believing them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
import numpy as np
from torch import Tensor

from benchmarks.rasterizer import print_machine, print_table
from gaussian_splatting.data.cameras import Camera, camera_extent
from gaussian_splatting.data.image_sizes import VanillaSize
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.data.masks import NONE, MaskOptions
from gaussian_splatting.data.ply import read_gaussian_ply
from gaussian_splatting.data.reference_layout import point_cloud_path
from gaussian_splatting.data.scene import Scene, load_scene
from gaussian_splatting.engine.rendering import render_view
from gaussian_splatting.engine.reporting.evaluation import evaluate
from gaussian_splatting.engine.reporting.view_findings import FITTED
from gaussian_splatting.optim.densification import DensificationConfig
from gaussian_splatting.optim.learned_exposure import ExposureConfig
from gaussian_splatting.vanilla import vanilla_run
from gaussian_splatting.vanilla.robust import RobustConfig
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_run import CHECKPOINT_FOLDER, VanillaOptions, train_vanilla
from sugar_utils.errors import UserError
from sugar_utils.flags import Parser, integer, positive_float, positive_int
from sugar_utils.frame import run_main

MIN_OBSERVERS = 2
REFERENCE_LENGTH = 7_000
"""Iterations that the schedule is made for; a shorter run scales it."""


def variant(name: str) -> VanillaConfig:
    """Settings by name.

    Raises:
        UserError: It is unknown.
    """
    parts = set(name.split("+"))
    if not parts <= {"reference", "robust", "shell", "dense", "exposure"}:
        raise UserError(
            f"--variants {name}: reference, robust, shell, dense or exposure, joined by +"
        )
    return VanillaConfig(
        robustness=RobustConfig(robust=bool(parts & {"robust", "shell"})),
        init="dense" if parts & {"robust", "dense"} else "sparse",
        exposure=ExposureConfig("exposure" in parts),
    )


def with_few(scene: Scene, n_training: int) -> Scene:
    """The scene with this many training photographs and all others held out; 0 leaves it."""
    if n_training == 0:
        return scene
    sized = sorted([*scene.train_cameras, *scene.test_cameras], key=lambda c: c.name)
    chosen = {sized[i].name for i in np.linspace(0, len(sized) - 1, n_training).round().astype(int)}

    def split(cameras: list, wanted: bool) -> list:
        return [c for c in cameras if (c.name in chosen) == wanted]

    full = sorted(
        [*scene.original_train_cameras, *scene.original_test_cameras], key=lambda c: c.name
    )
    observers = np.zeros(len(scene.points), dtype=int)
    for name in chosen & scene.observations.rows.keys():
        observers[scene.observations.rows[name]] += 1
    seen = observers >= MIN_OBSERVERS
    return replace(
        scene,
        train_cameras=split(sized, True),
        test_cameras=split(sized, False),
        original_train_cameras=split(full, True),
        original_test_cameras=split(full, False),
        points=scene.points[seen],
        points_rgb=scene.points_rgb[seen],
        extent=camera_extent(split(sized, True)),
        description=f"{n_training} of {len(sized)} photographs, {int(seen.sum())} points",
    )


def train(args: argparse.Namespace, scene: Path, n_training: int, name: str) -> dict[str, float]:
    """One run; returns what it found."""
    scale = args.iterations / REFERENCE_LENGTH
    config = replace(
        variant(name),
        iterations=args.iterations,
        random_seed=args.seed,
        densification=DensificationConfig(max_gaussians=args.max_gaussians),
    ).with_schedule(scale)
    # Resets need some hundred iterations to recover from, whatever the length of the run.
    rules = replace(config.densification, opacity_reset_interval=10 * args.iterations,
                    densification_interval=50)  # fmt: skip
    folder = args.output / f"{scene.name}_{n_training or 'all'}_{name}_{args.seed}"
    options = VanillaOptions(
        source_path=scene,
        model_path=folder,
        resolution=args.resolution,
        mask_options=MaskOptions(args.masks),
        eval=True,
        config=replace(config, densification=rules),
        checkpoint_interval=None,
        test_iterations=(),
        save_iterations=(),
    )

    def load(root: Path, **more) -> Scene:
        given = {"size_rule": VanillaSize(args.resolution), "masks": MaskOptions(args.masks)}
        return with_few(load_scene(root, **{**more, **given}), n_training)

    start = time.perf_counter()
    with patch.object(vanilla_run, "load_scene", load):
        train_vanilla(options)
    record = json.loads((folder / CHECKPOINT_FOLDER / "run.json").read_text(encoding="utf-8"))
    seconds = time.perf_counter() - start
    return {**record["figures"], FITTED: fitted_psnr(options, load(scene)), "seconds": seconds}


def fitted_psnr(options: VanillaOptions, scene: Scene) -> float:
    """Held-out PSNR after gain and offset, whether exposures were learned or not."""
    path = point_cloud_path(options.model_path, options.config.iterations)
    gaussians = read_gaussian_ply(path).activate()

    def render(camera: Camera) -> Tensor:
        return render_view(gaussians, camera, white=False, geometry=False).image

    with ImageStore() as images:
        return evaluate(
            render, scene.test_cameras, images.shown, quantise=True, fitted=True
        ).fitted_psnr


def run(args: argparse.Namespace) -> None:
    """Train, and print one table."""
    print_machine()
    rows, shown = [], _shown()
    for case in args.cases:
        path, _, number = case.partition(":")
        for name in args.variants:
            figures = train(args, Path(path), int(number or 0), name)
            rows.append([
                Path(path).name, number or "all", name,
                *(form(figures.get(key)) for key, form in shown.items()),
            ])  # fmt: skip
    titles = ["scene", "photographs", "variant", *shown]
    print()
    print_table(titles, rows)


def _shown() -> dict[str, Callable[[float | None], str]]:
    def decibels(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    def share(value: float | None) -> str:
        return "" if value is None else f"{value:.2%}"

    return {
        "held-out PSNR": decibels,
        FITTED: decibels,
        "held-out psnr in masks": decibels,
        "training PSNR": decibels,
        "fog share": share,
        "seconds": lambda value: f"{value:.0f}",
    }


def parser() -> Parser:
    """The flags."""
    flags = Parser(
        description="Train on few photographs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = flags.add_argument
    add("cases", nargs="+", metavar="SCENE[:N]", help="scene folder, training photographs")
    add("--variants", nargs="+", default=["reference", "robust"], help="what to compare")
    add("--iterations", type=positive_int, default=2_000, help="length of each run")
    add("--resolution", type=positive_float, default=2.0, help="as -r of the trainer")
    add("--max_gaussians", type=positive_int, default=20_000, help="most Gaussians of a run")
    add("--masks", default=NONE, help="as --masks of the trainer")
    add("--seed", type=integer, default=0, help="random seed")
    add("--output", type=Path, default=Path(tempfile.gettempdir()) / "few_views", help="folder")
    return flags


if __name__ == "__main__":
    sys.exit(run_main(lambda: run(parser().parse_args())))
