# SPDX-License-Identifier: Apache-2.0
"""Folders in the system's temporary place that only this user can write to."""

from __future__ import annotations

import getpass
import os
import re
import stat
import tempfile
from pathlib import Path

from sugar_utils.errors import UserError

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def temporary_cache(name: str) -> Path:
    """A folder of this user that other runs find again.

    All users share the temporary place, and the name can be guessed. Where somebody else made it
    first, or a link of that name leads elsewhere, a new folder with a random name serves this
    process.

    Args:
        name: What it is for, a part of its name.

    Raises:
        UserError: No folder can be made there.
    """
    try:
        user = re.sub(r"[^\w.-]", "_", getpass.getuser())
    except (OSError, KeyError, ImportError):
        user = "user"
    try:
        path = Path(tempfile.gettempdir()) / f"sugar-{name}-{user}"
        path.mkdir(mode=0o700, exist_ok=True)
        if _is_ours(path):
            return path
    except FileExistsError:
        pass
    except OSError as error:
        raise _no_room(error) from error
    try:
        return Path(tempfile.mkdtemp(prefix=f"sugar-{name}-"))
    except OSError as error:
        raise _no_room(error) from error


def _is_ours(path: Path) -> bool:
    """Whether a folder is no link and nobody else can have put anything into it."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or os.path.islink(path):
        return False
    if not hasattr(os, "geteuid"):
        # Windows keeps a temporary folder for each user.
        return True
    return found.st_uid == os.geteuid() and not found.st_mode & _WRITABLE_BY_OTHERS


def _no_room(error: OSError) -> UserError:
    return UserError(
        f"cannot write in the temporary folder ({error.strerror or error}); free some space, or "
        "name another one in the variable TMPDIR"
    )
