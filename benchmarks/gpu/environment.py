# SPDX-License-Identifier: Apache-2.0
"""Machine and versions that figures belong to."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import warp as wp

from benchmarks.gpu.common import Check, Finding, Setup, SkipCheck
from benchmarks.rasterizer import describe_machine
from sugar_utils.device import choose_device, cuda_facts
from sugar_utils.errors import UserError
from sugar_utils.memory import available_bytes, format_bytes


def machine(setup: Setup) -> Iterator[Finding]:
    for name, value in describe_machine().items():
        yield Finding(name, True, str(value))


def gpu(setup: Setup) -> Iterator[Finding]:
    setup.need_cuda()
    facts, index = cuda_facts(), setup.place.index or 0
    device = facts.gpus[index]
    capability = ".".join(map(str, device.capability))
    shown = f"{device.name}, compute capability {capability}, {format_bytes(device.memory)}"
    yield Finding("GPU", True, shown, {"name": device.name, "capability": capability})
    free = available_bytes(setup.place)
    yield Finding("free memory", True, format_bytes(free), {"bytes": free})
    yield Finding("torch", True, f"CUDA {facts.torch_cuda}, kernels for {facts.architectures}")
    try:
        chosen = choose_device("cuda", index)
        yield Finding("choice", chosen.device == setup.place, chosen.reason)
    except UserError as error:
        # The program would refuse this GPU; the other checks tell whether it is right.
        yield Finding("choice", False, str(error))
    own = wp.device_from_torch(setup.place)
    yield Finding("Warp", own.is_cuda, f"{own.name}, sm_{own.arch}", {"arch": own.arch})
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        raise SkipCheck(f"nvidia-smi cannot be run ({type(error).__name__})") from error
    yield Finding("driver", True, told.stdout.split("\n")[0].strip())


CHECKS = (Check("machine", machine), Check("gpu", gpu))
