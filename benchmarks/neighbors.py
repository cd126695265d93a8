# SPDX-License-Identifier: Apache-2.0
"""Exact neighbours at scale: ``python benchmarks/neighbors.py``.

The points lie as those of a reconstruction do: thin sheets whose density differs by orders of
magnitude, exact duplicates, and outliers a thousand scene sizes away. Two measurements:

- The search of all neighbours of the largest cloud: seconds and memory beyond the points.
- Beside brute force, in turns in one run: queries per second of the tree (all points are queries,
  building it included) and of blocks of distances with ``topk`` (a sample of the points are
  queries). The sample's answers are compared, too: a float32 matrix product rounds distances, so
  brute force subtracts coordinates.

The blocks of brute force are as large as they like to be on a CPU; a busy machine slows both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
import torch
from torch import Tensor

from benchmarks.live_bytes import weigh
from benchmarks.rasterizer import print_machine
from sugar_utils.flags import Parser, positive_int
from sugar_utils.frame import run_main
from sugar_utils.memory import format_bytes
from sugar_utils.neighbors import nearest_neighbors

N_SHEETS = 400
DUPLICATES = 0.01
OUTLIERS = 0.0005
BLOCK = 64


def reconstruction_points(n: int, seed: int = 0) -> Tensor:
    """Points on sheets of very different density, with duplicates and outliers. (N, 3)"""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    share = (1.5 * normal(N_SHEETS)).exp()
    sheet = torch.multinomial(share, n, replacement=True, generator=rng)
    axes, _ = torch.linalg.qr(normal(N_SHEETS, 3, 3))
    size = (0.8 * normal(N_SHEETS, 1)).exp() * torch.tensor([1.0, 1.0, 0.005])
    local = normal(n, 3) * size[sheet]
    points = 5 * normal(N_SHEETS, 3)[sheet] + (axes[sheet] @ local[..., None]).squeeze(-1)
    doubled, far = int(DUPLICATES * n), int(OUTLIERS * n)
    rows = torch.randperm(n, generator=rng)
    points[rows[:doubled]] = points[rows[-doubled - 1 : -1]]
    points[rows[doubled : doubled + far]] *= 1000.0
    return points


def brute_force(queries: Tensor, points: Tensor, k: int) -> Tensor:
    """Squared distances to the k nearest points, by blocks of queries. (Q, k)"""
    found = []
    for block in queries.split(BLOCK):
        squares = torch.zeros(block.shape[0], points.shape[0], device=points.device)
        for axis in range(3):
            squares += (points[:, axis] - block[:, axis, None]).square_()
        found.append(squares.topk(k, largest=False).values)
    return torch.cat(found)


def compare(n: int, k: int, n_queries: int, repeats: int) -> None:
    """Rates of both, in turns."""
    points = reconstruction_points(n)
    rows = torch.randperm(n, generator=torch.Generator().manual_seed(1))[:n_queries]
    nearest_neighbors(points[:1000], k)  # compiles
    tree, brute, found, truth = [], [], None, None
    for _ in range(repeats):
        start = time.perf_counter()
        found = nearest_neighbors(points, k)
        tree.append(n / (time.perf_counter() - start))
        start = time.perf_counter()
        truth = brute_force(points[rows], points, k)
        brute.append(n_queries / (time.perf_counter() - start))
    error = (found.sq_distances[rows] - truth).abs().max() / truth.max()
    fast, slow = statistics.median(tree), statistics.median(brute)
    print(
        f"{n:,} points, K = {k}: tree {fast:,.0f} queries/s, brute force {slow:,.0f} queries/s, "
        f"{fast / slow:,.0f} times; largest difference of {n_queries:,} answers {error:.1e} of "
        "the largest distance"
    )


def measure(n: int, k: int) -> None:
    """Seconds and memory of one large search."""
    points = reconstruction_points(n)
    start = time.perf_counter()
    result = nearest_neighbors(points, k)
    seconds = time.perf_counter() - start
    size = sum(t.numel() * t.element_size() for t in result)
    del result
    _, live = weigh(lambda: nearest_neighbors(points, k), lambda: {})
    print(
        f"{n:,} points, K = {k}: {seconds:.1f} s, {n / seconds:,.0f} queries/s; result "
        f"{format_bytes(size)}, peak beyond the points {format_bytes(live.peak)}"
    )


def run(args: argparse.Namespace) -> None:
    """Measure both."""
    print_machine()
    compare(args.compared, args.neighbors, args.queries, args.repeats)
    measure(args.points, args.neighbors)


def main() -> None:
    """Parse flags and run."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=positive_int, default=5_000_000, help="of the large cloud")
    parser.add_argument("--compared", type=positive_int, default=200_000, help="beside brute force")
    parser.add_argument("--queries", type=positive_int, default=2_000, help="of brute force")
    parser.add_argument("--neighbors", type=positive_int, default=16, help="self included")
    parser.add_argument("--repeats", type=positive_int, default=3)
    run(parser.parse_args())


if __name__ == "__main__":
    run_main(main)
