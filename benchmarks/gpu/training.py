# SPDX-License-Identifier: Apache-2.0
"""A short real training on a device through the entry points' own flags and runs."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.common import Check, Finding, Setup, SkipCheck, equal
from benchmarks.gpu.recorded import CountingRecorder
from gaussian_splatting.engine.checkpoint import load_payload
from gaussian_splatting.engine.observer import ObserverFactory
from gaussian_splatting.engine.recording import recorded_runner
from gaussian_splatting.engine.recording.cuda_graph import CudaRecorder
from gaussian_splatting.engine.runner import run_stage
from gaussian_splatting.vanilla.vanilla_run import VanillaOptions
from sugar_pipeline.commands import run_train
from sugar_pipeline.demo.demo_scene import make_demo_scene
from sugar_pipeline.pipeline.pipeline_flags import train_parser
from sugar_utils.memory import format_bytes, spilled_bytes
from sugar_utils.settings import from_args, parser_of

LEAST_PSNR = 15.0
"""Below this nothing was learnt, whatever the scene."""
WITHOUT_GRAPHS = "without CUDA graphs"  # in the warning of a run that does not record any more


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


class _MemoryAtRounds(contextlib.AbstractContextManager):
    """Observes a run: reserved and allocated bytes after each round of densification."""

    def __init__(self, setup: Setup, interval: int) -> None:
        self.rows: list[dict[str, int]] = []
        self._place = setup.place
        self._is_measured = setup.on_cuda
        self._interval = interval

    def __exit__(self, *error: object) -> None:
        """Nothing is open."""

    def after_step(self, stage: Any, iteration: int, terms: Any, stopped: Any) -> None:
        """Measure, where a round has just been."""
        if not self._is_measured or iteration % self._interval != 1:
            return
        row = {"iteration": iteration, "gaussians": len(stage.model)}
        row["reserved"] = torch.cuda.memory_reserved(self._place)
        row["allocated"] = torch.cuda.memory_allocated(self._place)
        row["spilled"] = spilled_bytes(self._place)
        self.rows.append(row)


def _vanilla(
    setup: Setup, folder: Path, more: str, observers: Sequence[ObserverFactory] = ()
) -> Path:
    """Train; the folder of checkpoints."""
    flags = [*_words(setup, more), "-m", str(folder)]
    options = from_args(VanillaOptions, parser_of(None, VanillaOptions).parse_flags(flags))
    run_stage(options, observers=observers)
    return folder / "checkpoints"


@contextlib.contextmanager
def _counted_recordings() -> Iterator[list[CountingRecorder]]:
    """Count what runs in the context record on a GPU, one recorder for each."""
    recorders: list[CountingRecorder] = []

    def new_recorder(device: torch.device) -> CountingRecorder:
        recorders.append(CountingRecorder(CudaRecorder(device)))
        return recorders[-1]

    with mock.patch.object(recorded_runner, "CudaRecorder", new_recorder):
        yield recorders


def real_run(setup: Setup) -> Iterator[Finding]:
    """The same training with recorded passes and without: quality, speed, recordings, memory."""
    n = setup.size(1_500, 40)
    interval = max(1, n // 20)
    flags = (
        f"--iterations {n} --eval --test_iterations {n} --densify_from_iter {n // 10} "
        f"--densification_interval {interval} --densify_until_iter {8 * n // 10} "
        f"--position_lr_max_steps {n} --checkpoint_interval {n}"
    )
    # In so few iterations no Gaussian gets opaque enough to outlive the prune.
    flags += " --opacity_lr 0.4" if setup.quick else ""
    states = []
    for mode in ("auto", "off"):
        # The pipeline continues from the first one.
        path = Path(setup.work) / ("vanilla" if mode == "auto" else "launched")
        memory = _MemoryAtRounds(setup, interval)
        with _counted_recordings() as recorders:
            folder = _vanilla(
                setup, path, f"{flags} --cuda_graph {mode}", [lambda run, opened=memory: opened]
            )
        yield _quality(mode, setup, folder, n)
        states.append(load_payload(folder / f"{n}.pt")["state_dict"])
        yield _recordings(mode, setup, folder, recorders, n)
        if memory.rows:
            most = max(memory.rows, key=lambda row: row["reserved"])
            spilled = max(row["spilled"] for row in memory.rows)
            shown = f"{format_bytes(most['reserved'])} reserved at most, "
            shown += f"{format_bytes(most['allocated'])} of it allocated"
            yield Finding(f"memory, {mode}", not spilled, shown, {"rounds": memory.rows})
    for name, values in states[0].items():
        yield equal(f"auto and off, {name}", values, states[1][name])


def _quality(mode: str, setup: Setup, folder: Path, n: int) -> Finding:
    """PSNR of a run and iterations in a second."""
    found = re.findall(r"PSNR (-?[\d.]+) dB", (folder / "log.txt").read_text(encoding="utf-8"))
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    psnr = float(found[-1]) if found else float("nan")
    rate = n / sum(phase["seconds"] for phase in record["timings"].values())
    shown = f"held-out PSNR {psnr:.2f} dB, {rate:.1f} iterations/s"
    figures = {"psnr": psnr, "iterations_per_second": rate, "run": record}
    return Finding(f"{n} iterations, {mode}", setup.quick or psnr > LEAST_PSNR, shown, figures)


def _recordings(
    mode: str, setup: Setup, folder: Path, recorders: Sequence[CountingRecorder], n: int
) -> Finding:
    """How many passes were recorded and repeated; a run that gave up recording fails."""
    n_recorded = sum(each.n_recorded for each in recorders)
    n_repeated = sum(each.n_repeated for each in recorders)
    log = (folder / "log.txt").read_text(encoding="utf-8")
    warnings = [line for line in log.splitlines() if WITHOUT_GRAPHS in line]
    is_expected = n_repeated >= n // 3 if mode == "auto" and setup.on_cuda else not n_repeated
    shown = f"{n_recorded} recordings, {n_repeated} of {n} steps repeated"
    if warnings:
        shown += f"; {warnings[0]}"
    figures = {"recorded": n_recorded, "repeated": n_repeated, "warnings": warnings}
    return Finding(f"recordings, {mode}", is_expected and not warnings, shown, figures)


def pipeline(setup: Setup) -> Iterator[Finding]:
    """All stages after the vanilla one, both ways to a mesh; they must end and write results."""
    for package in ("open3d", "xatlas"):
        if importlib.util.find_spec(package) is None:
            raise SkipCheck("needs Open3D and xatlas")
    checkpoint = Path(setup.work) / "vanilla"
    if not (checkpoint / "point_cloud").is_dir():
        raise SkipCheck("the vanilla training left no model")
    sizes = setup.size(
        "--schedule_scale 0.05 --sdf_samples 1000000 --surface_points 200000 --poisson_depth 7 "
        "-v 10000 -f 4000",
        "--schedule_scale 0.002 --sdf_samples 500 --surface_points 4000 --poisson_depth 5 "
        "-v 500 -f 5000 --force True",
    )
    for extractor in setup.size(("poisson", "tsdf"), ("tsdf",)):
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


CHECKS = (Check("real run", real_run, 240), Check("all stages", pipeline, 300))
