# SPDX-License-Identifier: Apache-2.0
"""Exports open, stand where it was asked for, and edited meshes take their Gaussians along."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import trimesh
from scipy.spatial.transform import Rotation

from gaussian_splatting.core.moved import moved_cloud
from gaussian_splatting.formats.ply import read_gaussian_ply
from sugar_extractors.export.gltf_gaussians import read_gltf_gaussians
from sugar_extractors.export.reading import (
    read_as_written,
    read_bound_gaussians,
    read_gaussians_in_scene,
)
from sugar_extractors.export.reposing import reposed
from sugar_extractors.texture.mesh_reduction import simplified
from sugar_scene.bound_model import bound_cloud_from_state
from sugar_scene.mesh_bound import BoundCloud
from sugar_scene.mesh_files.printable_meshes import BASE_THICKNESS
from sugar_scene.mesh_files.textured_mesh_io import (
    TexturedMesh,
    render_textured,
    write_textured_mesh,
)
from sugar_utils.errors import UserError
from sugar_viewer.shown_models import open_model
from tests.support.bound_reference import to_gaussians
from tests.support.random_scenes import look_at
from tests.support.reference_rasterizer import rasterize_reference
from tests.support.refined_models import NAME, refined_state, save_model
from tests.support.tiny_scene import make_tiny_checkpoint, make_tiny_scene, refusal, run_cli
from tests.support.verbs import export
from tests.test_moved_cloud import VIEW, moved_camera, similarity


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict:
    root = tmp_path_factory.mktemp("export")
    scene = make_tiny_scene(root / "scene")
    cloud = bound_cloud_from_state(refined_state())
    mesh = TexturedMesh(
        cloud.vertices, cloud.faces, torch.rand(20, 3, 2), torch.full((8, 8, 3), 90).byte()
    )
    write_textured_mesh(root / f"{NAME}.obj", mesh)
    return {
        "scene": scene,
        "vanilla": make_tiny_checkpoint(root / "vanilla", scene),
        "refined": save_model(root, refined_state()),
        "obj": root / f"{NAME}.obj",
    }


def bound(seed: int = 0) -> BoundCloud:
    """Bound Gaussians of all sizes, turns and colours, in double precision."""
    rng = torch.Generator().manual_seed(seed)
    cloud = bound_cloud_from_state(refined_state(opacity=0.5))
    changed = {
        name: torch.randn(getattr(cloud, name).shape, generator=rng).double()
        for name in ("sh_dc", "sh_rest", "rotations")
    }
    sizes = cloud.log_scales.double() + 0.3 * torch.randn(cloud.log_scales.shape, generator=rng)
    return replace(
        cloud,
        vertices=cloud.vertices.double(),
        opacity_logits=cloud.opacity_logits.double(),
        thickness=torch.tensor(0.01).double(),
        log_scales=sizes,
        sh_dc=0.2 * changed["sh_dc"],
        sh_rest=0.2 * changed["sh_rest"],
        rotations=changed["rotations"],
    )


def moved(points: torch.Tensor, matrix: np.ndarray) -> torch.Tensor:
    return points @ torch.from_numpy(matrix[:3, :3]).T + torch.from_numpy(matrix[:3, 3])


@pytest.mark.parametrize("to", ["spz", "splat", "ply", "gltf.glb"])
def test_gaussians_of_any_stage_are_written_and_their_errors_told(to, inputs, tmp_path, capsys):
    for name, n in (("vanilla", 200), ("refined", 60)):
        target = tmp_path / f"{name}.{to}"
        words = (inputs[name], "--to", to.removesuffix(".glb"), "-o", target)
        assert run_cli(export.main, *words) == 0
        told = capsys.readouterr().out
        assert f"{n} Gaussians; largest errors: position" in told
        assert len(read_gaussians_in_scene(target, lambda _: None)) == n
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"refined.{to}", f"vanilla.{to}"]


def test_names_follow_from_the_result(inputs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_cli(export.main, inputs["refined"], "--to", "spz") == 0
    assert run_cli(export.main, inputs["obj"], "--to", "glb") == 0
    names = sorted(path.name for path in (tmp_path / "output" / "exports").iterdir())
    assert names == [f"{NAME}.glb", f"{NAME}.spz"]


def test_a_mesh_stands_upright_in_metres_with_its_matrix(inputs, tmp_path):
    names = [camera.name for camera in inputs["scene"].cameras[:2]]
    words = ("-s", inputs["scene"].root, "--orient", "up", "--known_distance", *names, 2)
    for to in ("glb", "obj"):
        target = tmp_path / f"a.{to}"
        assert run_cli(export.main, inputs["obj"], "--to", to, "-o", target, *words) == 0
        matrix = np.array(json.loads((tmp_path / f"a.{to}.json").read_text())["matrix"])
        loaded = trimesh.load(target, force="mesh", process=False)
        assert loaded.vertices[:, 1].min() == pytest.approx(0, abs=1e-5)
        corners = trimesh.load(inputs["obj"], force="mesh", process=False).vertices
        expected = corners @ matrix[:3, :3].T + matrix[:3, 3]
        low, high = expected.min(axis=0), expected.max(axis=0)
        np.testing.assert_allclose(loaded.bounds, [low, high], atol=1e-4)
    a, b = (camera.center for camera in inputs["scene"].cameras[:2])
    assert np.linalg.norm(matrix[:3, :3] @ (a - b)) == pytest.approx(2)


def test_a_glb_that_is_not_turned_has_its_own_axes_in_the_matrix(inputs, tmp_path):
    target = tmp_path / "a.glb"
    words = ("--to", "glb", "-o", target, "--known_distance", "0,0,0", "0,0,1", 3)
    assert run_cli(export.main, inputs["obj"], *words) == 0
    matrix = np.array(json.loads((tmp_path / "a.glb.json").read_text())["matrix"])
    np.testing.assert_allclose(matrix, np.diag([3.0, -3.0, -3.0, 1.0]))


def test_what_cannot_be_exported_is_one_line(inputs, tmp_path, capsys):
    target = tmp_path / "a.spz"
    cases = [
        ((tmp_path / "gone.ply", "--to", "spz"), "no such file or folder"),
        ((inputs["obj"], "--to", "spz"), "holds no Gaussians"),
        ((inputs["refined"], "--to", "glb"), "needs the textured .obj"),
        ((inputs["refined"], "--to", "spz", "--orient", "up"), "need -s/--scene_path"),
        ((inputs["obj"], "--to", "glb", "--repose", inputs["obj"]), "--repose makes Gaussians"),
        ((inputs["vanilla"], "--to", "ply", "--repose", inputs["obj"]), "no .pt file"),
        ((inputs["refined"],), "--to is missing"),
    ]
    for words, message in cases:
        error = refusal(capsys, export.main, *words, "-o", target)
        assert message in error
    assert not list(tmp_path.iterdir())
    target.write_text("mine")
    assert "is there already; pass --overwrite True" in refusal(
        capsys, export.main, inputs["refined"], "--to", "spz", "-o", target
    )
    assert target.read_text() == "mine"
    words = ("--to", "spz", "-o", target, "--overwrite", "True")
    assert run_cli(export.main, inputs["refined"], *words) == 0


def test_an_unedited_mesh_leaves_its_gaussians_alone():
    cloud = bound()
    same = to_gaussians(reposed(cloud, cloud.vertices))
    for name, tensor in to_gaussians(cloud).tensors().items():
        torch.testing.assert_close(same.tensors()[name], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("seed", "scale"), [(0, 1.0), (1, 1.7)])
def test_a_mesh_that_moves_as_a_whole_looks_the_same_to_a_camera_that_moves_along(seed, scale):
    cloud, matrix = bound(seed), similarity(seed, scale)
    # How thin Gaussians are does not follow the scale.
    cloud = replace(cloud, thickness=cloud.thickness * 1e-3)
    before = rasterize_reference(to_gaussians(cloud).activate(), VIEW).image
    edited = to_gaussians(reposed(cloud, moved(cloud.vertices, matrix)))
    after = rasterize_reference(edited.activate(), moved_camera(VIEW, matrix)).image
    assert before.std() > 0.05
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)


def test_covariances_follow_the_stretch_within_the_plane():
    cloud = bound(3)
    stretch = torch.tensor([[1.5, 0.2, 0.0], [0.0, 0.8, 0.3], [0.1, 0.0, 1.2]]).double()
    edited = to_gaussians(reposed(cloud, cloud.vertices @ stretch.T)).activate()
    start = to_gaussians(cloud).activate()

    def in_plane(gaussians) -> torch.Tensor:
        turn = Rotation.from_quat(gaussians.quats[:, [1, 2, 3, 0]].numpy()).as_matrix()
        sizes = gaussians.scales.clone()
        sizes[:, 0] = 0
        axes = torch.from_numpy(turn) * sizes[:, None]
        return axes @ axes.transpose(1, 2)

    expected = stretch @ in_plane(start) @ stretch.T
    torch.testing.assert_close(in_plane(edited), expected, rtol=0, atol=1e-9)


def test_a_bent_mesh_takes_its_gaussians_along(inputs, tmp_path, capsys):
    """The upper half of the ball is bent by 30 degrees; what is below stays to the last bit."""
    lines = []
    turn = Rotation.from_euler("x", 30, degrees=True).as_matrix()
    for line in inputs["obj"].read_text().splitlines():
        if line.startswith("v "):
            place = np.array([float(word) for word in line.split()[1:]])
            place = turn @ place if place[2] > 0.1 else place
            line = "v {} {} {}".format(*place)
        lines.append(line)
    edited = tmp_path / "bent.obj"
    edited.write_text("\n".join(lines))
    target = tmp_path / "bent.ply"
    words = ("--to", "ply", "-o", target, "--repose", edited)
    assert run_cli(export.main, inputs["refined"], *words) == 0
    cloud = read_bound_gaussians(inputs["refined"])
    start, found = cloud.to_gaussians(), read_gaussian_ply(target)
    high = (cloud.vertices[cloud.faces][..., 2] > 0.1).all(dim=1).repeat_interleave(3)
    low = (cloud.vertices[cloud.faces][..., 2] <= 0.1).all(dim=1).repeat_interleave(3)
    assert high.any()
    assert low.any()
    torch.testing.assert_close(found.means[low], start.means[low], rtol=0, atol=1e-6)
    matrix = np.eye(4)
    matrix[:3, :3] = turn
    turned = moved_cloud(start, matrix)
    torch.testing.assert_close(found.means[high], turned.means[high], rtol=0, atol=1e-5)
    axes = (found.quats[high] * turned.quats[high]).sum(dim=1).abs()
    torch.testing.assert_close(axes, torch.ones_like(axes), rtol=0, atol=1e-4)
    # What other programs need to do the same.
    binding = np.load(f"{target}.binding.npz")
    corners = binding["vertices"][binding["faces"][binding["triangle"]]]
    means = (binding["barycentric"][..., None] * corners).sum(axis=1)
    np.testing.assert_allclose(means, start.means.numpy(), atol=1e-6)
    np.testing.assert_allclose(
        binding["scale"], start.log_scales.exp().numpy(), rtol=1e-5, atol=1e-9
    )


@pytest.mark.parametrize("collapsed", ["two corners", "three corners", "corners in a line"])
def test_a_triangle_that_was_collapsed_keeps_the_rest_of_the_mesh_in_place(
    collapsed, inputs, tmp_path
):
    cloud = read_bound_gaussians(inputs["refined"])
    vertices, (a, b, c) = cloud.vertices.clone(), cloud.faces[0]
    vertices[b] = (vertices[a] + vertices[c]) / 2 if "line" in collapsed else vertices[a]
    vertices[c] = vertices[a] if "three" in collapsed else vertices[c]
    edited = tmp_path / "edited.obj"
    mesh = TexturedMesh(
        vertices, cloud.faces, torch.zeros(len(cloud.faces), 3, 2), torch.zeros(8, 8, 3).byte()
    )
    write_textured_mesh(edited, mesh, glb=False)
    words = ("--to", "ply", "-o", tmp_path / "a.ply", "--repose", edited)
    assert run_cli(export.main, inputs["refined"], *words) == 0
    found, start = read_gaussian_ply(tmp_path / "a.ply"), cloud.to_gaussians()
    assert all(tensor.isfinite().all() for tensor in found.tensors().values())
    touched = torch.isin(cloud.faces, torch.stack([b, c])).any(dim=1).repeat_interleave(3)
    for name, tensor in start.tensors().items():
        still = found.tensors()[name][~touched]
        torch.testing.assert_close(still, tensor[~touched], rtol=0, atol=1e-5)


def test_triangles_that_are_left_out_take_their_gaussians_along(inputs, tmp_path, capsys):
    lines = inputs["obj"].read_text().splitlines()
    faces = [line for line in lines if line.startswith("f ")]
    edited = tmp_path / "edited.obj"
    edited.write_text("\n".join(line for line in lines if line not in faces[3:7]))
    target = tmp_path / "a.ply"
    words = ("--to", "ply", "-o", target, "--repose", edited)
    assert run_cli(export.main, inputs["refined"], *words) == 0
    assert "4 triangles are left out" in capsys.readouterr().out
    start = read_bound_gaussians(inputs["refined"]).to_gaussians()
    is_left = torch.ones(len(start), dtype=torch.bool)
    is_left[9:21] = False
    found = read_gaussian_ply(target)
    for name, tensor in start.tensors().items():
        torch.testing.assert_close(found.tensors()[name], tensor[is_left], rtol=0, atol=1e-5)


@pytest.mark.parametrize("to", ["ply", "spz"])
def test_gaussians_stand_where_the_record_of_the_edited_mesh_says(to, inputs, tmp_path):
    """A mesh that was moved with its record, and not edited, has its Gaussians moved as much."""
    matrix = similarity(4, 1.7)
    cloud = read_bound_gaussians(inputs["refined"])
    edited = tmp_path / "edited.obj"
    vertices = moved(cloud.vertices.double(), matrix).float()
    uvs = torch.zeros(len(cloud.faces), 3, 2)
    mesh = TexturedMesh(vertices, cloud.faces, uvs, torch.zeros(8, 8, 3).byte())
    write_textured_mesh(edited, mesh, glb=False)
    note = {"matrix": matrix.tolist(), "up": "+y"}
    (tmp_path / "edited.obj.json").write_text(json.dumps(note))
    target = tmp_path / f"a.{to}"
    words = ("--to", to, "-o", target, "--repose", edited)
    assert run_cli(export.main, inputs["refined"], *words) == 0
    found = read_as_written(target, lambda line: None)
    expected = moved_cloud(cloud.to_gaussians(), matrix)
    torch.testing.assert_close(found.means, expected.means, rtol=0, atol=1e-3)
    recorded = json.loads((tmp_path / f"a.{to}.json").read_text())["matrix"]
    np.testing.assert_allclose(recorded, matrix, atol=1e-9)


def test_gaussians_without_their_mesh_cannot_be_reposed(inputs, tmp_path, capsys):
    for to in ("ply", "spz"):
        free = tmp_path / f"free.{to}"
        assert run_cli(export.main, inputs["refined"], "--to", to, "-o", free) == 0
        words = ("--to", "ply", "-o", tmp_path / "a.ply", "--repose", inputs["obj"])
        error = refusal(capsys, export.main, free, *words)
        assert f"{free}: does not say which triangle carries which Gaussian" in error


def test_a_mesh_of_other_triangles_is_refused(inputs, tmp_path, capsys):
    lines = inputs["obj"].read_text().splitlines()
    rows = [k for k, line in enumerate(lines) if line.startswith("f ")]
    swapped = list(lines)
    swapped[rows[0]], swapped[rows[1]] = lines[rows[1]], lines[rows[0]]
    foreign = [line for line in lines if line != lines[rows[0]]]
    foreign[rows[0]] = "f 1/1 2/2 2/3"
    without_vertex = [line for k, line in enumerate(lines) if k not in rows[1:]]
    vertex = max(k for k, line in enumerate(without_vertex) if line.startswith("v "))
    del without_vertex[vertex]
    cases = {
        "fewer.obj": ("\n".join(without_vertex), "only move vertices"),
        "foreign.obj": ("\n".join(foreign), "join other vertices"),
        "swapped.obj": ("\n".join(swapped), "join other vertices"),
    }
    for name, (text, message) in cases.items():
        Path(tmp_path / name).write_text(text)
        words = ("--to", "ply", "-o", tmp_path / "a.ply", "--repose", tmp_path / name)
        assert message in refusal(capsys, export.main, inputs["refined"], *words)
        assert not (tmp_path / "a.ply").exists()


def test_gltf_stands_upright_and_is_shown_where_the_capture_has_it(inputs, tmp_path):
    target = tmp_path / "a.glb"
    assert run_cli(export.main, inputs["refined"], "--to", "gltf", "-o", target) == 0
    start = read_gaussians_in_scene(inputs["refined"], lambda _: None)
    found = read_gltf_gaussians(target)
    # What is down in a capture is up in glTF.
    torch.testing.assert_close(found.means, start.means * torch.tensor([1.0, -1.0, -1.0]))
    back = tmp_path / "back.ply"
    assert run_cli(export.main, target, "--to", "ply", "-o", back) == 0
    torch.testing.assert_close(read_gaussians_in_scene(back, print).means, start.means)
    view = look_at((0.4, -0.3, 3.0), width=48, height=40, focal=50.0)
    images = [
        open_model(path, False, torch.device("cpu"), print).picture(view)
        for path in (inputs["refined"], target)
    ]
    assert images[0].max() > 0.2
    torch.testing.assert_close(images[1], images[0], rtol=0, atol=2e-3)


def painted_grid(n: int = 24) -> TexturedMesh:
    """A wavy square whose colours are smooth functions of the place."""
    x, y = np.meshgrid(np.linspace(-1, 1, n), np.linspace(-1, 1, n), indexing="ij")
    points = np.stack([x, y, 0.1 * np.sin(3 * x)], axis=-1).reshape(-1, 3)
    at = np.arange(n * n).reshape(n, n)
    quads = np.stack([at[:-1, :-1], at[1:, :-1], at[1:, 1:], at[:-1, 1:]], axis=-1).reshape(-1, 4)
    faces = np.concatenate([quads[:, [0, 1, 2]], quads[:, [0, 2, 3]]])
    uvs = (points[:, :2] + 1) / 2
    v, u = np.meshgrid(
        1 - (np.arange(256) + 0.5) / 256, (np.arange(256) + 0.5) / 256, indexing="ij"
    )
    picture = np.stack([u, v, 0.5 + 0.5 * np.sin(4 * u)], axis=-1) * 255
    return TexturedMesh(
        torch.from_numpy(points.astype(np.float32)),
        torch.from_numpy(faces),
        torch.from_numpy(uvs[faces].astype(np.float32)),
        torch.from_numpy(picture.round().astype(np.uint8)),
    )


def test_a_simpler_mesh_looks_like_the_one_that_it_stands_for():
    mesh = painted_grid()
    small = simplified(mesh, 200, 240)
    assert small.n_faces <= 200
    assert small.texture.shape[0] <= 240
    view = look_at((0.4, -0.3, 3.0), width=64, height=64, focal=80.0)
    before, after = (render_textured(m, view, supersampling=2) for m in (mesh, small))
    inside = (before.sum(2) > 0) & (after.sum(2) > 0)
    assert inside.float().mean() > 0.4
    assert (before - after).abs()[inside].mean() < 0.01
    assert (before - after).abs()[inside].max() < 0.1
    same = simplified(mesh, None, None)
    assert same.n_faces == mesh.n_faces


def test_a_picture_that_is_too_small_is_refused_with_one_that_is_not():
    with pytest.raises(UserError, match="use --texture_size 120 or more") as caught:
        simplified(painted_grid(), None, 60)
    assert "\n" not in str(caught.value)
    simplified(painted_grid(), None, 120)


def test_a_printer_gets_one_closed_body_in_millimetres(tmp_path, capsys):
    ball = trimesh.creation.icosphere(subdivisions=2)
    # Two holes in the ball, and a loose triangle beside it.
    extra = np.array([[5.0, 0, 0], [5.1, 0, 0], [5.0, 0.1, 0]])
    faces = np.concatenate([ball.faces[6:-1], [np.arange(3) + len(ball.vertices)]])
    broken = TexturedMesh(
        torch.from_numpy(np.concatenate([ball.vertices, extra])).float(),
        torch.from_numpy(faces),
        torch.rand(len(faces), 3, 2),
        torch.zeros(4, 4, 3).byte(),
    )
    write_textured_mesh(tmp_path / "ball.obj", broken, glb=False)
    words = (tmp_path / "ball.obj", "--to", "stl", "-o", tmp_path / "a.stl")
    assert "is in millimetres: pass --known_distance" in refusal(capsys, export.main, *words)
    # The ball has a radius of 1 unit, which is 5 cm.
    assert run_cli(export.main, *words, "--scale_factor", 0.05) == 0
    told = capsys.readouterr().out
    body = trimesh.load(tmp_path / "a.stl")
    sides = " x ".join(f"{side:.1f}" for side in body.extents)
    volume = body.volume / 1000
    assert f"{len(body.faces):,} triangles, {sides} mm, closed, {volume:,.1f} cm3\n" in told
    assert "texels" not in told
    assert body.is_watertight
    assert body.volume > 0
    assert 80 < body.extents.max() < 105
    matrix = np.array(json.loads((tmp_path / "a.stl.json").read_text())["matrix"])
    np.testing.assert_allclose(matrix, np.diag([50.0, 50, 50, 1]))


def test_a_3mf_opens_in_its_own_library_in_millimetres(tmp_path, capsys):
    lib3mf = pytest.importorskip("lib3mf")
    pytest.importorskip("lxml")
    mesh = painted_grid()
    write_textured_mesh(tmp_path / "grid.obj", mesh, glb=False)
    target = tmp_path / "a.3mf"
    words = (tmp_path / "grid.obj", "--to", "3mf", "-o", target)
    assert "--to 3mf is in millimetres" in refusal(capsys, export.main, *words)
    assert run_cli(export.main, *words, "--scale_factor", 0.05) == 0
    model = lib3mf.Wrapper().CreateModel()
    model.QueryReader("3mf").ReadFromFile(str(target))
    assert model.GetUnit() == lib3mf.ModelUnit.MilliMeter
    items = model.GetBuildItems()
    assert items.MoveNext()
    found = model.GetMeshObjects()
    assert found.MoveNext()
    body = found.GetCurrentMeshObject()
    assert body.IsManifoldAndOriented()
    assert body.GetTriangleCount() >= mesh.n_faces
    points = np.array([tuple(p.Coordinates) for p in body.GetVertices()])
    expected = 50 * mesh.vertices.double().numpy()
    # A sheet stands on a base.
    sides = np.ptp(expected, axis=0) + [0, 0, BASE_THICKNESS]
    np.testing.assert_allclose(np.ptp(points, axis=0), sides, rtol=1e-4)


def test_without_lxml_it_is_one_line(monkeypatch, inputs, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "lxml.etree", None)
    words = ("--to", "3mf", "-o", tmp_path / "a.3mf", "--scale_factor", 1)
    assert "pip install '.[print]'" in refusal(capsys, export.main, inputs["obj"], *words)
    assert not list(tmp_path.iterdir())


def test_a_usdz_opens_in_its_own_library_upright(tmp_path):
    pytest.importorskip("pxr")
    from pxr import Usd, UsdGeom, UsdShade

    mesh = painted_grid()
    write_textured_mesh(tmp_path / "grid.obj", mesh, glb=False)
    words = (tmp_path / "grid.obj", "--to", "usdz", "-o", tmp_path / "a.usdz")
    assert run_cli(export.main, *words, "--scale_factor", 2) == 0
    stage = Usd.Stage.Open(str(tmp_path / "a.usdz"))
    assert UsdGeom.GetStageUpAxis(stage) == "Y"
    assert UsdGeom.GetStageMetersPerUnit(stage) == 1.0
    shape = UsdGeom.Mesh(stage.GetPrimAtPath("/Scan/Mesh"))
    points = np.array(shape.GetPointsAttr().Get())
    expected = 2 * mesh.vertices.numpy() * [1, -1, -1]
    np.testing.assert_allclose(points, expected, atol=1e-6)
    assert len(shape.GetFaceVertexCountsAttr().Get()) == mesh.n_faces
    uvs = np.array(UsdGeom.PrimvarsAPI(shape).GetPrimvar("st").Get())
    np.testing.assert_allclose(uvs, mesh.uvs.reshape(-1, 2).numpy(), atol=1e-6)
    material, _ = UsdShade.MaterialBindingAPI(shape.GetPrim()).ComputeBoundMaterial()
    picture = UsdShade.Shader(stage.GetPrimAtPath("/Scan/Material/Picture"))
    asset = picture.GetInput("file").Get()
    assert material
    assert "texture.png" in asset.resolvedPath


def test_without_usd_it_is_one_line(monkeypatch, inputs, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "pxr", None)
    assert "pip install '.[usd]'" in refusal(
        capsys, export.main, inputs["obj"], "--to", "usdz", "-o", tmp_path / "a.usdz"
    )
    assert not list(tmp_path.iterdir())
