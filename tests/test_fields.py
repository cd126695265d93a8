# SPDX-License-Identifier: Apache-2.0
"""Fields at samples: recorded values, kernels against the reference, and the guards."""

import functools
import math

import pytest
import torch
import warp as wp

from sugar_scene import field_device, field_kernels, field_sums_cuda
from sugar_scene.field_kernels import UsedRows, evaluate_fields
from sugar_scene.geometry import (
    FieldSamples,
    neighbor_opacities,
    sample_points,
    sdf_from_density,
)
from sugar_utils.neighbors import (
    mean_sq_distance_to_nearest,
    nearest_neighbors,
    nearest_neighbors_of,
)
from tests.support.field_reference import evaluate_fields_reference
from tests.support.golden import golden_cloud, load_golden

KERNELS = [
    pytest.param(evaluate_fields, id="native"),
    pytest.param(functools.partial(evaluate_fields, native=False), id="as_on_a_gpu"),
]
EVALUATORS = [pytest.param(evaluate_fields_reference, id="reference"), *KERNELS]
PARAMETERS = ("points", "all_densities", "scales", "quaternions")


def clustered_scene(n: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Flat Gaussians on two noisy spheres; means, quats, scales, opacities."""
    rng = torch.Generator().manual_seed(seed)
    direction = torch.nn.functional.normalize(torch.randn(n, 3, generator=rng), dim=1)
    means = direction + torch.randn(n, 3, generator=rng) * 0.01
    means[n // 2 :] += torch.tensor([1.5, 0.3, 0.0])
    size = mean_sq_distance_to_nearest(means).sqrt()[:, None]
    scales = size * torch.exp(torch.randn(n, 3, generator=rng) * 0.4)
    scales[torch.arange(n), torch.randint(0, 3, (n,), generator=rng)] *= 0.15
    quats = torch.nn.functional.normalize(torch.randn(n, 4, generator=rng), dim=1)
    return means, quats, scales, torch.rand(n, generator=rng)


def draws(n: int, n_samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, n, (n_samples,), generator=rng).sort().values
    return indices, torch.randn(n_samples, 3, generator=rng)


def run(evaluate, scene, neighbors, indices, noise, factor=1.0, dtype=torch.float32):
    """Fields, and per field the gradients of a fixed random weighting of it."""
    leaves = [t.detach().to(dtype).requires_grad_(True) for t in scene]
    fields = evaluate(*leaves, neighbors, indices, noise.to(dtype), factor)
    rng = torch.Generator().manual_seed(99)
    grads = {}
    for name, field in fields._asdict().items():
        weights = torch.randn(field.shape, generator=rng).to(dtype)
        found = torch.autograd.grad(
            (field * weights).sum(), leaves, retain_graph=True, allow_unused=True
        )
        grads[name] = [
            torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found, strict=True)
        ]
    return fields, grads


def assert_close_to_largest(actual, expected, tolerance) -> None:
    """Largest error within ``tolerance`` of the largest value."""
    actual, expected = actual.detach().double(), torch.as_tensor(expected).detach().double()
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * max(scale, 1e-12))


# Recorded values


@pytest.fixture(scope="module")
def golden_fields():
    case = load_golden("case05a_sampling_fields_A")
    order = torch.tensor(case["in_sample_gaussian_idx"]).argsort(stable=True)
    for name in list(case):
        if case[name].shape[:1] == (1500,):
            case[name] = case[name][order.numpy()]
    return case


def golden_run(case, evaluate, factor):
    cloud = golden_cloud(case)
    g = cloud.activate()
    neighbors = torch.tensor(case["out_knn_idx"])
    indices = torch.tensor(case["in_sample_gaussian_idx"])
    noise = torch.tensor(case["in_sample_noise"])
    fields = evaluate(g.means, g.quats, g.scales, g.opacities, neighbors, indices, noise, factor)
    return [cloud.means, cloud.opacity_logits, cloud.log_scales, cloud.quats], g, fields


@pytest.mark.parametrize("evaluate", EVALUATORS)
@pytest.mark.parametrize(("prefix", "factor"), [("f1", 1.0), ("f16", 1 / 16)])
def test_field_values_are_golden(golden_fields, evaluate, prefix, factor):
    _, _, fields = golden_run(golden_fields, evaluate, factor)
    assert_close_to_largest(fields.points, golden_fields["out_samples"], 1e-6)
    assert_close_to_largest(fields.density, golden_fields[f"out_{prefix}_density"], 2e-5)
    assert_close_to_largest(fields.beta, golden_fields[f"out_{prefix}_beta"], 1e-6)
    sdf = sdf_from_density(fields.density, fields.beta)
    assert_close_to_largest(sdf, golden_fields[f"out_{prefix}_sdf"], 1e-3)


@pytest.mark.parametrize("evaluate", EVALUATORS)
@pytest.mark.parametrize("field", ["f1_density", "f16_sdf", "beta"])
def test_field_gradients_are_golden(golden_fields, evaluate, field):
    factor = 1 / 16 if field.startswith("f16") else 1.0
    parameters, _, fields = golden_run(golden_fields, evaluate, factor)
    values = {
        "f1_density": fields.density,
        "f16_sdf": sdf_from_density(fields.density, fields.beta),
        "beta": fields.beta,
    }
    weights = torch.tensor(golden_fields["in_field_weights"])
    grads = torch.autograd.grad((values[field] * weights).sum(), parameters, allow_unused=True)
    checked = 0
    for grad, name in zip(grads, PARAMETERS, strict=True):
        if f"grad_{field}_{name}" in golden_fields:
            assert_close_to_largest(grad, golden_fields[f"grad_{field}_{name}"], 5e-5)
            checked += 1
    assert checked == (1 if field == "beta" else 4)


def test_opacities_of_neighbours_are_golden(golden_fields):
    _, g, fields = golden_run(golden_fields, evaluate_fields_reference, 1.0)
    rows = torch.tensor(golden_fields["out_knn_idx"])[
        torch.tensor(golden_fields["in_sample_gaussian_idx"])
    ]
    found = neighbor_opacities(fields.points, rows, g.means, g.quats, g.scales, g.opacities)
    expected = golden_fields["out_f1_closest_gaussian_opacities"]
    assert_close_to_largest(found, expected, 2e-5)


def test_density_with_neighbours_searched_at_the_point_is_golden(golden_fields):
    _, g, fields = golden_run(golden_fields, evaluate_fields, 1.0)
    rows = nearest_neighbors_of(fields.points, g.means, 16).indices
    gaussians = g.means, g.quats, g.scales, g.opacities
    density = neighbor_opacities(fields.points, rows, *gaussians).sum(dim=-1)
    expected = golden_fields["out_compute_density_16nn_at_samples"]
    assert_close_to_largest(density, expected, 2e-5)


# Kernels against the float64 reference


@pytest.mark.parametrize("evaluate", KERNELS)
@pytest.mark.parametrize(
    ("n", "k", "factor", "seed"), [(300, 16, 1.0, 0), (80, 5, 0.0625, 1), (60, 27, 1.0, 2)]
)
def test_kernels_match_the_reference_in_double_precision(evaluate, n, k, factor, seed):
    scene = clustered_scene(n, seed)
    neighbors = nearest_neighbors(scene[0], k).indices
    indices, noise = draws(n, 2000, seed)
    expected, expected_grads = run(
        evaluate_fields_reference, scene, neighbors, indices, noise, factor, torch.float64
    )
    fields, grads = run(evaluate, scene, neighbors, indices, noise, factor)
    for name in FieldSamples._fields:
        # Normal weights are a ratio of tiny numbers where all neighbours are far.
        tolerance = 2e-3 if name == "normal_error" else 5e-5
        assert_close_to_largest(getattr(fields, name), getattr(expected, name), tolerance)
        for actual, grad in zip(grads[name], expected_grads[name], strict=True):
            assert_close_to_largest(actual, grad, tolerance)


@pytest.mark.parametrize("evaluate", KERNELS)
def test_neighbours_need_not_include_the_gaussian_itself(evaluate):
    scene = clustered_scene(60, 4)
    neighbors = nearest_neighbors(scene[0], 6).indices[:, 2:].contiguous()
    indices, noise = draws(60, 500, 4)
    _, expected = run(
        evaluate_fields_reference, scene, neighbors, indices, noise, dtype=torch.float64
    )
    _, grads = run(evaluate, scene, neighbors, indices, noise)
    for name in ("density", "plane_distance", "normal_error"):
        for actual, grad in zip(grads[name], expected[name], strict=True):
            assert_close_to_largest(actual, grad, 1e-3)


@pytest.mark.parametrize("evaluate", KERNELS)
def test_scales_below_the_clamp_get_the_reference_gradient(evaluate):
    means, quats, scales, opacities = clustered_scene(40, 5)
    scales[::3, 1] = 1e-9
    neighbors = nearest_neighbors(means, 4).indices
    indices, noise = draws(40, 300, 5)
    scene = (means, quats, scales, opacities)
    _, expected = run(
        evaluate_fields_reference, scene, neighbors, indices, noise, dtype=torch.float64
    )
    _, grads = run(evaluate, scene, neighbors, indices, noise)
    for name in ("points", "beta", "plane_distance"):
        for actual, grad in zip(grads[name], expected[name], strict=True):
            assert_close_to_largest(actual, grad, 1e-4)
    assert all(g.isfinite().all() for g in grads["density"] + grads["normal_error"])


def test_reference_gradients_agree_with_finite_differences():
    scene = [t.double().requires_grad_(True) for t in clustered_scene(8, 2)]
    neighbors = nearest_neighbors(scene[0].float(), 4).indices
    indices, noise = draws(8, 6, 2)

    def smooth_fields(*leaves):
        return evaluate_fields_reference(*leaves, neighbors, indices, noise.double())[:4]

    assert torch.autograd.gradcheck(smooth_fields, scene)


def test_normal_error_gradient_agrees_with_finite_differences_for_fixed_weights():
    # A single other neighbour has the normalised weight 1, whatever its parameters.
    means, quats, scales, opacities = (t.double() for t in clustered_scene(8, 3))
    neighbors = nearest_neighbors(means.float(), 2).indices[:, 1:].contiguous()
    indices, noise = draws(8, 6, 3)

    def error(rotations):
        fields = evaluate_fields_reference(
            means, rotations, scales * 20, opacities, neighbors, indices, noise.double() * 0.1
        )
        return fields.normal_error

    assert torch.autograd.gradcheck(error, quats.requires_grad_(True))


# Bits


@pytest.fixture
def restore_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("evaluate", KERNELS)
@pytest.mark.usefixtures("restore_threads")
def test_bits_do_not_depend_on_threads_repetition_or_pair_chunks(evaluate, monkeypatch):
    scene = clustered_scene(500, 6)
    neighbors = nearest_neighbors(scene[0], 16).indices
    indices, noise = draws(500, 20_000, 6)
    results = []
    for threads, slot_bytes in ((1, 2**26), (2, 2**26), (3, 2**26), (2, 20_000), (1, 1)):
        torch.set_num_threads(threads)
        monkeypatch.setattr(field_kernels, "PAIR_BYTES", slot_bytes)
        results.append(run(evaluate, scene, neighbors, indices, noise))
    first_fields, first_grads = results[0]
    for fields, grads in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(fields, first_fields, strict=True))
        for name, expected in first_grads.items():
            assert all(torch.equal(a, b) for a, b in zip(grads[name], expected, strict=True))


def test_chunks_of_samples_add_up_to_the_whole():
    scene = clustered_scene(100, 7)
    neighbors = nearest_neighbors(scene[0], 16).indices
    indices, noise = draws(100, 1000, 7)

    def gradient(parts):
        leaves = [t.clone().requires_grad_(True) for t in scene]
        for rows in torch.arange(1000).tensor_split(parts):
            fields = evaluate_fields(*leaves, neighbors, indices[rows], noise[rows])
            (fields.density.square().sum() + fields.normal_error.sum()).backward()
        return [leaf.grad for leaf in leaves]

    for whole, chunked in zip(gradient(1), gradient(7), strict=True):
        assert_close_to_largest(chunked, whole, 1e-5)


@pytest.mark.parametrize("evaluate", KERNELS)
def test_unsorted_samples_give_the_same_gradients(evaluate):
    scene = clustered_scene(50, 8)
    neighbors = nearest_neighbors(scene[0], 8).indices
    indices, noise = draws(50, 400, 8)
    shuffle = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    grads = []
    for order in (torch.arange(400), shuffle):
        leaves = [t.clone().requires_grad_(True) for t in scene]
        fields = evaluate(*leaves, neighbors, indices[order], noise[order])
        grads.append(torch.autograd.grad(fields.density.sum(), leaves))
    for straight, shuffled in zip(*grads, strict=True):
        assert_close_to_largest(shuffled, straight, 1e-5)


# Known values and guards


@pytest.mark.parametrize("evaluate", EVALUATORS)
def test_sample_at_the_centre_of_a_lonely_gaussian(evaluate):
    fields = evaluate(
        torch.tensor([[1.0, 2.0, 3.0]]),
        torch.tensor([[1.0, 0.0, 0.0, 0.0]]),
        torch.tensor([[0.3, 0.1, 0.2]]),
        torch.tensor([0.8]),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([0, 0]),
        torch.tensor([[0.0, 0.0, 0.0], [0.0, 2 / 3, 0.0]]),
        0.5,
    )
    torch.testing.assert_close(fields.points, torch.tensor([[1.0, 2, 3], [1, 2.1, 3]]))
    torch.testing.assert_close(fields.density, torch.tensor([0.4, 0.4 * math.exp(-0.5)]))
    torch.testing.assert_close(fields.beta, torch.tensor([0.1, 0.1]))
    torch.testing.assert_close(fields.plane_distance, torch.tensor([0.0, 0.1]))
    # At the centre all weights are zero, so the mean normal is too; elsewhere it is the own one.
    torch.testing.assert_close(fields.normal_error, torch.tensor([1.0, 0.0]))


@pytest.mark.parametrize("evaluate", EVALUATORS)
def test_exactly_orthogonal_normals_are_left_out_and_finite(evaluate):
    scales = torch.tensor([[0.1, 1.0, 1.0], [1.0, 0.1, 1.0]])
    leaves = [
        torch.tensor([[0.0, 0.0, 0.0], [0.1, 0.1, 0.1]]).requires_grad_(True),
        torch.tensor([[1.0, 0, 0, 0], [1.0, 0, 0, 0]]).requires_grad_(True),
        scales.requires_grad_(True),
        torch.tensor([0.5, 0.5]).requires_grad_(True),
    ]
    neighbors = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
    fields = evaluate(*leaves, neighbors, torch.tensor([0]), torch.tensor([[0.5, 0.5, 0.5]]))
    assert fields.normal_error.item() == pytest.approx(0.0, abs=1e-10)
    grads = torch.autograd.grad(sum(f.sum() for f in fields), leaves)
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("evaluate", EVALUATORS)
def test_no_samples_give_empty_fields_and_zero_gradients(evaluate):
    scene = [t.requires_grad_(True) for t in clustered_scene(20, 0)]
    neighbors = nearest_neighbors(scene[0], 4).indices
    fields = evaluate(*scene, neighbors, torch.zeros(0, dtype=torch.int64), torch.zeros(0, 3))
    assert fields.points.shape == (0, 3)
    assert fields.density.shape == (0,)
    grads = torch.autograd.grad(fields.density.sum(), scene, allow_unused=True)
    assert all(g is None or not g.any() for g in grads)


def test_samples_of_an_unrotated_gaussian_are_scaled_noise():
    points = sample_points(
        torch.tensor([[1.0, 1.0, 1.0]]),
        torch.tensor([[1.0, 0, 0, 0]]),
        torch.tensor([[1.0, 2.0, 3.0]]),
        torch.tensor([0]),
        torch.tensor([[1.0, -1.0, 2.0]]),
    )
    assert points.tolist() == [[2.5, -2.0, 10.0]]


def test_sdf_is_zero_from_density_one_on_and_beta_at_one_deviation():
    density = torch.tensor([1.0, 1.7, math.exp(-0.5), math.exp(-2.0), 0.0])
    sdf = sdf_from_density(density, torch.full((5,), 0.1))
    expected = 0.1 * torch.tensor([0.0, 0.0, 1.0, 2.0, math.sqrt(-2 * math.log(1e-16))])
    torch.testing.assert_close(sdf, expected, rtol=1e-5, atol=1e-7)


def test_sdf_gradient_is_finite_where_the_square_root_is_singular():
    density = torch.tensor([0.0, 1e-30, 0.5, 1 - 6e-8, 1.0, 1 + 1e-7, 5.0], requires_grad=True)
    beta = torch.ones(7, requires_grad=True)
    sdf_from_density(density, beta).sum().backward()
    assert density.grad.isfinite().all()
    assert beta.grad.isfinite().all()
    assert density.grad[2] < 0
    assert not density.grad[3:].any()


@pytest.mark.parametrize("module", [field_device, field_sums_cuda], ids=["fields", "sums"])
def test_kernels_compile_for_cuda(module, tmp_path):
    wp.compile_aot_module(module, arch=75, module_dir=tmp_path, use_ptx=True)
    assert list(tmp_path.glob("*.ptx"))


def test_a_far_sample_of_a_needle_is_finite():
    means = torch.tensor([[0.0, 0.0, 0.0], [1e4, 0.0, 0.0]])
    quats = torch.tensor([[1.0, 0, 0, 0], [1.0, 0, 0, 0]])
    scales = torch.tensor([[1e-30, 1.0, 1.0], [1e-30, 1e-30, 1e-30]])
    leaves = [t.requires_grad_() for t in (means, quats, scales, torch.tensor([0.5, 0.5]))]
    neighbors = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
    fields = evaluate_fields(*leaves, neighbors, torch.tensor([0, 1]), torch.full((2, 3), 3e30))
    grads = torch.autograd.grad(fields.density.sum(), leaves)
    assert fields.density.isfinite().all()
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_matches_the_cpu():
    scene = clustered_scene(300, 9)
    neighbors = nearest_neighbors(scene[0], 16).indices
    indices, noise = draws(300, 3000, 9)
    results = []
    for device in ("cpu", "cuda"):
        leaves = [t.to(device).requires_grad_(True) for t in scene]
        fields = evaluate_fields(
            *leaves, neighbors.to(device), indices.to(device), noise.to(device)
        )
        loss = fields.density.sum() + fields.normal_error.sum() + fields.points.sum()
        results.append([t.cpu() for t in (*fields, *torch.autograd.grad(loss, leaves))])
    for here, there in zip(*results, strict=True):
        assert_close_to_largest(there, here, 1e-3)


@pytest.mark.parametrize("at_most", [60, 75, 10_000])
def test_a_bound_of_the_owners_changes_no_bit(at_most):
    scene = clustered_scene(60, 4)
    neighbors = nearest_neighbors(scene[0], 6).indices
    indices, noise = draws(60, 500, 4)
    assert indices.unique().numel() <= 60
    fields, grads = run(KERNELS[1].values[0], scene, neighbors, indices, noise)
    bounded = functools.partial(evaluate_fields, native=False, n_owners=at_most)
    with_bound, found = run(bounded, scene, neighbors, indices, noise)
    for a, b in zip(fields, with_bound, strict=True):
        assert torch.equal(a, b)
    for name, expected in grads.items():
        assert all(torch.equal(a, b) for a, b in zip(found[name], expected, strict=True))


def as_on_a_gpu(scene, indices, noise, used=None):
    """Fields and their gradients by one weight for each row, on the path of GPUs."""
    neighbors = nearest_neighbors(scene[0], 6).indices
    leaves = [tensor.detach().requires_grad_(True) for tensor in scene]
    fields = evaluate_fields(
        *leaves, neighbors, indices, noise, native=False, n_owners=60, used=used
    )
    weights = torch.randn(1_000, generator=torch.Generator().manual_seed(99))[: len(indices)]
    scalars = torch.stack([*fields.points.unbind(1), *fields[1:]])
    return fields, torch.autograd.grad((scalars * weights).sum(), leaves)


@pytest.mark.parametrize("n_spare", [1, 300])
@pytest.mark.parametrize("n_used", [0, 1, 128, 500])
def test_rows_that_are_not_used_change_no_bit_of_the_others(n_used, n_spare):
    scene = clustered_scene(60, 4)
    indices, noise = (tensor[:n_used] for tensor in draws(60, 500, 4))
    n_rows = n_used + n_spare
    used = UsedRows(torch.arange(n_rows) < n_used, torch.tensor([n_used], dtype=torch.int32))
    # What the others hold is not read.
    more_indices = torch.cat([indices, torch.full((n_spare,), 7)])
    more_noise = torch.cat([noise, torch.full((n_spare, 3), torch.nan)])
    found, found_grads = as_on_a_gpu(scene, more_indices, more_noise, used)
    assert (found.density[n_used:] == 1).all()
    for field in (found.points, found.beta, found.plane_distance, found.normal_error):
        assert not field[n_used:].any()
    if n_used == 0:
        assert not any(grad.any() for grad in found_grads)
        return
    fields, grads = as_on_a_gpu(scene, indices, noise)
    for field, other in zip(fields, found, strict=True):
        assert torch.equal(field, other[:n_used])
    for grad, other in zip(grads, found_grads, strict=True):
        assert torch.equal(grad, other)


def test_the_code_for_cpus_takes_rows_of_samples_only():
    scene = clustered_scene(60, 4)
    used = UsedRows(torch.ones(2, dtype=torch.bool), torch.tensor([2], dtype=torch.int32))
    neighbors = nearest_neighbors(scene[0], 6).indices
    with pytest.raises(ValueError, match="each row is one"):
        evaluate_fields(*scene, neighbors, torch.tensor([0, 1]), torch.zeros(2, 3), used=used)
