# SPDX-License-Identifier: Apache-2.0
"""The speed of a training stage, measured on a copy of its model."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import ImageStore, image_size
from gaussian_splatting.engine.runner import Messages, StageOptions
from gaussian_splatting.engine.stepping import RunContext, Stepper
from sugar_utils.console import Console

TIMED_STEPS = 8


@dataclass(frozen=True)
class Speed:
    """The measured speed of a training stage, with its workload."""

    seconds: float  # of an iteration
    n_views: int
    width: int  # of the largest training image, in pixels
    height: int
    megapixels: float  # of all its photographs, at their full size


def measure(options: StageOptions, images: ImageStore, least_work: float = 0.0) -> Speed | None:
    """Time iterations of a stage on a copy of its model; nothing is written.

    None where the stage has less work than ``least_work``, in pixels times iterations, or a run in
    its folder.
    """
    run, model = options.prepare(Messages())
    cameras = list(run.scene.train_cameras)
    largest = max(cameras, key=lambda camera: camera.n_pixels)
    n_iterations = run.loop.last - run.loop.first
    if largest.n_pixels * n_iterations < least_work:
        return None
    if least_work and run.directory.path.exists():
        return None
    console = Console.silent()
    if run.init_from_images is not None:
        model = run.init_from_images(model, images, console)
    stage = run.build(model, images, console)
    stepper = Stepper(
        stage,
        cameras,
        RunContext(images, console),
        first=run.loop.first,
        seed=run.loop.seed,
    )
    seconds = _seconds_of_step(stepper, run.loop.first, n_iterations)
    return Speed(seconds, len(cameras), largest.width, largest.height, _megapixels(cameras))


def _megapixels(cameras: Sequence[Camera]) -> float:
    """Millions of pixels of all photographs, as their files have them."""
    paths = [camera.image_path for camera in cameras if camera.image_path is not None]
    return sum(math.prod(image_size(path)) for path in paths) / 1e6


def _seconds_of_step(stepper: Stepper, first: int, n_iterations: int) -> float:
    """Average time of some steps, spread over the schedule, in seconds."""
    stepper.step(first, None)  # compiles kernels and allocates
    start = time.perf_counter()
    for k in range(TIMED_STEPS):
        iteration = first + n_iterations * (2 * k + 1) // (2 * TIMED_STEPS)
        loss = stepper.step(iteration, None).terms["loss"]
        # The value waits for the device.
        float(loss)
    return (time.perf_counter() - start) / TIMED_STEPS
