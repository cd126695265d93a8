# SPDX-License-Identifier: Apache-2.0
"""What being watched costs a training: ``python benchmarks/live_view.py``.

One vanilla stage steps in one process, its iterations in turns without a viewer, with a page that
nobody has opened, and with a stand-in for a browser that wants a new picture all the time. The time
is what the process has computed, the server's threads included, because other work on the machine
would decide what a clock says.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
import numpy as np
import torch
from torch import Tensor

from benchmarks.memory import photograph
from benchmarks.rasterizer import Case, as_cloud, make_scene, print_machine, print_table
from benchmarks.step_scenes import MadeUpPhotographs
from gaussian_splatting.engine.stepping import Stepper
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_stage import VanillaStage
from gaussian_splatting.viewing.browser_views import BrowserView
from gaussian_splatting.viewing.live_page import TrainingPage
from gaussian_splatting.viewing.live_view import LiveView
from gaussian_splatting.viewing.page_server import closing, open_server
from sugar_utils.console import Console
from sugar_utils.flags import Parser, positive_int
from sugar_utils.frame import run_main
from sugar_utils.process_group import ALONE

EXTENT, FIRST = 5.0, 20_001
"""After densification, so that all steps are alike."""

_CALLS = 100_000


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def seconds_of(step: Callable[[], dict[str, Tensor]], live: LiveView, stage: VanillaStage) -> float:
    """Processor time of an iteration, with what the loop calls for the viewer after it."""
    begin = time.process_time()
    live.after_step(stage, FIRST, step(), lambda: None)
    return time.process_time() - begin


def microseconds_unwatched(live: LiveView, stage: VanillaStage) -> float:
    """What the loop's call alone takes while nobody looks."""
    begin = time.perf_counter()
    for _ in range(_CALLS):
        live.after_step(stage, FIRST, {}, lambda: None)
    return (time.perf_counter() - begin) / _CALLS * 1e6


def run(args: argparse.Namespace) -> None:
    """Measure and print."""
    print_machine()
    case = Case("viewer", args.gaussians, args.width, args.height, 1, radius=6.0)
    gaussians, camera = make_scene(case)
    stage = VanillaStage(as_cloud(gaussians), VanillaConfig(), EXTENT, lambda *_: None)
    picture = functools.cache(photograph)
    stepper = Stepper(
        stage, [camera] * 9, first=FIRST, seed=0, images=MadeUpPhotographs(picture), group=ALONE,
        console=Console.silent(),
    )  # fmt: skip
    scene = SimpleNamespace(train_cameras=[camera], points=np.zeros((0, 3), np.float32))
    with closing(open_server("localhost", free_port(), "benchmark")) as server:
        pages = [TrainingPage(server, "vanilla", 30_000, scene, True) for _ in range(2)]
        # What the second one shows goes nowhere: there is no such browser.
        wxyz = np.array([1.0, 0.0, 0.0, 0.0])
        pages[1].wishes.looks(-1, BrowserView(camera.center, wxyz, 0.9, 1600, 900))
        ways = {
            "no viewer": LiveView(None, print),
            "a page that nobody has opened": LiveView(pages[0], print),
            "a browser that looks": LiveView(pages[1], print),
        }
        found: dict[str, list[float]] = {way: [] for way in ways}
        numbers, order = itertools.count(FIRST), list(ways)
        for number in range(args.rounds):
            # No way comes always after the same other one.
            order = order[1:] + order[:1]
            for way in order:
                step = lambda: stepper.step(next(numbers), None).terms  # noqa: E731
                took = seconds_of(step, ways[way], stage)
                if number:
                    # The first round makes what is kept.
                    found[way].append(took)
        alone = microseconds_unwatched(ways["a page that nobody has opened"], stage)
    base = statistics.mean(found["no viewer"])
    rows = []
    for way, times in found.items():
        mean, error = statistics.mean(times), statistics.stdev(times) / len(times) ** 0.5
        change = f"{100 * (mean / base - 1):+.2f} % (standard error {100 * error / base:.2f} %)"
        rows.append([way, f"{1000 * mean:.1f}", change])
    print_table(["", "processor ms of an iteration", "more than without"], rows)
    print(f"\nthe call after an iteration while nobody looks: {alone:.2f} microseconds")


def main() -> None:
    """Parse the flags and run."""
    torch.manual_seed(0)
    parser = Parser(
        description="What being watched costs a training.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--gaussians", type=positive_int, default=100_000, help="in the scene")
    add("--width", type=positive_int, default=480, help="of the photographs")
    add("--height", type=positive_int, default=270, help="of the photographs")
    add("--rounds", type=positive_int, default=60, help="of three iterations each")
    run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(run_main(main))
