# SPDX-License-Identifier: Apache-2.0
"""Processes of scripts, forked from one that has the libraries loaded: to load them takes seconds.

Where the system cannot fork, they are started anew.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.context import BaseContext
from pathlib import Path

from tests.support.repository import ROOT

PRELOADED = (
    "tests.support.tiny_scene",
    "gaussian_splatting.vanilla.vanilla_run",
    "sugar_pipeline.commands",
    "sugar_capture.conversion.convert_run",
)
"""Modules that bring the libraries of all scripts."""


class WarmProcess:
    """A script in a process of its own, with the methods of ``subprocess.Popen`` that tests use.

    What it prints is in files, so it never waits for a reader.

    Args:
        script: Path of the script from the root of the repository.
        words: Its command line.
        env: Variables beside those of this process.
        output: File for all that it prints; None for a file of each stream.
    """

    def __init__(
        self,
        script: str,
        words: Sequence[str],
        *,
        cwd: Path = ROOT,
        env: Mapping[str, str] | None = None,
        output: Path | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm_process_")
        folder = Path(self._folder.name)
        self._outputs = (output or folder / "out.txt", output or folder / "err.txt")
        for path in self._outputs:
            path.touch()
        whole_env = {**os.environ, **(env or {})}
        arguments = (script, list(words), cwd, whole_env, self._outputs)
        self._process = _context().Process(target=_run, args=arguments)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None, "it was started"
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("a warm process", timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; return what it wrote to the standard output and error."""
        self.wait(timeout)
        out, err = (path.read_text(encoding="utf-8") for path in self._outputs)
        return out, err


@cache
def _context() -> BaseContext:
    """Start the process that others are forked from."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def _run(
    script: str, words: list[str], cwd: Path, env: dict[str, str], outputs: tuple[Path, Path]
) -> None:
    """Be the process of a script."""
    for number, name, path in zip((1, 2), ("stdout", "stderr"), outputs, strict=True):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
        raw = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
        stream = io.TextIOWrapper(raw, "utf-8", line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if "OMP_NUM_THREADS" in env:
        import torch

        # Read from the environment before, by the process that this one is forked from.
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    sys.argv = [str(ROOT / script), *words]
    runpy.run_path(sys.argv[0], run_name="__main__")
