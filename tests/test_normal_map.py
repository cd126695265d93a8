# SPDX-License-Identifier: Apache-2.0
"""Normal maps: detail of a fine mesh on a coarse one, as other programs read it."""

from __future__ import annotations

import io
import json
import struct

import numpy as np
import pytest
import torch
import trimesh
from PIL import Image
from torch.nn.functional import normalize

from sugar_extractors.texture.mesh_reduction import simplified
from sugar_scene.mesh_files.tangent_space import corner_tangents, vertex_normals
from sugar_scene.mesh_files.textured_mesh_io import (
    TexturedMesh,
    read_textured_mesh,
    write_textured_mesh,
)
from tests.support.random_scenes import look_at
from tests.support.shaded_normals import render_normals
from tests.support.tiny_scene import refusal, run_cli
from tests.support.verbs import export


@pytest.fixture(scope="module")
def fine() -> TexturedMesh:
    """A ball with shallow waves of which a coarse mesh keeps nothing."""
    ball = trimesh.creation.icosphere(subdivisions=5)
    points = ball.vertices * (1 + 0.01 * np.sin(20 * ball.vertices).sum(axis=1, keepdims=True))
    uvs = torch.rand(len(ball.faces), 3, 2, generator=torch.Generator().manual_seed(0))
    grey = torch.full((512, 512, 3), 128, dtype=torch.uint8)
    vertices = torch.from_numpy(points.astype(np.float32))
    return TexturedMesh(vertices, torch.from_numpy(ball.faces.astype(np.int64)), uvs, grey)


VIEW = look_at((1.5, -1.2, 2.2), width=160, height=160, focal=200.0, name="a")


def degrees_between(one: TexturedMesh, other: TexturedMesh) -> torch.Tensor:
    (normals, covered), (others, behind) = (render_normals(mesh, VIEW) for mesh in (one, other))
    both = covered & behind
    cosines = (normals[both] * others[both]).sum(dim=1).clamp(-1, 1)
    return torch.rad2deg(cosines.acos())


@pytest.mark.slow
def test_a_coarse_mesh_with_the_map_is_shaded_like_the_fine_one(fine):
    coarse = simplified(fine, 500, 512, normal_map=True)
    assert coarse.n_faces <= 500
    without = TexturedMesh(*(getattr(coarse, n) for n in ("vertices", "faces", "uvs", "texture")))
    assert float(degrees_between(fine, without).median()) > 2
    assert float(degrees_between(fine, coarse).median()) < 1


def test_tangents_are_perpendicular_and_follow_u():
    vertices = torch.tensor([[0.0, 0, 0], [2, 0, 0], [0, 3, 0], [2, 3, 1]])
    faces = torch.tensor([[0, 1, 2], [1, 3, 2]])
    upright = torch.tensor([[[0.0, 0], [1, 0], [0, 1]], [[1, 0], [1, 1], [0, 1]]])
    normals = vertex_normals(vertices, faces)
    tangents = corner_tangents(vertices, faces, upright, normals)
    assert (tangents[..., :3] * normals[faces]).sum(dim=2).abs().max() < 1e-6
    torch.testing.assert_close(tangents[0, 0], torch.tensor([1.0, 0, 0, 1]), atol=0.2, rtol=0)
    # A mirrored picture: u runs the other way, and the bitangent still upwards.
    mirrored = corner_tangents(vertices, faces, upright * torch.tensor([-1.0, 1.0]), normals)
    torch.testing.assert_close(mirrored[..., :3], -tangents[..., :3])
    assert (mirrored[..., 3] == -1).all()


@pytest.fixture(scope="module")
def written(fine, tmp_path_factory):
    root = tmp_path_factory.mktemp("normals")
    write_textured_mesh(root / "ball.obj", fine, glb=False)
    for to in ("glb", "obj"):
        words = ("--to", to, "-o", root / f"small.{to}", "--max_triangles", 1500)
        assert run_cli(export.main, root / "ball.obj", *words, "--normal_map", "True") == 0
    return root


@pytest.mark.slow
def test_a_glb_is_shaded_by_another_program_as_the_format_says(fine, written):
    """Decoded from trimesh's arrays and the equations of the glTF specification."""
    data = (written / "small.glb").read_bytes()
    head = json.loads(data[20 : 20 + struct.unpack_from("<I", data, 12)[0]])
    assert "extensionsUsed" not in head
    primitive = head["meshes"][0]["primitives"][0]
    start = 28 + struct.unpack_from("<I", data, 12)[0]

    def column(accessor: int, kind: str) -> np.ndarray:
        view = head["bufferViews"][head["accessors"][accessor]["bufferView"]]
        assert view["byteOffset"] % 4 == 0
        count = view["byteLength"] // int(kind[2])
        return np.frombuffer(data, kind, count, start + view["byteOffset"])

    assert head["accessors"][primitive["indices"]]["componentType"] == 5123
    corners = column(primitive["indices"], "<u2")

    def numbers(name: str, width: int) -> np.ndarray:
        """Values at the corners of the faces. (F, 3, width)"""
        values = column(primitive["attributes"][name], "<f4").reshape(-1, width)
        return values[corners].reshape(-1, 3, width)

    uvs, normals, tangents = (
        numbers(*which).mean(axis=1) for which in (("TEXCOORD_0", 2), ("NORMAL", 3), ("TANGENT", 4))
    )
    loaded = next(iter(trimesh.load(written / "small.glb").geometry.values()))
    picture = np.asarray(loaded.visual.material.normalTexture.convert("RGB")) / 127.5 - 1
    side = len(picture)
    own = picture[(uvs[:, 1] * side).astype(int), (uvs[:, 0] * side).astype(int)]
    at_vertices = column(primitive["attributes"]["TANGENT"], "<f4").reshape(-1, 4)
    np.testing.assert_allclose(np.linalg.norm(at_vertices[:, :3], axis=1), 1, atol=1e-5)
    assert (np.abs(at_vertices[:, 3]) == 1).all()
    # Corners are shared wherever charts go on.
    assert len(at_vertices) < len(corners) / 2
    bitangents = np.cross(normals, tangents[:, :3]) * np.sign(tangents[:, 3:])
    shaded = own[:, :1] * tangents[:, :3] + own[:, 1:2] * bitangents + own[:, 2:] * normals
    centers = numbers("POSITION", 3).mean(axis=1) * (1, -1, -1)
    places = torch.from_numpy(centers / np.linalg.norm(centers, axis=1, keepdims=True)).float()
    nearest = torch.cdist(places, normalize(fine.vertices, dim=1)).argmin(dim=1)
    expected = vertex_normals(fine.vertices, fine.faces)[nearest].numpy() * (1, -1, -1)
    shaded /= np.linalg.norm(shaded, axis=1, keepdims=True)
    degrees = np.rad2deg(np.arccos(np.clip((shaded * expected).sum(axis=1), -1, 1)))
    assert np.median(degrees) < 2


def test_an_obj_names_the_map_and_has_normals(written):
    lines = (written / "small.mtl").read_text().splitlines()
    assert lines == [
        "newmtl mesh",
        "map_Kd small.png",
        "map_Bump small_normals.png",
        "norm small_normals.png",
    ]
    with Image.open(written / "small_normals.png") as image:
        assert np.asarray(image)[..., 2].mean() > 200
    again = read_textured_mesh(written / "small.obj")
    loaded = trimesh.load(io.BytesIO((written / "small.obj").read_bytes()), file_type="obj")
    assert again.n_faces == len(loaded.faces) <= 1500
    expected = vertex_normals(again.vertices, again.faces)
    found = torch.tensor(np.array(loaded.vertex_normals), dtype=torch.float32)
    assert found.shape[0] >= expected.shape[0]


def test_a_map_without_fewer_triangles_is_refused(written, capsys):
    words = ("--to", "glb", "-o", written / "x.glb", "--normal_map", "True")
    assert "--normal_map needs --max_triangles" in refusal(
        capsys, export.main, written / "ball.obj", *words
    )
