# SPDX-License-Identifier: Apache-2.0
"""The fused depth-normal term beside its torch twin: ``python benchmarks/depth_normals.py``.

Both start from the pixels that a rasterizer leaves and end with gradients of depth and normals.
They take turns in one run; compare ratios. Bytes are the most alive in tensors at a time beyond
the pixels, counted allocation by allocation in a round of its own.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
import torch
from torch import Tensor

from benchmarks.live_bytes import weigh
from benchmarks.rasterizer import print_machine, print_table
from gaussian_splatting.rasterization import complete_normals
from sugar_trainers.depth_normals import fused_depth_normal_consistency
from sugar_trainers.losses import depth_normal_consistency
from sugar_utils.files import write_json_atomic
from sugar_utils.flags import Parser, positive_int
from sugar_utils.frame import run_main

CHANNELS = 6
"""Colour, depth, and x and y of a normal."""


def make_pixels(width: int, height: int) -> Tensor:
    """A rough surface, and empty sky in the upper quarter. (H, W, 6)"""
    rng = torch.Generator().manual_seed(0)
    pixels = 0.3 * torch.randn(height, width, CHANNELS, generator=rng)
    pixels[..., 3] = 2 + 0.01 * torch.rand(height, width, generator=rng)
    pixels[: height // 4, :, 3] = 0
    return pixels


def in_torch(depth: Tensor, normal_xy: Tensor, *lens: float) -> Tensor:
    """The twin, from the same maps."""
    return depth_normal_consistency(depth, complete_normals(normal_xy), *lens)


VERSIONS: dict[str, Callable[..., Tensor]] = {
    "fused": fused_depth_normal_consistency,
    "torch": in_torch,
}


def both_ways(version: Callable[..., Tensor], pixels: Tensor) -> list[Tensor]:
    """Loss, gradient of the depth, and of the normals."""
    height, width, _ = pixels.shape
    maps = [m.detach().requires_grad_(True) for m in (pixels[..., 3], pixels[..., 4:])]
    loss = version(*maps, float(width), float(width), width / 2, height / 2)
    loss.backward()
    return [loss.detach(), *(m.grad for m in maps)]


def run(args: argparse.Namespace) -> None:
    """Measure and print."""
    about, pixels = print_machine(), make_pixels(args.width, args.height)
    n_pixels = args.width * args.height
    seconds = dict.fromkeys(VERSIONS, float("inf"))
    processor = dict.fromkeys(VERSIONS, float("inf"))
    for version in VERSIONS.values():
        both_ways(version, pixels[:8, :8])
    for _ in range(args.repeats):
        for name, version in VERSIONS.items():
            wall, own = time.perf_counter(), time.process_time()
            both_ways(version, pixels)
            seconds[name] = min(seconds[name], time.perf_counter() - wall)
            processor[name] = min(processor[name], time.process_time() - own)
    rows, figures = [], {}
    exact = both_ways(in_torch, pixels.double())
    for name, version in VERSIONS.items():
        found, live = weigh(lambda version=version: both_ways(version, pixels), dict)
        errors = [
            float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)
        ]
        figures[name] = {
            "seconds": seconds[name], "processor": processor[name],
            "bytes_per_pixel": live.peak / n_pixels, "errors": errors,
        }  # fmt: skip
        rows.append([
            name, f"{seconds[name]:.3f}", f"{processor[name]:.3f}", f"{live.peak / n_pixels:.1f}",
            *(f"{error:.1e}" for error in errors),
        ])  # fmt: skip
    print(f"\n{args.width} x {args.height}, {torch.get_num_threads()} threads\n")
    header = ["version", "seconds", "processor seconds", "bytes per pixel", "loss to float64",
              "depth gradient", "normal gradient"]  # fmt: skip
    print_table(header, rows)
    if args.json:
        write_json_atomic(args.json, {"about": about, "figures": figures})


def main() -> None:
    """Parse the flags and run."""
    parser = Parser(
        description="Time and memory of the depth-normal term.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--width", type=positive_int, default=1920, help="image width")
    add("--height", type=positive_int, default=1244, help="image height")
    add("--repeats", type=positive_int, default=5, help="rounds; the best counts")
    add("--json", type=Path, help="also write the figures to this file")
    run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(run_main(main))
