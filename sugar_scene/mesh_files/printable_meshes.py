# SPDX-License-Identifier: Apache-2.0
"""Closed meshes for 3D printers, as STL and 3MF."""

from __future__ import annotations

from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from gaussian_splatting.core.subsets import longest_side
from sugar_scene import triangle_mesh
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_utils.files import atomic_path

BASE_THICKNESS = 2.0  # millimetres below the lowest point
_MAX_ROUNDS = 8
_LEAST_OPENING = 0.1  # area of an opening that gets a base, in squares of the mesh's longest side
_ALONG_Z = 0.87  # least cosine at which a direction is taken for that of the z axis: 30 degrees


@dataclass(frozen=True)
class _Opening:
    """A hole of a mesh through which a large part of it can be seen from behind."""

    loop: np.ndarray  # indices of the vertices around it, in the sense of the adjacent faces
    up: np.ndarray  # unit vector from the opening to the surface that it lies behind, (3,)


def closed_body(mesh: TriangleMesh) -> TriangleMesh:
    """Return the largest part of a mesh with all its holes covered and its faces outwards.

    Small loose pieces and flaps do not stay, and faces that are inside out are turned.
    Ground around an object, a relief, or a bust without its underside is a sheet without
    thickness, which no printer prints. It gets walls and a flat base. A surface in millimetres is
    expected; where z is up, so is the base's upper side.
    """
    body = triangle_mesh.clean_mesh(triangle_mesh.without_flaps(mesh))
    body = triangle_mesh.largest_oriented_part(body)
    opening = _opening(body)
    if opening is not None:
        body = _with_base(body, opening)
    for _ in range(_MAX_ROUNDS):
        body = with_all_holes_closed(body)
        # A cover may have cut a piece off, or met the surface from behind.
        part = triangle_mesh.largest_oriented_part(body)
        if np.array_equal(part.faces, body.faces):
            break
        body = part
    if triangle_mesh.signed_volume(body) < 0:
        body = replace(body, faces=body.faces[:, ::-1].copy())
    return body


def _opening(mesh: TriangleMesh) -> _Opening | None:
    """Return the largest opening of a mesh; None where it is small, or faces up."""
    loops = triangle_mesh.border_loops(mesh)
    if not loops:
        return None
    areas = np.stack([_vector_area(mesh.vertices[loop]) for loop in loops])
    sizes = np.linalg.norm(areas, axis=1)
    largest = int(sizes.argmax())
    if sizes[largest] <= _LEAST_OPENING * longest_side(mesh.vertices) ** 2:
        return None
    up = areas[largest] / sizes[largest]
    if up[2] < -_ALONG_Z:
        return None
    if up[2] > _ALONG_Z:
        up = np.array([0.0, 0.0, 1.0])
    return _Opening(loops[largest], up)


def _vector_area(polygon: np.ndarray) -> np.ndarray:
    """Return half the sum of the cross products along a closed polygon, (N, 3) -> (3,).

    It is the sum of the area normals of any surface that the polygon borders.
    """
    around = polygon - polygon.mean(axis=0)
    return np.cross(around, np.roll(around, -1, axis=0)).sum(axis=0) / 2


def _with_base(mesh: TriangleMesh, opening: _Opening) -> TriangleMesh:
    """Return a mesh with walls from an opening to a flat hole below all of it."""
    loop = opening.loop
    heights = mesh.vertices @ opening.up
    drops = heights[loop] - (heights.min() - BASE_THICKNESS)
    feet = mesh.vertices[loop] - drops[:, None] * opening.up
    upper = loop
    lower = mesh.n_vertices + np.arange(len(loop))
    next_upper = np.roll(upper, -1)
    next_lower = np.roll(lower, -1)
    # Against the sense of the faces beside the loop, as faces on two sides of an edge are.
    walls = [
        np.stack([next_upper, upper, lower], axis=1),
        np.stack([next_upper, lower, next_lower], axis=1),
    ]
    return TriangleMesh(
        np.concatenate([mesh.vertices, feet]),
        np.concatenate([mesh.faces, *walls]),
        np.concatenate([mesh.colors, mesh.colors[loop]]),
    )


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


def write_printable(path: Path, mesh: TriangleMesh, kind: str) -> TriangleMesh:
    """Write a binary STL or a 3MF package, in millimetres, complete or not at all.

    Args:
        kind: ``stl`` or ``3mf``.

    Returns:
        The mesh as the file has it, whose numbers are rounded.
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
    written: Any = trimesh.load_mesh(BytesIO(encoded), file_type=kind)
    vertices = np.asarray(written.vertices, np.float64)
    return TriangleMesh(
        vertices, np.asarray(written.faces, np.int64), np.zeros((len(vertices), 3), np.uint8)
    )
