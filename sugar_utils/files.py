# SPDX-License-Identifier: Apache-2.0
"""Files that are either complete or absent, and caches that are private.

A file is written under a temporary name in its own folder, flushed to the disk and renamed. A
process killed at any moment leaves the old file or the new one, and at worst a temporary whose
name has the number of its process.
"""

from __future__ import annotations

import codecs
import contextlib
import datetime
import functools
import getpass
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import psutil
from filelock import FileLock, Timeout

from sugar_utils.errors import ESCAPES, UserError, explained, reason_of

A = TypeVar("A")
B = TypeVar("B")
_TEMPORARY = re.compile(r"\.tmp-(\d+)(\.[^.]*)?$")
FINGERPRINT_BLOCKS = 64  # of a large file that are read
_BLOCK_BYTES = 1 << 20
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def require_regular_file(path: str | os.PathLike[str], *, missing_ok: bool = False) -> Path:
    """Check that a path leads to a regular file, or perhaps to nothing, before it is opened.

    Opening a pipe waits for another program, for ever if there is none; a device has no end.

    Raises:
        UserError: It is no such file, or cannot be looked at.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if missing_ok:
            return path
        raise UserError(f"{path}: no such file; check the path") from None
    except (OSError, ValueError) as error:  # the latter for a zero byte in the name
        raise UserError(f"cannot read {path}: {reason_of(error)}; check the path") from error
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no plain file")
        raise UserError(f"{path} is {kind}, where a file is needed; check the path")
    return path


def temporary_path(path: Path) -> Path:
    """Name under which this process writes a file; it has the file's suffix, the format of many."""
    return path.with_name(f"{path.name}.tmp-{os.getpid()}{path.suffix}")


def _make_directory(directory: Path) -> None:
    with explained(f"cannot create the folder {directory}:", "choose another output folder"):
        directory.mkdir(parents=True, exist_ok=True)


def _flush(path: Path) -> None:
    """Flush a file, or a folder's directory entries, to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(source: Path, target: Path) -> None:
    # Windows refuses to replace a file that a virus scanner or viewer has open for a moment.
    attempts = 10 if os.name == "nt" else 1
    for attempt in range(attempts):
        try:
            os.replace(source, target)
            return
        except PermissionError:
            if attempt == attempts - 1:
                raise
            time.sleep(0.1)


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Write a file so that it appears complete or not at all: the body writes to the yielded path.

    When the body raises, the temporary is removed and an older file stays as it was. Parent folders
    are created, and temporaries that killed processes left of the same file are removed.

    Raises:
        UserError: The file cannot be written.
    """
    path = require_regular_file(path, missing_ok=True)
    _make_directory(path.parent)
    temporary = temporary_path(path)
    try:
        for name in os.listdir(path.parent):
            if name.startswith(f"{path.name}.tmp-"):
                _removed_as_stale(path.with_name(name))
        yield temporary
        _flush(temporary)
        _replace(temporary, path)
        # Systems that cannot flush a folder (Windows) do without.
        with contextlib.suppress(OSError):
            _flush(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(temporary), temporary):
            raise UserError(
                f"cannot write {path}: {reason_of(error)}; "
                "free some space, fix the permissions or choose another output folder"
            ) from error
        if isinstance(error, UserError) and str(temporary) in str(error):
            # The user knows the file by its final name.
            error.args = (str(error).replace(str(temporary), str(path)),)
        raise


@contextlib.contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Make a folder that replaces another one of its name when the body is done."""
    fresh = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    yield fresh
    with explained(f"{folder}: cannot be replaced", "free space or fix the permissions"):
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)


def write_text_atomic(path: str | os.PathLike[str], text: str) -> None:
    r"""Write a text file in UTF-8 with ``\n`` line ends, complete or not at all."""
    with atomic_path(path) as temporary:
        # Names of files may be bytes that are no UTF-8. In JSON the escapes are read back as such.
        temporary.write_bytes(text.encode("utf-8", "backslashreplace"))


def _json_value(value: object) -> str:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def json_values(value: object) -> Any:
    """Convert values as a JSON file does: tuples become lists, paths strings."""
    return json.loads(json.dumps(value, default=_json_value))


def without_none(values: Mapping[A, B | None]) -> dict[A, B]:
    """Return the entries whose value is not None."""
    return {name: value for name, value in values.items() if value is not None}


def flat_items(settings: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield name and value of all settings; names of nested ones are dotted."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat_items(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def write_json_atomic(path: str | os.PathLike[str], value: object) -> None:
    """Write ``value`` as indented JSON, complete or not at all; paths become strings."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=_json_value)
    write_text_atomic(path, text + "\n")


def read_json(path: str | os.PathLike[str], encodings: Sequence[str] = ()) -> Any:
    """Read a JSON file in UTF-8, or else in the first other encoding that gives valid JSON.

    Raises:
        UserError: It cannot be read, or is no JSON.
    """
    path = require_regular_file(path, missing_ok=True)
    try:
        content = path.read_bytes()
        if encodings and not _is_utf8(content) and not content.startswith(_UTF16_MARKS):
            for encoding in encodings:
                with contextlib.suppress(ValueError, RecursionError):
                    return json.loads(content.decode(encoding))
        return json.loads(decoded(content))
    except OSError as error:
        raise UserError(f"cannot read {path}: {reason_of(error)}; check the path") from error
    except json.JSONDecodeError as error:
        reason = f"{path}, line {error.lineno}, column {error.colno}: not valid JSON ({error.msg})"
        raise UserError(f"{reason}; {json_advice(error)}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a UTF-8 text file; write it again") from error
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, or brackets of thousands of levels.
        reason = f"{path}: a number too long or values nested too deep"
        raise UserError(f"{reason}; the file is damaged, write it again") from error


def json_advice(error: ValueError, otherwise: str = "the file is damaged, write it again") -> str:
    """Return how to fix a text that is no JSON; backslashes of paths are the usual cause."""
    if "escape" in str(error):
        return rf"{ESCAPES}; write C:/... or C:\\..."
    return otherwise


def decoded(content: bytes, errors: str = "strict") -> str:
    """Decode a text in UTF-8, or in UTF-16 where it begins with the byte-order mark of that.

    Args:
        content: The bytes.
        errors: How bytes that are no text are decoded, as in :meth:`bytes.decode`.
    """
    encoding = "utf-16" if content.startswith(_UTF16_MARKS) else "utf-8-sig"
    return content.decode(encoding, errors)


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return False
    return True


def check_writable(directory: str | os.PathLike[str]) -> Path:
    """Create a folder if need be, and check that files can be written in it.

    Raises:
        UserError: They cannot.
    """
    directory = Path(directory)
    _make_directory(directory)
    advice = "fix the permissions or choose another output folder"
    with (
        explained(f"cannot write in the folder {directory}:", advice),
        tempfile.TemporaryFile(dir=directory) as file,
    ):
        file.write(b"\0")
    return directory


def fingerprint(path: Path) -> str:
    """Digest of a file's length and content; of large files, blocks spread over the file."""
    size = require_regular_file(path).stat().st_size
    digest = hashlib.sha256(str(size).encode())
    is_small = size <= FINGERPRINT_BLOCKS * _BLOCK_BYTES
    with path.open("rb") as file:
        for block in range(FINGERPRINT_BLOCKS):
            if not is_small:
                file.seek((size - _BLOCK_BYTES) * block // (FINGERPRINT_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()[:16]


def file_digest(path: Path) -> str:
    """Digest of a file's content; cached while its size and times stay the same."""
    with explained(f"cannot read {path}:", "check the path"):
        stat = path.stat()
    # The last of them changes with every write, whatever a copy made of the others.
    return _digest_at(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def in_parallel(work: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """Call ``work`` on items from several threads, for files; results in the order of the items."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(work, items))


@functools.lru_cache(maxsize=1 << 14)
def _digest_at(path: Path, *state: int) -> str:
    """Cached, because all stages of a pipeline read the same photographs."""
    return fingerprint(path)


def process_is_alive(pid: int) -> bool:
    """Whether a process of this number exists."""
    try:
        return pid > 0 and psutil.pid_exists(pid)
    except OverflowError:
        return False


def remove_stale_temporaries(directory: str | os.PathLike[str], nested: bool = False) -> list[Path]:
    """Remove temporaries that killed processes left in a folder, before the first write.

    A temporary that carries this process's own number is stale too: in a container every run may
    get the same number.
    """
    pattern = "**/*.tmp-*" if nested else "*.tmp-*"
    return [path for path in sorted(Path(directory).glob(pattern)) if _removed_as_stale(path)]


def _removed_as_stale(path: Path) -> bool:
    """Remove a temporary file of an ended process; return whether it was one."""
    match = _TEMPORARY.search(path.name)
    if match is None or path.is_dir():
        return False
    pid = int(match.group(1))
    try:
        if pid == os.getpid() or not process_is_alive(pid):
            path.unlink()
            return True
    except OSError:
        pass
    return False


def temporary_cache(name: str) -> Path:
    """Make a folder for temporary files of this user, which later runs use again.

    All users share the system's temporary folder. Where another user made the folder first, or a
    link of that name leads elsewhere, this process gets a new folder with a random name.
    """
    try:
        user = re.sub(r"[^\w.-]", "_", getpass.getuser())
    except (OSError, KeyError, ImportError):
        user = "user"
    advice = "free some space, or name another one in the variable TMPDIR"
    with explained("cannot write in the temporary folder", advice):
        path = Path(tempfile.gettempdir()) / f"sugar-{name}-{user}"
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700, exist_ok=True)
            if _is_ours(path):
                return path
        return Path(tempfile.mkdtemp(prefix=f"sugar-{name}-"))


def _is_ours(path: Path) -> bool:
    """Whether a folder is no link and no other user can have put anything into it."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or os.path.islink(path):
        return False
    if not hasattr(os, "geteuid"):
        # Windows has a temporary folder for each user.
        return True
    others_can_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid == os.geteuid() and not others_can_write


@contextlib.contextmanager
def exclusive(folder: Path, advice: str, name: str = ".lock") -> Iterator[None]:
    """Lock a folder for this process.

    A JSON file next to the lock names its holder, for messages. Where the file system has no locks,
    the folder is used without.

    Args:
        folder: The folder.
        advice: Next step for a user whose folder is in use.
        name: File name of the lock.

    Raises:
        UserError: Another process has the lock.
    """
    path = folder / name
    note = folder / f"{name}.json"
    lock = FileLock(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lock.acquire(blocking=False)
    except Timeout:
        raise UserError(f"{folder}: {_holder(note)} is at work in it; {advice}") from None
    except OSError:
        # Two runs without a lock are better than none.
        yield
        return
    try:
        since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
        holder = {"process": os.getpid(), "host": socket.gethostname(), "since": since}
        with contextlib.suppress(UserError):
            write_json_atomic(note, holder)
        yield
    finally:
        # A file that cannot be removed does no harm.
        steps = [note.unlink, path.unlink, lock.release]
        if os.name == "nt":
            # Windows removes no file that is locked.
            steps = [note.unlink, lock.release, path.unlink]
        for step in steps:
            with contextlib.suppress(OSError):
                step()


def _holder(note: Path) -> str:
    """Words for the process that has a lock."""
    with contextlib.suppress(UserError):
        holder = read_json(note)
        if isinstance(holder, dict) and {"process", "host", "since"} <= holder.keys():
            return f"process {holder['process']} on {holder['host']} since {holder['since']}"
    return "another process"


def relative_path(path: Path, folder: Path) -> str:
    """Return a path as seen from a folder, with forward slashes, so that both can be moved."""
    try:
        return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()
    except ValueError:
        # Drives of Windows have no way to each other.
        return path.resolve().as_posix()
