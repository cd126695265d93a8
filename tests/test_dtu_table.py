# SPDX-License-Identifier: Apache-2.0
"""DTU: files in its layouts, and scores that are known by hand; one table of all scans."""

from __future__ import annotations

import json

import numpy as np
import pytest
from plyfile import PlyData
from scipy.io import savemat
from scipy.spatial import cKDTree

from benchmarks import dtu, tanks_and_temples
from benchmarks.published import dtu_score, scans
from benchmarks.published.dtu_data import (
    Truth,
    find_scans,
    find_truth,
    points_file,
    prepared_scene,
    read_truth,
    to_millimetres,
    true_centers,
    true_poses,
)
from benchmarks.published.dtu_score import PATCH, score_mesh, thinned, was_observed
from benchmarks.published.similarity import Similarity, best_similarity, robust_similarity
from gaussian_splatting.data.colmap import find_model, read_colmap
from gaussian_splatting.data.images import ImageFolder
from sugar_scene.mesh.triangle_mesh import merge_meshes
from sugar_utils.errors import UserError
from tests.support.mesh_scenes import sphere_points
from tests.support.pose_errors import cameras_of
from tests.support.published_layouts import grid, plate, some_similarity, write_points
from tests.support.tiny_scene import (
    SHORT_PIPELINE,
    TinyScene,
    make_tiny_checkpoint,
    make_tiny_scene,
)

MILLIMETRES = 10.0
"""Of DTU's world in a unit of the tiny scene's."""

OFFSET = np.array([40.0, -30.0, 600.0])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyScene:
    return make_tiny_scene(tmp_path_factory.mktemp("tiny") / "scene")


@pytest.fixture(scope="module")
def short(tmp_path_factory, tiny) -> list[str]:
    """Flags of a pipeline of seconds, from a vanilla checkpoint on."""
    checkpoint = make_tiny_checkpoint(tmp_path_factory.mktemp("vanilla"), tiny)
    return ["--gs_output_dir", str(checkpoint), *map(str, SHORT_PIPELINE)]


# Similarities


def test_similarity_is_found_again_and_composes():
    points = np.random.default_rng(1).normal(size=(20, 3))
    moved, other = some_similarity(), some_similarity(3)
    found = best_similarity(points, moved.apply(points))
    assert found.scale == pytest.approx(2.5)
    assert np.allclose(found.rotation, moved.rotation)
    assert np.allclose(other.after(moved).apply(points), other.apply(moved.apply(points)))
    matrix = np.eye(4)
    matrix[:3, :3], matrix[:3, 3] = moved.scale * moved.rotation, moved.translation
    assert np.allclose(Similarity.of_matrix(matrix).apply(points), moved.apply(points))


def test_mirrored_points_are_turned_and_not_mirrored():
    points = np.random.default_rng(1).normal(size=(20, 3))
    found = best_similarity(points, points * (1, 1, -1))
    assert np.linalg.det(found.rotation) == pytest.approx(1)


def test_cameras_in_wrong_places_do_not_move_the_others():
    points = np.random.default_rng(1).normal(size=(30, 3))
    target = some_similarity().apply(points)
    target[:4] += 5
    found, missed = robust_similarity(points, target)
    assert np.allclose(found.apply(points[4:]), target[4:])
    assert (missed[:4] > 1).all()
    assert (missed[4:] < 1e-9).all()


# DTU's protocol


def truth_of(points, plane=(0, 0, 1, 5), observed=None) -> Truth:
    """A volume of 40 x 40 x 20 mm from the origin on, in voxels of 10 mm."""
    seen = np.ones((5, 5, 3), dtype=bool) if observed is None else observed
    box = np.array([[0, 0, 0], [40, 40, 20]], dtype=float)
    return Truth(points, seen, box, 10.0, np.array(plane, dtype=float))


def test_mesh_half_a_millimetre_above_the_truth_scores_half_a_millimetre():
    truth = truth_of(grid(0, 20.05, 0, 20.05, 10, 0.1))
    score = score_mesh(plate(0, 20, 0, 20, 10.5), truth)
    # The nearest sample is a little to the side.
    assert score.accuracy == pytest.approx(0.5, abs=0.005)
    assert score.completeness == pytest.approx(0.5, abs=0.02)
    assert score.overall == (score.accuracy + score.completeness) / 2


def test_half_a_mesh_is_accurate_and_not_complete():
    truth = truth_of(grid(0, 20.05, 0, 20.05, 10, 0.1))
    score = score_mesh(plate(0, 10, 0, 20, 10), truth)
    assert score.accuracy < 0.1
    # Distances to the edge from 0 to 10 on the other half.
    assert score.completeness == pytest.approx(2.5, abs=0.1)


def test_distances_from_twenty_millimetres_on_do_not_count():
    truth = truth_of(grid(0, 20.05, 0, 20.05, 0, 0.2))
    both = merge_meshes([plate(0, 20, 0, 20, 0.5), plate(0, 20, 0, 20, 20.4)])
    assert score_mesh(both, truth).accuracy == pytest.approx(0.5, abs=0.01)
    near = merge_meshes([plate(0, 20, 0, 20, 0.5), plate(0, 20, 0, 20, 19.5)])
    assert score_mesh(near, truth).accuracy == pytest.approx(10, abs=0.1)


def test_what_the_scanner_did_not_see_is_no_error_and_may_still_complete():
    seen = np.ones((5, 5, 3), dtype=bool)
    seen[:, :, 2] = False
    truth = truth_of(grid(0, 20.05, 0, 20.05, 10, 0.2), observed=seen)
    stray = merge_meshes([plate(0, 20, 0, 20, 10.5), plate(0, 20, 0, 20, 18)])
    assert score_mesh(stray, truth).accuracy == pytest.approx(0.5, abs=0.02)
    outside = merge_meshes([plate(0, 20, 0, 20, 10.5), plate(-400, -380, 0, 20, 10)])
    assert score_mesh(outside, truth).accuracy == pytest.approx(0.5, abs=0.02)
    high = truth_of(grid(0, 20.05, 0, 20.05, 17, 0.2), observed=seen)
    low = merge_meshes([plate(0, 20, 0, 20, 10.5), plate(0, 20, 0, 20, 17)])
    assert score_mesh(low, high).completeness < 0.15


def test_true_points_below_the_table_are_not_asked_for():
    points = np.concatenate([grid(0, 20, 0, 20, 10, 0.2), grid(0, 20, 0, 20, -8, 0.2)])
    mesh = plate(0, 20, 0, 20, 10)
    assert score_mesh(mesh, truth_of(points)).completeness < 0.15
    assert score_mesh(mesh, truth_of(points, plane=(0, 0, 1, 50))).completeness > 8


def test_voxels_are_told_by_their_middles():
    seen = np.zeros((5, 5, 3), dtype=bool)
    seen[1, 2, 0] = True
    truth = truth_of(np.zeros((1, 3)), observed=seen)
    inside = [[6, 16, -4], [14, 24, 4], [10, 20, 0]]
    outside = [[4, 20, 0], [16, 20, 0], [10, 20, 6], [-900, 20, 0], [900, 20, 0]]
    assert was_observed(np.array(inside, dtype=float), truth).all()
    assert not was_observed(np.array(outside, dtype=float), truth).any()


def test_mesh_where_nobody_looked_is_refused():
    truth = truth_of(grid(0, 40, 0, 40, 10, 1))
    with pytest.raises(UserError, match="no surface where the scanner looked"):
        score_mesh(plate(1000, 1001, 0, 1, 0), truth)
    with pytest.raises(UserError, match="no surface where the scanner looked"):
        score_mesh(plate(-PATCH + 1, -PATCH + 2, 0, 1, 0), truth)


def one_after_the_other(points, spacing):
    kept = []
    for point in points:
        if all(np.linalg.norm(point - other) > spacing for other in kept):
            kept.append(point)
    return np.array(kept)


def test_thinning_keeps_what_a_loop_over_all_points_keeps(monkeypatch):
    points = np.random.default_rng(0).uniform(size=(600, 3))
    expected = one_after_the_other(points, 0.15)
    assert np.array_equal(thinned(points, 0.15), expected)
    # The same in parts.
    monkeypatch.setattr(dtu_score, "_FIRST_PART", 50)
    assert np.array_equal(thinned(points, 0.15), expected)
    pairs = cKDTree(expected).query_pairs(0.15)
    assert not pairs
    assert cKDTree(expected).query(points)[0].max() <= 0.15


# DTU's files


def write_dtu(root, tiny: TinyScene, layout: str):
    """A scan of the tiny scene's sphere; ``colmap`` has a model, ``neus`` has cameras alone."""
    scan = root / ("scan24" if layout == "colmap" else "dtu_scan24")
    images = scan / ("images" if layout == "colmap" else "image")
    images.mkdir(parents=True)
    (scan / "mask").mkdir()
    scale = np.diag([MILLIMETRES] * 3 + [1.0])
    scale[:3, 3] = OFFSET
    stored = {}
    for i, camera in enumerate(tiny.cameras):
        (images / camera.name).write_bytes((tiny.root / "images" / camera.name).read_bytes())
        k = np.array([[camera.fx, 0, camera.cx], [0, camera.fy, camera.cy], [0, 0, 1]])
        projection = np.eye(4)
        projection[:3] = k @ np.column_stack([camera.rotation, camera.translation])
        stored[f"world_mat_{i}"] = 3.0 * projection @ np.linalg.inv(scale)
        stored[f"scale_mat_{i}"] = scale
    np.savez(scan / "cameras.npz", **stored)
    if layout == "colmap":
        source = tiny.root / "sparse" / "0"
        (scan / "sparse" / "0").mkdir(parents=True)
        for path in source.iterdir():
            (scan / "sparse" / "0" / path.name).write_bytes(path.read_bytes())
    official = root / "SampleSet" / "MVS Data"
    (official / "ObsMask").mkdir(parents=True)
    box = np.array([OFFSET - 13, OFFSET + 13])
    savemat(
        official / "ObsMask" / "ObsMask24_10.mat",
        {"ObsMask": np.ones((27, 27, 27), dtype=np.uint8), "BB": box, "Res": np.array([[1.0]])},
    )
    savemat(official / "ObsMask" / "Plane24.mat", {"P": np.array([[0.0], [0], [0], [1]])})
    points = sphere_points(20_000) * MILLIMETRES + OFFSET
    write_points(root / "SampleSet" / "Points" / "stl" / "stl024_total.ply", points)
    return root


def test_scan_is_read_in_the_layout_with_a_model(tmp_path, tiny):
    data = write_dtu(tmp_path, tiny, "colmap")
    (scan,) = find_scans(data, [24, 37])
    assert scan.number == 24
    assert prepared_scene(scan, tmp_path / "unused", print) == data / "scan24"
    truth = read_truth(find_truth(data), 24)
    assert truth.resolution == 1
    assert truth.plane.tolist() == [0, 0, 0, 1]
    assert np.allclose(np.linalg.norm(truth.points - OFFSET, axis=1), MILLIMETRES)


def test_cameras_of_the_data_set_give_poses_and_millimetres(tmp_path, tiny):
    (scan,) = find_scans(write_dtu(tmp_path, tiny, "neus"), [24])
    for pose, camera in zip(true_poses(scan), tiny.cameras, strict=True):
        assert np.allclose(pose.rotation, camera.rotation)
        assert np.allclose(pose.translation, camera.translation)
        assert pose.intrinsics[0, 0] == pytest.approx(camera.fx)
        assert pose.intrinsics[1, 2] == pytest.approx(camera.cy)
    centers = np.stack([camera.center for camera in tiny.cameras])
    assert np.allclose(true_centers(scan), centers * MILLIMETRES + OFFSET)
    # Whatever world the cameras were found in.
    moved = some_similarity().apply(centers)
    names = {camera.name: m for camera, m in zip(tiny.cameras, moved, strict=True)}
    there = to_millimetres(scan, names).apply(some_similarity().apply(np.ones((1, 3))))
    assert np.allclose(there, MILLIMETRES + OFFSET)


def test_cameras_of_other_photographs_are_refused(tmp_path, tiny):
    (scan,) = find_scans(write_dtu(tmp_path, tiny, "colmap"), [24])
    rng = np.random.default_rng(0)
    with pytest.raises(UserError, match="not of the same photographs"):
        to_millimetres(scan, {camera.name: rng.normal(size=3) for camera in tiny.cameras})
    with pytest.raises(UserError, match="only 0 of its cameras"):
        to_millimetres(scan, {})


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("scan24", "holds none of the scans 24"),
        ("scan24/cameras.npz", "has neither cameras.npz nor cameras_sphere.npz"),
        ("SampleSet/MVS Data/ObsMask", "no folder ObsMask"),
        ("SampleSet/MVS Data/ObsMask/Plane24.mat", "no such file; unpack DTU's SampleSet"),
        ("SampleSet/Points", "no such file; unpack DTU's Points"),
    ],
)
def test_missing_parts_of_dtu_are_named_before_anything_is_trained(tmp_path, tiny, gone, message):
    data = write_dtu(tmp_path, tiny, "colmap")
    (data / gone).rename(tmp_path.parent / f"{tmp_path.name}_gone")
    args = dtu.parser().parse_args([str(data), "--scans", "24", "--output", str(tmp_path / "out")])
    with pytest.raises(UserError, match=message):
        dtu.run(args, [])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["cameras.npz", "ObsMask24_10.mat", "stl024_total.ply"])
def test_damaged_files_of_dtu_are_named(tmp_path, tiny, name):
    data = write_dtu(tmp_path, tiny, "colmap")
    (path,) = data.rglob(name)
    path.write_bytes(path.read_bytes()[:40])
    (scan,) = find_scans(data, [24])

    def read():
        read_truth(find_truth(data), 24)
        true_poses(scan)

    with pytest.raises(UserError, match=f"{name}: damaged"):
        read()


@pytest.mark.usefixtures("small_pictures")
def test_scan_is_trained_scored_and_not_repeated(tmp_path, tiny, short, monkeypatch, capsys):
    data = write_dtu(tmp_path / "data", tiny, "colmap")
    own, flags = scans.split_command(
        [str(data), "--scans", "24", "--output", str(tmp_path / "out"), "--"]
        + ["--masks", "none", *short]
    )
    args = dtu.parser().parse_args(own)
    results = dtu.run(args, flags)
    # A sphere of 10 mm after a handful of iterations.
    assert 0 < results["scan24"]["overall"] < 2
    shown = capsys.readouterr().out
    assert "| this program |" in shown
    assert "1 of 15 scored; no mean" in shown
    assert json.loads((tmp_path / "out" / "results.json").read_text())["figures"] == results

    def unwanted(*_):
        raise AssertionError("scored again")

    monkeypatch.setattr(dtu, "score_mesh", unwanted)
    assert dtu.run(args, flags) == results
    # Another truth is another score.
    write_points(points_file(find_truth(data), 24), sphere_points(500) * MILLIMETRES + OFFSET)
    with pytest.raises(AssertionError, match="scored again"):
        dtu.run(args, flags)


def test_case_that_fails_does_not_cost_the_others(tmp_path, monkeypatch, capsys):
    def trained(scene, folder, *_):
        if scene.name == "bad":
            raise UserError("no photographs")
        path = folder / "mesh.ply"
        path.parent.mkdir(parents=True)
        path.write_text("mesh")
        return path

    monkeypatch.setattr(scans, "trained_mesh", trained)
    monkeypatch.setattr(scans, "read_any_mesh", lambda path: path)
    monkeypatch.setattr(scans, "camera_centers", lambda scene: {})
    truth = tmp_path / "truth"
    truth.write_text("truth")
    cases = [
        scans.Case(name, lambda n=name: tmp_path / n, truth, lambda *_: {"overall": 1.0})
        for name in ("good", "bad", "fine")
    ]
    args = dtu.parser().parse_args([str(tmp_path), "--output", str(tmp_path / "out")])
    with pytest.raises(UserError, match="1 of 3 failed: bad"):
        scans.run_cases(cases, args, [], "overall", 2, (), ["good", "bad", "fine"])
    shown = capsys.readouterr()
    assert "bad: no photographs" in shown.err
    assert "| this program | 1.00 |     | 1.00 |      |" in shown.out


def test_mean_is_that_of_all_scans_and_published_rows_are_whole():
    assert np.mean(list(dtu.PUBLISHED[0].values.values())) == pytest.approx(1.33, abs=0.01)
    for row in tanks_and_temples.PUBLISHED:
        if row.values:
            assert np.mean(list(row.values.values())) == pytest.approx(row.mean, abs=0.011)


@pytest.mark.slow
def test_scan_without_a_model_gets_points_for_its_cameras(tmp_path, scenes_dir):
    bunny = scenes_dir / "bunny"
    known = sorted(cameras_of(bunny).values(), key=lambda camera: camera.name)[:8]
    scene = TinyScene(bunny, known, None, None, None)
    (scan,) = find_scans(write_dtu(tmp_path, scene, "neus"), [24])
    prepared = prepared_scene(scan, tmp_path / "made", lambda _: None)
    centers = scans.camera_centers(prepared)
    for camera in known:
        assert np.allclose(centers[camera.name], camera.center, atol=1e-6)
    model = read_colmap(find_model(prepared), ImageFolder(prepared / "images"))
    assert len(model.points) > 50
    visible = PlyData.read(str(bunny / "gt_visible.ply"))["vertex"]
    surface = np.stack([visible[axis] for axis in "xyz"], axis=1)
    assert np.median(cKDTree(surface).query(model.points)[0]) < 0.01
    assert prepared_scene(scan, tmp_path / "made", pytest.fail) == prepared
