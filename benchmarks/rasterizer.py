# SPDX-License-Identifier: Apache-2.0
"""Time of the rasterizer: ``python benchmarks/rasterizer.py``.

Two scenes with the statistics of trained 3DGS models are rendered with 7 channels (colour from
spherical harmonics of degree 3, and 4 free features): 50,000 Gaussians at 640 x 480 and a million
at 1920 x 1244. Each step is timed by itself, and the public call as training uses it. A scene
small enough for the dense torch reference is rendered by both, side by side.

How the share of the machine's peak is found: the peak is the best rate of a float32 matrix
product with the same number of threads, measured in the same run. Work is counted as blended
(pixel, Gaussian) pairs times 125 floating-point operations, an estimate of what one pair needs
forward and backward with 7 channels: the exponent and its gradient, the exponential, the
transmittance, and two products and sums per channel and direction. The pairs are counted from
the very scene, in torch, by the rules of the contract (alpha at least 1/255, and blending stops
before the transmittance falls below 1e-4). Tests of pixels that a Gaussian does not reach,
projection and sorting count as overhead, not as work.

Times are medians after a warm-up. Compare ratios within one run, never milliseconds of two runs:
machines, and the same machine at two moments, differ by more than the code does. A busy machine
spoils all of it: look at the load that is printed first.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
import numpy as np
import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.cloud import GaussianCloud, Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.rasterization import (
    RenderOutput,
    TileLists,
    blend,
    build_tile_lists,
    rasterize,
)
from gaussian_splatting.rasterization.projection import Projection, project
from gaussian_splatting.rasterization.reference import rasterize_reference
from gaussian_splatting.rasterization.view import (
    ALPHA_MAX,
    ALPHA_MIN,
    TILE,
    TRANSMITTANCE_MIN,
    n_tiles,
)
from sugar_utils.flags import Parser, positive_int
from sugar_utils.frame import run_main
from sugar_utils.memory import format_bytes, memory_usage

REPOSITORY = Path(__file__).resolve().parent.parent
FLOP_PER_PAIR = 125
N_FEATURES = 4
MATMUL_SIZE = 2048
STEPS = ("projection and SH", "tile lists", "blending", "everything")


@dataclass(frozen=True)
class Case:
    """A scene to time.

    Attributes:
        name: As ``--case`` takes it.
        n: Gaussians.
        width: Image width in pixels.
        height: Image height in pixels.
        repeats: Timed repetitions.
        radius: Median radius on screen, in pixels: three deviations along the longest axis.
    """

    name: str
    n: int
    width: int
    height: int
    repeats: int
    radius: float = 4.4

    @property
    def title(self) -> str:
        """One line for people."""
        return f"{self.n:,} Gaussians, {self.width} x {self.height}"


TINY = Case("tiny", 400, 70, 50, repeats=20, radius=9.0)
CASES = (Case("50k", 50_000, 640, 480, repeats=15), Case("1m", 1_000_000, 1920, 1244, repeats=4))


@dataclass
class Timing:
    """Medians of one step in milliseconds."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


@dataclass
class Result:
    """What was measured of one case."""

    case: Case
    visible: int
    tile_pairs: int
    blended_pairs: int
    timings: dict[str, Timing] = field(default_factory=dict)

    def record(self, peak: float) -> dict:
        """All of it as JSON values."""
        return {**asdict(self), "share_of_peak": {step: self.share(step, peak) for step in STEPS}}

    def share(self, step: str, peak: float) -> float | None:
        """Share of ``peak`` (operations per second); None for steps that do not blend."""
        if step not in ("blending", "everything"):
            return None
        return self.blended_pairs * FLOP_PER_PAIR / (self.timings[step].both / 1e3) / peak


def make_scene(case: Case, seed: int = 0) -> tuple[Gaussians, Camera]:
    """Gaussians like those of a trained model: a wavy wall, a sphere before it, and floaters.

    Sizes on screen are log-normal, shapes flat or needle-like, opacities either high or spread
    towards low.

    Args:
        case: Number, image size and median radius.
        seed: Random seed.
    """
    rng = np.random.default_rng(seed)
    focal, n = 0.86 * case.width, case.n
    camera = Camera(
        "benchmark", case.width, case.height, focal, focal, case.width / 2, case.height / 2,
        rotation=np.eye(3), translation=np.zeros(3),
    )  # fmt: skip
    n_wall, n_ball = round(0.7 * n), round(0.2 * n)
    n_free = n - n_wall - n_ball
    half = np.array([case.width, case.height]) / (2 * focal)

    def in_view(depth: np.ndarray, at: np.ndarray) -> np.ndarray:
        return np.concatenate([at * depth[:, None] * half, depth[:, None]], axis=1)

    at = rng.uniform(-1.05, 1.05, (n_wall, 2))
    wall = in_view(6 + 0.5 * np.sin(3 * at[:, 0]) + rng.normal(0, 0.03, n_wall), at)
    ball = rng.normal(size=(n_ball, 3))
    ball /= np.linalg.norm(ball, axis=1, keepdims=True)
    ball += (0.3, 0.0, 4.0) + rng.normal(0, 0.01, (n_ball, 3))
    free = in_view(rng.uniform(2, 12, n_free), rng.uniform(-1.05, 1.05, (n_free, 2)))
    means = np.concatenate([wall, ball, free])

    deviation = np.exp(rng.normal(np.log(case.radius / 3), 0.75, n)) * means[:, 2] / focal
    flatness = np.exp(-np.abs(rng.normal(0, (1e-4, 0.6, 1.2), (n, 3))))
    quats = rng.normal(size=(n, 4))
    solid = rng.uniform(size=n) < 0.35
    opacities = np.where(solid, rng.beta(6, 1.2, n), rng.beta(1, 2, n))
    arrays = (
        means,
        quats / np.linalg.norm(quats, axis=1, keepdims=True),
        deviation[:, None] * flatness,
        opacities,
        rng.normal(0, 0.8, (n, 1, 3)),
        rng.normal(0, 0.2, (n, 15, 3)),
    )
    return Gaussians(*(torch.from_numpy(a.astype(np.float32)) for a in arrays)), camera


def count_blended_pairs(projection: Projection, tiles: TileLists) -> int:
    """(pixel, Gaussian) pairs that the rules of the contract blend, tile by tile in torch."""
    camera, offsets = projection.camera, tiles.offsets.tolist()
    across, _ = n_tiles(camera)
    splats = projection.splats.detach()
    total = torch.zeros((), dtype=torch.int64, device=splats.device)
    for tile in range(len(offsets) - 1):
        ids = tiles.ids[offsets[tile] : offsets[tile + 1]].long()
        left, top = tile % across * TILE, tile // across * TILE
        like = {"dtype": torch.float32, "device": splats.device}
        x = torch.arange(left, min(left + TILE, camera.width), **like)
        y = torch.arange(top, min(top + TILE, camera.height), **like)
        rows = splats[ids, :6, None, None]  # (K, 6, 1, 1)
        dx, dy = x - rows[:, 0], y[:, None] - rows[:, 1]  # (K, 1, W), (K, H, 1)
        sigma = 0.5 * (rows[:, 2] * dx * dx + rows[:, 4] * dy * dy) + rows[:, 3] * dx * dy
        alpha = (rows[:, 5] * (-sigma).exp()).clamp_max(ALPHA_MAX)
        hit = (alpha >= ALPHA_MIN) & (sigma >= 0)
        through = torch.where(hit, 1 - alpha, 1.0).cumprod(dim=0)
        total += (hit & (through >= TRANSMITTANCE_MIN)).sum()
    return int(total)


class Stopwatch:
    """Collects times by name."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    def __call__(self, name: str, work: Callable[[], object]) -> object:
        """Run ``work``, note how long it took and pass its result on."""
        start = time.perf_counter()
        result = work()
        self._seconds.setdefault(name, []).append(time.perf_counter() - start)
        return result

    def median(self, name: str) -> float:
        """Median in milliseconds."""
        return statistics.median(self._seconds[name]) * 1e3


def measure(case: Case, repeats: int) -> Result:
    """Time all steps of one case."""
    gaussians, camera = make_scene(case)
    features = torch.randn(case.n, N_FEATURES, generator=torch.Generator().manual_seed(1))
    shape = (case.height, case.width, 3 + N_FEATURES)
    d_pixels = torch.randn(*shape, generator=torch.Generator().manual_seed(2))
    projection = project(gaussians, camera, features=features)
    tiles = build_tile_lists(projection)
    result = Result(
        case,
        visible=int((projection.radii > 0).sum()),
        tile_pairs=tiles.ids.shape[0],
        blended_pairs=count_blended_pairs(projection, tiles),
    )
    watch = Stopwatch()
    for repeat in range(repeats + 1):
        # The first round compiles kernels and touches memory.
        note = Stopwatch() if repeat == 0 else watch
        _steps_once(note, gaussians, camera, features, d_pixels)
        _whole_once(note, gaussians, camera, features, d_pixels)
    lists = watch.median("tile lists")
    blending = watch.median("blend") - lists
    result.timings = {
        "projection and SH": Timing(watch.median("project"), watch.median("project back")),
        "tile lists": Timing(lists, 0.0),
        "blending": Timing(blending, watch.median("blend back")),
        "everything": Timing(watch.median("whole"), watch.median("whole back")),
    }
    return result


def _steps_once(
    note: Stopwatch, gaussians: Gaussians, camera: Camera, features: Tensor, d_pixels: Tensor
) -> None:
    """One pass, cut between projection and blending so that each can be timed."""
    leaves = gaussians.as_leaves()
    free = features.clone().requires_grad_(True)
    projection = note("project", lambda: project(leaves, camera, features=free))
    splats = [t.detach().requires_grad_(True) for t in (projection.means2d, projection.splats)]
    cut = replace(projection, means2d=splats[0], splats=splats[1])
    note("tile lists", lambda: build_tile_lists(cut))
    background = torch.zeros(d_pixels.shape[-1])
    pixels, _ = note("blend", lambda: blend(cut, background))
    note("blend back", lambda: pixels.backward(d_pixels))
    note(
        "project back",
        lambda: torch.autograd.backward(
            [projection.means2d, projection.splats], [leaf.grad for leaf in splats]
        ),
    )


def _whole_once(
    note: Stopwatch, gaussians: Gaussians, camera: Camera, features: Tensor, d_pixels: Tensor
) -> None:
    """One pass through the public call."""
    leaves = gaussians.as_leaves()
    free = features.clone().requires_grad_(True)
    output = note("whole", lambda: rasterize(leaves, camera, features=free))
    gradients = [d_pixels[..., :3], d_pixels[..., 3:]]
    note("whole back", lambda: torch.autograd.backward([output.image, output.features], gradients))


def measure_reference(repeats: int) -> tuple[Timing, Timing, float]:
    """The tiny scene with ours and with the dense torch reference, 7 channels each.

    The reference always renders depth and normals, so they take the place of three features.

    Returns:
        Timings of ours and of the reference, and the largest difference of their images.
    """
    gaussians, camera = make_scene(TINY, seed=3)
    feature = torch.rand(TINY.n, 1, generator=torch.Generator().manual_seed(4))

    def ours(leaves: Gaussians, free: Tensor) -> RenderOutput:
        return rasterize(leaves, camera, depth=True, normal=True, features=free)

    def dense(leaves: Gaussians, free: Tensor) -> RenderOutput:
        return rasterize_reference(leaves, camera, features=free)

    watch, images = Stopwatch(), {}
    for repeat in range(repeats + 1):
        note = Stopwatch() if repeat == 0 else watch
        for name, render in (("ours", ours), ("dense", dense)):
            leaves, free = gaussians.as_leaves(), feature.clone().requires_grad_(True)
            output = note(name, lambda render=render, a=leaves, b=free: render(a, b))
            maps = [output.image, output.depth, output.normal, output.features]
            ones = [torch.ones_like(m) for m in maps]
            note(f"{name} back", lambda m=maps, g=ones: torch.autograd.backward(m, g))
            images[name] = output.image.detach()
    timings = [Timing(watch.median(n), watch.median(f"{n} back")) for n in ("ours", "dense")]
    return timings[0], timings[1], float((images["ours"] - images["dense"]).abs().max())


def measure_peak(repeats: int = 8) -> float:
    """Best rate of a float32 matrix product, in floating-point operations per second."""
    a, b = torch.rand(MATMUL_SIZE, MATMUL_SIZE), torch.rand(MATMUL_SIZE, MATMUL_SIZE)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - start)
    return 2 * MATMUL_SIZE**3 / min(seconds)


def print_machine() -> dict[str, str | int]:
    """Print :func:`describe_machine`, and return it for the JSON file."""
    about = describe_machine()
    for name, value in about.items():
        print(f"{name}: {value}")
    return about


def as_cloud(gaussians: Gaussians) -> GaussianCloud:
    """Raw parameters of activated Gaussians, their opacities between 0.01 and 0.99."""
    return GaussianCloud(
        means=gaussians.means,
        sh_dc=gaussians.sh_dc,
        sh_rest=gaussians.sh_rest,
        opacity_logits=torch.logit(gaussians.opacities.clamp(0.01, 0.99))[:, None],
        log_scales=gaussians.scales.log(),
        quats=gaussians.quats,
    )


def describe_machine() -> dict[str, str | int]:
    """What a figure means nothing without."""
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


def _commit() -> str:
    """Commit of the working tree; "unknown" outside a clone."""
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
        cells = [
            row[0].ljust(widths[0]),
            *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)),
        ]
        print("| " + " | ".join(cells) + " |")


def print_result(result: Result, peak: float) -> None:
    """One case for people."""
    print(
        f"\n{result.case.title}, 7 channels: {result.visible:,} visible, "
        f"{result.tile_pairs:,} (tile, Gaussian) pairs, {result.blended_pairs / 1e6:.2f} M blended "
        "(pixel, Gaussian) pairs\n"
    )
    rows = []
    for step in STEPS:
        timing, share = result.timings[step], result.share(step, peak)
        times = (f"{ms:.1f}" for ms in (timing.forward, timing.backward, timing.both))
        rows.append([step, *times, "" if share is None else f"{100 * share:.1f} %"])
    print_table(["step", "forward ms", "backward ms", "both ms", "of peak"], rows)


def print_reference(ours: Timing, dense: Timing, difference: float) -> None:
    """The comparison with the dense reference for people."""
    print(f"\n{TINY.title}, 7 channels, beside the dense torch reference (float32)\n")
    rows = [
        [name, f"{t.forward:.2f}", f"{t.backward:.2f}", f"{t.both:.2f}"]
        for name, t in (("this rasterizer", ours), ("dense reference", dense))
    ]
    print_table(["", "forward ms", "backward ms", "both ms"], rows)
    print(f"\nratio {dense.both / ours.both:.1f}, largest difference of a pixel {difference:.1e}")


def run(args: argparse.Namespace) -> None:
    """Measure what was asked for, print it and write the JSON file."""
    if args.threads:
        torch.set_num_threads(args.threads)
    about = print_machine()
    # The peak is measured several times over the run: a busy moment must not flatter the shares.
    peak, results, reference = measure_peak(), [], None
    for case in CASES:
        if args.case in ("all", case.name):
            results.append(measure(case, args.repeats or case.repeats))
            peak = max(peak, measure_peak())
    if args.case in ("all", TINY.name):
        reference = measure_reference(args.repeats or TINY.repeats)
        peak = max(peak, measure_peak())
    peak_bytes = memory_usage("cpu").peak
    print(f"peak: {peak / 1e9:.0f} GFLOP/s (float32 matrix product, same threads)")
    print(f"memory: {format_bytes(peak_bytes)} resident at most")
    for result in results:
        print_result(result, peak)
    if reference is not None:
        print_reference(*reference)
    if args.json:
        record = {
            "about": about,
            "peak_flops": peak,
            "peak_rss_bytes": peak_bytes,
            "cases": {result.case.name: result.record(peak) for result in results},
            "reference": reference
            and dict(zip(("ours", "dense"), map(asdict, reference[:2]), strict=True)),
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        print(f"written: {args.json}")


def main() -> None:
    """Parse the flags and run."""
    parser = Parser(
        description="Time the rasterizer.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    names = ["all", TINY.name, *(case.name for case in CASES)]
    parser.add_argument("--case", choices=names, default="all", help="what to measure")
    parser.add_argument("--threads", type=positive_int, help="CPU threads; unset: torch's choice")
    parser.add_argument("--repeats", type=positive_int, help="repetitions; unset: by size")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(run_main(main))
