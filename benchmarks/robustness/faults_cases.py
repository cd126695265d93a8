# SPDX-License-Identifier: Apache-2.0
"""Faults in the middle of work: what is run, what happens to it, and what must be true afterwards.

A case takes an entry point and a folder that is fresh, half done, or holds another result that is
to be replaced. Something happens. Whatever it was, files are complete or absent, what was there is
there or has a successor, and the same command run again ends with the very bytes of a run that
nothing happened to. Linux only.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from benchmarks.robustness.child import Limits, Outcome, address_space, limit, run_child
from benchmarks.robustness.faults_hooks import ERRORS, Events, Happening, doing, failing, install
from benchmarks.robustness.fuzz_world import COMMANDS, RUNS, copy_parts, words_of

STARTS = ("fresh", "half", "replace")
_NEW = ("fresh", "replace")
_SIZE, _PRINTED = 64 << 20, 32 << 10


@dataclass(frozen=True)
class Scenario:
    """Something to disturb.

    Attributes:
        command: Name of an entry point.
        output: What it writes to, relative to the root.
        start: ``fresh``, ``half`` or ``replace``: what is there before.
    """

    command: str
    output: str
    start: str

    @property
    def name(self) -> str:
        """For people, and for folders."""
        return f"{self.command}, {self.start}"

    def words(self, root: Path) -> list[str]:
        """Its flags."""
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


SCENARIOS = (
    *(Scenario(name, folder, start) for folder, name in RUNS.items() for start in STARTS),
    Scenario("mesh", "new", "fresh"),
    Scenario("mesh", "new", "replace"),
    Scenario("texture", "new", "fresh"),
    Scenario("texture", "new", "replace"),
    *(Scenario(f"export {name}", "new", start) for name in ("placed", "obj") for start in _NEW),
    Scenario("export glb", "new", "fresh"),
    Scenario("render model", "new", "fresh"),
    Scenario("render video", "new", "fresh"),
    Scenario("convert", "room", "half"),
)


@dataclass
class Disturbance:
    """What happens to a run.

    Attributes:
        what: For people.
        happening: At events of the file system, in the child.
        at_start: Done in the child before it begins.
        meanwhile: Done in the parent while it runs.
        around: Folders and mounts that must be undone; entered after the output is placed.
        may_be_killed: Whether being killed is how it ends.
        may_lose_output: Whether the fault itself destroys results.
    """

    what: str
    happening: Happening | None = None
    at_start: Callable[[], None] | None = None
    meanwhile: Callable[[int], None] | None = None
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    may_be_killed: bool = False
    may_lose_output: bool = False
    others: list[Outcome] = field(default_factory=list)


@dataclass(frozen=True)
class Undisturbed:
    """What is known of a scenario when nothing happens.

    Attributes:
        folder: Its output.
        events: Number of events.
        seconds: How long it took.
        n_bytes: What it wrote.
    """

    folder: Path
    events: int
    seconds: float
    n_bytes: int


@dataclass(frozen=True)
class Place:
    """Where a case runs.

    Attributes:
        root: Its world.
        notes: What it prints.
        limits: What it may use.
    """

    root: Path
    notes: Path
    limits: Limits

    def run(
        self, scenario: Scenario, disturbance: Disturbance | None = None, notes: str = ""
    ) -> Outcome:
        """Run a scenario's command in the world as it is."""
        command = COMMANDS[scenario.command]
        disturbance = disturbance or Disturbance("nothing")

        def prepare() -> None:
            if disturbance.at_start is not None:
                disturbance.at_start()
            if disturbance.happening is not None:
                install(Events((self.root, self.notes), disturbance.happening))

        return run_child(
            command.main,
            scenario.words(self.root),
            self.root,
            self.notes / notes if notes else self.notes,
            self.limits,
            script=command.script,
            prepare=prepare,
            meanwhile=disturbance.meanwhile,
        )


def count_events(place: Place, scenario: Scenario) -> tuple[Outcome, int]:
    """Run a scenario and count its events."""
    tally = place.notes / "events"

    def count(now: int, kind: str, path: object) -> None:
        os.truncate(tally, 0)
        tally.write_text(str(now), encoding="utf-8")

    place.notes.mkdir(parents=True, exist_ok=True)
    tally.write_text("0", encoding="utf-8")
    outcome = place.run(scenario, Disturbance("counting", count))
    return outcome, int(tally.read_text(encoding="utf-8"))


def draw_disturbance(
    draw: Random, place: Place, scenario: Scenario, undisturbed: Undisturbed
) -> Disturbance:
    """Something that happens to a scenario; everything about it follows from ``draw``."""
    kind = draw.choice(KINDS)
    return kind(draw, place, scenario, undisturbed)


def _event(draw: Random, undisturbed: Undisturbed) -> int:
    return draw.randint(1, undisturbed.events)


def _failure(draw: Random, place: Place, scenario: Scenario, known: Undisturbed) -> Disturbance:
    number, error = _event(draw, known), draw.choice(ERRORS)
    for_good = draw.random() < 0.4
    what = f"{os.strerror(error)} {'from' if for_good else 'at'} event {number}"
    return Disturbance(what, failing(number, error, for_good=for_good))


def _signal(draw: Random, place: Place, scenario: Scenario, known: Undisturbed) -> Disturbance:
    number = draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
    # Where nobody asked to be told of it, SIGTERM ends a process as well.
    killed = number != signal.SIGINT
    if draw.random() < 0.6:
        event = _event(draw, known)
        action = doing(event, lambda: os.kill(os.getpid(), number))
        return Disturbance(f"{number.name} at event {event}", action, may_be_killed=killed)
    # Not before the child is itself.
    seconds = draw.uniform(0.04, max(0.05, known.seconds))

    def meanwhile(pid: int) -> None:
        time.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    what = f"{number.name} after {seconds:.3f} s"
    return Disturbance(what, meanwhile=meanwhile, may_be_killed=killed or seconds < 0.1)


def _file_limit(draw: Random, place: Place, scenario: Scenario, known: Undisturbed) -> Disturbance:
    """Native code meets it, too: no file may become larger."""
    largest = max(p.stat().st_size for p in known.folder.rglob("*") if p.is_file())
    # What it prints goes into a file, too.
    most = draw.randint(_PRINTED, max(largest, _PRINTED + 1))
    return Disturbance(f"no file above {most} bytes", at_start=lambda: limit("FSIZE", most))


def _full_disk(draw: Random, place: Place, scenario: Scenario, known: Undisturbed) -> Disturbance:
    """A disk of its own that is too small; without the right to mount one, a limit instead."""
    folder = place.root / scenario.output
    before = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    room = before + draw.randint(0, known.n_bytes + (64 << 10))
    if not can_mount():
        return _file_limit(draw, place, scenario, known)
    return Disturbance(
        f"a disk of {room >> 10} KiB", around=lambda: _mounted(folder, f"size={room >> 10}k")
    )


def _read_only(draw: Random, place: Place, scenario: Scenario, known: Undisturbed) -> Disturbance:
    folder, number = place.root / scenario.output, _event(draw, known)
    if os.geteuid() != 0:
        action = doing(number, lambda: folder.chmod(0o500))
        return Disturbance(f"{folder.name} read-only at event {number}", action,
                           around=lambda: _writable_again(folder))  # fmt: skip
    if not can_mount():
        return _failure(draw, place, scenario, known)

    def action() -> None:
        # A file that is open for writing keeps a disk from being made read-only, so its room goes.
        disk = os.statvfs(folder)
        _remount(folder, f"size={(disk.f_blocks - disk.f_bfree) * disk.f_frsize}")

    return Disturbance(f"no room from event {number}", doing(number, action),
                       around=lambda: _mounted(folder, f"size={_SIZE}"))  # fmt: skip


def _deleted(draw: Random, place: Place, scenario: Scenario, known: Undisturbed) -> Disturbance:
    folder, number = place.root / scenario.output, _event(draw, known)
    action = doing(number, lambda: shutil.rmtree(folder, ignore_errors=True))
    what = f"{folder.name} deleted at event {number}"
    return Disturbance(what, action, may_lose_output=True)


def _memory(draw: Random, place: Place, scenario: Scenario, known: Undisturbed) -> Disturbance:
    # With nothing at all Python itself waits forever for threads that could not begin.
    number, room = _event(draw, known), draw.choice((1 << 20, 4 << 20, 16 << 20))

    def action() -> None:
        limit("AS", address_space() + room)

    return Disturbance(f"{room >> 20} MiB more at event {number}", doing(number, action))


def _clock(draw: Random, place: Place, scenario: Scenario, known: Undisturbed) -> Disturbance:
    number, jump = _event(draw, known), draw.choice((-3.2e8, -86_400.0, 3_600.0, 3.2e8))
    original = time.time

    def action() -> None:
        time.time = lambda: original() + jump

    return Disturbance(f"clock {jump:+.0f} s at event {number}", doing(number, action))


def _second(draw: Random, place: Place, scenario: Scenario, known: Undisturbed) -> Disturbance:
    """The same command a second time, in the same folder."""
    seconds = draw.uniform(0, known.seconds)
    result = Disturbance(f"a second process after {seconds:.3f} s")

    def meanwhile(pid: int) -> None:
        time.sleep(seconds)
        result.others.append(place.run(scenario, notes="second"))

    result.meanwhile = meanwhile
    return result


KINDS = (
    *(_failure,) * 5, *(_signal,) * 4, _file_limit, *(_full_disk,) * 2, _read_only, _deleted,
    _memory, _clock, _second,
)  # fmt: skip
"""Some happen more often than others."""


@functools.cache
def can_mount() -> bool:
    """Whether this process may have a small disk of its own."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    with (
        contextlib.suppress(OSError, subprocess.CalledProcessError),
        tempfile.TemporaryDirectory() as folder,
    ):
        _call("mount", "-t", "tmpfs", "none", folder)
        _call("umount", folder)
        return True
    return False


def _call(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=20)


def _remount(folder: Path, options: str) -> None:
    with contextlib.suppress(subprocess.CalledProcessError):
        _call("mount", "-o", f"remount,{options}", str(folder))


@contextlib.contextmanager
def _mounted(folder: Path, options: str) -> Iterator[None]:
    """A disk of its own in place of a folder, with a copy of what is in it; there until the end."""
    kept = folder.with_name(f"{folder.name}.kept")
    folder.rename(kept)
    folder.mkdir()
    _call("mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "none", str(folder))
    try:
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        _remount(folder, options)
        yield
    finally:
        _remount(folder, f"size={_SIZE}")
        shutil.rmtree(kept)
        shutil.copytree(folder, kept)
        _call("umount", "-l", str(folder))
        folder.rmdir()
        kept.rename(folder)


@contextlib.contextmanager
def _writable_again(folder: Path) -> Iterator[None]:
    try:
        yield
    finally:
        folder.chmod(0o700)
