# SPDX-License-Identifier: Apache-2.0
"""No single first pair decides how much of a capture is in one model; parts are joined."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pycolmap
import pytest

from sugar_capture.features.feature_database import database_name
from sugar_capture.features.matching import verified_matches
from sugar_capture.pairs import first_pairs
from sugar_capture.pairs.first_pairs import pairs_with_parallax, ranked_pairs, reachable_images
from sugar_capture.pairs.model_joining import aligned_to
from sugar_capture.registration import final_adjustment, mapping
from sugar_capture.registration.final_adjustment import (
    MIN_IMAGES_FOR_PRINCIPAL_POINT,
    with_principal_points,
)
from sugar_capture.registration.mapping import MappingOptions, Models
from sugar_capture.registration.model_growth import ModelGrowth

SIZE = 800  # pixels
FOCAL = 700.0
N_PER_ROOM = 8  # images that see one of two rooms
N_BETWEEN = 3  # images that see both
N = 2 * N_PER_ROOM + N_BETWEEN
N_POINTS = 150  # of each room
OFFSET = np.array([6.0, 0.0, 0.0])  # from the middle of the first room to that of the second
FIRST_ROOM = range(N_PER_ROOM)
BETWEEN = range(N_PER_ROOM, N_PER_ROOM + N_BETWEEN)


def looking_at(center: np.ndarray, target: np.ndarray) -> pycolmap.Rigid3d:
    """Return the pose, world to camera, of an upright camera that looks at a point."""
    forward = (target - center) / np.linalg.norm(target - center)
    right = np.cross([0.0, 1.0, 0.0], forward)
    right /= np.linalg.norm(right)
    rotation = np.stack([right, np.cross(forward, right), forward])
    return pycolmap.Rigid3d(pycolmap.Rotation3d(rotation), -rotation @ center)


def true_poses() -> list[pycolmap.Rigid3d]:
    """Cameras of the first room, those between, and those of the second room."""
    poses = []
    for middle in (np.zeros(3), OFFSET):
        for angle in np.linspace(-0.5, 0.5, N_PER_ROOM):
            center = middle + 5.0 * np.array([np.sin(angle), 0.1 * angle, -np.cos(angle)])
            poses.append(looking_at(center, middle))
    between = []
    for shift in (-1.0, 0.0, 1.0):
        between.append(looking_at(OFFSET / 2 + [shift, 0.2 * shift, -9.0], OFFSET / 2))
    return [*poses[:N_PER_ROOM], *between, *poses[N_PER_ROOM:]]


def fundamental_matrix(first: int, second: int) -> np.ndarray:
    """Return the matrix that says where the points of one image may lie in another one. (3, 3)"""
    poses = true_poses()
    relative = poses[second] * poses[first].inverse()
    x, y, z = relative.translation
    essential = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]]) @ relative.rotation.matrix()
    lens = np.array([[FOCAL, 0, SIZE / 2], [0, FOCAL, SIZE / 2], [0, 0, 1]])
    return np.linalg.inv(lens).T @ essential @ np.linalg.inv(lens)


def rooms_of(index: int) -> tuple[int, ...]:
    """Which of the two rooms an image sees."""
    if index in BETWEEN:
        return (0, 1)
    return (0,) if index in FIRST_ROOM else (1,)


def write_database(path: Path, focals: Sequence[float] = (FOCAL,) * N) -> None:
    """Write the features of two rooms and their verified matches, half a pixel off at most.

    Args:
        focals: Of each image, which are all said to be of one camera.
    """
    rng = np.random.default_rng(0)
    rooms = [middle + rng.uniform(-1, 1, (N_POINTS, 3)) for middle in (np.zeros(3), OFFSET)]
    rows = {}  # of each image: row of the keypoint of each point, by room
    with pycolmap.Database.open(str(path)) as database:
        lens = pycolmap.Camera.create_from_model_name(
            pycolmap.INVALID_CAMERA_ID, "SIMPLE_RADIAL", FOCAL, SIZE, SIZE
        )
        sensor = pycolmap.sensor_t(pycolmap.SensorType.CAMERA, database.write_camera(lens))
        rig = pycolmap.Rig()
        rig.add_ref_sensor(sensor)
        rig_id = database.write_rig(rig)
        for index, pose in enumerate(true_poses()):
            image = pycolmap.Image(name=database_name(index), camera_id=sensor.id)
            number = database.write_image(image)
            frame = pycolmap.Frame()
            frame.rig_id = rig_id
            frame.add_data_id(pycolmap.data_t(sensor, number))
            database.write_frame(frame)
            points = np.concatenate([rooms[room] for room in rooms_of(index)])
            seen = points @ pose.rotation.matrix().T + pose.translation
            pixels = focals[index] * seen[:, :2] / seen[:, 2:] + SIZE / 2
            pixels += rng.uniform(-0.5, 0.5, pixels.shape)
            database.write_keypoints(number, pixels.astype(np.float32))
            rows[index] = {
                room: np.arange(N_POINTS) + N_POINTS * place
                for place, room in enumerate(rooms_of(index))
            }
        for first, second in itertools.combinations(range(N), 2):
            shared = [room for room in rooms_of(first) if room in rooms_of(second)]
            if shared:
                geometry = pycolmap.TwoViewGeometry()
                geometry.config = pycolmap.TwoViewGeometryConfiguration.UNCALIBRATED
                geometry.F = fundamental_matrix(first, second)
                columns = [
                    np.concatenate([rows[image][room] for room in shared])
                    for image in (first, second)
                ]
                geometry.inlier_matches = np.stack(columns, axis=1).astype(np.uint32)
                database.write_two_view_geometry(first + 1, second + 1, geometry)


@pytest.fixture(scope="module")
def database(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rooms") / "database.db"
    write_database(path)
    return path


def mapped(database: Path, folder: Path) -> Models:
    names = [database_name(index) for index in range(N)]
    options = MappingOptions("incremental", 0)
    return mapping.map_photographs(database, names, folder, options, None, lambda n: None)


def growth_of(database: Path, folder: Path) -> ModelGrowth:
    return ModelGrowth(database, folder, N, 0, True, True, lambda n: None)


def part_of(growth: ModelGrowth, indices) -> pycolmap.Reconstruction:
    """The largest model of some images alone."""
    return growth.models_of([index + 1 for index in indices])[0]


def position_error(model: pycolmap.Reconstruction | None) -> float:
    """Largest distance of a camera from where it was, after a similarity."""
    assert model is not None
    numbers = sorted(model.reg_image_ids())
    poses = true_poses()
    known = np.array([poses[k - 1].inverse().translation for k in numbers])
    found = np.array([model.images[k].projection_center() for k in numbers])
    similarity = pycolmap.estimate_sim3d(found, known)
    moved = np.array([similarity * center for center in found])
    return float(np.linalg.norm(moved - known, axis=1).max())


def test_two_rooms_with_images_between_are_one_model(database, tmp_path):
    models = mapped(database, tmp_path / "sparse")
    assert [len(names) for names in models.registered] == [N]
    assert position_error(models.largest) < 0.1


def test_an_unlucky_first_model_does_not_decide(database, tmp_path, monkeypatch):
    def few(self: ModelGrowth) -> list:
        return [part_of(self, FIRST_ROOM[:3])]

    monkeypatch.setattr(ModelGrowth, "first_model", few)
    models = mapped(database, tmp_path / "sparse")
    assert [len(names) for names in models.registered] == [N]
    assert position_error(models.largest) < 0.1


def test_a_whole_first_model_is_the_only_one_that_is_grown(database, tmp_path, monkeypatch):
    def fails(*args) -> None:
        raise AssertionError("another pair was tried")

    monkeypatch.setattr(ModelGrowth, "model_from", fails)
    assert mapped(database, tmp_path / "sparse").n_registered == N


@pytest.mark.slow
def test_further_first_pairs_give_the_same_bits_each_time(database, tmp_path, monkeypatch):
    monkeypatch.setattr(ModelGrowth, "first_model", lambda self: [part_of(self, FIRST_ROOM[:3])])
    contents = []
    for name in ("first", "second"):
        mapped(database, tmp_path / name)
        files = sorted((tmp_path / name / "0").iterdir())
        contents.append({path.name: path.read_bytes() for path in files})
    assert contents[0] == contents[1]


def test_parts_that_share_images_are_joined_where_they_were_taken(database, tmp_path):
    growth = growth_of(database, tmp_path)
    first = part_of(growth, [*FIRST_ROOM, *BETWEEN])
    second = part_of(growth, [*BETWEEN, *range(BETWEEN.stop, N)])
    joined = mapping._with_part(growth, first, second, verified_matches(database))
    assert joined.num_reg_images() == N
    assert position_error(joined) < 0.1


def test_parts_that_share_only_matches_are_joined(database, tmp_path):
    growth = growth_of(database, tmp_path)
    first = part_of(growth, FIRST_ROOM)
    second = part_of(growth, range(BETWEEN.start, N))
    assert not set(first.reg_image_ids()) & set(second.reg_image_ids())
    pairs = verified_matches(database)
    aligned = aligned_to(first, second, database, pairs, seed=0)
    assert aligned is not None
    joined = mapping._with_part(growth, second, first, pairs)
    assert joined.num_reg_images() == N
    assert position_error(joined) < 0.1


def test_a_part_whose_points_disagree_is_not_joined(database, tmp_path):
    growth = growth_of(database, tmp_path)
    first = part_of(growth, FIRST_ROOM)
    second = part_of(growth, range(BETWEEN.start, N))
    rng = np.random.default_rng(0)
    for number in second.point3D_ids():
        second.points3D[number].xyz = rng.normal(size=3)
    matches = verified_matches(database)
    assert aligned_to(first, second, database, matches, seed=0) is None
    assert mapping._with_part(growth, first, second, matches) is first


def test_a_pair_that_third_images_match_comes_before_the_one_with_most_matches():
    matches = {(0, 1): 900, (2, 3): 150, (2, 4): 120, (3, 4): 110, (2, 5): 90, (3, 5): 90}
    assert ranked_pairs(matches)[0] == (2, 3)


def test_pairs_without_parallax_are_no_beginning(database):
    beside = (0, N_PER_ROOM - 1)
    assert list(pairs_with_parallax(database, [beside])) == [beside]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_pairs, "_LEAST_ANGLE", np.deg2rad(80.0))
        assert not list(pairs_with_parallax(database, [beside]))


def test_a_model_can_grow_as_far_as_strong_pairs_join_images():
    matches = {(0, 1): 50, (1, 2): 40, (2, 3): 10, (3, 4): 60}
    assert reachable_images(matches, [1], 6) == 3
    assert reachable_images(matches, [0, 4], 6) == 5


@pytest.mark.slow
def test_images_of_many_cameras_get_a_lens_each(tmp_path):
    path = tmp_path / "database.db"
    focals = (FOCAL * np.linspace(0.7, 1.6, N)).tolist()
    write_database(path, focals)
    growth = growth_of(path, tmp_path)
    common = part_of(growth, range(N))
    separate = mapping._with_separate_lenses(growth, common)
    assert separate is not None
    found = [separate.cameras[separate.images[k].camera_id].focal_length for k in range(1, N + 1)]
    # Distance makes up for some of a focal length.
    np.testing.assert_allclose(found, focals, rtol=0.2)
    # It is added to, and its points are found again, with the lenses that it has.
    placed = mapping.with_points_of(path, separate, 0)
    assert placed.compute_mean_reprojection_error() < 1
    separate.deregister_frame(separate.images[2].frame_id)
    options = MappingOptions("incremental", 0)
    names = [database_name(index) for index in range(N)]
    models = mapping.map_photographs(
        path, names, tmp_path / "sparse", options, None, lambda n: None, separate
    )
    assert models.n_registered == N
    assert models.largest is not None
    assert models.largest.compute_mean_reprojection_error() < 0.6


def test_images_of_one_camera_keep_one_lens(database, tmp_path):
    growth = growth_of(database, tmp_path)
    assert mapping._with_separate_lenses(growth, part_of(growth, range(N))) is None


def ring_model(height: float, true_aspect: float, found_aspect: float) -> pycolmap.Reconstruction:
    """Return a model of images around points, half a pixel off at most.

    Args:
        height: Of every second camera above the points.
        true_aspect: Vertical focal length of the images, in times of the horizontal one.
        found_aspect: That of the model, whose points are flatter by what it is too long.
    """
    rng = np.random.default_rng(0)
    points = rng.uniform(-1, 1, (N_POINTS, 3))
    model = pycolmap.Reconstruction()
    lens = pycolmap.Camera.create_from_model_name(1, "OPENCV", FOCAL, SIZE, SIZE)
    lens.params = [FOCAL, found_aspect * FOCAL, SIZE / 2, SIZE / 2, 0.0, 0.0, 0.0, 0.0]
    model.add_camera_with_trivial_rig(lens)
    n_images = MIN_IMAGES_FOR_PRINCIPAL_POINT
    for number, angle in enumerate(np.arange(n_images) * 2 * np.pi / n_images, start=1):
        center = np.array([5 * np.sin(angle), height * (number % 2), -5 * np.cos(angle)])
        pose = looking_at(center, np.zeros(3))
        seen = points @ pose.rotation.matrix().T + pose.translation
        pixels = FOCAL * seen[:, :2] / seen[:, 2:] * [1.0, true_aspect] + SIZE / 2
        pixels += rng.uniform(-0.5, 0.5, pixels.shape)
        image = pycolmap.Image(name=database_name(number - 1), camera_id=1, image_id=number)
        for pixel in pixels:
            image.points2D.append(pycolmap.Point2D(pixel))
        model.add_image_with_trivial_frame(image, pose)
    flattened = points * [1.0, true_aspect / found_aspect, 1.0]
    for row, point in enumerate(flattened):
        elements = [pycolmap.TrackElement(number, row) for number in model.reg_image_ids()]
        model.add_point3D(point, pycolmap.Track(elements), np.zeros(3, np.uint8))
    model.update_point_3d_errors()
    return model


def test_an_adjustment_that_gets_lost_is_not_taken(monkeypatch):
    model = ring_model(0.0, 1.0, 1.0)

    def gets_lost(model: pycolmap.Reconstruction, **settings: bool) -> None:
        for number in model.point3D_ids():
            model.points3D[number].error = float("nan")

    monkeypatch.setattr(final_adjustment, "refine_lenses", gets_lost)
    assert with_principal_points(model) is model


def test_level_images_get_square_pixels_and_their_principal_point():
    # In level images, taller pixels and a taller scene are the same.
    refined = with_principal_points(ring_model(0.0, 1.0, 1.05))
    fx, fy, cx, cy, *_ = refined.cameras[1].params
    assert fx == fy == pytest.approx(FOCAL, rel=0.02)
    assert [cx, cy] == pytest.approx([SIZE / 2, SIZE / 2], abs=3)
    heights = np.ptp([point.xyz for point in refined.points3D.values()], axis=0)
    assert heights[1] / heights[0] == pytest.approx(1.0, rel=0.02)


def test_pixels_that_are_oblong_stay_so():
    fx, fy, *_ = with_principal_points(ring_model(3.0, 1.2, 1.2)).cameras[1].params
    assert fy / fx == pytest.approx(1.2, rel=0.005)


def test_a_model_that_is_added_to_loses_no_image(database, tmp_path, monkeypatch):
    start = part_of(growth_of(database, tmp_path), range(N))
    monkeypatch.setattr(ModelGrowth, "continued", lambda *args: [part_of(args[0], FIRST_ROOM)])
    options = MappingOptions("incremental", 0)
    names = [database_name(index) for index in range(N)]
    models = mapping.map_photographs(
        database, names, tmp_path / "sparse", options, None, lambda n: None, start
    )
    assert models.n_registered == N
