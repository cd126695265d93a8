# SPDX-License-Identifier: Apache-2.0
"""What the doctor says about the machine and what is installed on it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import warp as wp

from gaussian_splatting.rasterization.backends.choice import choose_rasterizer
from gaussian_splatting.rasterization.backends.self_test import reference_test
from sugar_extractors.mesh.meshing_backends import choose_backend
from sugar_pipeline.doctor.findings import Finding
from sugar_utils.device import (
    INSTALL_DRIVER,
    KEEP_DRIVER,
    MIN_DRIVER,
    MIN_DRIVER_CUDA,
    CudaFacts,
    choose_device,
    cuda_facts,
    driver_cuda_version,
)
from sugar_utils.errors import UserError
from sugar_utils.memory import available_bytes, format_bytes
from sugar_utils.warp_launch import WARP_VERSION

TESTED_TORCH = ((2, 7), (2, 15))
"""Oldest and newest torch that the tests were run with."""

LITTLE_MEMORY, LITTLE_DISK = 4 * 2**30, 10 * 2**30
REQUIRED = ("numpy", "scipy", "pycolmap", "plyfile", "pillow", "rich", "msgspec", "psutil")
OPTIONAL = {
    "tensorboard": "curves of a run",
    "xatlas": "--texture_atlas xatlas",
    "lpips": "LPIPS in metrics.py",
    "viser": "view.py and --viewer",
}
BACKENDS = {
    "gsplat": ("gsplat", "--rasterizer gsplat"),
    "inria": ("diff_gaussian_rasterization", "--rasterizer inria"),
}


def machine_findings(
    kind: str, gpu: int | None, output: Path, facts: CudaFacts | None = None
) -> list[Finding]:
    """Everything about the machine.

    Args:
        kind: Of the device, as of ``--device``.
        gpu: Number of the CUDA device, if one was named.
        output: Folder that results would go to.
        facts: About CUDA; asked from the system if None.
    """
    facts = facts or cuda_facts()
    found = [*_system(output), *_torch(facts), *_gpus(facts)]
    try:
        chosen = choose_device(kind, gpu, facts)
    except UserError as error:
        found.append(Finding("device", "none", "problem", str(error)))
    else:
        # A driver means that there is a GPU: not to use it is hardly what its owner wants.
        missed = chosen.device.type == "cpu" and facts.driver and kind == "auto"
        advice = "the line above says how to fix it"
        found.append(Finding.unless(missed, "device", chosen.reason, "problem", advice))
        found += [_rasterizer(chosen.device), *_backends(chosen.device)]
    return [*found, *_libraries()]


def _system(output: Path) -> Iterator[Finding]:
    yield Finding("Python", f"{platform.python_version()} on {platform.platform(terse=True)}")
    free = available_bytes("cpu")
    if free is not None:
        yield Finding.unless(
            free < LITTLE_MEMORY,
            "free main memory",
            format_bytes(free),
            "warning",
            "close other programs; photographs and meshing need some",
        )
    existing = next(folder for folder in (output.resolve(), *output.resolve().parents)
                    if folder.is_dir())  # fmt: skip
    room = shutil.disk_usage(existing).free
    yield Finding.unless(
        room < LITTLE_DISK,
        "free disk space",
        f"{format_bytes(room)} at {existing}",
        "warning",
        "a million Gaussians take 0.7 GB in every checkpoint that is kept",
    )


def _torch(facts: CudaFacts) -> Iterator[Finding]:
    build = f"for CUDA {facts.torch_cuda}" if facts.torch_cuda else "CPU-only build"
    oldest, newest = TESTED_TORCH
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    names = [".".join(map(str, end)) for end in TESTED_TORCH]
    yield Finding.unless(
        not oldest <= version <= newest,
        "torch",
        f"{torch.__version__}, {build}",
        "warning",
        f"tested with {names[0]} to {names[1]}; it may work all the same",
    )
    yield Finding("Warp", f"{wp.__version__}, kernels kept in {wp.config.kernel_cache_dir}")
    newest_cuda = driver_cuda_version() if facts.driver else None
    supports = (
        "" if newest_cuda is None else f", supports CUDA up to {newest_cuda[0]}.{newest_cuda[1]}"
    )
    needed = (12, 0) if WARP_VERSION < (1, 18) else MIN_DRIVER_CUDA
    yield Finding.unless(
        newest_cuda is not None and newest_cuda < needed,
        "NVIDIA driver",
        f"found{supports}" if facts.driver else "none",
        "problem",
        f"the kernels need CUDA {MIN_DRIVER_CUDA[0]}, so driver {MIN_DRIVER} or newer; "
        f"{INSTALL_DRIVER}; {KEEP_DRIVER}",
    )


def _gpus(facts: CudaFacts) -> Iterator[Finding]:
    for index, device in enumerate(facts.gpus):
        free = format_bytes(available_bytes(torch.device("cuda", index)) or 0)
        version = ".".join(map(str, device.capability))
        yield Finding(
            f"GPU {index}",
            f"{device.name}, compute capability {version}, "
            f"{free} of {format_bytes(device.memory)} free",
        )


def _rasterizer(device: torch.device) -> Finding:
    fault = reference_test(device)
    return Finding.unless(
        fault is not None,
        "rasterizer warp",
        f"built in, {device.type}: {fault or 'agrees with the float64 reference'}",
        "problem",
        "please report this, with the lines above",
    )


def _backends(device: torch.device) -> Iterator[Finding]:
    """Packages that are used only when asked for: whether they could be."""
    for name, (package, flag) in BACKENDS.items():
        what = f"{package} ({flag})"
        if importlib.util.find_spec(package) is None:
            yield Finding(what, "not installed, not needed")
        elif device.type != "cuda":
            yield Finding(what, "installed; works on a GPU only")
        else:
            try:
                choose_rasterizer(name, device)
            except UserError as error:
                yield Finding(what, "installed, cannot be used", "warning", str(error))
            else:
                yield Finding(what, "installed, passes its self-test")


def _libraries() -> Iterator[Finding]:
    for name in REQUIRED:
        version = _version(name)
        advice = "pip install -r requirements.txt"
        yield Finding.unless(version is None, name, version or "missing", "problem", advice)
    for name, purpose in OPTIONAL.items():
        yield Finding(name, f"{_version(name) or 'not installed'} ({purpose})")
    yield _meshing()


def _meshing() -> Finding:
    try:
        choose_backend("open3d")
    except UserError as error:
        # Without it pycolmap meshes, which is fine; installed in vain it is not.
        in_vain = importlib.util.find_spec("open3d") is not None
        return Finding.unless(in_vain, "meshing", "pycolmap", "warning", str(error))
    return Finding("meshing", "open3d")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
