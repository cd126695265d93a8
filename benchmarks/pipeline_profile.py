# SPDX-License-Identifier: Apache-2.0
"""Where the time of a whole run goes: stages, and the kernels that most of each goes into.

``python benchmarks/pipeline_profile.py`` takes the flags of ``train.py``, ``--demo`` included, and
runs all of it on one thread. CPU time counts that of other processes that the run has started.
What is called *rest* is torch, NumPy, files, pictures, and the interpreter.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

# Before torch is loaded, which reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
import torch

from benchmarks.rasterizer import print_machine, print_table
from benchmarks.step_profile import KernelTimes, copy_speed
from sugar_pipeline import pipeline_run
from sugar_pipeline.commands import run_train
from sugar_pipeline.pipeline_flags import train_parser
from sugar_utils import warp_launch
from sugar_utils.frame import run_main

SHOWN = 6
"""Kernels of a stage that have a row."""


def cpu_seconds() -> float:
    """Of this process since its start, and of those that it waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


class Watch:
    """Stands in for what lists the stages; notes what each of them took.

    Attributes:
        rows: Stage or kernel, seconds of CPU, and share of a copy's speed.
    """

    def __init__(self, times: KernelTimes, speed: float) -> None:
        self._stages, self._times, self._speed = pipeline_run._stages, times, speed
        self._then = 0.0
        self.rows: list[list[str]] = []
        self.everywhere: dict[str, float] = defaultdict(float)

    def __call__(self, *args: Any) -> list[tuple[str, bool, Callable[[], Any]]]:
        """The stages, each of which says when it has ended."""
        self.note("before the first stage")
        return [(name, trains, self._noted(name, run)) for name, trains, run in self._stages(*args)]

    def note(self, name: str) -> None:
        """What has been spent since the last call belongs to this."""
        now, spent = cpu_seconds(), self._times.seconds
        self.rows.append([f"**{name}**", f"{now - self._then:.1f}", ""])
        parts = sorted(spent.items(), key=lambda part: -part[1])
        for kernel, seconds in parts[:SHOWN]:
            near = 100 * self._times.bytes[kernel] / seconds / self._speed
            self.rows.append([kernel, f"{seconds:.1f}", f"{near:.1f} %"])
        others = sum(seconds for _, seconds in parts[SHOWN:])
        rest = now - self._then - sum(spent.values())
        self.rows += [["other kernels", f"{others:.1f}", ""], ["rest", f"{rest:.1f}", ""]]
        for kernel, seconds in parts:
            self.everywhere[kernel] += seconds
        self.everywhere["rest"] += rest
        spent.clear()
        self._times.bytes.clear()
        self._then = cpu_seconds()

    def _noted(self, name: str, run: Callable[[], Any]) -> Callable[[], Any]:
        def noted() -> Any:
            result = run()
            self.note(name)
            return result

        return noted


def main() -> None:
    """Parse the flags of ``train.py``, run, and print."""
    args = train_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    speed = copy_speed()
    times = KernelTimes(time.process_time)
    watch = Watch(times, speed)
    with (
        mock.patch.object(warp_launch, "_prepare", times),
        mock.patch.object(pipeline_run, "_stages", watch),
    ):
        run_train(args)
    watch.note("figures and report")
    print_machine()
    print(f"a copy moves {speed / 1e9:.1f} GB/s\n")
    print_table(["part", "CPU s", "of a copy's speed"], watch.rows)
    whole = cpu_seconds()
    parts = sorted(watch.everywhere.items(), key=lambda part: -part[1])[: 2 * SHOWN]
    print(f"\nEverything: {whole:.1f} s\n")
    print_table(
        ["part", "CPU s", "share"],
        [[name, f"{spent:.1f}", f"{100 * spent / whole:.1f} %"] for name, spent in parts],
    )


if __name__ == "__main__":
    sys.exit(run_main(main))
