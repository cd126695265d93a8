# SPDX-License-Identifier: Apache-2.0
"""Vertices and faces of any of our files that hold a mesh."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from gaussian_splatting.data.world_offset import near_offset
from sugar_extractors.results import read_state
from sugar_scene.bound_model import bound_cloud_from_state
from sugar_scene.triangle_mesh import TriangleMesh, fits_float32, read_mesh_ply
from sugar_utils.errors import Notify, UserError, reason_of
from sugar_utils.files import require_regular_file

_GREY = 128
MESH_SUFFIXES = (".ply", ".pt", ".obj")


def read_any_mesh(
    path: Path, notify: Notify = print, offset: np.ndarray | None = None
) -> TriangleMesh:
    """Read vertices and faces; colours are the file's own in a PLY, else grey.

    Args:
        path: A mesh PLY, an OBJ, or the ``.pt`` of a refinement.
        notify: Called with lines about what is left out.
        offset: That is subtracted from coordinates far from the origin; see
            :func:`~gaussian_splatting.data.world_offset.near_offset`. (3,)
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in MESH_SUFFIXES:
        raise UserError(f"{path}: not a mesh; pass one of {', '.join(MESH_SUFFIXES)}")
    require_regular_file(path)
    if suffix == ".ply":
        mesh = read_mesh_ply(path)
    elif suffix == ".obj":
        mesh = _grey_mesh(*_read_obj(path))
    else:
        cloud = read_state(path, bound_cloud_from_state)
        mesh = _grey_mesh(cloud.vertices.double().numpy(), cloud.faces.numpy())
    if not fits_float32(mesh.vertices):
        raise UserError(f"{path}: has vertices with NaN or infinity; make the mesh again")
    vertices = np.asarray(mesh.vertices, np.float64)
    subtracted = near_offset(vertices, offset, path, notify)
    return replace(mesh, vertices=vertices - subtracted) if subtracted.any() else mesh


def _grey_mesh(vertices: np.ndarray, faces: np.ndarray) -> TriangleMesh:
    return TriangleMesh(vertices, faces, np.full((len(vertices), 3), _GREY, dtype=np.uint8))


def _read_obj(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read vertices, (V, 3), and triangles, (F, 3)."""
    vertices = []
    faces = []
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("v "):
                    vertices.append([float(word) for word in line.split()[1:4]])
                elif line.startswith("f "):
                    a, b, c = (int(word.split("/", 1)[0]) for word in line.split()[1:])
                    faces.append((a, b, c))
        points = np.array(vertices, dtype=np.float64).reshape(-1, 3)
        rows = np.array(faces, dtype=np.int64).reshape(-1, 3)
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(
            f"{path}: damaged, or not an OBJ of triangles ({reason_of(error)}); export it again"
        ) from error
    # Rows count from 1, or backwards from the last vertex.
    rows = np.where(rows > 0, rows - 1, rows + len(points))
    if len(rows) and not 0 <= rows.min() <= rows.max() < len(points):
        raise UserError(f"{path}: a face refers to a vertex that is not there; write it again")
    return points, rows
