# SPDX-License-Identifier: Apache-2.0
"""Check of colour bands in the host's memory, a program of its own.

A small stage is trained with its bands on the host and on the GPU, and has to end with the same
bits.
"""

from __future__ import annotations

import sys

import torch

from gaussian_splatting.core import color_gradients
from gaussian_splatting.engine.checks.small_training import SmallTraining, require_equal
from gaussian_splatting.engine.step_runner import PlainRunner
from gaussian_splatting.optim.optimizer_config import OptimizerConfig


def check(device: torch.device) -> None:
    """Train in both ways.

    Raises:
        CheckFailed: Bits differ.
        UserError: The host has no such memory, or the GPU does not reach it.
    """
    # Steps of bands wait where colours leave factors, which they do of many Gaussians.
    color_gradients.MIN_FACTORED = 1
    trainings = []
    for on_host in (True, False):
        config = OptimizerConfig(bands_on_host=on_host)
        training = SmallTraining(device, PlainRunner(), config)
        training.train()
        trainings.append(training)
    require_equal(*trainings)


if __name__ == "__main__":
    check(torch.device(sys.argv[1]))
