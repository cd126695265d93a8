# SPDX-License-Identifier: Apache-2.0
"""Protocols of public benchmarks beside second implementations, and on cases with known answers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.signal import convolve2d

from benchmarks.public import dtu, tanks, views
from benchmarks.public.points import distances_to, even_points, thinned, voxel_means
from gaussian_splatting.formats.ply import write_gaussian_ply
from gaussian_splatting.scenes.scene import VanillaSize, load_scene
from sugar_maps.similarity import Similarity
from tests.support.mesh_scenes import mesh_of, sphere, sphere_points
from tests.support.public_data import silhouette
from tests.support.tiny_scene import make_tiny_scene, render_8_bit, tiny_cameras, tiny_cloud

THRESHOLD = 0.01
SQUARE = np.array([[-1.0, -1], [1, -1], [1, 1], [-1, 1]])
STAR = np.array([[0.0, 1], [-0.2, 0.2], [-1, 0], [-0.2, -0.2], [0, -1], [0.3, -0.1], [1, 0.4]])


def random_points(n: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return scale * np.random.default_rng(seed).uniform(-1, 1, (n, 3))


def plate(spacing: float, side: int) -> np.ndarray:
    """A square grid of points in the plane z = 0, from the origin. (side * side, 3)"""
    x, y = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    return spacing * np.stack([x.ravel(), y.ravel(), np.zeros(side * side)], axis=1)


def all_distances(points: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Distance of each point to the nearest target, by comparing it with all. (N,)"""
    return np.array([min(math.dist(point, target) for target in targets) for point in points])


def dtu_truth(points: np.ndarray, observed: np.ndarray | None = None) -> dtu.DtuTruth:
    """A scan that is observed everywhere, on a table far below."""
    everywhere = np.ones((100, 100, 100), bool)
    return dtu.DtuTruth(
        points=points,
        observed=everywhere if observed is None else observed,
        low=np.array([-50.0, -50, -50]),
        voxel=1.0,
        plane=np.array([0.0, 0, 1, 1000]),
    )


def tanks_truth(points: np.ndarray, polygon: np.ndarray = 100 * SQUARE) -> tanks.TanksTruth:
    volume = tanks.CropVolume(axis=2, low=-100.0, high=100.0, polygon=polygon)
    return tanks.TanksTruth(points, sphere_points(12), volume, THRESHOLD)


def test_thinning_is_that_of_one_point_after_the_other():
    points = random_points(400)
    order = np.random.default_rng(3).permutation(len(points))
    kept: list[np.ndarray] = []
    for point in points[order]:
        if all(math.dist(point, other) >= 0.25 for other in kept):
            kept.append(point)
    np.testing.assert_array_equal(thinned(points, 0.25, seed=3), kept)


def test_points_of_a_mesh_are_as_dense_as_asked_and_thinned_to_the_spacing():
    mesh = sphere(radius=3.0, rings=20)
    points = thinned(even_points(mesh, 0.2, 2.0), 0.2)
    distances = np.sort(np.linalg.norm(points[:, None] - points[None], axis=2), axis=1)[:, 1]
    assert distances.min() >= 0.2
    assert distances.mean() < 0.3


def test_voxels_have_the_mean_of_their_points():
    points = random_points(300)
    low = points.min(axis=0)
    cells: dict[tuple[int, ...], list[np.ndarray]] = {}
    for point in points:
        cell = tuple(math.floor((point[k] - low[k]) / 0.3 + 0.5) for k in range(3))
        cells.setdefault(cell, []).append(point)
    expected = sorted(tuple(np.mean(cell, axis=0)) for cell in cells.values())
    np.testing.assert_allclose(sorted(map(tuple, voxel_means(points, 0.3))), expected, rtol=1e-12)


def test_dtu_agrees_with_a_comparison_of_all_pairs():
    """Scattered points, a mask with holes, a slanted plane, and distances beyond the cap."""
    rng = np.random.default_rng(5)
    scan = random_points(300, seed=1, scale=30.0)
    points = random_points(200, seed=2, scale=45.0)
    truth = replace(
        dtu_truth(scan, rng.random((60, 70, 80)) < 0.7),
        low=np.array([-40.0, -35, -30]),
        plane=np.array([0.3, -0.2, 0.9, 4.0]),
    )
    counted = []
    for point in points:
        cell = [round(value) for value in (point - truth.low) / truth.voxel]
        is_inside = all(0 <= k < n for k, n in zip(cell, truth.observed.shape, strict=True))
        counted.append(is_inside and bool(truth.observed[tuple(cell)]))
    accuracy = [d for d in all_distances(points[counted], scan) if d < 20]
    above = [p for p in scan if 0.3 * p[0] - 0.2 * p[1] + 0.9 * p[2] + 4.0 > 0]
    completeness = [d for d in all_distances(np.array(above), points) if d < 20]
    assert 0 < sum(counted) < len(points)
    assert 0 < len(above) < len(scan)
    scores = dtu.score_points(points, truth)
    assert scores["accuracy"] == pytest.approx(np.mean(accuracy), rel=1e-12)
    assert scores["completeness"] == pytest.approx(np.mean(completeness), rel=1e-12)
    assert scores["mean"] == pytest.approx((scores["accuracy"] + scores["completeness"]) / 2)


def test_dtu_of_the_scan_itself_moved_and_halved():
    scan = plate(0.5, 40)
    truth = dtu_truth(scan)
    assert dtu.score_points(scan, truth) == {"accuracy": 0, "completeness": 0, "mean": 0}
    moved = dtu.score_points(scan + (0, 0, 1.0), truth)
    assert list(moved.values()) == pytest.approx([1.0, 1.0, 1.0])
    # Columns 20 to 39 are missing: half a millimetre for each column from the border.
    half = dtu.score_points(scan[scan[:, 0] < 10], truth)
    missing = 0.5 * np.arange(1, 21)
    assert half["accuracy"] == 0
    assert half["completeness"] == pytest.approx(missing.sum() / 40)


def test_dtu_leaves_out_what_is_far_or_not_observed_or_below_the_table():
    scan = plate(0.5, 40)
    observed = np.ones((100, 100, 100), bool)
    observed[:, :, :45] = False
    truth = replace(dtu_truth(scan, observed), plane=np.array([1.0, 0, 0, -9.9]))
    far = np.array([[0.0, 0, 25.0]])  # farther than the cap
    unobserved = np.array([[0.0, 0, -10.0]])
    points = np.concatenate([scan[scan[:, 0] > 9.9], far, unobserved])
    assert dtu.score_points(points, truth) == {"accuracy": 0, "completeness": 0, "mean": 0}
    assert dtu.score_points(unobserved, truth)["accuracy"] == dtu.CAP


def test_faces_outside_of_a_mask_are_removed():
    rng = np.random.default_rng(0)
    cameras = tiny_cameras(4)
    masks = [silhouette(camera) for camera in cameras]
    corners = rng.uniform(-2, 2, (300, 3))
    corners = (corners[:, None] + rng.uniform(-0.1, 0.1, (300, 3, 3))).reshape(-1, 3)
    mesh = mesh_of(corners, np.arange(900).reshape(-1, 3))
    kept = []
    for corner in corners:
        is_kept = True
        for camera, mask in zip(cameras, masks, strict=True):
            x, y, z = camera.rotation @ corner + camera.translation
            column = math.floor(camera.fx * x / z + camera.cx)
            row = math.floor(camera.fy * y / z + camera.cy)
            if z > 0 and 0 <= column < camera.width and 0 <= row < camera.height:
                margin = dtu.MASK_MARGIN * camera.width / dtu.MASKED_WIDTH
                rows, columns = np.nonzero(mask)
                is_kept &= bool(np.hypot(rows - row, columns - column).min() <= margin)
        kept.append(is_kept)
    expected = mesh.faces[np.array(kept)[mesh.faces].all(axis=1)]
    assert 0 < len(expected) < len(mesh.faces)
    np.testing.assert_array_equal(dtu.inside_masks(mesh, cameras, masks).faces, expected)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_crop_volume_has_the_points_around_which_its_border_turns(axis):
    volume = tanks.CropVolume(axis, low=-0.5, high=0.7, polygon=STAR)
    points = random_points(500, seed=axis)
    expected = []
    for point in points:
        flat = np.delete(point, axis)
        angles = [math.atan2(*(corner - flat)[::-1]) for corner in STAR]
        turns = [
            (b - a + math.pi) % (2 * math.pi) - math.pi
            for a, b in zip(angles, [*angles[1:], angles[0]], strict=True)
        ]
        expected.append(abs(sum(turns)) > math.pi and -0.5 <= point[axis] <= 0.7)
    assert 20 < sum(expected) < 480
    np.testing.assert_array_equal(volume.contains(points), expected)


def test_tanks_agrees_with_a_comparison_of_all_pairs():
    scan = random_points(400, seed=1, scale=0.05)
    points = random_points(300, seed=2, scale=0.05)
    truth = tanks_truth(scan, polygon=0.045 * SQUARE)
    sides = [voxel_means(truth.cropped(one), THRESHOLD / 2) for one in (points, scan)]
    precision = np.mean(all_distances(sides[0], sides[1]) < THRESHOLD)
    recall = np.mean(all_distances(sides[1], sides[0]) < THRESHOLD)
    scores = tanks.score_points(points, truth)
    assert 0.05 < precision < 0.95
    assert len(sides[0]) < 300
    assert scores["precision"] == pytest.approx(precision)
    assert scores["recall"] == pytest.approx(recall)
    assert scores["f_score"] == pytest.approx(2 / (1 / precision + 1 / recall))


def test_tanks_of_the_scan_itself_moved_and_halved():
    scan = plate(0.02, 30)
    truth = tanks_truth(scan)
    assert tanks.score_points(scan, truth) == {"precision": 1, "recall": 1, "f_score": 1}
    assert tanks.score_points(scan + (0, 0, 0.001), truth)["f_score"] == 1
    assert tanks.score_points(scan + (0, 0, 0.011), truth)["f_score"] == 0
    half = tanks.score_points(scan[scan[:, 0] < 0.29], truth)
    assert half == {"precision": 1, "recall": 0.5, "f_score": pytest.approx(2 / 3)}
    assert tanks.score_points(np.empty((0, 3)), truth)["f_score"] == 0


@pytest.mark.slow
def test_a_mesh_in_another_world_is_aligned_by_cameras_and_closest_points():
    """One camera is wrong, and all others a little, so the cameras alone do not do."""
    rng = np.random.default_rng(0)
    true_mesh = sphere(radius=0.3, center=(0.05, 0.02, 0.0), rings=60)
    true_mesh = replace(true_mesh, vertices=true_mesh.vertices * (1.0, 0.7, 0.4))
    truth = tanks_truth(even_points(true_mesh, 0.005, 3.0))
    world = Similarity(0.2, np.eye(3)[[2, 0, 1]], np.array([0.1, 0.0, -0.3]))
    centers = world.inverse.moved(truth.centers + rng.normal(0, 0.01, truth.centers.shape))
    centers[3] += 2.0
    mesh = replace(true_mesh, vertices=world.inverse.moved(true_mesh.vertices))
    scores = tanks.score_mesh(mesh, centers, np.arange(len(centers)), truth)
    assert scores["f_score"] > 0.99
    assert scores["f_score_uniform"] > 0.99


def plain_psnr(image: np.ndarray, target: np.ndarray) -> float:
    return -10 * math.log10(((image - target) ** 2).mean())


def plain_ssim(image: np.ndarray, target: np.ndarray) -> float:
    """Wang et al. 2004 with Gaussian windows of 11 x 11 pixels and zeros around the image."""
    line = np.exp(-((np.arange(11) - 5) ** 2) / (2 * 1.5**2))
    window = np.outer(line, line) / line.sum() ** 2
    maps = []
    for channel in range(3):
        x, y = image[..., channel], target[..., channel]
        mean_x, mean_y = (convolve2d(one, window, mode="same") for one in (x, y))
        var_x = convolve2d(x * x, window, mode="same") - mean_x**2
        var_y = convolve2d(y * y, window, mode="same") - mean_y**2
        both = convolve2d(x * y, window, mode="same") - mean_x * mean_y
        upper = (2 * mean_x * mean_y + 0.01**2) * (2 * both + 0.03**2)
        lower = (mean_x**2 + mean_y**2 + 0.01**2) * (var_x + var_y + 0.03**2)
        maps.append(upper / lower)
    return float(np.mean(maps))


@pytest.fixture
def scored_scene(tmp_path):
    """A scene whose photographs are disturbed, and the PLY of the Gaussians that they show."""
    root = make_tiny_scene(tmp_path / "scene").root
    rng = np.random.default_rng(0)
    for path in sorted((root / "images").iterdir()):
        with Image.open(path) as image:
            pixels = np.asarray(image).astype(int)
        noise = rng.integers(-20, 21, pixels.shape)
        Image.fromarray(np.uint8(np.clip(pixels + noise, 0, 255))).save(path)
    ply = tmp_path / "gaussians.ply"
    write_gaussian_ply(ply, tiny_cloud())
    return load_scene(root, size_rule=VanillaSize()), ply


def test_views_agree_with_plain_formulas_on_8_bit_renders(scored_scene, monkeypatch):
    scene, ply = scored_scene
    monkeypatch.setattr(views, "load_perceptual", lambda notify: notify("no LPIPS"))
    notes: list[str] = []
    scores = views.score_views(scene, ply, notes.append)
    pairs = []
    for camera in scene.test_cameras:
        with Image.open(camera.image_file) as image:
            target = np.asarray(image)[..., :3] / 255
        pairs.append((render_8_bit(tiny_cloud(), camera) / 255, target))
    assert [camera.name for camera in scene.test_cameras] == ["view_00.png", "view_08.png"]
    assert scores["psnr"] == pytest.approx(np.mean([plain_psnr(*pair) for pair in pairs]), abs=1e-4)
    assert scores["ssim"] == pytest.approx(np.mean([plain_ssim(*pair) for pair in pairs]), abs=1e-5)
    assert "lpips" not in scores
    assert notes == ["no LPIPS"]


def test_lpips_gets_8_bit_renders_and_photographs_in_unit_range(scored_scene, monkeypatch):
    scene, ply = scored_scene

    def mean_difference(image: torch.Tensor, target: torch.Tensor) -> float:
        assert torch.equal((image * 255).round() / 255, image)
        assert image.shape == target.shape == (48, 64, 3)
        return float((image - target).abs().mean())

    monkeypatch.setattr(views, "load_perceptual", lambda notify: mean_difference)
    assert 0.01 < views.score_views(scene, ply, print)["lpips"] < 0.1


def test_distances_to_nothing_are_infinite():
    assert np.isinf(distances_to(np.empty((0, 3)), random_points(3))).all()
    assert len(distances_to(random_points(3), np.empty((0, 3)))) == 0
