# SPDX-License-Identifier: Apache-2.0
"""What narrow formats do to training: ``python benchmarks/narrow_formats.py SCENE CHECKPOINT N``.

The coarse stage (dn_consistency, a tenth of the schedule) is trained from one vanilla checkpoint
of N iterations once per format, and some of it once more with another seed: what differs less than
those two is noise. Compared are the held-out PSNR, the agreement of normals, and the loss curves:
their means over the last fifth, and the largest distance of the colour curve to that of float32
after averaging over ``WINDOW`` logged iterations. A finished run in the output folder is not
repeated.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
from benchmarks.rasterizer import print_table
from gaussian_splatting.engine.reporting.run_report import last_value, read_curves
from sugar_trainers.coarse_options import coarse_options, coarse_parser
from sugar_trainers.coarse_run import train_coarse
from sugar_utils.files import write_json_atomic
from sugar_utils.flags import Parser, integer, positive_float, positive_int
from sugar_utils.frame import run_main

RUNS = {
    "fp32": [],
    "fp32, seed 1": ["--random_seed", "1"],
    "bf16": ["--optimizer_state", "bf16"],
    "bf16, seed 1": ["--optimizer_state", "bf16", "--random_seed", "1"],
    "8bit": ["--optimizer_state", "8bit"],
    "8bit, seed 1": ["--optimizer_state", "8bit", "--random_seed", "1"],
    "fp32 + bfloat16": ["--use_bfloat16"],
    "bf16 + bfloat16": ["--optimizer_state", "bf16", "--use_bfloat16"],
    "8bit + bfloat16": ["--optimizer_state", "8bit", "--use_bfloat16"],
    "fp32 + sparse": ["--sparse_adam"],
}
WINDOW = 5
"""Logged iterations that are averaged before curves are compared."""

Curve = list[tuple[int, float]]


@dataclass(frozen=True)
class Outcome:
    """One run.

    Attributes:
        name: Key of ``RUNS``.
        psnr: Held-out views, dB.
        agreement: Of rendered normals with those of the depth map.
        loss: Mean over the last fifth.
        color: Colour curve.
        seconds: Wall-clock time; about 0 where the run was found finished.
    """

    name: str
    psnr: float
    agreement: float
    loss: float
    color: Curve
    seconds: float


def train(name: str, args: argparse.Namespace) -> Outcome:
    """Train one run."""
    folder = args.output / args.scene.name / name.replace(" ", "").replace(",", "_")
    flags = [
        "-s", str(args.scene), "-c", str(args.checkpoint), "-i", str(args.iteration),
        "-o", str(folder), "--estimation_factor", "0.2", "--normal_factor", "0.2",
        "--schedule_scale", "0.1", "--eval", "True",
        "--resolution_factor", f"{args.resolution_factor:g}",
        "--sdf_samples", str(args.samples), *RUNS[name],
    ]  # fmt: skip
    parsed = coarse_parser(None).parse_args(flags)
    options = coarse_options(parsed, "dn_consistency", parsed.output_dir)
    start = time.perf_counter()
    train_coarse(options)
    seconds = time.perf_counter() - start
    curves = read_curves(options.directory / "tensorboard")
    loss = curves["Loss/loss"]
    last = loss[-1][0] - 0.2 * (loss[-1][0] - loss[0][0])
    return Outcome(
        name,
        last_value(curves, "Test/PSNR"),
        last_value(curves, "View/normal_agreement"),
        statistics.mean(value for iteration, value in loss if iteration > last),
        curves["Loss/color"],
        seconds,
    )


def largest_gap(curve: Curve, base: Curve) -> float:
    """Largest relative distance of two curves that were averaged over windows."""

    def means(values: Curve) -> list[float]:
        numbers = [value for _, value in values]
        n = len(numbers) - WINDOW + 1
        return [statistics.mean(numbers[k : k + WINDOW]) for k in range(n)]

    return max(abs(a / b - 1.0) for a, b in zip(means(curve), means(base), strict=True))


def run(args: argparse.Namespace) -> None:
    """Train all, print them side by side and write the JSON file."""
    outcomes = [train(name, args) for name in args.runs]
    base, rows = outcomes[0], []
    for outcome in outcomes:
        rows.append([
            outcome.name, f"{outcome.psnr:.3f}", f"{outcome.psnr - base.psnr:+.3f}",
            f"{outcome.agreement:.4f}", f"{outcome.loss:.5f}",
            f"{100 * (outcome.loss / base.loss - 1):+.2f} %",
            f"{100 * largest_gap(outcome.color, base.color):.2f} %", f"{outcome.seconds:.0f}",
        ])  # fmt: skip
    print(f"\n{args.scene.name}, coarse dn_consistency, images / {args.resolution_factor:g}\n")
    print_table(
        ["format", "PSNR dB", f"to {base.name}", "normals", "loss", f"to {base.name}",
         "widest gap of colour curves", "seconds"],
        rows,
    )  # fmt: skip
    write_json_atomic(args.output / f"{args.scene.name}.json", [asdict(x) for x in outcomes])


def main() -> None:
    """Parse flags and run."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scene", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("iteration", type=integer)
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--resolution_factor", type=positive_float, default=2.0, help="image size")
    parser.add_argument("--samples", type=positive_int, default=200_000, help="per iteration")
    parser.add_argument("--output", type=Path, default=Path("output/narrow_formats"))
    run(parser.parse_args())


if __name__ == "__main__":
    run_main(main)
