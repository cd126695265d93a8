# SPDX-License-Identifier: Apache-2.0
"""One file with the textured mesh and its Gaussians opens in other programs, both in one place."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import trimesh

from gaussian_splatting.core.moved import GLB_AXES, moved_cloud
from gaussian_splatting.formats.fidelity import fidelity
from gaussian_splatting.formats.placement import Placement
from gaussian_splatting.formats.ply import read_gaussian_ply
from gaussian_splatting.scenes.scene import VanillaSize, load_scene
from sugar_extractors.export.gltf_gaussians import read_gltf_gaussians
from sugar_extractors.export.reading import read_as_written
from sugar_extractors.outputs.result_folder import FinalResults, write_result_folder
from sugar_extractors.placing import PlacementOptions
from sugar_scene.mesh_files.textured_mesh_io import read_textured_mesh
from tests.support.tiny_scene import refusal, run_cli
from tests.support.verbs import export
from tests.test_export_placement import PLACES, Inputs, exported, inputs

__all__ = ["inputs"]
FORMATS = {"glb_both": ".both.glb", "usdz_both": ".both.usdz"}


@pytest.fixture(scope="module")
def results(inputs, tmp_path_factory) -> Path:
    """The folder of results of the tiny scene, twice as large as the capture."""
    folder = tmp_path_factory.mktemp("results")
    scene = load_scene(inputs.scene.root, size_rule=VanillaSize(1), notify=lambda _: None)
    made = FinalResults(inputs.obj, inputs.ply, lambda: read_gaussian_ply(inputs.ply))
    write_result_folder(folder, made, scene, PlacementOptions(scale_factor=2.0))
    return folder


def mesh_corners(path: Path) -> np.ndarray:
    """Corners of all triangles, as trimesh or usd-core read them. (F, 3, 3)"""
    if path.suffix == ".glb":
        scene = trimesh.load_scene(path, process=False)
        mesh = scene.geometry[scene.graph["Mesh"][1]]
        return mesh.vertices[mesh.faces]
    from pxr import Usd, UsdGeom

    stage = Usd.Stage.Open(str(path))
    shape = UsdGeom.Mesh(stage.GetPrimAtPath("/Scan/Mesh"))
    faces = np.array(shape.GetFaceVertexIndicesAttr().Get()).reshape(-1, 3)
    return np.array(shape.GetPointsAttr().Get())[faces]


def check_places(path: Path, inputs: Inputs, matrix: np.ndarray) -> None:
    """The mesh and the Gaussians of a file are those of the capture after one matrix."""
    source = inputs.mesh.vertices[inputs.mesh.faces].double().numpy()
    expected = source @ matrix[:3, :3].T + matrix[:3, 3]
    tolerance = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(mesh_corners(path), expected, atol=tolerance)
    errors = fidelity(moved_cloud(inputs.cloud, matrix), read_as_written(path, lambda _: None))
    assert errors.position < 1e-4
    assert errors.rotation < 0.1
    assert errors.harmonics is not None
    assert errors.harmonics < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[0])
@pytest.mark.parametrize("to", FORMATS)
def test_the_mesh_and_its_gaussians_lie_in_one_world(to, place, inputs, tmp_path):
    if to == "usdz_both":
        pytest.importorskip("pxr")
    target = tmp_path / f"a{FORMATS[to]}"
    words = (*place[1:], "--gaussians", inputs.ply)
    check_places(target, inputs, exported(inputs, inputs.obj, to, target, words))


def test_a_glb_has_a_node_for_each_and_opens_without_the_extension(inputs, tmp_path):
    target = tmp_path / "a.both.glb"
    words = ("--gaussians", inputs.ply, "-o", target)
    assert run_cli(export.main, inputs.obj, "--to", "glb_both", *words) == 0
    scene = trimesh.load_scene(target, process=False)
    assert sorted(scene.graph.nodes_geometry) == ["Gaussians", "Mesh"]
    # A program that does not know the extension has colours of points.
    points = scene.geometry[scene.graph["Gaussians"][1]]
    assert len(points.vertices) == len(inputs.cloud)
    assert points.colors.shape == (len(inputs.cloud), 4)
    assert len(read_gltf_gaussians(target)) == len(inputs.cloud)


def test_pygltflib_reads_what_is_used_and_that_nothing_is_required(inputs, tmp_path):
    pygltflib = pytest.importorskip("pygltflib")
    target = tmp_path / "a.both.glb"
    words = ("--gaussians", inputs.ply, "-o", target)
    assert run_cli(export.main, inputs.obj, "--to", "glb_both", *words) == 0
    content = pygltflib.GLTF2().load(str(target))
    assert "KHR_gaussian_splatting" in content.extensionsUsed
    assert not content.extensionsRequired
    assert content.scenes[content.scene].nodes == [0, 1]
    mesh, gaussians = (content.meshes[node.mesh].primitives[0] for node in content.nodes)
    assert (mesh.mode, gaussians.mode) == (pygltflib.TRIANGLES, pygltflib.POINTS)
    assert gaussians.extensions["KHR_gaussian_splatting"]["kernel"] == "ellipse"
    assert gaussians.attributes.COLOR_0 is not None


def test_a_usd_renders_gaussians_and_has_the_mesh_as_proxy_and_collider(inputs, tmp_path):
    pytest.importorskip("pxr")
    from pxr import Usd, UsdGeom, UsdPhysics, UsdShade, UsdVol

    target = tmp_path / "a.both.usdz"
    words = ("--gaussians", inputs.ply, "-o", target)
    assert run_cli(export.main, inputs.obj, "--to", "usdz_both", *words) == 0
    stage = Usd.Stage.Open(str(target))
    assert UsdGeom.GetStageUpAxis(stage) == "Y"
    assert UsdGeom.GetStageMetersPerUnit(stage) == 1.0
    assert str(stage.GetDefaultPrim().GetPath()) == "/Scan"
    mesh = stage.GetPrimAtPath("/Scan/Mesh")
    field = stage.GetPrimAtPath("/Scan/Gaussians")
    assert field.IsA(UsdVol.ParticleField3DGaussianSplat)
    assert UsdGeom.Imageable(mesh).ComputePurpose() == "proxy"
    assert UsdGeom.Imageable(field).ComputePurpose() == "render"
    proxy, rendered = UsdGeom.Imageable(field).ComputeProxyPrim()
    assert (proxy, rendered) == (mesh, field)
    assert mesh.HasAPI(UsdPhysics.CollisionAPI)
    assert UsdPhysics.MeshCollisionAPI(mesh).GetApproximationAttr().Get() == "none"
    material, _ = UsdShade.MaterialBindingAPI(mesh).ComputeBoundMaterial()
    assert material


def test_the_checks_of_usd_find_nothing(inputs, tmp_path):
    pytest.importorskip("pxr")
    from pxr import Usd, UsdValidation

    target = tmp_path / "a.both.usdz"
    words = ("--gaussians", inputs.ply, "-o", target)
    assert run_cli(export.main, inputs.obj, "--to", "usdz_both", *words) == 0
    validators = UsdValidation.ValidationRegistry().GetOrLoadAllValidators()
    assert validators
    stage = Usd.Stage.Open(str(target))
    errors = UsdValidation.ValidationContext(validators).Validate(stage)
    assert [error.GetMessage() for error in errors] == []


def test_a_folder_of_results_is_upright_already(results, inputs, tmp_path):
    target = tmp_path / "a.both.glb"
    assert run_cli(export.main, results, "--to", "glb_both", "-o", target) == 0
    mesh = read_textured_mesh(results / "mesh.obj")
    corners = mesh.vertices[mesh.faces].numpy()
    np.testing.assert_allclose(mesh_corners(target), corners, atol=1e-5)
    splats = read_gaussian_ply(results / "splats.ply")
    assert fidelity(splats, read_gltf_gaussians(target)).position < 1e-5


@pytest.mark.parametrize("to", ["glb", "gltf", "spz"])
def test_files_of_the_folder_of_results_keep_their_up(to, results, tmp_path):
    target = tmp_path / ("a.gltf.glb" if to == "gltf" else f"a.{to}")
    if to == "glb":
        assert run_cli(export.main, results / "mesh.obj", "--to", to, "-o", target) == 0
        expected = trimesh.load(results / "mesh.glb", force="mesh").bounds
        np.testing.assert_allclose(trimesh.load(target, force="mesh").bounds, expected, atol=1e-5)
        return
    assert run_cli(export.main, results / "splats.ply", "--to", to, "-o", target) == 0
    splats = read_gaussian_ply(results / "splats.ply")
    assert fidelity(splats, read_as_written(target, lambda _: None)).position < 1e-3


@pytest.mark.parametrize("words", [(), ("--scale_factor", "3")], ids=["as it is", "larger"])
def test_the_record_beside_an_export_leads_back_to_the_scene(words, results, inputs, tmp_path):
    for to in ("glb", "obj", "ply"):
        source = results / ("splats.ply" if to == "ply" else "mesh.obj")
        target = tmp_path / f"a.{to}"
        matrix = exported(inputs, source, to, target, words)
        np.testing.assert_allclose(Placement.of(target).matrix, matrix)
        np.testing.assert_allclose(matrix[:3, :3] @ inputs.up, [0, 6 if words else 2, 0], atol=1e-5)
    # An export of the export still knows where up is.
    again = exported(inputs, tmp_path / "a.obj", "glb", tmp_path / "b.glb", ())
    np.testing.assert_allclose(again, matrix, atol=1e-9)


def test_a_folder_of_results_stands_upright_only_once(results, inputs, tmp_path):
    target = tmp_path / "a.both.glb"
    words = ("--orient", "up", "--scale_factor", "2")
    matrix = exported(inputs, results, "glb_both", target, words)
    check_places(target, inputs, matrix)
    np.testing.assert_allclose(matrix[:3, :3] @ inputs.up, [0, 2, 0], atol=1e-6)


def test_gaussians_of_the_scene_are_brought_to_the_folder_of_results(results, inputs, tmp_path):
    target = tmp_path / "a.both.glb"
    words = ("--gaussians", inputs.ply, "-o", target)
    assert run_cli(export.main, results, "--to", "glb_both", *words) == 0
    splats = read_gaussian_ply(results / "splats.ply")
    assert fidelity(splats, read_gltf_gaussians(target)).position < 1e-4


def test_gaussians_are_found_where_a_run_leaves_them(inputs, tmp_path, capsys):
    mesh = tmp_path / "refined_mesh" / "scan" / "model.obj"
    mesh.parent.mkdir(parents=True)
    for suffix in (".obj", ".mtl", ".png"):
        copy = mesh.with_suffix(suffix)
        shutil.copy(inputs.obj.with_suffix(suffix), copy)
    mesh.write_text(mesh.read_text().replace("mesh.mtl", "model.mtl"))
    material = mesh.with_suffix(".mtl")
    material.write_text(material.read_text().replace("mesh.png", "model.png"))
    words = (mesh, "--to", "glb_both", "-o", tmp_path / "a")
    assert run_cli(export.main, *words) == 2
    gaussians = tmp_path / "refined_ply" / "scan" / "model.ply"
    assert f"not at {gaussians}; pass them as --gaussians" in capsys.readouterr().err
    gaussians.parent.mkdir(parents=True)
    shutil.copy(inputs.ply, gaussians)
    assert run_cli(export.main, *words) == 0
    expected = moved_cloud(inputs.cloud, GLB_AXES)
    assert fidelity(expected, read_gltf_gaussians(tmp_path / "a.both.glb")).position < 1e-5


def test_what_cannot_be_put_into_one_file_is_one_line(inputs, tmp_path, capsys):
    target = ("-o", tmp_path / "a")
    cases = {
        (inputs.obj, "--to", "glb", "--gaussians", inputs.ply): "--gaussians goes with a mesh",
        (inputs.obj, "--to", "glb_both", "--repose", inputs.obj): "--repose makes Gaussians",
        (inputs.ply, "--to", "glb_both"): "is no textured mesh",
        (tmp_path, "--to", "glb_both"): "has no mesh.obj",
        (inputs.obj, "--to", "glb_both", "--gaussians", "missing.ply"): "no such file",
        (inputs.obj, "--to", "glb_both", "--gaussians", inputs.obj): "holds no Gaussians",
    }
    for words, message in cases.items():
        error = refusal(capsys, export.main, *words, *target)
        assert message in error
    assert not list(tmp_path.iterdir())
