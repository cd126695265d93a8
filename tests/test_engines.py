# SPDX-License-Identifier: Apache-2.0
"""Shapes to collide with, and levels of detail, as programs that are not ours read them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import trimesh

from gaussian_splatting.formats.gltf_container import split_glb
from gaussian_splatting.formats.placement import Placement
from sugar_extractors.export import formats, original_frame
from sugar_extractors.export.engines.levels import coarser_levels
from sugar_pipeline.quality.exported_mesh import read_exported
from sugar_scene.mesh_files.textured_mesh_io import (
    TexturedMesh,
    render_textured,
    write_textured_mesh,
)
from tests.support.random_scenes import look_at
from tests.support.tiny_scene import refusal, run_cli
from tests.support.verbs import export
from tests.test_export_placement import exported, inputs
from tests.test_normal_map import degrees_between

__all__ = ["inputs"]
N_LEVELS = 3


@pytest.fixture(scope="module")
def ball() -> TexturedMesh:
    """A wavy ball without its lowest part, in smooth colours."""
    sphere = trimesh.creation.icosphere(subdivisions=5)
    points = sphere.vertices * (1 + 0.01 * np.sin(20 * sphere.vertices).sum(axis=1, keepdims=True))
    is_kept = (sphere.vertices[sphere.faces][..., 2] > -0.8).all(axis=1)
    vertices = torch.from_numpy(points.astype(np.float32))
    faces = torch.from_numpy(sphere.faces[is_kept].astype(np.int64))
    rows, columns = np.mgrid[:512, :512]
    waves = np.stack([np.sin(rows / 40), np.cos(columns / 30), np.sin((rows + columns) / 60)], 2)
    texture = torch.from_numpy((127 + 100 * waves).astype(np.uint8))
    return TexturedMesh(vertices, faces, 0.5 + 0.4 * vertices[faces][..., :2], texture)


@pytest.fixture(scope="module")
def ball_obj(ball, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("ball") / "ball.obj"
    write_textured_mesh(path, ball, glb=False)
    return path


@pytest.fixture
def angle_obj(tmp_path) -> Path:
    """A block with the outline of an L, which CoACD cuts in a moment; a ball takes it minutes."""
    outline = np.array([[0, 0], [2, 0], [2, 1], [1, 1], [1, 2], [0, 2]]) - 0.8
    vertices = np.concatenate([np.insert(outline, 2, z, axis=1) for z in (-0.5, 0.5)])
    faces = []
    for k in range(1, 5):
        faces += [[0, k + 1, k], [6, k + 6, k + 7]]
    for k in range(6):
        following = (k + 1) % 6
        faces += [[k, following, k + 6], [following, following + 6, k + 6]]
    corners = torch.rand(len(faces), 3, 2, generator=torch.Generator().manual_seed(0))
    texture = torch.full((8, 8, 3), 127, dtype=torch.uint8)
    surface = torch.tensor(vertices, dtype=torch.float32), torch.tensor(faces)
    path = tmp_path / "angle.obj"
    write_textured_mesh(path, TexturedMesh(*surface, corners, texture), glb=False)
    return path


def nodes_of(path: Path) -> dict[str, dict]:
    return {node["name"]: node for node in split_glb(path.read_bytes())[0]["nodes"]}


def test_one_mesh_to_collide_with_is_closed_and_has_few_triangles(ball, ball_obj, tmp_path):
    target = tmp_path / "a.glb"
    words = ("--collision", "mesh", "--collision_triangles", 500)
    assert run_cli(export.main, ball_obj, "--to", "glb", "-o", target, *words) == 0
    scene = trimesh.load_scene(target)
    shape = scene.geometry["a-colonly"]
    assert shape.is_watertight
    assert len(shape.faces) < 600
    np.testing.assert_allclose(shape.bounds, scene.geometry["a"].bounds, atol=0.03)
    assert nodes_of(target)["a-colonly"]["extras"] == {"collision": "mesh"}


def test_programs_that_draw_all_nodes_do_not_show_the_shapes(ball, ball_obj, tmp_path):
    target = tmp_path / "a.glb"
    words = ("--to", "glb", "-o", target, "--collision", "mesh")
    assert run_cli(export.main, ball_obj, *words) == 0
    material = trimesh.load_scene(target).geometry["a-colonly"].visual.material
    assert material.alphaMode == "MASK"
    assert material.baseColorFactor[3] == 0
    assert read_exported(target).n_faces == ball.n_faces


def test_convex_pieces_are_convex_and_hold_the_mesh(angle_obj, tmp_path):
    pytest.importorskip("coacd")
    target = tmp_path / "a b.glb"
    words = ("--collision", "convex", "--collision_pieces", 3, "--collision_triangles", 1000)
    assert run_cli(export.main, angle_obj, "--to", "glb", "-o", target, *words) == 0
    scene = trimesh.load_scene(target, process=False)
    names = sorted(name for name in scene.geometry if name.startswith("UCX_"))
    assert names == [f"UCX_a b_{number:02d}" for number in range(len(names))]
    assert 2 <= len(names) <= 3
    pieces = [trimesh.Trimesh(g.vertices, g.faces) for g in map(scene.geometry.get, names)]
    assert all(len(piece.faces) < 255 for piece in pieces)
    assert all(piece.is_watertight and piece.is_convex for piece in pieces)
    outside = np.inf
    for piece in pieces:
        sides = piece.face_normals @ np.asarray(scene.geometry["a b"].vertices).T
        heights = sides - (piece.face_normals * piece.triangles[:, 0]).sum(axis=1)[:, None]
        outside = np.minimum(outside, heights.max(axis=0))
    assert outside.max() < 0.02  # of a side of 2


def test_without_the_package_auto_takes_a_mesh_and_convex_says_what_to_install(
    ball_obj, tmp_path, monkeypatch, capsys
):
    # Python takes an entry of None for a module that cannot be imported.
    monkeypatch.setitem(sys.modules, "coacd", None)
    target = tmp_path / "a.glb"
    assert run_cli(export.main, ball_obj, "--to", "glb", "-o", target, "--collision") == 0
    assert "pip install '.[engines]'" in capsys.readouterr().out
    assert "a-colonly" in nodes_of(target)
    words = ("--overwrite", "True", "--collision", "convex")
    assert "pip install '.[engines]'" in refusal(
        capsys, export.main, ball_obj, "--to", "glb", "-o", target, *words
    )


@pytest.mark.slow
@pytest.mark.parametrize("to", ["usdz", "usdz_both"])
def test_usd_has_collision_prims_that_its_checks_accept(to, inputs, ball_obj, tmp_path):
    pytest.importorskip("pxr")
    from pxr import Usd, UsdGeom, UsdPhysics, UsdValidation

    target = tmp_path / "a.usdz"
    words = ["--to", to, "-o", target, "--collision", "mesh"]
    if to == "usdz_both":
        words += ["--gaussians", inputs.ply]
    assert run_cli(export.main, ball_obj, *words) == 0
    stage = Usd.Stage.Open(str(target))
    shape = stage.GetPrimAtPath("/Scan/Collision/Shape_00")
    assert shape.HasAPI(UsdPhysics.CollisionAPI)
    assert UsdPhysics.MeshCollisionAPI(shape).GetApproximationAttr().Get() == "none"
    assert UsdGeom.Imageable(shape).ComputePurpose() == "guide"
    assert not stage.GetPrimAtPath("/Scan/Mesh").HasAPI(UsdPhysics.CollisionAPI)
    validators = UsdValidation.ValidationRegistry().GetOrLoadAllValidators()
    errors = UsdValidation.ValidationContext(validators).Validate(stage)
    assert not [error.GetMessage() for error in errors]


@pytest.fixture(scope="module")
def levels(ball_obj, tmp_path_factory) -> Path:
    """A GLB with levels of detail and shapes to collide with."""
    target = tmp_path_factory.mktemp("levels") / "a.glb"
    words = ("--lods", N_LEVELS, "--collision", "mesh", "--collision_triangles", 300)
    assert run_cli(export.main, ball_obj, "--to", "glb", "-o", target, *words) == 0
    return target


@pytest.mark.slow
def test_each_level_is_a_file_with_a_quarter_of_the_triangles(ball, levels):
    for number in range(N_LEVELS):
        mesh = read_exported(levels.with_name(f"a_LOD{number}.glb"))
        most = ball.n_faces // 4**number
        assert 0.95 * most <= mesh.n_faces <= most
        (texture,) = mesh.textures
        assert texture.shape[0] <= 512 >> number


def test_one_file_has_all_levels_and_shows_the_first_without_the_extension(ball, levels):
    content = split_glb(levels.read_bytes())[0]
    node = content["nodes"][0]
    ids = node["extensions"]["MSFT_lod"]["ids"]
    assert "MSFT_lod" in content["extensionsUsed"]
    assert [content["nodes"][k]["name"] for k in (0, *ids)] == ["a_LOD0", "a_LOD1", "a_LOD2"]
    assert not set(ids) & set(content["scenes"][0]["nodes"])
    coverage = node["extras"]["MSFT_screencoverage"]
    assert len(coverage) == N_LEVELS
    assert coverage == sorted(coverage, reverse=True)
    # Each level has its own picture.
    sizes = []
    for k in (0, *ids):
        material = content["meshes"][content["nodes"][k]["mesh"]]["primitives"][0]["material"]
        index = content["materials"][material]["pbrMetallicRoughness"]["baseColorTexture"]["index"]
        sizes.append(content["textures"][index]["source"])
    assert sizes == [0, 1, 2]
    scene = trimesh.load_scene(levels, process=False)
    assert sorted(scene.graph.nodes_geometry) == ["a_LOD0", "a_LOD0-colonly"]
    assert read_exported(levels).n_faces == ball.n_faces


@pytest.mark.slow
def test_a_level_looks_like_the_full_mesh_where_its_triangles_are_pixels(ball):
    view = look_at((2.0, -1.5, 2.0), width=60, height=60, focal=70.0, name="a")
    grey = torch.full((3,), 0.5)
    expected = render_textured(ball, view, grey, supersampling=4)
    for level in coarser_levels(ball, ball, N_LEVELS, False):
        picture = render_textured(level, view, grey, supersampling=4)
        assert -10 * float(((picture - expected) ** 2).mean().log10()) > 34


@pytest.mark.slow
def test_normals_of_the_full_mesh_are_kept_for_each_level(ball, ball_obj, tmp_path):
    for level in coarser_levels(ball, ball, N_LEVELS, True):
        without = TexturedMesh(level.vertices, level.faces, level.uvs, level.texture)
        assert float(degrees_between(ball, without).median()) > 1.5
        assert float(degrees_between(ball, level).median()) < 1
    target = tmp_path / "a.glb"
    words = ("--lods", 2, "--normal_map", "True")
    assert run_cli(export.main, ball_obj, "--to", "glb", "-o", target, *words) == 0
    content = split_glb(target.read_bytes())[0]
    first, second = content["materials"]
    assert "normalTexture" not in first
    assert second["normalTexture"]["index"] == 2
    assert len(content["images"]) == 3
    # All levels are lit.
    assert not any("extensions" in material for material in content["materials"])


@pytest.mark.slow
def test_all_levels_stand_in_the_same_place(inputs, ball_obj, tmp_path):
    target = tmp_path / "a.glb"
    words = ("--lods", 2, "--orient", "up", "--scale_factor", 2)
    exported(inputs, ball_obj, "glb", target, words)
    boxes = [trimesh.load_scene(tmp_path / f"a_LOD{k}.glb").bounds for k in range(2)]
    np.testing.assert_allclose(boxes[0], boxes[1], atol=0.05)
    np.testing.assert_allclose(np.ptp(boxes[0], axis=0).max(), 4, atol=0.3)
    # Each says by itself where it stands.
    matrices = [Placement.of(tmp_path / f"a{part}.glb").matrix for part in ("", "_LOD0", "_LOD1")]
    np.testing.assert_array_equal(matrices[0], matrices[1])
    np.testing.assert_array_equal(matrices[0], matrices[2])


@pytest.mark.slow
def test_full_coordinates_are_those_of_all_levels(ball_obj, tmp_path):
    target = tmp_path / "a.glb"
    assert run_cli(export.main, ball_obj, "--to", "glb", "-o", target, "--lods", 2) == 0
    offset = np.array([5e5, 300.0, -5.4e6])
    original_frame.move_glb(target, offset)
    original_frame.note_in_glb(target, {"epsg": 32633})
    nodes = nodes_of(target)
    for name in ("a_LOD0", "a_LOD1"):
        assert nodes[name]["translation"] == offset.tolist()
        assert nodes[name]["extras"]["epsg"] == 32633
    assert len(nodes["a_LOD0"]["extras"]["MSFT_screencoverage"]) == 2


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--to", "obj", "--lods", 2), "--lods goes with --to glb"),
        (("--to", "glb", "--lods", 1), "choose 2 to 8"),
        (("--to", "glb", "--lods", 8), "choose at most --lods 5"),
        (("--to", "spz", "--collision"), "--collision goes with --to glb, usdz"),
        (("--to", "glb", "--collision", "mesh", "--collision_triangles", 3), "choose 12 or more"),
        (("--to", "glb", "--normal_map", "True"), "--max_triangles or --lods"),
    ],
)
def test_bad_input_is_one_line(words, part, ball_obj, tmp_path, capsys):
    error = refusal(capsys, export.main, ball_obj, *words, "-o", tmp_path / "a")
    assert part in error
    assert not list(tmp_path.iterdir())


def test_formats_with_shapes_are_those_that_the_help_names():
    assert formats.WITH_COLLIDERS == ("glb", "usdz", "glb_both", "usdz_both")


@pytest.mark.slow
def test_levels_of_an_earlier_export_go_with_it(ball_obj, tmp_path):
    target = tmp_path / "a.glb"
    other = tmp_path / "a_LOD9.glb"
    other.write_bytes(b"not of this export")
    words = (ball_obj, "--to", "glb", "-o", target, "--scale_factor", 2, "--overwrite", "True")
    assert run_cli(export.main, *words, "--lods", 3) == 0
    assert (tmp_path / "a_LOD2.glb.json").is_file()
    assert run_cli(export.main, *words, "--lods", 2) == 0
    names = {path.name for path in tmp_path.iterdir()}
    levels = {"a.glb", "a_LOD0.glb", "a_LOD1.glb"}
    assert names == {*levels, *(f"{name}.json" for name in levels), other.name}
    assert run_cli(export.main, *words) == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"a.glb", "a.glb.json", other.name}
