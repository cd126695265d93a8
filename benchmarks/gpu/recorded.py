# SPDX-License-Identifier: Apache-2.0
"""Steps with passes that are recorded as CUDA graphs: the same bits, and how long they take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from benchmarks.gpu.common import Check, Finding, Setup, milliseconds
from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.components.densification import Region
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.stepping import RunContext, Stepper
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_stage import VanillaStage
from sugar_utils.console import Console
from sugar_utils.cuda_graph import CudaRecorder, Recorder
from sugar_utils.memory import release_cached
from tests.support.cpu_recorder import CpuRecorder
from tests.support.launches import gpu_paths
from tests.support.step_scenes import MadeUpPhotographs, large_cloud, photograph

EXTENT = 5.0
FIRST = 592  # a round of densification follows iteration 600
TIMED = 705  # iterations are timed from here on; no round follows within them
N_VIEWS = 9


@dataclass(frozen=True)
class Size:
    """Number of Gaussians, and width and height of the images in pixels."""

    n: int
    width: int
    height: int


FULL_SIZES = (
    Size(12_000, 480, 360),
    Size(200_000, 1280, 960),
    Size(1_000_000, 1920, 1244),
)
QUICK_SIZES = (Size(300, 48, 36),)


class _Run:
    """A vanilla stage and its steps; views lie beside each other."""

    def __init__(
        self,
        setup: Setup,
        made: tuple[GaussianCloud, Camera],
        recorder: Recorder | None,
        first: int,
    ) -> None:
        cloud, camera = made
        self.warnings: list[str] = []
        self._iteration = first
        self.stage = VanillaStage(
            cloud.select(slice(None)), VanillaConfig(), Region(EXTENT), lambda *_: None
        )
        cameras = []
        for number in range(N_VIEWS):
            shift = np.array([0.02 * (number - N_VIEWS // 2), 0.0, 0.0])
            cameras.append(replace(camera, name=f"view {number}", translation=shift))
        console = Console()
        console.warn = self.warnings.append
        images = MadeUpPhotographs(photograph)
        context = RunContext(images, console, recorder=recorder)
        self._stepper = Stepper(self.stage, cameras, context, first=first, seed=0)
        self._paths = contextlib.nullcontext if setup.on_cuda else gpu_paths

    def step(self) -> None:
        """Make one step."""
        with self._paths():
            self._stepper.step(self._iteration, None)
        self._iteration += 1

    def state(self) -> dict[str, Tensor]:
        """Parameters and moments by name."""
        optimizer = self.stage.model.optimizer
        state = {name: p.detach() for name, p in optimizer.parameters.items()}
        for name, moments in optimizer.moments().items():
            state |= {f"{name} {moment}": values for moment, values in moments.items()}
        return state


def _recorder(setup: Setup) -> Recorder:
    """CUDA's graphs, or on a CPU what stands in for them in tests."""
    return CudaRecorder(setup.place) if setup.on_cuda else CpuRecorder()


def bits(setup: Setup) -> Iterator[Finding]:
    """Thirty steps around a densification, with recorded passes and without."""
    size = setup.size(FULL_SIZES[0], QUICK_SIZES[0])
    made = large_cloud(size.n, size.width, size.height, setup.place)
    runs = [_Run(setup, made, recorder, FIRST) for recorder in (None, _recorder(setup))]
    for _ in range(setup.size(30, 12)):
        for run in runs:
            run.step()
    launched, repeated = [run.state() for run in runs]
    differing = sum(int((launched[name] != repeated[name]).sum()) for name in launched)
    warnings = runs[1].warnings
    shown = "equal" if not differing else f"{differing:,} values differ"
    if warnings:
        shown = f"{shown}; {warnings[0]}"
    ok = not differing and not warnings
    yield Finding("parameters and moments", ok, shown, {"differing": differing})


def times(setup: Setup) -> Iterator[Finding]:
    """A step of the vanilla stage, with recorded passes and without, in turns."""
    for size in setup.size(FULL_SIZES, QUICK_SIZES):
        made = large_cloud(size.n, size.width, size.height, setup.place)
        runs = {
            "launch by launch": _Run(setup, made, None, TIMED),
            "recorded": _Run(setup, made, _recorder(setup), TIMED),
        }
        for run in runs.values():
            for _ in range(setup.size(2 * N_VIEWS, 3)):
                run.step()
        ms: dict[str, float] = {}
        for turn in range(2):
            for name, run in runs.items():
                found = milliseconds(setup.place, run.step, repeats=setup.size(30, 3), budget=2.0)
                ms[name] = found if turn == 0 else min(found, ms[name])
        ratio = ms["recorded"] / ms["launch by launch"]
        shown = ", ".join(f"{name} {value:.2f} ms" for name, value in ms.items())
        what = f"{size.n:,}, {size.width} x {size.height}"
        yield Finding(what, True, f"{shown}, ratio {ratio:.2f}", {"ms": ms, "ratio": ratio})
        del runs
        release_cached(setup.place)


CHECKS = (Check("same bits", bits, 90), Check("time of a step", times, 120))
