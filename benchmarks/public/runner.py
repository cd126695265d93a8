# SPDX-License-Identifier: Apache-2.0
"""One scene of a benchmark: train, score, write ``result.json``; and many scenes, each a process.

``python -m benchmarks.public.runner JOB.json`` is the process of one scene. A scene whose result is
there is not run again; the training of an interrupted one goes on from its last checkpoint.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sugar_utils.flags import FlagValues

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import sugar_utils  # noqa: F401  before torch

# isort: split
import msgspec
import torch

from benchmarks.mesh_quality import read_in_scene
from benchmarks.public.jobs import SURFACE_BENCHMARKS, Job, Result, Trained, is_done
from benchmarks.public.layouts import Capture, find_capture, scene_folder
from benchmarks.public.scoring import scoring_of
from gaussian_splatting.formats.ply import PlyHeader
from sugar_pipeline.command_line import PROGRAMS
from sugar_pipeline.pipeline.pipeline_result import training_record
from sugar_utils import __version__
from sugar_utils.console import Console
from sugar_utils.entrypoint import run_main
from sugar_utils.errors import UserError
from sugar_utils.files import read_json, write_json_atomic
from sugar_utils.libraries import load_package
from sugar_utils.schemas import conform

JOB_FILE = "job.json"
LOG_FILE = "log.txt"
TRAINING = "train"  # folder of the training

Train = Callable[[Job, Capture], Trained]
Start = Callable[[Job, int | None], None]  # runs a job, on the GPU of a number


def train(job: Job, capture: Capture) -> Trained:
    """Train a scene by the defaults of ``sugar run`` or ``sugar vanilla``, with the job's flags."""
    if job.benchmark in SURFACE_BENCHMARKS:
        return _train_surface(job, capture)
    return _train_views(job, capture)


def _train_views(job: Job, capture: Capture) -> Trained:
    out = Path(job.out) / TRAINING
    words = ["-s", str(capture.folder), "-m", str(out), "--eval", *capture.flags, *job.flags]
    ply, flags = _run_program("gaussian_splatting/train.py", words)
    record = training_record(TRAINING, out / "checkpoints", [ply])
    return Trained(
        path=str(ply),
        resolution=flags["resolution"],
        seconds=record.seconds or 0.0,
        peak_gib=(record.peak_bytes or 0) / 2**30,
        size=PlyHeader.read(ply).n_rows,
    )


def _train_surface(job: Job, capture: Capture) -> Trained:
    out = Path(job.out) / TRAINING
    words = ["-s", str(capture.folder), "--output_dir", str(out), "--eval", "False"]
    if job.minutes is not None:
        words += ["--minutes", str(job.minutes)]
    result, _ = _run_program("train_full_pipeline.py", [*words, *capture.flags, *job.flags])
    if result.mesh is None:
        raise UserError(f"{job.scene}: the training made no mesh; remove --stop_after from --flags")
    peaks = [record.peak_bytes for record in result.records if record.peak_bytes]
    return Trained(
        path=str(result.mesh),
        seconds=result.seconds or 0.0,
        peak_gib=max(peaks) / 2**30 if peaks else None,
        size=read_in_scene(result.mesh).n_faces,
    )


def _run_program(script: str, words: Sequence[str]) -> tuple[Any, FlagValues]:
    """Run a program of the command line; return its result, and its flags."""
    program = PROGRAMS[script]
    flags = program.make_parser(None).parse_flags(list(words))
    return program.call(flags, console=Console()), flags


def run_job(job: Job, training: Train = train) -> Result:
    """Train and score a scene, and write its ``result.json``.

    Args:
        training: Trains the scene.
    """
    root = scene_folder(Path(job.data), job.scene)
    capture = find_capture(job.benchmark, root, Path(job.out) / "scene")
    score = scoring_of(job)
    trained = training(job, capture)
    scored = score(capture, trained)
    times = os.times()
    result = Result(
        job=job,
        scores=scored.scores,
        trained=trained,
        cpu_seconds=times.user + times.system + times.children_user + times.children_system,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        version=__version__,
        notes=scored.notes,
    )
    write_json_atomic(job.result_path, msgspec.to_builtins(result))
    return result


def run_in_process(job: Job, gpu: int | None) -> None:
    """Run a job in a process of its own, with its output in ``log.txt``.

    Raises:
        UserError: It ended with an error.
    """
    out = Path(job.out)
    out.mkdir(parents=True, exist_ok=True)
    write_json_atomic(out / JOB_FILE, msgspec.to_builtins(job))
    environment = dict(os.environ)
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    command = [sys.executable, "-m", "benchmarks.public.runner", str(out / JOB_FILE)]
    with (out / LOG_FILE).open("ab") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=Path(__file__).resolve().parents[2],
        )
        try:
            code = process.wait()
        except KeyboardInterrupt:
            # Ctrl-C has reached the training, too, which saves a checkpoint.
            process.wait()
            raise
    if code:
        lines = (out / LOG_FILE).read_text(encoding="utf-8", errors="replace").split("\n")
        last_line = next((line for line in reversed(lines) if line.strip()), "nothing was printed")
        raise UserError(
            f"{job.scene} ended with {code} ({last_line.strip()}); see {out / LOG_FILE}"
        )


def run_jobs(jobs: Sequence[Job], workers: int, start: Start = run_in_process) -> list[str]:
    """Run the jobs that are not done, and return a line for each that failed.

    Args:
        jobs: Of one benchmark.
        workers: How many run at a time; with more than one each has a GPU of its own, by Dask.
        start: Runs one.
    """
    open_jobs = [job for job in jobs if not is_done(job)]
    if workers == 1:
        return [line for job in open_jobs if (line := _failure(start, job, None))]
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if n_gpus and workers > n_gpus:
        raise UserError(f"--workers {workers}: there are {n_gpus} GPUs; each worker needs one")
    (distributed,) = load_package("--workers", "distributed", "distributed")

    def run_on_worker(job: Job) -> str:
        gpu = int(distributed.get_worker().name) if n_gpus else None
        return _failure(start, job, gpu)

    options = {"threads_per_worker": 1, "processes": False, "dashboard_address": None}
    with (
        distributed.LocalCluster(n_workers=workers, **options) as cluster,
        distributed.Client(cluster) as client,
    ):
        lines = client.gather(client.map(run_on_worker, open_jobs, pure=False))
    return [line for line in lines if line]


def _failure(start: Start, job: Job, gpu: int | None) -> str:
    """Run a job; return why it failed, or nothing."""
    print(f"{job.scene}: into {job.out}", flush=True)
    try:
        start(job, gpu)
    except UserError as error:
        return str(error)
    return ""


def main() -> None:
    path = Path(sys.argv[1])
    run_job(conform(read_json(path), Job, path))


if __name__ == "__main__":
    sys.exit(run_main(main))
