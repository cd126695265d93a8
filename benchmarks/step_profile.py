# SPDX-License-Identifier: Apache-2.0
"""Where the time of a coarse step goes: ``python benchmarks/step_profile.py -s SCENE -c MODEL``.

Kernels one by one, on one thread, and what is left to torch. Beside them stands how near each is to
what the machine could do: the bytes of its arguments, each read or written once, at the speed of a
copy. A kernel far below that is bound by arithmetic or by the cache; ``rasterizer.py`` compares
blending with the machine's peak of arithmetic.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
import torch

from benchmarks.kept_gaussians import kept_gaussians
from benchmarks.rasterizer import print_machine, print_table
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.engine.stepping import Stepper
from sugar_trainers.coarse_options import coarse_options, coarse_parser
from sugar_trainers.coarse_stage import CoarseStage
from sugar_utils import warp_launch
from sugar_utils.console import Console
from sugar_utils.frame import run_main
from sugar_utils.prepared_launch import Argument, TypedTensor
from sugar_utils.process_group import ALONE

ITERATION = 9_101
"""One in which all terms act."""


def copy_speed(n_bytes: int = 2**28, repeats: int = 5) -> float:
    """Bytes read and written per second by a copy that no cache holds."""
    source = torch.zeros(n_bytes, dtype=torch.uint8)
    target, best = torch.empty_like(source), 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        target.copy_(source)
        best = max(best, 2 * n_bytes / (time.perf_counter() - start))
    return best


class KernelTimes:
    """Seconds and bytes of kernels; stands in for what prepares launches.

    Args:
        clock: Seconds that pass, or that are spent.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = defaultdict(float)
        self.bytes: dict[str, int] = defaultdict(int)
        self._prepare = warp_launch._prepare

    def __call__(self, kernel: Any, dim: Any, inputs: Any, **how: Any) -> SimpleNamespace:
        """Prepare, and note what is launched then."""
        prepared = self._prepare(kernel, dim, inputs, **how)
        name = kernel.key.rsplit(".", 1)[-1].rsplit("__", 1)[-1]

        def run_range(first: int, count: int) -> None:
            start = self._clock()
            prepared.run_range(first, count)
            self.seconds[name] += self._clock() - start
            tensors = [x.tensor if isinstance(x, TypedTensor) else x for x in inputs
                       if isinstance(x, Argument)]  # fmt: skip
            self.bytes[name] += sum({t.data_ptr(): t.nbytes for t in tensors}.values())

        return SimpleNamespace(run_range=run_range)


def run(args: argparse.Namespace) -> None:
    """Measure and print."""
    print_machine()
    torch.set_num_threads(1)
    options = coarse_options(args, args.regularization, None)
    cloud, scene = kept_gaussians(options)
    stage = CoarseStage(cloud, options.config, scene.extent, print)
    stepper = Stepper(
        stage, scene.train_cameras, first=ITERATION, seed=0, images=ImageStore(), group=ALONE,
        console=Console(),
    )  # fmt: skip
    for warm in range(3):
        stepper.step(ITERATION + warm, None)
    times, speed = KernelTimes(), copy_speed()
    start = time.perf_counter()
    with mock.patch.object(warp_launch, "_prepare", times):
        for i in range(args.iterations):
            stepper.step(ITERATION + 3 + i, None)
    whole = time.perf_counter() - start
    parts = sorted(times.seconds.items(), key=lambda part: -part[1])
    parts.append(("torch, and between launches", whole - sum(times.seconds.values())))
    table = []
    for name, seconds in parts:
        moved = times.bytes.get(name)
        near = "" if moved is None else f"{100 * moved / seconds / speed:.1f} %"
        share = f"{100 * seconds / whole:.1f} %"
        table.append([name, f"{1e3 * seconds / args.iterations:.1f}", share, near])
    table.append(["all", f"{1e3 * whole / args.iterations:.1f}", "", ""])
    print(f"{len(cloud):,} Gaussians, {args.regularization}, a copy moves {speed / 1e9:.1f} GB/s")
    print_table(["part", "ms a step", "share", "of a copy's speed"], table)


def main() -> None:
    """Parse the flags and run."""
    parser = coarse_parser(__doc__)
    parser.add_argument("--regularization", default="dn_consistency", help="mode of the stage")
    parser.add_argument("--iterations", type=int, default=20, help="steps to time")
    run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(run_main(main))
