# SPDX-License-Identifier: Apache-2.0
"""Opening a run: decide about its folder first, then start the log in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from gaussian_splatting.engine.checkpoint import load_payload
from gaussian_splatting.engine.run_directory import ResumePlan, RunDirectory
from gaussian_splatting.viewing.viewer_flags import ViewerOptions
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import check_writable
from sugar_utils.flags import positive_int
from sugar_utils.locks import exclusive
from sugar_utils.process_group import ALONE, ProcessGroup
from sugar_utils.settings import flag
from sugar_utils.text import printable


@dataclass(frozen=True)
class RunOptions:
    """How a run treats its folder and its checkpoints; none of it changes the result.

    ``keep_checkpoints`` of None keeps all.

    Attributes:
        watching: Whether it can be watched while it trains.
    """

    resume: str = flag(
        "auto", "auto: go on where an unfinished run with the same settings stopped; none: start "
        "anew; PATH: continue this checkpoint file, or run folder",
        group="run", metavar="{auto,none,PATH}",
    )  # fmt: skip
    overwrite: bool = flag(
        False, "replace another run in the output folder", group="run",
        idle="for an unfinished run with the same settings, which is continued",
    )  # fmt: skip
    keep_checkpoints: int | None = flag(
        3, "interval checkpoints to keep; milestones and the last one always stay", group="run",
        parse=positive_int,
    )  # fmt: skip
    watching: ViewerOptions = field(default_factory=ViewerOptions)


@dataclass
class Session:
    """An open run.

    Attributes:
        run: Its folder.
        plan: Whether to start, continue or skip it.
        console: Prints, and writes the folder's log.
    """

    run: RunDirectory
    plan: ResumePlan
    console: Console


@dataclass
class Notices:
    """Keeps what is noticed before there is a console, and passes it on afterwards."""

    messages: list[str] = field(default_factory=list)

    def __call__(self, message: str) -> None:
        self.messages.append(message)


@contextmanager
def open_session(
    run: RunDirectory,
    options: RunOptions,
    final: int,
    notices: Notices,
    title: str,
    group: ProcessGroup = ALONE,
) -> Iterator[Session]:
    """Plan the run, open its log and print the resolved configuration.

    Args:
        run: The folder and the settings that decide the result.
        options: What to do with what the folder holds.
        final: Last iteration of the run.
        notices: Messages of the preparation, printed first.
        title: Heading of the configuration table.
        group: The processes that run together: the first decides, and it alone prints and writes.
    """
    with _lock(run) if group.is_first else nullcontext():
        try:
            plan = _agreed_plan(run, options, final, notices, group)
        except UserError:
            for message in notices.messages if group.is_first else ():
                print(printable(message))
            raise
        with Console(run.log) if group.is_first else Console.silent() as console:
            yield _opened(run, plan, console, notices, title)


def _lock(run: RunDirectory) -> AbstractContextManager[None]:
    """Keep other processes out of the folder of a run."""
    advice = f"wait until it ends, stop it, or choose another {run.output_flag}"
    return exclusive(check_writable(run.path), advice)


def _opened(
    run: RunDirectory, plan: ResumePlan, console: Console, notices: Notices, title: str
) -> Session:
    console.table(title, _flat({**run.identity.sources, **run.identity.settings}))
    for message in notices.messages:
        console.info(message)
    return Session(run, plan, console)


def _agreed_plan(
    run: RunDirectory, options: RunOptions, final: int, notices: Notices, group: ProcessGroup
) -> ResumePlan:
    """The plan of the first process, for all of them; each reads the checkpoint for itself."""
    plan = ResumePlan()
    if group.is_first:
        plan = run.plan(options.resume, options.overwrite, final, notices)
    source, finished = group.broadcast((plan.source, plan.finished))
    if group.is_first or source is None:
        return plan
    return ResumePlan(load_payload(source), source, finished)


def _flat(settings: dict[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = []
    for name, value in settings.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", value))
    return rows
