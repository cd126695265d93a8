# SPDX-License-Identifier: Apache-2.0
"""One process at a time in a folder.

The lock is the operating system's, which lets go of it when its holder ends in any way, so a killed
process leaves nothing that has to be recognised as stale. Where a network folder has no such locks,
``filelock`` makes do with a file that names the holder.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from sugar_utils.errors import UserError
from sugar_utils.files import read_json, write_json_atomic

LOCK_NAME = ".lock"


@contextlib.contextmanager
def exclusive(folder: Path, advice: str, name: str = LOCK_NAME) -> Iterator[None]:
    """A context in which no other process that asks for the same lock works in a folder.

    Beside the lock lies a note of who holds it, which only messages are made of. A system or folder
    that has no locks at all is used without.
    """
    lock, note = FileLock(folder / name), folder / f"{name}.json"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lock.acquire(blocking=False)
    except Timeout:
        raise UserError(f"{folder}: {_holder(note)} is at work in it; {advice}") from None
    except OSError:
        # Two runs that are not kept apart are better than none.
        yield
        return
    try:
        since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
        me = {"process": os.getpid(), "host": socket.gethostname(), "since": since}
        with contextlib.suppress(UserError):
            write_json_atomic(note, me)
        yield
    finally:
        _let_go(lock, note)


def _let_go(lock: BaseFileLock, note: Path) -> None:
    """Release a lock and remove its files; what cannot be removed does no harm."""
    path = Path(lock.lock_file)
    steps = [note.unlink, path.unlink, lock.release]
    if os.name == "nt":
        steps = [note.unlink, lock.release, path.unlink]
    for step in steps:
        with contextlib.suppress(OSError):
            step()


def _holder(note: Path) -> str:
    with contextlib.suppress(UserError):
        found = read_json(note)
        if isinstance(found, dict) and {"process", "host", "since"} <= found.keys():
            return f"process {found['process']} on {found['host']} since {found['since']}"
    return "another process"
