# SPDX-License-Identifier: Apache-2.0
"""Kernels are loaded ahead of their launch: once, by one thread, and without hiding an error."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import warp as wp

from gaussian_splatting.engine.runner import Messages, kernel_modules
from gaussian_splatting.rasterization.blend_cpu import tile_kernels
from gaussian_splatting.vanilla import vanilla_run
from gaussian_splatting.vanilla.vanilla_run import KERNEL_PACKAGES, VanillaOptions
from sugar_pipeline.demo import demo_scene
from sugar_pipeline.demo.demo_scene import run_demo
from sugar_pipeline.pipeline.pipeline_flags import train_parser
from sugar_trainers import stage_options
from sugar_trainers.refine_run import RefineOptions
from sugar_utils import warp_launch
from sugar_utils.errors import UserError
from sugar_utils.kernel_loading import load_module, loading_ahead, module_lock
from sugar_utils.warp_arrays import Floats
from sugar_utils.warp_launch import NATIVE_OPTIONS, launch, native_kernel
from tests.support.command_words import parse

CPU = torch.device("cpu")
SECONDS = 30  # longer than anything here lasts, so that a fault ends the test


class SlowLoader:
    """Stands for Warp's loader: a module takes until the test lets it go on."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.names: list[str] = []
        self.threads: set[int] = set()

    def load(self, place: object, modules: list[SimpleNamespace]) -> None:
        self.names += [module.name for module in modules]
        self.threads.add(threading.get_ident())
        self.begun.set()
        assert self.go_on.wait(SECONDS)


@pytest.fixture
def loader(monkeypatch) -> SlowLoader:
    slow = SlowLoader()
    monkeypatch.setattr(wp, "force_load", slow.load)
    return slow


class FakeModule:
    """A module that has a name and no kernels."""

    def __init__(self, name: str) -> None:
        self.name = name


@wp.kernel(enable_backward=False)
def double_values(first: int, values: wp.array(dtype=float)):
    i = first + wp.tid()
    values[i] = 2.0 * values[i]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_launch_waits_for_a_module_that_another_thread_loads(device, monkeypatch):
    # Warp's device of the CPU, which launches like those of GPUs.
    stream = SimpleNamespace(device=wp.get_device("cpu"))
    monkeypatch.setattr(warp_launch, "torch_stream", lambda device: stream)
    monkeypatch.setattr(warp_launch, "block_dim_of", lambda kernel, n_items: 1)
    warp_launch._load_once.cache_clear()
    values = torch.ones(4)
    with ThreadPoolExecutor(1) as pool:
        with module_lock(double_values.module):
            launched = pool.submit(launch, double_values, 4, [values], device=torch.device(device))
            with pytest.raises(TimeoutError):
                launched.result(timeout=0.3)
            assert values.tolist() == [1.0] * 4
        launched.result(timeout=SECONDS)
    assert values.tolist() == [2.0] * 4


@wp.kernel(enable_backward=False, module="unique")
def triple_values(first: int, values: wp.array(dtype=float)):
    i = first + wp.tid()
    values[i] = 3.0 * values[i]


def launch_in_a_fork(results) -> None:
    values = torch.ones(4)
    launch(triple_values, 4, [values])
    results.put(values.tolist())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="systems that fork")
def test_a_forked_process_loads_modules_by_a_thread_of_its_own():
    launch(double_values, 4, [torch.ones(4)])
    load_module(double_values.module, CPU)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=launch_in_a_fork, args=(results,))
    process.start()
    try:
        assert results.get(timeout=SECONDS) == [3.0] * 4
    finally:
        process.kill()
        process.join()


def test_what_was_not_begun_is_left_to_its_launch(loader):
    modules = [FakeModule(name) for name in ("first", "second", "third")]
    with loading_ahead(modules, CPU):
        assert loader.begun.wait(SECONDS)
        threading.Timer(0.2, loader.go_on.set).start()
    # What was begun is complete.
    assert loader.go_on.is_set()
    assert loader.names == ["first"]


def test_an_error_is_not_kept_waiting_by_modules(loader):
    def read() -> None:
        with loading_ahead([FakeModule("first"), FakeModule("second")], CPU):
            assert loader.begun.wait(SECONDS)
            raise ValueError("no such scene")

    with pytest.raises(ValueError, match="no such scene"):
        read()
    assert not loader.go_on.is_set()
    loader.go_on.set()
    assert loader.names == ["first"]


def test_modules_for_the_cpu_are_loaded_by_one_thread(loader):
    loader.go_on.set()
    with ThreadPoolExecutor(3) as pool:
        for number in range(6):
            pool.submit(load_module, FakeModule(str(number)), CPU)
    assert len(loader.names) == 6
    assert len(loader.threads) == 1


def read_vanilla(folder: Path) -> None:
    words = ["-s", str(folder), "-m", str(folder / "model"), "--device", "cpu"]
    parse(VanillaOptions, words).prepare(Messages())


def read_refined(folder: Path) -> None:
    words = ["-s", str(folder), "-c", str(folder), "-m", "mesh.ply", "--device", "cpu"]
    parse(RefineOptions, words).prepare(Messages())


def make_demo(folder: Path) -> None:
    words = ["--demo", "--output_dir", str(folder), "--device", "cpu"]
    run_demo(train_parser(None).parse_flags(words))


@pytest.mark.parametrize(
    ("run", "owner", "name"),
    [
        (read_vanilla, vanilla_run, "load_scene"),
        (read_refined, stage_options, "load_capture"),
        (make_demo, demo_scene, "make_demo_scene"),
    ],
)
def test_kernels_are_loaded_while_a_scene_is_read(run, owner, name, loader, monkeypatch, tmp_path):
    def read(*args: object, **options: object) -> None:
        assert loader.begun.wait(SECONDS)
        loader.go_on.set()
        raise UserError("the scene cannot be read")

    monkeypatch.setattr(owner, name, read)
    with pytest.raises(UserError, match="cannot be read"):
        run(tmp_path)
    names = {module.name for module in kernel_modules(True)}
    assert set(loader.names) <= names


@pytest.mark.slow
def test_an_error_of_a_module_loaded_ahead_shows_at_its_launch():
    @native_kernel("this is no C++;", module="unique", module_options=NATIVE_OPTIONS)
    def broken(item: int, values_: Floats): ...

    with loading_ahead([broken.module], CPU):
        pass
    with pytest.raises(Exception, match="build failed"):
        launch(broken, 1, [torch.ones(1)])


def test_kernels_of_a_number_of_channels_are_one_module():
    modules = []
    for n_channels in (3, 6):
        kernels = vars(tile_kernels(n_channels)).values()
        (module,) = {kernel.module for kernel in kernels}
        assert len(kernels) == 3
        assert {name: module.options[name] for name in NATIVE_OPTIONS} == NATIVE_OPTIONS
        modules.append(module)
    assert modules[0] is not modules[1]


def test_a_vanilla_stage_of_a_pipeline_loads_no_kernels_of_later_stages():
    names = [module.name for module in kernel_modules(True, packages=KERNEL_PACKAGES)]
    assert "gaussian_splatting.rasterization.projection_kernels" in names
    later = ("sugar_scene", "sugar_trainers", "sugar_extractors")
    assert [name for name in names if name.startswith(later)] == []
    assert len(names) < len(kernel_modules(True))
