# SPDX-License-Identifier: Apache-2.0
"""The sampling block's fields: ``python benchmarks/fields.py``.

Density, beta, plane distance and better-normal error at random samples of a synthetic cloud,
forward and backward to the Gaussians: the kernels beside the readable torch version, which is
evaluated in chunks as large as its (S, K, 3, 3) temporaries allow. Both in turns in one run, on
the same samples; compare ratios. Memory is counted tensor by tensor, beyond inputs and gradients.
"""

from __future__ import annotations

import argparse
import functools
import statistics
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
from benchmarks.neighbors import reconstruction_points
from benchmarks.rasterizer import print_machine, print_table
from sugar_scene.fields.field_kernels import evaluate_fields
from sugar_scene.fields.reference_fields import FieldSamples, evaluate_fields_reference
from sugar_utils.flags import Parser, positive_int
from sugar_utils.frame import run_main
from sugar_utils.memory import format_bytes
from sugar_utils.neighbors import nearest_neighbors

Fields = Callable[..., FieldSamples]


def make_inputs(n: int, n_samples: int, k: int) -> tuple[list[Tensor], list[Tensor]]:
    """Gaussians as large as the space between them, and sorted samples with noise."""
    rng = torch.Generator().manual_seed(0)
    means = reconstruction_points(n)
    found = nearest_neighbors(means, k)
    size = found.sq_distances[:, 1:4].mean(dim=1, keepdim=True).sqrt().clamp(1e-4, 1.0)
    scales = size * (0.5 * torch.randn(n, 3, generator=rng)).exp()
    scales[:, 2] *= 0.2
    quats = torch.nn.functional.normalize(torch.randn(n, 4, generator=rng), dim=1)
    gaussians = [means, quats, scales, torch.rand(n, generator=rng)]
    indices = torch.randint(n, (n_samples,), generator=rng).sort().values
    noise = torch.randn(n_samples, 3, generator=rng)
    return gaussians, [found.indices, indices, noise]


def block(fields: Fields, gaussians: list[Tensor], samples: list[Tensor], chunk: int):
    """One forward and backward pass, chunk by chunk. Loss and gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in gaussians]
    neighbors, indices, noise = samples
    loss = torch.zeros((), dtype=torch.float64, device=leaves[0].device)
    for start in range(0, indices.numel(), chunk):
        part = slice(start, start + chunk)
        found = fields(*leaves, neighbors, indices[part], noise[part])
        share = (found.density * found.beta + found.plane_distance.abs()).sum()
        share = (share + found.normal_error.sum()) / indices.numel()
        share.backward()
        loss += share.detach().double()
    return loss.item(), [leaf.grad for leaf in leaves]


def run(args: argparse.Namespace) -> None:
    """Time, weigh and compare both."""
    print_machine()
    gaussians, samples = make_inputs(args.gaussians, args.samples, args.neighbors)
    variants = {
        "kernels, one chunk": (evaluate_fields, args.samples),
        "kernels of a GPU": (functools.partial(evaluate_fields, native=False), args.samples),
        "torch, chunks": (evaluate_fields_reference, args.chunk),
    }
    seconds, results = {name: [] for name in variants}, {}
    few = [samples[0], *(x[:64] for x in samples[1:])]
    for fields, _ in variants.values():
        block(fields, gaussians, few, 64)  # compiles
    for _ in range(args.repeats):
        for name, (fields, chunk) in variants.items():
            start = time.perf_counter()
            results[name] = block(fields, gaussians, samples, chunk)
            seconds[name].append(time.perf_counter() - start)
    truth_loss, truth = results["torch, chunks"]
    rows, base = [], statistics.median(seconds["torch, chunks"])
    for name, (fields, chunk) in variants.items():
        loss, gradients = results[name]
        median = statistics.median(seconds[name])
        error = max(float((a - b).norm() / b.norm()) for a, b in zip(gradients, truth, strict=True))
        del gradients
        _, live = weigh(lambda f=fields, c=chunk: block(f, gaussians, samples, c), lambda: {})
        rows.append([
            name, f"{chunk:,}", f"{median:.2f}", f"{base / median:.1f}", format_bytes(live.peak),
            f"{abs(loss / truth_loss - 1):.1e}", f"{error:.1e}",
        ])  # fmt: skip
    print(
        f"\n{args.gaussians:,} Gaussians, {args.samples:,} samples, K = {args.neighbors}, forward "
        "and backward\n"
    )
    print_table(
        ["version", "chunk", "seconds", "times as fast", "live bytes", "loss differs",
         "gradients differ (rel. L2)"],
        rows,
    )  # fmt: skip


def main() -> None:
    """Parse flags and run."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gaussians", type=positive_int, default=300_000)
    parser.add_argument("--samples", type=positive_int, default=1_000_000)
    parser.add_argument("--neighbors", type=positive_int, default=16, help="self included")
    parser.add_argument("--chunk", type=positive_int, default=50_000, help="of the torch version")
    parser.add_argument("--repeats", type=positive_int, default=3)
    run(parser.parse_args())


if __name__ == "__main__":
    run_main(main)
