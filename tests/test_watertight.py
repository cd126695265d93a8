# SPDX-License-Identifier: Apache-2.0
"""Closed meshes: what is open is counted, covered, and absent where closed ones are asked for."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from sugar_extractors.mesh.extraction import extract_coarse_mesh
from sugar_extractors.mesh.fusion.tsdf import TsdfConfig
from sugar_extractors.mesh.meshing_backends import PoissonConfig
from sugar_scene.triangle_mesh import (
    Topology,
    TriangleMesh,
    doubled_area_normals,
    read_mesh_ply,
    topology,
    with_holes_filled,
)
from tests.support.extractions import brief_extraction
from tests.support.mesh_scenes import (
    cameras_around,
    icosahedron,
    sphere_cloud,
    write_mesh_scene,
)


def facing_outward(mesh: TriangleMesh) -> np.ndarray:
    """Which faces of a mesh around the origin are turned outward. (F,) bool"""
    centers = mesh.vertices[mesh.faces].mean(axis=1)
    return (doubled_area_normals(mesh.vertices, mesh.faces) * centers).sum(axis=1) > 0


def outward(mesh: TriangleMesh) -> TriangleMesh:
    """The mesh with all faces turned outward."""
    right = facing_outward(mesh)[:, None]
    return replace(mesh, faces=np.where(right, mesh.faces, mesh.faces[:, ::-1]))


@pytest.mark.parametrize(
    "extractor", ["tsdf", pytest.param("tetrahedra", marks=pytest.mark.slow), "poisson"]
)
def test_a_watertight_mesh_is_closed_where_nobody_looked(tmp_path, extractor):
    above = [camera for camera in cameras_around() if camera.center[2] > 0]
    made = write_mesh_scene(tmp_path / "scene", sphere_cloud(), above)
    asked = brief_extraction(
        made,
        tmp_path / "meshes",
        surface_points=20_000,
        poisson=PoissonConfig(poisson_depth=5),
        mesh_extractor=extractor,
        background_mesh=False,
        tsdf=TsdfConfig(tsdf_voxel_size=0.06),
    )
    (path,) = extract_coarse_mesh(asked)
    assert topology(read_mesh_ply(path)).holes > 0
    path.unlink()
    (path,) = extract_coarse_mesh(replace(asked, watertight=True, overwrite=True))
    closed = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    assert closed["settings"]["watertight"] is True
    assert closed["result"]["open_edge_share"] == 0
    assert closed["result"]["components"] == 1
    mesh = read_mesh_ply(path)
    assert topology(mesh).holes == 0 == closed["result"]["holes"]
    assert facing_outward(mesh).mean() > 0.9


def test_holes_are_covered_in_the_sense_of_the_faces_around():
    ball = outward(icosahedron())
    torn = replace(ball, faces=ball.faces[3:])
    filled = with_holes_filled(torn)
    assert topology(filled).open_edge_share == 0
    assert facing_outward(filled).all()
    assert with_holes_filled(ball) is ball


def test_open_and_crowded_edges_parts_and_holes_are_counted():
    corners = np.array(
        [[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [5, 0, 0], [6, 0, 0], [5, 1, 0]]
    )
    faces = np.array([[0, 1, 2], [0, 2, 3], [4, 5, 6]])
    mesh = TriangleMesh(corners.astype(float), faces, np.zeros((7, 3), np.uint8))
    found = topology(mesh)
    assert found == Topology(7 / 8, 0.0, components=2, holes=2)
    crowded = np.concatenate([faces, [[0, 2, 4]]])
    assert topology(replace(mesh, faces=crowded)).non_manifold_edge_share == pytest.approx(1 / 10)
    assert topology(replace(mesh, faces=faces[:0])) == Topology(0.0, 0.0, 0, 0)
    box = icosahedron()
    assert topology(box) == Topology(0.0, 0.0, components=1, holes=0)
    assert topology(replace(box, faces=box.faces[1:])).holes == 1
