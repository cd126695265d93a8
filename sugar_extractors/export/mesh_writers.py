# SPDX-License-Identifier: Apache-2.0
"""Writers of textured meshes for the table of formats."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sugar_extractors.export.usd import mesh as usd_mesh
from sugar_extractors.export_contents import MeshExport
from sugar_extractors.texture.mesh_reduction import shape_of
from sugar_scene.mesh_files import printable_meshes, textured_mesh_io
from sugar_scene.mesh_files.textured_mesh_io import MeshStyle, mesh_files
from sugar_scene.triangle_mesh import open_edge_share, signed_volume

_CUBIC_MILLIMETRES = 1000  # of a cubic centimetre


def write_obj(export: MeshExport) -> None:
    """Write an OBJ with normals, its material and its pictures."""
    files = mesh_files(export.target, glb=False, normal_map=export.normal_map)
    targets = {file: export.paths[file] for file in files}
    textured_mesh_io.write_mesh_files(targets, export.mesh, MeshStyle(obj_normals=True))


def obj_files(target: Path, normal_map: bool) -> list[Path]:
    """Return the files of an OBJ, the OBJ first."""
    return mesh_files(target, glb=False, normal_map=normal_map)[::-1]


def write_usdz(export: MeshExport) -> None:
    """Write a USDZ package."""
    usd_mesh.write_usdz(export.path, export.mesh, export.collider)


def write_printable(export: MeshExport, kind: str) -> None:
    """Close a mesh, write it as ``stl`` or ``3mf``, and report its size and triangles."""
    source = shape_of(export.mesh)
    body = printable_meshes.closed_body(source)
    written = printable_meshes.write_printable(export.path, body, kind)
    sides = " x ".join(f"{side:.1f}" for side in np.ptp(written.vertices, axis=0))
    open_share = open_edge_share(written)
    state = "closed"
    if open_share:
        state = f"{open_share:.2%} of its edges are open: close it before printing"
    volume = signed_volume(written) / _CUBIC_MILLIMETRES
    export.notify(f"{written.n_faces:,} triangles, {sides} mm, {state}, {volume:,.1f} cm3")
