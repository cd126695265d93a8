# SPDX-License-Identifier: Apache-2.0
"""Reading the triangles of whatever the stages write: a PLY, a refined model, an OBJ."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gaussian_splatting.engine.checkpoint import load_payload
from sugar_scene.mesh.mesh_io import read_mesh_ply
from sugar_scene.mesh.triangle_mesh import TriangleMesh
from sugar_scene.trainable_bound import bound_cloud_from_state
from sugar_utils.errors import UserError
from sugar_utils.files import require_regular_file

_GREY = 128
MESH_SUFFIXES = (".ply", ".pt", ".obj")


def read_any_mesh(path: Path) -> TriangleMesh:
    """Read vertices and faces; colours are the file's own in a PLY, else grey.

    Args:
        path: A mesh ``.ply``, the ``.pt`` of a refined model, or an ``.obj`` of triangles.

    Raises:
        UserError: The file is missing, damaged or of another kind.
    """
    path, suffix = Path(path), Path(path).suffix.lower()
    if suffix not in MESH_SUFFIXES:
        raise UserError(f"{path}: not a mesh; pass one of {', '.join(MESH_SUFFIXES)}")
    if not path.exists():
        raise UserError(f"{path}: no such mesh file; check the path")
    require_regular_file(path)
    if suffix == ".ply":
        return read_mesh_ply(path)
    return _refined_mesh(path) if suffix == ".pt" else _obj_mesh(path)


def _refined_mesh(path: Path) -> TriangleMesh:
    payload = load_payload(path)
    try:
        cloud = bound_cloud_from_state(payload["state_dict"])
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return _grey(path, cloud.vertices.double().numpy(), cloud.faces.numpy())


def _obj_mesh(path: Path) -> TriangleMesh:
    """Positions and faces of an OBJ; its texture is not read."""
    vertices, faces = [], []
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
        raise UserError(f"{path}: damaged, or not an OBJ of triangles ({error})") from error
    # Rows count from 1, or backwards from the last vertex.
    rows = np.where(rows > 0, rows - 1, rows + len(points))
    if len(rows) and not 0 <= rows.min() <= rows.max() < len(points):
        raise UserError(f"{path}: a face refers to a vertex that is not there; write it again")
    return _grey(path, points, rows)


def _grey(path: Path, vertices: np.ndarray, faces: np.ndarray) -> TriangleMesh:
    if not np.isfinite(vertices).all():
        raise UserError(f"{path}: has vertices with NaN or infinity; make the mesh again")
    return TriangleMesh(vertices, faces, np.full((len(vertices), 3), _GREY, dtype=np.uint8))
