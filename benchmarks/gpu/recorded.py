# SPDX-License-Identifier: Apache-2.0
"""Steps with passes that are recorded as CUDA graphs have the same bits as others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from benchmarks.gpu.common import Check, Finding, Setup, equal_values
from gaussian_splatting.components.densification import Region
from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.recording.cuda_graph import CudaRecorder, Recorder, Recording, Result
from gaussian_splatting.engine.recording.recorded_runner import RecordedRunner
from gaussian_splatting.engine.stage import Stage
from gaussian_splatting.engine.step_runner import plain_runner
from gaussian_splatting.engine.stepping import RunContext, Stepper, StepSum
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_stage import VanillaStage
from sugar_scene.reprojection import NeighborViews
from sugar_trainers.coarse_stage import CoarseStage
from sugar_trainers.multiview_stage import MultiviewStage, comparison_rule
from sugar_trainers.stage_config import (
    CoarseConfig,
    CoarseSchedule,
    MultiviewConfig,
    Regularization,
)
from sugar_trainers.view_comparison import ViewComparer
from sugar_utils.console import Console
from sugar_utils.flags import AUTO, Automatic
from tests.support.cpu_recorder import CpuRecorder
from tests.support.launches import gpu_paths
from tests.support.step_scenes import MadeUpPhotographs, large_cloud, photograph
from tests.support.training import parameters_and_moments

EXTENT = 5.0
N_VIEWS = 9
BASELINE = 0.02  # between neighbouring views, world units
NEIGHBOR_INTERVAL = 8
FIXED_SAMPLES = 100_000
N_STEPS = 40  # the number of Gaussians changes after 24
N_LEFT_OUT = 12  # of these for a try on the CPU

Build = Callable[[GaussianCloud, Sequence[Camera]], Stage]


def _vanilla(cloud: GaussianCloud, cameras: Sequence[Camera]) -> VanillaStage:
    return VanillaStage(cloud, VanillaConfig(), Region(EXTENT), lambda *_: None)


def _multiview(cloud: GaussianCloud, cameras: Sequence[Camera]) -> MultiviewStage:
    config = MultiviewConfig()
    neighbors = NeighborViews(cameras, EXTENT)
    images = MadeUpPhotographs(photograph)
    comparer = ViewComparer(
        neighbors, images, EXTENT, comparison_rule(config), device=cloud.means.device
    )
    return MultiviewStage(cloud, config, Region(EXTENT), cameras, comparer, lambda message: None)


def _coarse(mode: Regularization, samples: Automatic) -> Build:
    def build(cloud: GaussianCloud, cameras: Sequence[Camera]) -> CoarseStage:
        # So that neighbours are searched again between repetitions.
        schedule = CoarseSchedule(neighbor_interval=NEIGHBOR_INTERVAL)
        config = CoarseConfig(mode, schedule=schedule, sdf_samples=samples)
        return CoarseStage(cloud, config, Region(EXTENT), lambda message: None)

    return build


@dataclass(frozen=True)
class Timetable:
    """A stage, and iterations at which it is looked at."""

    name: str
    build: Build
    # Gaussians are added or removed some iterations later, when passes have been recorded.
    changed: int
    timed: int  # their number stays for the next ninety


STAGES = (
    Timetable("vanilla", _vanilla, changed=576, timed=15_005),
    Timetable("multiview", _multiview, changed=7_576, timed=13_005),
    Timetable("dn_consistency", _coarse("dn_consistency", AUTO), changed=8_976, timed=9_105),
    Timetable("density", _coarse("density", FIXED_SAMPLES), changed=8_976, timed=9_105),
    Timetable("sdf", _coarse("sdf", AUTO), changed=8_976, timed=9_105),
)


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


class Run:
    """A stage and its steps; views lie beside each other."""

    def __init__(
        self, setup: Setup, build: Build, size: Size, recorder: Recorder | None, first: int
    ) -> None:
        cloud, camera = large_cloud(size.n, size.width, size.height, setup.place)
        self.warnings: list[str] = []
        self._iteration = first
        cameras = []
        for number in range(N_VIEWS):
            shift = np.array([BASELINE * (number - N_VIEWS // 2), 0.0, 0.0])
            cameras.append(replace(camera, name=f"view {number}", translation=shift))
        self.stage = build(cloud, cameras)
        console = Console()
        console.warn = self.warnings.append
        images = MadeUpPhotographs(photograph)
        new_runner = plain_runner if recorder is None else partial(RecordedRunner, recorder)
        context = RunContext(images, console, new_runner=new_runner)
        self._stepper = Stepper(self.stage, cameras, context, first=first, seed=0)
        self._last: StepSum | None = None
        self._paths = contextlib.nullcontext if setup.on_cuda else gpu_paths

    def step(self) -> None:
        """Make one step."""
        with self._paths():
            # Held until the next one is made, as the loop holds it.
            self._last = self._stepper.step(self._iteration, None)
        self._iteration += 1


class CountingRecorder:
    """A recorder that counts what it records, and how often that is repeated."""

    def __init__(self, recorder: Recorder) -> None:
        self.n_recorded = 0
        self.n_repeated = 0
        self._recorder = recorder

    def record(self, work: Callable[[], Result]) -> tuple[Recording, Result]:
        """See :class:`Recorder`."""
        recording, result = self._recorder.record(work)
        self.n_recorded += 1
        return _CountedRecording(recording, self), result


@dataclass(frozen=True)
class _CountedRecording:
    """A recording that counts its repetitions for its recorder."""

    recording: Recording
    counter: CountingRecorder

    def replay(self) -> None:
        """Do the work again."""
        self.counter.n_repeated += 1
        self.recording.replay()


def new_recorder(setup: Setup) -> Recorder:
    """CUDA's graphs, or on a CPU what stands in for them in tests."""
    return CudaRecorder(setup.place) if setup.on_cuda else CpuRecorder()


def _bits_of(table: Timetable) -> Callable[[Setup], Iterator[Finding]]:
    """Make a check of steps around a change of the number of Gaussians, recorded and not."""

    def run(setup: Setup) -> Iterator[Finding]:
        size = setup.size(FULL_SIZES[0], QUICK_SIZES[0])
        counter = CountingRecorder(new_recorder(setup))
        n_left_out = setup.size(0, N_LEFT_OUT)
        first = table.changed + n_left_out
        n_steps = N_STEPS - n_left_out
        runs = [Run(setup, table.build, size, each, first) for each in (None, counter)]
        for _ in range(n_steps):
            for each in runs:
                each.step()
        launched, repeated = [parameters_and_moments(each.stage) for each in runs]
        yield equal_values("all values", repeated, launched)
        figures = {"recorded": counter.n_recorded, "repeated": counter.n_repeated}
        shown = f"{counter.n_recorded} recordings, {counter.n_repeated} of {n_steps} steps repeated"
        # One at least before the change and one after it.
        is_kept = counter.n_recorded >= 2 and counter.n_repeated >= n_steps // 4
        yield Finding("recordings", is_kept, shown, figures)
        yield warnings_of(runs[1])

    return run


def warnings_of(run: Run) -> Finding:
    """Every warning of a run with recorded passes is a failure: nothing else is wrong with it."""
    shown = run.warnings[0] if run.warnings else "none"
    return Finding("warnings", not run.warnings, shown)


CHECKS = tuple(Check(f"same bits, {table.name}", _bits_of(table), 60) for table in STAGES)
