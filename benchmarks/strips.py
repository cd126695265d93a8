# SPDX-License-Identifier: Apache-2.0
"""What strips and gradient checkpointing save and cost: ``python benchmarks/strips.py``.

One iteration of the coarse stage (dn_consistency, geometric phase) on a synthetic cloud, for
several numbers of strips, with and without recomputing, with normals at full and at half size.
An iteration is everything between the photograph and the gradients; the optimiser's step is the
same for all. The image part is the same iteration with a single sample around the surface.

Time is the best of several rounds in which all settings take turns. Compare ratios within one
run; a busy machine spoils them: look at the load that is printed first, and at the processor
time, which other programs disturb less than the clock.

Memory is the most bytes alive in tensors at a time beyond those before the iteration, without the
gradients of the parameters, counted allocation by allocation in a round of its own.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
import torch
from torch import Tensor

from benchmarks.rasterizer import Case, as_cloud, make_scene, print_machine, print_table
from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.strips import ImageSplit
from gaussian_splatting.rasterization import rasterize
from sugar_trainers.coarse_config import CoarseConfig
from sugar_trainers.coarse_stage import CoarseStage
from sugar_utils.files import write_json_atomic
from sugar_utils.flags import IntList, Parser, positive_int
from sugar_utils.frame import run_main
from sugar_utils.memory import format_bytes

EXTENT = 5.0
ITERATION = 9_100


@dataclass(frozen=True)
class Setting:
    """What is varied."""

    split: ImageSplit
    full_res_normals: bool
    samples: int


@dataclass
class Figures:
    """Best seconds by the clock and of all threads, and peak bytes."""

    wall: float = float("inf")
    processor: float = float("inf")
    peak_bytes: int = 0


@dataclass
class Bench:
    """One cloud and view, and what was measured of them."""

    cloud: GaussianCloud
    camera: Camera
    target: Tensor
    neighbors: Tensor | None = None
    figures: dict[Setting, Figures] = field(default_factory=dict)

    @classmethod
    def make(cls, n: int, width: int, height: int) -> Bench:
        """A wall, a ball and floaters, with a disturbed render as photograph."""
        gaussians, camera = make_scene(Case("strips", n, width, height, repeats=1))
        with torch.no_grad():
            target = rasterize(gaussians, camera).image
        noise = torch.randn(target.shape, generator=torch.Generator().manual_seed(0))
        return cls(as_cloud(gaussians), camera, (target + 0.1 * noise).clamp_(0, 1))

    def stage(self, setting: Setting) -> CoarseStage:
        """A stage about to begin a geometric iteration; neighbours are searched once for all."""
        config = CoarseConfig(
            sdf_samples=setting.samples,
            full_res_normals=setting.full_res_normals,
            split=setting.split,
        )
        stage = CoarseStage(self.cloud, config, EXTENT, print)
        stage.neighbors = self.neighbors
        stage.begin(ITERATION)
        self.neighbors = stage.neighbors
        return stage

    def time(self, setting: Setting) -> None:
        """Keep the better of this round and those before."""
        stage, best = self.stage(setting), self.figures.setdefault(setting, Figures())
        wall, processor = time.perf_counter(), time.process_time()
        stage.accumulate(ITERATION, self.camera, self.target)
        best.wall = min(best.wall, time.perf_counter() - wall)
        best.processor = min(best.processor, time.process_time() - processor)

    def weigh(self, setting: Setting) -> None:
        """Count the most bytes alive at a time."""
        stage = self.stage(setting)
        # Garbage of earlier stages that goes during the count would be taken off it.
        gc.collect()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profiler:
            stage.accumulate(ITERATION, self.camera, self.target)
        events = profiler.profiler.kineto_results.events()
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        alive = accumulate((change for _, change in changes), initial=0)
        gradients = sum(g.nbytes for g in stage.model.optimizer.gradients().values())
        self.figures.setdefault(setting, Figures()).peak_bytes = max(alive) - gradients


def rows_of(bench: Bench, args: argparse.Namespace, *, full: bool) -> list[list[str]]:
    """One line for each number of strips, without and with recomputing."""

    def of(strips: int, recompute: bool, samples: int) -> Figures:
        return bench.figures[Setting(ImageSplit(strips, recompute), full, samples)]

    rows, (all_base, image_base) = [], (of(args.strips[0], False, n) for n in (args.samples, 1))
    for recompute in (False, True):
        for strips in args.strips:
            whole, image = of(strips, recompute, args.samples), of(strips, recompute, 1)
            rows.append(
                [
                    str(strips),
                    "yes" if recompute else "no",
                    f"{whole.wall * 1e3:.0f}",
                    f"{whole.wall / all_base.wall:.2f}",
                    f"{whole.processor / all_base.processor:.2f}",
                    f"{image.wall * 1e3:.0f}",
                    f"{image.wall / image_base.wall:.2f}",
                    f"{image.processor / image_base.processor:.2f}",
                    format_bytes(whole.peak_bytes),
                    format_bytes(image.peak_bytes),
                ]
            )
    return rows


HEADER = ["strips", "recompute", "ms", "ratio", "CPU ratio", "image ms", "ratio", "CPU ratio",
          "peak", "image peak"]  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Measure all settings and print them."""
    if args.threads:
        torch.set_num_threads(args.threads)
    about = print_machine()
    bench = Bench.make(args.gaussians, args.width, args.height)
    settings = [
        Setting(ImageSplit(strips, recompute), full, samples)
        for full in (True, False)
        for recompute in (False, True)
        for strips in args.strips
        for samples in (args.samples, 1)
    ]
    # The first one compiles kernels and touches memory.
    bench.stage(settings[0]).accumulate(ITERATION, bench.camera, bench.target)
    for _ in range(args.repeats):
        for setting in settings:
            bench.time(setting)
    for setting in settings:
        bench.weigh(setting)
    for full in (True, False):
        size = "full" if full else "half"
        print(
            f"\n{args.gaussians:,} Gaussians, {args.width} x {args.height}, normals at {size} "
            f"size, {args.samples:,} samples"
        )
        print_table(HEADER, rows_of(bench, args, full=full))
    if args.json:
        figures = [{**asdict(s), **asdict(f)} for s, f in bench.figures.items()]
        write_json_atomic(args.json, {"about": about, "figures": figures})
        print(f"written: {args.json}")


def main() -> None:
    """Parse the flags and run."""
    parser = Parser(
        description="Time and memory of strips and gradient checkpointing.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--gaussians", type=positive_int, default=300_000, help="size of the cloud")
    add("--width", type=positive_int, default=1920, help="image width")
    add("--height", type=positive_int, default=1244, help="image height")
    add("--samples", type=positive_int, default=1_000_000, help="samples around the surface")
    add("--strips", action=IntList, default=[1, 2, 4, 8], help="numbers of strips")
    add("--repeats", type=positive_int, default=3, help="rounds; the best counts")
    add("--threads", type=positive_int, help="CPU threads; unset: torch's choice")
    add("--json", type=Path, help="also write the figures to this file")
    run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(run_main(main))
