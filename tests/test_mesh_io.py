# SPDX-License-Identifier: Apache-2.0
"""Mesh files and the clean-up of meshes."""

from __future__ import annotations

import numpy as np
import pytest
from plyfile import PlyData, PlyElement

from sugar_scene.triangle_mesh import (
    TriangleMesh,
    clean_mesh,
    edge_keys,
    keep_vertices,
    merge_meshes,
    open_edge_share,
    read_mesh_ply,
    with_vertex_normals,
    without_unused_vertices,
    write_mesh_ply,
)
from sugar_utils.errors import UserError


def tetrahedron() -> TriangleMesh:
    vertices = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1.0]]) + 1 / 3
    faces = np.array([[0, 2, 1], [0, 1, 3], [1, 2, 3], [2, 0, 3]])
    return TriangleMesh(vertices, faces, np.arange(12, dtype=np.uint8).reshape(4, 3))


def write(path, vertex, face=None, text=False):
    elements = [PlyElement.describe(vertex, "vertex")]
    if face is not None:
        elements.append(PlyElement.describe(face, "face"))
    PlyData(elements, text=text).write(str(path))


def test_files_have_the_expected_header_and_come_back_exactly(tmp_path):
    mesh, path = with_vertex_normals(tetrahedron()), tmp_path / "a b" / "mesh.ply"
    write_mesh_ply(path, tetrahedron())
    header = path.read_bytes().split(b"end_header")[0].decode().splitlines()
    assert header == [
        "ply",
        "format binary_little_endian 1.0",
        "element vertex 4",
        *(f"property double {name}" for name in ("x", "y", "z", "nx", "ny", "nz")),
        *(f"property uchar {name}" for name in ("red", "green", "blue")),
        "element face 4",
        "property list uchar uint vertex_indices",
    ]
    again = read_mesh_ply(path)
    for name in ("vertices", "faces", "colors", "normals"):
        assert np.array_equal(getattr(again, name), getattr(mesh, name))
    independent = PlyData.read(str(path))
    assert [list(row) for row in independent["face"]["vertex_indices"]] == mesh.faces.tolist()


def test_meshes_without_faces_can_be_written_and_read(tmp_path):
    mesh = keep_vertices(tetrahedron(), np.zeros(4, bool))
    write_mesh_ply(tmp_path / "mesh.ply", mesh)
    assert read_mesh_ply(tmp_path / "mesh.ply").n_faces == 0


@pytest.mark.parametrize("text", [False, True])
def test_float_positions_polygons_and_missing_colours_are_read(tmp_path, text):
    vertex = np.array(
        [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0)], dtype=[(n, "f4") for n in "xyz"]
    )
    face = np.empty(2, dtype=[("vertex_index", "O")])
    face["vertex_index"] = [np.array([0, 1, 2, 3], "i4"), np.array([3, 2, 1], "i4")]
    write(tmp_path / "quad.ply", vertex, face, text)
    mesh = read_mesh_ply(tmp_path / "quad.ply")
    assert mesh.faces.tolist() == [[0, 1, 2], [0, 2, 3], [3, 2, 1]]
    assert (mesh.colors == 128).all()
    assert mesh.normals is None


def test_damaged_files_are_user_errors(tmp_path):
    path = tmp_path / "mesh.ply"
    with pytest.raises(UserError, match="no such file"):
        read_mesh_ply(path)
    write_mesh_ply(path, tetrahedron())
    whole = path.read_bytes()
    for cut in (10, 200, len(whole) - 60, len(whole) - 5):
        path.write_bytes(whole[:cut])
        with pytest.raises(UserError):
            read_mesh_ply(path)
    path.write_bytes(whole[:-4] + b"\xff\xff\xff\x7f")
    with pytest.raises(UserError, match="vertex that is not there"):
        read_mesh_ply(path)
    vertex = np.array([(0, 0, np.nan)], dtype=[(n, "f4") for n in "xyz"])
    write(path, vertex)
    with pytest.raises(UserError, match="'face'"):
        read_mesh_ply(path)


def test_places_that_float32_cannot_hold_are_refused(tmp_path):
    vertex = np.zeros(3, dtype=[(axis, "f8") for axis in "xyz"])
    vertex["x"] = (0, 1, 1e300)
    face = np.array([([0, 1, 2],)], dtype=[("vertex_indices", "i4", (3,))])
    elements = [PlyElement.describe(vertex, "vertex"), PlyElement.describe(face, "face")]
    PlyData(elements).write(str(tmp_path / "a.ply"))
    with pytest.raises(UserError, match="a.ply: has vertices with NaN or infinity"):
        read_mesh_ply(tmp_path / "a.ply")


def test_cleaning_removes_duplicates_degenerates_and_crowded_edges():
    mesh = tetrahedron()
    doubled = merge_meshes([mesh, mesh])
    assert clean_mesh(doubled).faces.tolist() == mesh.faces.tolist()
    degenerate = TriangleMesh(
        mesh.vertices, np.concatenate([mesh.faces, [[0, 0, 1], [1, 3, 0]]]), mesh.colors
    )
    assert clean_mesh(degenerate).faces.tolist() == mesh.faces.tolist()
    vertices = np.concatenate([mesh.vertices, [[0.4, 0.4, 0.2]]])
    fin = TriangleMesh(
        vertices, np.concatenate([mesh.faces, [[0, 1, 4]]]), np.zeros((5, 3), np.uint8)
    )
    cleaned = clean_mesh(fin)
    assert cleaned.faces.tolist() == mesh.faces.tolist()
    assert open_edge_share(cleaned) == 0
    assert without_unused_vertices(cleaned).n_vertices == 4


def test_no_edge_keeps_more_than_two_faces():
    rng = np.random.default_rng(0)
    mesh = TriangleMesh(
        rng.normal(size=(12, 3)), rng.integers(0, 12, (200, 3)), np.zeros((12, 3), np.uint8)
    )
    cleaned = clean_mesh(mesh)
    assert 0 < cleaned.n_faces < 100
    assert np.unique(edge_keys(cleaned.faces), return_counts=True)[1].max() <= 2


def test_vertex_normals_point_outward():
    mesh = with_vertex_normals(tetrahedron())
    center = mesh.vertices.mean(axis=0)
    assert ((mesh.vertices - center) * mesh.normals).sum(axis=1).min() > 0
    np.testing.assert_allclose(np.linalg.norm(mesh.normals, axis=1), 1)


def test_lack_of_memory_is_not_blamed_on_the_file(tmp_path, monkeypatch):
    path = tmp_path / "mesh.ply"
    write_mesh_ply(path, tetrahedron())

    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr("sugar_scene.triangle_mesh.PlyData.read", fail)
    with pytest.raises(UserError, match="out of memory reading its .*; close other") as caught:
        read_mesh_ply(path)
    assert "damaged" not in str(caught.value)


def test_header_that_asks_for_the_impossible_is_a_damaged_file(tmp_path):
    path = tmp_path / "mesh.ply"
    write_mesh_ply(path, tetrahedron())
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"element vertex 4", b"element vertex 999999999999999999"))
    with pytest.raises(UserError, match="damaged"):
        read_mesh_ply(path)
