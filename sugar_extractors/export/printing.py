# SPDX-License-Identifier: Apache-2.0
"""Meshes for 3D printers: one closed body in millimetres, z up, as binary STL or 3MF."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import trimesh

from sugar_scene.mesh.triangle_mesh import (
    TriangleMesh,
    clean_mesh,
    component_labels,
    doubled_area_normals,
    keep_vertices,
    open_edge_share,
    with_holes_filled,
)
from sugar_utils.files import atomic_path
from sugar_utils.libraries import load_package

MILLIMETRES = 1000.0
Z_UP = np.array([[1.0, 0, 0, 0], [0, 0, -1, 0], [0, 1, 0, 0], [0, 0, 0, 1]])
"""From y up to z up."""

_MAX_ROUNDS = 8
_ROW = np.dtype([("normal", "<f4", 3), ("corners", "<f4", (3, 3)), ("attribute", "<u2")])


def closed_body(mesh: TriangleMesh) -> TriangleMesh:
    """The largest connected part of a mesh with all its holes covered.

    Covering a hole can bring three faces together at an edge; the clean-up takes one of them away,
    and what that opens is covered again, a few times at most.
    """
    labels = component_labels(mesh)
    faces_of = np.bincount(labels[mesh.faces[:, 0]])
    body = clean_mesh(keep_vertices(mesh, labels == faces_of.argmax()))
    for _ in range(_MAX_ROUNDS):
        if open_edge_share(body) == 0:
            break
        body = clean_mesh(with_holes_filled(body))
    return body


def write_stl(path: Path, mesh: TriangleMesh) -> None:
    """Write a binary STL, complete or not at all.

    Raises:
        UserError: The file cannot be written.
    """
    rows = np.zeros(mesh.n_faces, _ROW)
    normals = doubled_area_normals(mesh)
    rows["normal"] = normals / np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-30)
    rows["corners"] = mesh.vertices[mesh.faces]
    with atomic_path(path) as temporary:
        header = b"binary STL, millimetres".ljust(80) + np.uint32(mesh.n_faces).tobytes()
        temporary.write_bytes(header + rows.tobytes())


def require_lxml() -> None:
    """Check that 3MF can be written.

    Raises:
        UserError: The package that trimesh writes it with is not installed.
    """
    load_package("--to 3mf", "lxml", "lxml.etree", instead="use --to stl")


def write_3mf(path: Path, mesh: TriangleMesh) -> None:
    """Write a 3MF package, whose unit is the millimetre, complete or not at all.

    Raises:
        UserError: The file cannot be written.
    """
    body = trimesh.Trimesh(mesh.vertices, mesh.faces, process=False, validate=False)
    with atomic_path(path) as temporary:
        temporary.write_bytes(trimesh.Scene(body).export(file_type="3mf"))
