# SPDX-License-Identifier: Apache-2.0
"""Mesh-bound Gaussians and normal consistency against recorded values."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gaussian_splatting.core.cloud import quaternions_of, rotation_matrices
from gaussian_splatting.rasterization import rasterize
from sugar_scene.bound_model import FACES, STATE_NAMES, THICKNESS, bound_cloud_from_state
from sugar_scene.geometry import covariances
from sugar_scene.mesh_bound import LAYOUTS, bind_to_mesh, face_frames, face_normals
from sugar_scene.mesh_normals import PairsOfTriangles, adjacent_face_pairs
from sugar_utils.errors import UserError
from tests.support.bound_reference import normal_consistency as reference_consistency
from tests.support.golden import golden_cameras, load_golden


@pytest.fixture(scope="module")
def case():
    return load_golden("case08_mesh_bound_A")


def tensor(case, name):
    return torch.tensor(case[name])


def fused_consistency(vertices, pairs):
    return PairsOfTriangles(pairs, len(vertices)).normal_consistency(vertices)


CONSISTENCIES = pytest.mark.parametrize(
    "normal_consistency", [fused_consistency, reference_consistency]
)


def bound(case, g):
    """The perturbed state that all recorded values but the initial ones belong to."""
    cloud = bind_to_mesh(
        tensor(case, "in_vertices"),
        tensor(case, "in_faces"),
        tensor(case, "in_vertex_colors"),
        g,
        float(case["in_E"]),
    )
    cloud.log_scales = tensor(case, f"in_g{g}_scales").requires_grad_(True)
    cloud.rotations = tensor(case, f"in_g{g}_complex").requires_grad_(True)
    cloud.opacity_logits = tensor(case, f"in_g{g}_all_densities").requires_grad_(True)
    cloud.sh_dc.requires_grad_(True)
    cloud.vertices.requires_grad_(True)
    return cloud


def assert_gradient(found, expected, tolerance):
    assert np.abs(found.numpy() - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("g", [1, 3, 4, 6])
def test_initial_state_matches_the_recorded_one(case, g):
    cloud = bind_to_mesh(
        tensor(case, "in_vertices"),
        tensor(case, "in_faces"),
        tensor(case, "in_vertex_colors"),
        g,
        float(case["in_E"]),
    )
    assert cloud.per_triangle == g
    for value, name in (
        (cloud.log_scales, "log_scales"),
        (cloud.rotations, "complex"),
        (cloud.sh_dc, "sh_dc"),
        (cloud.opacity_logits, "logit_opacity"),
    ):
        np.testing.assert_allclose(value, case[f"out_g{g}_init_{name}"], rtol=1e-5, atol=1e-6)
    assert float(cloud.thickness) == pytest.approx(float(case["out_thickness"]), rel=1e-6)


@pytest.mark.parametrize("g", [1, 3, 4, 6])
def test_gaussians_on_the_mesh_match_the_recorded_ones(case, g):
    cloud = bound(case, g)
    gaussians = cloud.activate()
    found = covariances(gaussians.quats, gaussians.scales)
    np.testing.assert_allclose(
        gaussians.means.detach(), case[f"out_g{g}_points"], rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(gaussians.scales.detach(), case[f"out_g{g}_scaling"], rtol=1e-5)
    np.testing.assert_allclose(found.detach(), case[f"out_g{g}_covariance"], rtol=1e-5, atol=1e-7)
    quats, expected = gaussians.quats.detach(), tensor(case, f"out_g{g}_quaternions")
    same = torch.minimum((quats - expected).abs(), (quats + expected).abs())
    assert float(same.max()) < 1e-5
    total = 100 * (found * tensor(case, f"in_g{g}_weight_cov")).sum()
    total = total + (gaussians.means * tensor(case, f"in_g{g}_weight_points")).sum()
    total.backward()
    assert float(total.detach()) == pytest.approx(float(case[f"out_g{g}_weighted_sum"]), rel=1e-5)
    assert_gradient(cloud.vertices.grad, case[f"grad_g{g}_vertices"], 1e-5)
    assert_gradient(cloud.log_scales.grad, case[f"grad_g{g}_scales"], 1e-5)
    assert_gradient(cloud.rotations.grad, case[f"grad_g{g}_complex"], 1e-5)


@pytest.mark.parametrize("g", [1, 6])
def test_renders_of_bound_gaussians_match_the_recorded_ones(case, g):
    cloud = bound(case, g)
    image = rasterize(cloud.activate(), golden_cameras(case)[0], sh_degree=0).image
    error = np.abs(image.detach().numpy() - case[f"out_g{g}_render_cam0_deg0"])
    assert error.mean() < 1e-5
    assert np.quantile(error, 0.995) < 1e-4
    (image * tensor(case, "in_render_weights")).sum().backward()
    for value, name in (
        (cloud.vertices, "vertices"),
        (cloud.log_scales, "scales"),
        (cloud.rotations, "complex"),
        (cloud.opacity_logits, "all_densities"),
        (cloud.sh_dc, "sh_dc"),
    ):
        assert_gradient(value.grad, case[f"grad_g{g}_render_{name}"], 2e-3)


def test_face_normals_match_the_recorded_ones(case):
    triangles = tensor(case, "in_vertices")[tensor(case, "in_faces").long()]
    np.testing.assert_allclose(face_normals(triangles), case["out_face_normals"], atol=1e-6)


@CONSISTENCIES
def test_normal_consistency_matches_the_recorded_value_and_gradient(case, normal_consistency):
    vertices = tensor(case, "in_vertices").requires_grad_(True)
    loss = normal_consistency(vertices, adjacent_face_pairs(tensor(case, "in_faces")))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(case["out_normal_consistency"]), abs=1e-5)
    assert_gradient(vertices.grad, case["grad_normal_consistency_vertices"], 1e-4)


@CONSISTENCIES
def test_a_flat_mesh_is_consistent_whatever_its_winding(normal_consistency):
    vertices = torch.tensor([[0.0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]])
    for second in ([0, 2, 3], [0, 3, 2]):
        pairs = adjacent_face_pairs(torch.tensor([[0, 1, 2], second]))
        assert pairs.shape == (1, 4)
        assert float(normal_consistency(vertices, pairs)) == pytest.approx(0.0, abs=1e-6)


def test_an_edge_with_three_faces_gives_three_pairs():
    faces = torch.tensor([[0, 1, 2], [1, 0, 3], [0, 1, 4]])
    assert adjacent_face_pairs(faces).shape == (3, 4)


@CONSISTENCIES
def test_separate_triangles_have_no_pairs_and_no_loss(normal_consistency):
    pairs = adjacent_face_pairs(torch.tensor([[0, 1, 2], [3, 4, 5]]))
    vertices = torch.rand(6, 3, requires_grad=True)
    loss = normal_consistency(vertices, pairs)
    loss.backward()
    assert pairs.shape == (0, 4)
    assert float(loss.detach()) == 0.0


def test_quaternions_give_their_rotation_back():
    quats = torch.nn.functional.normalize(
        torch.randn(500, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64), dim=-1
    )
    # Half turns, where the real part vanishes, need the other three formulas.
    quats = torch.cat([quats, torch.eye(4, dtype=torch.float64)])
    matrices = rotation_matrices(quats)
    found = quaternions_of(matrices)
    torch.testing.assert_close(rotation_matrices(found), matrices)
    assert bool((found[:, 0] >= 0).all())


def test_barycentric_rows_sum_to_one_and_frames_are_rotations(case):
    for layout in LAYOUTS.values():
        assert np.allclose(np.sum(layout.barycentric, axis=1), 1.0)
    triangles = tensor(case, "in_vertices")[tensor(case, "in_faces").long()]
    frames = face_frames(triangles)
    torch.testing.assert_close(
        frames @ frames.transpose(1, 2), torch.eye(3).expand(len(frames), 3, 3), atol=1e-5, rtol=0
    )


def test_other_numbers_per_triangle_and_empty_meshes_are_refused():
    with pytest.raises(UserError, match="1, 3, 4, 6"):
        bind_to_mesh(torch.rand(3, 3), torch.tensor([[0, 1, 2]]), torch.rand(3, 3), 2, 1.0)
    with pytest.raises(UserError, match="no triangles"):
        bind_to_mesh(
            torch.rand(3, 3), torch.zeros(0, 3, dtype=torch.long), torch.rand(3, 3), 1, 1.0
        )


def test_gradients_of_a_large_mesh_have_the_same_bits_on_every_run():
    rng = torch.Generator().manual_seed(0)
    vertices = torch.randn(10_000, 3, generator=rng)
    faces = torch.randint(0, len(vertices), (20_000, 3), generator=rng)
    cloud = bind_to_mesh(vertices, faces, torch.full((10_000, 3), 0.5), 1, 1.0)
    pull = torch.randn(20_000, 3, generator=rng)
    seen = set()
    for _ in range(30):
        leaf = vertices.clone().requires_grad_()
        (replace(cloud, vertices=leaf).activate().means * pull).sum().backward()
        seen.add(leaf.grad.numpy().tobytes())
    assert len(seen) == 1
    expected = torch.zeros(10_000, 3, dtype=torch.float64)
    thirds = (pull.double() / 3).repeat_interleave(3, dim=0)
    expected.index_add_(0, faces.flatten(), thirds)
    torch.testing.assert_close(leaf.grad.double(), expected, rtol=0, atol=1e-5)


def test_tensors_of_a_checkpoint_may_lie_in_memory_in_any_order():
    faces = torch.tensor([[0, 1, 2]])
    cloud = bind_to_mesh(torch.rand(3, 3), faces, torch.rand(3, 3), 3, 1.0)
    state = {file: getattr(cloud, own) for own, file in STATE_NAMES.items()}
    state |= {FACES: faces.int(), THICKNESS: cloud.thickness}
    expected = bound_cloud_from_state(state).activate()
    state["_points"] = state["_points"].T.contiguous().T
    assert torch.equal(bound_cloud_from_state(state).activate().means, expected.means)
