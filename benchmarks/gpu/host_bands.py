# SPDX-License-Identifier: Apache-2.0
"""Colour bands on the host (``--sh_on_host``): the same bits, and what a step costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu.common import (
    Check,
    Finding,
    Setup,
    equal_values,
    milliseconds,
    synchronize,
)
from benchmarks.gpu.recorded import EXTENT, Run, Size, new_recorder, warnings_of
from gaussian_splatting.components.densification import Region
from gaussian_splatting.core import color_gradients
from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.optim.host_memory import host_empty
from gaussian_splatting.optim.optimizer_config import OptimizerConfig
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_stage import VanillaStage
from sugar_utils.memory import format_bytes, release_cached
from tests.support.training import parameters_and_moments

FIRST = 2_592  # a round of densification follows iteration 2600, and all bands are trained
TIMED = 15_005
N_BEFORE = 15  # steps that are not timed; recordings are made in them
FULL_SIZES = (Size(1_000_000, 1920, 1244),)
QUICK_SIZE = Size(300, 48, 36)


WAYS = ((False, False), (True, False), (True, True))
"""Whether bands lie on the host, and whether passes are recorded."""


def _build(on_host: bool, cloud: GaussianCloud, cameras: Sequence[Camera]) -> VanillaStage:
    config = VanillaConfig(optimizer=OptimizerConfig(bands_on_host=on_host))
    return VanillaStage(cloud, config, Region(EXTENT), lambda *_: None)


def _run(setup: Setup, size: Size, first: int, way: tuple[bool, bool]) -> tuple[Run, str]:
    """Begin a run in one of the ways; say which one."""
    on_host, is_recorded = way
    recorder = new_recorder(setup) if is_recorded else None
    place = "on the host" if on_host else "on the device"
    name = f"bands {place}, recorded" if is_recorded else f"bands {place}"
    return Run(setup, partial(_build, on_host), size, recorder, first), name


def memory(setup: Setup) -> Iterator[Finding]:
    """A tensor of the device on the host: written and copied, without memory of the device."""
    # More bytes than Warp counts in one dimension.
    shape = setup.size((4_600_000, 120), (10, 100))
    before = torch.cuda.memory_allocated(setup.place) if setup.on_cuda else 0
    values = host_empty(shape, torch.float32, setup.place)
    after = torch.cuda.memory_allocated(setup.place) if setup.on_cuda else 0
    values.copy_(torch.arange(shape[0], dtype=torch.float32, device=setup.place)[:, None])
    expected = torch.arange(shape[0], dtype=torch.float32, device="cpu")[:, None]
    is_right = bool((values.cpu() == expected).all())
    is_elsewhere = after == before
    figures = {"bytes_on_device": after - before}
    yield Finding("values", is_right, "equal" if is_right else "differ", figures)
    shown = f"{format_bytes(after - before)} on the device"
    yield Finding("place", is_elsewhere, shown, figures)


def bits(setup: Setup) -> Iterator[Finding]:
    """Steps around a change of the number of Gaussians, with bands on the host and without."""
    size = setup.size(Size(60_000, 480, 360), QUICK_SIZE)
    expected: dict[str, Tensor] = {}
    for way in WAYS:
        with mock.patch.object(color_gradients, "MIN_FACTORED", 1):
            run, name = _run(setup, size, FIRST, way)
            for _ in range(setup.size(40, 14)):
                run.step()
        found = parameters_and_moments(run.stage)
        expected = expected or found
        yield equal_values(f"vanilla, {name}, all values", found, expected)
        yield warnings_of(run)


def times(setup: Setup) -> Iterator[Finding]:
    """Time and peak memory of a step, with bands on the host and without."""
    for size in setup.size(FULL_SIZES, (QUICK_SIZE,)):
        for way in WAYS:
            run, name = _run(setup, size, TIMED, way)
            for _ in range(N_BEFORE):
                run.step()
            peak = 0
            if setup.on_cuda:
                synchronize(setup.place)
                torch.cuda.reset_peak_memory_stats(setup.place)
            ms = milliseconds(setup.place, run.step, repeats=setup.size(20, 2), budget=4.0)
            if setup.on_cuda:
                peak = torch.cuda.max_memory_allocated(setup.place)
            what = f"{size.n:,}, {size.width} x {size.height}, {name}"
            shown = f"{ms:.1f} ms, {format_bytes(peak)} at most"
            yield Finding(what, True, shown, {"ms": ms, "peak_bytes": peak})
            del run
            release_cached(setup.place)


CHECKS = (Check("memory", memory, 30), Check("same bits", bits, 90), Check("step", times, 180))
