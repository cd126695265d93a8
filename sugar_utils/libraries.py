# SPDX-License-Identifier: Apache-2.0
"""Load optional and noisy libraries, and run modules in a subprocess."""

from __future__ import annotations

import contextlib
import importlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO

import psutil

from sugar_utils.errors import UserError, explained

EXTRAS = {
    "coacd": "engines",
    "dask-jobqueue": "cluster",
    "distributed": "cluster",
    "laspy[lazrs]": "geo",
    "lxml": "print",
    "onnxruntime": "features",
    "opencv-python-headless": "targets",
    "pillow-heif": "heic",
    "pye57": "scans",
    "pyproj": "geo",
    "reportlab": "targets",
    "shtab": "completion",
    "tifffile": "geo",
    "usd-core": "usd",
}
"""The extra of this program, see ``pyproject.toml``, that brings an optional package."""

_FATAL = 3  # level of glog, which pycolmap logs with
_ROOT = Path(__file__).resolve().parent.parent
_KILLED = -9
_NO_MEMORY = ("MemoryError", "bad_alloc")
# Reads nothing if the parent was killed; a thread could not end us while the interpreter is held.
_END_WITH_PARENT = """
import sys, psutil
process = psutil.Process(int(sys.argv[1]))
if not sys.stdin.buffer.read(1):
    process.kill()
"""


def install_advice(package: str) -> str:
    """Return how to install an optional package: as an extra of this program, where it is one.

    The program is on no index, so extras are installed in its repository.
    """
    extra = EXTRAS.get(package)
    if extra is None:
        return f"install it with 'pip install {package}'"
    return f"run pip install '.[{extra}]' in a clone of the repository"


def load_package(
    what: str, package: str, *modules: str, instead: str | None = None
) -> tuple[ModuleType, ...]:
    """Import modules of a package that may be missing.

    Args:
        what: The feature that needs it, for messages.
        package: Its name for pip.
        modules: Names of its modules.
        instead: Another way for the user.

    Raises:
        UserError: It is missing.
    """
    advice = install_advice(package)
    if instead:
        advice += f", or {instead}"
    with explained(f"{what} needs the package {package}", advice, ImportError):
        return tuple(importlib.import_module(module) for module in modules)


def package_or_none(name: str) -> ModuleType | None:
    """Import a module of an optional package; None if it is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module that is there and lacks another one has a fault that must be seen.
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise


def load_pycolmap() -> ModuleType:
    """Import pycolmap, silent and without its SIGTERM handler, which prints a page of addresses."""
    was_loaded = "pycolmap" in sys.modules
    handler = signal.getsignal(signal.SIGTERM)
    import pycolmap

    # Only the main thread may set a handler, and only those that Python knows can be set again.
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not was_loaded and is_main_thread and handler is not None:
        signal.signal(signal.SIGTERM, handler)
    pycolmap.logging.minloglevel = _FATAL
    return pycolmap


def run_alone(
    module: str, arguments: Sequence[str], waiting: Callable[[int], None] = lambda n_bytes: None
) -> None:
    """Run ``python -m module`` in a subprocess, which never outlives this call or this process.

    Args:
        module: Name of the module.
        arguments: Its command line.
        waiting: Called several times a second with the memory of the subprocess, in bytes.

    Raises:
        MemoryError: The system killed it, which happens for lack of memory.
        UserError: It failed.
    """
    with tempfile.TemporaryFile() as output:
        with running_module(module, arguments, output) as process:
            while process.poll() is None:
                # It may have just ended.
                with contextlib.suppress(psutil.Error):
                    waiting(psutil.Process(process.pid).memory_info().rss)
                time.sleep(0.1)
        if process.returncode == 0:
            return
        output.seek(0)
        text = output.read().decode(errors="replace").strip()
    if process.returncode == _KILLED or any(word in text for word in _NO_MEMORY):
        raise MemoryError(f"{module} was ended by the system")
    reason = text.splitlines()[-1] if text else f"exit code {process.returncode}"
    raise UserError(f"{module} failed: {reason}")


@contextlib.contextmanager
def running_module(
    module: str, arguments: Sequence[str], output: IO[bytes] | None, patience: float = 0.0
) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``python -m module`` in a subprocess, which never outlives the context or this process.

    Args:
        module: Name of the module.
        arguments: Its command line.
        output: Gets what it prints; None: where this process prints.
        patience: Seconds for which it may save its work where the context is left before its end.
    """
    command = [sys.executable, "-m", module, *arguments]
    # Modules are looked for where it starts; the user's folder may hold some of the same names.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=_ROOT
    )
    try:
        with _ended_with_us(process.pid):
            try:
                yield process
            finally:
                if patience > 0 and process.poll() is None:
                    process.terminate()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(patience)
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _ended_with_us(pid: int) -> Iterator[None]:
    """End a process if this one is killed in the context."""
    watcher = subprocess.Popen(
        [sys.executable, "-c", _END_WITH_PARENT, str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=_ROOT,
    )
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            watcher.communicate(b"\n")
