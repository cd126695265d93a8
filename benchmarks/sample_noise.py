# SPDX-License-Identifier: Apache-2.0
"""How much noise samples add to a step: ``python benchmarks/sample_noise.py -s SCENE -c MODEL``.

A step of the coarse stage sees one view and some points of the Gaussians in it; both are drawn. The
variance of the whole gradient between views is what an optimiser lives with anyway; beside it
stands the variance between two draws of points in the same view, for several numbers of points per
Gaussian. Gaussians are those of the model that the stage keeps, before its first step on them.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
from torch import Tensor

from benchmarks.kept_gaussians import kept_gaussians
from benchmarks.rasterizer import print_machine, print_table
from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import ImageStore
from sugar_scene.sampling import draw_samples
from sugar_trainers.coarse_config import CoarseConfig
from sugar_trainers.coarse_options import coarse_options, coarse_parser
from sugar_trainers.coarse_stage import CoarseStage
from sugar_utils.frame import run_main
from sugar_utils.random import derive_seed

ITERATION = 9_101
"""One in which all terms act."""

Gradients = dict[str, Tensor]


class Steps:
    """Gradients of a stage by view, number of points and draw.

    Args:
        cloud: Gaussians that the stage keeps.
        config: Of the stage.
        extent: Of the scene, in world units.
    """

    def __init__(self, cloud: GaussianCloud, config: CoarseConfig, extent: float) -> None:
        self._each, self._draw, self.drawn = 0.0, 0, 0
        self._stage = CoarseStage(cloud, config, extent, print, self._samples)
        self._store = ImageStore()
        self._stage.begin(ITERATION)

    def gradients(self, camera: Camera, each: float, draw: int) -> tuple[Gradients, float]:
        """Those of one step by parameter, in float64, and its seconds; ``each`` points for each
        Gaussian in view."""
        self._each, self._draw = each, draw
        optimizer, photograph = self._stage.model.optimizer, self._store.get(camera)
        optimizer.zero_grad()
        start = time.perf_counter()
        self._stage.accumulate(ITERATION, camera, photograph)
        seconds = time.perf_counter() - start
        return {name: g.double() for name, g in optimizer.gradients().items()}, seconds

    def _samples(self, mask: Tensor, n: int, iteration: int) -> tuple[Tensor, Tensor]:
        del n, iteration
        self.drawn = round(self._each * int(mask.sum()))
        return draw_samples(mask, self.drawn, derive_seed(self._draw, "samples"))


def squares(gradients: Gradients) -> dict[str, float]:
    """Sum of squares by parameter."""
    return {name: float(g.square().sum()) for name, g in gradients.items()}


def difference(a: Gradients, b: Gradients) -> Gradients:
    """a - b."""
    return {name: a[name] - b[name] for name in a}


def variance_of_views(steps: Steps, cameras: list[Camera], each: float) -> dict[str, float]:
    """Variance between views, points and all, by parameter; two passes, as few are in memory."""
    mean: Gradients = {}
    for camera in cameras:
        found, _ = steps.gradients(camera, each, 0)
        for name, g in found.items():
            mean[name] = mean.get(name, 0) + g / len(cameras)
    total = dict.fromkeys(mean, 0.0)
    for camera in cameras:
        found, _ = steps.gradients(camera, each, 0)
        for name, value in squares(difference(found, mean)).items():
            total[name] += value / (len(cameras) - 1)
    return total


def run(args: argparse.Namespace) -> None:
    """Measure and print."""
    print_machine()
    options = coarse_options(args, args.regularization, None)
    cloud, scene = kept_gaussians(options)
    steps = Steps(cloud, options.config, scene.extent)
    cameras = scene.train_cameras[:: max(1, len(scene.train_cameras) // args.views)]
    views = variance_of_views(steps, cameras, args.most)
    names = [name for name in views if name != "sh_rest"]
    table = []
    for each in (*args.each, args.most):
        noise, seconds, points = dict.fromkeys(names, 0.0), 0.0, 0.0
        for camera in cameras:
            one, first = steps.gradients(camera, each, 1)
            other, second = steps.gradients(camera, each, 2)
            points += steps.drawn / len(cameras)
            seconds += (first + second) / (2 * len(cameras))
            for name, value in squares(difference(one, other)).items():
                if name in noise:
                    noise[name] += value / (2 * len(cameras))
        shares = [f"{100 * noise[name] / max(views[name], 1e-300):.2f} %" for name in names]
        table.append([f"{each:g}", f"{points:,.0f}", f"{seconds:.2f}", *shares])
    print(f"{len(cloud):,} Gaussians, {len(cameras)} views, {args.regularization}")
    print_table(["per Gaussian in view", "points", "s a step", *names], table)


def main() -> None:
    """Parse the flags and run."""
    parser = coarse_parser(__doc__)
    add = parser.add_argument
    add("--regularization", default="dn_consistency", help="mode of the coarse stage")
    add("--views", type=int, default=12, help="views to compare")
    add(
        "--each",
        type=float,
        nargs="+",
        default=[1, 2, 4, 8, 16],
        help="points per Gaussian in view",
    )
    add("--most", type=float, default=64, help="those of the last row, and of the views")
    run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(run_main(main))
