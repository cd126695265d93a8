# SPDX-License-Identifier: Apache-2.0
"""Kinds of files that are no Gaussians: packed, of another format, or misnamed."""

from __future__ import annotations

import contextlib
import gzip
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from sugar_utils.errors import UserError

CLOUD_SUFFIXES = (".ply", ".spz", ".sog", ".splat")  # of files of Gaussians that all commands read
_UNREAD = {
    ".ksplat": "GaussianSplats3D",
    ".lcc": "XGRIDS",
    ".lcc2": "XGRIDS",
    ".splatv": "splaTV",
    ".spx": "Reall3D",
}
"""Formats of Gaussians that are not read, with the program that they are of."""

_PACKED = (".7z", ".rar", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst")
_GLTF = (".glb",)
_USD = (".usd", ".usda", ".usdc", ".usdz")
_ZIP = (".zip",)
_CHECKPOINT = (".pt", ".pth")
_MAGIC = (
    (b"ply", (".ply",)),
    (b"NGSP", (".spz",)),
    (b"glTF", _GLTF),
    (b"PXR-USDC", _USD),
    (b"#usda", _USD),
)
"""First bytes of formats, and their suffixes."""

_GZIP = b"\x1f\x8b"
_HEAD = 16  # bytes of a file that are looked at
_SOG_INDEX = "meta.json"
_CHECKPOINT_ENTRY = "/data.pkl"


def refuse_other_kinds(path: Path) -> None:
    """Raise a ``UserError`` if a file is none that Gaussians are read from, and say what it is.

    It passes over files and folders that it does not know; their readers find what is wrong.
    """
    if not path.is_file():
        return
    suffix = path.suffix.lower()
    readable = ", ".join(CLOUD_SUFFIXES)
    content = _suffixes_of_content(path)
    if content == _ZIP:
        names = _gaussians_inside(path)
        inside = f" with {names[0]} in it" if names else ""
        raise UserError(f"{path}: a packed file{inside}; unpack it, and name the file of Gaussians")
    if suffix in _PACKED:
        raise UserError(f"{path}: a packed file; unpack it, and name the file of Gaussians")
    if content and suffix not in content:
        raise UserError(
            f"{path}: its content is that of a {content[0]} file; name it "
            f"{path.with_suffix(content[0]).name}"
        )
    if suffix in _UNREAD:
        raise UserError(
            f"{path}: a {suffix} file, of {_UNREAD[suffix]}, is not read; convert it to one of "
            f"{readable}, by SuperSplat or splat-transform"
        )
    if suffix in (".spz", ".sog") and not content and path.stat().st_size:
        raise UserError(
            f"{path}: damaged, or no {suffix[1:].upper()} file; read are {readable}, by their "
            "suffixes; export it again"
        )


def _suffixes_of_content(path: Path) -> tuple[str, ...]:
    """Return the suffixes of the format that the content of a file is of; empty if unknown."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    for magic, suffixes in _MAGIC:
        if head.startswith(magic):
            return suffixes
    if head.startswith(_GZIP):
        with contextlib.suppress(OSError, EOFError, zlib.error), gzip.open(path) as unpacked:
            if unpacked.read(4) == b"NGSP":
                return (".spz",)
    if zipfile.is_zipfile(path):
        names = _names_inside(path)
        if _SOG_INDEX in names:
            return (".sog",)
        if any(name.endswith(_CHECKPOINT_ENTRY) for name in names):
            return _CHECKPOINT
        return _USD if any(name.endswith(_USD) for name in names) else _ZIP
    return ()


def _names_inside(path: Path) -> list[str]:
    damaged = (zipfile.BadZipFile, OSError, ValueError, NotImplementedError)
    with contextlib.suppress(*damaged), zipfile.ZipFile(path) as archive:
        return archive.namelist()
    return []


def _gaussians_inside(path: Path) -> list[str]:
    """Return the names of the files in a ZIP file that may be Gaussians."""
    names = _names_inside(path)
    return [name for name in names if PurePosixPath(name).suffix.lower() in CLOUD_SUFFIXES]
