# SPDX-License-Identifier: Apache-2.0
"""Rotations, normals, covariances and diamonds of Gaussians."""

import pytest
import torch

from gaussian_splatting.core.cloud import GaussianCloud, rotation_matrices
from sugar_scene.geometry import (
    covariances,
    diamond_faces,
    diamond_vertices,
    inverse_square_roots,
    smallest_axis,
    smallest_scales,
    std_along_view,
)
from tests.support.field_reference import smallest_axis_normals
from tests.support.golden import golden_cloud, load_golden


@pytest.fixture(scope="module")
def case():
    return load_golden("case04_activations_A")


@pytest.fixture(scope="module")
def gaussians(case):
    return golden_cloud(case).activate()


def assert_golden(actual: torch.Tensor, expected) -> None:
    scale = abs(expected).max()
    torch.testing.assert_close(
        actual.detach(), torch.tensor(expected), rtol=1e-5, atol=1e-5 * float(scale)
    )


def test_activations_are_golden(case, gaussians):
    assert_golden(gaussians.scales, case["out_scaling"])
    assert_golden(gaussians.quats, case["out_quaternions"])
    assert_golden(gaussians.opacities[:, None], case["out_opacity"])


def test_many_activations_have_the_same_bits_for_any_number_of_threads():
    generator, n = torch.Generator().manual_seed(0), 38_745
    widths = {"means": (3,), "sh_dc": (1, 3), "sh_rest": (15, 3), "opacity_logits": (1,)}
    widths |= {"log_scales": (3,), "quats": (4,)}
    cloud = {name: torch.randn(n, *width, generator=generator) for name, width in widths.items()}

    def bits(threads: int) -> list[torch.Tensor]:
        torch.set_num_threads(threads)
        leaves = {name: values.clone().requires_grad_() for name, values in cloud.items()}
        found = GaussianCloud(**leaves).activate()
        shown = [found.quats, found.scales, found.opacities]
        sum((values * values).sum() for values in shown).backward()
        return [*shown, *(leaves[name].grad for name in ("quats", "log_scales", "opacity_logits"))]

    before = torch.get_num_threads()
    try:
        single = bits(1)
        for threads in (2, 3):
            for a, b in zip(single, bits(threads), strict=True):
                assert torch.equal(a, b)
    finally:
        torch.set_num_threads(before)


def test_normals_are_golden(case, gaussians):
    assert torch.equal(smallest_axis(gaussians.scales), torch.tensor(case["out_smallest_axis_idx"]))
    assert_golden(smallest_axis_normals(gaussians.quats, gaussians.scales), case["out_normals"])


def test_covariances_are_golden(case, gaussians):
    shape = gaussians.quats, gaussians.scales
    assert_golden(covariances(*shape), case["out_covariance"])
    rows, columns = torch.triu_indices(3, 3)
    assert_golden(covariances(*shape)[:, rows, columns], case["out_covariance_packed"])
    assert_golden(inverse_square_roots(*shape), case["out_inv_sqrt"])


def test_diamonds_are_golden(case, gaussians):
    vertices = diamond_vertices(
        gaussians.means, gaussians.quats, gaussians.scales, float(case["in_diamond_scale"])
    )
    assert_golden(vertices, case["out_diamond_vertices"])


def test_diamond_faces_stay_in_their_own_diamond():
    faces = diamond_faces(5)
    assert faces.shape == (10, 3)
    assert torch.equal(faces // 4, (torch.arange(10) // 2)[:, None].expand(-1, 3))
    area = diamond_area(diamond_vertices(*unit_gaussian(), 1.0), diamond_faces(1))
    assert area == pytest.approx(2 * 2.0 * 3.0)


def unit_gaussian():
    return torch.zeros(1, 3), torch.tensor([[1.0, 0, 0, 0]]), torch.tensor([[2.0, 0.1, 3.0]])


def diamond_area(vertices: torch.Tensor, faces: torch.Tensor) -> float:
    a, b, c = vertices.reshape(-1, 3)[faces].unbind(1)
    return float(torch.linalg.cross(b - a, c - a).norm(dim=1).sum() / 2)


def test_smallest_axis_takes_the_first_on_ties():
    scales = torch.tensor([[1.0, 1.0, 1.0], [2.0, 1.0, 1.0], [1.0, 2.0, 1.0]], requires_grad=True)
    assert smallest_axis(scales).tolist() == [0, 1, 0]
    smallest_scales(scales).sum().backward()
    assert scales.grad.tolist() == [[1, 0, 0], [0, 1, 0], [1, 0, 0]]


def test_a_quarter_turn_about_z_takes_x_to_y():
    half = 0.5**0.5
    turned = rotation_matrices(torch.tensor([half, 0.0, 0.0, half])) @ torch.tensor([1.0, 0, 0])
    torch.testing.assert_close(turned, torch.tensor([0.0, 1.0, 0.0]), atol=1e-6, rtol=0)


def test_rotation_matrices_are_proper_rotations_with_true_gradients():
    torch.manual_seed(0)
    quats = torch.nn.functional.normalize(torch.randn(20, 4, dtype=torch.float64), dim=1)
    rotation = rotation_matrices(quats)
    identity = torch.eye(3, dtype=torch.float64).expand(20, 3, 3)
    torch.testing.assert_close(rotation @ rotation.transpose(1, 2), identity)
    torch.testing.assert_close(torch.linalg.det(rotation), torch.ones(20, dtype=torch.float64))
    assert torch.autograd.gradcheck(rotation_matrices, quats[:3].requires_grad_(True))


def test_deviation_along_the_view_follows_the_axis_that_is_looked_along():
    mean, quat, scales = unit_gaussian()
    for axis in range(3):
        center = torch.eye(3)[axis] * 5
        assert std_along_view(mean, quat, scales, center).item() == pytest.approx(
            scales[0, axis].item()
        )


def test_gradients_of_the_activation_are_those_of_autograd_in_float64():
    g = torch.Generator().manual_seed(0)
    raw = [torch.randn(30, width, generator=g) for width in (4, 3, 1)]
    raw[0][3] = 0.0
    raw[0][4] *= 1e-5
    pulls = [torch.randn(30, *shape, generator=g) for shape in ((4,), (3,), ())]
    bands = torch.zeros(30, 1, 3), torch.zeros(30, 15, 3)
    leaves = [t.clone().requires_grad_(True) for t in raw]
    found = GaussianCloud(torch.zeros(30, 3), *bands, leaves[2], leaves[1], leaves[0]).activate()
    exact = [t.double().requires_grad_(True) for t in raw]
    expected = (
        torch.nn.functional.normalize(exact[0], dim=-1),
        exact[1].exp(),
        exact[2].sigmoid().squeeze(-1),
    )
    for value, twin, pull in zip(
        (found.quats, found.scales, found.opacities), expected, pulls, strict=True
    ):
        torch.testing.assert_close(value.double(), twin, rtol=1e-6, atol=1e-7)
        value.backward(pull, retain_graph=True)
        twin.backward(pull.double())
    for leaf, twin in zip(leaves, exact, strict=True):
        scale = twin.grad.abs().amax(dim=1, keepdim=True).clamp_min(1e-9)
        assert float(((leaf.grad - twin.grad) / scale).abs().max()) < 2e-6


def test_an_activated_value_that_nobody_pulls_at_has_no_gradient():
    quats = torch.randn(5, 4, requires_grad=True)
    logits = torch.randn(5, 1, requires_grad=True)
    zeros = torch.zeros(5, 3)
    cloud = GaussianCloud(zeros, zeros[:, None], zeros[:, None], logits, zeros, quats)
    cloud.activate().opacities.sum().backward()
    assert quats.grad is None
    assert logits.grad.all()
