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
from gaussian_splatting.vanilla.vanilla_options import vanilla_options, vanilla_parser
from gaussian_splatting.vanilla.vanilla_run import train_vanilla
from sugar_pipeline.commands import run_train
from sugar_pipeline.demo.demo_scene import make_demo_scene
from sugar_pipeline.pipeline_flags import train_parser
from sugar_trainers.coarse_stage import coarse_options, coarse_parser, train_coarse

LEAST_PSNR = 15.0
"""Below this nothing was learnt, whatever the scene."""


def _scene(setup: Setup) -> Path:
    """The capture, or the demo scene, which the CPU renders the same everywhere."""
    if setup.scene is not None:
        return Path(setup.scene)
    root = Path(setup.work) / "demo_scene"
    size = {"n_views": 9, "width": 48, "height": 36} if setup.quick else {}
    return make_demo_scene(root, notify=lambda message: None, **size).root


def _device_flags(setup: Setup) -> list[str]:
    flags = ["--device", setup.place.type]
    return flags if setup.place.index is None else [*flags, "--gpu", str(setup.place.index)]


def _finding(setup: Setup, what: str, folder: Path, iterations: int, seconds: float) -> Finding:
    """Held-out PSNR from the log, iterations per second from the record of the run."""
    found = re.findall(r"PSNR (-?[\d.]+) dB", (folder / "log.txt").read_text(encoding="utf-8"))
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    psnr = float(found[-1]) if found else float("nan")
    rate = iterations / sum(phase["seconds"] for phase in record["timings"].values())
    figures = {
        "psnr": [float(p) for p in found], "iterations_per_second": rate, "seconds": seconds,
        "run": record,
    }  # fmt: skip
    shown = f"held-out PSNR {psnr:.2f} dB, {rate:.1f} iterations/s, {seconds:.0f} s in all"
    return Finding(what, setup.quick or psnr > LEAST_PSNR, shown, figures)


def training(setup: Setup) -> Iterator[Finding]:
    """Vanilla, then the coarse stage from its checkpoint."""
    scene, work = _scene(setup), Path(setup.work)
    n, device = setup.size(1_000, 40), _device_flags(setup)
    words = (
        f"--iterations {n} --eval --test_iterations {n} --densify_from_iter {n // 10} "
        f"--densification_interval {max(1, n // 20)} --densify_until_iter {8 * n // 10} "
        f"--position_lr_max_steps {n}" + (" --opacity_lr 0.4" if setup.quick else "")
        # In so few iterations no Gaussian gets opaque enough to outlive the prune.
    )
    vanilla = work / "vanilla"
    flags = ["-s", str(scene), "-m", str(vanilla), *words.split(), *device]
    started = time.perf_counter()
    train_vanilla(vanilla_options(vanilla_parser(None).parse_args(flags)))
    seconds = time.perf_counter() - started
    yield _finding(setup, f"vanilla, {n} iterations", vanilla / "checkpoints", n, seconds)

    scale, samples = (0.05, 1_000_000) if not setup.quick else (0.002, 500)
    words = f"-i {n} --schedule_scale {scale} --sdf_samples {samples} --eval True"
    coarse = work / "coarse"
    flags = ["-s", str(scene), "-c", str(vanilla), "-o", str(coarse), *words.split(), *device]
    options = coarse_options(coarse_parser(None).parse_args(flags), "dn_consistency", coarse)
    started = time.perf_counter()
    train_coarse(options)
    seconds = time.perf_counter() - started
    schedule = options.config.schedule
    length = schedule.last - schedule.first + 1
    yield _finding(setup, f"coarse, {length} iterations", options.directory, length, seconds)


def pipeline(setup: Setup) -> Iterator[Finding]:
    """All stages after the vanilla one, both ways to a mesh; they must end and write results."""
    vanilla, n = Path(setup.work) / "vanilla", setup.size(1_000, 40)
    if not (vanilla / "point_cloud").is_dir():
        raise SkipCheck("the vanilla training left no model")
    words = (
        "--schedule_scale 0.05 --sdf_samples 100000 --surface_points 200000 --poisson_depth 7 "
        "-v 10000 -f 4000"
    )
    if setup.quick:
        words = (
            "--schedule_scale 0.002 --sdf_samples 500 --surface_points 4000 --poisson_depth 5 "
            "-v 500 -f 5000 --force True"
        )
    for extractor in ("poisson", "tsdf"):
        flags = ["-s", str(_scene(setup)), "-c", str(vanilla), "-i", str(n), *words.split()]
        flags += ["--output_dir", str(Path(setup.work) / "pipeline"), *_device_flags(setup)]
        flags += ["-r", "dn_consistency", "--mesh_extractor", extractor]
        started = time.perf_counter()
        result = run_train(train_parser(None).parse_args(flags))
        seconds = time.perf_counter() - started
        written = [result.coarse_mesh, result.refined, result.textured]
        ok = all(path is not None and path.is_file() for path in written)
        stages = {r.name: r.seconds for r in result.records if r.seconds is not None}
        shown = ", ".join(f"{name} {s:.1f} s" for name, s in stages.items())
        shown += "".join(
            f", {name} Chamfer {100 * q.chamfer:.2f} %" for name, q in result.quality.items()
        )
        yield Finding(extractor, ok, shown, {"seconds": seconds, "stages": stages})


def resume(setup: Setup) -> Iterator[Finding]:
    """A vanilla run in one go, and one that goes on from the checkpoint in its middle."""
    scene, n = _scene(setup), setup.size(60, 12)
    words = (
        f"--iterations {n} --checkpoint_interval {n // 2} --keep_checkpoints 9 "
        f"--densify_from_iter 2 --densification_interval {n // 6} --densify_until_iter {n}"
    ).split()

    def run(folder: Path) -> Path:
        flags = ["-s", str(scene), "-m", str(folder), *words, *_device_flags(setup)]
        train_vanilla(vanilla_options(vanilla_parser(None).parse_args(flags)))
        return folder / "checkpoints" / f"{n}.pt"

    whole = load_payload(run(Path(setup.work) / "whole"))["state_dict"]
    last = run(Path(setup.work) / "parts")
    last.unlink()
    continued = load_payload(run(Path(setup.work) / "parts"))["state_dict"]
    for name, tensor in whole.items():
        yield equal(name, continued[name], tensor)


CHECKS = (
    Check("resume", resume, 120),
    Check("vanilla and coarse", training, 240),
    Check("mesh, refine, texture", pipeline, 240),
)
