# SPDX-License-Identifier: Apache-2.0
"""An edited mesh in the order of the model that its Gaussians are bound to."""

import json
from pathlib import Path

import numpy as np

from .errors import ScanError
from .obj_file import write_obj
from .result_folder import ResultFolder

_ADVICE = "only move vertices (sculpt, pose, grab) or delete some, then export again"


def write_edited(
    path: Path, result: ResultFolder, numbers: np.ndarray, vertices: np.ndarray, faces: np.ndarray
) -> None:
    """Write an edited mesh for ``sugar export --repose``, with the record of its placement.

    Args:
        path: The OBJ; the record is beside it.
        result: The folder of results that the mesh was imported from.
        numbers: Of each vertex, its row in the mesh of the results. (N,)
        vertices: In the coordinates of the results. (N, 3)
        faces: Rows of the edited vertices. (K, 3)

    Raises:
        ScanError: The mesh has vertices that the one of the results does not have.
    """
    n_vertices = _vertex_count(result)
    is_inside = (numbers >= 0) & (numbers < n_vertices)
    if not is_inside.all() or len(np.unique(numbers)) != len(numbers):
        raise ScanError(f"the mesh has new vertices; {_ADVICE}")
    if not len(faces):
        raise ScanError(f"the mesh has no triangles left; {_ADVICE}")
    # Vertices that were deleted have no triangles, but keep their rows.
    placed = np.tile(vertices[:1], (n_vertices, 1))
    placed[numbers] = vertices
    write_obj(path, placed, numbers[faces])
    record = {"matrix": result.matrix.tolist(), "up": result.up}
    path.with_name(f"{path.name}.json").write_text(json.dumps(record), encoding="utf-8")


def _vertex_count(result: ResultFolder) -> int:
    """Return how many vertices the mesh of the results has."""
    if result.mesh is None:
        raise ScanError(f"{result.path}: has no mesh")
    with result.mesh.open("rb") as file:
        return sum(line.startswith(b"v ") for line in file)
