# SPDX-License-Identifier: Apache-2.0
"""Poisson reconstruction by Open3D and by pycolmap, side by side: ``python benchmarks/poisson.py``.

Points of a bumpy ball with noise, with its exact normals, go through each library with the
program's own settings. Each one runs in a process of its own, after the other, because freed
memory does not always go back to the system. Its peak is counted from when the points are there,
so it is that of the step. Errors are distances along the ray from the centre.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
import numpy as np

from benchmarks.rasterizer import print_machine, print_table
from sugar_extractors.mesh.meshing_backends import SolverConfig, choose_backend
from sugar_extractors.mesh.surface_samples import SurfaceSamples
from sugar_utils.flags import Parser, non_negative_int, positive_int
from sugar_utils.frame import run_main
from sugar_utils.memory import memory_usage, reset_peak

_HEIGHT, _WAVES, _NOISE = 0.02, 12.0, 5e-4


def radius(directions: np.ndarray) -> np.ndarray:
    """Distance of the surface from the centre. (N, 3) unit -> (N, 1)"""
    return 1 + _HEIGHT * np.sin(_WAVES * directions).sum(axis=1, keepdims=True)


def bumpy_ball(n: int) -> SurfaceSamples:
    """Even points with noise, and the surface's normals."""
    rng = np.random.default_rng(0)
    directions = rng.standard_normal((n, 3))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    r = radius(directions)
    # Gradient of |x| - radius(x / |x|).
    slope = _HEIGHT * _WAVES * np.cos(_WAVES * directions)
    slope -= (slope * directions).sum(axis=1, keepdims=True) * directions
    normals = directions - slope / r
    normals /= np.linalg.norm(normals, axis=1, keepdims=True)
    points = directions * r + rng.normal(0, _NOISE, (n, 3))
    colors = np.rint(127 * directions + 128)
    return SurfaceSamples(
        points.astype(np.float32), normals.astype(np.float32), colors.astype(np.uint8)
    )


def measure(name: str, n_points: int, solver: SolverConfig) -> list[str]:
    """Run one library in this process; cells of its row, with plain numbers to compare first."""
    samples = bumpy_ball(n_points)
    backend = choose_backend(name)
    reset_peak("cpu")
    start, cpu = time.perf_counter(), time.process_time()
    mesh = backend.reconstruct(samples, solver).mesh
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = memory_usage("cpu").peak
    lengths = np.linalg.norm(mesh.vertices, axis=1, keepdims=True)
    error = float(np.abs(lengths - radius(mesh.vertices / lengths)).mean())
    return [
        *(name, f"{seconds:.1f}", f"{cpu:.1f}", f"{peak / 2**30:.2f}"),
        *(f"{mesh.n_faces:,}", f"{error:.2e}"),
    ]


def run(args: argparse.Namespace) -> None:
    """Measure both and print them with their ratio."""
    print_machine()
    solver = SolverConfig(poisson_depth=args.depth, poisson_threads=args.threads)
    threads = args.threads or "all"
    print(f"{args.points:,} points, depth {solver.poisson_depth}, threads: {threads}\n")
    rows = []
    for name in ("open3d", "pycolmap"):
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(max_workers=1, mp_context=context) as process:
            rows.append(process.submit(measure, name, args.points, solver).result())
    first, second = ([float(cell) for cell in row[1:4]] for row in rows)
    ratios = [f"{b / a:.2f}" for a, b in zip(first, second, strict=True)]
    rows.append(["pycolmap / open3d", *ratios, "", ""])
    print_table(["library", "seconds", "CPU s", "peak GiB", "triangles", "mean error"], rows)


def parser() -> Parser:
    """The flags."""
    flags = Parser(
        description="Poisson reconstruction by two libraries.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = SolverConfig()
    depth, threads = default.poisson_depth, default.poisson_threads
    flags.add_argument("--points", type=positive_int, default=10_000_000, help="oriented points")
    flags.add_argument("--depth", type=positive_int, default=depth, help="octree depth")
    flags.add_argument("--threads", type=non_negative_int, default=threads, help="0 for all cores")
    return flags


if __name__ == "__main__":
    sys.exit(run_main(lambda: run(parser().parse_args())))
