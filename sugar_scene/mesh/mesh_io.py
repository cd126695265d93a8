# SPDX-License-Identifier: Apache-2.0
"""Coarse mesh PLY files, in the layout that SuGaR's tools exchange.

Binary little-endian: ``double`` positions and normals, ``uchar`` colours, and faces as
``list uchar uint vertex_indices``. Reading accepts any number type, text files and polygons.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
from plyfile import PlyData, PlyElement, PlyParseError

from gaussian_splatting.data.ply import does_not_fit
from sugar_scene.mesh.triangle_mesh import TriangleMesh, with_vertex_normals
from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path, require_regular_file

_POSITION, _NORMAL, _COLOR = ("x", "y", "z"), ("nx", "ny", "nz"), ("red", "green", "blue")
_VERTEX = np.dtype(
    [*((name, "<f8") for name in _POSITION + _NORMAL), *((name, "u1") for name in _COLOR)]
)
_FACE_ROW = np.dtype([("n", "u1"), ("rows", "<u4", (3,))])
_CHUNK_ROWS = 1 << 16
_DEFAULT_COLOR = 128
_FACE_LISTS = ("vertex_indices", "vertex_index")


def write_mesh_ply(path: Path, mesh: TriangleMesh) -> None:
    """Write a mesh, complete or not at all; missing normals are computed.

    Raises:
        UserError: The file cannot be written.
    """
    if mesh.normals is None:
        mesh = with_vertex_normals(mesh)
    vertices = np.empty(mesh.n_vertices, dtype=_VERTEX)
    for names, values in (
        (_POSITION, mesh.vertices), (_NORMAL, mesh.normals), (_COLOR, mesh.colors)
    ):  # fmt: skip
        for name, column in zip(names, values.T, strict=True):
            vertices[name] = column
    header = _header(vertices, mesh.n_faces)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(header)
        file.write(vertices.data)
        # plyfile writes lists row by row in Python, a minute for millions of faces.
        for first in range(0, mesh.n_faces, _CHUNK_ROWS):
            chunk = mesh.faces[first : first + _CHUNK_ROWS]
            rows = np.empty(len(chunk), dtype=_FACE_ROW)
            rows["n"], rows["rows"] = 3, chunk
            file.write(rows.data)


def _header(vertices: np.ndarray, n_faces: int) -> bytes:
    no_faces = np.empty(0, dtype=[("vertex_indices", "u4", (3,))])
    data = PlyData(
        [PlyElement.describe(vertices, "vertex"), PlyElement.describe(no_faces, "face")],
        byte_order="<",
    )
    return data.header.replace("element face 0", f"element face {n_faces}").encode() + b"\n"


def read_mesh_ply(path: Path) -> TriangleMesh:
    """Read a mesh; colours are grey and normals None where the file has none.

    Polygons are split into fans.

    Raises:
        UserError: The file is missing, damaged, too large for the memory, or holds no mesh.
    """
    path = require_regular_file(path, missing_ok=True)
    try:
        mesh = _mesh_of(path, _read(path))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such mesh file; check --mesh_path") from error
    except MemoryError as error:
        raise does_not_fit(path) from error
    except (PlyParseError, OSError, ValueError, TypeError, OverflowError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{path}: damaged or truncated mesh ({reason}); extract it again"
        ) from error
    if not np.isfinite(mesh.vertices).all():
        raise UserError(f"{path}: has vertices with NaN or infinity; extract it again")
    if mesh.n_faces and not 0 <= mesh.faces.min() <= mesh.faces.max() < mesh.n_vertices:
        raise UserError(
            f"{path}: a face refers to a vertex that is not there "
            f"({mesh.n_vertices} vertices); extract it again"
        )
    return mesh


def _read(path: Path) -> PlyData:
    """All elements; a hundred times faster where every face is a triangle, which is the rule."""
    for name in _FACE_LISTS:
        # Another name, another length, or no faces at all: the general way finds out.
        with contextlib.suppress(PlyParseError, ValueError, KeyError):
            return PlyData.read(str(path), known_list_len={"face": {name: 3}})
    return PlyData.read(str(path))


def _mesh_of(path: Path, data: PlyData) -> TriangleMesh:
    missing = [name for name in ("vertex", "face") if name not in data]
    if missing:
        raise UserError(f"{path}: has no element '{missing[0]}'; pass a mesh, not a point cloud")
    vertex, names = data["vertex"].data, data["vertex"].data.dtype.names
    for name in _POSITION:
        if name not in names:
            raise UserError(f"{path}: vertices lack '{name}'; extract the mesh again")

    def columns(wanted: tuple[str, ...]) -> np.ndarray | None:
        if not all(name in names for name in wanted):
            return None
        return np.stack([np.asarray(vertex[name], dtype=np.float64) for name in wanted], axis=1)

    colors = columns(_COLOR)
    if colors is None:
        colors = np.full((len(vertex), 3), _DEFAULT_COLOR)
    elif vertex["red"].dtype.kind == "f":
        colors = colors * 255
    return TriangleMesh(
        columns(_POSITION),
        _triangles(path, data["face"].data),
        np.clip(np.rint(colors), 0, 255).astype(np.uint8),
        columns(_NORMAL),
    )


def _triangles(path: Path, faces: np.ndarray) -> np.ndarray:
    names = [name for name in _FACE_LISTS if name in faces.dtype.names]
    if not names:
        raise UserError(f"{path}: faces lack 'vertex_indices'; extract the mesh again")
    lists = faces[names[0]]
    if lists.ndim == 2:
        return lists.astype(np.int64)
    if len(lists) == 0:
        return np.empty((0, 3), dtype=np.int64)
    sizes = np.fromiter((len(row) for row in lists), dtype=np.int64, count=len(lists))
    if sizes.min() < 3:
        raise UserError(f"{path}: has a face of fewer than three corners; extract it again")
    flat = np.concatenate(list(lists)).astype(np.int64)
    starts = np.cumsum(sizes) - sizes
    fans = sizes - 2
    start = np.repeat(starts, fans)
    step = np.arange(len(start)) - np.repeat(np.cumsum(fans) - fans, fans) + 1
    return np.stack([flat[start], flat[start + step], flat[start + step + 1]], axis=1)
