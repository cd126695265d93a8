# SPDX-License-Identifier: Apache-2.0
"""Closed meshes for 3D printers, as STL and 3MF."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sugar_scene import triangle_mesh
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_utils.files import atomic_path

_MAX_ROUNDS = 8


def closed_body(mesh: TriangleMesh) -> TriangleMesh:
    """Return the largest connected part of a mesh with all its holes covered."""
    labels = triangle_mesh.component_labels(mesh)
    faces_per_component = np.bincount(labels[mesh.faces[:, 0]])
    is_largest = labels == faces_per_component.argmax()
    body = triangle_mesh.clean_mesh(triangle_mesh.keep_vertices(mesh, is_largest))
    return with_all_holes_closed(body)


def with_all_holes_closed(mesh: TriangleMesh) -> TriangleMesh:
    """Return a clean mesh with all its holes covered.

    Where a cover brings three faces together at an edge, the clean-up removes one of them. The
    hole is then covered again, in at most ``_MAX_ROUNDS`` rounds.
    """
    body = mesh
    for _ in range(_MAX_ROUNDS):
        if triangle_mesh.open_edge_share(body) == 0:
            break
        body = triangle_mesh.clean_mesh(triangle_mesh.with_holes_filled(body))
    return body


def write_printable(path: Path, mesh: TriangleMesh, kind: str) -> None:
    """Write a binary STL or a 3MF package, in millimetres, complete or not at all.

    Args:
        kind: ``stl`` or ``3mf``.
    """
    # Imported here because it takes half a second, which pipelines need not wait for.
    import trimesh

    body = trimesh.Trimesh(mesh.vertices, mesh.faces, process=False, validate=False)
    # A 3MF package holds its bodies in a scene.
    content = body if kind == "stl" else trimesh.Scene(body)
    with atomic_path(path) as temporary:
        encoded = content.export(file_type=kind)
        if not isinstance(encoded, bytes):
            raise TypeError(f"trimesh wrote {kind} as {type(encoded).__name__}")
        temporary.write_bytes(encoded)
