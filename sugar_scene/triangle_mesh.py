# SPDX-License-Identifier: Apache-2.0
"""Triangle meshes as arrays: their clean-up, closing of holes, and coarse mesh PLY files.

Binary little-endian: ``double`` positions and normals, ``uchar`` colours, and faces as
``list uchar uint vertex_indices``. Where holes were filled, ``uchar filled`` is 1 at the vertices
of the fillings. Reading accepts any number type, text files and polygons.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from plyfile import PlyData, PlyElement, PlyParseError
from torch import Tensor

from gaussian_splatting.core.color_bytes import rounded_bytes
from gaussian_splatting.core.subsets import is_among, values_by_key
from gaussian_splatting.formats.ply import color_properties, columns_of, ply_errors
from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path, require_regular_file

_FACE_ROW = np.dtype([("n", "u1"), ("rows", "<u4", (3,))])
_CHUNK_ROWS = 1 << 16
_DEFAULT_COLOR = 128
_FACE_LISTS = ("vertex_indices", "vertex_index")
_POSITION = ("x", "y", "z")
_NORMAL = ("nx", "ny", "nz")
_COLOR = ("red", "green", "blue")
_NUMBERS = dict.fromkeys(_POSITION + _NORMAL, "<f8")
_BYTES = dict.fromkeys(_COLOR, "u1")
_VERTEX = np.dtype([*_NUMBERS.items(), *_BYTES.items()])
_FILLED = "filled"


@dataclass(frozen=True)
class TriangleMesh:
    """A triangle mesh with colours at its vertices."""

    vertices: np.ndarray  # (V, 3) float64 world units
    faces: np.ndarray  # rows of the vertices, counter-clockwise seen from outside, (F, 3) int64
    colors: np.ndarray  # (V, 3) uint8
    normals: np.ndarray | None = None  # unit, outward; None until they are computed, (V, 3) float64
    filled: np.ndarray | None = None  # vertices that fill holes; None without any, (V,) bool

    @property
    def n_vertices(self) -> int:
        """Number of vertices, those that no face uses included."""
        return len(self.vertices)

    @property
    def n_faces(self) -> int:
        """Number of triangles."""
        return len(self.faces)


def doubled_area_normals(vertices: np.ndarray, faces: np.ndarray) -> np.ndarray:
    """Return each face's normal, as long as twice its area. (V, 3), (F, 3) -> (F, 3)"""
    a, b, c = vertices[faces.T].astype(np.float64)
    return np.cross(b - a, c - a)


def area_normals(corners: Tensor) -> Tensor:
    """Return the normals of triangles, each as long as twice its area. (F, 3, 3) -> (F, 3)"""
    a, b, c = corners.unbind(1)
    return torch.linalg.cross(b - a, c - a)


def vertex_normals(mesh: TriangleMesh) -> np.ndarray:
    """Return the area-weighted mean normal of each vertex's faces; (0, 0, 1) without any. (V, 3)"""
    weighted = doubled_area_normals(mesh.vertices, mesh.faces)
    total = np.zeros((mesh.n_vertices, 3))
    for axis in range(3):
        for corner in range(3):
            rows = mesh.faces[:, corner]
            total[:, axis] += np.bincount(rows, weighted[:, axis], mesh.n_vertices)
    length = np.linalg.norm(total, axis=1, keepdims=True)
    has_length = length > 0
    return np.where(has_length, total / np.where(has_length, length, 1), (0.0, 0.0, 1.0))


def with_vertex_normals(mesh: TriangleMesh) -> TriangleMesh:
    """Return a mesh with its :func:`vertex_normals`."""
    return replace(mesh, normals=vertex_normals(mesh))


def keep_vertices(mesh: TriangleMesh, keep: np.ndarray) -> TriangleMesh:
    """Remove vertices and all faces that use them. keep: (V,) bool"""
    new_rows = np.cumsum(keep) - 1
    faces = mesh.faces[keep[mesh.faces].all(axis=1)]
    normals = None if mesh.normals is None else mesh.normals[keep]
    filled = None if mesh.filled is None else mesh.filled[keep]
    return TriangleMesh(mesh.vertices[keep], new_rows[faces], mesh.colors[keep], normals, filled)


def without_unused_vertices(mesh: TriangleMesh) -> TriangleMesh:
    """Remove vertices that no face uses."""
    return keep_vertices(mesh, is_among(mesh.n_vertices, mesh.faces))


def keep_faces(mesh: TriangleMesh, keep: np.ndarray) -> TriangleMesh:
    """Remove faces and all vertices that no other face uses. keep: (F,) bool"""
    return without_unused_vertices(replace(mesh, faces=mesh.faces[keep]))


def with_corners_in(mesh: TriangleMesh, selected: np.ndarray) -> TriangleMesh:
    """Keep the faces with at least one selected corner, (V,) bool, and their vertices."""
    return keep_faces(mesh, np.any(selected[mesh.faces], axis=1))


def merge_meshes(meshes: Sequence[TriangleMesh]) -> TriangleMesh:
    """Put meshes side by side without welding them; at least one mesh."""
    faces = []
    n_vertices = 0
    for mesh in meshes:
        faces.append(mesh.faces + n_vertices)
        n_vertices += mesh.n_vertices
    return TriangleMesh(
        np.concatenate([mesh.vertices for mesh in meshes]),
        np.concatenate(faces),
        np.concatenate([mesh.colors for mesh in meshes]),
    )


def clean_mesh(mesh: TriangleMesh) -> TriangleMesh:
    """Merge equal vertices; drop degenerate and repeated faces, then those at crowded edges."""
    return _without_crowded_edges(_merged(mesh))


def without_flaps(mesh: TriangleMesh) -> TriangleMesh:
    """Merge equal vertices; drop faces that hang by an edge of two other faces and end openly."""
    mesh = _merged(mesh)
    while mesh.n_faces:
        _, inverse, counts = np.unique(
            edge_keys(mesh.faces), return_inverse=True, return_counts=True
        )
        n_faces_of_sides = counts[inverse.reshape(-1, 3)]
        is_flap = (n_faces_of_sides > 2).any(axis=1) & (n_faces_of_sides == 1).any(axis=1)
        if not is_flap.any():
            break
        mesh = replace(mesh, faces=mesh.faces[~is_flap])
    return mesh


def _merged(mesh: TriangleMesh) -> TriangleMesh:
    """Merge equal vertices; drop degenerate and repeated faces."""
    mesh = _without_duplicated_vertices(mesh)
    a, b, c = mesh.faces.T
    faces = mesh.faces[(a != b) & (b != c) & (c != a)]
    return replace(mesh, faces=_without_repeated(faces))


def sides_of(faces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where the sides of faces begin and end. (F, 3) -> (3 F,) each, by face and corner"""
    return faces.ravel(), np.roll(faces, -1, axis=1).ravel()


def edge_keys(faces: np.ndarray) -> np.ndarray:
    """Return a number for each edge from corner k to k + 1, the same both ways. (F, 3) int64"""
    ends = np.roll(faces, -1, axis=1)
    low = np.minimum(faces, ends)
    high = np.maximum(faces, ends)
    n_vertices = int(faces.max(initial=0)) + 1
    return low * n_vertices + high


def _connected(a: np.ndarray, b: np.ndarray, n: int) -> np.ndarray:
    """Label the connected components of ``n`` nodes with edges from ``a`` to ``b``. (n,)"""
    # Here and not above: they take a tenth of the time in which a command starts.
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    if n == 0:
        return np.empty(0, dtype=np.int32)
    graph = csr_array((np.ones(len(a), dtype=bool), (a, b)), shape=(n, n))
    _, labels = connected_components(graph, directed=False)
    return labels


def component_labels(mesh: TriangleMesh) -> np.ndarray:
    """Return each vertex's connected component, named by its lowest vertex. (V,) int64"""
    if mesh.n_vertices == 0:
        return np.empty(0, dtype=np.int64)
    # Two sides of a triangle connect what all three do.
    a = mesh.faces[:, :2].ravel()
    b = mesh.faces[:, 1:].ravel()
    groups = _connected(a, b, mesh.n_vertices)
    _, lowest_vertices = np.unique(groups, return_index=True)
    return lowest_vertices[groups]


def largest_oriented_part(mesh: TriangleMesh) -> TriangleMesh:
    """Return the largest part whose faces share edges, with all faces turned the same way.

    What touches it at a vertex alone is another part. Of the two ways that one counts in which most
    faces are turned already. Each edge has at most two faces, see :func:`clean_mesh`.
    """
    n = mesh.n_faces
    if n == 0:
        return mesh
    keys = edge_keys(mesh.faces).ravel()
    starts, ends = sides_of(mesh.faces)
    goes_up = starts < ends
    order = np.argsort(keys, kind="stable")
    is_pair = np.diff(keys[order]) == 0
    first = order[:-1][is_pair]
    second = order[1:][is_pair]
    a = first // 3
    b = second // 3
    # Two nodes for each face: as it is, and turned. Faces that run along an edge in the same
    # direction go together if one of them is turned.
    turn = n * (goes_up[first] == goes_up[second])
    labels = _connected(np.concatenate([a, a + n]), np.concatenate([b + turn, b + n - turn]), 2 * n)
    sizes = np.bincount(labels)
    unturned = np.bincount(labels[:n], minlength=len(sizes))
    part = (sizes * (2 * n) + unturned).argmax()
    is_kept = labels[:n] == part
    is_turned = ~is_kept & (labels[n:] == part)
    faces = np.where(is_turned[:, None], mesh.faces[:, ::-1], mesh.faces)
    return keep_faces(replace(mesh, faces=faces), is_kept | is_turned)


def signed_volume(mesh: TriangleMesh) -> float:
    """Return the volume that a closed mesh encloses; negative where its faces look inwards."""
    a, b, c = mesh.vertices[mesh.faces].transpose(1, 0, 2)
    return float((a * np.cross(b, c)).sum() / 6)


def component_diagonals(
    mesh: TriangleMesh, labels: np.ndarray, counted: np.ndarray | None = None
) -> np.ndarray:
    """Return the diagonal of the box of each component, at the place of its label. (V,)

    Args:
        labels: Of :func:`component_labels`; places that are no label have no meaning.
        counted: Vertices that the boxes hold, some of each component, (V,) bool; None for all.
    """
    vertices = mesh.vertices
    if counted is not None:
        vertices = vertices[counted]
        labels = labels[counted]
    low = np.full((mesh.n_vertices, 3), np.inf)
    high = np.full((mesh.n_vertices, 3), -np.inf)
    np.minimum.at(low, labels, vertices)
    np.maximum.at(high, labels, vertices)
    return np.linalg.norm(high - low, axis=1)


def without_small_components(
    mesh: TriangleMesh,
    min_faces: int,
    min_diagonal: float | np.ndarray = math.inf,
    continues: np.ndarray | None = None,
) -> TriangleMesh:
    """Remove connected components of fewer faces whose box has a shorter diagonal, too.

    Args:
        min_diagonal: The same for all, or at the place of each component's label, (V,); world
            units.
        continues: At which vertices the surface goes on in another mesh, (V,) bool; components
            with a face there stay. None: nowhere.
    """
    labels = component_labels(mesh)
    face_labels = labels[mesh.faces[:, 0]]
    is_large = np.bincount(face_labels, minlength=mesh.n_vertices) >= min_faces
    if not np.isinf(min_diagonal).all():
        is_large |= component_diagonals(mesh, labels) >= min_diagonal
    if continues is not None:
        is_large[face_labels[continues[mesh.faces].any(axis=1)]] = True
    return keep_vertices(mesh, is_large[labels])


@dataclass(frozen=True)
class Topology:
    """Topological figures of a mesh."""

    open_edge_share: float  # edges of one face, of all edges
    non_manifold_edge_share: float  # edges of more than two faces, of all edges
    components: int
    holes: int


def topology(mesh: TriangleMesh) -> Topology:
    """Return the topological figures of a mesh; zeros for one without faces."""
    if mesh.n_faces == 0:
        return Topology(0.0, 0.0, 0, 0)
    _, first, counts = np.unique(edge_keys(mesh.faces), return_index=True, return_counts=True)
    starts, ends = sides_of(mesh.faces)
    borders = first[counts == 1]
    used, rows = np.unique([starts[borders], ends[borders]], return_inverse=True)
    border_starts, border_ends = rows.reshape(2, -1)
    holes = _connected(border_starts, border_ends, len(used))
    return Topology(
        open_edge_share=float((counts == 1).mean()),
        non_manifold_edge_share=float((counts > 2).mean()),
        components=len(np.unique(component_labels(mesh)[mesh.faces])),
        holes=int(holes.max(initial=-1)) + 1,
    )


def open_edge_share(mesh: TriangleMesh) -> float:
    """Return the share of edges that belong to a single face: 0 for a watertight mesh."""
    _, counts = np.unique(edge_keys(mesh.faces), return_counts=True)
    if len(counts) == 0:
        return 0.0
    return float((counts == 1).mean())


def _sorted_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a stable order of rows, and which rows of it differ from the one before. (N,) each"""
    order = np.lexsort(rows.T[::-1])
    is_new = np.ones(len(rows), dtype=bool)
    is_new[1:] = (rows[order][1:] != rows[order][:-1]).any(axis=1)
    return order, is_new


def _without_duplicated_vertices(mesh: TriangleMesh) -> TriangleMesh:
    order, is_new = _sorted_rows(mesh.vertices)
    representative = np.empty(mesh.n_vertices, dtype=np.int64)
    representative[order] = order[is_new][np.cumsum(is_new) - 1]
    keep = representative == np.arange(mesh.n_vertices)
    return keep_vertices(replace(mesh, faces=representative[mesh.faces]), keep)


def _without_repeated(faces: np.ndarray) -> np.ndarray:
    """Keep the first of faces with the same corners in the same sense of rotation."""
    start = faces.argmin(axis=1)[:, None]
    corners = (start + np.arange(3)) % 3
    order, is_new = _sorted_rows(np.take_along_axis(faces, corners, axis=1))
    return faces[np.sort(order[is_new])]


def _without_crowded_edges(mesh: TriangleMesh) -> TriangleMesh:
    """Remove the smallest faces at edges of more than two faces until there are none."""
    faces = mesh.faces
    areas = np.linalg.norm(doubled_area_normals(mesh.vertices, mesh.faces), axis=1)
    while len(faces):
        keys = edge_keys(faces).ravel()
        owner = np.repeat(np.arange(len(faces)), 3)
        order = np.lexsort((owner, areas[owner], keys))
        starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
        counts = np.diff(starts, append=len(keys))
        smallest = owner[order[starts[counts > 2]]]
        if len(smallest) == 0:
            break
        keep = ~is_among(len(faces), smallest)
        faces = faces[keep]
        areas = areas[keep]
    return replace(mesh, faces=faces)


def border_edges(mesh: TriangleMesh) -> np.ndarray:
    """Return the edges of a single face, in its sense of rotation. (E, 2)"""
    _, inverse, counts = np.unique(edge_keys(mesh.faces), return_inverse=True, return_counts=True)
    sides = np.stack(sides_of(mesh.faces), axis=-1)
    return sides[counts[inverse.reshape(-1)] == 1]


def border_loops(mesh: TriangleMesh) -> list[np.ndarray]:
    """Return closed walks along open edges, in the sense of rotation of the adjacent faces.

    Where holes touch, a walk may go around both. Edges on no closed walk are left out.
    """
    edges = border_edges(mesh).tolist()
    after = values_by_key(edges)
    loops = []
    for first, _ in edges:
        walk = []
        at = first
        while after.get(at):
            walk.append(at)
            at = after[at].pop()
            if at == first:
                loops.append(np.array(walk))
                break
    return loops


def with_holes_filled(
    mesh: TriangleMesh, longest: int | None = None, continues: np.ndarray | None = None
) -> TriangleMesh:
    """Cover each hole of at most ``longest`` edges (None: any) by triangles around its middle.

    Args:
        continues: At which vertices the surface goes on in another mesh, (V,) bool; borders
            through them stay open. None: nowhere.
    """
    loops = border_loops(mesh)
    if longest is not None:
        loops = [loop for loop in loops if len(loop) <= longest]
    if continues is not None:
        loops = [loop for loop in loops if not continues[loop].any()]
    return with_loops_filled(mesh, loops)


def with_loops_filled(mesh: TriangleMesh, loops: Sequence[np.ndarray]) -> TriangleMesh:
    """Cover some of the :func:`border_loops` by triangles around their middles."""
    loops = [loop for loop in loops if len(loop) >= 3]
    if not loops:
        return mesh
    vertices = [mesh.vertices]
    faces = [mesh.faces]
    colors = [mesh.colors]
    for number, loop in enumerate(loops):
        middle = np.full_like(loop, mesh.n_vertices + number)
        # Against the sense of the faces beside it, as faces on two sides of an edge are.
        faces.append(np.stack([np.roll(loop, -1), loop, middle], axis=1))
        vertices.append(mesh.vertices[loop].mean(axis=0, keepdims=True))
        colors.append(mesh.colors[loop].mean(axis=0, keepdims=True).round().astype(np.uint8))
    return TriangleMesh(np.concatenate(vertices), np.concatenate(faces), np.concatenate(colors))


def write_mesh_ply(path: Path, mesh: TriangleMesh) -> None:
    """Write a mesh, complete or not at all; missing normals are computed."""
    normals = mesh.normals
    if normals is None:
        normals = with_vertex_normals(mesh).normals
    assert normals is not None
    columns = [*mesh.vertices.T, *normals.T, *mesh.colors.T]
    vertex_type = _VERTEX
    if mesh.filled is not None:
        columns.append(mesh.filled)
        vertex_type = np.dtype([*_VERTEX.descr, (_FILLED, "u1")])
    with atomic_path(path) as temporary:
        write_faces(temporary, np.rec.fromarrays(columns, dtype=vertex_type), mesh.faces)


def write_faces(path: Path, vertices: np.ndarray, faces: np.ndarray) -> None:
    """Write a binary PLY of vertices, a structured array, and triangles, (F, 3)."""
    no_faces = np.empty(0, dtype=[("vertex_indices", "u4", (3,))])
    elements = [PlyElement.describe(vertices, "vertex"), PlyElement.describe(no_faces, "face")]
    header = PlyData(elements, byte_order="<").header
    header = header.replace("element face 0", f"element face {len(faces)}")
    with path.open("wb") as file:
        file.write(header.encode() + b"\n")
        file.write(vertices.data)
        # plyfile writes lists row by row in Python, a minute for millions of faces.
        for first in range(0, len(faces), _CHUNK_ROWS):
            chunk = faces[first : first + _CHUNK_ROWS]
            rows = np.empty(len(chunk), dtype=_FACE_ROW)
            rows["n"] = 3
            rows["rows"] = chunk
            file.write(rows.data)


def fits_float32(values: np.ndarray) -> bool:
    """Return whether numbers are finite, in float32 as well."""
    # Written so that it is false of NaN.
    return bool((np.abs(values) <= np.finfo(np.float32).max).all())


def read_mesh_ply(path: Path) -> TriangleMesh:
    """Read a mesh, polygons as fans; colours are grey and normals None where there are none."""
    path = require_regular_file(path)
    with ply_errors(path, "extract it again"):
        mesh = _mesh_of(path, _read(path))
    if not fits_float32(mesh.vertices):
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
    vertex = data["vertex"].data
    missing = _missing_columns(vertex, _POSITION)
    if missing:
        raise UserError(f"{path}: vertices lack '{missing[0]}'; extract the mesh again")
    color_names = color_properties(vertex)
    if color_names is None:
        colors = np.full((len(vertex), 3), _DEFAULT_COLOR)
    else:
        colors = columns_of(vertex, color_names)
        if vertex[color_names[0]].dtype.kind == "f":
            colors = colors * 255
    normals = None if _missing_columns(vertex, _NORMAL) else columns_of(vertex, _NORMAL)
    filled = None
    if not _missing_columns(vertex, (_FILLED,)):
        filled = np.asarray(vertex[_FILLED]) != 0
    faces = _triangles(path, data["face"].data)
    vertices = columns_of(vertex, _POSITION)
    return TriangleMesh(vertices, faces, rounded_bytes(colors), normals, filled)


def _missing_columns(rows: np.ndarray, names: Sequence[str]) -> list[str]:
    present = rows.dtype.names or ()
    return [name for name in names if name not in present]


def _triangles(path: Path, faces: np.ndarray) -> np.ndarray:
    present = faces.dtype.names or ()
    names = [name for name in _FACE_LISTS if name in present]
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
