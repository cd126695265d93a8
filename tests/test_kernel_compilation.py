# SPDX-License-Identifier: Apache-2.0
"""Kernels are compiled before a stage begins; what takes long says so, what fails does not stop."""

from __future__ import annotations

import time

import pytest
import torch
import warp as wp

import sugar_pipeline.pipeline.pipeline_run  # noqa: F401  everything that a pipeline may launch
from gaussian_splatting.engine import runner as kernel_compilation
from gaussian_splatting.engine.runner import compile_ahead, kernel_modules
from gaussian_splatting.rasterization.blend_cpu import tile_kernels
from gaussian_splatting.rasterization.blend_cuda import block_kernels
from sugar_utils.console import Console
from tests.test_cuda_compilation import device_modules

MADE_FOR_CHANNELS = "__locals__"


@pytest.fixture
def loaded(monkeypatch) -> list[str]:
    """Names of modules as they are loaded; loading does nothing else."""
    names: list[str] = []
    monkeypatch.setattr(
        wp, "force_load", lambda place, modules: names.extend(m.name for m in modules)
    )
    return names


def test_all_kernels_of_a_device_are_known_and_none_of_the_other_one():
    cpu, gpu = ({m.name for m in kernel_modules(on_cpu)} for on_cpu in (True, False))
    named = {name for name in gpu if MADE_FOR_CHANNELS not in name}
    assert named <= set(device_modules())
    assert {"gaussian_splatting.optim.adam_steps", "sugar_scene.field_device"} <= named
    assert {"gaussian_splatting.rasterization.blend_cpu", "sugar_scene.field_cpu"} <= cpu
    assert not any(name.endswith("_cpu") for name in gpu)
    assert not any(name.endswith("_cuda") for name in cpu)
    # Blending forwards and backwards, for colours and with normals.
    for n_channels in (3, 6):
        for blend, names in ((tile_kernels, cpu), (block_kernels, gpu)):
            kernels = vars(blend(n_channels))
            assert {"forward", "backward", "sum_gradient_rows"} <= set(kernels)
            assert {kernel.module.name for kernel in kernels.values()} <= names


def test_a_stage_may_blend_other_numbers_of_channels(loaded):
    compile_ahead(torch.device("cpu"), Console(), (5,))
    more = set(loaded) - {m.name for m in kernel_modules(True)}
    assert more == {kernel.module.name for kernel in vars(tile_kernels(5)).values()}


def test_what_is_quick_is_silent(loaded, capsys):
    compile_ahead(torch.device("cpu"), Console())
    assert sorted(loaded) == [m.name for m in kernel_modules(True)]
    assert capsys.readouterr().out == ""


def test_what_takes_long_says_how_far_it_is(loaded, monkeypatch, capsys):
    monkeypatch.setattr(kernel_compilation, "MESSAGE_SECONDS", 0.01)
    slow = kernel_modules(True)[0].name
    load = wp.force_load

    def load_slowly(place, modules):
        time.sleep(0.3 if modules[0].name == slow else 0)
        load(place, modules)

    monkeypatch.setattr(wp, "force_load", load_slowly)
    compile_ahead(torch.device("cpu"), Console())
    n = len(kernel_modules(True))
    assert f"compiling kernels, once {n}/{n}" in capsys.readouterr().out


def test_a_kernel_that_does_not_compile_stops_nothing_yet(loaded, monkeypatch):
    broken = kernel_modules(True)[0].name
    load = wp.force_load

    def load_or_fail(place, modules):
        if modules[0].name == broken:
            raise RuntimeError("no")
        load(place, modules)

    monkeypatch.setattr(wp, "force_load", load_or_fail)
    compile_ahead(torch.device("cpu"), Console())
    assert len(loaded) == len(kernel_modules(True)) - 1
