# SPDX-License-Identifier: Apache-2.0
"""Work of the host for an iteration on a GPU, counted on a CPU.

Launches of Warp kernels, operations of torch and waits of the host for the device, with the paths
of GPUs taken. Each costs the host some microseconds (a launch of Warp tens of them)
whatever the size of the scene, and a wait leaves the device idle: for small scenes they are the
limit. An operation is what torch dispatches; those that only allocate memory, or look at it in
another way, are counted apart. A wait is a number, a list or an array that the host reads, or a
result whose shape depends on values: boolean masks as indices, ``nonzero``, ``unique``.

Steps are whole ones, from learning rates to the optimiser, with the checks of the loop, in an
iteration where nothing is searched, densified or logged.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import warp as wp
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gaussian_splatting.components.densification import Region
from gaussian_splatting.core.cloud import GaussianCloud, Gaussians
from gaussian_splatting.data.cameras import Camera, ViewMask
from gaussian_splatting.engine.recording.cuda_graph import Recorder
from gaussian_splatting.engine.recording.recorded_runner import RecordedRunner
from gaussian_splatting.engine.stage import Stage
from gaussian_splatting.engine.step_runner import plain_runner
from gaussian_splatting.engine.stepping import RunContext, Stepper
from gaussian_splatting.losses import photometric
from gaussian_splatting.optim import adam, band_steps
from gaussian_splatting.rasterization import WARP, projection
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_stage import VanillaStage
from sugar_scene import field_kernels
from sugar_trainers import sampling
from sugar_trainers.coarse_stage import CoarseStage
from sugar_trainers.stage_config import CoarseConfig, MultiviewConfig
from sugar_utils.console import Console
from sugar_utils.warp_launch import PreparedLaunch
from tests.support import pretend_device
from tests.support.pretend_device import GPU, HOST, pretend_gpu, side_of
from tests.support.step_scenes import (
    Case,
    MadeUpPhotographs,
    as_cloud,
    make_multiview_stage,
    make_scene,
    photograph,
)

EXTENT = 5.0
N, WIDTH, HEIGHT, SAMPLES = 400, 48, 36, 500

ALLOCATIONS = (
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "detach",
    "lift_fresh",
)
_SHAPES_BY_VALUE = (
    "nonzero",
    "masked_select",
    "unique",
    "_unique2",
    "unique_consecutive",
    "repeat_interleave",
    "bincount",
)
READS = ("tolist", "cpu", "numpy", "__array__")


@dataclass
class Counts:
    """Calls of one iteration.

    Attributes:
        launches: Of Warp kernels, by name.
        operations: Of torch that compute or copy, by name.
        free: Of torch that only allocate, or look at memory in another way.
        waits: Of the host, by what it waited for.
    """

    launches: Counter = field(default_factory=Counter)
    operations: Counter = field(default_factory=Counter)
    free: Counter = field(default_factory=Counter)
    waits: Counter = field(default_factory=Counter)

    def totals(self) -> tuple[int, int, int, int]:
        """Return the number of each."""
        return tuple(c.total() for c in (self.launches, self.operations, self.free, self.waits))


class _Operations(TorchDispatchMode):
    """Counts what reaches torch's dispatcher, on the backward pass as well."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":
            self._counts.waits[_caller()] += 1
        elif shape_depends_on_values(name, args, kwargs):
            self._counts.waits[f"{name} at {_caller()}"] += 1
        free = func.is_view or name in ALLOCATIONS
        (self._counts.free if free else self._counts.operations)[name] += 1
        return func(*args, **kwargs)


class _Reads(TorchFunctionMode):
    """Counts what the host reads in one piece, and copies that it waits for.

    Single numbers are counted where they arrive.
    """

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        read = name in READS and isinstance(args[0], Tensor)
        if read and side_of(args[0]) is not HOST:
            self._counts.waits[f"{name} at {_caller()}"] += 1
        result = func(*args, **(kwargs or {}))
        if func in (Tensor.to, Tensor.copy_) and not (kwargs or {}).get("non_blocking"):
            source = args[0] if func is Tensor.to else args[1]
            if side_of(source) is HOST and side_of(result) is not HOST:
                self._counts.waits[f"{name} at {_caller()}"] += 1
        return result


def shape_depends_on_values(name: str, args: tuple, kwargs: dict) -> bool:
    if name in ("index", "index_put", "index_put_"):
        return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    return name in _SHAPES_BY_VALUE


def launch_name(function: Callable[..., Any], args: tuple) -> str:
    """Name of the kernel that a call launches; that of the function for a launch of Warp's own."""
    kernel = args[0].kernel if isinstance(args[0], PreparedLaunch) else args[0]
    return getattr(kernel, "key", function.__name__).rsplit(".", 1)[-1]


def _caller() -> str:
    """File and line of ours that made the host wait."""
    frame = sys._getframe(2)
    here = {__file__, pretend_device.__file__}
    root = str(Path(__file__).resolve().parents[2])
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(root) and name not in here:
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "torch"


@contextlib.contextmanager
def gpu_paths() -> Iterator[None]:
    """Take on the CPU what a GPU would take; kernels of blocks run as fibers."""
    fields = field_kernels.evaluate_fields

    with contextlib.ExitStack() as stack:
        for owner, name, replacement in (
            (WARP, "blocks", True),
            (photometric, "photometric_cpu", photometric.photometric_cuda),
            (projection, "counts_while_projecting", lambda device: True),
            (adam, "in_one_launch", lambda device: True),
            (band_steps, "in_one_launch", lambda device: True),
            (sampling, "counts_on_device", lambda device: True),
            (sampling, "evaluate_fields", functools.partial(fields, native=False)),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """Count inside the context, on one thread: each launch is one call there."""
    counts, threads = Counts(), torch.get_num_threads()

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            counts.launches[launch_name(function, args)] += 1
            return function(*args, **kwargs)

        return call

    torch.set_num_threads(1)
    try:
        with contextlib.ExitStack() as stack:
            for owner, name in (
                (PreparedLaunch, "run_all"),
                (PreparedLaunch, "run_range"),
                (wp, "launch_tiled"),
                (wp.utils, "radix_sort_pairs"),
            ):
                replacement = watched(getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, replacement))
            stack.enter_context(_Reads(counts))
            stack.enter_context(_Operations(counts))
            yield counts
    finally:
        torch.set_num_threads(threads)


def coarse(mode: str, iteration: int) -> Callable[[], tuple[Stage, int]]:
    """A stage of the coarse optimisation, and the iteration to count."""

    def make() -> tuple[Stage, int]:
        config = CoarseConfig(mode, sdf_samples=SAMPLES)
        return CoarseStage(_cloud(), config, Region(EXTENT), print), iteration

    return make


def vanilla() -> tuple[Stage, int]:
    """The vanilla stage while it densifies."""
    return VanillaStage(_cloud(), VanillaConfig(), Region(EXTENT), lambda *_: None), 601


def random_background() -> tuple[Stage, int]:
    """The vanilla stage with another background in each iteration."""
    config = VanillaConfig(random_background=True)
    return VanillaStage(_cloud(), config, Region(EXTENT), lambda *_: None), 601


def multiview() -> tuple[Stage, int]:
    """The multi-view mode while it densifies."""
    config = MultiviewConfig(multiview_pixels=200)
    return make_multiview_stage(_cloud(), _camera(), config, EXTENT, _photograph), 7_601


PHASES: dict[str, Callable[[], tuple[Stage, int]]] = {
    "dn_consistency": coarse("dn_consistency", 9_101),
    "density": coarse("density", 9_101),
    "sdf": coarse("sdf", 9_101),
    "entropy": coarse("dn_consistency", 7_101),
    "vanilla": vanilla,
    "random background": random_background,
    "multiview": multiview,
}


@functools.cache
def _scene() -> tuple[Gaussians, Camera]:
    return make_scene(Case("launches", N, WIDTH, HEIGHT, 1, radius=6.0))


def _cloud() -> GaussianCloud:
    return as_cloud(_scene()[0]).to(GPU)


@functools.cache
def _photograph(camera: Camera) -> Tensor:
    return photograph(camera)


def _camera() -> Camera:
    return _scene()[1]


def _cut_out(camera: Camera) -> Tensor:
    """The photograph with a mask of an object. (H, W, 4) uint8"""
    colors = photograph(camera)
    mask = torch.full_like(colors[..., :1], 255)
    mask[: HEIGHT // 4] = 0
    return torch.cat([colors, mask], dim=-1)


def count(phase: str, recorder: Recorder | None = None, *, is_cut_out: bool = False) -> Counts:
    """One iteration of a phase, after those that make, or record, what is kept.

    Args:
        is_cut_out: Whether the photograph has a mask of an object.
    """
    n_before = 1 if recorder is None else 5
    new_runner = plain_runner if recorder is None else functools.partial(RecordedRunner, recorder)
    with pretend_gpu(), gpu_paths():
        (stage, iteration), camera = PHASES[phase](), _camera()
        photographs = _photograph
        if is_cut_out:
            camera = replace(camera, mask=ViewMask(Path("mask.png"), "object"))
            photographs = _cut_out
        stepper = Stepper(
            stage,
            [camera] * 9,
            RunContext(MadeUpPhotographs(photographs), Console(), new_runner=new_runner),
            first=iteration,
            seed=0,
        )
        for earlier in range(n_before):
            stepper.step(iteration + earlier, None)
        with counting() as counts:
            stepper.step(iteration + n_before, None)
    return counts
