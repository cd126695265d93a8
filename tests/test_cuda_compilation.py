# SPDX-License-Identifier: Apache-2.0
"""Every kernel that a GPU may be given compiles for every supported generation, without a GPU."""

from __future__ import annotations

import importlib
import re

import pytest
import warp as wp

from gaussian_splatting.rasterization.blend_cuda import block_kernels
from sugar_utils.neighbors import _query_kernel
from tests.support.repository import FLOORS, ROOT

ARCHITECTURES = (75, 80, 86, 89, 90, 120)
"""RTX 20 to 50 and the data-centre cards beside them."""

CHANNELS = (3, 4, 6)
"""Colour; with depth; with normals. Any other number compiles like these."""

CPU_ONLY = {
    "gaussian_splatting/losses/photometric_cpu.py",
    "gaussian_splatting/rasterization/blend_cpu.py",
    "sugar_scene/field_cpu.py",
}
"""Bodies in C++ with CPU vectors, which no launch on a GPU reaches."""

MADE_ON_DEMAND = {
    "gaussian_splatting/rasterization/blend_cuda.py",
    "gaussian_splatting/rasterization/gradient_sums_cuda.py",
}
"""All of whose kernels are made for a number of channels."""


def kernel_files() -> set[str]:
    files = (path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
    return {
        path.relative_to(ROOT).as_posix()
        for path in files
        if re.search(r"^ *@(wp\.|native_)kernel", path.read_text(encoding="utf-8"), re.MULTILINE)
    }


def device_modules() -> list[str]:
    names = kernel_files() - CPU_ONLY - MADE_ON_DEMAND
    return [name.removesuffix(".py").replace("/", ".") for name in sorted(names)]


def compile_for(module, architecture, folder, *, machine_code=False) -> int:
    """Size of the result in bytes."""
    paths = wp.compile_aot_module(
        module, device=None, arch=architecture, module_dir=folder, use_ptx=not machine_code
    )
    return sum(path.stat().st_size for path in paths)


def test_kernels_of_the_cpu_are_the_only_ones_left_out():
    assert kernel_files() > CPU_ONLY | MADE_ON_DEMAND
    for name in CPU_ONLY:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "native_kernel" in text
    assert "gaussian_splatting.rasterization.tile_coverage" in device_modules()


def test_the_way_back_through_blending_compiles_for_the_oldest_generation(tmp_path):
    assert compile_for(block_kernels(6).backward.module, 75, tmp_path) > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_kernels_compile_for_every_generation(architecture, tmp_path):
    for name in device_modules():
        folder = tmp_path / name
        assert compile_for(importlib.import_module(name), architecture, folder) > 1000, name
    for capacity in (16, 32):
        assert compile_for(_query_kernel(capacity).module, architecture, tmp_path / "query") > 1000
    for n_channels in CHANNELS if architecture in (75, 120) else CHANNELS[-1:]:
        kernels = block_kernels(n_channels)
        for name in ("forward", "backward", "sum_gradient_rows"):
            kernel = getattr(kernels, name)
            folder = tmp_path / f"{name} {n_channels}"
            machine_code = n_channels == CHANNELS[-1]
            size = compile_for(kernel.module, architecture, folder, machine_code=machine_code)
            assert size > 1000, name
