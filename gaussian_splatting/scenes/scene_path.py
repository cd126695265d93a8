# SPDX-License-Identifier: Apache-2.0
"""Checks of the path in ``-s``, before anything heavy is loaded, and ZIP files as scenes.

A ``.r3d`` of Record3D is a ZIP file.

A ZIP file is unpacked once, into a folder of its name beside it, or where that cannot be written
into the output folder. The folder has a note with a digest of the file, by which a later call finds
it.
"""

from __future__ import annotations

import contextlib
import itertools
import lzma
import os
import re
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from gaussian_splatting.data.names import (
    PHOTOGRAPH_SUFFIXES,
    RAW_SUFFIXES,
    VIDEO_SUFFIXES,
    nearest_name,
    normalized,
)
from sugar_utils.errors import Notify, UserError, explained
from sugar_utils.files import check_writable, file_digest, read_json
from sugar_utils.flags import FlagValues
from sugar_utils.recipe import Recipe

ZIP_SUFFIXES = (".zip", ".r3d")
ARCHIVE_SUFFIXES = (".7z", ".rar", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst")
NOTE = ".unpacked.json"  # in the folder that a ZIP file was unpacked into
MAX_FILES = 200_000
MAX_RATIO = 200  # of the size of all files to that of the ZIP file, above ``LARGE`` bytes
LARGE = 1 << 30
SPARE_BYTES = 1 << 28  # of the disk that are left free
SCENE_FOLDERS = {
    "images",
    "input",
    "sparse",
    "colmap",
    "distorted",
    "masks",
    "mask",
    "depths",
    "keyframes",
    "train",
    "test",
    "rgb",
    "rgbd",
}
"""Folders inside of a scene: a ZIP file of one such folder is the scene itself."""

_UNWANTED = ("__MACOSX", ".DS_Store", "Thumbs.db", "desktop.ini")
_NOT_ON_WINDOWS = re.compile(r'[<>:"|?*]')
_BLOCK = 1 << 20
_LIKE_IT = 0.75  # least similarity of a path that is proposed
_ENCRYPTED = 1  # bits of ``ZipInfo.flag_bits``
_IS_UTF8 = 0x800


def check_scene_path(path: Path) -> None:
    """Check that ``-s`` names a folder, a video or a ZIP file.

    The video of a folder that has been made of it may be gone.
    """
    suffix = path.suffix.lower()
    if path.is_dir():
        return
    if not os.path.lexists(path):
        if suffix in VIDEO_SUFFIXES:
            if path.with_suffix("").is_dir():
                return
            raise UserError(f"{path}: no such video{_nearest_sibling(path)}; check -s")
        kind = "ZIP file" if suffix in ZIP_SUFFIXES else "scene folder"
        raise UserError(f"{path}: no such {kind}{_nearest_sibling(path)}; check -s")
    if suffix in (*VIDEO_SUFFIXES, *ZIP_SUFFIXES):
        return
    if suffix in (*PHOTOGRAPH_SUFFIXES, *RAW_SUFFIXES):
        raise UserError(
            f"{path}: a single photograph; name the folder of all photographs, -s {path.parent}"
        )
    if suffix in ARCHIVE_SUFFIXES:
        raise UserError(f"{path}: a packed file; unpack it, and name the folder with -s")
    # A model is some folders below its scene.
    holders = path.absolute().parents[:3]
    scene = next((holder for holder in holders if (holder / "images").is_dir()), path.parent)
    raise UserError(
        f"{path}: a file, but -s takes a folder, a video or a ZIP file; name the scene that it is "
        f"of, such as -s {scene}"
    )


def _nearest_sibling(path: Path) -> str:
    """Return a hint at a similar name in the folder of a path; empty without one."""
    with contextlib.suppress(OSError):
        names = [entry.name for entry in itertools.islice(path.parent.iterdir(), MAX_FILES)]
        nearest = nearest_name(path.name, names, _LIKE_IT)
        if nearest is not None:
            return f" (nearest: {path.parent / nearest})"
    return ""


def scene_folder(path: Path, fallbacks: Sequence[Path], notify: Notify) -> Path:
    """Check the path in ``-s``, and return it, or the folder into which a ZIP file is unpacked.

    Args:
        fallbacks: See :func:`unpacked`.
    """
    check_scene_path(path)
    if path.suffix.lower() in ZIP_SUFFIXES and not path.is_dir():
        return unpacked(path, fallbacks, notify)
    return path


def output_folders(flags: FlagValues) -> list[Path]:
    """Return folders that a ZIP file may be unpacked into: of results, and the current one."""
    folders = []
    for name in ("output_dir", "model_path"):
        value = flags.get(name)
        if isinstance(value, Path):
            folders.append(value)
    folders.append(Path.cwd())
    return folders


def unpacked(archive: Path, fallbacks: Sequence[Path], notify: Notify) -> Path:
    """Unpack a ZIP file, unless an earlier call did, and return the folder.

    Folders that hold all files are left out.

    Args:
        fallbacks: Folders to unpack into where that of the ZIP file cannot be written.

    Raises:
        UserError: For files that are damaged, encrypted, too large for the disk or suspiciously
            small, that lead out of their folder or hold links.
    """
    recipe = Recipe(inputs={"zip": file_digest(archive)})
    places = (archive.absolute().parent, *(place.absolute() for place in fallbacks))
    for place in places:
        folder = place / archive.stem
        if _is_unpacked(folder, recipe):
            notify(f"{archive}: unpacked before, in {folder}")
            return folder
    with _zip_errors(archive), zipfile.ZipFile(archive) as file:
        members = _checked_members(archive, file)
        folder = _free_place(archive, places) / archive.stem
        size = sum(info.file_size for info in members.values())
        room = shutil.disk_usage(folder.parent).free
        if size > room - SPARE_BYTES:
            raise UserError(
                f"{archive}: unpacked it has {size / 2**30:.1f} GiB, {folder.parent} has "
                f"{room / 2**30:.1f} GiB free; free some space, or unpack it elsewhere"
            )
        notify(f"{archive}: unpacking {len(members)} files, {size / 2**20:.0f} MiB, into {folder}")
        fresh = folder.with_name(f".{folder.name}.unpacking-{os.getpid()}")
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            for name, info in members.items():
                _write_member(file, info, fresh / name)
            recipe.write(fresh / NOTE)
            with contextlib.suppress(OSError):
                fresh.rename(folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    # Another process may have been faster.
    if not _is_unpacked(folder, recipe):
        raise UserError(f"{folder}: cannot be written; unpack {archive} by hand")
    return folder


def _is_unpacked(folder: Path, recipe: Recipe) -> bool:
    """Whether a folder holds the contents of a ZIP; earlier notes have its digest alone."""
    if recipe.is_current(folder / NOTE):
        return True
    with contextlib.suppress(UserError):
        note = read_json(folder / NOTE) if (folder / NOTE).is_file() else None
        return note == recipe.inputs
    return False


def _free_place(archive: Path, places: Sequence[Path]) -> Path:
    """Return the first folder that can be written, without an entry of the ZIP file's name."""
    for place in places:
        folder = place / archive.stem
        if os.path.lexists(folder):
            if (folder / NOTE).is_file():
                raise UserError(
                    f"{folder}: unpacked from another {archive.name}; move it away, or name it "
                    "with -s"
                )
            raise UserError(
                f"{folder}: is there already; name it with -s, or move it away to unpack {archive}"
            )
        with contextlib.suppress(UserError):
            return check_writable(place)
    raise UserError(f"{archive}: no folder can be written to unpack it into; name an output folder")


@contextlib.contextmanager
def _zip_errors(archive: Path) -> Iterator[None]:
    """Turn what ``zipfile`` raises while a ZIP file is read into a ``UserError``."""
    kinds = (
        *(zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, EOFError),
        *(RuntimeError, ValueError, OSError, LookupError, struct.error, lzma.LZMAError),
    )
    advice = "copy it again, or unpack it by hand and name the folder with -s"
    with explained(f"{archive}: cannot be unpacked:", advice, *kinds):
        yield


def _checked_members(archive: Path, file: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Return the files of a ZIP file by their names, after all limits were checked."""
    members: dict[str, zipfile.ZipInfo] = {}
    for info in file.infolist():
        name = _member_name(info)
        parts = PurePosixPath(name).parts
        if info.is_dir() or name.endswith("/") or set(parts) & set(_UNWANTED):
            continue
        if PurePosixPath(name).is_absolute() or ".." in parts or re.match(r"[A-Za-z]:", name):
            raise UserError(f"{archive}: {name} leads out of its folder; unpack it by hand")
        if stat.S_ISLNK(info.external_attr >> 16):
            raise UserError(f"{archive}: {name} is a link; unpack it by hand")
        if info.flag_bits & _ENCRYPTED:
            raise UserError(f"{archive}: {name} is encrypted; unpack it by hand")
        if os.name == "nt":
            name = _NOT_ON_WINDOWS.sub("_", name)
        if name in members:
            raise UserError(f"{archive}: holds {name} twice; unpack it by hand")
        members[name] = info
        if len(members) > MAX_FILES:
            raise UserError(f"{archive}: more than {MAX_FILES:,} files; unpack it by hand")
    if not members:
        raise UserError(f"{archive}: holds no files; pack the scene again")
    size = sum(info.file_size for info in members.values())
    if size > max(LARGE, MAX_RATIO * archive.stat().st_size):
        raise UserError(
            f"{archive}: unpacked it would be {size / archive.stat().st_size:,.0f} times as large; "
            "unpack it by hand if that is right"
        )
    return _without_common_folder(members)


def _without_common_folder(members: dict[str, zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
    """Return the files by their names inside of the folder that has all of them, if any."""
    first_parts = {PurePosixPath(name).parts[0] for name in members}
    in_folders = all("/" in name for name in members)
    if len(first_parts) > 1 or not in_folders or first_parts.pop().lower() in SCENE_FOLDERS:
        return members
    inner_members = {}
    for name, info in members.items():
        _, _, inner_name = name.partition("/")
        inner_members[inner_name] = info
    return _without_common_folder(inner_members)


def _member_name(info: zipfile.ZipInfo) -> str:
    """Return the name of a file; programs that write UTF-8 do not always say so."""
    name = info.filename
    if not info.flag_bits & _IS_UTF8:
        with contextlib.suppress(UnicodeError):
            name = name.encode("cp437").decode("utf-8")
    folder = "/" if name.endswith(("/", "\\")) else ""
    return normalized(name) + folder


def _write_member(file: zipfile.ZipFile, info: zipfile.ZipInfo, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with file.open(info) as source, target.open("xb") as copy:
        shutil.copyfileobj(source, copy, _BLOCK)
