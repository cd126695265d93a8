# SPDX-License-Identifier: Apache-2.0
"""The refinement against a recorded trajectory and recorded learning rates."""

import numpy as np
import pytest
import torch

from sugar_scene.mesh_bound import bind_to_mesh
from sugar_trainers.refine_stage import RefineStage
from sugar_trainers.stage_config import RefineConfig
from tests.support.golden import golden_cameras, load_golden
from tests.support.training import accumulate

FILE_NAMES = {
    "vertices": "vertices",
    "opacity_logits": "all_densities",
    "log_scales": "scales",
    "rotations": "complex",
    "sh_dc": "sh_coordinates_dc",
}
LIMITS = {"vertices": 1e-5, "opacity_logits": 1e-3, "log_scales": 5e-4, "sh_dc": 1e-4}
"""Difference allowed on 99 % of the entries after 12 steps (data/golden/README.md)."""


def make_stage(case):
    extent = float(case["in_E"])
    cloud = bind_to_mesh(
        torch.tensor(case["in_vertices"]),
        torch.tensor(case["in_faces"]),
        torch.tensor(case["in_vertex_colors"]),
        int(case["in_gaussians_per_triangle"]),
        extent,
    )
    config = RefineConfig(
        gaussians_per_triangle=int(case["in_gaussians_per_triangle"]),
        n_vertices_in_fg=int(case["in_n_vertices_in_fg"]),
        normal_consistency_factor=float(case["in_normal_consistency_factor"]),
    )
    return RefineStage(cloud, config, extent)


def test_twelve_iterations_follow_the_recorded_trajectory():
    case = load_golden("case11_refine_trajectory_A")
    stage, cameras = make_stage(case), golden_cameras(case)
    parameters = stage.model.optimizer.parameters
    for own, name in FILE_NAMES.items():
        initial = case[f"out_initial_{name}"]
        np.testing.assert_allclose(parameters[own].detach(), initial, rtol=1e-5, atol=1e-6)
    for row, index in enumerate(case["in_camera_order"]):
        iteration = row + 1
        stage.begin(iteration)
        rate = stage.model.optimizer.learning_rates()["vertices"]
        assert rate == pytest.approx(float(case["out_vertex_lr"][row]), rel=1e-9)
        target = torch.tensor(case["in_gt_images_u8"][index]).float() / 255
        terms = accumulate(stage, iteration, cameras[index], target).terms
        for term, recorded in (
            ("loss", "total_loss"),
            ("color", "color_loss"),
            ("normal_consistency", "normal_consistency"),
        ):
            expected = float(case[f"out_{recorded}"][row])
            assert float(terms[term]) == pytest.approx(expected, abs=1e-5), (term, row)
        if row == 0:
            gradients = stage.model.optimizer.gradients()
            for own in LIMITS:
                expected = case[f"grad_first_{FILE_NAMES[own]}"]
                error = np.abs(gradients[own].numpy() - expected).max()
                assert error <= 2e-3 * np.abs(expected).max(), own
        stage.apply(iteration)
    final = stage.model.optimizer.parameters
    for own, limit in LIMITS.items():
        error = np.abs(final[own].detach().numpy() - case[f"out_final_{FILE_NAMES[own]}"])
        assert np.quantile(error, 0.99) <= limit, own
    # Equal in-plane sizes leave the rotation without a true gradient: only its size is bounded.
    angle = torch.atan2(final["rotations"][:, 1], final["rotations"][:, 0]).abs().max()
    assert float(angle.detach()) <= 12 * 0.001 + 1e-3
    assert float(final["sh_rest"].abs().max()) == 0.0


@pytest.mark.parametrize("vertices", [1_000_000, 200_000])
def test_vertex_rates_match_the_recorded_ones(vertices):
    case = load_golden("case06_losses_lr_prune_A")
    config = RefineConfig(n_vertices_in_fg=vertices)
    scale = config.vertex_rate_scale(float(case["in_E"]))
    expected = float(case[f"out_spatial_lr_scale_refine_nvert{vertices}"])
    assert scale == pytest.approx(expected, rel=1e-9)
    rates = case[f"out_lr_refine_nvert{vertices}"]
    for iteration, row in zip(case["in_lr_iterations"], rates, strict=True):
        assert config.rates.position(int(iteration), scale) == pytest.approx(row[0], rel=1e-9)


def test_a_box_sets_the_vertex_rate():
    config = RefineConfig(n_vertices_in_fg=10_000, bboxmin=(-1, -1, -1), bboxmax=(1, 1, 1))
    assert config.vertex_rate_scale(50.0) == pytest.approx(10 * 3**0.5 / 100)


def test_colour_degrees_come_one_by_one():
    config = RefineConfig()
    degrees = [config.sh_degree(i) for i in (1, 1000, 1001, 2000, 2001, 3001, 9000)]
    assert degrees == [0, 0, 1, 1, 2, 3, 3]
    assert RefineConfig().with_schedule(0.1).sh_degree(101) == 1
