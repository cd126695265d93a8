# SPDX-License-Identifier: Apache-2.0
"""Neighbours of millions of points, and fields beside chunked torch, on a device."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.fields import block, make_inputs
from benchmarks.gpu.common import Check, Finding, Setup, equal, milliseconds, synchronize
from benchmarks.neighbors import reconstruction_points
from sugar_scene.fields.field_kernels import evaluate_fields
from sugar_scene.fields.reference_fields import evaluate_fields_reference
from sugar_utils.memory import format_bytes
from sugar_utils.neighbors import nearest_neighbors

NEIGHBORS = 16


def search(setup: Setup) -> Iterator[Finding]:
    """All neighbours of a large cloud, some of them beside brute force."""
    n = setup.size(5_000_000, 5_000)
    points = reconstruction_points(n).to(setup.place)
    result = nearest_neighbors(points, NEIGHBORS)
    if setup.on_cuda:
        synchronize(setup.place)
        before = torch.cuda.memory_allocated(setup.place)
        torch.cuda.reset_peak_memory_stats(setup.place)
    ms = milliseconds(setup.place, lambda: nearest_neighbors(points, NEIGHBORS), repeats=3)
    shown = f"{ms / 1e3:.2f} s, {n / ms * 1e3:,.0f} queries/s"
    if setup.on_cuda:
        peak = torch.cuda.max_memory_allocated(setup.place) - before
        shown += f", {format_bytes(peak)} beyond the points"
    yield Finding(f"{n:,} points, K = {NEIGHBORS}", True, shown, {"ms": ms, "points": n})

    draws = torch.Generator().manual_seed(1)
    rows = torch.randperm(n, generator=draws)[: setup.size(400, 50)].to(setup.place)
    squares = torch.empty(len(rows), NEIGHBORS, device=setup.place)
    for i, query in enumerate(points[rows]):
        x, y, z = (points - query).unbind(-1)
        squares[i] = ((x * x + y * y) + z * z).topk(NEIGHBORS, largest=False).values
    yield equal(f"{len(rows)} of them beside brute force", result.sq_distances[rows], squares)


def fields(setup: Setup) -> Iterator[Finding]:
    """A million samples, forward and backward, beside torch in chunks."""
    n, n_samples = setup.size(300_000, 500), setup.size(1_000_000, 2_000)
    gaussians, samples = make_inputs(n, n_samples, NEIGHBORS)
    gaussians, samples = ([t.to(setup.place) for t in part] for part in (gaussians, samples))
    chunk, times, results = setup.size(50_000, 500), {}, {}
    for name, evaluate, at_once in (
        ("kernels", evaluate_fields, n_samples), ("torch", evaluate_fields_reference, chunk),
    ):  # fmt: skip

        def work(evaluate=evaluate, at_once=at_once):
            return block(evaluate, gaussians, samples, at_once)

        results[name] = work()
        times[name] = milliseconds(setup.place, work, repeats=5, budget=4.0)
        shown = f"{times[name]:.1f} ms in chunks of {at_once:,}"
        yield Finding(f"{n_samples:,} samples, {name}", True, shown, {"ms": times[name]})
    ratio = times["torch"] / times["kernels"]
    yield Finding("torch beside kernels", True, f"{ratio:.1f} times as long", {"ratio": ratio})
    (loss, gradients), (true_loss, truth) = results["kernels"], results["torch"]
    apart = abs(loss / true_loss - 1)
    yield Finding("loss", apart < 1e-4, f"differs by {apart:.1e}, allowed 1e-04")
    for name, a, b in zip(("means", "quats", "scales", "opacities"), gradients, truth, strict=True):
        error = float((a - b).norm() / b.norm().clamp_min(1e-12))
        shown = f"differs by {error:.1e} (relative L2), allowed 1e-02"
        yield Finding(f"gradient of {name}", error < 1e-2, shown, {"relative_l2": error})


CHECKS = (Check("neighbours", search), Check("fields", fields))
