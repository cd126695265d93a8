# SPDX-License-Identifier: Apache-2.0
"""Reports of a reconstruction follow from the evidence, and so does the choice of comparisons."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pycolmap
import pytest

from sugar_capture.features.photographs import Photograph
from sugar_capture.gps.gps_tags import GpsPosition
from sugar_capture.pairs import chosen_pairs
from sugar_capture.pairs.chosen_pairs import (
    chosen_matcher,
    connected_images,
    joining_pairs,
    neighbour_pairs,
    pairs_of_unregistered,
    pairs_to_match,
    pairs_with,
    recorded_pairs,
    second_round,
)
from sugar_capture.pairs.first_pairs import images_apart
from sugar_capture.pairs.similar_images import similar_pairs
from sugar_capture.registration import mapping
from sugar_capture.registration.registration_report import Evidence, registration_of
from sugar_utils.errors import UserError


def test_pairs_grow_as_they_should():
    assert len(pairs_to_match(Path("unused"), 6, "exhaustive")) == 15
    pairs = neighbour_pairs(100, reach=3)
    assert {(0, 1), (0, 3), (0, 64), (96, 99)} <= pairs
    assert (0, 5) not in pairs
    assert all(0 <= i < j < 100 for i, j in pairs)


def described_images(n: int, n_subjects: int) -> list[np.ndarray]:
    """Descriptors of images, of which every ``n_subjects``-th shows the same. (40, 128) each"""
    rng = np.random.default_rng(0)
    subjects = rng.integers(0, 255, (n_subjects, 40, 128)).astype(np.uint8)
    noise = rng.integers(0, 4, (n, 40, 128)).astype(np.uint8)
    return [subjects[k % n_subjects] // 2 + noise[k] for k in range(n)]


@pytest.mark.slow
@pytest.mark.parametrize(("n", "n_subjects"), [(9, 3), (250, 50)])
def test_similar_photographs_find_each_other(n, n_subjects):
    shown = described_images(n, n_subjects)
    pairs = itertools.combinations(range(n), 2)
    expected = {(i, j) for i, j in pairs if (j - i) % n_subjects == 0}
    assert similar_pairs(shown, n_each=5) == expected
    assert similar_pairs([*shown, np.zeros((0, 128), np.uint8)], n_each=5) == expected


def test_images_without_features_are_similar_to_none():
    nothing = np.zeros((0, 128), np.uint8)
    one = np.ones((1, 128), np.uint8)
    assert similar_pairs([]) == set()
    assert similar_pairs([nothing, nothing]) == set()
    assert similar_pairs([one, one, nothing]) == set()


def database_of_described_images(folder: Path, n: int) -> Path:
    path = folder / "database.db"
    with pycolmap.Database.open(str(path)) as database:
        camera = pycolmap.Camera(model="SIMPLE_PINHOLE", width=10, height=10, params=[10, 5, 5])
        camera_id = database.write_camera(camera)
        for k, descriptors in enumerate(described_images(n, 4)):
            image_id = database.write_image(pycolmap.Image(name=f"{k}", camera_id=camera_id))
            database.write_keypoints(image_id, np.ones((40, 4), np.float32))
            kind = pycolmap.FeatureExtractorType.SIFT
            database.write_descriptors(image_id, pycolmap.FeatureDescriptors(kind, descriptors))
    return path


def test_of_thousands_those_left_out_are_compared_with_the_most_similar(tmp_path, monkeypatch):
    n = 12
    path = database_of_described_images(tmp_path, n)
    assert pairs_of_unregistered(path, [3, 5], n) == pairs_with([3, 5], n)
    monkeypatch.setattr(chosen_pairs, "_ALL_PAIRS", 4)
    monkeypatch.setattr(chosen_pairs, "SIMILAR_UNORDERED", 0)
    assert pairs_of_unregistered(path, [3, 5], n) == [(1, 5), (3, 7), (3, 11), (5, 9)]


def test_separate_parts_are_compared_with_what_is_most_similar_in_the_rest(tmp_path, monkeypatch):
    n = 12
    path = database_of_described_images(tmp_path, n)
    matches = dict.fromkeys(itertools.pairwise(range(9)), 50)
    matches |= {(9, 10): 50, (10, 11): 50, (8, 9): 10}  # too few to register one by the other
    apart = images_apart(matches, n)
    assert apart == [9, 10, 11]
    monkeypatch.setattr(chosen_pairs, "SIMILAR_UNORDERED", 1)
    pairs = joining_pairs(path, apart, n)
    assert [second for _, second in sorted(pairs, key=lambda pair: pair[1])] == apart
    assert all((second - first) % 4 == 0 for first, second in pairs)
    assert joining_pairs(path, [], n) == []


def described(**facts) -> Photograph:
    return Photograph("a.jpg", Path("a.jpg"), 40, 30, None, "", False, "", False, **facts)


def test_photographs_are_compared_with_those_taken_after_and_near_them():
    times = [30.0, 0.0, 10.0, 20.0, None, 40.0]
    timed = [described(time=time) for time in times]
    in_order = [1, 2, 3, 0, 5]
    expected = set()
    for i, j in itertools.combinations(range(5), 2):
        if j - i <= 3:
            expected.add(tuple(sorted((in_order[i], in_order[j]))))
    assert recorded_pairs(timed) == expected
    # Two places 1 km apart: eight neighbours of each of ten are of its own place.
    located = [described(gps=GpsPosition(8.0, 50.0 + 0.01 * (k % 2), 0.1 * k)) for k in range(20)]
    pairs = recorded_pairs([*located, described()])
    assert len(pairs) > 70
    assert all((j - i) % 2 == 0 and j < 20 for i, j in pairs)


def test_loose_photographs_are_compared_with_partners_of_partners():
    matches = {pair: 100 for pair in itertools.combinations(range(8), 2)}
    matches[7, 8] = 20
    assert second_round(10, matches) == {(k, 8) for k in range(7)}
    assert pairs_with([1], 3) == [(0, 1), (1, 2)]
    assert connected_images([8, 9, 7], {**matches, (6, 8): 10}) == [8, 7]
    assert connected_images([8, 9], matches) == []


def test_the_matcher_and_the_mapper_follow_the_number_of_photographs():
    assert chosen_matcher("auto", 60, False) == "exhaustive"
    assert chosen_matcher("auto", 61, False) == "similar"
    assert chosen_matcher("auto", 61, True) == "sequential"
    assert chosen_matcher("similar", 5, False) == "similar"
    assert mapping.chosen_mapper("auto", 500) == "incremental"
    assert mapping.chosen_mapper("auto", 501) == "global"


def evidence(n: int = 20, missing: tuple[int, ...] = (), **changes) -> Evidence:
    names = [f"{k:02}" for k in range(n)]
    placed = [name for k, name in enumerate(names) if k not in missing]
    matches = {(k, k + 1): 200 for k in range(n - 1)}
    facts = {
        "sharpness": [0.6] * n,
        "n_features": [2000] * n,
        "matches": matches,
        "models": [placed],
        "n_points": 5000,
        "error": 0.5,
    }
    return Evidence(names, **{**facts, **changes})


def test_the_verdict_follows_from_the_evidence():
    fine = registration_of(evidence())
    assert (fine.word, fine.left_out, fine.advice) == ("fine", [], [])
    assert registration_of(evidence(n=5)).word == "usable"
    assert registration_of(evidence(warnings=1)).word == "usable"
    usable = registration_of(evidence(missing=(5, 6, 12)))
    assert usable.word == "usable"
    assert usable.advice == ["add photographs between 04 and 07 and between 11 and 13"]
    ends = registration_of(evidence(missing=(0, 19)))
    assert ends.advice == ["add photographs before 01 and after 18"]
    assert registration_of(evidence(missing=tuple(range(8)))).word == "poor"
    assert registration_of(evidence(spread=0.01)).word == "poor"
    masked = registration_of(evidence(missing=tuple(range(8)), masked=True))
    assert "--masked_features False" in masked.advice[0]
    assert "do not zoom" in registration_of(evidence(error=3.0)).advice[0]


def test_photographs_whose_matches_contradict_their_poses_are_named_first():
    told = registration_of(evidence(contradicting={"04": (5, 6)}, error=3.0))
    assert (
        told.advice[0] == "remove or retake 04 (5 of 6 pairs), whose matches contradict their poses"
    )
    # Advice has lines of its own.
    assert "remove" not in told.line(evidence())


def test_each_photograph_that_is_left_out_has_its_own_reason():
    sharp, features = [0.6] * 20, [2000] * 20
    sharp[3], features[6] = 0.2, 50
    matches = {(k, k + 1): 200 for k in range(19) if 9 not in (k, k + 1)}
    matches |= {(12, 13): 17}
    models = [[f"{k:02}" for k in range(20) if k not in (3, 6, 9, 12, 15)], ["15", "14", "16"]]
    left_out = dict(
        registration_of(
            evidence(sharpness=sharp, n_features=features, matches=matches, models=models)
        ).left_out
    )
    assert left_out == {
        "03": "blurred",
        "06": "too little texture, 50 features",
        "09": "matches no other photograph",
        "12": "too few matches, 200 at most",
        "15": "belongs to part 2, which shares too little with the rest",
    }


def test_smooth_photographs_of_other_places_are_not_blamed_on_blur():
    matches = {(k, k + 1): 200 for k in range(18)}
    sharp = [0.6] * 19 + [0.2]
    registered = [f"{k:02}" for k in range(19)]
    found = registration_of(evidence(sharpness=sharp, matches=matches, models=[registered]))
    assert dict(found.left_out) == {"19": "matches no other photograph"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sharpness": [0.1] * 20, "matches": {}}, "they do not overlap"),
        ({"sharpness": [0.1] * 20}, "20 of them are blurred"),
        ({"n_features": [10] * 20, "masked": True}, "the masks leave too little to go by"),
        ({"n_features": [10] * 20}, "20 of them show too little texture"),
        ({}, "19 pairs match, but none from two places far enough apart"),
        ({"matches": {}}, "they do not overlap"),
    ],
)
def test_where_nothing_is_registered_the_likeliest_reason_is_told(changes, reason):
    with pytest.raises(UserError, match=f"the 20 photographs could not be brought .*{reason}"):
        registration_of(evidence(models=[], **changes))


def test_sets_that_share_nothing_are_told_apart():
    halves = [[f"{k:02}" for k in range(n, n + 10)] for n in (0, 10)]
    with pytest.raises(UserError, match="10 from 00 to 09, and 10 from 10 to 19"):
        registration_of(evidence(models=halves))
