# SPDX-License-Identifier: Apache-2.0
"""Placed exports of all formats lie in one world, the one that their matrix leads to."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import trimesh
from PIL import Image
from plyfile import PlyData
from scipy.spatial import cKDTree

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.moved import moved_cloud
from gaussian_splatting.data.cameras import up_direction
from gaussian_splatting.formats.fidelity import fidelity
from gaussian_splatting.formats.packing import Columns, cloud_of
from gaussian_splatting.formats.ply import write_gaussian_ply
from gaussian_splatting.formats.splat_file import read_splat
from sugar_extractors.export.gltf_gaussians import read_gltf_gaussians
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh, write_textured_mesh
from tests.support.random_scenes import random_gaussians
from tests.support.refined_models import refined_state, save_model
from tests.support.tiny_scene import (
    TinyScene,
    make_tiny_checkpoint,
    make_tiny_scene,
    refusal,
    run_cli,
)
from tests.support.verbs import export
from tests.test_moved_cloud import moved_camera, similarity

PLACES = [("none", "--scale_factor", 2), ("up", "--orient", "up", "--scale_factor", 2)]


@dataclass(frozen=True)
class Inputs:
    """A capture, Gaussians of it and a mesh of it."""

    scene: TinyScene
    cloud: GaussianCloud
    ply: Path
    obj: Path
    mesh: TexturedMesh

    @property
    def up(self) -> np.ndarray:
        rotations = np.stack([camera.rotation for camera in self.scene.cameras])
        return up_direction(rotations, self.scene.points)


def four_colored_faces() -> TexturedMesh:
    """A tetrahedron; each face has the colour of one quarter of the picture."""
    corners = torch.tensor([[0.0, 0, 0], [1, 0.1, 0], [0.2, 1.3, 0], [0.1, 0, 1.9]])
    faces = torch.tensor([[0, 2, 1], [0, 1, 3], [0, 3, 2], [1, 2, 3]])
    middles = torch.tensor([[0.25, 0.25], [0.75, 0.25], [0.25, 0.75], [0.75, 0.75]])
    uvs = middles[:, None] + torch.tensor([[-0.1, -0.1], [0.1, -0.1], [0.0, 0.1]])
    quarters = torch.tensor([[[200, 30, 40], [20, 190, 60]], [[10, 60, 220], [230, 220, 30]]])
    picture = quarters.repeat_interleave(64, 0).repeat_interleave(64, 1).byte()
    return TexturedMesh(corners, faces, uvs, picture)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Inputs:
    root = tmp_path_factory.mktemp("placed")
    scene, mesh = make_tiny_scene(root / "scene"), four_colored_faces()
    write_textured_mesh(root / "mesh.obj", mesh, glb=False)
    drawn = random_gaussians(150, 3, torch.float32)
    cloud = GaussianCloud(
        means=drawn.means,
        sh_dc=drawn.sh_dc,
        sh_rest=drawn.sh_rest,
        opacity_logits=torch.logit(drawn.opacities.reshape(-1, 1)),
        log_scales=drawn.scales.log(),
        quats=drawn.quats,
    )
    write_gaussian_ply(root / "cloud.ply", cloud)
    return Inputs(scene, cloud, root / "cloud.ply", root / "mesh.obj", mesh)


def exported(inputs: Inputs, source: Path, to: str, target: Path, words: tuple) -> np.ndarray:
    """The matrix that the export notes."""
    words = ("--to", to, "-o", target, "-s", inputs.scene.root, *words)
    assert run_cli(export.main, source, *words) == 0
    return np.array(json.loads(target.with_name(f"{target.name}.json").read_text())["matrix"])


def plain_ply(path: Path) -> GaussianCloud:
    """By plyfile alone."""
    rows = PlyData.read(str(path))["vertex"].data

    def table(*names: str) -> torch.Tensor:
        return torch.tensor(np.stack([rows[name] for name in names], axis=1))

    rest = table(*(f"f_rest_{k}" for k in range(45))).reshape(-1, 3, 15).transpose(1, 2)
    return GaussianCloud(
        means=table("x", "y", "z"),
        sh_dc=table("f_dc_0", "f_dc_1", "f_dc_2")[:, None],
        sh_rest=rest,
        opacity_logits=table("opacity"),
        log_scales=table("scale_0", "scale_1", "scale_2"),
        quats=table("rot_0", "rot_1", "rot_2", "rot_3"),
    )


def plain_spz(path: Path) -> GaussianCloud:
    """Bytes as Niantic's description has them, by the package gsply where it is installed."""
    try:
        import gsply
    except ImportError:
        return _spz_bytes(gzip.decompress(path.read_bytes()))
    found = gsply.read_spz(path)
    return GaussianCloud(
        means=torch.tensor(found.means),
        sh_dc=torch.tensor(found.sh0)[:, None],
        sh_rest=torch.tensor(found.shN).reshape(-1, 15, 3),
        opacity_logits=torch.tensor(found.opacities).reshape(-1, 1).clamp(-8, 8),
        log_scales=torch.tensor(found.scales),
        quats=torch.tensor(found.quats),
    )


def _spz_bytes(content: bytes) -> GaussianCloud:
    n, bits = int.from_bytes(content[8:12], "little"), content[13]
    data, columns = np.frombuffer(content, np.uint8, offset=16), []
    for width in (9, 1, 3, 3, 4, 45):
        columns.append(data[: n * width].reshape(n, width))
        data = data[n * width :]
    places, alphas, colors, scales, rotations, harmonics = columns
    signed = np.pad(places.reshape(n, 3, 3), ((0, 0), (0, 0), (1, 0))).copy()
    means = signed.view("<i4")[..., 0] / 256.0 / (1 << bits)
    quats = np.zeros((n, 4))
    for row, packed in enumerate(np.ascontiguousarray(rotations).view("<u4")[:, 0]):
        largest, others = int(packed) >> 30, []
        for shift in (20, 10, 0):
            part = int(packed) >> shift & 0x3FF
            others.append((-1 if part >> 9 else 1) * (part & 511) / 511 / 2**0.5)
        others.insert(largest, max(0.0, 1 - sum(value**2 for value in others)) ** 0.5)
        quats[row] = others
    rest = (harmonics.astype(float) - 128).reshape(n, 15, 3) / 128
    dc = (colors / 255 - 0.5) / 0.15
    turned = quats[:, [3, 0, 1, 2]]
    values = Columns(means, turned, scales / 16 - 10, alphas[:, 0] / 255, dc, rest)
    return cloud_of(Path(), values, pytest.fail)


def plain_gltf(path: Path) -> GaussianCloud:
    """Positions are checked by trimesh."""
    found = read_gltf_gaussians(path)
    (points,) = trimesh.load(path).geometry.values()
    np.testing.assert_allclose(points.vertices, found.means.numpy(), atol=1e-6)
    return found


GAUSSIANS = {
    # Largest errors of position, size, rotation, colour and view-dependent colour.
    "ply": (plain_ply, (1e-5, 1e-4, 0.1, 0.01, 1e-5)),
    "spz": (plain_spz, (1e-5, 0.04, 0.5, 8.0, 0.05)),
    "splat": (read_splat, (1e-5, 1e-4, 1.0, 0.6, None)),
    "gltf": (plain_gltf, (1e-5, 1e-4, 0.1, 0.01, 1e-5)),
}
Y_UP = ("spz", "gltf", "glb", "usdz")
"""Formats whose description says that y is up."""


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[0])
@pytest.mark.parametrize("to", GAUSSIANS)
def test_placed_gaussians_of_all_formats_lie_in_one_world(to, place, inputs, tmp_path):
    read, (position, size, rotation, color, harmonics) = GAUSSIANS[to]
    target = tmp_path / ("a.glb" if to == "gltf" else f"a.{to}")
    matrix = exported(inputs, inputs.ply, to, target, place[1:])
    check_world(
        matrix,
        exported(inputs, inputs.ply, "ply", tmp_path / "b.ply", place[1:]),
        to,
        place[0],
        inputs.up,
    )
    found, expected = read(target), moved_cloud(inputs.cloud, matrix)
    distances, rows = cKDTree(found.means.numpy()).query(expected.means.numpy())
    assert distances.max() < max(position, 1e-4)
    assert sorted(rows) == list(range(len(expected)))
    errors = fidelity(expected, found.select(torch.from_numpy(rows)))
    assert errors.position < position
    assert errors.scale < size
    assert errors.rotation < rotation
    assert errors.color < color
    assert harmonics is None or errors.harmonics < harmonics


def check_world(
    matrix: np.ndarray, reference: np.ndarray, to: str, place: str, up: np.ndarray
) -> None:
    """Placed upright all formats agree; otherwise those with y up are a half turn away."""
    turn = np.diag([1.0, -1.0, -1.0, 1.0]) if place == "none" and to in Y_UP else np.eye(4)
    np.testing.assert_allclose(matrix, turn @ reference, atol=1e-9)
    if place == "up":
        np.testing.assert_allclose(matrix[:3, :3] @ up, [0, 2, 0], atol=1e-6)


def plain_mesh(path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """Corners and colours of triangles as trimesh or the format's own library reads them."""
    if path.suffix == ".usdz":
        return usdz_mesh(path)
    if path.suffix == ".3mf":
        lib3mf = pytest.importorskip("lib3mf")
        model = lib3mf.Wrapper().CreateModel()
        model.QueryReader("3mf").ReadFromFile(str(path))
        found = model.GetMeshObjects()
        assert found.MoveNext()
        body = found.GetCurrentMeshObject()
        points = np.array([tuple(p.Coordinates) for p in body.GetVertices()])
        return points[[tuple(t.Indices) for t in body.GetTriangleIndices()]], None
    mesh = trimesh.load(path, force="mesh", process=False)
    if path.suffix == ".stl":
        return mesh.vertices[mesh.faces], None
    material = mesh.visual.material
    picture = material.image if path.suffix == ".obj" else material.baseColorTexture
    return mesh.vertices[mesh.faces], sampled(picture, mesh.visual.uv[mesh.faces])


def usdz_mesh(path: Path) -> tuple[np.ndarray, np.ndarray]:
    pytest.importorskip("pxr")
    from pxr import Usd, UsdGeom

    stage = Usd.Stage.Open(str(path))
    shape = UsdGeom.Mesh(stage.GetPrimAtPath("/Scan/Mesh"))
    faces = np.array(shape.GetFaceVertexIndicesAttr().Get()).reshape(-1, 3)
    uvs = np.array(UsdGeom.PrimvarsAPI(shape).GetPrimvar("st").Get()).reshape(-1, 3, 2)
    with zipfile.ZipFile(path) as package:
        (name,) = (name for name in package.namelist() if name.endswith(".png"))
        picture = Image.open(io.BytesIO(package.read(name)))
    return np.array(shape.GetPointsAttr().Get())[faces], sampled(picture, uvs)


def sampled(picture: Image.Image, uvs: np.ndarray) -> np.ndarray:
    """Colour at the middle of each triangle. (F, 3)"""
    pixels = np.asarray(picture.convert("RGB"))
    u, v = uvs.mean(axis=1).T
    side = len(pixels)
    return pixels[((1 - v) * side).astype(int), (u * side).astype(int)]


MESHES = ("glb", "obj", "usdz", "stl", "3mf")


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[0])
@pytest.mark.parametrize("to", MESHES)
def test_placed_meshes_of_all_formats_lie_in_one_world(to, place, inputs, tmp_path):
    if to == "usdz":
        pytest.importorskip("pxr")
    target = tmp_path / f"a.{to}"
    matrix = exported(inputs, inputs.obj, to, target, place[1:])
    corners, colors = plain_mesh(target)
    reference = exported(inputs, inputs.obj, "obj", tmp_path / "b.obj", place[1:])
    if to in ("stl", "3mf"):
        # Millimetres; what is upright has z up, by convention of printers.
        up = [0, 0, 2000] if place[0] == "up" else 2000 * inputs.up
        np.testing.assert_allclose(matrix[:3, :3] @ inputs.up, up, atol=1e-3)
    else:
        check_world(matrix, reference, to, place[0], inputs.up)
    source = inputs.mesh.vertices[inputs.mesh.faces].numpy()
    expected = (source @ matrix[:3, :3].T + matrix[:3, 3]).mean(axis=1)
    distances, rows = cKDTree(corners.mean(axis=1)).query(expected)
    assert distances.max() < 1e-5 * np.abs(expected).max()
    assert sorted(rows) == [0, 1, 2, 3]
    if colors is not None:
        picture = Image.fromarray(inputs.mesh.texture.numpy())
        np.testing.assert_array_equal(colors[rows], sampled(picture, inputs.mesh.uvs.numpy()))


@pytest.mark.parametrize("named", [True, False], ids=["named", "recorded"])
@pytest.mark.parametrize("to", ["ply", "obj"])
def test_results_in_the_world_of_a_checkpoint_stand_upright(to, named, inputs, tmp_path):
    """The checkpoint's cameras and its results have been moved, the scene's own model has not."""
    move = similarity(4, 1.5)
    moved = [moved_camera(camera, move) for camera in inputs.scene.cameras]
    checkpoint = make_tiny_checkpoint(tmp_path / "vanilla", replace(inputs.scene, cameras=moved))
    words = ["--to", to, "-o", tmp_path / f"a.{to}", "--orient", "up"]
    names = [camera.name for camera in moved[:2]]
    words += ["--known_distance", *names, 3]
    folder = tmp_path / "run"
    folder.mkdir()
    if to == "obj":
        source = folder / "mesh.obj"
        write_textured_mesh(source, inputs.mesh, glb=False)
    else:
        source = save_model(tmp_path, refined_state(), "run")
    if named:
        words += ["-s", inputs.scene.root, "-c", checkpoint]
    else:
        sources = {"scene": str(inputs.scene.root), "checkpoint": str(checkpoint)}
        record = folder / ("mesh.json" if to == "obj" else "run.json")
        record.write_text(json.dumps({"sources": sources}))
    assert run_cli(export.main, source, *words) == 0
    matrix = np.array(json.loads((tmp_path / f"a.{to}.json").read_text())["matrix"])
    scale = 3 / np.linalg.norm(moved[0].center - moved[1].center)
    up = move[:3, :3] @ inputs.up / 1.5
    np.testing.assert_allclose(matrix[:3, :3] @ up, [0, scale, 0], atol=1e-6)


FAR_APART = ("1e308,0,0", "0,0,0", 1.5)


@pytest.mark.parametrize("to", ["ply", "spz", "gltf", "obj", "glb", "stl"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--known_distance", *FAR_APART),
            "--known_distance 1e308,0,0 0,0,0 1.5: makes it 0 times",
        ),
        (("--known_distance", "-1e308,0,0", *FAR_APART[::2]), "makes it 0 times"),
        (("--known_distance", "1e-320,0,0", "0,0,0", 1.5), "makes it inf times|same place"),
        (("--scale_factor", "1e39"), "--scale_factor 1e+39: makes it 1e+39 times"),
        (("--scale_factor", "1e-7"), "must be 1e-06 to 1e+06 times"),
        (("--known_distance", ",,", "0,0,0", 1), "need -s/--scene_path"),
        (("--known_distance", "0,0,x", "0,0,0", 1), "need -s/--scene_path"),
    ],
)
def test_a_scale_that_no_file_can_hold_is_one_line(to, words, message, inputs, tmp_path, capsys):
    source = inputs.obj if to in MESHES else inputs.ply
    words = ("--to", to, "-o", tmp_path / f"a.{'glb' if to == 'gltf' else to}", *words)
    error = refusal(capsys, export.main, source, *words)
    assert any(part in error for part in message.split("|"))
    assert not list(tmp_path.iterdir())


def test_a_point_that_is_none_is_named_where_there_are_cameras(inputs, tmp_path, capsys):
    words = ("--to", "ply", "-o", tmp_path / "a.ply", "-s", inputs.scene.root)
    assert "--known_distance ,,: neither a registered photograph" in refusal(
        capsys, export.main, inputs.ply, *words, "--known_distance", ",,", "0,0,0", 1
    )


def test_a_copy_that_would_reach_beyond_what_files_hold_is_refused(inputs, tmp_path, capsys):
    far = replace(inputs.mesh, vertices=inputs.mesh.vertices * 1e36)
    write_textured_mesh(tmp_path / "far.obj", far, glb=False)
    before = sorted(tmp_path.iterdir())
    words = ("--to", "glb", "-o", tmp_path / "a.glb", "--scale_factor", 1000)
    assert "units far; choose a smaller scale" in refusal(
        capsys, export.main, tmp_path / "far.obj", *words
    )
    assert sorted(tmp_path.iterdir()) == before
