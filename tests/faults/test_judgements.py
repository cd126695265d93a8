# SPDX-License-Identifier: Apache-2.0
"""The harness messages what it is there for."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from PIL import Image

from benchmarks.robustness.child import Limits, Outcome, run_child
from benchmarks.robustness.disturbances import Disturbance, Scenario, Undisturbed
from benchmarks.robustness.events import Events, doing, failing, install
from benchmarks.robustness.faults import differences, judge_again, judge_disturbed
from benchmarks.robustness.judgement import Expectation, Judgement, judge, snapshot
from benchmarks.robustness.mutations import IN_PLACE, mutate_bytes, mutate_json, put_in_place
from benchmarks.robustness.targets import TURNS, kind_of
from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path, write_text_atomic

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="forks, and limits, of Linux"
)
TRACE = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\nKeyError: 1\n'
PT = {
    "state_dict": {"_points": torch.zeros(2, 3)},
    "train_losses": [],
    "epoch": 1,
    "iteration": 4,
    "optimizer_state_dict": {"state": {}, "param_groups": []},
}


def outcome(code: int = 0, err: str = "", out: str = "", late: bool = False) -> Outcome:
    return Outcome(code, out, err, 1.0, late)


@pytest.fixture
def world(tmp_path) -> Path:
    (tmp_path / "scene").mkdir()
    (tmp_path / "scene" / "a.png").write_bytes(b"photograph")
    (tmp_path / "v").mkdir()
    torch.save(PT, tmp_path / "v" / "4.pt")
    return tmp_path


def judgement(world: Path, ended: Outcome, change=lambda root: None, **more) -> Judgement:
    before = snapshot(world)
    change(world)
    return judge(ended, Expectation(world, before, ("scene",), **more))


def test_one_line_and_finite_results_are_in_order(world):
    assert judgement(world, outcome(2, "error: no such scene\n")) == Judgement("refused", {})
    assert judgement(world, outcome(0)) == Judgement("accepted", {})


@pytest.mark.parametrize(
    ("ended", "fault"),
    [
        (outcome(1, TRACE), "traceback"),
        (outcome(0, out=TRACE), "traceback"),
        (outcome(1), "crash"),
        (outcome(-11), "crash"),
        (outcome(-9, late=True), "hang"),
        (outcome(130, late=True), "hang"),
        (outcome(2, "error: a\nb\n"), "noise"),
        (outcome(2, "no such scene\n"), "noise"),
        (outcome(2, "error: \x1b[31mred\n"), "noise"),
        (outcome(0, "a.py:3: UserWarning: look\n"), "noise"),
        (outcome(0, out="W20261018 12:00:00 reconstruction.cc\n"), "noise"),
    ],
)
def test_bad_ends_are_noticed(world, ended, fault):
    assert list(judgement(world, ended).faults) == [fault]


def test_a_run_that_may_take_long_only_has_to_stop(world):
    assert judgement(world, outcome(130, late=True), lengthy=True) == Judgement("stopped", {})


@pytest.mark.parametrize(
    ("code", "change", "fault"),
    [
        (0, lambda root: Image.new("L", (1, 1)).save(root / "scene" / "a.png"), "lost"),
        (0, lambda root: (root / "scene" / "a.png").unlink(), "lost"),
        (2, lambda root: (root / "v" / "4.pt").unlink(), "lost"),
        (2, lambda root: (root / "v" / "6.pt.tmp-3.pt").write_bytes(b""), "leftover"),
        (0, lambda root: torch.save({"a": torch.tensor(torch.nan)}, root / "v/6.pt"), "wrong"),
        (0, lambda root: (root / "v" / "6.pt").write_bytes(b"half"), "wrong"),
        (0, lambda root: (root / "v" / "a.json").write_text('{"a": NaN}'), "wrong"),
        (0, lambda root: (root / "v" / "a.png").write_bytes(b"half"), "wrong"),
        (0, lambda root: (root / "v" / "a.splat").write_bytes(b"half"), "wrong"),
        (0, lambda root: (root / "v" / "a.obj").write_text("v 0 nan 0\n"), "wrong"),
    ],
)
def test_bad_files_are_noticed(world, code, change, fault):
    said = "error: no\n" if code else ""
    assert list(judgement(world, outcome(code, said), change).faults) == [fault]


def test_another_result_than_that_of_an_undisturbed_run_is_noticed(world):
    other = world / "other.pt"
    torch.save({**PT, "state_dict": {"_points": torch.ones(2, 3)}}, other)
    pair = (world / "v" / "4.pt", other)
    assert list(judgement(world, outcome(0), same_bits=pair).faults) == ["wrong"]
    assert not judgement(world, outcome(0), same_bits=(other, other)).faults


def folder_with(root: Path, value: float = 0.0) -> Path:
    root.mkdir()
    points = torch.full((2, 3), value)
    torch.save({**PT, "state_dict": {"_points": points}}, root / "4.pt")
    (root / "a.png.txt").write_text(f"{value}")
    return root


def test_differing_and_missing_results_are_named(tmp_path):
    first = folder_with(tmp_path / "a")
    assert differences(first, folder_with(tmp_path / "b")) == []
    second = folder_with(tmp_path / "c", 1.0)
    assert differences(first, second) == ["4.pt differs", "a.png.txt differs"]
    (second / "4.pt").unlink()
    assert "4.pt is missing" in differences(first, second)


def test_what_a_fault_destroyed_is_noticed(tmp_path):
    folder = folder_with(tmp_path / "v")
    known = Undisturbed(folder_with(tmp_path / "known"), 10, 1.0)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    half = Scenario("resume vanilla", "v", "half")
    refused = outcome(2, "error: no space\n")
    end, faults = judge_disturbed(refused, Disturbance("x"), half, folder, before, known)
    assert (end, faults) == ("refused", {})
    (folder / "4.pt").write_bytes(b"half of it")
    _, faults = judge_disturbed(refused, Disturbance("x"), half, folder, before, known)
    assert "4.pt" in faults["torn"]
    (folder / "4.pt").unlink()
    _, faults = judge_disturbed(refused, Disturbance("x"), half, folder, before, known)
    assert list(faults) == ["lost"]
    faults = {}
    judge_again(outcome(0), folder, known, faults)
    assert "4.pt is missing" in faults["differs"]
    faults = {}
    judge_again(refused, folder, known, faults)
    assert list(faults) == ["again"]


def test_a_thread_that_python_could_not_start_is_no_hang_of_ours(tmp_path):
    """The dump of Python 3.11 where a new thread found no memory."""
    frames = [("wait", 327), ("wait", 629), ("start", 969)]
    lines = [f'  File "/lib/python3.11/threading.py", line {n} in {name}' for name, n in frames]
    ours = '  File "/sugar/engine/loop.py", line 90 in run'
    stacks = "\n".join(["Thread 0x7f (most recent call first):", *lines, ours, ""])
    folder = folder_with(tmp_path / "v")
    rest = Scenario("resume vanilla", "v", "half"), folder, {}, Undisturbed(folder, 10, 1.0)
    late = outcome(130, "MemoryError\n" + TRACE, late=True)
    waiting = replace(late, stacks=stacks)
    memory = Disturbance("1 MiB more", takes_memory=True)
    assert judge_disturbed(waiting, memory, *rest) == ("killed", {})
    assert "hang" in judge_disturbed(late, memory, *rest)[1]
    assert "hang" in judge_disturbed(waiting, Disturbance("x"), *rest)[1]
    elsewhere = replace(late, stacks=stacks.replace("in start", "in join"))
    assert "hang" in judge_disturbed(elsewhere, memory, *rest)[1]


def in_child(tmp_path: Path, work, happening=None, seconds: float = 20.0) -> Outcome:
    def prepare() -> None:
        if happening is not None:
            install(Events((tmp_path / "out",), happening))

    (tmp_path / "out").mkdir(exist_ok=True)
    limits = Limits(seconds)
    return run_child(work, [], tmp_path, tmp_path / "notes", limits, prepare=prepare)


def test_a_child_tells_how_it_ended(tmp_path):
    def fail() -> None:
        raise UserError("no such scene")

    assert in_child(tmp_path, lambda: print("done")).out == "done\n"
    ended = in_child(tmp_path, fail)
    assert (ended.code, ended.err) == (2, "error: no such scene\n")
    ended = in_child(tmp_path, lambda: {}["a"])
    assert ended.code == 1
    assert "KeyError" in ended.err
    ended = in_child(tmp_path, lambda: time.sleep(60), seconds=0.5)
    assert ended.late
    assert ended.code == 130
    assert "sleep" not in ended.err


def test_every_event_of_a_write_can_fail_and_leaves_the_old_file(tmp_path):
    path, kinds = tmp_path / "out" / "a.txt", tmp_path / "kinds"
    path.parent.mkdir()
    path.write_text("old")

    def work() -> None:
        write_text_atomic(path, "new")

    def note(now: int, kind: str, place: str) -> None:
        with kinds.open("a") as file:
            file.write(f"{kind}\n")

    assert in_child(tmp_path, work, note).code == 0
    seen = kinds.read_text().split()
    assert {"open", "write", "fsync", "replace"} <= set(seen)
    for number, kind in enumerate(seen, start=1):
        path.write_text("old")
        ended = in_child(tmp_path, work, failing(number, errno.ENOSPC, for_good=False))
        whole = ("old",) if ended.code else ("old", "new")
        assert path.read_text() in whole, kind
        assert (ended.code == 0) == (ended.err == "")
        assert ended.code in (0, 2)
        assert len(list(path.parent.iterdir())) == 1


def test_a_process_can_be_killed_between_two_events(tmp_path):
    def work() -> None:
        with atomic_path(tmp_path / "out" / "a.txt") as temporary:
            temporary.write_text("half")

    kill = doing(3, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert in_child(tmp_path, work, kill).code == -signal.SIGKILL
    assert not (tmp_path / "out" / "a.txt").exists()


def test_mutations_follow_from_the_generator_alone():
    text = '{"a": [1, 2.5, {"b": "c"}], "d": null}'
    for seed in range(50):
        assert mutate_bytes(b"abc" * 50, Random(seed)) == mutate_bytes(b"abc" * 50, Random(seed))
        assert mutate_json(text, Random(seed)) == mutate_json(text, Random(seed))
    assert len({mutate_json(text, Random(seed)) for seed in range(50)}) > 30


@pytest.mark.parametrize("what", IN_PLACE)
def test_anything_can_lie_in_the_place_of_a_file(tmp_path, what):
    path = tmp_path / "a.json"
    path.write_text("{}")
    put_in_place(path, what)
    assert not path.is_file() or what == "empty" or what.startswith("/")


def test_every_kind_has_its_turns():
    assert {kind_of(case) for case in range(len(TURNS))} == set(TURNS)
    assert kind_of(3) == kind_of(3 + len(TURNS))
