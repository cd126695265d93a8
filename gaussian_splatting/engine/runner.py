# SPDX-License-Identifier: Apache-2.0
"""One run of any stage: decide about its folder, read, compile, build, train, report."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
import warp as wp

from gaussian_splatting.data.images import ImageStore, shared_or_own_store
from gaussian_splatting.engine.checkpoint import load_payload
from gaussian_splatting.engine.loop import LoopConfig, Trainer
from gaussian_splatting.engine.observer import ObservedRun, ObserverFactory, ViewerOptions
from gaussian_splatting.engine.reporting.health import problem_of
from gaussian_splatting.engine.reporting.run_report import write_run_report
from gaussian_splatting.engine.run_directory import RUN_FILE, ResumePlan, RunDirectory
from gaussian_splatting.engine.stage import Stage, StageConfig
from gaussian_splatting.engine.step_runner import NewStepRunner, plain_runner
from gaussian_splatting.engine.stepping import RunContext
from gaussian_splatting.rasterization.blend_cpu import tile_kernels
from gaussian_splatting.rasterization.blend_cuda import block_kernels
from gaussian_splatting.rasterization.compute import Compute
from gaussian_splatting.scenes.scene import Scene
from sugar_utils.console import Console
from sugar_utils.errors import UserError, printable
from sugar_utils.files import check_writable, exclusive, flat_items
from sugar_utils.flags import boolean, positive_int
from sugar_utils.html import duration_text
from sugar_utils.kernel_loading import load_module, loading_ahead
from sugar_utils.memory import release_cached, release_pinned
from sugar_utils.process_group import ProcessGroup
from sugar_utils.schemas import RunRecord, read_checked
from sugar_utils.settings import flag

Model = TypeVar("Model")

KERNEL_PACKAGES = (
    "gaussian_splatting",
    "sugar_utils",
    "sugar_scene",
    "sugar_trainers",
    "sugar_extractors",
)
"""Packages with modules of Warp kernels."""
RENDERED_CHANNELS = (3, 6)
"""Colour, and colour with normals: blending has kernels of its own for each number of channels."""
WORKERS_CPU = 1
WORKERS_GPU = 8
"""Modules that are compiled at once; the compiler for CPUs takes one."""
MESSAGE_SECONDS = (
    1.5  # seconds after which it is said that kernels are being compiled; loading takes less
)


@dataclass(frozen=True)
class StageRun(Generic[Model]):
    """A run that has read its inputs and has not touched its folder yet."""

    title: str
    scene: Scene
    directory: RunDirectory
    loop: LoopConfig
    build: Callable[[Model, ImageStore, Console], Stage]
    results: Sequence[Path]
    # Makes more of the initial model by looking at the photographs; not called where a checkpoint
    # is continued.
    init_from_images: Callable[[Model, ImageStore, Console], Model] | None = None
    channels: tuple[int, ...] = ()
    packages: tuple[str, ...] = KERNEL_PACKAGES  # whose kernels the stage may launch
    new_runner: NewStepRunner = plain_runner  # makes what carries out its passes


Prepare = Callable[["Messages"], tuple[StageRun[Model], Model]]  # reads the inputs of a run


class StageOptions(Protocol):
    """Options of a stage, as :func:`run_stage` needs them."""

    @property
    def config(self) -> StageConfig:
        """Settings of the stage."""
        ...

    @property
    def compute(self) -> Compute:
        """Where it is computed."""
        ...

    @property
    def run(self) -> RunOptions:
        """Options of its folder and checkpoints."""
        ...

    @property
    def messages(self) -> tuple[str, ...]:
        """One line for each flag that was given but cannot act."""
        ...

    def prepare(self, messages: Messages) -> tuple[StageRun, Any]:
        """Read the inputs: the run, and the initial model."""
        ...


def run_stage(
    options: StageOptions,
    images: ImageStore | None = None,
    prepare: Prepare | None = None,
    console: Console | None = None,
    observers: Sequence[ObserverFactory] = (),
) -> Path:
    """Train a stage and return the first of its results; a finished run is not repeated.

    Args:
        images: Decoded photographs that other stages use, too; an own store if None.
        prepare: In place of ``options.prepare``, which reads the inputs.
        console: Where it is said, besides in the log of the run; the standard output if None.
        observers: Called with the stage before it is trained; the returned observers get its steps.
    """
    group = options.compute.group
    white = options.config.white_background
    with group.single_report():
        messages = Messages([*options.compute.notes, *options.messages])
        if options.compute.rasterizer_reason:
            messages.detail(options.compute.rasterizer_reason)
        alone = console is None
        run, initial = (prepare or options.prepare)(messages)
        with open_session(run, options.run, messages, group, console) as (console, plan):
            say = console.headline if alone else console.info
            say(f"{run.title}: {run.scene.description}")
            there = plan.finished and all(path.is_file() for path in run.results)
            if group.broadcast(there):
                console.headline(f"finished already: {run.results[0]}")
                return run.results[0]
            # Of an earlier stage, whose photographs had other sizes.
            release_cached(options.compute.device)
            release_pinned()
            compile_ahead(options.compute.device, console, run.channels, run.packages)
            with shared_or_own_store(images, white, group.size) as store:
                if run.init_from_images is not None and plan.payload is None:
                    initial = run.init_from_images(initial, store, console)
                stage = run.build(initial, store, console)
                # The stage has its own copy; two of them are 236 bytes too much per Gaussian.
                del initial
                viewer = options.run.watching
                observed = ObservedRun(stage, run.scene, run.loop.last, viewer, group, console)
                with ExitStack() as stack:
                    opened = [stack.enter_context(observer(observed)) for observer in observers]
                    context = RunContext(store, console, group, run.new_runner)
                    trainer = Trainer(stage, run.loop, run.scene, run.directory, context, opened)
                    trainer.run(plan)
                outcome = f"{len(stage.model):,} Gaussians"
            if group.is_first:
                write_run_report(run.directory.path, console.warn)
                record = read_checked(run.directory.path / RUN_FILE, RunRecord)
                say(f"{run.title}: {outcome}, {_quality_and_time(record)}")
                problem = problem_of(record.get("health", {}))
                if alone and problem is not None:
                    console.warn(f"{run.title}: {problem}")
            say(f"finished: {run.results[0]}")
    return run.results[0]


def _quality_and_time(record: Mapping[str, Any]) -> str:
    """PSNR of held-out views, or else of training views, and the duration of a finished run."""
    psnr = record.get("health", {}).get("psnr")
    views = "held-out" if record.get("held_out_views") else "training"
    quality = "" if psnr is None else f"{views} PSNR {psnr:.1f} dB, "
    seconds = sum(phase["seconds"] for phase in record.get("timings", {}).values())
    return f"{quality}{duration_text(seconds)}"


@dataclass(frozen=True)
class RunOptions:
    """Options of a run's folder and checkpoints; none of them changes the result."""

    resume: str = flag(
        "auto",
        "auto: continue an unfinished run with the same settings; none: start "
        "anew; PATH: continue this checkpoint file, or run folder",
        group="run",
        metavar="{auto,none,PATH}",
        task="run",
    )
    overwrite: bool = flag(
        False,
        "replace another run in the output folder",
        group="run",
        no_effect_when="for an unfinished run with the same settings, which is continued",
        task="run",
    )
    keep_checkpoints: int | None = flag(
        3,
        "interval checkpoints to keep; milestones and the last one always stay",
        group="run",
        parse=positive_int,
    )
    verbose: bool = flag(
        False,
        "also print settings, figures, file names and losses, which otherwise are in log.txt alone",
        group="run",
        parse=boolean,
        nargs="?",
        const=True,
    )
    watching: ViewerOptions = field(default_factory=ViewerOptions)


class Messages(list[str]):
    """Keeps notes, which it is called with, and details, before there is a console."""

    __call__ = list.append

    def __init__(self, notes: Iterable[str] = ()) -> None:
        super().__init__(notes)
        self.details: list[str] = []

    def detail(self, message: str) -> None:
        """Keep what only the log needs."""
        self.details.append(message)


@contextmanager
def open_session(
    run: StageRun,
    options: RunOptions,
    messages: Messages,
    group: ProcessGroup,
    console: Console | None = None,
) -> Iterator[tuple[Console, ResumePlan]]:
    """Lock and plan the run, open its log and print the resolved configuration."""
    directory = run.directory
    with ExitStack() as stack:
        if group.is_first:
            advice = f"wait until it ends, stop it, or choose another {directory.output_flag}"
            stack.enter_context(exclusive(check_writable(directory.path), advice))
        try:
            plan = _agreed_plan(directory, options, run.loop.last, messages, group)
        except UserError:
            say = print if console is None else console.info
            for message in messages if group.is_first else ():
                say(printable(message))
            raise
        if console is None:
            console = Console(verbose=options.verbose) if group.is_first else Console.silent()
        if group.is_first:
            console = console.with_log(directory.log)
        stack.enter_context(console)
        identity = directory.identity
        console.table(run.title, flat_items({**identity.sources, **identity.settings}))
        for message in messages:
            console.note(message)
        for message in messages.details:
            console.info(message)
        yield console, plan


def _agreed_plan(
    run: RunDirectory, options: RunOptions, final: int, messages: Messages, group: ProcessGroup
) -> ResumePlan:
    """The plan of the first process, for all of them; each reads the checkpoint for itself."""
    plan = ResumePlan()
    if group.is_first:
        plan = run.plan(options.resume, options.overwrite, final, messages)
    source, finished = group.broadcast((plan.source, plan.finished))
    if group.is_first or source is None:
        return plan
    return ResumePlan(load_payload(source, run.check), source, finished)


def compile_ahead(
    device: torch.device,
    console: Console,
    channels: Sequence[int] = (),
    packages: Sequence[str] = KERNEL_PACKAGES,
) -> None:
    """Compile or load the kernels of all modules of some packages that have been imported."""
    modules = kernel_modules(device.type == "cpu", channels, packages)
    with ThreadPoolExecutor(n_workers(device), thread_name_prefix="compile") as pool:
        loaded = [pool.submit(load_module, module, device) for module in modules]
        if wait(loaded, timeout=MESSAGE_SECONDS).not_done:
            with console.progress("compiling kernels, once", 1, len(loaded)) as progress:
                for n_done, _ in enumerate(as_completed(loaded), start=1):
                    progress.update(n_done)


def n_workers(device: torch.device) -> int:
    """Return the number of modules that are compiled at once."""
    most = WORKERS_CPU if device.type == "cpu" else WORKERS_GPU
    return min(most, os.cpu_count() or 1)


def kernel_modules(
    on_cpu: bool, channels: Sequence[int] = (), packages: Sequence[str] = KERNEL_PACKAGES
) -> list[Any]:
    """Warp's modules of kernels that a device of a kind may be given, in the order of names."""
    blend = tile_kernels if on_cpu else block_kernels
    modules = {}
    for module in _imported_modules(packages, "_cuda" if on_cpu else "_cpu"):
        modules[module.name] = module
    for n_channels in (*RENDERED_CHANNELS, *channels):
        for kernel in vars(blend(n_channels)).values():
            modules[kernel.module.name] = kernel.module
    return [modules[name] for name in sorted(modules)]


def _imported_modules(packages: Sequence[str], left_out: str) -> Iterator[Any]:
    """Warp's modules that bear the name of one of ours, without those of another device."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in packages and not name.endswith(left_out):
            kernels = (value for value in vars(module).values() if isinstance(value, wp.Kernel))
            yield from {kernel.module for kernel in kernels if kernel.module.name == name}


def kernels_ahead(
    device: torch.device, packages: Sequence[str] = KERNEL_PACKAGES
) -> AbstractContextManager[None]:
    """Load the kernels that stages may launch on a device, for as long as the context is open.

    Args:
        device: Where the stages run.
        packages: Those whose kernels they launch.
    """
    modules = kernel_modules(device.type == "cpu", packages=packages)
    return loading_ahead(modules, device, n_workers(device))
