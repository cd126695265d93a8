# SPDX-License-Identifier: Apache-2.0
"""One run of any stage: read, decide about the folder, build, train, report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from gaussian_splatting.compute import Compute
from gaussian_splatting.data.images import ImageStore, shared_or_own_store
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.engine.kernel_compilation import compile_ahead
from gaussian_splatting.engine.loop import LoopConfig, Trainer
from gaussian_splatting.engine.reporting.run_report import write_run_report
from gaussian_splatting.engine.run_directory import RunDirectory
from gaussian_splatting.engine.session import Notices, RunOptions, open_session
from gaussian_splatting.engine.stage import Stage
from gaussian_splatting.viewing.live_page import open_live_view
from sugar_utils.console import Console

Model = TypeVar("Model")


@dataclass(frozen=True)
class StageRun(Generic[Model]):
    """A run that has read its inputs and has not touched its folder yet.

    Attributes:
        title: Heading of the configuration that is printed.
        scene: Views to learn from and to hold out.
        directory: The folder.
        loop: When to do what.
        build: Makes the stage of the initial model; may plan memory, and say so.
        results: Files of a finished run, the one that the next stage reads first.
        enrich: Makes more of the initial model by looking at the photographs; not called where a
            checkpoint is continued.
        channels: Numbers of channels that it blends besides those that all stages may.
    """

    title: str
    scene: Scene
    directory: RunDirectory
    loop: LoopConfig
    build: Callable[[Model, ImageStore, Console], Stage]
    results: Sequence[Path]
    enrich: Callable[[Model, ImageStore, Console], Model] | None = None
    channels: tuple[int, ...] = ()


class StageConfig(Protocol):
    """What every stage's settings have."""

    white_background: bool


class StageOptions(Protocol):
    """What every stage's options have.

    Attributes:
        config: What decides the optimisation.
        compute: Device and rendering backend.
        run: Treatment of an occupied folder.
        notices: Lines to print at the start.
    """

    config: StageConfig
    compute: Compute
    run: RunOptions
    notices: tuple[str, ...]


Options = TypeVar("Options", bound=StageOptions)


def run_stage(
    prepare: Callable[[Options, Notices], tuple[StageRun[Model], Model]],
    options: Options,
    images: ImageStore | None = None,
) -> Path:
    """Run a stage; a finished run of the same identity is not repeated.

    Args:
        prepare: Reads the inputs: the run, and the model that it starts from.
        options: What to do.
        images: Decoded photographs that other stages use, too; an own store if None.

    Returns:
        The first of the results.

    Raises:
        UserError: For anything the user can fix.
    """
    group, white = options.compute.group, options.config.white_background
    with group.single_report():
        notices = Notices([*options.compute.reasons, *options.notices])
        run, initial = prepare(options, notices)
        last = run.loop.last
        with open_session(run.directory, options.run, last, notices, run.title, group) as session:
            console, plan = session.console, session.plan
            console.info(run.scene.description)
            there = plan.finished and all(path.is_file() for path in run.results)
            if group.broadcast(there):
                console.info(f"finished already: {run.results[0]}")
                return run.results[0]
            compile_ahead(options.compute.device, console, run.channels)
            with shared_or_own_store(images, white, group.size) as store:
                if run.enrich is not None and plan.payload is None:
                    initial = run.enrich(initial, store, console)
                stage = run.build(initial, store, console)
                # The stage has its own copy; two of them are 236 bytes too much per Gaussian.
                del initial
                viewer, scene = options.run.watching, run.scene
                with open_live_view(viewer, stage.name, last, scene, group, console) as live:
                    Trainer(
                        stage,
                        run.loop,
                        scene,
                        store,
                        run.directory,
                        console,
                        group,
                        live,
                    ).run(plan)
            if group.is_first:
                write_run_report(run.directory.path, console.warn)
            console.info(f"finished: {run.results[0]}")
    return run.results[0]
