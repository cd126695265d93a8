# SPDX-License-Identifier: Apache-2.0
"""One HTML file with a textured mesh and its Gaussians side by side, which needs no server."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.formats.spz import read_spz, write_spz
from sugar_extractors.export.engines.scan_program import scan_program
from sugar_extractors.export_contents import CombinedExport
from sugar_scene.mesh_files.textured_mesh_io import MeshStyle, glb_chunks, small_picture
from sugar_utils.errors import Notify, UserError
from sugar_utils.files import require_regular_file
from sugar_utils.html import GAUSSIANS_ELEMENT, element_bytes, scan_page
from sugar_utils.memory import format_bytes

_GAUSSIANS = "gaussians.spz"
_INDEX = "index"
_LARGEST = 300 << 20  # bytes; browsers hold the text of an element as one string


def write_page(export: CombinedExport) -> None:
    """Write the page of a mesh, as GLB, and of Gaussians, as SPZ.

    Raises:
        UserError: The page would be too large for browsers, or SPZ cannot hold the Gaussians.
    """
    mesh = export.mesh
    style = MeshStyle(y_up=True, lit=export.lit)
    glb = b"".join(glb_chunks(mesh, small_picture(mesh.texture), export.target, style))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / _GAUSSIANS
        write_spz(file, export.cloud)
        spz = file.read_bytes()
    largest = max(len(glb), len(spz))
    if largest > _LARGEST:
        raise UserError(
            f"{export.target}: its parts are up to {format_bytes(largest)}, more than browsers "
            "open; use --max_triangles or --texture_size, or --to glb and --to sog_lod"
        )
    name = export.target.stem
    # Servers and people look for a page of this name; the folder says what it is about.
    title = export.target.resolve().parent.name if name == _INDEX else name
    page = scan_page(title, glb, spz, scan_program())
    export.path.write_text(page, encoding="utf-8", newline="\n")


def read_page_gaussians(path: Path, notify: Notify) -> GaussianCloud:
    """Read the Gaussians of a page that :func:`write_page` wrote."""
    page = require_regular_file(path).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / _GAUSSIANS
        file.write_bytes(element_bytes(page, GAUSSIANS_ELEMENT))
        return read_spz(file, notify)
