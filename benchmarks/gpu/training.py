# SPDX-License-Identifier: Apache-2.0
"""A short real training on a device through the entry points' own flags and runs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.common import Check, Finding, Setup, SkipCheck, equal
from gaussian_splatting.engine.checkpoint import load_payload
from gaussian_splatting.engine.runner import run_stage
from gaussian_splatting.vanilla.vanilla_run import VanillaOptions
from sugar_pipeline.commands import run_train
from sugar_pipeline.demo.demo_scene import make_demo_scene
from sugar_pipeline.pipeline.pipeline_flags import train_parser
from sugar_utils.settings import from_args, parser_of

LEAST_PSNR = 15.0
"""Below this nothing was learnt, whatever the scene."""


def _scene(setup: Setup) -> Path:
    """The capture, or the demo scene, which the CPU renders the same everywhere."""
    if setup.scene is not None:
        return Path(setup.scene)
    root = Path(setup.work) / "demo_scene"
    size = {"n_views": 9, "width": 48, "height": 36} if setup.quick else {}
    make_demo_scene(root, notify=lambda message: None, **size)
    return root


def _words(setup: Setup, more: str) -> list[str]:
    number = [] if setup.place.index is None else ["--gpu", str(setup.place.index)]
    return ["-s", str(_scene(setup)), "--device", setup.place.type, *number, *more.split()]


def _vanilla(setup: Setup, folder: Path, more: str) -> Path:
    """Train; the folder of checkpoints."""
    flags = [*_words(setup, more), "-m", str(folder)]
    run_stage(from_args(VanillaOptions, parser_of(None, VanillaOptions).parse_flags(flags)))
    return folder / "checkpoints"


def vanilla(setup: Setup) -> Iterator[Finding]:
    n, started = setup.size(1_000, 40), time.perf_counter()
    # In so few iterations no Gaussian gets opaque enough to outlive the prune.
    quick = " --opacity_lr 0.4" if setup.quick else ""
    folder = _vanilla(
        setup,
        Path(setup.work) / "vanilla",
        f"--iterations {n} --eval --test_iterations {n} --densify_from_iter {n // 10} "
        f"--densification_interval {max(1, n // 20)} --densify_until_iter {8 * n // 10} "
        f"--position_lr_max_steps {n}{quick}",
    )
    seconds = time.perf_counter() - started
    found = re.findall(r"PSNR (-?[\d.]+) dB", (folder / "log.txt").read_text(encoding="utf-8"))
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    psnr = float(found[-1]) if found else float("nan")
    rate = n / sum(phase["seconds"] for phase in record["timings"].values())
    shown = f"held-out PSNR {psnr:.2f} dB, {rate:.1f} iterations/s, {seconds:.0f} s in all"
    figures = {"psnr": psnr, "iterations_per_second": rate, "seconds": seconds, "run": record}
    yield Finding(f"{n} iterations", setup.quick or psnr > LEAST_PSNR, shown, figures)


def pipeline(setup: Setup) -> Iterator[Finding]:
    """All stages after the vanilla one, both ways to a mesh; they must end and write results."""
    checkpoint = Path(setup.work) / "vanilla"
    if not (checkpoint / "point_cloud").is_dir():
        raise SkipCheck("the vanilla training left no model")
    sizes = setup.size(
        "--schedule_scale 0.05 --sdf_samples 1000000 --surface_points 200000 --poisson_depth 7 "
        "-v 10000 -f 4000",
        "--schedule_scale 0.002 --sdf_samples 500 --surface_points 4000 --poisson_depth 5 "
        "-v 500 -f 5000 --force True",
    )
    for extractor in ("poisson", "tsdf"):
        more = f"-r dn_consistency --mesh_extractor {extractor} -i {setup.size(1_000, 40)} {sizes}"
        flags = [*_words(setup, more), "-c", str(checkpoint)]
        flags += ["--output_dir", str(Path(setup.work) / "pipeline")]
        started = time.perf_counter()
        result = run_train(train_parser(None).parse_flags(flags))
        seconds = time.perf_counter() - started
        written = [result.coarse_mesh, result.refined, result.textured]
        ok = all(path is not None and path.is_file() for path in written)
        stages = {r.name: r.seconds for r in result.records if r.seconds is not None}
        parts = [f"{name} {s:.1f} s" for name, s in stages.items()]
        parts += [f"{name} Chamfer {q.chamfer:.2%}" for name, q in result.quality.items()]
        yield Finding(extractor, ok, ", ".join(parts), {"seconds": seconds, "stages": stages})


def resume(setup: Setup) -> Iterator[Finding]:
    """A run in one go, and one that continues from the checkpoint in its middle."""
    n = setup.size(60, 12)
    more = (
        f"--iterations {n} --checkpoint_interval {n // 2} --keep_checkpoints 9 "
        f"--densify_from_iter 2 --densification_interval {n // 6} --densify_until_iter {n}"
    )
    whole = _vanilla(setup, Path(setup.work) / "whole", more) / f"{n}.pt"
    parts = Path(setup.work) / "parts"
    (_vanilla(setup, parts, more) / f"{n}.pt").unlink()
    continued = load_payload(_vanilla(setup, parts, more) / f"{n}.pt")["state_dict"]
    for name, tensor in load_payload(whole)["state_dict"].items():
        yield equal(name, continued[name], tensor)


CHECKS = (
    Check("resume", resume, 120),
    Check("vanilla", vanilla, 240),
    Check("all stages", pipeline, 300),
)
