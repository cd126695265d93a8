# SPDX-License-Identifier: Apache-2.0
"""What storing less in the optimiser saves and costs: ``python benchmarks/optimizer_state.py``.

Without flags: bytes per Gaussian of values, gradients and moments, counted tensor by tensor, and
the time of one step of each format, medians of one process taken in turns. Compare ratios.

With ``--train SCENE``: the same short vanilla training, densification included, once per format.
The figures are the training loss (mean over the logged iterations of the last tenth) and the PSNR
of the held-out views. Densification amplifies every rounding: compare with what ``--seeds 2``
shows between two float32 runs. With ``--init_ply PLY`` the Gaussians of a trained model are
optimised further, with moments from zero, all colour bands and without densification, so that the
formats alone differ. A finished run in the output folder is not repeated.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
import torch
from torch import Tensor

from benchmarks.rasterizer import print_machine, print_table
from gaussian_splatting.engine.reporting.run_report import last_value, read_curves
from gaussian_splatting.optim.adam import GroupedAdam
from gaussian_splatting.optim.densification import DensificationConfig
from gaussian_splatting.optim.optimizer_config import OptimizerConfig
from gaussian_splatting.optim.schedule import LearningRates
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_run import CHECKPOINT_FOLDER, VanillaOptions, train_vanilla
from sugar_utils.files import write_json_atomic
from sugar_utils.flags import Parser, positive_float, positive_int
from sugar_utils.frame import run_main

FORMATS = {
    "fp32": OptimizerConfig(),
    "bf16": OptimizerConfig("bf16"),
    "8bit": OptimizerConfig("8bit"),
    "fp32 + bfloat16": OptimizerConfig("fp32", use_bfloat16=True),
    "bf16 + bfloat16": OptimizerConfig("bf16", use_bfloat16=True),
    "8bit + bfloat16": OptimizerConfig("8bit", use_bfloat16=True),
    "fp32 + sparse": OptimizerConfig("fp32", sparse_adam=True),
}
SHAPES = {
    "means": (3,),
    "sh_dc": (1, 3),
    "sh_rest": (15, 3),
    "opacity_logits": (1,),
    "log_scales": (3,),
    "quats": (4,),
}
VISIBLE_SHARE = 0.3


@dataclass(frozen=True)
class Training:
    """Outcome of one training run.

    Attributes:
        name: Of the format and seed.
        loss: Training loss at the end.
        psnr: Of the held-out views, dB.
        n_gaussians: How many there were in the end.
        seconds: Wall-clock time; NaN where the run was found finished.
    """

    name: str
    loss: float
    psnr: float
    n_gaussians: int
    seconds: float


def make_optimizer(config: OptimizerConfig, n: int) -> GroupedAdam:
    """An optimiser of ``n`` Gaussians that made one step."""
    rng = torch.Generator().manual_seed(0)
    values = {k: 0.1 * torch.randn(n, *s, generator=rng) for k, s in SHAPES.items()}
    optimizer = GroupedAdam(values, dict.fromkeys(SHAPES, 1e-4), config)
    step(optimizer)
    return optimizer


def step(optimizer: GroupedAdam) -> float:
    """One step with made-up gradients; returns its seconds."""
    for parameter in optimizer.parameters.values():
        parameter.grad = torch.full_like(parameter, 1e-3)
    n = len(optimizer.parameters["means"])
    visible = torch.arange(n) < VISIBLE_SHARE * n
    optimizer.mark_visible(dict.fromkeys(optimizer.parameters, visible))
    start = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - start


def bytes_per_gaussian(optimizer: GroupedAdam, n: int) -> dict[str, float]:
    """Values, gradients (as large as the values) and moments."""

    def size(tensors: list[Tensor]) -> float:
        return sum(t.numel() * t.element_size() for t in tensors) / n

    values = size(list(optimizer.parameters.values()))
    moments = size([m for ms in optimizer.moments().values() for m in ms.values()])
    return {"values": values, "gradients": values, "moments": moments}


def measure_steps(n: int, repeats: int) -> None:
    """Print size and time of every format."""
    optimizers = {name: make_optimizer(config, n) for name, config in FORMATS.items()}
    seconds = {name: [] for name in FORMATS}
    for _ in range(repeats):
        for name, optimizer in optimizers.items():
            seconds[name].append(step(optimizer))
    rows, base = [], statistics.median(seconds["fp32"])
    for name, optimizer in optimizers.items():
        sizes, median = bytes_per_gaussian(optimizer, n), statistics.median(seconds[name])
        total = sum(sizes.values())
        rows.append([
            name, *(f"{v:.0f}" for v in (*sizes.values(), total)), f"{total * 6e6 / 1e9:.2f}",
            f"{1e3 * median:.1f}", f"{median / base:.2f}",
        ])  # fmt: skip
    print(f"\n{n:,} Gaussians; sparse: {VISIBLE_SHARE:.0%} of them visible\n")
    print_table(
        ["format", "values B", "gradients B", "moments B", "together B", "6 M: GB", "ms/step",
         "to fp32"],
        rows,
    )  # fmt: skip


def train_once(name: str, args: argparse.Namespace, optimizer: OptimizerConfig, seed: int):
    """Train one format; see the module's text."""
    n, further = args.iterations, args.init_ply is not None
    folder = args.output / args.train.name / f"{name.replace(' ', '')}_{seed}"
    options = VanillaOptions(
        source_path=args.train,
        init_ply=args.init_ply,
        model_path=folder,
        resolution_factor=args.resolution_factor,
        eval=True,
        log_interval=10,
        checkpoint_interval=None,
        test_iterations=(),
        save_iterations=(),
        config=VanillaConfig(
            iterations=n,
            rates=LearningRates(position_lr_max_steps=n),
            densification=DensificationConfig(
                densify_from_iter=n // 10,
                densify_until_iter=1 if further else 3 * n // 5,
                densification_interval=max(1, n // 20),
                max_gaussians=args.max_gaussians,
            ),
            sh_interval=1 if further else max(1, n // 8),
            optimizer=optimizer,
            random_seed=seed,
        ),
    )
    start = time.perf_counter()
    train_vanilla(options)
    seconds = time.perf_counter() - start
    curves = read_curves(folder / CHECKPOINT_FOLDER / "tensorboard")
    losses = [value for iteration, value in curves["Loss/loss"] if iteration > 0.9 * n]
    payload = torch.load(folder / CHECKPOINT_FOLDER / f"{n}.pt", weights_only=True)
    return Training(
        f"{name}, seed {seed}",
        statistics.mean(losses),
        last_value(curves, "Test/PSNR"),
        len(payload["state_dict"]["_points"]),
        seconds,
    )


def compare_training(args: argparse.Namespace) -> None:
    """Train every format, and float32 with other seeds, and print them side by side."""
    names = args.formats or list(FORMATS)
    jobs = [(name, seed) for name in names for seed in range(args.seeds)]
    results = [train_once(name, args, FORMATS[name], seed) for name, seed in jobs]
    write_json_atomic(args.output / f"{args.train.name}.json", [vars(r) for r in results])
    first = {seed: r for (name, seed), r in zip(jobs, results, strict=True) if name == "fp32"}
    rows = []
    for (_, seed), r in zip(jobs, results, strict=True):
        base = first.get(seed, results[0])
        rows.append([
            r.name, f"{r.loss:.5f}", f"{100 * (r.loss / base.loss - 1):+.2f} %", f"{r.psnr:.3f}",
            f"{r.psnr - base.psnr:+.3f}", f"{r.n_gaussians:,}", f"{r.seconds:.0f}",
        ])  # fmt: skip
    print(f"\n{args.train.name}, {args.iterations} iterations, size / {args.resolution_factor:g}\n")
    print_table(["format", "loss", "to fp32", "PSNR dB", "to fp32", "Gaussians", "seconds"], rows)


def run(args: argparse.Namespace) -> None:
    """Measure what the flags ask for."""
    print_machine()
    if args.train is None:
        measure_steps(args.gaussians, args.repeats)
    else:
        compare_training(args)


def main() -> None:
    """Parse flags and run."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gaussians", type=positive_int, default=300_000, help="for the steps")
    parser.add_argument("--repeats", type=positive_int, default=15, help="timed steps")
    parser.add_argument("--train", type=Path, metavar="SCENE", help="train instead, on this scene")
    parser.add_argument("--init_ply", type=Path, help="trained Gaussians to start from")
    parser.add_argument("--iterations", type=positive_int, default=800, help="of the training")
    parser.add_argument(
        "--max_gaussians", type=positive_int, default=40_000, help="of the training"
    )
    parser.add_argument("--resolution_factor", type=positive_float, default=2.0, help="image size")
    parser.add_argument("--seeds", type=positive_int, default=1, help="runs of each format")
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), help="train only these")
    parser.add_argument("--output", type=Path, default=Path("output/optimizer_state"))
    run(parser.parse_args())


if __name__ == "__main__":
    run_main(main)
