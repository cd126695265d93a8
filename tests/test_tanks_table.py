# SPDX-License-Identifier: Apache-2.0
"""Tanks and Temples: files in its layout, and scores that are known by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from benchmarks import tanks_and_temples
from benchmarks.published import tanks_score
from benchmarks.published.similarity import Similarity, best_similarity
from benchmarks.published.tanks_data import (
    CropVolume,
    find_scenes,
    read_trajectory,
    read_volume,
    to_scanner,
)
from benchmarks.published.tanks_score import icp, resampled
from sugar_utils.errors import UserError
from tests.support.mesh_scenes import mesh_of, sphere_points
from tests.support.published_layouts import grid, some_similarity, write_points
from tests.support.tiny_scene import (
    SHORT_PIPELINE,
    TinyScene,
    make_tiny_checkpoint,
    make_tiny_scene,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyScene:
    return make_tiny_scene(tmp_path_factory.mktemp("tiny") / "scene")


@pytest.fixture(scope="module")
def short(tmp_path_factory, tiny) -> list[str]:
    """Flags of a pipeline of seconds, from a vanilla checkpoint on."""
    checkpoint = make_tiny_checkpoint(tmp_path_factory.mktemp("vanilla"), tiny)
    return ["--gs_output_dir", str(checkpoint), *map(str, SHORT_PIPELINE)]


SQUARE = np.array([[0, 9, 0], [4, 9, 0], [4, 9, 4], [0, 9, 4]], dtype=float)
VOLUME = CropVolume("Y", -1.0, 1.0, SQUARE)
TAU = 0.08


def wavy(n=8_000, seed=0) -> np.ndarray:
    """Points of a hilly square, on which ICP cannot slide. (n, 3) metres"""
    xz = np.random.default_rng(seed).uniform(-0.5, 4.5, size=(n, 2))
    height = 0.3 * np.sin(3 * xz[:, 0]) * np.cos(2 * xz[:, 1]) + 0.2 * np.sin(5 * xz[:, 1])
    return np.stack([xz[:, 0], height, xz[:, 1]], axis=1)


def test_volume_is_a_polygon_along_an_axis():
    corner = np.array([[0, 0, 0], [4, 0, 0], [4, 4, 0], [2, 2, 0], [0, 4, 0]], dtype=float)
    notched = CropVolume("Z", 0.0, 1.0, corner)
    inside = np.array([[1, 1, 0.5], [3.5, 3, 0], [0.5, 3, 1]])
    outside = np.array([[2, 3, 0.5], [1, 1, 1.1], [1, 1, -0.1], [5, 1, 0.5], [-1, 1, 0.5]])
    assert notched.contains(inside).all()
    assert not notched.contains(outside).any()
    assert VOLUME.contains(np.array([[2, 0, 2.0]])).all()
    assert not VOLUME.contains(np.array([[2, 2, 2.0], [2, 0, 5]])).any()
    assert CropVolume("X", -1, 1, SQUARE[:, [1, 0, 2]]).contains(np.array([[0, 2, 2.0]])).all()


def test_resampling_takes_the_mean_of_each_voxel():
    points = np.array([[0, 0, 0], [0.2, 0, 0], [5, 5, 5], [5.2, 5, 5]], dtype=float)
    assert np.allclose(resampled(points, 1.0), [[0.1, 0, 0], [5.1, 5, 5]])


def test_the_truth_itself_scores_one_wherever_it_was_put_down():
    truth = wavy()
    nearly = Similarity(1.003, Rotation.from_euler("xyz", [0.003, -0.004, 0.002]).as_matrix(),
                        np.array([0.03, -0.02, 0.02]))  # fmt: skip
    score = tanks_score.score_points(nearly.apply(wavy(seed=1)), truth, VOLUME, TAU)
    assert score.f1 > 0.99


def test_shares_of_surface_and_truth_are_told_apart():
    truth = wavy()
    half = wavy(seed=1)
    half = half[half[:, 0] < 2]
    score = tanks_score.score_points(half, truth, VOLUME, TAU)
    assert score.precision > 0.99
    assert score.recall == pytest.approx(0.5, abs=0.03)
    stray = wavy(seed=1)
    # Out of the reach of the fit, which it would pull aside.
    lifted = stray[stray[:, 0] < 1] + (0, 9, 0)
    high = CropVolume("Y", -1.0, 10.0, SQUARE)
    score = tanks_score.score_points(np.concatenate([stray, lifted]), truth, high, TAU)
    assert score.recall > 0.99
    assert score.precision == pytest.approx(0.8, abs=0.03)
    assert score.f1 == pytest.approx(2 * 0.8 / 1.8, abs=0.03)


def test_what_lies_outside_of_the_volume_does_not_count():
    truth = wavy()
    stray = np.concatenate([wavy(seed=1), wavy(seed=2) + (0, 2, 0), wavy(seed=3) + (10, 0, 0)])
    assert tanks_score.score_points(stray, truth, VOLUME, TAU).f1 > 0.99
    with pytest.raises(UserError, match="lies in the volume that counts"):
        tanks_score.score_points(truth + (100, 0, 0), truth, VOLUME, TAU)


def test_mesh_is_scored_by_even_samples_of_its_area():
    flat = CropVolume("Y", -1.0, 1.0, SQUARE)
    truth = grid(0, 4, 0, 4, 0, 0.04)[:, [0, 2, 1]]
    x, z = np.meshgrid(np.linspace(0, 4, 30), np.linspace(0, 4, 30))
    corners = np.stack([x.ravel(), np.zeros(x.size), z.ravel()], axis=1)
    k = np.arange(29 * 30).reshape(29, 30)[:, :29].ravel()
    faces = np.concatenate([np.stack([k, k + 30, k + 1], 1), np.stack([k + 1, k + 30, k + 31], 1)])
    score = tanks_score.score_mesh(mesh_of(corners, faces), truth, flat, 0.2)
    assert score.f1 > 0.99


def test_icp_stops_where_nothing_is_near():
    points = wavy(500)
    assert np.allclose(icp(points + 100, points, 0.1).apply(points), points)


def write_tanks(root, tiny: TinyScene):
    """A scene in the layout of the download: metres are 2.5 of the tiny scene's units."""
    scene = root / "Ignatius"
    (scene / "images").mkdir(parents=True)
    (scene / "sparse" / "0").mkdir(parents=True)
    for path in (tiny.root / "sparse" / "0").iterdir():
        (scene / "sparse" / "0" / path.name).write_bytes(path.read_bytes())
    other, true = some_similarity(5), some_similarity(6)
    lines = []
    for i, camera in enumerate(tiny.cameras):
        (scene / "images" / camera.name).write_bytes(
            (tiny.root / "images" / camera.name).read_bytes()
        )
        matrix = np.eye(4)
        matrix[:3, :3] = camera.rotation.T
        matrix[:3, 3] = other.apply(camera.center[None])[0]
        lines += [f"{i} {i} 0", *(" ".join(f"{v:.12g}" for v in row) for row in matrix)]
    (scene / "Ignatius_COLMAP_SfM.log").write_text("\n".join(lines) + "\n")
    # From the log's world to the scanner's: back to the scene's, and on.
    back = best_similarity(other.apply(np.eye(3)), np.eye(3))
    on = true.after(back)
    matrix = np.eye(4)
    matrix[:3, :3], matrix[:3, 3] = on.scale * on.rotation, on.translation
    np.savetxt(scene / "Ignatius_trans.txt", matrix)
    write_points(scene / "Ignatius.ply", true.apply(sphere_points(20_000)))
    middle, half = true.translation, 1.2 * true.scale
    polygon = [[middle[0] + a * half, 0, middle[2] + b * half]
               for a, b in ((-1, -1), (1, -1), (1, 1), (-1, 1))]  # fmt: skip
    (scene / "Ignatius.json").write_text(json.dumps({
        "axis_max": middle[1] + half, "axis_min": middle[1] - half, "bounding_polygon": polygon,
        "class_name": "SelectionPolygonVolume", "orthogonal_axis": "Y", "version_major": 1,
    }))  # fmt: skip
    return true


def test_scene_is_brought_to_the_scanner_by_its_cameras(tmp_path, tiny):
    true = write_tanks(tmp_path, tiny)
    (scene,) = find_scenes(tmp_path, None, ["Barn", "Ignatius"])
    assert scene.threshold == 0.003
    anywhere = some_similarity(8)
    centers = {c.name: anywhere.apply(c.center[None])[0] for c in tiny.cameras}
    points = sphere_points(50)
    moved = to_scanner(scene, centers).apply(anywhere.apply(points))
    assert np.allclose(moved, true.apply(points))
    assert read_volume(scene).contains(true.apply(points)).all()
    assert len(read_trajectory(scene.file("_COLMAP_SfM.log"))) == len(tiny.cameras)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("Ignatius_COLMAP_SfM.log", "0 0 0\n1 0 0 0\n", "damaged"),
        ("Ignatius_COLMAP_SfM.log", "0 0 0\n" + "1 0 0 0\n" * 4, "has 1 cameras but"),
        ("Ignatius_trans.txt", "1 2 3\n", "is no 4 x 4 matrix"),
        ("Ignatius.json", "{}", "Ignatius.json"),
        ("Ignatius.ply", "ply\n", "damaged"),
        ("Ignatius.ply", None, "download the evaluation files of Ignatius"),
    ],
)
def test_damaged_files_of_tanks_and_temples_are_named(tmp_path, tiny, name, content, message):
    write_tanks(tmp_path, tiny)
    path = tmp_path / "Ignatius" / name
    path.unlink()
    if content is not None:
        path.write_text(content)
    centers = {camera.name: camera.center for camera in tiny.cameras}

    def read():
        (scene,) = find_scenes(tmp_path, None, ["Ignatius"])
        read_volume(scene)
        to_scanner(scene, centers)
        tanks_and_temples.read_true_points(scene)

    with pytest.raises(UserError, match=message):
        read()


@pytest.mark.usefixtures("small_pictures")
def test_scene_is_trained_and_scored(tmp_path, tiny, short, monkeypatch, capsys):
    write_tanks(tmp_path, tiny)
    # A coarse sphere of a handful of iterations needs a wider threshold than Ignatius.
    monkeypatch.setitem(tanks_and_temples.THRESHOLDS, "Ignatius", 0.5)
    args = tanks_and_temples.parser().parse_args(
        [str(tmp_path), "--scenes", "Ignatius", "--output", str(tmp_path / "out")]
    )
    results = tanks_and_temples.run(args, short)
    assert results["Ignatius"]["f1"] > 0.5
    assert "| Neuralangelo |" in capsys.readouterr().out
