# SPDX-License-Identifier: Apache-2.0
"""The sky that takes what is infinitely far, so that it does not become floaters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gaussian_splatting.components.sky_sphere import (
    SKY_OPACITY,
    SKY_RADIUS,
    RobustConfig,
    opaque_sky,
    sky_of,
    with_sky,
)
from gaussian_splatting.formats.ply import read_gaussian_ply
from gaussian_splatting.vanilla.initial_gaussians import initial_cloud
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from tests.support.brief_runs import brief_vanilla
from tests.support.tiny_scene import (
    assert_same_bits,
    load_pt,
    make_tiny_scene,
    tiny_cameras,
)

EXTENT = 3.0
ON = RobustConfig(robust=True)


def test_the_shell_is_a_sphere_far_outside():
    cameras = tiny_cameras(4)
    points, colors = torch.eye(3), torch.zeros(3, 3, dtype=torch.uint8)
    more, shades = with_sky(points, colors, cameras, EXTENT, ON)
    sky = more[3:] - torch.tensor(np.mean([c.center for c in cameras], axis=0)).float()
    assert len(sky) == ON.sky_points == len(shades) - 3
    assert torch.allclose(sky.norm(dim=1), torch.tensor(SKY_RADIUS * EXTENT), rtol=1e-4)
    assert float(sky.mean(dim=0).norm()) < 0.01 * SKY_RADIUS * EXTENT
    far = sky_of(cameras, EXTENT, ON).distance(more)
    assert far[:3].tolist() == [0.0] * 3
    assert torch.allclose(far[3:], torch.tensor(SKY_RADIUS * EXTENT), rtol=1e-4)
    cloud = opaque_sky(initial_cloud(more, shades), sky_of(cameras, EXTENT, ON))
    opacities = cloud.activate().opacities
    assert torch.allclose(opacities[:3], torch.tensor(0.1))
    assert torch.allclose(opacities[3:], torch.tensor(SKY_OPACITY))
    assert sky_of(cameras, 0.0, ON) is None
    unasked = with_sky(points, colors, cameras, EXTENT, replace(ON, robust=False))
    assert unasked[0] is points
    assert sky_of(cameras, EXTENT, replace(ON, robust=False)) is None


def test_nothing_is_done_unless_asked_for():
    assert "robust" not in VanillaConfig().identity()
    assert VanillaConfig(robustness=ON).identity()["robust"]["sky_points"] == ON.sky_points


# Runs


def vanilla(scene, output, *more) -> None:
    assert brief_vanilla(scene, output, "--robust", *more, checkpoint_interval=8) == 0


@pytest.mark.slow
@pytest.mark.parametrize("limit", [400, 120])
def test_the_shell_counts_among_the_gaussians_allowed_and_leaves_most_to_the_points(
    tmp_path, limit
):
    scene = make_tiny_scene(tmp_path / "scene")
    vanilla(
        scene,
        tmp_path / "a",
        "--max_gaussians",
        limit,
        "--checkpoint_interval",
        2,
        "--keep_checkpoints",
        99,
    )
    folder = tmp_path / "a" / "checkpoints"
    clouds = [load_pt(path)["state_dict"]["_points"] for path in folder.glob("*.pt")]
    assert max(map(len, clouds)) <= limit
    is_far = load_pt(folder / "2.pt")["state_dict"]["_points"].norm(dim=1) > 40
    assert 0 < is_far.sum() <= limit // 10
    # Points are 300: as many as are allowed, or room for more.
    assert (~is_far).sum() >= min(300, limit - limit // 10) - 5


@pytest.mark.slow
def test_a_continued_robust_run_has_the_same_bits_and_keeps_its_shell(tmp_path):
    scene = make_tiny_scene(tmp_path / "scene")
    vanilla(scene, tmp_path / "a")
    source = tmp_path / "a" / "checkpoints" / "8.pt"
    vanilla(scene, tmp_path / "b", "--resume", source)
    assert_same_bits(*(tmp_path / name / "checkpoints" / "24.pt" for name in "ab"))
    result = tmp_path / "a" / "point_cloud" / "iteration_24" / "point_cloud.ply"
    # Resets are over, and pruning by size with them.
    assert float(read_gaussian_ply(result).means.norm(dim=1).max()) > 40
