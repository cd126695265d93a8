# SPDX-License-Identifier: Apache-2.0
"""Times of the rasterizer's steps on a device, from thousands to millions of Gaussians."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.common import Check, Finding, Setup, SkipCheck, full_hd_scene
from benchmarks.rasterizer import time_steps
from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from sugar_utils.memory import out_of_memory

SIZES = (50_000, 300_000, 1_000_000, 3_000_000, 6_000_000)


def _timed(setup: Setup, gaussians: Gaussians, camera: Camera) -> Iterator[Finding]:
    times, visible, n_pairs = time_steps(gaussians, camera, setup.size(11, 2), budget=8.0)
    facts = {"visible": visible, "intersections": n_pairs}
    yield Finding("visible", True, f"{visible:,}, {n_pairs:,} tile intersections", facts)
    for name, ms in times.items():
        yield Finding(name, True, f"{ms:.3f} ms", {"ms": ms})


def _at(n: int) -> Callable[[Setup], Iterator[Finding]]:
    def run(setup: Setup) -> Iterator[Finding]:
        if setup.quick and n != SIZES[0]:
            raise SkipCheck("a quick try takes one size")
        try:
            yield from _timed(setup, *full_hd_scene(setup, setup.size(n, 300)))
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise SkipCheck("does not fit into the memory of this device") from error

    return run


def full_screen(setup: Setup) -> Iterator[Finding]:
    """20 splats in every tile of the image."""
    gaussians, camera = full_hd_scene(setup, setup.size(300_000, 300))
    with torch.no_grad():
        means = gaussians.means[:20]
        gaussians.means[:20] = means.mean(dim=0) + 0.01 * (means - means.mean(dim=0))
        gaussians.scales[:20] = 300.0
        gaussians.opacities[:20] = 0.05
    yield from _timed(setup, gaussians, camera)


CHECKS = (
    *(Check(f"{n:,} Gaussians", _at(n)) for n in SIZES),
    Check("20 fill the screen", full_screen),
)
