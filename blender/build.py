# SPDX-License-Identifier: Apache-2.0
"""Make the extension for Blender as a ZIP file: ``python blender/build.py [FOLDER]``."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

_SOURCE = Path(__file__).resolve().parent / "sugar_scan"
_LICENSE = Path(__file__).resolve().parent.parent / "LICENSE"
_MANIFEST = "blender_manifest.toml"
_SUFFIXES = {".py", ".toml"}
_DATE = (1980, 1, 1, 0, 0, 0)  # the earliest of ZIP files, so that equal sources are equal files


def build(folder: Path) -> Path:
    """Write ``sugar_scan-VERSION.zip`` into a folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{_SOURCE.name}-{_version()}.zip"
    files = {path.relative_to(_SOURCE).as_posix(): path for path in _SOURCE.rglob("*")}
    files = {name: path for name, path in files.items() if path.suffix in _SUFFIXES}
    files[_LICENSE.name] = _LICENSE
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as package:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, _DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            package.writestr(entry, files[name].read_bytes())
    return target


def _version() -> str:
    """Return the version of the manifest."""
    text = (_SOURCE / _MANIFEST).read_text(encoding="utf-8")
    match = re.search(r'^version = "([^"]+)"', text, re.MULTILINE)
    if match is None:
        raise ValueError(f"{_SOURCE / _MANIFEST}: has no version")
    return match[1]


if __name__ == "__main__":
    print(build(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("output")))
