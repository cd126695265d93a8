# SPDX-License-Identifier: Apache-2.0
"""Check of colour bands in the host's memory, a program of its own.

A small stage is trained with its bands on the GPU and on the host, there with recorded passes, too,
and has to end with the same bits.
"""

from __future__ import annotations

import sys

import torch

from gaussian_splatting.core import color_gradients
from gaussian_splatting.engine.checks.small_training import SmallTraining, require_equal
from gaussian_splatting.engine.recording.cuda_graph import CudaRecorder
from gaussian_splatting.engine.recording.recorded_runner import RecordedRunner
from gaussian_splatting.engine.step_runner import PlainRunner
from gaussian_splatting.optim.optimizer_config import OptimizerConfig


def check(device: torch.device) -> None:
    """Train in all ways; where nothing can be recorded, every launch is made.

    Raises:
        CheckFailed: Bits differ.
        UserError: The host has no such memory, or the GPU does not reach it.
    """
    # Steps of bands wait where colours leave factors, which they do of many Gaussians.
    color_gradients.MIN_FACTORED = 1
    runners = (PlainRunner(), PlainRunner(), RecordedRunner(CudaRecorder(device), print))
    trainings = []
    for number, runner in enumerate(runners):
        config = OptimizerConfig(bands_on_host=number > 0)
        training = SmallTraining(device, runner, config)
        training.train()
        trainings.append(training)
    for training in trainings[1:]:
        require_equal(training, trainings[0])


if __name__ == "__main__":
    check(torch.device(sys.argv[1]))
