# SPDX-License-Identifier: Apache-2.0
"""Gaussians that move as a whole look the same to a camera that moves along."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.moved import moved_cloud
from gaussian_splatting.core.sh_rotation import sh_rotation
from gaussian_splatting.core.spherical_harmonics import sh_basis_of
from gaussian_splatting.data.cameras import Camera
from tests.support.reference_rasterizer import rasterize_reference

VIEW = Camera("a", 40, 32, 40.0, 40.0, 20.0, 16.0, np.eye(3), np.array([0.1, -0.2, 3.0]))


def cloud_of(n: int = 12, seed: int = 0) -> GaussianCloud:
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    return GaussianCloud(
        means=normal(n, 3) * 0.4,
        sh_dc=normal(n, 1, 3) * 0.3,
        sh_rest=normal(n, 15, 3) * 0.3,
        opacity_logits=normal(n, 1),
        log_scales=normal(n, 3) * 0.3 - 1.5,
        quats=normal(n, 4) * 2,
    )


def similarity(seed: int, scale: float) -> np.ndarray:
    matrix = np.eye(4)
    matrix[:3, :3] = scale * Rotation.random(random_state=seed).as_matrix()
    matrix[:3, 3] = np.random.default_rng(seed).normal(size=3)
    return matrix


def moved_camera(camera: Camera, matrix: np.ndarray) -> Camera:
    scale = np.cbrt(np.linalg.det(matrix[:3, :3]))
    rotation = camera.rotation @ (matrix[:3, :3] / scale).T
    center = matrix[:3, :3] @ camera.center + matrix[:3, 3]
    return Camera(
        camera.name,
        camera.width,
        camera.height,
        camera.fx,
        camera.fy,
        camera.cx,
        camera.cy,
        rotation,
        -rotation @ center,
    )


@pytest.mark.parametrize(("seed", "scale"), [(0, 1.0), (1, 2.5), (2, 0.4)])
def test_a_camera_that_moves_along_sees_the_same_picture(seed, scale):
    cloud, matrix = cloud_of(seed=seed), similarity(seed, scale)
    before = rasterize_reference(cloud.activate(), VIEW).image
    moved = moved_cloud(cloud, matrix).activate()
    after = rasterize_reference(moved, moved_camera(VIEW, matrix)).image
    assert before.std() > 0.05
    torch.testing.assert_close(after, before, rtol=0, atol=1e-10)


@pytest.mark.parametrize("angle", [0.3, np.pi - 1e-7, np.pi])
def test_every_band_turns_by_itself_also_by_half_a_turn(angle):
    turn = Rotation.from_rotvec(angle * np.array([0.6, -0.48, 0.64])).as_matrix()
    whole = sh_rotation(turn)
    directions = torch.nn.functional.normalize(cloud_of(60).means, dim=1)
    values = sh_basis_of(directions)[:, 1:] @ whole
    expected = sh_basis_of(directions @ torch.from_numpy(turn))[:, 1:]
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(
        whole @ whole.T, torch.eye(15, dtype=torch.float64), atol=1e-10, rtol=0
    )
    for first, end in ((0, 3), (3, 8), (8, 15)):
        others = [k for k in range(15) if not first <= k < end]
        assert whole[first:end][:, others].abs().max() < 1e-10


def test_where_degrees_do_not_mix_a_rotation_is_zero_to_the_bit():
    """Else the smallest values would differ from process to process."""
    bands = sh_rotation(Rotation.random(random_state=3).as_matrix())
    degrees = torch.tensor(np.repeat([1, 2, 3], (3, 5, 7)))
    assert (bands[degrees[:, None] != degrees] == 0).all()
    cloud = cloud_of()
    cloud.sh_rest[:, 3:] = 0
    assert (moved_cloud(cloud, similarity(3, 2.0)).sh_rest[:, 3:] == 0).all()


def test_fewer_bands_and_float32_stay_as_they_are():
    cloud = cloud_of()
    small = GaussianCloud(**{k: v.float() for k, v in cloud.tensors().items()})
    small.sh_rest = small.sh_rest[:, :3]
    moved = moved_cloud(small, similarity(4, 2.0))
    assert moved.sh_rest.shape == (12, 3, 3)
    assert {t.dtype for t in moved.tensors().values()} == {torch.float32}
    whole = moved_cloud(cloud, similarity(4, 2.0))
    torch.testing.assert_close(moved.sh_rest.double(), whole.sh_rest[:, :3], atol=1e-6, rtol=0)
