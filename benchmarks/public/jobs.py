# SPDX-License-Identifier: Apache-2.0
"""Records of a benchmark: the job of a scene, its training, its scores."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sugar_utils.errors import UserError
from sugar_utils.files import read_json
from sugar_utils.schemas import conform

SURFACE_BENCHMARKS = ("dtu", "tanks")
RESULT_FILE = "result.json"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A scene of a benchmark, and how it is trained; ``job.json``."""

    benchmark: str
    scene: str
    data: str  # folder of the data set
    truth: str | None = None  # folder of scans, where it is another one
    out: str  # folder of this scene's files
    minutes: float | None = None  # of the pipeline
    flags: tuple[str, ...] = ()  # further flags of the training

    @property
    def result_path(self) -> Path:
        """File of the scores."""
        return Path(self.out) / RESULT_FILE


class Trained(msgspec.Struct, kw_only=True):
    """A finished training: the file that is scored, and what it took."""

    path: str  # mesh, or PLY of Gaussians
    resolution: float = -1.0  # ``--resolution`` of a vanilla training
    seconds: float  # of all processes that it took
    peak_gib: float | None  # of the device, or of the process on a CPU; None where nothing ran
    size: int  # Gaussians, or triangles


class Result(msgspec.Struct, kw_only=True):
    """Scores of a scene, and what they cost; ``result.json``."""

    job: Job
    scores: dict[str, float]
    trained: Trained
    cpu_seconds: float  # of the last process and those that it started, scoring included
    device: str
    version: str
    notes: list[str] = []  # what a reader of the figures must know


def read_result(path: Path) -> Result:
    """Read the ``result.json`` of a scene."""
    return conform(read_json(path), Result, path, "remove it, and run the scene again")


def is_done(job: Job) -> bool:
    """Whether the result of a job is there.

    Raises:
        UserError: There is a result of other settings.
    """
    if not job.result_path.is_file():
        return False
    earlier = read_result(job.result_path).job
    if earlier != job:
        raise UserError(
            f"{job.result_path}: is of other settings ({' '.join(earlier.flags) or 'no flags'}); "
            "choose another --row, or another --out"
        )
    return True
