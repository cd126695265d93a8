# SPDX-License-Identifier: Apache-2.0
"""Seconds of vanilla training to a quality, variants beside each other.

``python benchmarks/vanilla_speed.py SCENE`` trains variants in turns, in one process, with the same
seed; a round of few iterations before them compiles the kernels. The clock stands still while
held-out views are measured, every few hundred iterations. Shown are the figures at the end, and the
CPU seconds, of all threads, at which the PSNR of ``--targets`` and that of the reference's end were
reached, between two measurements in proportion. Variants are ``reference``, ``scored``,
``growing``, ``dense``, ``robust``, several of these joined by ``+``, or ``fast``, which is what
``--preset`` makes of the scene; ``:N`` gives one another length.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
from benchmarks.rasterizer import print_machine, print_table
from gaussian_splatting.engine import loop
from gaussian_splatting.engine.reporting.progress import Reporter
from gaussian_splatting.optim.densification import DensificationConfig
from gaussian_splatting.optim.schedule import LearningRates
from gaussian_splatting.vanilla.footprints import ScoreConfig
from gaussian_splatting.vanilla.growing_resolution import GrowthConfig
from gaussian_splatting.vanilla.robust import RobustConfig
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_run import VanillaOptions, train_vanilla
from sugar_utils.errors import UserError
from sugar_utils.flags import Parser, integer, positive_float, positive_int
from sugar_utils.frame import run_main

PARTS = {"reference", "scored", "growing", "dense", "robust", "fast"}
VARIANTS = ["reference", "fast", "scored", "scored+growing", "robust"]


@dataclass(frozen=True)
class Moment:
    """A run when its held-out views were measured."""

    iteration: int
    psnr: float
    ssim: float
    gaussians: int
    cpu: float
    wall: float


@dataclass
class Clock:
    """Seconds of this process but for those that :meth:`stopped` spends."""

    cpu: float = field(default_factory=lambda: -time.process_time())
    wall: float = field(default_factory=lambda: -time.perf_counter())

    def read(self) -> tuple[float, float]:
        """CPU and wall seconds so far."""
        return self.cpu + time.process_time(), self.wall + time.perf_counter()

    def stopped(self, work: Callable[[], object]) -> None:
        """Do what does not count."""
        cpu, wall = self.read()
        work()
        after_cpu, after_wall = self.read()
        self.cpu -= after_cpu - cpu
        self.wall -= after_wall - wall


def variant(name: str, iterations: int) -> VanillaConfig:
    """Settings by name, on a schedule of this length.

    Raises:
        UserError: It is unknown.
    """
    parts = set(name.split("+"))
    if not parts <= PARTS:
        raise UserError(f"--variants {name}: {', '.join(sorted(PARTS))}, joined by +")
    return VanillaConfig(
        preset="fast" if "fast" in parts else "reference",
        iterations=iterations,
        rates=LearningRates(position_lr_max_steps=iterations),
        densification=DensificationConfig(
            densify_from_iter=iterations // 10,
            densify_until_iter=iterations * 3 // 4,
            densification_interval=50 if iterations <= 1_000 else 100,
        ),
        scoring=ScoreConfig("scored" if "scored" in parts else None),
        growth=GrowthConfig("growing" in parts or None),
        init="dense" if "dense" in parts else None,
        robustness=RobustConfig("robust" in parts or None),
    )


def train(
    scene: Path, config: VanillaConfig, folder: Path, resolution: float, every: int
) -> list[Moment]:
    """One run, measured every so many iterations."""
    options = VanillaOptions(
        source_path=scene,
        model_path=folder,
        resolution=resolution,
        eval=True,
        config=config,
        checkpoint_interval=None,
        test_iterations=tuple(range(every, config.iterations, every)),
        save_iterations=(),
    )
    moments: list[Moment] = []
    clock = Clock()

    class Watched(Reporter):
        def evaluate(self, iteration, images) -> None:
            cpu, wall = clock.read()
            clock.stopped(lambda: super(Watched, self).evaluate(iteration, images))
            psnr, ssim = self.figures["held-out PSNR"], self.figures["held-out SSIM"]
            moments.append(Moment(iteration, psnr, ssim, len(self._stage.model), cpu, wall))

        def write_pictures(self, path) -> None:
            clock.stopped(lambda: super(Watched, self).write_pictures(path))

    with patch.object(loop, "Reporter", Watched):
        train_vanilla(options)
    return moments


def seconds_to(moments: Sequence[Moment], psnr: float) -> float | None:
    """CPU seconds at which a PSNR was first reached; None if it never was."""
    for before, after in pairwise(moments):
        if after.psnr >= psnr > before.psnr:
            share = (psnr - before.psnr) / (after.psnr - before.psnr)
            return before.cpu + share * (after.cpu - before.cpu)
    return None


def run(args: argparse.Namespace) -> None:
    """Train, and print a table for each scene."""
    print_machine()
    for scene in args.scenes:
        runs: dict[str, list[Moment]] = {}
        for name in ["reference:10", *args.variants]:
            parts, _, length = name.partition(":")
            iterations = int(length or args.iterations)
            config = replace(variant(parts, iterations), random_seed=args.seed)
            folder = args.output / f"{scene.name}_{name.replace(':', '_')}"
            shutil.rmtree(folder, ignore_errors=True)
            runs[name] = train(scene, config, folder, args.resolution, args.every)
            # A long comparison may be stopped before its table.
            print(f"{name}: {runs[name]}", flush=True)
        del runs["reference:10"]
        print(f"\n{scene.name}, --resolution {args.resolution:g}\n")
        print_table(*_table(runs, args.targets))


def _table(
    runs: dict[str, list[Moment]], targets: Sequence[float]
) -> tuple[list[str], list[list[str]]]:
    """Titles and rows."""
    first = next(iter(runs.values()))
    wanted = [*targets, first[-1].psnr]
    titles = ["variant", "iterations", "PSNR", "SSIM", "Gaussians", "CPU s", "wall s",
              *(f"CPU s to {psnr:.2f} dB" for psnr in wanted)]  # fmt: skip
    rows = []
    for name, moments in runs.items():
        end = moments[-1]
        reached = [seconds_to(moments, psnr) for psnr in wanted]
        rows.append([
            name.partition(":")[0], str(end.iteration), f"{end.psnr:.2f} dB", f"{end.ssim:.3f}",
            f"{end.gaussians:,}", f"{end.cpu:.0f}", f"{end.wall:.0f}",
            *("" if one is None else f"{one:.0f}" for one in reached),
        ])  # fmt: skip
    return titles, rows


def parser() -> Parser:
    """The flags."""
    flags = Parser(
        description="Train to a quality, variants beside each other.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = flags.add_argument
    add("scenes", nargs="+", type=Path, metavar="SCENE", help="scene folder")
    add("--variants", nargs="+", default=VARIANTS, metavar="NAME[:N]", help="what to compare")
    add("--iterations", type=positive_int, default=1_000, help="length of each run")
    add("--every", type=positive_int, default=250, help="iterations between two measurements")
    add("--resolution", type=positive_float, default=2.0, help="as -r of the trainer")
    add("--targets", nargs="*", type=float, default=[], help="PSNR in dB")
    add("--seed", type=integer, default=0, help="random seed")
    add("--output", type=Path, default=Path(tempfile.gettempdir()) / "vanilla_speed", help="folder")
    return flags


if __name__ == "__main__":
    sys.exit(run_main(lambda: run(parser().parse_args())))
