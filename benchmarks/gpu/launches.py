# SPDX-License-Identifier: Apache-2.0
"""What an iteration asks of the host, and how long the device idles, by torch's profiler."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import memory
from benchmarks.gpu.common import Check, Finding, Setup, large_cloud, synchronize
from benchmarks.memory import Setting
from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_stage import VanillaStage

PROFILED = 20
"""Iterations."""

SIZE = (100_000, 640, 480)
"""Gaussians, width and height: so few that the host is the limit."""

VANILLA_ITERATION = 601


def _iterations(setup: Setup) -> dict[str, Callable[[], object]]:
    """One iteration of each stage, checks of the loop left out."""
    n, width, height = setup.size(SIZE, (300, 48, 36))
    samples = setup.size(1_000_000, 500)
    setting = Setting("geometry", n, width, height, samples=samples, sample_chunk=samples)

    def of_dn_consistency() -> Callable[[], object]:
        stage, camera = memory.make_stage(setting, large_cloud(n, width, height, setup.place))
        target = memory.photograph(camera).to(setup.place)

        def iteration() -> None:
            memory.step(stage, setting, camera, target)
            stage.model.optimizer.step()

        return iteration

    def of_vanilla() -> Callable[[], object]:
        made: tuple[GaussianCloud, Camera] = large_cloud(n, width, height, setup.place)
        stage = VanillaStage(made[0], VanillaConfig(), memory.EXTENT, lambda *_: None)
        target = memory.photograph(made[1]).to(setup.place)

        def iteration() -> None:
            stage.begin(VANILLA_ITERATION)
            stage.accumulate(VANILLA_ITERATION, made[1], target).settle()
            stage.apply(VANILLA_ITERATION)

        return iteration

    return {"dn_consistency": of_dn_consistency(), "vanilla": of_vanilla()}


def profiled(setup: Setup) -> Iterator[Finding]:
    """Launches, operations, waits and idle time of an iteration."""
    activities = [ProfilerActivity.CPU]
    if setup.on_cuda:
        activities.append(ProfilerActivity.CUDA)
    times = setup.size(PROFILED, 2)
    for name, iteration in _iterations(setup).items():
        iteration()
        iteration()
        synchronize(setup.place)
        with profile(activities=activities) as told:
            started = time.perf_counter()
            for _ in range(times):
                iteration()
            synchronize(setup.place)
            seconds = time.perf_counter() - started
        counts, busy = Counter(), 0.0
        for event in told.events():
            counts[_kind(event)] += 1
            if event.device_type == DeviceType.CUDA:
                busy += event.time_range.elapsed_us() / 1e6
        each = {kind: counts[kind] / times for kind in ("launch", "operation", "wait")}
        # The one wait of this measurement itself.
        each["wait"] = max(0.0, each["wait"] - 1 / times)
        ms, share = 1e3 * seconds / times, busy / seconds
        shown = f"{each['operation']:.0f} operations of torch"
        if setup.on_cuda:
            shown += f", {each['launch']:.0f} launches, {each['wait']:.1f} waits"
            shown += f", {ms:.2f} ms, device busy for {100 * share:.0f} %"
        yield Finding(name, True, shown, {"ms": ms, "busy": share, **each})


def _kind(event: object) -> str:
    """What an event of the profiler is: as CUDA and torch name it."""
    name = event.name
    if name.startswith(("cudaLaunch", "cuLaunch", "cudaGraphLaunch")):
        return "launch"
    if "Synchronize" in name:
        return "wait"
    # Operations that others call are theirs.
    if name.startswith("aten::") and event.cpu_parent is None:
        return "operation"
    return "other"


CHECKS = (Check("iterations", profiled, 120),)
