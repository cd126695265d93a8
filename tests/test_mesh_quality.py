# SPDX-License-Identifier: Apache-2.0
"""Figures of meshes whose distance to the truth is known by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from plyfile import PlyData, PlyElement

from benchmarks.mesh_quality import Parts, parser, part_completeness, run
from benchmarks.rods_scene import PIXEL, SHEET_HEIGHT, SHEET_WIDTH, joined, parts
from sugar_extractors.any_mesh import read_any_mesh
from sugar_pipeline.quality.mesh_quality import (
    CLEARANCE,
    compare_surfaces,
    make_reference,
    read_reference,
)
from sugar_scene.surface_queries import Surface, sample_surface
from sugar_scene.triangle_mesh import TriangleMesh, merge_meshes, write_mesh_ply
from sugar_utils.errors import UserError
from tests.support.mesh_scenes import mesh_of, sphere

N_SAMPLES = 5_000


def plate(low, high, height) -> TriangleMesh:
    corners = [[low, low, height], [high, low, height], [high, high, height], [low, high, height]]
    return mesh_of(corners, [[0, 1, 2], [0, 2, 3]])


def reference_of(mesh: TriangleMesh, ground=None):
    """A reference that sees the whole mesh."""
    seen = sample_surface(mesh.vertices, mesh.faces, N_SAMPLES, seed=9)
    box = np.stack([mesh.vertices.min(axis=0), mesh.vertices.max(axis=0)])
    return make_reference(mesh, seen.points, seen.normals, box, ground)


def compare(mesh, reference, **kwargs):
    return compare_surfaces(mesh, reference, n_samples=N_SAMPLES, **kwargs)


def write_scene(root, mesh: TriangleMesh, **changes):
    """The ground-truth files of a scene, with more visible samples than the object's."""
    root.mkdir(parents=True, exist_ok=True)
    write_mesh_ply(root / "gt_object.ply", mesh)
    seen = sample_surface(mesh.vertices, mesh.faces, 5_000)
    points = np.concatenate([seen.points, np.full((50, 3), 7.0)])
    normals = np.concatenate([seen.normals, np.tile([0, 0, 1.0], (50, 1))])
    table = np.concatenate([points, normals], axis=1).astype("<f4")
    names = ("x", "y", "z", "nx", "ny", "nz")
    rows = np.ascontiguousarray(table).view([(name, "<f4") for name in names]).reshape(-1)
    PlyData([PlyElement.describe(rows, "vertex")]).write(str(root / "gt_visible.ply"))
    facts = {
        "up": "+z",
        "object_bbox": [mesh.vertices.min(axis=0).tolist(), mesh.vertices.max(axis=0).tolist()],
        "gt_visible_object_samples": 5_000,
        **changes,
    }
    (root / "gt.json").write_text(json.dumps(facts))
    return root


def test_samples_are_even_in_area_repeatable_and_lie_on_their_faces():
    mesh = mesh_of(
        [[0, 0, 0], [3, 0, 0], [0, 3, 0], [0, 0, 1], [1, 0, 1], [0, 1, 1]],
        [[0, 1, 2], [3, 4, 5], [0, 0, 1]],
    )
    one, two = (sample_surface(mesh.vertices, mesh.faces, 1_000, seed=4) for _ in range(2))
    assert np.array_equal(one.points, two.points)
    upper = one.points[:, 2] > 0.5
    assert upper.sum() == 100
    assert np.allclose(one.points[~upper, 2], 0)
    assert np.allclose(one.normals, [0, 0, 1])
    # Uniform inside a face: the mean of the samples is the centroid.
    assert np.allclose(one.points[~upper].mean(axis=0), [1, 1, 0], atol=0.1)
    other = sample_surface(mesh.vertices, mesh.faces, 1_000, seed=5)
    assert not np.array_equal(one.points, other.points)


def test_a_mesh_without_area_has_no_samples():
    assert len(sample_surface(np.zeros((3, 3)), np.array([[0, 1, 2]]), 10)) == 0
    assert len(sample_surface(np.zeros((0, 3)), np.zeros((0, 3), dtype=int), 10)) == 0


def test_distance_to_a_triangle_inside_beside_and_beyond_its_corners():
    corners = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0]], dtype=float)
    points = np.array([[0.2, 0.2, -0.3], [0.5, -2, 0], [1, 1, 0], [-3, -4, 0], [2, 0, 0]])
    found = Surface(corners, np.array([[1, 1, 2], [0, 1, 2]])).nearest(points)
    assert np.allclose(found.distances, [0.3, 2, 0.5**0.5, 5, 1])
    assert np.allclose(found.normals, [0, 0, 1])


def test_nothing_is_near_where_there_is_no_surface():
    line = np.array([[0, 0, 0], [1, 0, 0], [2, 0, 0]], dtype=float)
    assert np.isinf(Surface(line, np.array([[0, 1, 2]])).nearest(line).distances).all()


def test_a_surface_compared_with_itself_has_no_error():
    quality = compare(sphere(), reference_of(sphere()))
    assert quality.accuracy < 1e-5
    assert quality.completeness < 1e-5
    assert quality.f_scores == (1.0, 1.0)
    assert quality.normal_agreement > 0.999
    assert (quality.components, quality.open_edge_share) == (1, 0.0)
    assert quality.triangles == quality.object_triangles == sphere().n_faces


def test_a_larger_sphere_is_off_by_the_difference_of_the_radii():
    quality = compare(sphere(0.507), reference_of(sphere(0.5)))
    assert quality.accuracy == pytest.approx(0.007, rel=0.02)
    assert quality.completeness == pytest.approx(0.007, rel=0.02)
    assert quality.chamfer == pytest.approx(0.007, rel=0.02)
    assert quality.f_scores == (0.0, 1.0)
    between = compare_surfaces(sphere(0.507), reference_of(sphere(0.5)), thresholds=(0.006, 0.008))
    assert between.f_scores == (0.0, 1.0)
    assert ("F-score at 0.8%", "1.0000") in between.rows()


def test_a_shifted_sphere_has_the_mean_and_the_f_score_of_a_cosine():
    # At angle t to the shift d the distance is d |cos t|, and cos t is uniform on a sphere.
    quality = compare(sphere(center=(0.0, 0.0098, 0.0)), reference_of(sphere()))
    assert quality.accuracy == pytest.approx(0.0049, rel=0.02)
    assert quality.completeness == pytest.approx(0.0049, rel=0.02)
    assert quality.f_scores[0] == pytest.approx(0.005 / 0.0098, abs=0.02)
    assert quality.f_scores[1] == 1.0


def test_figures_do_not_depend_on_scale_place_and_orientation_of_faces():
    plain = compare(sphere(0.505), reference_of(sphere()))
    shift = np.array([5e3, -2e3, 9e3])
    moved = compare(sphere(505.0, shift), reference_of(sphere(500.0, shift)))
    assert moved.accuracy == pytest.approx(plain.accuracy, rel=1e-3)
    turned = mesh_of(sphere(0.505).vertices, sphere(0.505).faces[:, ::-1])
    flipped = compare(turned, reference_of(sphere()))
    assert flipped.normal_agreement == pytest.approx(plain.normal_agreement, abs=1e-4)
    assert flipped.normal_agreement > 0.999


def test_half_a_sphere_is_accurate_and_not_complete():
    whole = sphere()
    upper = whole.vertices[whole.faces].mean(axis=1)[:, 2] > 0
    quality = compare(mesh_of(whole.vertices, whole.faces[upper]), reference_of(whole))
    assert quality.accuracy < 1e-5
    assert quality.precisions == (1.0, 1.0)
    assert quality.recalls[0] == pytest.approx(0.5, abs=0.02)
    assert quality.completeness > 0.05
    assert 0 < quality.open_edge_share < 0.02


def test_shares_of_edges_and_parts_are_counted():
    fan = mesh_of(
        [
            [0, 0, 0],
            [1, 0, 0],
            [0, 1, 0],
            [0, -1, 0],
            [0, 0, 1],
            [0, 0, -1],
            [1, 0, -1],
            [1, 1, -1],
            [9, 9, 9],
        ],
        [[0, 1, 2], [0, 1, 3], [0, 1, 4], [5, 6, 7]],
    )
    quality = compare(fan, reference_of(fan))
    assert quality.non_manifold_edge_share == pytest.approx(1 / 10)
    assert quality.open_edge_share == pytest.approx(9 / 10)
    # A vertex without faces is no part.
    assert (quality.components, quality.triangles) == (2, 4)


GROUND = np.array([[-4.0, -4, 0], [4, 4, 0]])


def test_correct_ground_and_what_is_under_it_are_no_errors():
    reference = reference_of(sphere(center=(0, 0, 0.45)), GROUND)
    scene = merge_meshes([sphere(center=(0, 0, 0.45)), plate(-4, 4, 0.0), plate(-0.4, 0.4, -0.3)])
    quality = compare(scene, reference)
    assert quality.accuracy < 1e-5
    assert quality.completeness < 1e-5
    # Just above the clearance: still near the true ground.
    risen = merge_meshes([sphere(center=(0, 0, 0.45)), plate(-4, 4, CLEARANCE + 0.002)])
    assert compare(risen, reference).accuracy < 0.012


def test_blobs_in_the_air_count_inside_the_box_only():
    reference = reference_of(sphere(center=(0, 0, 0.45)), GROUND)
    truth = sphere(center=(0, 0, 0.45))
    near = compare(merge_meshes([truth, sphere(0.05, (0.45, 0.45, 0.9), 20)]), reference)
    far = compare(merge_meshes([truth, sphere(0.5, (3.0, 3.0, 2.0), 20)]), reference)
    assert near.accuracy > 1e-3
    assert near.precisions[1] < 1
    assert far.accuracy < 1e-5
    assert far.completeness < 1e-5


def test_a_mesh_elsewhere_is_refused():
    with pytest.raises(UserError, match="no surface where the object is"):
        compare(sphere(center=(5, 5, 5)), reference_of(sphere()))
    with pytest.raises(UserError, match="no surface where the object is"):
        compare(mesh_of(np.zeros((0, 3)), []), reference_of(sphere()))


def test_reference_of_a_scene_leaves_out_what_is_not_the_object(tmp_path):
    scene = write_scene(tmp_path, sphere(center=(0, 0, 0.45)), ground_bbox=GROUND.tolist())
    reference = read_reference(scene)
    assert len(reference.visible_points) == 5_000
    assert reference.size == pytest.approx(1.0)
    assert reference.low[2] == pytest.approx(CLEARANCE)
    assert reference.high[2] == pytest.approx(0.95 + 0.05)
    assert compare(sphere(center=(0, 0, 0.45)), reference).chamfer < 1e-5


def test_a_scene_may_stand_on_its_head(tmp_path):
    mesh = sphere(center=(0, 0, -0.45))
    reference = read_reference(write_scene(tmp_path, mesh, up="-z", ground_bbox=GROUND.tolist()))
    assert reference.high[2] == pytest.approx(-CLEARANCE)
    assert reference.low[2] == pytest.approx(-1.0)


def test_scenes_without_ground_truth_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no gt_object\.ply"):
        read_reference(tmp_path)
    scene = write_scene(tmp_path, sphere(rings=10), up="sideways")
    with pytest.raises(UserError, match=r"gt\.json: Expected str"):
        read_reference(scene)
    write_scene(tmp_path, sphere(rings=10), gt_visible_object_samples=0)
    with pytest.raises(UserError, match="no visible sample"):
        read_reference(scene)
    write_scene(tmp_path, sphere(rings=10))
    (tmp_path / "gt_visible.ply").write_bytes(b"ply\nrubbish")
    with pytest.raises(UserError, match=r"gt_visible\.ply: damaged"):
        read_reference(scene)


def test_meshes_of_all_kinds_are_read(tmp_path):
    obj = tmp_path / "a.obj"
    obj.write_text("mtllib a.mtl\nv 0 0 0\nv 1 0 0\nv 0 1 0\nvt 0 0\nf 1/1 2/1 3/1\nf -3 -2 -1\n")
    mesh = read_any_mesh(obj)
    assert mesh.faces.tolist() == [[0, 1, 2], [0, 1, 2]]
    for text in ("v 0 0 0\nf 1 2 3\n", "v a b c\n", "v 0 0 0\nf 1 1 1 1\n"):
        obj.write_text(text)
        with pytest.raises(UserError, match=r"a\.obj"):
            read_any_mesh(obj)
    with pytest.raises(UserError, match="not a mesh"):
        read_any_mesh(tmp_path / "a.stl")
    with pytest.raises(UserError, match="no such file"):
        read_any_mesh(tmp_path / "b.ply")
    (tmp_path / "c.pt").write_bytes(b"malformed")
    with pytest.raises(UserError, match=r"c\.pt"):
        read_any_mesh(tmp_path / "c.pt")


@pytest.mark.parametrize("number", ["99999999999999999999", "-99999999999999999999"])
def test_an_obj_whose_rows_are_beyond_64_bits_is_one_line(tmp_path, number):
    obj = tmp_path / "a.obj"
    obj.write_text(f"v 0 0 0\nv 1 0 0\nv 0 1 0\nf 1 2 {number}\n")
    with pytest.raises(UserError, match="damaged, or not an OBJ of triangles") as caught:
        read_any_mesh(obj)
    assert "\n" not in str(caught.value)


def test_benchmark_prints_a_table_of_all_meshes(tmp_path, capsys):
    scene = write_scene(tmp_path / "scene", sphere())
    write_mesh_ply(tmp_path / "good.ply", sphere())
    write_mesh_ply(tmp_path / "bad.ply", sphere(0.52))
    meshes = map(str, [tmp_path / "good.ply", tmp_path / "bad.ply", scene])
    run(parser().parse_args([*meshes, "--samples", "3000"]))
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    table = {row[0]: row[1:] for row in rows}
    assert any(name.startswith("Chamfer") for name in table)
    good, bad = (float(cell.rstrip("%")) for cell in table["accuracy"])
    assert good < 0.1
    assert bad == pytest.approx(2.0, rel=0.02)


def test_the_true_bunny_measures_as_perfect(scenes_dir):
    scene = scenes_dir / "bunny"
    quality = compare_surfaces(
        read_any_mesh(scene / "gt_mesh.ply"), read_reference(scene), n_samples=50_000
    )
    assert quality.chamfer < 1e-5
    assert quality.f_scores == (1.0, 1.0)
    assert quality.normal_agreement > 0.99


@pytest.mark.parametrize("number", ["nan", "inf", "1e999"])
def test_an_obj_without_finite_vertices_is_not_measured(tmp_path, number):
    obj = tmp_path / "a.obj"
    obj.write_text(f"v 0 0 0\nv 1 0 0\nv 0 {number} 0\nf 1 2 3\n")
    with pytest.raises(UserError, match=r"a\.obj: has vertices with NaN or infinity"):
        read_any_mesh(obj)


def test_a_part_is_complete_where_a_mesh_is_within_a_pixel_of_it():
    low = plate(0.0, 1.0, 0.0)
    high = plate(0.0, 1.0, 0.5)
    reference = reference_of(merge_meshes([low, high]))
    names = Parts(pixel=0.01, faces={"low": 2, "high": 2})

    def shares(mesh):
        return [value for _, value in part_completeness(mesh, reference, names)]

    assert shares(low) == ["100.0%", "0.0%"]
    assert shares(merge_meshes([plate(0.0, 1.0, 0.009), plate(0.0, 1.0, 0.511)])) == [
        "100.0%",
        "0.0%",
    ]
    # Half of the upper plate.
    half = mesh_of([[0, 0, 0.5], [1, 0, 0.5], [1, 1, 0.5]], [[0, 1, 2]])
    assert 0.49 < float(shares(half)[1].rstrip("%")) / 100 < 0.53


def test_the_thin_parts_have_their_size_and_face_outwards():
    tubes = parts()
    mesh = joined(tubes).mesh
    first = 0
    volumes = {}
    for part, n_faces in zip(tubes, joined(tubes).n_faces, strict=True):
        corners = mesh.vertices[mesh.faces[first : first + n_faces]]
        corners = corners - corners.mean(axis=(0, 1))
        a, b, c = corners.transpose(1, 0, 2)
        volumes[part.name] = (np.cross(a, b) * c).sum() / 6
        first += n_faces
    assert first == mesh.n_faces
    length = np.hypot(0.06, 0.8)
    for diameter in (1, 2, 4):
        rod = np.pi * (diameter * PIXEL / 2) ** 2 * length
        assert volumes[f"upright rod, {diameter} px"] == pytest.approx(rod, rel=2e-3)
    ring = np.pi * (1.5 * PIXEL) ** 2 * 2 * np.pi * 0.2
    assert volumes["ring, 3 px"] == pytest.approx(ring, rel=2e-3)
    height = np.hypot(0.1, SHEET_HEIGHT)
    round_edges = (1 - np.pi / 4) * (3 * PIXEL) ** 2
    sheet = (SHEET_WIDTH * 3 * PIXEL - round_edges) * height
    assert volumes["sheet, 3 px thick"] == pytest.approx(sheet, rel=2e-3)
