# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's sanitizer over the kernels that share memory between threads, at a small size.

``python -m benchmarks.gpu.sanitizer DEVICE`` runs them by itself.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import sugar_utils  # noqa: F401  before torch

# isort: split
import torch

from benchmarks.gpu.common import Check, Finding, Setup, SkipCheck
from gaussian_splatting.losses.photometric import color_gradient
from gaussian_splatting.rasterization import rasterize
from tests.support.step_scenes import large_scene

WIDTH = 90
HEIGHT = 70
N_GAUSSIANS = 2_000
ROOT = Path(__file__).resolve().parents[2]
SECONDS = 100
ERROR_CODE = 9


def launch_all(device: torch.device) -> None:
    """Blend, forward and backward, sum gradients, and compare colours."""
    gaussians, camera = large_scene(N_GAUSSIANS, WIDTH, HEIGHT, device)
    leaves = gaussians.as_leaves()
    output = rasterize(leaves, camera, depth=True, normal=True)
    (output.image.mean() + output.depth.mean() + output.normal.mean()).backward()
    image = output.image.detach().contiguous()
    color_gradient(image, image.flip(0).contiguous(), 0.2)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _under(tool: str) -> Callable[[Setup], Iterator[Finding]]:
    """Make a check that runs this file under a tool of the sanitizer."""

    def run(setup: Setup) -> Iterator[Finding]:
        setup.need_cuda()
        program = shutil.which("compute-sanitizer")
        if program is None:
            raise SkipCheck("compute-sanitizer is not installed")
        command = [program, "--tool", tool, "--error-exitcode", str(ERROR_CODE)]
        command += [sys.executable, "-m", "benchmarks.gpu.sanitizer", str(setup.place)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
        lines = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line]
        shown = lines[-1].strip("= ") if lines else (done.stderr or done.stdout)[-200:]
        if done.returncode not in (0, ERROR_CODE):
            raise SkipCheck(f"the sanitizer cannot run here: {' '.join(shown.split())}")
        yield Finding(tool, done.returncode == 0, shown, {"output": done.stdout[-5_000:]})

    return run


def alone(setup: Setup) -> Iterator[Finding]:
    """Run the kernels without the sanitizer, which also compiles them."""
    launch_all(setup.place)
    yield Finding("kernels", True, "run")


CHECKS = (
    Check("by themselves", alone),
    *(Check(tool, _under(tool), SECONDS + 10) for tool in ("racecheck", "memcheck")),
)

if __name__ == "__main__":
    launch_all(torch.device(sys.argv[1]))
