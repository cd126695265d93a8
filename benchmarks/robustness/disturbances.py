# SPDX-License-Identifier: Apache-2.0
"""Disturbances of runs: failing writes, signals, limits on files and memory. Linux only."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from benchmarks.robustness.child import Limits, Outcome, address_space, limit, run_child
from benchmarks.robustness.events import ERRORS, Events, Happening, doing, failing, install
from benchmarks.robustness.world import COMMANDS, RUNS, copy_parts, main_of, words_of

_PRINTED = 32 << 10


@dataclass(frozen=True)
class Scenario:
    """A command, its output relative to the root, and what is there: fresh, half or replace."""

    command: str
    output: str
    start: str

    @property
    def name(self) -> str:
        return f"{self.command}, {self.start}"

    def words(self, root: Path) -> list[str]:
        words = words_of(COMMANDS[self.command], root)
        if self.command.startswith("export"):
            return [*words, "--overwrite", "True"]
        if self.start != "replace":
            return words
        other = ["--random_seed", "5"] if self.command != "texture" else ["--square_size", "7"]
        return [*words, *other, "--overwrite", "True"]

    def prepare(self, root: Path, base: Path) -> None:
        """Copy what it reads, and what is there before."""
        needs = [part for part in COMMANDS[self.command].needs if part != self.output]
        copy_parts(base, root, needs)
        self.place_output(root, base)

    def place_output(self, root: Path, base: Path) -> None:
        """Make its output folder as it is before."""
        source = base / {"half": self.output, "replace": f"{self.output}0"}.get(self.start, "-")
        (root / self.output).mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, root / self.output, dirs_exist_ok=True)


_REPLACING = "mesh", "texture", "export placed", "export obj"
SCENARIOS = (
    *(Scenario(name, k, s) for k, name in RUNS.items() for s in ("fresh", "half", "replace")),
    *(Scenario(name, "new", s) for name in _REPLACING for s in ("fresh", "replace")),
    *(Scenario(name, "new", "fresh") for name in ("export glb", "render model", "render video")),
    Scenario("convert", "room", "half"),
)


@dataclass
class Disturbance:
    """Events of a run: at its file system calls, at its start, in the parent meanwhile.

    ``may_be_killed`` and ``may_lose_output`` tell what it does by itself; ``others`` are outcomes
    of other processes.
    """

    what: str
    happening: Happening | None = None
    at_start: Callable[[], None] | None = None
    meanwhile: Callable[[int], None] | None = None
    may_be_killed: bool = False
    takes_memory: bool = False
    may_lose_output: bool = False
    others: list[Outcome] = field(default_factory=list)


@dataclass(frozen=True)
class Undisturbed:
    """A run without a disturbance: its output, number of events, and seconds."""

    folder: Path
    events: int
    seconds: float


@dataclass(frozen=True)
class Place:
    """Where a case runs: its world, its output and what it may use."""

    root: Path
    notes: Path
    limits: Limits

    def run(
        self, scenario: Scenario, disturbance: Disturbance | None = None, notes: str = ""
    ) -> Outcome:
        disturbance = disturbance or Disturbance("nothing")

        def prepare() -> None:
            if disturbance.at_start is not None:
                disturbance.at_start()
            if disturbance.happening is not None:
                install(Events((self.root, self.notes), disturbance.happening))

        script = COMMANDS[scenario.command].script
        return run_child(
            main_of(script),
            scenario.words(self.root),
            self.root,
            self.notes / notes,
            self.limits,
            script=script,
            prepare=prepare,
            meanwhile=disturbance.meanwhile,
        )

    def count_events(self, scenario: Scenario) -> tuple[Outcome, int]:
        tally = self.notes / "events"

        def count(now: int, kind: str, path: object) -> None:
            os.truncate(tally, 0)
            tally.write_text(str(now), encoding="utf-8")

        tally.write_text("0", encoding="utf-8")
        outcome = self.run(scenario, Disturbance("counting", count))
        return outcome, int(tally.read_text(encoding="utf-8"))

    def disturbance(self, draw: Random, scenario: Scenario, known: Undisturbed) -> Disturbance:
        """Draw a disturbance of a scenario; everything about it follows from ``draw``."""
        folder, event = self.root / scenario.output, draw.randint(1, known.events)
        return draw.choice(_KINDS)(draw, event, folder, known, self, scenario)


def _failure(draw: Random, event: int, *_: object) -> Disturbance:
    error, for_good = draw.choice(ERRORS), draw.random() < 0.4
    what = f"{os.strerror(error)} {'from' if for_good else 'at'} event {event}"
    return Disturbance(what, failing(event, error, for_good=for_good))


def _signal(draw: Random, event: int, folder: Path, known: Undisturbed, *_: object) -> Disturbance:
    number = draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
    killed = number != signal.SIGINT
    if draw.random() < 0.6:
        action = doing(event, lambda: os.kill(os.getpid(), number))
        return Disturbance(f"{number.name} at event {event}", action, may_be_killed=killed)
    # Not before the child has its own handlers.
    seconds = draw.uniform(0.04, max(0.05, known.seconds))

    def meanwhile(pid: int) -> None:
        time.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    what = f"{number.name} after {seconds:.3f} s"
    return Disturbance(what, meanwhile=meanwhile, may_be_killed=killed or seconds < 0.1)


def _file_limit(
    draw: Random, event: int, folder: Path, known: Undisturbed, *_: object
) -> Disturbance:
    """No file may grow larger, in native code either."""
    largest = max(p.stat().st_size for p in known.folder.rglob("*") if p.is_file())
    # What it prints goes into a file, too.
    most = draw.randint(_PRINTED, max(largest, _PRINTED + 1))
    return Disturbance(f"no file above {most} bytes", at_start=lambda: limit("FSIZE", most))


def _deleted(draw: Random, event: int, folder: Path, *_: object) -> Disturbance:
    action = doing(event, lambda: shutil.rmtree(folder, ignore_errors=True))
    return Disturbance(f"{folder.name} deleted at event {event}", action, may_lose_output=True)


def _memory(draw: Random, event: int, *_: object) -> Disturbance:
    room = draw.choice((1 << 20, 4 << 20, 16 << 20))
    action = doing(event, lambda: limit("AS", address_space() + room))
    return Disturbance(f"{room >> 20} MiB more at event {event}", action, takes_memory=True)


def _second(
    draw: Random, event: int, folder: Path, known: Undisturbed, place: Place, scenario: Scenario
) -> Disturbance:
    """The same command a second time, in the same folder."""
    seconds = draw.uniform(0, known.seconds)
    result = Disturbance(f"a second process after {seconds:.3f} s")

    def meanwhile(pid: int) -> None:
        time.sleep(seconds)
        result.others.append(place.run(scenario, notes="second"))

    result.meanwhile = meanwhile
    return result


_KINDS = (
    *(_failure,) * 5,
    *(_signal,) * 4,
    *(_file_limit,) * 2,
    _deleted,
    _memory,
    _second,
)
"""Some happen more often than others."""
