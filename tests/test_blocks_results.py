# SPDX-License-Identifier: Apache-2.0
"""Parts of blocks become the results of the whole: vertices, pages, tiles, Gaussians."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gaussian_splatting.formats import ply
from gaussian_splatting.formats.gltf_container import split_glb
from gaussian_splatting.formats.placement import Placement
from sugar_pipeline.blocks import tiles
from sugar_pipeline.blocks.block_refinement import joined_in_order, write_if_new
from sugar_pipeline.blocks.joined_refinement import with_shared_means
from sugar_pipeline.blocks.joining import join_results
from sugar_pipeline.blocks.paged_obj import paged_obj
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh, read_textured_mesh
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_utils.console import Console
from tests.support.mesh_scenes import sphere_cloud

SQUARE = np.array([[0.0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]])
TWO_TRIANGLES = np.array([[0, 1, 2], [0, 2, 3]])


def square(x: float, shade: int = 0) -> TriangleMesh:
    """A square of side 1 that begins at an x."""
    colors = np.full((4, 3), shade, np.uint8)
    return TriangleMesh(SQUARE + [x, 0, 0], TWO_TRIANGLES, colors)


def textured_square(x: float, color: tuple[int, int, int]) -> TexturedMesh:
    """The same with a texture of one colour."""
    uvs = torch.from_numpy(SQUARE[:, :2][TWO_TRIANGLES].astype(np.float32))
    return TexturedMesh(
        vertices=torch.from_numpy((SQUARE + [x, 0, 0]).astype(np.float32)),
        faces=torch.from_numpy(TWO_TRIANGLES),
        uvs=uvs,
        texture=torch.tensor(color, dtype=torch.uint8).expand(8, 8, 3).contiguous(),
    )


class Parts:
    """Stands for the joined parts of a run in blocks that stopped after the mesh."""

    plan = SimpleNamespace(blocks=(0, 1))
    are_textured = False
    matrix = np.eye(4)
    placement = Placement(np.eye(4))

    def mesh(self) -> TriangleMesh:
        return square(0)

    def write_splats(self, path: Path) -> int:
        path.write_text("Gaussians")
        return 1


def test_files_of_an_earlier_whole_run_go(tmp_path):
    earlier = ["mesh.glb", "mesh.png", "mesh.obj", "mesh.mtl", "report.html", "index.html"]
    for name in (*earlier, "log.txt", "mine.txt"):
        (tmp_path / name).write_text("of an earlier run")
    scene = SimpleNamespace(calibrated_cameras=[])
    files = join_results(Parts(), scene, tmp_path, Console.silent())
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {*(path.name for path in files), "log.txt", "mine.txt"}
    assert names & set(earlier) == set()


def test_what_surrounds_a_block_is_joined_behind_it():
    mesh = joined_in_order([square(0), square(1, shade=9)])
    assert np.array_equal(mesh.vertices[:4], square(0).vertices)
    assert np.array_equal(mesh.faces[:2], TWO_TRIANGLES)
    assert mesh.n_vertices == 6
    # Its corners at x = 1 are those of the first square.
    assert np.array_equal(mesh.vertices[mesh.faces[2:]], square(1).vertices[TWO_TRIANGLES])


def test_a_file_that_holds_the_mesh_stays_untouched(tmp_path):
    path = tmp_path / "mesh.ply"
    write_if_new(path, square(0))
    stamp = path.stat().st_mtime_ns
    write_if_new(path, square(0))
    assert path.stat().st_mtime_ns == stamp
    write_if_new(path, square(1))
    assert path.stat().st_mtime_ns != stamp
    assert list(tmp_path.iterdir()) == [path]


def test_shared_vertices_are_at_the_mean_of_all_blocks_that_have_them():
    meshes = [square(0), square(1)]
    rng = np.random.default_rng(0)
    refined = [mesh.vertices + 0.01 * rng.normal(size=(4, 3)) for mesh in meshes]
    first, second = with_shared_means(meshes, refined)
    # Corners 1 and 2 of the first square are 0 and 3 of the second.
    means = (refined[0][[1, 2]] + refined[1][[0, 3]]) / 2
    assert np.array_equal(first[[1, 2]], means)
    assert np.array_equal(second[[0, 3]], means)
    assert np.array_equal(first[[0, 3]], refined[0][[0, 3]])
    assert np.array_equal(second[[1, 2]], refined[1][[1, 2]])
    (alone,) = with_shared_means(meshes[:1], refined[:1])
    assert np.array_equal(alone, refined[0])


def test_an_obj_with_pages_is_read_back_with_the_colours_of_each(tmp_path):
    colors = [(200, 10, 10), (10, 200, 10)]
    pages = [textured_square(x, color) for x, color in enumerate(colors)]
    with paged_obj(tmp_path / "mesh.obj") as obj:
        for page in pages:
            obj.add(page)
    files = obj.files
    assert [path.name for path in files] == ["mesh.obj", "mesh.mtl", "mesh_00.png", "mesh_01.png"]
    mesh = read_textured_mesh(files[0])
    assert mesh.n_faces == 4
    middles = mesh.vertices[mesh.faces].mean(dim=1)
    assert (middles[:2, 0] < 1).all()
    assert (middles[2:, 0] > 1).all()
    height, width, _ = mesh.texture.shape
    for face, color in enumerate([colors[0], colors[0], colors[1], colors[1]]):
        u, v = mesh.uvs[face].mean(dim=0).tolist()
        texel = mesh.texture[int((1 - v) * height), int(u * width)]
        assert tuple(texel.tolist()) == color


def coloured(n: int) -> list[tiles.Tile]:
    """Squares beside each other, each with two levels."""
    written = []
    for k in range(n):
        part = replace(square(k), vertices=square(k).vertices + [0, 0, 2.0])
        levels = [tiles.Level(f"tile_{k}_small.glb", 0.01), tiles.Level(f"tile_{k}.glb", 0.0)]
        written.append(tiles.Tile(levels, part))
    return written


def entries_of(root: dict) -> list[dict]:
    """An entry and all below it."""
    below = [entry for child in root.get("children", ()) for entry in entries_of(child)]
    return [root, *below]


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_tileset_has_levels_down_to_all_tiles_in_boxes_that_hold_them(tmp_path, n):
    parts = coloured(n)
    files = tiles.write_tileset(tmp_path, parts, 1e-6, {})
    assert all(path.is_file() for path in files)
    tileset = json.loads((tmp_path / "tileset.json").read_text(encoding="utf-8"))
    assert tileset["asset"]["version"] == "1.1"
    root = tileset["root"]
    assert root["refine"] == "REPLACE"
    assert tileset["geometricError"] > root["geometricError"] > 0
    entries = entries_of(root)
    assert len(entries) == 2 * n + max(1, n - 1)
    assert {entry["content"]["uri"] for entry in entries} == {
        *(path.name for path in files[1:]),
        *(level.name for part in parts for level in part.levels),
    }
    for entry in entries:
        for child in entry.get("children", ()):
            assert child["geometricError"] <= entry["geometricError"] / 2
    for part in parts:
        # y up in the files, z up in the boxes.
        vertices = part.mesh.vertices
        points = np.stack([vertices[:, 0], -vertices[:, 2], vertices[:, 1]], axis=1)
        (entry,) = [e for e in entries if e["content"]["uri"] == part.levels[1].name]
        assert _in_box(points, entry["boundingVolume"]["box"])
        assert _in_box(points, root["boundingVolume"]["box"])

    content, binary = split_glb((tmp_path / root["content"]["uri"]).read_bytes())
    (primitive,) = content["meshes"][0]["primitives"]
    accessor = content["accessors"][primitive["attributes"]["POSITION"]]
    view = content["bufferViews"][accessor["bufferView"]]
    start = view["byteOffset"]
    places = np.frombuffer(binary[start : start + view["byteLength"]], "<f4").reshape(-1, 3)
    whole = np.concatenate([part.mesh.vertices for part in parts])
    assert np.allclose(np.unique(places, axis=0), np.unique(whole, axis=0))


def test_a_tile_with_a_large_picture_has_a_level_with_a_small_one(tmp_path):
    side = tiles.SMALL_TEXTURE * 512
    mesh = square(0)
    uvs = torch.from_numpy(mesh.vertices[mesh.faces][..., :2]).float()
    texture = torch.zeros(side, side, 3, dtype=torch.uint8)
    texture[::2] = 200
    textured = TexturedMesh(
        torch.from_numpy(mesh.vertices).float(), torch.from_numpy(mesh.faces), uvs, texture
    )
    tile = tiles.write_tile(tmp_path, 3, textured, mesh)
    assert [level.name for level in tile.levels] == ["tile_03_small.glb", "tile_03.glb"]
    # The square has side 1, and its picture a quarter of the pixels along each side.
    assert tile.levels[0].error == pytest.approx(tiles.SMALL_TEXTURE / side)
    small, large = [(tmp_path / level.name).stat().st_size for level in tile.levels]
    assert small < large
    few = replace(textured, texture=texture[:64, :64])
    assert len(tiles.write_tile(tmp_path, 4, few, mesh).levels) == 1


def _in_box(points: np.ndarray, box: list[float]) -> bool:
    center = np.array(box[:3])
    half = np.diag(np.array(box[3:]).reshape(3, 3))
    return bool((np.abs(points - center) <= half + 1e-9).all())


@pytest.mark.parametrize("sizes", [(5,), (7, 1, 30)])
def test_files_of_gaussians_are_put_one_behind_the_other(tmp_path, sizes):
    cloud = sphere_cloud()
    paths = []
    first = 0
    for number, size in enumerate(sizes):
        path = tmp_path / f"{number}.ply"
        ply.write_gaussian_ply(path, cloud.select(torch.arange(first, first + size)))
        paths.append(path)
        first += size
    assert ply.concatenate_gaussian_plys(paths, tmp_path / "all.ply") == sum(sizes)
    ply.write_gaussian_ply(tmp_path / "at_once.ply", cloud.select(torch.arange(first)))
    assert (tmp_path / "all.ply").read_bytes() == (tmp_path / "at_once.ply").read_bytes()
