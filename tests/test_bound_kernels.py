# SPDX-License-Identifier: Apache-2.0
"""Gaussians put on triangles, and normal consistency, by kernels: against their torch twins."""

from dataclasses import replace

import pytest
import torch

from sugar_scene.mesh_bound import LAYOUTS, Binding, BoundCloud, bind_to_mesh
from sugar_scene.mesh_normals import CornerSums, PairsOfTriangles, adjacent_face_pairs
from tests.support.bound_reference import activated, normal_consistency

N_VERTICES = 60
RAW = ("vertices", "opacity_logits", "log_scales", "rotations")
VALUES = ("means", "quats", "scales", "opacities")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed))


def random_faces(n=150):
    faces = draw(n, N_VERTICES).argsort(dim=1)[:, :3]
    assert len(faces.unique()) > N_VERTICES // 2
    return faces


def disturbed(per_triangle, faces=None):
    """Gaussians on triangles of all shapes, turned by all angles."""
    faces = random_faces() if faces is None else faces
    cloud = bind_to_mesh(
        draw(N_VERTICES, 3), faces, torch.full((N_VERTICES, 3), 0.5), per_triangle, 3.0
    )
    changes = {n: getattr(cloud, n) + draw(*getattr(cloud, n).shape, seed=1) for n in RAW[1:]}
    return replace(cloud, **changes)


def values_and_gradients(cloud: BoundCloud, dtype, activate):
    leaves = {n: getattr(cloud, n).to(dtype).requires_grad_() for n in RAW}
    placed = activate(replace(cloud, **leaves, thickness=cloud.thickness.to(dtype)))
    values = [getattr(placed, name) for name in VALUES]
    total = sum((v * draw(*v.shape, seed=i).to(dtype)).sum() for i, v in enumerate(values))
    found = torch.autograd.grad(total, list(leaves.values()))
    return dict(zip((*VALUES, *RAW), [v.detach() for v in (*values, *found)], strict=True))


@pytest.mark.parametrize("per_triangle", LAYOUTS)
def test_values_and_gradients_are_those_of_torch_in_float64(per_triangle):
    cloud = disturbed(per_triangle)
    expected = values_and_gradients(cloud, torch.float64, activated)
    found = values_and_gradients(cloud, torch.float32, BoundCloud.activate)
    for name, value in expected.items():
        error = (found[name] - value).abs().max() / value.abs().max()
        assert error.item() < 2e-5, name


def test_any_turn_of_a_triangle_gives_its_unit_quaternion():
    # Cosines around zero and minus one change how half an angle is taken.
    cloud = disturbed(1, torch.arange(3)[None].repeat(8, 1))
    angles = torch.tensor([0.0, 1e-4, torch.pi / 2, -torch.pi / 2, 3.0, torch.pi, -torch.pi, 1.6])
    cloud.rotations = 2.5 * torch.stack([angles.cos(), angles.sin()], dim=1)
    found = cloud.activate().quats
    expected = activated(cloud).quats
    torch.testing.assert_close(found.norm(dim=1), torch.ones(8))
    assert (found[:, 0] >= 0).all()
    torch.testing.assert_close((found * expected).sum(dim=1).abs(), torch.ones(8))


def test_a_triangle_without_area_moves_with_its_corners_and_feels_no_turn():
    cloud = disturbed(3, torch.tensor([[0, 0, 1], [2, 2, 2], [3, 4, 5]]))
    leaves = {name: getattr(cloud, name).requires_grad_() for name in RAW}
    cloud = replace(cloud, **leaves)
    placed = cloud.activate()
    torch.testing.assert_close(placed.means, activated(cloud).means)
    placed.quats.square().sum().mul(0.5).backward(retain_graph=True)
    assert all(leaf.grad is None or leaf.grad.isfinite().all() for leaf in leaves.values())
    (pull,) = torch.autograd.grad((placed.quats * draw(9, 4)).sum(), [cloud.vertices])
    assert (pull[:3] == 0).all()
    assert (pull[3:6] != 0).all()


def test_the_gradient_is_that_of_finite_differences():
    cloud, step = disturbed(1, torch.tensor([[0, 1, 2], [0, 2, 3]])), 1e-3
    weights = draw(2, 4)
    vertices = cloud.vertices.clone().requires_grad_()
    place = Binding(cloud)

    def value(moved):
        return (replace(cloud, vertices=moved).activate(place).quats * weights).sum()

    (gradient,) = torch.autograd.grad(value(vertices), [vertices])
    for vertex, axis in ((0, 0), (1, 2), (2, 1), (3, 0)):
        shift = torch.zeros_like(cloud.vertices)
        shift[vertex, axis] = step
        slope = (value(cloud.vertices + shift) - value(cloud.vertices - shift)) / (2 * step)
        assert float(gradient[vertex, axis]) == pytest.approx(slope.item(), rel=5e-3, abs=2e-4)


def test_bending_is_that_of_torch_in_float64():
    faces, vertices = random_faces(400), draw(N_VERTICES, 3)
    pairs = adjacent_face_pairs(faces)
    assert len(pairs) > 100
    exact = vertices.double().requires_grad_()
    expected = 3 * normal_consistency(exact, pairs)
    expected.backward()
    own = vertices.clone().requires_grad_()
    found = 3 * PairsOfTriangles(pairs, N_VERTICES).normal_consistency(own)
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(own.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)


def test_a_mesh_without_shared_edges_does_not_bend():
    vertices = draw(N_VERTICES, 3).requires_grad_()
    pairs = PairsOfTriangles(torch.zeros(0, 4, dtype=torch.int64), N_VERTICES)
    loss = pairs.normal_consistency(vertices)
    loss.backward()
    assert loss.item() == 0
    assert (vertices.grad == 0).all()


def test_flat_and_degenerate_neighbours_give_finite_gradients():
    square = torch.tensor([[0.0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 0]])
    vertices = square.requires_grad_()
    pairs = adjacent_face_pairs(torch.tensor([[0, 1, 2], [0, 2, 3], [0, 4, 2]]))
    PairsOfTriangles(pairs, 5).normal_consistency(vertices).backward()
    assert vertices.grad.isfinite().all()


def test_corner_sums_are_the_same_bits_for_any_number_of_threads():
    faces, values = random_faces(20_000), draw(20_000, 3, 3)
    add_up, threads = CornerSums(faces, N_VERTICES), torch.get_num_threads()
    expected = torch.zeros(N_VERTICES, 3, dtype=torch.float64)
    expected.index_add_(0, faces.reshape(-1), values.double().view(-1, 3))
    try:
        found = []
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(add_up(values))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-4, atol=1e-3)


def test_a_vertex_without_triangles_is_left_alone():
    sums = CornerSums(torch.tensor([0, 2]), 3)(torch.ones(2, 3))
    assert sums.tolist() == [[1, 1, 1], [0, 0, 0], [1, 1, 1]]
