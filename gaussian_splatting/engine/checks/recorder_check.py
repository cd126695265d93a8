# SPDX-License-Identifier: Apache-2.0
"""Check of the recorder on a GPU, a program of its own: what a driver breaks here breaks no run.

A small stage is trained with recorded passes and without, and has to end with the same bits. All
recordings are dropped in between, while a result of one is held. At last the host reads a number
while launches are recorded, which the driver answers by ending the recording.
"""

from __future__ import annotations

import sys

import torch

from gaussian_splatting.engine.checks.small_training import (
    CheckFailed,
    SmallTraining,
    require_equal,
)
from gaussian_splatting.engine.recording.cuda_graph import CudaRecorder
from gaussian_splatting.engine.recording.recorded_runner import RecordedRunner
from gaussian_splatting.engine.step_runner import plain_runner


def check(device: torch.device) -> None:
    """Record, repeat, drop and record again, and fail to record.

    Raises:
        CheckFailed: Something does not work.
    """
    warnings: list[str] = []
    recorder = CudaRecorder(device)
    runner = RecordedRunner(recorder, warnings.append)
    recorded = SmallTraining(device, runner)
    held = recorded.train()
    if not runner.release(ran_out=False) and not warnings:
        raise CheckFailed("nothing was recorded")
    recorded.train()
    del held
    launched = SmallTraining(device, plain_runner(warnings.append))
    launched.train()
    launched.train()
    if warnings:
        raise CheckFailed(warnings[0])
    require_equal(recorded, launched)
    _fail_to_record(recorder, device)


def _fail_to_record(recorder: CudaRecorder, device: torch.device) -> None:
    """Let the host read a number while launches are recorded; the allocator has to survive it."""
    number = torch.ones((), device=device)
    try:
        recorder.record((number + 1).item)
    except RuntimeError:
        torch.cuda.empty_cache()
        return
    raise CheckFailed("a number that was read while launches were recorded went unnoticed")


if __name__ == "__main__":
    check(torch.device(sys.argv[1]))
