# SPDX-License-Identifier: Apache-2.0
"""Photographs that the features of every capture leave out: further kinds of features, in turn."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pycolmap
import pytest
from PIL import Image

from sugar_capture.conversion.convert_run import convert
from sugar_capture.convert_options import ConvertOptions, PoseTimeLimit, SfmOptions
from sugar_capture.features import feature_kinds, learned_features, matching
from sugar_capture.features.appended_features import append_features
from sugar_capture.features.feature_database import create_database
from sugar_capture.features.feature_kinds import AFFINE, CONTRAST, stretch_contrast
from sugar_capture.features.learned_features import EXTRACTOR, MATCHER, Networks
from sugar_capture.features.photographs import described_photographs
from sugar_capture.pairs import pair_checks
from sugar_capture.registration import mapping, other_features, pose_time
from sugar_capture.registration.pose_time import PoseSpeed
from sugar_utils.errors import UserError
from tests.support.heard_console import Heard
from tests.support.photographed_room import (
    HEIGHT,
    WIDTH,
    camera_poses,
    model_bytes,
    photograph,
    write_photographs,
)
from tests.support.pose_errors import Errors, pose_errors, pose_of, registered_poses

N = 6
DARK = "IMG 3.png"
SMALL = SfmOptions(extraction_size=WIDTH, max_features=600)


def darken(path: Path, share: float, noise: float) -> None:
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(float)
    noisy = 30 + share * pixels + noise * np.random.default_rng(1).normal(size=pixels.shape)
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path)


@pytest.fixture(scope="module")
def photographs_with_a_dark_one(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dark") / "input"
    write_photographs(folder, N)
    darken(folder / DARK, 0.06, 1.5)
    return folder


@pytest.fixture
def room(photographs_with_a_dark_one, tmp_path) -> Path:
    root = tmp_path / "scene"
    shutil.copytree(photographs_with_a_dark_one, root / "input")
    return root


@pytest.fixture(scope="module")
def retried(photographs_with_a_dark_one, tmp_path_factory) -> Path:
    """A scene whose dark photograph a later step registered."""
    root = tmp_path_factory.mktemp("retried") / "scene"
    shutil.copytree(photographs_with_a_dark_one, root / "input")
    convert(ConvertOptions(root, sfm=SMALL), Heard())
    return root


def outcome_of(root: Path) -> dict:
    return json.loads((root / "distorted" / "outcome.json").read_text())


def errors_of(root: Path) -> Errors:
    poses = enumerate(camera_poses(N), start=1)
    known = {f"IMG {number}.png": pose_of(*pose) for number, pose in poses}
    return pose_errors(registered_poses(root / "distorted" / "sparse" / "0"), known)


@pytest.mark.slow
def test_a_dark_photograph_is_registered_where_it_was_taken(retried):
    outcome = outcome_of(retried)
    assert outcome["registered"] == N
    assert outcome["registered_by"] == {CONTRAST.label: [DARK]}
    errors = errors_of(retried)
    assert len(errors.rotation) == N
    assert errors.rotation.max() < 0.5
    assert errors.position.max() < 1


def test_the_report_says_which_step_registered_which_photographs(retried):
    assert f"1 of them only by {CONTRAST.label}" in outcome_of(retried)["line"]
    page = (retried / "convert.html").read_text(encoding="utf-8")
    assert "Photographs that further features registered" in page
    assert f"1: {DARK}" in page


@pytest.mark.slow
def test_the_flag_names_where_the_ladder_stops(room):
    convert(ConvertOptions(room, sfm=replace(SMALL, features="sift")), Heard())
    assert list(outcome_of(room)["left_out"]) == [DARK]
    # Another place to stop is another result, for which what was done before is used.
    console = Heard()
    result = convert(ConvertOptions(room, sfm=SMALL), console)
    assert result.outcome["registered"] == N
    steps = [step["name"] for step in result.outcome["steps"]]
    assert "looking for features" not in steps


@pytest.mark.slow
def test_a_capture_that_registers_whole_climbs_no_step(tmp_path, monkeypatch):
    def fails(*args) -> None:
        raise AssertionError("a step was tried")

    monkeypatch.setattr(other_features.OtherFeatures, "perform", fails)
    write_photographs(tmp_path / "scene" / "input", N)
    result = convert(ConvertOptions(tmp_path / "scene", sfm=SMALL), Heard())
    assert result.outcome["registered"] == N
    assert result.outcome["registered_by"] == {}


@pytest.mark.parametrize(
    ("place", "name", "calls"),
    [
        pytest.param(matching, "extract_features", 2, marks=pytest.mark.slow),
        (matching, "match_pairs", 2),
        pytest.param(other_features, "append_features", 1, marks=pytest.mark.slow),
        (mapping, "map_photographs", 2),
    ],
)
def test_a_ladder_that_was_cut_short_goes_on_to_the_same_bits(
    place, name, calls, room, retried, monkeypatch
):
    real = getattr(place, name)
    left = [calls]

    def dies(*args):
        left[0] -= 1
        result = real(*args)
        if left[0] == 0:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(place, name, dies)
    with pytest.raises(KeyboardInterrupt):
        convert(ConvertOptions(room, sfm=SMALL), Heard())
    assert left == [0]
    monkeypatch.undo()
    convert(ConvertOptions(room, sfm=SMALL), Heard())
    assert model_bytes(room) == model_bytes(retried)


@pytest.mark.slow
def test_steps_that_were_done_are_not_done_again(room, retried, monkeypatch):
    from sugar_capture import scene_folder

    def dies(*args) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(scene_folder, "write_flat_pictures", dies)
    with pytest.raises(KeyboardInterrupt):
        convert(ConvertOptions(room, sfm=SMALL), Heard())
    monkeypatch.undo()
    result = convert(ConvertOptions(room, sfm=SMALL), Heard())
    steps = {step["name"] for step in result.outcome["steps"]}
    assert steps == {"checking photographs", "undistorting photographs", "checking views"}
    assert result.outcome["registered_by"] == {CONTRAST.label: [DARK]}
    assert model_bytes(room) == model_bytes(retried)


@pytest.mark.slow
def test_a_photograph_of_another_place_is_left_out_by_all_steps(tmp_path):
    root = tmp_path / "scene"
    write_photographs(root / "input", N)
    pixels = photograph(*camera_poses(N)[2], seed=5)
    Image.fromarray(pixels).save(root / "input" / "foreign.png")
    darken(root / "input" / DARK, 0.06, 1.5)
    result = convert(ConvertOptions(root, sfm=SMALL), Heard())
    assert list(result.outcome["left_out"]) == ["foreign.png"]
    assert result.outcome["registered_by"] == {CONTRAST.label: [DARK]}
    assert errors_of(root).rotation.max() < 0.5


@pytest.mark.slow
def test_features_of_later_steps_lie_inside_of_masks(room):
    (room / "masks").mkdir()
    mask = np.full((HEIGHT, WIDTH), 255, np.uint8)
    mask[:, : WIDTH // 10] = 0
    for path in (room / "input").iterdir():
        Image.fromarray(mask).save(room / "masks" / f"{path.name}.png")
    sfm = replace(SMALL, masked_features=True)
    outcome = convert(ConvertOptions(room, sfm=sfm), Heard()).outcome
    assert outcome["registered_by"] == {CONTRAST.label: [DARK]}
    with pycolmap.Database.open(str(room / "distorted" / "contrast_database.db")) as database:
        for number in range(1, N + 1):
            assert database.read_keypoints(number)[:, 0].min() >= WIDTH // 10


@pytest.mark.slow
def test_most_photographs_left_out_are_mapped_anew(tmp_path):
    root = tmp_path / "scene"
    write_photographs(root / "input", N)
    for path in (root / "input").iterdir():
        darken(path, 0.12, 1.0)
    assert convert(ConvertOptions(root, sfm=SMALL), Heard()).outcome["registered"] == N
    assert errors_of(root).rotation.max() < 0.5


@pytest.mark.slow
def test_what_matches_do_not_prove_is_taken_out_again(room, monkeypatch):
    monkeypatch.setattr(pair_checks, "contradicting_pairs", lambda *args: {DARK: (5, 5)})
    result = convert(ConvertOptions(room, sfm=SMALL), Heard())
    assert list(result.outcome["left_out"]) == [DARK]
    assert result.outcome["registered"] == N - 1


def test_an_image_without_a_well_matched_one_is_unproven(retried):
    database = retried / "distorted" / "contrast_database.db"
    models = mapping.read_models(retried / "distorted" / "sparse")
    names = [f"IMG {number}.png" for number in range(1, N + 1)]
    matches = matching.verified_matches(database)

    def unproven(registered: list[str]) -> set[str]:
        return pair_checks.unproven_images(
            models.largest, {DARK}, registered, database, names, matches
        )

    assert unproven(models.registered[0]) == set()
    assert unproven([DARK]) == {DARK}


@pytest.mark.slow
@pytest.mark.parametrize("speed", [1e-6, 1e6])
def test_a_step_that_takes_longer_than_is_left_is_left_out_and_said(speed, room, monkeypatch):
    measured = PoseSpeed(size=WIDTH, n_features=500.0, extraction=speed, matching=speed)
    monkeypatch.setattr(pose_time, "measured_speed", lambda *args: measured)
    console = Heard()
    options = ConvertOptions(room, sfm=SMALL, time_limit=PoseTimeLimit(1e4, 1e4, 1e4))
    result = convert(options, console)
    is_tried = speed < 1
    assert result.outcome["registered"] == (N if is_tried else N - 1)
    sentence = f"{CONTRAST.label} for the 1 photographs left out would take longer than is left"
    assert (f"note: {sentence}" in console.lines) != is_tried
    page = (room / "convert.html").read_text(encoding="utf-8")
    assert (sentence in page) != is_tried


@pytest.mark.slow
def test_a_call_that_goes_on_leaves_out_the_same_steps(room, monkeypatch):
    slow = PoseSpeed(size=WIDTH, n_features=500.0, extraction=1e6, matching=1e6)
    monkeypatch.setattr(pose_time, "measured_speed", lambda *args: slow)
    options = ConvertOptions(room, sfm=SMALL, time_limit=PoseTimeLimit(1e4, 1e4, 1e4))
    convert(options, Heard())
    monkeypatch.setattr(pose_time, "measured_speed", None)
    (room / "distorted" / "outcome.json").unlink()
    record = json.loads((room / "distorted" / "convert.json").read_text())
    del record["finished"]
    (room / "distorted" / "convert.json").write_text(json.dumps(record))
    assert convert(options, Heard()).outcome["registered"] == N - 1


def write_database(path: Path, photographs, keypoints, matches) -> None:
    create_database(path, photographs, None)
    with pycolmap.Database.open(str(path)) as database:
        for index, places in enumerate(keypoints):
            rows = np.pad(np.array(places, np.float32), ((0, 0), (0, 2)), constant_values=1)
            database.write_keypoints(index + 1, rows)
        database.write_matches(1, 2, np.array(matches, np.uint32))


def test_appended_features_keep_their_matches_and_share_places(tmp_path, monkeypatch):
    # Few matches prove nothing, so that verifying them would remove them.
    monkeypatch.setattr(matching, "verify_pairs", lambda *args: None)
    for name in ("a.png", "b.png"):
        Image.new("RGB", (100, 80)).save(tmp_path / name)
    photographs = described_photographs(tmp_path, True)
    old = [[(10, 10), (20, 20)], [(30, 30), (40, 40)]]
    new = [[(20.3, 20), (50, 50)], [(60, 60), (30, 30.4), (70, 70)]]
    write_database(tmp_path / "old.db", photographs, old, [(0, 0), (1, 1)])
    write_database(tmp_path / "new.db", photographs, new, [(0, 0), (1, 1), (1, 2)])
    target = tmp_path / "both.db"
    append_features(tmp_path / "old.db", tmp_path / "new.db", target, {0: 1.0, 1: 1.0}, 0)
    with pycolmap.Database.open(str(target)) as database:
        first = database.read_keypoints(1)[:, :2].tolist()
        second = database.read_keypoints(2)[:, :2].tolist()
        matches = database.read_matches(1, 2).tolist()
    assert first == [[10, 10], [20, 20], [50, 50]]
    assert second == [[30, 30], [40, 40], [60, 60], [70, 70]]
    assert sorted(matches) == [[0, 0], [1, 1], [1, 2], [2, 0], [2, 3]]


@pytest.mark.parametrize("height", [1, 15, 16, 17])
def test_affine_features_of_an_image_that_is_only_a_strip_are_few_or_none(height, tmp_path):
    """COLMAP's affine detector ends the process below 16 pixels."""
    folder = tmp_path / "input"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (height, 200), np.uint8)
    Image.fromarray(pixels).save(folder / "strip.png")
    photographs = described_photographs(folder, False)
    database = tmp_path / "features.db"
    create_database(database, photographs, None)
    done: list[int] = []
    matching.extract_features(database, photographs, 200, 100, done.append, variant=AFFINE.variant)
    with pycolmap.Database.open(str(database)) as opened:
        assert opened.exists_descriptors(1)
        assert (opened.num_keypoints_for_image(1) > 0) == (height >= 16)
    assert done[-1] == 1


def test_stretched_contrast_reaches_from_black_to_white_in_place():
    grey = np.full((60, 80), 20, np.uint8)
    grey[:, 40:] = 24
    stretched = stretch_contrast(grey)
    assert stretched[:, :30].max() == 0
    assert stretched[:, 50:].min() == 255
    assert np.diff(stretched[30].astype(int)).argmax() == 39
    assert stretch_contrast(np.full((6, 8), 7, np.uint8)).max() == 0


class SiftAsAliked:
    """A stand-in for ALIKED's network: SIFT in its inputs and outputs."""

    def run(self, names, inputs) -> list[np.ndarray]:
        assert names == ("keypoints", "descriptors", "scores")
        image = inputs["image"]
        height, width = image.shape[2:]
        assert image.shape[:2] == (1, 3)
        assert height % 32 == 0
        assert width % 32 == 0
        grey = np.ascontiguousarray((255 * image[0].mean(axis=0)).astype(np.uint8))
        options = AFFINE.variant.options(1600, 600)
        extractor = pycolmap.FeatureExtractor.create(options, pycolmap.Device.cpu)
        raw, descriptors = extractor.extract_from_uint8_array(grey)
        # From COLMAP's corner of the first pixel to its middle, and from -1 to 1.
        places = pycolmap.keypoints_to_matrix(raw).reshape(-1, 4)[:, :2] - 0.5
        unit_places = 2 * places / [width - 1, height - 1] - 1
        rows = descriptors.data.astype(np.float32)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        return [unit_places[None], rows[None], np.ones((1, len(rows)))]


class NearestAsLightGlue:
    """A stand-in for LightGlue's network: mutual nearest neighbours."""

    def run(self, names, inputs) -> list[np.ndarray]:
        assert names == ("matches0", "mscores0")
        assert inputs["image_size0"].tolist() == [[WIDTH, HEIGHT]]
        assert inputs["kpts0"].shape[1] == inputs["desc0"].shape[1]
        assert inputs["desc0"].shape[2] == 128
        cosines = inputs["desc0"][0] @ inputs["desc1"][0].T
        forward = cosines.argmax(axis=1)
        backward = cosines.argmax(axis=0)
        is_mutual = backward[forward] == np.arange(len(forward))
        scores = np.where(cosines.max(axis=1) > 0.85, 0.9, 0.0)
        return [np.where(is_mutual, forward, -1), scores]


@pytest.fixture
def weights(tmp_path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / f"39c423-{EXTRACTOR}").write_bytes(b"extractor")
    (folder / MATCHER).write_bytes(b"matcher")
    return folder


@pytest.mark.slow
def test_learned_features_register_what_is_left_out(tmp_path, weights, monkeypatch):
    networks = Networks(SiftAsAliked(), NearestAsLightGlue())
    monkeypatch.setattr(feature_kinds, "load_networks", lambda found: networks)
    monkeypatch.setattr(learned_features.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(feature_kinds, "AFFINE", replace(AFFINE, name="none"))
    monkeypatch.setattr(feature_kinds, "CONTRAST", replace(CONTRAST, name="none"))
    root = tmp_path / "scene"
    write_photographs(root / "input", N)
    darken(root / "input" / DARK, 0.2, 0.5)
    sfm = replace(SMALL, features="learned", feature_weights=weights)
    outcome = convert(ConvertOptions(root, sfm=sfm), Heard()).outcome
    assert outcome["registered_by"] == {"ALIKED and LightGlue": [DARK]}
    assert errors_of(root).rotation.max() < 0.5


def test_missing_weights_and_runtime_are_said_before_anything_is_changed(
    room, tmp_path, weights, monkeypatch
):
    asked_for = ConvertOptions(
        room, sfm=replace(SMALL, features="learned", feature_weights=tmp_path)
    )
    with pytest.raises(UserError, match=f"has no {EXTRACTOR}; save it there"):
        convert(asked_for, Heard())
    assert not (room / "distorted" / "database.db").exists()
    monkeypatch.setattr(learned_features.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(learned_features, "PACKAGE", "a_runtime_that_is_missing")
    with pytest.raises(UserError, match="--features learned needs the package"):
        learned_features.find_weights(weights, is_asked_for=True)
    # Where they are not asked for, the list ends before.
    assert learned_features.find_weights(weights, is_asked_for=False) is None
    assert learned_features.find_weights(tmp_path, is_asked_for=False) is None


class FakeRuntime:
    """A stand-in for ONNX Runtime: loads what is no network, or another one."""

    class SessionOptions:
        intra_op_num_threads = 0

    class InferenceSession:
        def __init__(self, path: str, options, providers) -> None:
            if Path(path).read_bytes() != b"other":
                raise RuntimeError("Protobuf parsing failed.\nmore")

        def get_inputs(self) -> list:
            return [type("Input", (), {"name": "pixels"})()]


def test_damaged_weights_and_other_networks_are_refused(room, weights, monkeypatch):
    monkeypatch.setattr(learned_features.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(learned_features, "load_package", lambda *args, **kwargs: (FakeRuntime,))
    found = learned_features.LearnedWeights(weights / f"39c423-{EXTRACTOR}", weights / MATCHER)
    asked_for = ConvertOptions(room, sfm=replace(SMALL, feature_weights=weights))
    with pytest.raises(UserError, match=r"cannot be loaded \(Protobuf parsing failed.\); remove"):
        convert(asked_for, Heard())
    assert not (room / "distorted" / "database.db").exists()
    found.extractor.write_bytes(b"other")
    with pytest.raises(UserError, match="is another network than aliked-n16rot.onnx, with inputs"):
        learned_features.load_networks(found)
