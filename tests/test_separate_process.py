# SPDX-License-Identifier: Apache-2.0
"""Work in a process of its own: to its end, with its errors in one line, and never left behind."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from sugar_utils.errors import UserError
from sugar_utils.libraries import run_alone
from tests.support.repository import ROOT


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Makes a module that a process can run."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(code: str) -> str:
        (tmp_path / "some_work.py").write_text(code, encoding="utf-8")
        return "some_work"

    return make


def test_it_runs_to_its_end_with_arguments_and_is_watched(module, tmp_path):
    code = "import sys, time; time.sleep(0.5); open(sys.argv[1], 'w').write(sys.argv[2])"
    seen = []
    run_alone(module(code), [str(tmp_path / "done"), "a b"], seen.append)
    assert (tmp_path / "done").read_text(encoding="utf-8") == "a b"
    assert max(seen) > 2**20


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        ("print('first'); raise SystemExit('no such thing')", UserError, "no such thing"),
        ("import os; os._exit(7)", UserError, "exit code 7"),
        ("raise MemoryError", MemoryError, "some_work"),
        ("import os; print('std::bad_alloc', flush=True); os._exit(134)", MemoryError, "some_work"),
    ],
)
def test_its_end_is_told(module, code, error, words):
    with pytest.raises(error, match=words):
        run_alone(module(code), [])


@pytest.mark.skipif(sys.platform == "win32", reason="a process is ended otherwise there")
def test_a_process_that_the_system_ended_lacked_memory(module):
    with pytest.raises(MemoryError, match="some_work"):
        run_alone(module("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), [])


def test_modules_of_the_users_folder_are_not_taken(module, tmp_path, monkeypatch):
    (tmp_path / "users").mkdir()
    (tmp_path / "users" / "psutil.py").write_text("raise SystemExit('taken')", encoding="utf-8")
    monkeypatch.chdir(tmp_path / "users")
    run_alone(module("import psutil"), [])


@pytest.mark.skipif(sys.platform == "win32", reason="no C library of this name there")
def test_it_ends_when_its_parent_is_killed(module, tmp_path):
    # Holds the interpreter, as the libraries do: no other thread of it gets to run.
    work = (
        "import ctypes, os, sys; open(sys.argv[1], 'w').write(f'{os.getpid()} ')\n"
        "ctypes.PyDLL(None).sleep(60)"
    )
    note = tmp_path / "pid"
    wait = (
        "import sys; from sugar_utils.libraries import run_alone\n"
        "run_alone(sys.argv[1], sys.argv[2:])"
    )
    parent = subprocess.Popen([sys.executable, "-c", wait, module(work), str(note)], cwd=ROOT)
    assert _becomes_true(lambda: note.is_file() and note.read_text().endswith(" "))
    worker = psutil.Process(int(note.read_text()))
    parent.kill()
    parent.wait()
    assert _becomes_true(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)


def _becomes_true(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not (true := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return true


@pytest.mark.slow
def test_who_stops_waiting_leaves_nothing_behind(module):
    def interrupted(n_bytes: int) -> None:
        if time.monotonic() - start > 1:
            raise KeyboardInterrupt

    start = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):
        run_alone(module("import time; time.sleep(60)"), [], interrupted)
    assert time.monotonic() - start < 30
    children = [child.cmdline() for child in psutil.Process().children()]
    assert not any("some_work" in " ".join(line) for line in children)
