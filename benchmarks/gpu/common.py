# SPDX-License-Identifier: Apache-2.0
"""Helpers of all checks of ``benchmarks/gpu/check.py``: findings, comparisons, clocks, scenes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import sugar_utils  # noqa: F401  before torch

# isort: split
import torch
from torch import Tensor

from benchmarks.rasterizer import synchronize
from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from tests.support.step_scenes import large_scene

Size = TypeVar("Size")


class SkipCheck(Exception):
    """A check cannot be made here; the message says why. No fault."""


@dataclass(frozen=True)
class Setup:
    """The device by name, whether sizes are for a try on the CPU, the capture, a work folder.

    Without a capture it is the built-in demo scene.
    """

    device: str
    quick: bool
    scene: str | None
    work: str

    @property
    def place(self) -> torch.device:
        """The device for torch, with its number, as tensors name it."""
        device = torch.device(self.device)
        return torch.device("cuda", 0) if device == torch.device("cuda") else device

    @property
    def on_cuda(self) -> bool:
        return self.place.type == "cuda"

    def size(self, full: Size, quick: Size) -> Size:
        return quick if self.quick else full

    def need_cuda(self) -> None:
        """Leave a check that says nothing on a CPU."""
        if not self.on_cuda:
            raise SkipCheck("needs CUDA")


@dataclass
class Finding:
    """One row of the table; ``ok`` also where something is only measured.

    ``shown`` is the figure for people; ``figures`` are the same and more for programs.
    """

    what: str
    ok: bool
    shown: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """Something that can fail by itself; after ``seconds``, compilation included, it hangs."""

    name: str
    run: Callable[[Setup], Iterator[Finding]]
    seconds: float = 90.0


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal float32 numbers, on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def compare(
    what: str, found: Tensor, expected: Tensor, tolerance: float, *, flips: float = 0.0
) -> Finding:
    """Hold values against better ones.

    The error of an entry is relative to the largest entry of its column (last axis). A share
    ``flips`` of them may have a larger error than ``tolerance``, because a threshold (an alpha of
    1/255, a radius rounded up) may fall to either side. Then the error of all, relative L2, may be
    100 tolerances.
    """
    a, b = (t.detach().to("cpu", torch.float64) for t in (found, expected))
    if a.shape != b.shape:
        return Finding(what, False, f"shape {tuple(a.shape)}, expected {tuple(b.shape)}")
    if not b.numel():
        return Finding(what, True, "nothing to compare, as expected")
    a, b = (t.reshape(-1, t.shape[-1] if t.dim() > 1 else 1) for t in (a, b))
    largest = b.abs().amax(dim=0)
    scale = largest.clamp_min(max(1e-6 * float(largest.max()), 1e-12))
    error = ((a - b).abs() / scale).nan_to_num(nan=torch.inf)
    worst, over = float(error.max()), float((error > tolerance).double().mean())
    relative = float((a - b).norm() / b.norm().clamp_min(1e-12))
    ok = over <= flips and (over == 0 or relative <= 100 * tolerance)
    shown = f"error {worst:.1e}, allowed {tolerance:.0e}"
    if flips:
        shown += f"; {100 * over:.2g} % beyond it, allowed {100 * flips:.2g} %"
    figures = {"largest": worst, "beyond": over, "relative_l2": relative, "tolerance": tolerance}
    return Finding(what, ok, shown, figures)


def equal(what: str, found: Tensor, expected: Tensor) -> Finding:
    """Hold values against those that they must be to the last bit."""
    a, b = found.detach().cpu(), expected.detach().cpu()
    if a.shape != b.shape:
        return Finding(what, False, f"shape {tuple(a.shape)}, expected {tuple(b.shape)}")
    n_wrong = int((a != b).sum())
    shown = "equal" if not n_wrong else f"{n_wrong:,} of {a.numel():,} differ"
    return Finding(what, not n_wrong, shown, {"differing": n_wrong, "of": a.numel()})


def equal_values(what: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Finding:
    """Hold named values against those that they must be to the last bit, in one row."""
    differing = 0
    for name, values in expected.items():
        is_alike = values.shape == found[name].shape
        differing += int((values != found[name]).sum()) if is_alike else values.numel()
    shown = "equal" if not differing else f"{differing:,} values differ"
    return Finding(what, not differing, shown, {"differing": differing})


def full_hd_scene(setup: Setup, n: int) -> tuple[Gaussians, Camera]:
    """Made-up Gaussians and a view of 1920 x 1244 pixels, in quick tries of few."""
    return large_scene(n, setup.size(1920, 64), setup.size(1244, 48), setup.place)


def on_device(gaussians: Gaussians, device: torch.device | str) -> Gaussians:
    values = (t.detach().to(device) for t in gaussians.tensors())
    return Gaussians(*values, **gaussians.rendering())


def milliseconds(
    device: torch.device, work: Callable[[], object], *, repeats: int = 11, budget: float = 2.0
) -> float:
    """Median time of work, after a call to warm up; after ``budget`` seconds nothing is begun."""
    work()
    synchronize(device)
    times, started = [], time.perf_counter()
    while len(times) < repeats and (not times or time.perf_counter() - started < budget):
        begun = time.perf_counter()
        work()
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times)
