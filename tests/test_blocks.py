# SPDX-License-Identifier: Apache-2.0
"""Blocks of a capture: where space is cut, what a block gets to see, and one surface of all."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from sugar_extractors.mesh.decimation import decimated
from sugar_extractors.mesh.fusion.observed_region import ObservedRegion
from sugar_extractors.mesh.fusion.tsdf import TsdfConfig, cleaned
from sugar_pipeline.blocks import block_depths, block_meshes
from sugar_pipeline.blocks.block_depths import StoredView, border_weights
from sugar_pipeline.blocks.block_plan import PLAN_FILE, Block, BlockPlan, read_plan
from sugar_pipeline.blocks.block_scenes import cut_out, write_cut_out
from sugar_pipeline.blocks.joined_mesh import JoinedFusion, SearchOfThinParts, VoxelGrid, welded
from sugar_pipeline.blocks.partition import (
    EVERYWHERE,
    BlockBox,
    Partition,
    cut_space,
    margin_of,
)
from sugar_scene import triangle_mesh
from sugar_scene.regions import Region, SharedPlane
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_utils.console import Console
from sugar_utils.recipe import Recipe
from tests.support.mesh_scenes import cameras_around
from tests.test_depth_fusion import RADIUS, ellipsoid_view
from tests.test_thin_parts import BOX, LENGTH, PIXEL, VOXEL, covered_share, rod_before_a_wall

CPU = torch.device("cpu")
WHOLE = Partition((EVERYWHERE,), 0.0, BlockBox((-1.0, -1.0, -1.0), (1.0, 1.0, 1.0)))


def two_halves(tmp_path, place=0.1) -> tuple[Block, Block]:
    below, above = EVERYWHERE.halves(0, place)
    return (
        Block(0, tmp_path / "block_00", below, 4),
        Block(1, tmp_path / "block_01", above, 4),
    )


@pytest.mark.parametrize("n", [1, 2, 3, 5, 9])
def test_boxes_divide_the_work_and_every_place_has_one(n):
    rng = np.random.default_rng(n)
    points = rng.uniform(-1, 1, (4000, 3)) * [3, 2, 0.1]
    work = rng.uniform(0.5, 1.5, len(points))
    boxes = cut_space(points, work, n)
    owners = np.stack([box.contains(points) for box in boxes])
    assert (owners.sum(axis=0) == 1).all()
    shares = owners @ work / work.sum()
    assert shares.min() > 0.6 / n
    assert shares.max() < 1.5 / n


def test_a_cut_goes_through_the_street_and_not_through_a_house():
    rng = np.random.default_rng(0)
    left = rng.uniform(-1.0, -0.08, 5000)
    right = rng.uniform(0.05, 1.1, 5000)
    x = np.concatenate([left, right])
    points = np.stack([x, 0.1 * rng.uniform(size=len(x)), 0 * x], axis=1)
    below, above = cut_space(points, np.ones(len(x)), 2)
    assert below.high[0] == above.low[0]
    assert -0.08 <= below.high[0] <= 0.05


def test_places_that_cannot_be_divided_are_refused():
    with pytest.raises(ValueError, match="3 positions"):
        cut_space(np.zeros((3, 3)), np.ones(3), 4)
    with pytest.raises(ValueError, match="too close"):
        cut_space(np.zeros((9, 3)), np.ones(9), 3)


def test_margins_are_a_share_of_the_shortest_side_that_was_cut():
    bounds = BlockBox((0.0, 0.0, 0.0), (4.0, 1.0, 0.2))
    boxes = EVERYWHERE.halves(0, 1.5)
    assert margin_of(boxes, bounds) == pytest.approx(0.15 * 1.5)
    assert margin_of([EVERYWHERE], bounds) == 0


def test_weights_of_two_blocks_sum_up_to_one(tmp_path):
    first, second = two_halves(tmp_path)
    points = np.random.default_rng(2).uniform(-1, 1, (500, 3))
    weights = border_weights(first, points, 0.3)
    assert np.allclose(weights + border_weights(second, points, 0.3), 1)
    assert weights[points[:, 0] < -0.2].min() == 1
    assert weights[points[:, 0] > 0.4].max() == 0


def test_a_plan_is_read_back(tmp_path):
    blocks = two_halves(tmp_path)
    plan = BlockPlan(tmp_path, blocks, 0.25, BlockBox((-1.0, -2.0, -3.0), (1.0, 2.0, 3.0)))
    assert read_plan(tmp_path) is None
    # JSON has lists where Python has tuples.
    recipe = Recipe({"blocks": 2, "sizes": [(4, 3)]})
    plan.write(recipe)
    assert read_plan(tmp_path) == plan
    assert recipe.is_current(tmp_path / PLAN_FILE)
    assert not Recipe({"blocks": 3, "sizes": [(4, 3)]}).is_current(tmp_path / PLAN_FILE)


def test_a_block_gets_the_rectangle_that_shows_it_and_its_camera(tmp_path):
    camera = cameras_around(1)[0]
    height, width = camera.height // 2, camera.width // 2
    places = np.full((height, width, 3), np.nan)
    places[10:20, 30:44] = 0.0
    places[12, 32] = (0.9, 0.0, 0.0)  # of the other block
    halves = replace(WHOLE, boxes=EVERYWHERE.halves(0, 0.5))
    cut = cut_out(camera, places, halves, 0)
    assert cut is not None
    taken = cut.cut_camera()
    assert (cut.left, cut.top) == (2 * 28 - 8, 2 * 8 - 8)
    assert (cut.right, cut.bottom) == (camera.width, 2 * 22 + 8)
    assert (taken.width, taken.height) == (cut.right - cut.left, cut.bottom - cut.top)
    # The same ray ends in the same pixel of the photograph.
    assert taken.cx == camera.cx - cut.left
    assert taken.cy == camera.cy - cut.top

    photograph = np.random.default_rng(0).integers(
        0, 255, (camera.height, camera.width, 3), dtype=np.uint8
    )
    write_cut_out(tmp_path, cut, photograph)
    mask = np.asarray(Image.open(tmp_path / "masks" / f"{cut.name}.png"))
    assert mask.shape == (taken.height, taken.width)
    # What is seen through the block counts, too. The pixel of the other block is surrounded.
    assert cut.counts[12, 32]
    places[10:20, 36:] = (0.9, 0.0, 0.0)
    narrow = cut_out(camera, places, halves, 0)
    assert narrow.counts[:, :38].all()
    assert not narrow.counts[10:20, 38:44].any()
    assert (mask == 255).all()
    assert Image.open(tmp_path / "images" / cut.name).size == (taken.width, taken.height)


def test_a_photograph_that_hardly_shows_a_block_is_none_of_its_photographs():
    camera = cameras_around(1)[0]
    places = np.full((40, 40, 3), np.nan)
    places[:4, :4] = 0.0
    assert cut_out(camera, places, WHOLE, 0) is None


def test_sky_counts_in_photographs_of_a_block_but_makes_none():
    camera = cameras_around(1)[0]
    places = np.full((40, 40, 3), 50.0)
    assert cut_out(camera, places, WHOLE, 0) is None
    places[20:] = 0.0
    cut = cut_out(camera, places, WHOLE, 0)
    assert cut is not None
    assert cut.counts is not None
    assert cut.counts.all()
    assert cut.share == 0.5
    assert cut.top > 0


def stored(tmp_path, cameras, blocks, margin, render=ellipsoid_view) -> list[StoredView]:
    """Exact depth of a sphere, written as each block writes it."""
    views = []
    for block in blocks:
        block.depths.mkdir(parents=True)
        for number, camera in enumerate(cameras):
            name = f"{number:05d}.npz"
            record = block_depths._write_view(block, margin, render, camera, name)
            if record is not None:
                views.append(StoredView(block.depths / name, record))
    return views


def test_a_stored_view_is_read_back_within_its_steps(tmp_path):
    camera = cameras_around(1)[0]
    block = Block(0, tmp_path / "block_00", EVERYWHERE, 1)
    (view,) = stored(tmp_path, [camera], [block], 0.0)
    read = view.read(CPU)
    exact = ellipsoid_view(camera)
    is_known = exact.depth > 0
    assert ((read.depth > 0) == is_known).all()
    assert (read.depth - exact.depth).abs()[is_known].max() < 1e-4
    assert torch.allclose(read.weight[is_known], exact.weight[is_known])
    assert read.camera.fx == camera.fx
    assert np.array_equal(read.camera.rotation, camera.rotation)
    side = float(exact.depth[is_known].median()) / math.sqrt(camera.fx * camera.fy)
    assert view.record.pixel == pytest.approx(side, rel=1e-3)


@pytest.fixture(scope="module")
def sphere_of_two_blocks(tmp_path_factory):
    """A sphere, fused in two regions and in one, of the depths of two blocks."""
    folder = tmp_path_factory.mktemp("sphere")
    blocks = two_halves(folder)
    views = stored(folder, cameras_around(14), blocks, 0.2)
    grid = VoxelGrid.over(BlockBox((-1.2,) * 3, (1.2,) * 3), 0.04)
    fusion = JoinedFusion(views, grid, TsdfConfig(), CPU, Console.silent())
    parts = [fusion.surface(grid.region_of(block.box)) for block in blocks]
    whole = fusion.surface(grid.region_of(EVERYWHERE))
    return blocks, grid, fusion, parts, whole


def test_two_regions_end_in_the_same_vertices(sphere_of_two_blocks):
    _, grid, _, parts, whole = sphere_of_two_blocks
    joined = welded(parts, 1e-6)
    assert joined.n_vertices == whole.n_vertices
    assert joined.n_faces == whole.n_faces == sum(part.n_faces for part in parts)
    order = np.lexsort(joined.vertices.round(9).T)
    whole_order = np.lexsort(whole.vertices.round(9).T)
    assert np.abs(joined.vertices[order] - whole.vertices[whole_order]).max() < 1e-12
    assert triangle_mesh.topology(joined).open_edge_share == 0
    radii = np.linalg.norm(joined.vertices, axis=1)
    assert np.abs(radii - RADIUS).mean() < 0.2 * grid.voxel


@pytest.mark.slow
def test_a_region_with_too_many_voxels_is_halved_without_a_trace(sphere_of_two_blocks):
    _, grid, fusion, _, whole = sphere_of_two_blocks
    small = replace(fusion, config=TsdfConfig(max_voxels=40_000))
    mesh = small.surface(grid.region_of(EVERYWHERE))
    assert mesh.n_faces == whole.n_faces
    assert triangle_mesh.topology(mesh).open_edge_share == 0


def test_decimated_parts_still_fit(sphere_of_two_blocks):
    blocks, grid, _, parts, _ = sphere_of_two_blocks
    small = []
    for block, part in zip(blocks, parts, strict=True):
        ends = grid.ends_of(grid.region_of(block.box))
        is_shared = ends.shared(part.vertices)
        small.append(decimated(part, 900, fixed=is_shared))
        assert small[-1].n_faces <= 1000
        kept = set(map(tuple, small[-1].vertices))
        assert all(tuple(vertex) in kept for vertex in part.vertices[is_shared])
    joined = welded(small, 1e-6)
    assert triangle_mesh.topology(joined).open_edge_share == 0
    assert triangle_mesh.topology(joined).components == 1


def test_a_rod_through_two_regions_is_there_but_at_their_plane(tmp_path):
    below, above = EVERYWHERE.halves(2, 0.1)
    blocks = (Block(0, tmp_path / "0", below, 24), Block(1, tmp_path / "1", above, 24))
    views = stored(tmp_path, cameras_around(24), blocks, 0.2, rod_before_a_wall)
    grid = VoxelGrid.over(BlockBox(BOX.low, BOX.high), VOXEL)
    config = TsdfConfig(min_component=10)
    coarse = JoinedFusion(views, grid, config, CPU, Console.silent())
    everywhere = ObservedRegion(np.zeros((0, 3)), np.zeros(0), 0.0)
    fine = replace(coarse, search=SearchOfThinParts(everywhere, views))
    halved = replace(fine, config=replace(config, max_voxels=4000))
    for block in blocks:
        cubes = grid.region_of(block.box)
        assert covered_share(coarse.surface(cubes)) == 0
        (plane,) = grid.ends_of(cubes).planes
        mesh = fine.surface(cubes)
        assert halved.surface(cubes).n_faces == mesh.n_faces
        heights = mesh.vertices[:, 2]
        distances = np.abs(heights - plane.position)
        # A cube of smaller voxels at the plane stays as it was.
        assert distances.min() == pytest.approx(grid.cube_side / 2, abs=VOXEL)
        assert np.abs(heights).max() > 0.9 * LENGTH / 2
        assert len(np.unique(heights // PIXEL)) * PIXEL > 0.9 * np.ptp(heights)


def test_photographs_of_a_block_count_where_they_show_it(tmp_path):
    block, _ = two_halves(tmp_path)
    camera = cameras_around(1)[0]
    white = torch.ones(*camera.shape, 4)
    white[0] = 0
    photograph = block_meshes.photograph_of(block.box, lambda camera: white, ellipsoid_view)
    exact = ellipsoid_view(camera)
    points = exact.world_points(exact.depth).reshape(*camera.shape, 3)
    counts = (exact.depth > 0) & (points[..., 0] < 0.1) & (white[..., 3] > 0)
    pixels = photograph(camera)
    assert ((pixels[..., 3] > 0) == counts).all()
    assert 0 < counts.sum() < (exact.depth > 0).sum()
    assert (pixels[..., :3] == white[..., :3]).all()


def test_what_goes_on_in_the_next_region_is_neither_removed_nor_closed():
    square = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0.0]])
    faces = np.array([[0, 1, 2], [0, 2, 3]])
    vertices = np.concatenate([square, square + [5, 0, 0]])
    colors = np.zeros((8, 3), np.uint8)
    mesh = TriangleMesh(vertices, np.concatenate([faces, faces + 4]), colors)
    region = Region(planes=(SharedPlane(0, 6.0),), voxel=0.1)
    config = TsdfConfig(min_component=3)
    large = cleaned(mesh, config, 2.0, region)
    assert large.n_faces == 2
    assert large.vertices[:, 0].min() == 5
    assert cleaned(mesh, config, 1.4, region).n_faces == 4
    filled = cleaned(mesh, TsdfConfig(tsdf_depth="plane", min_component=1), 2.0, region)
    # The border of the first square is closed, that of the other one ends at the plane.
    assert filled.n_faces == 4 + 4
