# SPDX-License-Identifier: Apache-2.0
"""Losses: recorded values, zeros where they must be, hand-computed values, empty input."""

import math

import numpy as np
import pytest
import torch

from sugar_scene.field_kernels import evaluate_fields
from sugar_scene.geometry import sdf_from_density, std_along_view
from sugar_trainers.losses import (
    MIN_VIEW_Z,
    better_normal_loss,
    density_estimation_loss,
    lookup_depth,
    near_surface_mask,
    normals_from_depth,
    opacity_entropy,
    sdf_estimation_loss,
)
from sugar_utils.neighbors import nearest_neighbors
from tests.support.depth_normals import depth_normal_consistency
from tests.support.field_reference import evaluate_fields_reference
from tests.support.golden import golden_cameras, golden_cloud, load_golden

PARAMETERS = ("points", "all_densities", "scales", "quaternions")


class GoldenSamples:
    """A recorded case: its fields at the recorded samples, sorted, and its camera."""

    def __init__(self, name: str, evaluate, density_factor: float) -> None:
        self.case = load_golden(name)
        cloud = golden_cloud(self.case)
        self.parameters = [cloud.means, cloud.opacity_logits, cloud.log_scales, cloud.quats]
        self.gaussians = g = cloud.activate()
        indices = torch.tensor(self.case["in_sample_gaussian_idx"])
        self.order = indices.argsort(stable=True)
        noise = torch.tensor(self.case["in_sample_noise"])
        self.fields = evaluate(
            g.means,
            g.quats,
            g.scales,
            g.opacities,
            nearest_neighbors(g.means, 16).indices,
            indices[self.order],
            noise[self.order],
            density_factor,
        )
        self.camera = golden_cameras(self.case)[int(self.case["in_camera_index"])]

    def recorded(self, name: str) -> torch.Tensor:
        """A recorded per-sample array, in the order of the samples."""
        return torch.tensor(self.case[name])[self.order]

    def assert_loss(self, name: str, loss: torch.Tensor) -> None:
        assert loss.item() == pytest.approx(float(self.case[f"out_{name}"]), rel=1e-5)
        grads = torch.autograd.grad(loss, self.parameters, allow_unused=True, retain_graph=True)
        for grad, parameter in zip(grads, PARAMETERS, strict=True):
            expected = self.case[f"grad_{name}_{parameter}"]
            actual = np.zeros_like(expected) if grad is None else grad.numpy()
            assert np.abs(actual - expected).max() <= 1e-4 * np.abs(expected).max()

    def to_view(self, points: torch.Tensor) -> torch.Tensor:
        rotation = torch.tensor(self.camera.rotation, dtype=torch.float32)
        return points @ rotation.T + torch.tensor(self.camera.translation, dtype=torch.float32)

    def depth_at(self, view_points: torch.Tensor) -> torch.Tensor:
        c = self.camera
        depth_map = torch.tensor(self.case["out_depth_map"])
        return lookup_depth(depth_map, view_points, torch.tensor([c.fx, c.fy, c.cx, c.cy]))


@pytest.fixture(scope="module", params=[evaluate_fields_reference, evaluate_fields])
def density_case(request):
    return GoldenSamples("case05b_density_terms_A", request.param, 1.0)


@pytest.fixture(scope="module", params=[evaluate_fields_reference, evaluate_fields])
def sdf_case(request):
    return GoldenSamples("case05c_sdf_terms_A", request.param, 1 / 16)


def test_density_loss_is_golden_with_gradients(density_case):
    f = density_case.fields
    loss = density_estimation_loss(f.density, f.plane_distance, f.beta)
    density_case.assert_loss("density_loss", loss)
    target = torch.exp(-0.5 * (f.plane_distance / f.beta).square())
    expected = density_case.recorded("out_target_density")
    torch.testing.assert_close(target.detach(), expected, rtol=1e-4, atol=1e-5)


def test_better_normal_loss_is_golden_with_gradients(density_case, sdf_case):
    for case in (density_case, sdf_case):
        error = case.fields.normal_error
        case.assert_loss("normal_loss", better_normal_loss(error))
    expected = density_case.recorded("out_per_sample_normal_loss")
    torch.testing.assert_close(
        density_case.fields.normal_error.detach(), expected, rtol=1e-3, atol=1e-5
    )


def test_sdf_loss_is_golden_given_the_depth_map(sdf_case):
    points = sdf_case.to_view(sdf_case.fields.points)
    depth = sdf_case.depth_at(points)
    in_front = points[:, 2] > MIN_VIEW_Z
    sdf = sdf_from_density(sdf_case.fields.density, sdf_case.fields.beta)
    gap = (depth - points[:, 2])[in_front]
    loss = sdf_estimation_loss(sdf[in_front], gap, float(sdf_case.case["in_E"]))
    assert torch.equal(in_front, sdf_case.recorded("out_proj_mask"))
    assert loss.item() == pytest.approx(float(sdf_case.case["out_sdf_loss"]), rel=1e-5)
    torch.testing.assert_close(
        depth.detach(), sdf_case.recorded("out_samples_map_z"), rtol=1e-4, atol=1e-4
    )
    grads = torch.autograd.grad(loss, sdf_case.parameters, retain_graph=True)
    assert all(g.isfinite().all() for g in grads)


def test_near_surface_mask_is_golden(sdf_case):
    g, case = sdf_case.gaussians, sdf_case.case
    view = sdf_case.to_view(g.means.detach())
    depth = sdf_case.depth_at(view)
    in_front = view[:, 2] > MIN_VIEW_Z
    expected = torch.tensor(case["out_gaussian_centers_map_z"])
    torch.testing.assert_close(depth[in_front], expected[in_front], rtol=1e-4, atol=1e-4)
    center = torch.tensor(sdf_case.camera.center, dtype=torch.float32)
    std = std_along_view(g.means, g.quats, g.scales, center)
    expected = torch.tensor(case["out_gaussian_std_along_view"])
    torch.testing.assert_close(std.detach(), expected, rtol=1e-5, atol=1e-6)
    everywhere = torch.ones_like(in_front)
    near = near_surface_mask(depth - view[:, 2], std, everywhere)
    # The recorded mask also demands visibility, which one of the near Gaussians lacks.
    recorded = torch.tensor(case["out_sampling_mask"])
    assert (near & ~recorded).sum() <= 1
    assert not (recorded & ~near).any()
    assert torch.equal(near_surface_mask(depth - view[:, 2], std, recorded), recorded)


def test_entropy_is_golden_with_gradient():
    case = load_golden("case06_losses_lr_prune_A")
    cloud = golden_cloud(case)
    loss = opacity_entropy(cloud.activate().opacities[torch.tensor(case["out_visible"])])
    assert loss.item() == pytest.approx(float(case["out_entropy"]), rel=1e-5)
    (grad,) = torch.autograd.grad(loss, [cloud.opacity_logits])
    expected = case["grad_entropy_all_densities"]
    assert np.abs(grad.numpy() - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("view", [0, 1])
def test_depth_normal_consistency_is_golden(view):
    case = load_golden("case03_depth_normal_A")
    camera = golden_cameras(case)[view]
    intrinsics = camera.fx, camera.fy, camera.cx, camera.cy
    depth, normal = (torch.tensor(case[f"out_{name}_cam{view}"]) for name in ("depth", "normal"))
    found = normals_from_depth(depth, *intrinsics)
    expected = torch.tensor(case[f"out_normal_from_depth_cam{view}"])
    solid = depth > 0.1
    torch.testing.assert_close(found[solid], expected[solid], rtol=0, atol=1e-3)
    loss = depth_normal_consistency(depth, normal, *intrinsics)
    assert loss.item() == pytest.approx(float(case[f"out_loss_cam{view}"]), rel=1e-4)


# Hand values, zeros and empty input


def test_entropy_of_hard_opacities_is_zero_and_of_one_half_is_ln_2():
    hard = torch.tensor([0.0, 1.0], requires_grad=True)
    assert opacity_entropy(hard).item() == pytest.approx(0.0, abs=1e-6)
    (grad,) = torch.autograd.grad(opacity_entropy(hard), hard)
    assert grad.isfinite().all()
    assert opacity_entropy(torch.tensor([0.5])).item() == pytest.approx(math.log(2))


def test_entropy_pushes_away_from_one_half():
    opacities = torch.tensor([0.3, 0.7], requires_grad=True)
    opacity_entropy(opacities).backward()
    assert opacities.grad[0] > 0 > opacities.grad[1]


def test_density_loss_is_zero_on_a_flat_cloud_and_its_hand_value_elsewhere():
    delta, beta = torch.tensor([0.0, 0.2, -0.4]), torch.full((3,), 0.2)
    flat = torch.tensor([1.0, math.exp(-0.5), math.exp(-2.0)])
    assert density_estimation_loss(flat, delta, beta).item() == pytest.approx(0.0, abs=1e-7)
    doubled = density_estimation_loss(2 * flat, delta, beta)
    assert doubled.item() == pytest.approx(flat.mean().item())


def test_density_loss_of_a_vanished_beta_is_finite():
    beta = torch.zeros(2, requires_grad=True)
    loss = density_estimation_loss(torch.ones(2), torch.tensor([0.0, 1.0]), beta)
    loss.backward()
    assert loss.item() == pytest.approx(0.5)
    assert beta.grad.isfinite().all()


def test_sdf_loss_is_zero_on_the_surface_and_clamped_far_away():
    sdf = torch.tensor([0.3, 0.3, 0.0, 0.0])
    gap = torch.tensor([0.3, -0.3, 0.5, 1e4])
    assert sdf_estimation_loss(sdf[:2], gap[:2], 2.0).item() == 0.0
    assert sdf_estimation_loss(sdf, gap, 2.0).item() == pytest.approx((0.5 / 0.2 + 20) / 4)


def test_losses_of_chunks_add_up_to_the_whole():
    rng = torch.Generator().manual_seed(0)
    a, b, c = (torch.rand(100, generator=rng) + 0.1 for _ in range(3))
    for loss, args in (
        (density_estimation_loss, (a, b, c)),
        (lambda x, y, total=None: sdf_estimation_loss(x, y, 3.0, total), (a, b)),
        (better_normal_loss, (a,)),
        (lambda x, total=None: opacity_entropy(x / 2, total), (a,)),
    ):
        parts = zip(*(t.split(30) for t in args), strict=True)
        summed = sum(loss(*part, total=100) for part in parts)
        torch.testing.assert_close(summed, loss(*args))


def test_losses_of_nothing_are_zero():
    nothing = torch.empty(0, requires_grad=True)
    losses = [
        opacity_entropy(nothing),
        density_estimation_loss(nothing, nothing, nothing),
        sdf_estimation_loss(nothing, nothing, 1.0),
        better_normal_loss(nothing),
    ]
    assert [loss.item() for loss in losses] == [0.0] * 4
    sum(losses).backward()


def plane(height, width, normal, fx, fy, cx, cy):
    """Depth of the plane n . p = n_z seen through integer pixels."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    ray = torch.stack([(x - cx) / fx, (y - cy) / fy, torch.ones_like(x) * 1.0], dim=-1)
    return normal[2] / (ray @ normal)


@pytest.mark.parametrize("center", [(8.0, 6.0), (3.0, 10.5)])
def test_depth_of_a_tilted_plane_has_its_normal_for_any_principal_point(center):
    normal = torch.nn.functional.normalize(torch.tensor([0.2, -0.3, -1.0]), dim=0)
    intrinsics = (20.0, 25.0, *center)
    depth = plane(12, 16, normal, *intrinsics)
    found = normals_from_depth(depth, *intrinsics)
    torch.testing.assert_close(found[1:-1, 1:-1], normal.expand(10, 14, 3), atol=1e-4, rtol=0)
    assert not found[0].any()
    assert not found[:, -1].any()
    # Only the border remains as error.
    loss = depth_normal_consistency(depth, normal.expand(12, 16, 3), *intrinsics)
    assert loss.item() == pytest.approx(1 - 10 * 14 / (12 * 16), abs=1e-4)


def test_empty_depth_counts_one_and_has_no_gradient():
    depth = torch.zeros(6, 7, requires_grad=True)
    normal = torch.tensor([0.0, 0.0, -1.0]).expand(6, 7, 3)
    loss = depth_normal_consistency(depth, normal, 5.0, 5.0, 3.5, 3.0)
    loss.backward()
    assert loss.item() == 1.0
    assert not depth.grad.any()


def test_maps_too_small_for_a_difference_count_one():
    assert depth_normal_consistency(torch.ones(2, 5), torch.ones(2, 5, 3), 1, 1, 0, 0).item() == 1


def test_strips_with_a_halo_row_add_up_to_the_whole_image():
    torch.manual_seed(0)
    depth = 2 + 0.1 * torch.rand(20, 9)
    normal = torch.nn.functional.normalize(torch.randn(20, 9, 3), dim=-1)
    whole = depth_normal_consistency(depth, normal, 9.0, 9.0, 4.5, 10.0)
    parts = []
    for first, last in ((0, 8), (8, 15), (15, 20)):
        top, bottom = max(first - 1, 0), min(last + 1, 20)
        parts.append(
            depth_normal_consistency(
                depth[top:bottom],
                normal[top:bottom],
                9.0,
                9.0,
                4.5,
                10.0 - top,
                rows=slice(first - top, last - top),
                total=20 * 9,
            )
        )
    torch.testing.assert_close(sum(parts), whole)


def test_depth_normal_gradient_agrees_with_finite_differences():
    torch.manual_seed(1)
    depth = (2 + 0.1 * torch.rand(5, 6, dtype=torch.float64)).requires_grad_(True)
    normal = torch.randn(5, 6, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda d, n: depth_normal_consistency(d, n, 9.0, 8.0, 3.0, 2.0), (depth, normal)
    )


def test_depth_is_read_between_pixel_centres_and_clamped_at_the_border():
    depth = torch.arange(12.0).reshape(3, 4)
    # u = 10 x / z + 2 and v = 10 y / z + 1.5: pixel (column, row) has its centre at + 0.5.
    pixels = torch.tensor([[0.5, 0.5], [2.0, 0.5], [1.5, 2.0], [-50.0, 99.0]])
    z = torch.tensor([1.0, 2.0, 3.0, 1.0])
    points = torch.cat([(pixels - torch.tensor([2.0, 1.5])) / 10 * z[:, None], z[:, None]], dim=1)
    found = lookup_depth(depth, points, torch.tensor([10.0, 10.0, 2.0, 1.5]))
    torch.testing.assert_close(found, torch.tensor([0.0, 1.5, 7.0, 8.0]), atol=1e-4, rtol=0)


def test_points_behind_the_camera_read_finite_depths_without_poisoning_gradients():
    points = torch.tensor([[0.1, 0.1, 0.0], [0.1, 0.1, -1.0]], requires_grad=True)
    found = lookup_depth(torch.rand(4, 4), points, torch.tensor([5.0, 5.0, 2.0, 2.0]))
    found.sum().backward()
    assert found.isfinite().all()
    assert points.grad.isfinite().all()


def test_near_surface_needs_visibility_and_two_deviations():
    gap = torch.tensor([0.1, -0.1, 0.3, 0.1])
    visible = torch.tensor([True, True, True, False])
    found = near_surface_mask(gap, torch.full((4,), 0.1), visible)
    assert found.tolist() == [True, True, False, False]
