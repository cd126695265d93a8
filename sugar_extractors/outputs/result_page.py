# SPDX-License-Identifier: Apache-2.0
"""``index.html`` in the folder of results: its mesh and its Gaussians side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from gaussian_splatting.core.moved import GLB_AXES, moved_cloud, moved_points
from gaussian_splatting.formats.placement import MESH, SPLATS
from gaussian_splatting.formats.ply import read_gaussian_ply
from sugar_extractors.export.engines.web_page import write_page
from sugar_extractors.export_contents import CombinedExport
from sugar_scene.mesh_files.textured_mesh_io import read_textured_mesh
from sugar_trainers.naming import INDEX
from sugar_utils.errors import Notify, UserError
from sugar_utils.files import atomic_path


def write_index(folder: Path, *, upright: bool, lit: bool, notify: Notify) -> Path | None:
    """Write the page of a folder of results, unless it is newer than these; return it.

    Args:
        folder: Holds the textured mesh and the Gaussians; without one of them there is no page.
        upright: Whether y is up in them; else they have the axes of the capture.
        lit: Whether the page lights the mesh.
        notify: Called with a line where there can be no page.
    """
    sources = [folder / f"{MESH}.obj", folder / SPLATS]
    page = folder / INDEX
    if not all(path.is_file() for path in sources):
        return None
    newest = max(path.stat().st_mtime for path in sources)
    if page.is_file() and page.stat().st_mtime >= newest:
        return page
    try:
        mesh = read_textured_mesh(sources[0])
        cloud = read_gaussian_ply(sources[1], lambda line: None)
        if not upright:
            vertices = moved_points(mesh.vertices.double().numpy(), GLB_AXES)
            mesh = replace(mesh, vertices=torch.from_numpy(vertices).float())
            cloud = moved_cloud(cloud, GLB_AXES)
        with atomic_path(page) as temporary:
            write_page(CombinedExport(mesh, cloud, page, temporary, lit))
    except UserError as error:
        # All results are there without it.
        notify(f"no {INDEX}: {error}")
        return None
    return page
