# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sugar_utils.errors import UserError

# Torch and Warp are imported where they are used: with several processes, the one that hands out
# the tests, which all others wait for, runs none itself.
if TYPE_CHECKING:
    from tests.support.tiny_scene import TinyScene

REPOSITORY = Path(__file__).resolve().parent.parent
LONGEST_FILES = (
    "test_cuda_compilation.py",
    "test_campaigns.py",
    "test_blocks_run.py",
    "test_gpu_check.py",
    "test_device_neutral.py",
    "test_convert.py",
    "test_process_group.py",
    "test_resume.py",
    "test_further_features.py",
    "test_recorded_passes.py",
    "test_public_benchmarks.py",
    "test_panoramas.py",
    "test_turntable.py",
    "test_command_line.py",
    "test_steps_read_late.py",
    "test_health.py",
    "test_capture_check.py",
    "test_mesh_extraction.py",
    "test_nothing_stale.py",
    "test_pipeline.py",
    "test_out_of_memory.py",
    "test_run_results.py",
    "test_late_bands.py",
    "test_multiview_stage.py",
    "test_end_to_end.py",
    "test_targets.py",
    "test_api.py",
    "test_object_region.py",
    "test_cuda_graphs.py",
    "test_estimated_masks.py",
)
"""Files whose slow tests take longest, as sums."""


def pytest_configure(config: pytest.Config) -> None:
    """Have files handed out to processes in the order of the tests, not by their numbers."""
    if config.pluginmanager.hasplugin("xdist"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, so that all processes end at the same time."""
    ranks = {name: rank for rank, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of garbage collections: they take a tenth else."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function):
    """Skip tests of a GPU's kernels where an older Warp has nothing to run them on a CPU."""
    try:
        return (yield)
    except UserError as error:
        from sugar_utils.warp_launch import HAS_FIBERS

        if HAS_FIBERS or "thread blocks" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def scenes_dir() -> Path:
    """Folder with the real test scenes (fox, bunny); skips where they are not at hand."""
    default = REPOSITORY.parent / "shared" / "scenes"
    path = Path(os.environ.get("SUGAR_SCENES", default))
    if not path.is_dir():
        pytest.skip(f"no test scenes at {path}; set SUGAR_SCENES to a folder that has them")
    return path


@pytest.fixture(scope="session", autouse=True)
def fast_checksums() -> None:
    """Sums of TensorBoard's files without a loop in Python over their bytes."""
    from tests.support import checksums

    checksums.install()


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """No test cuts the power, so nothing needs to be on the disk itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def solve_here(module: str, arguments: Sequence[str], waiting: Callable[[int], None]) -> None:
    """Poisson as its process does it, without the process."""
    from sugar_extractors.mesh import poisson_process

    library, folder, options = arguments
    solve = {"pycolmap": poisson_process.by_pycolmap, "open3d": poisson_process.by_open3d}[library]
    solve(Path(folder), json.loads(options))


@pytest.fixture(scope="session", autouse=True)
def poisson_in_this_process() -> Iterator[None]:
    """To start a process takes longer than small meshes; ``separate_process`` brings it back."""
    from sugar_extractors.mesh import meshing_backends

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshing_backends, "run_alone", solve_here)
        yield


@pytest.fixture
def separate_process(monkeypatch) -> None:
    """Poisson in a process of its own, as in the program."""
    from sugar_extractors.mesh import meshing_backends
    from sugar_utils.libraries import run_alone

    monkeypatch.setattr(meshing_backends, "run_alone", run_alone)


@pytest.fixture(scope="module")
def small_pictures() -> Iterator[None]:
    """Pictures of pages a few pixels wide: drawing them is most of a short run on meshes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sugar_pipeline.pipeline.pipeline_report.WIDTH", 48)
        yield


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> TinyScene:
    """A tiny COLMAP scene, one for each test module."""
    from tests.support.tiny_scene import make_tiny_scene

    return make_tiny_scene(tmp_path_factory.mktemp("tiny") / "scene")


@pytest.fixture(scope="module")
def checkpoint(scene, tmp_path_factory) -> Path:
    """A vanilla checkpoint of it."""
    from tests.support.tiny_scene import make_tiny_checkpoint

    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint", scene)
