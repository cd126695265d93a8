# SPDX-License-Identifier: Apache-2.0
"""Pictures by our own renderer in the viewer: two in one, and beside photographs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gaussian_splatting.scenes.scene import load_scene
from sugar_trainers.capture import SugarSize
from sugar_viewer.rendered_pictures import (
    ERROR,
    PHOTOGRAPH,
    Arrangement,
    RenderedPictures,
    cut_to,
    error_picture,
    nearest_camera,
    slid,
)
from sugar_viewer.rendered_pictures import PictureChoice as Shown
from sugar_viewer.shown_models import model_of
from tests.support.mesh_scenes import icosahedron
from tests.support.tiny_scene import HEIGHT, WIDTH, TinyScene, tiny_cameras

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pictures(scene: TinyScene) -> RenderedPictures:
    """The scene's own Gaussians, of which its photographs are renders, and another ball."""
    views = load_scene(scene.root, size_rule=SugarSize(), notify=lambda _: None)
    cameras = sorted([*views.train_cameras, *views.test_cameras], key=lambda camera: camera.name)
    models = {
        "true": model_of("true", scene.cloud, False, CPU),
        "ball": model_of("ball", icosahedron(), False, CPU),
    }
    return RenderedPictures(models, cameras, False)


def arranged(layout: str, left: Shown, right: Shown, split: float = 0.5) -> Arrangement:
    return Arrangement(left, right, layout, split)


def test_a_slider_shows_one_picture_left_and_the_other_right(pictures):
    view = replace(tiny_cameras()[2], width=80, height=60, cx=40, cy=30)
    left, right = Shown("true"), Shown("ball", "normal")
    one, name = pictures.make(arranged("one", left, right), view)
    assert name == ""
    two, _ = pictures.make(arranged("one", right, left), view)
    both, _ = pictures.make(arranged("slider", left, right, 0.25), view)
    np.testing.assert_array_equal(both[:, :19], one[:, :19])
    np.testing.assert_array_equal(both[:, 21:], two[:, 21:])
    np.testing.assert_array_equal(slid(one, two, 1.0)[:, :-1], one[:, :-1])


def test_side_by_side_both_show_the_middle_of_the_view(pictures):
    view = replace(tiny_cameras()[2], width=80, height=60, cx=40, cy=30)
    left, right = Shown("true"), Shown("ball", "depth")
    whole, _ = pictures.make(arranged("one", left, right), view)
    both, _ = pictures.make(arranged("side by side", left, right), view)
    assert both.shape == whole.shape
    difference = np.abs(both[:, :40].astype(int) - whole[:, 20:60])
    assert difference.max() <= 2


def test_the_error_against_a_photograph_of_the_true_model_is_black(pictures):
    cameras = tiny_cameras()
    view = replace(cameras[4], width=2 * WIDTH, height=HEIGHT, cx=WIDTH, cy=HEIGHT / 2)
    found, name = pictures.make(arranged("one", Shown("true", ERROR), Shown("true")), view)
    assert name == "view_04.png"
    assert found.shape == (HEIGHT, 2 * WIDTH, 3)
    # Resampling and cutting to whole pixels aside.
    assert found.mean() < 8
    wrong, _ = pictures.make(arranged("one", Shown("ball", ERROR), Shown("true")), view)
    assert wrong.mean() > 5 * found.mean()
    photograph, _ = pictures.make(arranged("one", Shown("ball", PHOTOGRAPH), Shown("ball")), view)
    image, _ = pictures.make(arranged("one", Shown("true"), Shown("true")), cameras[4])
    middle = photograph[:, WIDTH // 2 : WIDTH // 2 + WIDTH].astype(int)
    assert np.abs(middle - image).mean() < 8


def test_errors_are_black_red_yellow_and_white():
    photograph = np.zeros((1, 4, 3), np.uint8)
    image = np.array([0, 21, 42, 255], np.uint8)[None, :, None].repeat(3, axis=2)
    colors = error_picture(image, photograph)[0]
    assert colors[0].tolist() == [0, 0, 0]
    assert colors[1][0] > 240
    assert colors[1][1] == 0
    assert colors[2][1] > 240
    assert colors[2][2] == 0
    assert colors[3].tolist() == [255, 255, 255]


def test_gaussians_have_no_clay_and_without_photographs_nothing_is_compared(pictures):
    assert "clay" not in pictures.available("true")
    assert "clay" in pictures.available("ball")
    bare = RenderedPictures({"ball": model_of("b", icosahedron(), False, CPU)}, [], False)
    assert not {PHOTOGRAPH, ERROR} & set(bare.available("ball"))


def test_the_nearest_camera_stands_near_and_looks_the_same_way():
    cameras = tiny_cameras(10)
    for camera in cameras:
        assert nearest_camera(cameras, camera) is camera
    moved = replace(cameras[3], translation=cameras[3].translation + [0.05, 0, 0.3])
    assert nearest_camera(cameras, moved) is cameras[3]


def test_a_view_that_is_fitted_keeps_its_middle_and_its_angle():
    camera = tiny_cameras()[0]
    wide = cut_to(camera, 300, 100, (300, 100))
    scale = min(300 / camera.width, 100 / camera.height)
    assert wide.fx == pytest.approx(camera.fx * scale)
    assert wide.cx - 150 == pytest.approx((camera.cx - camera.width / 2) * scale)
    assert wide.cy - 50 == pytest.approx((camera.cy - camera.height / 2) * scale)
