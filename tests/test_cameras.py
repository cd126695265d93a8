# SPDX-License-Identifier: Apache-2.0
"""Cameras against recorded matrices, pixels and extents of the original method."""

import numpy as np
import pytest
import torch

from gaussian_splatting.data.cameras import Camera, camera_extent
from tests.support.golden import load_golden


@pytest.fixture(scope="module")
def case():
    return load_golden("case01_cameras_A")


@pytest.fixture(scope="module")
def cameras(case):
    built = []
    for i in range(len(case["in_fx"])):
        width, height = int(case["in_width"][i]), int(case["in_height"][i])
        rotation = np.asarray(case["in_c2w_R"][i], np.float64).T
        built.append(
            Camera(
                name=f"{i}",
                width=width,
                height=height,
                fx=float(case["in_fx"][i]),
                fy=float(case["in_fy"][i]),
                cx=width / 2,
                cy=height / 2,
                rotation=rotation,
                translation=-rotation @ np.asarray(case["in_position"][i], np.float64),
            )
        )
    return built


def project(camera: Camera, points: np.ndarray) -> np.ndarray:
    """Pixels with integer centres, as the recorded ones."""
    return camera.project(points).pixels - 0.5


def test_world_to_camera_matches_the_recording(case, cameras):
    for i, camera in enumerate(cameras):
        w2c = np.asarray(case["out_world_view_transform"][i]).T
        np.testing.assert_allclose(camera.rotation, w2c[:3, :3], atol=1e-5)
        np.testing.assert_allclose(camera.translation, w2c[:3, 3], atol=1e-5)
        np.testing.assert_allclose(camera.translation, case["in_w2c_t"][i], atol=1e-5)


def test_points_project_to_the_recorded_pixels(case, cameras):
    points = np.asarray(case["in_points"], np.float64)
    for i, camera in enumerate(cameras):
        view = camera.to_view(points)
        np.testing.assert_allclose(view, case["out_view_points"][i], rtol=1e-5, atol=1e-5)
        on_device = camera.to_view(torch.from_numpy(points))
        np.testing.assert_allclose(on_device.numpy(), view, rtol=1e-12, atol=1e-12)
        exact = camera.coordinates(torch.from_numpy(points))
        np.testing.assert_allclose(exact.numpy(), view, rtol=1e-12, atol=1e-12)
        in_front = view[:, 2] > 0.2
        assert in_front.sum() > 3
        pixels = project(camera, points)
        recorded = np.asarray(case["out_pixels"][i])[..., :2]
        np.testing.assert_allclose(pixels[in_front], recorded[in_front], atol=1e-3)


def test_centers_and_fields_of_view_match_the_recording(case, cameras):
    for i, camera in enumerate(cameras):
        np.testing.assert_allclose(camera.center, case["out_camera_center"][i], atol=1e-5)
        fov = [2 * np.arctan(t) for t in camera.tan_half_fov]
        np.testing.assert_allclose(fov, [case["out_fov_x"][i], case["out_fov_y"][i]], rtol=1e-6)


def test_extent_matches_the_recording(case, cameras):
    assert camera_extent(cameras) == pytest.approx(float(case["out_E"]), rel=1e-5)


def test_resizing_scales_intrinsics_with_each_side():
    camera = Camera("a", 100, 50, 80.0, 70.0, 45.0, 30.0, np.eye(3), np.zeros(3))
    small = camera.resized(50, 20)
    assert (small.width, small.height) == (50, 20)
    assert (small.fx, small.fy, small.cx, small.cy) == (40.0, 28.0, 22.5, 12.0)
    assert small.tan_half_fov == camera.tan_half_fov
