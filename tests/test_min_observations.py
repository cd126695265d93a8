# SPDX-License-Identifier: Apache-2.0
"""Photographs that the reconstruction hardly knows are named and left out."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pycolmap
import pytest

from gaussian_splatting.data.observations import (
    KEEP_ALL,
    Observations,
    ViewFit,
    ViewOptions,
    hardly_known,
)
from gaussian_splatting.scenes.reference_layout import load_reference_checkpoint
from gaussian_splatting.scenes.scene import load_scene, load_scene_for_checkpoint
from sugar_pipeline.pipeline.input_checks import check_places
from sugar_trainers.capture import SugarSize
from sugar_utils.errors import UserError
from tests.support.command_words import full_plan
from tests.support.tiny_scene import make_tiny_checkpoint, make_tiny_scene

N_POINTS = 90


def observe(model_folder: Path, n_points: dict[str, int], off: dict[str, float]) -> None:
    """Have images observe some of the points, so many pixels beside where they are.

    The directions are random, so that no other pose fits them.
    """
    rng = np.random.default_rng(0)
    model = pycolmap.Reconstruction(model_folder)
    for number, image in sorted(model.images.items()):
        camera = model.cameras[image.camera_id]
        for point in sorted(model.points3D)[: n_points.get(image.name, N_POINTS)]:
            pixel = camera.img_from_cam(image.cam_from_world() * model.points3D[point].xyz)
            angle = rng.uniform(0, 2 * np.pi)
            away = np.array([np.cos(angle), np.sin(angle)])
            shifted = np.asarray(pixel) + off.get(image.name, 0.1) * away
            image.points2D.append(pycolmap.Point2D(shifted))
            element = pycolmap.TrackElement(number, len(image.points2D) - 1)
            model.add_observation(point, element)
    model.write_binary(str(model_folder))


@pytest.fixture
def scene(tmp_path) -> Path:
    """Ten views of a tiny scene: one observes five points, one is three pixels off."""
    root = make_tiny_scene(tmp_path / "scene", n_views=10, n_points=N_POINTS).root
    observe(root / "sparse" / "0", {"view_03.png": 5}, {"view_05.png": 3.0})
    return root


def names(cameras) -> list[str]:
    return [camera.name for camera in cameras]


def test_such_photographs_are_named_and_left_out(scene):
    told = []
    options = ViewOptions()
    found = load_scene(
        scene, size_rule=SugarSize(), eval_split=True, view_options=options, notify=told.append
    )
    assert names(found.test_cameras) == ["view_00.png", "view_08.png"]
    assert names(found.train_cameras) == [f"view_{i:02d}.png" for i in (1, 2, 4, 6, 7, 9)]
    (line,) = [line for line in told if "left out" in line]
    assert "left out 2 of 10 views" in line
    assert "view_03.png (5 points)" in line
    assert "view_05.png (3.0 pixels off)" in line
    assert "--keep_views" in line
    assert set(found.dropped_views) == {"view_03.png", "view_05.png"}


def test_zero_keeps_all(scene):
    found = load_scene(scene, size_rule=SugarSize(), eval_split=False, notify=pytest.fail)
    assert len(found.train_cameras) == 10
    with_flag = load_scene(
        scene, size_rule=SugarSize(), eval_split=False, view_options=KEEP_ALL, notify=pytest.fail
    )
    assert names(with_flag.train_cameras) == names(found.train_cameras)


def test_the_number_is_the_least_that_is_enough(scene):
    found = load_scene(
        scene,
        size_rule=SugarSize(),
        eval_split=False,
        view_options=ViewOptions(5),
        notify=lambda line: None,
    )
    assert "view_03.png" in names(found.train_cameras)
    assert "view_05.png" not in names(found.train_cameras)


def fits(*values: tuple[int, float]) -> Observations:
    """Observations of photographs 0.png, 1.png, ... in a reconstruction."""
    empty = np.zeros((0,), np.float32)
    return Observations(
        np.zeros((0, 3), np.float32),
        empty,
        empty.astype(np.int32),
        {},
        {f"{i}.png": ViewFit(*value) for i, value in enumerate(values)},
    )


def left_out(observations: Observations | None, least: int = 20) -> set[str]:
    return set(hardly_known(observations, ViewOptions(least)))


def test_a_reconstruction_that_is_sparse_everywhere_says_nothing_of_single_photographs():
    assert left_out(fits((30, 0.5), (30, 0.5), (0, math.nan))) == set()
    assert left_out(fits((80, 0.5), (80, 0.5), (0, math.nan))) == {"2.png"}
    assert left_out(None) == set()


def test_errors_are_compared_with_those_of_the_others():
    # A reconstruction of blurred photographs is off everywhere.
    assert left_out(fits((90, 1.0), (90, 1.1), (90, 2.9))) == set()
    assert left_out(fits((90, 1.0), (90, 1.1), (90, 3.4))) == {"2.png"}
    # Below two pixels nothing is wrong.
    assert left_out(fits((90, 0.2), (90, 0.2), (90, 1.9))) == set()
    assert left_out(fits((90, 0.2), (90, 0.2), (90, 2.1))) == {"2.png"}
    assert left_out(fits((90, 0.2), (90, 0.2), (90, math.inf))) == {"2.png"}


def test_with_a_checkpoint_they_are_left_out_where_it_poses_them_alike(tmp_path):
    tiny = make_tiny_scene(tmp_path / "scene", n_views=10, n_points=N_POINTS)
    observe(tiny.root / "sparse" / "0", {"view_03.png": 5}, {})
    root = make_tiny_checkpoint(tmp_path / "checkpoint", tiny)
    moved = json.loads((root / "cameras.json").read_text())

    def found() -> list[str]:
        checkpoint = load_reference_checkpoint(root, 7_000, lambda line: None)
        read = load_scene_for_checkpoint(
            tiny.root,
            checkpoint,
            size_rule=SugarSize(),
            eval_split=False,
            view_options=ViewOptions(),
            notify=lambda line: None,
        )
        return names(read.train_cameras)

    assert "view_03.png" not in found()
    for entry in moved:
        entry["position"][0] += 1.0
    (root / "cameras.json").write_text(json.dumps(moved))
    # What its own model says is of other poses.
    assert "view_03.png" in found()


@pytest.mark.parametrize("names", [("view_01.png", "view_03.png"), ("view_05.png", "view_06.png")])
def test_a_scale_by_a_photograph_that_is_left_out_is_refused_before_training(scene, names):
    words = ["-s", scene, "-r", "density", "--known_distance", *names, 2]
    plan = full_plan(*words)
    with pytest.raises(
        UserError, match="--known_distance view_0[35].png: neither a registered photograph"
    ):
        check_places(plan)
    kept = full_plan(*words, "--min_observations", 0)
    check_places(kept)
