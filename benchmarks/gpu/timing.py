# SPDX-License-Identifier: Apache-2.0
"""Times of the rasterizer's steps on a device, from thousands to millions of Gaussians.

Shares of the peak count work as ``benchmarks/rasterizer.py`` does: 125 operations for each blended
(pixel, Gaussian) pair, forward and backward. Shares of the bandwidth count the least bytes that a
step must move: every Gaussian's parameters and splat once, pixels once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.common import (
    Check,
    Finding,
    Setup,
    SkipCheck,
    large_scene,
    measure_peaks,
    milliseconds,
)
from benchmarks.rasterizer import FLOP_PER_PAIR, N_FEATURES, count_blended_pairs
from gaussian_splatting.rasterization import (
    Projection,
    Rows,
    SplatGradients,
    build_tile_lists,
    project,
)
from gaussian_splatting.rasterization.backends import load_gsplat
from gaussian_splatting.rasterization.projection_kernels import SPLAT_HEADER
from gaussian_splatting.rasterization.rasterizers import Rasterizer
from sugar_utils.errors import UserError
from sugar_utils.memory import out_of_memory

CHANNELS = 3 + N_FEATURES
PARAMETERS = 3 + 4 + 3 + 1 + 48 + N_FEATURES
SIZES = (50_000, 300_000, 1_000_000, 3_000_000, 6_000_000)
COUNTED = 1_000_000
"""Blended pairs are counted up to this size; it takes longer than what is measured."""


def _blend_times(
    setup: Setup, rasterizer: Rasterizer, found: Projection, tiles: Any, d_pixels: Tensor
) -> tuple[float, float, Tensor, SplatGradients]:
    """Milliseconds forward and backward, pixels, and gradients of splats."""
    behind, rows = torch.zeros(CHANNELS, device=setup.place), Rows(0, found.camera.height)
    splats, gradients = found.splats.detach(), SplatGradients.zeros(found)
    d_left = torch.zeros(d_pixels.shape[:2], device=setup.place)

    def forward() -> Any:
        return rasterizer.blend_rows(splats, tiles, behind, rows)

    def both() -> Any:
        # Graphs of other packages can be walked through once, so each way back needs its own.
        blended = forward()
        rasterizer.backpropagate_rows(splats, tiles, behind, blended, d_pixels, d_left, gradients)
        return blended

    there = milliseconds(setup.place, forward)
    back = milliseconds(setup.place, both) - there
    gradients.splats.zero_()
    gradients.means2d.zero_()
    blended = both()
    return there, back, blended.pixels, gradients


def _projection_times(
    setup: Setup, leaves: Any, camera: Any, features: Tensor
) -> tuple[float, float]:
    """Milliseconds forward and backward, spherical harmonics included."""

    def forward() -> Projection:
        return project(leaves, camera, features=features)

    def time_backward() -> float:
        found = forward()
        outputs, inputs = [found.means2d, found.splats], [*leaves.tensors(), features]
        weights = [torch.ones_like(t) for t in outputs]
        return milliseconds(
            setup.place,
            lambda: torch.autograd.grad(outputs, inputs, weights, retain_graph=True),
        )

    back = time_backward()
    with torch.no_grad():
        return milliseconds(setup.place, forward), back


def _steps(setup: Setup, n: int) -> Iterator[Finding]:
    """All steps at one size."""
    bandwidth, flops = measure_peaks(setup.place, quick=setup.quick)
    width, height = setup.size(1920, 64), setup.size(1244, 48)
    gaussians, camera = large_scene(n, width, height, setup.place)
    leaves = gaussians.as_leaves()
    features = torch.rand(n, N_FEATURES, device=setup.place).requires_grad_()
    forward, backward = _projection_times(setup, leaves, camera, features)
    moved = 4 * n * (PARAMETERS + SPLAT_HEADER + CHANNELS)
    yield _time("projection and SH, forward", forward, of_bandwidth=moved / bandwidth)
    yield _time("projection and SH, backward", backward, of_bandwidth=2 * moved / bandwidth)
    with torch.no_grad():
        found = project(gaussians, camera, features=features.detach())
    lists = milliseconds(setup.place, lambda: build_tile_lists(found))
    tiles = build_tile_lists(found)
    n_pairs = tiles.ids.shape[0]
    yield _time(f"tile lists, {n_pairs:,} pairs", lists, pairs=n_pairs)

    d_pixels = torch.rand(height, width, CHANNELS, device=setup.place)
    used = Rasterizer(blocks=True)
    there, back, pixels, gradients = _blend_times(setup, used, found, tiles, d_pixels)
    least = 4 * (n_pairs * (SPLAT_HEADER + CHANNELS + 1) + pixels.numel())
    yield _time("blending, forward", there, of_bandwidth=least / bandwidth)
    yield _time("blending, backward", back, of_bandwidth=2 * least / bandwidth)
    if n <= COUNTED:
        blended = count_blended_pairs(found, tiles)
        needed = blended * FLOP_PER_PAIR / flops
        yield _time("blending, both", there + back, of_flops=needed, blended_pairs=blended)
    total = forward + backward + lists + there + back
    yield _time("everything", total, frames_per_second=1e3 / total)
    yield from _beside_gsplat(setup, found, d_pixels, (there, back, pixels, gradients))


def _time(what: str, ms: float, **more: float) -> Finding:
    """Milliseconds, and shares of peaks where the seconds at the peak are given."""
    shares = {name: s / (ms / 1e3) for name, s in more.items() if name.startswith("of_")}
    words = [f"{100 * share:.0f} % {name.replace('_', ' ')}" for name, share in shares.items()]
    return Finding(what, True, ", ".join([f"{ms:.3f} ms", *words]), {"ms": ms, **more, **shares})


def _beside(
    setup: Setup, name: str, other: Rasterizer, tiles: Any, found: Projection, d_pixels: Tensor,
    own: tuple, tolerance: float,
) -> Iterator[Finding]:  # fmt: skip
    """The same splats and lists, blended by something else."""
    there, back, pixels, gradients = own
    result = _blend_times(setup, other, found, tiles, d_pixels)
    for way, ms, theirs in (("forward", there, result[0]), ("backward", back, result[1])):
        shown = f"{theirs:.3f} ms, {theirs / ms:.2f} times ours"
        yield Finding(f"{name}, {way}", True, shown, {"ms": theirs, "ours": ms})
    for what, a, b in (
        ("pixels", pixels, result[2]), ("gradients", gradients.splats, result[3].splats),
    ):  # fmt: skip
        error = float((a - b).norm() / b.norm().clamp_min(1e-12))
        yield Finding(f"{name}, {what}", error < tolerance, f"differ by {error:.1e}, relative L2")


def _beside_gsplat(
    setup: Setup, found: Projection, d_pixels: Tensor, own: tuple
) -> Iterator[Finding]:
    """The same by the other package, where it is installed."""
    try:
        other = load_gsplat() if setup.on_cuda else None
    except UserError:
        other = None
    if other is not None:
        tiles = other.build_tile_lists(found)
        yield from _beside(setup, "gsplat", other, tiles, found, d_pixels, own, 2e-2)


def _at(n: int) -> Callable[[Setup], Iterator[Finding]]:
    def run(setup: Setup) -> Iterator[Finding]:
        if setup.quick and n != SIZES[0]:
            raise SkipCheck("a quick try takes one size")
        try:
            yield from _steps(setup, setup.size(n, 300))
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise SkipCheck("does not fit into the memory of this device") from error

    return run


def full_screen(setup: Setup) -> Iterator[Finding]:
    """What 20 splats in every tile of the image cost: one thread for each would take long."""
    width, height = setup.size(1920, 64), setup.size(1244, 48)
    gaussians, camera = large_scene(setup.size(300_000, 300), width, height, setup.place)
    with torch.no_grad():
        means = gaussians.means[:20]
        gaussians.means[:20] = means.mean(dim=0) + 0.01 * (means - means.mean(dim=0))
        gaussians.scales[:20] = 300.0
        gaussians.opacities[:20] = 0.05
        found = project(gaussians, camera, features=means.new_zeros(len(gaussians), N_FEATURES))
    lists = milliseconds(setup.place, lambda: build_tile_lists(found, blocks=True))
    tiles = build_tile_lists(found, blocks=True)
    n_filling = int((found.tile_counts == tiles.offsets.shape[0] - 1).sum())
    yield _time(f"tile lists, {n_filling} in every tile", lists, filling=n_filling)
    d_pixels = torch.rand(height, width, CHANNELS, device=setup.place)
    own = _blend_times(setup, Rasterizer(blocks=True), found, tiles, d_pixels)
    yield _time("blending, forward", own[0])
    yield _time("blending, backward", own[1])


def gsplat(setup: Setup) -> Iterator[Finding]:
    """Whether there is anything to compare with."""
    setup.need_cuda()
    try:
        load_gsplat()
    except UserError as error:
        raise SkipCheck(str(error)) from error
    yield Finding("gsplat", True, "installed")


CHECKS = (
    Check("gsplat", gsplat),
    *(Check(f"{n:,} Gaussians", _at(n)) for n in SIZES),
    Check("20 fill the screen", full_screen),
)
