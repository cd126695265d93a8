# SPDX-License-Identifier: Apache-2.0
"""Every kernel that a GPU may be given compiles for every supported generation, without a GPU."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace

import pytest
import warp as wp

from gaussian_splatting.rasterization import projection_adjoint
from gaussian_splatting.rasterization.blend_cuda import block_kernels
from gaussian_splatting.rasterization.projection_adjoint import PROJECT_BACKWARD
from sugar_utils.neighbors import _query_kernel
from sugar_utils.warp_launch import BLOCK_DIMS, REGISTERS, block_dim_of
from tests.support.machine_code import Usage, usages
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


MAX_STACK = 128
"""Bytes a thread of blending may keep in memory for want of registers."""

MANY = 10**6  # items of a large launch
WARP = 32  # threads
REGISTER_UNIT = 8  # registers of a thread are given out in so many


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


def resident_blocks(usage: Usage, block_dim: int) -> int:
    """Blocks that fit on a multiprocessor at once, by their registers."""
    of_thread = -(-usage.registers // REGISTER_UNIT) * REGISTER_UNIT
    return REGISTERS // (of_thread * WARP) // (block_dim // WARP)


def test_kernels_of_the_cpu_are_the_only_ones_left_out():
    assert kernel_files() > CPU_ONLY | MADE_ON_DEMAND
    for name in CPU_ONLY:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "native_kernel" in text
    assert "gaussian_splatting.rasterization.tile_coverage" in device_modules()


@pytest.fixture(scope="module")
def usages_in(tmp_path_factory) -> Callable[[str, int], dict[str, list[Usage]]]:
    """What the kernels of a module use on an architecture; each is compiled once."""

    @cache
    def compiled(name: str, architecture: int) -> dict[str, list[Usage]]:
        return usages(importlib.import_module(name), architecture, tmp_path_factory.mktemp(name))

    return compiled


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("capacity", [16, 32])
def test_searches_of_several_sizes_compile_for_every_generation(capacity, architecture, tmp_path):
    module = _query_kernel(capacity).module
    paths = wp.compile_aot_module(
        module, device=None, arch=architecture, module_dir=tmp_path, use_ptx=True
    )
    assert sum(path.stat().st_size for path in paths) > 1000


@pytest.mark.parametrize("registers", [None, 64, 80, 128, 168, 255])
def test_blocks_are_small_for_few_items_and_for_many_registers(registers):
    options = {} if registers is None else {"cuda_max_registers": registers}
    kernel = SimpleNamespace(options=options)
    assert block_dim_of(kernel, 12_000) == BLOCK_DIMS[0]
    expected = {None: 256, 64: 256, 80: 128, 128: 128, 168: 64, 255: 64}
    assert block_dim_of(kernel, MANY) == expected[registers]


@pytest.mark.parametrize(
    "architecture", [75, 86, *(pytest.param(n, marks=pytest.mark.slow) for n in (89, 90, 120))]
)
def test_sixteen_warps_of_the_backward_projection_fit_on_a_multiprocessor(architecture, usages_in):
    found = usages_in(projection_adjoint.__name__, architecture)["project_backward"]
    assert len(found) == len(PROJECT_BACKWARD)
    for kernel, usage in zip(PROJECT_BACKWARD.values(), found, strict=True):
        block_dim = block_dim_of(kernel, MANY)
        n_blocks = resident_blocks(usage, block_dim)
        assert n_blocks >= 2
        assert n_blocks * block_dim >= 16 * WARP
        assert usage.stack <= 16


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_kernels_compile_and_none_leaves_most_of_a_multiprocessor_idle(architecture, usages_in):
    for name in device_modules():
        found = usages_in(name, architecture)
        assert found, name
        for kernel, overloads in found.items():
            for usage in overloads:
                assert resident_blocks(usage, BLOCK_DIMS[-1]) >= 2, kernel


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("n_channels", CHANNELS)
def test_blending_compiles_and_keeps_little_in_memory(architecture, n_channels, tmp_path):
    kernels = block_kernels(n_channels)
    for name in ("forward", "backward", "sum_gradient_rows"):
        kernel = getattr(kernels, name)
        (usage,) = usages(kernel.module, architecture, tmp_path / name)[name]
        assert usage.stack <= MAX_STACK
        assert resident_blocks(usage, kernel.module.options["block_dim"]) >= 8
