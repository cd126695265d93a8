# SPDX-License-Identifier: Apache-2.0
"""Time of the rasterizer: ``python benchmarks/rasterizer.py``.

Two scenes with the statistics of trained 3DGS models are rendered with 7 channels (colour from
spherical harmonics of degree 3, and 4 features): 50,000 Gaussians at 640 x 480 and a million at
1920 x 1244. Each step is timed by itself, and the public call as training uses it. Times are
medians after a warm-up; compare ratios within one run.
"""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
import torch
import warp as wp

from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.rasterization import blend, build_tile_lists, project, rasterize
from sugar_utils.entrypoint import run_main
from sugar_utils.memory import format_bytes, memory_usage
from tests.support.step_scenes import Case, make_scene

REPOSITORY = Path(__file__).resolve().parent.parent
N_FEATURES = 4
CASES = (Case("50k", 50_000, 640, 480, repeats=15), Case("1m", 1_000_000, 1920, 1244, repeats=4))


def synchronize(device: torch.device) -> None:
    """Wait for all work of a device; errors of kernels appear here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_steps(
    gaussians: Gaussians, camera: Camera, repeats: int, budget: float = 60.0
) -> tuple[dict[str, float], int, int]:
    """Time all steps of a scene, on the device of its tensors.

    No repetition begins after ``budget`` seconds. Returns median milliseconds by step, visible
    Gaussians, and tile intersections.
    """
    device, times = gaussians.means.device, {}
    features = torch.randn(len(gaussians), N_FEATURES, generator=torch.Generator().manual_seed(1))
    features = features.to(device)
    shape = (camera.height, camera.width, 3 + N_FEATURES)
    d_pixels = torch.randn(*shape, generator=torch.Generator().manual_seed(2)).to(device)
    background = torch.zeros(shape[-1], device=device)

    def timed(name: str, work: Callable[[], object]) -> object:
        synchronize(device)
        start = time.perf_counter()
        result = work()
        synchronize(device)
        times.setdefault(name, []).append(1e3 * (time.perf_counter() - start))
        return result

    started = time.perf_counter()
    for repeat in range(repeats + 1):
        if repeat > 1 and time.perf_counter() - started > budget:
            break
        leaves, free = gaussians.as_leaves(), features.clone().requires_grad_()
        found = timed("projection", lambda a=leaves, b=free: project(a, camera, features=b))
        cut = [t.detach().requires_grad_() for t in (found.means2d, found.splats)]
        own = replace(found, means2d=cut[0], splats=cut[1])
        tiles = timed("tile lists", lambda own=own: build_tile_lists(own))
        pixels, _ = timed("lists and blending", lambda own=own: blend(own, background))
        timed("blending, backward", lambda p=pixels: p.backward(d_pixels))
        ends, grads = [found.means2d, found.splats], [leaf.grad for leaf in cut]
        timed("projection, backward", lambda a=ends, b=grads: torch.autograd.backward(a, b))
        leaves, free = gaussians.as_leaves(), features.clone().requires_grad_()
        out = timed("everything", lambda a=leaves, b=free: rasterize(a, camera, features=b))
        ends, grads = [out.image, out.features], [d_pixels[..., :3], d_pixels[..., 3:]]
        timed("everything, backward", lambda a=ends, b=grads: torch.autograd.backward(a, b))
        if repeat == 0:
            # The first round compiles kernels and allocates memory.
            times.clear()
    medians = {name: statistics.median(values) for name, values in times.items()}
    medians["blending"] = medians.pop("lists and blending") - medians["tile lists"]
    return medians, int((found.radii > 0).sum()), tiles.ids.shape[0]


def describe_machine() -> dict[str, str | int]:
    """Facts of machine and scene that belong to every figure."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        model = next(
            (x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), model
        )
    return {
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "machine": f"{model}, {os.cpu_count()} cores, {platform.system()}",
        "load": f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown",
        "threads": torch.get_num_threads(),
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"warp {wp.__version__}",
    }


def print_machine() -> dict[str, str | int]:
    about = describe_machine()
    print(*(f"{name}: {value}" for name, value in about.items()), sep="\n")
    return about


def _commit() -> str:
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def print_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """A Markdown table with aligned columns, the first to the left."""
    table = [list(header), *map(list, rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    for row in (table[0], rule, *table[1:]):
        cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        print(f"| {' | '.join([row[0].ljust(widths[0]), *cells])} |")


def run() -> None:
    print_machine()
    for case in CASES:
        scene, camera = make_scene(case)
        times, visible, intersections = time_steps(scene, camera, case.repeats)
        print(f"\n{case.title}: {visible:,} visible, {intersections:,} tile intersections\n")
        rows = []
        for step in ("projection", "tile lists", "blending", "everything"):
            both = times[step], times.get(f"{step}, backward", 0.0)
            rows.append([step, *(f"{ms:.1f}" for ms in (*both, sum(both)))])
        print_table(["step", "forward ms", "backward ms", "both ms"], rows)
    print(f"\nmemory: {format_bytes(memory_usage('cpu').peak)} resident at most")


if __name__ == "__main__":
    sys.exit(run_main(run))
