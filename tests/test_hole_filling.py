# SPDX-License-Identifier: Apache-2.0
"""Holes of meshes: which are closed, how well, and that nothing else changes."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from sugar_extractors.mesh.extraction import extract_coarse_mesh
from sugar_extractors.mesh.fusion.tsdf import TsdfConfig
from sugar_extractors.mesh.holes.hole_evidence import ViewEvidence
from sugar_extractors.mesh.holes.hole_filling import (
    HOLE_SHARE,
    OBJECT_HOLE_SHARE,
    HoleCounts,
    fill_holes,
    simple_loops,
)
from sugar_extractors.mesh.holes.hole_shapes import MIN_COVERING_VIEWS, Judgement, Rims
from sugar_extractors.mesh.mesh_config import MeshOptions
from sugar_scene.regions import Box, Region, SharedPlane
from sugar_scene.subdivision import with_split_faces
from sugar_scene.triangle_mesh import (
    Topology,
    TriangleMesh,
    border_loops,
    component_labels,
    doubled_area_normals,
    keep_vertices,
    merge_meshes,
    read_mesh_ply,
    topology,
    with_vertex_normals,
    write_mesh_ply,
)
from tests.support.extractions import brief_extraction
from tests.support.mesh_evidence import (
    BOX,
    UP,
    depth_renderer,
    evidence_of,
    hull_around,
    pierced,
)
from tests.support.mesh_scenes import (
    mesh_of,
    sphere,
    sphere_cloud,
    sphere_points,
    write_mesh_scene,
)
from tests.support.random_scenes import look_at

ASIDE = (1.0, 0.3, 0.2)


def directions(mesh: TriangleMesh) -> np.ndarray:
    return mesh.vertices / np.linalg.norm(mesh.vertices, axis=1, keepdims=True)


def rim_height(torn: TriangleMesh, axis=UP) -> float:
    """Height of the lowest vertex of a hole's rim along an axis."""
    (loop,) = border_loops(torn)
    return (torn.vertices[loop] @ (np.array(axis) / np.linalg.norm(axis))).min()


def torus(n=72, radius=0.25) -> TriangleMesh:
    angles = np.arange(n) * 2 * np.pi / n
    u, v = (axis.ravel() for axis in np.meshgrid(angles, angles, indexing="ij"))
    ring = 1 + radius * np.cos(v)
    vertices = np.stack([ring * np.cos(u), ring * np.sin(u), radius * np.sin(v)], axis=1)
    rows = np.arange(n * n).reshape(n, n)
    right = np.roll(rows, -1, axis=0)
    a, b, c, d = rows, right, np.roll(right, -1, axis=1), np.roll(rows, -1, axis=1)
    faces = [np.stack([a, b, c], -1).reshape(-1, 3), np.stack([a, c, d], -1).reshape(-1, 3)]
    return mesh_of(vertices, np.concatenate(faces))


def plane(n=40) -> TriangleMesh:
    x, y = np.meshgrid(np.arange(n), np.arange(n))
    vertices = np.stack([x.ravel(), y.ravel(), np.zeros(n * n)], axis=1) / n
    k = np.arange(n * n).reshape(n, n)[:-1, :-1].ravel()
    faces = [np.stack([k, k + 1, k + n], 1), np.stack([k + 1, k + n + 1, k + n], 1)]
    return mesh_of(vertices, np.concatenate(faces))


def agree(points: np.ndarray, _: Rims) -> Judgement:
    """All views show all places, and none contradicts."""
    n = len(points)
    return Judgement(np.full(n, MIN_COVERING_VIEWS), np.zeros(n, dtype=bool))


def refuting(is_refuted):
    """A judge of views that all show all places, and contradict some points."""

    def judge(points: np.ndarray, _: Rims) -> Judgement:
        return Judgement(np.full(len(points), 9), is_refuted(points))

    return judge


def without_rims(points) -> tuple[np.ndarray, Rims]:
    """Points to judge, none of which is known to lie on the mesh."""
    n = len(points)
    no = np.zeros(n, dtype=bool)
    return np.array(points), Rims(np.zeros(n, dtype=np.int64), is_rim=no, is_wide=no)


def assert_closed(mesh: TriangleMesh, n_border_edges: int = 0) -> None:
    """Every edge is there once each way, but those of the border, and every face has an area."""
    edges = np.stack([mesh.faces, np.roll(mesh.faces, -1, axis=1)], axis=-1).reshape(-1, 2)
    forward = {tuple(edge) for edge in edges.tolist()}
    assert len(forward) == len(edges)
    assert sum((end, start) not in forward for start, end in forward) == n_border_edges
    assert (np.linalg.norm(doubled_area_normals(mesh.vertices, mesh.faces), axis=1) > 1e-12).all()


def genus(mesh: TriangleMesh) -> int:
    n_edges = mesh.n_faces * 3 // 2
    return (2 - (mesh.n_vertices - n_edges + mesh.n_faces)) // 2


def fillings(mesh: TriangleMesh) -> np.ndarray:
    """Vertices that fill holes. (N, 3)"""
    return mesh.vertices[mesh.filled]


@pytest.mark.parametrize("axis", [UP, ASIDE])
@pytest.mark.parametrize("rings", [40, 80])
def test_a_hole_of_a_sphere_is_closed_as_the_sphere_goes_on(axis, rings):
    torn = pierced(sphere(1.0, rings=rings), axis)
    mesh, counts = fill_holes(torn, agree, is_object=True)
    assert counts == HoleCounts(filled=1)
    assert_closed(mesh)
    assert genus(mesh) == 0
    assert (mesh.vertices[: torn.n_vertices] == torn.vertices).all()
    assert (mesh.faces[: torn.n_faces] == torn.faces).all()
    assert (mesh.filled == (np.arange(mesh.n_vertices) >= torn.n_vertices)).all()
    errors = np.abs(np.linalg.norm(fillings(mesh), axis=1) - 1)
    flat_error = 1 - rim_height(torn, axis)
    assert len(errors) > 20
    assert errors.max() < 0.1 * flat_error
    outward = doubled_area_normals(mesh.vertices, mesh.faces)[torn.n_faces :]
    centers = mesh.vertices[mesh.faces[torn.n_faces :]].mean(axis=1)
    assert ((outward * centers).sum(axis=1) > 0).all()
    assert mesh.normals is not None


def test_triangles_of_a_filling_are_as_large_as_those_around():
    torn = pierced(sphere(1.0, rings=60), ASIDE)
    mesh = fill_holes(torn, agree, is_object=True).mesh
    areas = np.linalg.norm(doubled_area_normals(mesh.vertices, mesh.faces), axis=1)
    around = np.abs(directions(torn)[torn.faces[:, 0]] @ np.array(ASIDE)) > 0.9
    ratio = np.median(areas[torn.n_faces :]) / np.median(areas[: torn.n_faces][around])
    assert 0.4 < ratio < 2


def test_a_curved_slit_is_closed_along_its_curve():
    ball = sphere(1.0, rings=80)
    longitude = np.arctan2(ball.vertices[:, 1], ball.vertices[:, 0])
    is_slit = (np.abs(longitude) < 0.2) & (np.abs(ball.vertices[:, 2]) < 0.06)
    mesh, counts = fill_holes(keep_vertices(ball, ~is_slit), agree, is_object=True)
    assert counts.filled == 1
    assert_closed(mesh)
    # The chord between its ends lies 0.03 inside of the sphere.
    assert np.abs(np.linalg.norm(fillings(mesh), axis=1) - 1).max() < 1e-3


def test_a_loop_of_many_edges_is_divided_and_closed():
    torn = pierced(sphere(1.0, rings=350), (1.0, 0.0, 0.0))
    (loop,) = border_loops(torn)
    assert len(loop) > 128
    mesh = fill_holes(torn, agree, is_object=True).mesh
    assert topology(mesh) == Topology(0.0, 0.0, components=1, holes=0)
    assert np.abs(np.linalg.norm(fillings(mesh), axis=1) - 1).max() < 0.003


def test_a_hole_whose_vertices_are_all_joined_is_closed_around_a_new_one():
    """Decimation leaves loops whose chords are edges of other faces."""
    torn = pierced(sphere(1.0, rings=40), UP, 1)
    torn = keep_vertices(torn, np.arange(torn.n_vertices) != 700)
    loop = next(loop for loop in border_loops(torn) if len(loop) < 10)
    n = len(loop)
    chords = [(a, b) for a in range(n) for b in range(a + 2, n) if (a, b) != (0, n - 1)]
    # Fins with two sides, each on a chord, without open edges.
    fins = []
    for number, (a, b) in enumerate(chords):
        tip = torn.n_vertices + number
        fins += [(loop[a], loop[b], tip), (loop[b], loop[a], tip)]
    tips = np.tile(0.9 * torn.vertices[loop].mean(axis=0), (len(chords), 1))
    finned = mesh_of(
        np.concatenate([torn.vertices, tips + 1e-3 * np.arange(len(chords))[:, None]]),
        np.concatenate([torn.faces, fins]),
    )
    assert topology(finned).holes == 2
    mesh, counts = fill_holes(finned, agree, is_object=True)
    assert counts == HoleCounts(filled=2)
    assert_closed(mesh)
    assert len(fillings(mesh)) > 0


def test_two_holes_of_different_size_are_both_closed():
    torn = pierced(pierced(sphere(1.0)), ASIDE, 9)
    mesh, counts = fill_holes(torn, agree, is_object=True)
    assert (counts.filled, topology(torn).holes, topology(mesh).holes) == (2, 2, 0)
    assert_closed(mesh)


def test_holes_that_touch_in_a_vertex_are_closed_one_by_one():
    ball = sphere(1.0, rings=40)
    middle = int(np.argmax(ball.vertices[:, 0]))
    step = np.abs(np.arctan2(ball.vertices[:, 1], ball.vertices[:, 0]))
    left, right = (
        np.flatnonzero((np.abs(ball.vertices[:, 2]) < 1e-9) & (side * ball.vertices[:, 1] > 0))
        for side in (-1, 1)
    )
    keep = np.ones(ball.n_vertices, dtype=bool)
    for rows in (left, right):
        keep[rows[np.argsort(step[rows])[0]]] = False
    torn = keep_vertices(ball, keep)
    assert middle not in np.flatnonzero(~keep)
    assert len(simple_loops(border_loops(torn))) == 2
    mesh, counts = fill_holes(torn, agree, is_object=True)
    assert counts.filled == 2
    assert_closed(mesh)
    walks = simple_loops([np.array([0, 1, 2, 0, 3, 4])])
    assert [walk.tolist() for walk in walks] == [[0, 1, 2], [0, 3, 4]]


def test_the_end_of_an_open_surface_stays_open():
    half = keep_vertices(sphere(1.0), sphere(1.0).vertices[:, 2] > 0)
    sheet = plane()
    for surface in (half, sheet):
        for is_object in (True, False):
            mesh, counts = fill_holes(surface, agree, is_object=is_object)
            assert mesh is surface
            assert counts == HoleCounts(**{"too_large" if is_object else "outer_borders": 1})
    # A hole in the sheet is closed all the same, flat.
    is_hole = np.linalg.norm(sheet.vertices - [0.5, 0.5, 0], axis=1) < 0.07
    torn = keep_vertices(sheet, ~is_hole)
    mesh, counts = fill_holes(torn, agree, is_object=False)
    assert counts == HoleCounts(filled=1, outer_borders=1)
    assert_closed(mesh, n_border_edges=4 * 39)
    assert np.abs(fillings(mesh)[:, 2]).max() < 1e-9


def test_a_large_hole_and_the_longest_of_what_is_no_object_stay_open():
    degrees = np.degrees(np.arcsin(OBJECT_HOLE_SHARE * np.sqrt(3)))
    torn = pierced(sphere(1.0), UP, degrees)
    assert fill_holes(torn, agree, is_object=True).counts == HoleCounts(too_large=1)
    degrees = np.degrees(np.arcsin(HOLE_SHARE * np.sqrt(3)))
    torn = pierced(pierced(sphere(1.0), UP, degrees), (0.0, 0.0, -1.0), degrees + 3)
    counts = fill_holes(torn, agree, is_object=False).counts
    assert counts == HoleCounts(too_large=1, outer_borders=1)
    assert fill_holes(torn, agree, is_object=True).counts == HoleCounts(filled=2)
    small = pierced(sphere(1.0))
    assert fill_holes(small, agree, is_object=False).counts == HoleCounts(outer_borders=1)


def test_a_hole_that_another_mesh_goes_on_in_stays_open():
    torn = pierced(sphere())
    rim = border_loops(torn)[0]
    plane = SharedPlane(0, float(torn.vertices[rim[0], 0]))
    region = Region(planes=(plane,), voxel=0.01)
    mesh, counts = fill_holes(torn, agree, is_object=True, region=region)
    assert mesh is torn
    assert (counts.filled, counts.outer_borders) == (0, 1)


def test_the_size_of_a_component_is_measured_within_the_box():
    """A hole that is small beside a large ground is large beside what stands in the middle."""
    sheet = plane()
    torn = keep_vertices(sheet, np.linalg.norm(sheet.vertices - [0.5, 0.5, 0], axis=1) > 0.07)
    box = Box.cube(np.array([0.5, 0.5, 0.0]), 0.2)
    counts = fill_holes(torn, agree, is_object=False, region=Region(box)).counts
    assert counts == HoleCounts(outer_borders=1, too_large=1)
    elsewhere = Box.cube(np.full(3, 9.0), 0.2)
    # A single vertex has no size.
    at_a_corner = Box.cube(np.zeros(3), 1e-3)
    assert at_a_corner.contains(torn.vertices).sum() == 1
    for box in (elsewhere, at_a_corner):
        assert fill_holes(torn, agree, is_object=False, region=Region(box)).counts.filled == 1


def test_the_middle_of_a_ring_is_no_hole():
    ring = torus()
    assert fill_holes(ring, agree, is_object=True).mesh is ring
    torn = keep_vertices(ring, np.linalg.norm(ring.vertices - [1.25, 0, 0], axis=1) > 0.12)
    mesh, counts = fill_holes(torn, agree, is_object=True)
    assert counts == HoleCounts(filled=1)
    assert_closed(mesh)
    assert genus(mesh) == genus(ring) == 1


def test_an_empty_mesh_and_a_closed_one_stay_as_they_are():
    empty = mesh_of(np.empty((0, 3)), np.empty((0, 3)))
    ball = sphere(1.0, rings=12)
    for mesh in (empty, ball):
        assert fill_holes(mesh, agree, is_object=True).mesh is mesh


def test_the_same_mesh_gives_the_same_bits():
    torn = pierced(pierced(sphere(1.0)), ASIDE, 9)
    one, two = (fill_holes(torn, agree, is_object=True).mesh for _ in range(2))
    assert one.vertices.tobytes() == two.vertices.tobytes()
    assert one.faces.tobytes() == two.faces.tobytes()


def test_fillings_have_the_colours_of_their_rims():
    ball = sphere(1.0)
    colors = np.rint(127 + 100 * ball.vertices).astype(np.uint8)
    torn = pierced(replace(ball, colors=colors), ASIDE)
    mesh = fill_holes(torn, agree, is_object=True).mesh
    expected = 127 + 100 * fillings(mesh)
    assert np.abs(mesh.colors[mesh.filled] - expected).max() < 6


def test_a_filling_goes_only_as_far_out_as_photographs_allow():
    torn = pierced(sphere(1.0))
    rim = rim_height(torn)
    smooth = fill_holes(torn, agree, is_object=True).mesh
    limit = rim + 0.4 * (1 - rim)
    assert fillings(smooth)[:, 2].max() > limit
    judge = refuting(lambda points: points[:, 2] > limit)
    mesh, counts = fill_holes(torn, judge, is_object=True)
    assert counts == HoleCounts(filled=1)
    assert_closed(mesh)
    # Pulled in where it has to be, and not to the flat disc.
    assert rim + 0.2 * (1 - rim) < fillings(mesh)[:, 2].max() <= limit
    nowhere = refuting(lambda points: points[:, 2] > rim - 0.02)
    stays, counts = fill_holes(torn, nowhere, is_object=True)
    assert stays is torn
    assert counts == HoleCounts(contradicted=1)


def test_one_contradicted_hole_does_not_keep_another_open():
    torn = pierced(pierced(sphere(1.0)), ASIDE, 9)
    is_up = refuting(lambda points: points[:, 2] > 0.9)
    mesh, counts = fill_holes(torn, is_up, is_object=True)
    assert counts == HoleCounts(filled=1, contradicted=1)
    assert topology(mesh).holes == 1
    assert fillings(mesh)[:, 2].max() < 0.9
    assert str(counts) == "1 holes filled, 1 left open (1 contradicted by photographs)"
    assert str(HoleCounts(filled=2)) == "2 holes filled, 0 left open"
    assert counts.figures()["holes_contradicted"] == 1


def ring_of_cameras(n=8, height=0.3, width=256):
    """Cameras that look at the origin from all sides and never from above."""
    cameras = []
    for index in range(n):
        angle = 2 * np.pi * index / n
        center = 4.0 * np.array([np.cos(angle), np.sin(angle), height])
        name = f"view_{index:03d}.png"
        cameras.append(look_at(center, width=width, height=width, focal=width, name=name))
    return cameras


def evidence(cameras, surface: TriangleMesh, hull=None, mesh=None) -> ViewEvidence:
    """Evidence of views of a surface about the holes of a mesh; None for that surface."""
    return evidence_of(cameras, depth_renderer(surface), mesh or surface, hull)


def egg() -> TriangleMesh:
    """An ellipsoid, twice as high as wide."""
    ball = sphere(1.0, rings=60)
    return replace(ball, vertices=ball.vertices * (0.7, 0.7, 1.4))


def test_photographs_from_the_side_close_the_top_of_an_object():
    torn = pierced(egg(), UP, 9)
    cameras = ring_of_cameras()
    hull = hull_around(egg(), cameras)
    judge = evidence(cameras, egg(), hull).judge
    mesh, counts = fill_holes(torn, judge, is_object=True, region=Region(BOX))
    assert counts == HoleCounts(filled=1)
    top = fillings(mesh)[:, 2].max()
    assert abs(top - 1.4) < 0.02
    # Two photographs do not tell that there is a surface.
    few = evidence(cameras[:2], egg(), hull_around(egg(), cameras[:2]))
    assert fill_holes(torn, few.judge, is_object=True).counts == HoleCounts(outside_views=1)


def test_a_hole_beside_the_images_stays_open():
    torn = pierced(egg(), UP, 9)
    # The images end below the hole.
    cameras = [replace(camera, cy=camera.cy - 80) for camera in ring_of_cameras()]
    judge = evidence(cameras, egg()).judge
    assert (judge(*without_rims([[0, 0, 0], [0, 0, 1.4]])).n_views == [8, 0]).all()
    mesh, counts = fill_holes(torn, judge, is_object=True)
    assert counts == HoleCounts(outside_views=1)
    assert mesh is torn


def test_a_filling_that_would_stick_out_of_the_masks_is_pulled_in():
    """The object is flat on top, which masks tell and the rim does not."""
    torn = pierced(egg(), UP, 9)
    rim = torn.vertices[torn.vertices[:, 2] > 0, 2].max()
    capped = replace(egg(), vertices=egg().vertices.clip(max=(9, 9, rim)))
    # As high as the rim, so that they look along the top.
    cameras = ring_of_cameras(height=rim / 4, width=512)
    hull = replace(hull_around(capped, cameras), tolerance=1.0)
    mesh, counts = fill_holes(torn, evidence(cameras, capped, hull).judge, is_object=True)
    unlimited = fill_holes(torn, agree, is_object=True).mesh
    assert counts == HoleCounts(filled=1)
    assert_closed(mesh)
    assert fillings(unlimited)[:, 2].max() > rim + 0.03
    assert fillings(mesh)[:, 2].max() < rim + 0.02
    assert hull.contains(torch.tensor(fillings(mesh))).all()


def test_a_pit_that_views_look_into_is_no_hole():
    torn = pierced(sphere(1.0))
    above = [
        look_at(
            np.array([x, y, 4.0]), width=200, height=200, focal=200.0, name=f"above_{number}.png"
        )
        for number, (x, y) in enumerate([(0.1, 0), (-0.1, 0.1), (0, -0.1), (0.2, 0.2)])
    ]
    # Through the hole they see a floor 0.6 below; a view beside them has a wrong depth.
    floor = plane(8)
    floor = replace(floor, vertices=floor.vertices - (0.5, 0.5, -0.4))
    pit = merge_meshes([torn, floor])
    pit_evidence = evidence(above, pit)
    points = without_rims([[0.0, 0.0, 0.97], [0.0, 0.0, 0.41], [0.0, 0.0, 0.2]])
    judgement = pit_evidence.judge(*points)
    assert judgement.is_contradicted.tolist() == [True, False, False]
    assert fill_holes(torn, pit_evidence.judge, is_object=True).counts == HoleCounts(contradicted=1)
    # The same place as a surface is no contradiction.
    ball_evidence = evidence(above, sphere(1.0))
    assert fill_holes(torn, ball_evidence.judge, is_object=True).counts == HoleCounts(filled=1)


def test_the_inner_side_behind_a_hole_is_no_pit():
    """The model lacks the top of an object as its mesh does, and views from above look inside."""
    torn = pierced(egg(), UP, 9)
    above = ring_of_cameras(height=1.2)
    of_model = evidence(above, torn, hull_around(egg(), above))
    on_top = without_rims([[0.0, 0.0, 1.39]])
    assert of_model.judge(*on_top).is_contradicted.tolist() == [False]
    mesh, counts = fill_holes(torn, of_model.judge, is_object=True, region=Region(BOX))
    assert counts == HoleCounts(filled=1)
    assert abs(fillings(mesh)[:, 2].max() - 1.4) < 0.03
    # If what they see faces them, it is the floor of a pit.
    turned = replace(torn, faces=torn.faces[:, ::-1].copy())
    pit = evidence(above, torn, hull_around(egg(), above), mesh=turned)
    assert pit.judge(*on_top).is_contradicted.tolist() == [True]


def test_fillings_are_marked_in_the_file_and_stay_so_when_triangles_are_split(tmp_path):
    torn = pierced(sphere(1.0))
    mesh = fill_holes(torn, agree, is_object=True).mesh
    write_mesh_ply(tmp_path / "mesh.ply", mesh)
    header = (tmp_path / "mesh.ply").read_bytes().split(b"end_header")[0]
    assert b"property uchar filled" in header
    assert (read_mesh_ply(tmp_path / "mesh.ply").filled == mesh.filled).all()
    finer = with_split_faces(mesh, np.arange(mesh.n_faces)).mesh
    assert finer.filled.sum() > 3 * mesh.filled.sum()
    rim = rim_height(torn)
    assert finer.vertices[finer.filled, 2].min() > rim - 0.01
    write_mesh_ply(tmp_path / "torn.ply", with_vertex_normals(torn))
    assert b"filled" not in (tmp_path / "torn.ply").read_bytes().split(b"end_header")[0]
    assert read_mesh_ply(tmp_path / "torn.ply").filled is None


def views_from_the_side(root, heights, lowest=-2.0) -> MeshOptions:
    """A sphere with Gaussians above a height; views from its sides, none from above."""
    is_there = sphere_points(6_000)[:, 2] > lowest
    cloud = sphere_cloud(6_000).select(torch.from_numpy(is_there))
    scene = write_mesh_scene(root / "scene", cloud, side_cameras(heights))
    return brief_extraction(
        scene,
        root / "meshes",
        decimation_targets=(6_000,),
        mesh_extractor="tsdf",
        background_mesh=False,
        bboxmin=(-2.0, -2.0, -2.0),
        bboxmax=(2.0, 2.0, 2.0),
        tsdf=TsdfConfig(tsdf_depth="plane", tsdf_voxel_size=0.03),
    )


def side_cameras(heights):
    cameras = []
    for height in heights:
        for camera in ring_of_cameras(10, height, width=160):
            cameras.append(replace(camera, name=f"{len(cameras):03d}.png"))
    return cameras


@pytest.fixture(scope="module")
def side_views(tmp_path_factory) -> MeshOptions:
    """The sphere ends above its south pole."""
    root = tmp_path_factory.mktemp("side views")
    return views_from_the_side(root, (0.0, 0.25), lowest=-np.cos(np.radians(30)))


def extracted(options: MeshOptions, tmp_path, **changes):
    """The file of the mesh, the mesh, and the figures of its record."""
    (path,) = extract_coarse_mesh(replace(options, mesh_output_dir=tmp_path, **changes))
    note = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    return path, read_mesh_ply(path), note


def test_an_extraction_closes_what_no_view_looked_at(side_views, tmp_path, capsys):
    _, torn, torn_note = extracted(side_views, tmp_path / "none", fill_holes="none")
    assert torn_note["settings"]["fill_holes"] is False
    assert "holes_filled" not in torn_note["result"]
    assert torn.filled is None
    capsys.readouterr()
    _, mesh, note = extracted(side_views, tmp_path / "auto")
    result = note["result"]
    # The sphere, and long pieces of its rim, each with an end of its own.
    loops = simple_loops(border_loops(torn))
    labels = component_labels(torn)
    n_parts = len({labels[loop[0]] for loop in loops})
    n_filled = len(loops) - n_parts
    assert n_filled > 0
    assert result["holes_filled"] == n_filled
    assert result["holes_outer_borders"] == n_parts
    assert torn_note["result"]["holes"] > n_filled
    assert result["holes"] == torn_note["result"]["holes"] - n_filled
    text = f"{n_filled} holes filled, {n_parts} left open ({n_parts} outer borders)"
    assert text in capsys.readouterr().out
    assert (mesh.vertices[: torn.n_vertices] == torn.vertices).all()
    assert (mesh.faces[: torn.n_faces] == torn.faces).all()
    # What is seen at a grazing angle, as the rim is, is fused up to 0.03 outside of the sphere.
    assert np.abs(np.linalg.norm(fillings(mesh), axis=1) - 1).max() < 0.06
    assert fillings(mesh)[:, 2].min() > 0.9
    # The colour of the sphere is its normal.
    blue = mesh.colors[mesh.filled][:, 2] / 255
    assert np.abs(blue - (0.5 + 0.4 * fillings(mesh)[:, 2])).max() < 0.05


@pytest.mark.slow
def test_an_object_in_masks_is_closed_all_around(tmp_path, monkeypatch):
    heights = (-0.35, 0.35)
    hull = hull_around(sphere(1.03), side_cameras(heights))
    monkeypatch.setattr("sugar_extractors.mesh.loading.hull_of", lambda *_: hull)
    options = views_from_the_side(tmp_path, heights)
    _, torn, _ = extracted(options, tmp_path / "none", fill_holes="none")
    _, mesh, note = extracted(options, tmp_path / "auto")
    assert topology(torn).holes > 0
    assert note["result"]["holes"] == 0
    assert note["result"]["open_edge_share"] == 0
    assert_closed(mesh)
    assert hull.contains(torch.tensor(fillings(mesh))).all()


def test_surfaces_of_other_kinds_are_not_filled(side_views, tmp_path):
    blended = replace(side_views.tsdf, tsdf_depth="blended")
    paths = [
        extracted(side_views, tmp_path / f"{name}", fill_holes=name, tsdf=blended)[0]
        for name in ("auto", "none")
    ]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    options = replace(side_views, fill_holes="auto")
    assert options.fills_holes
    assert not replace(options, watertight=True).fills_holes
    assert not replace(options, mesh_extractor="poisson").fills_holes
    assert "fill_holes" not in replace(options, mesh_extractor="poisson").identity(0.3, 100)
