# SPDX-License-Identifier: Apache-2.0
"""The tile rasterizer against its dense float64 twin, recorded renders and degenerate input."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from gaussian_splatting.core.cloud import NO_CUTOFF, Gaussians
from gaussian_splatting.engine.model import GROUP_NAMES
from gaussian_splatting.rasterization import WarpRasterizer, project, rasterize
from sugar_trainers.losses import normals_from_depth
from tests.support.depth_normals import depth_normal_consistency
from tests.support.golden import golden_cameras, golden_cloud, load_golden
from tests.support.random_scenes import look_at, random_gaussians
from tests.support.reference_rasterizer import rasterize_reference

IMAGES = ("image", "depth", "normal", "plane", "features", "alpha")


def leaves_of(gaussians, dtype):
    tensors = (t.to(dtype).clone().requires_grad_(True) for t in gaussians.tensors())
    return replace(Gaussians(*tensors), **gaussians.rendering())


def render_with_gradients(render, gaussians, camera, features, dtype, seed, **options):
    """Render all channels and backpropagate a fixed random weighting of every pixel."""
    leaves = leaves_of(gaussians, dtype)
    features = features.to(dtype).clone().requires_grad_(True)
    output = render(
        leaves, camera, torch.tensor([0.2, 0.5, 0.9], dtype=dtype), features=features, **options
    )
    output.means2d.retain_grad()
    rng = torch.Generator().manual_seed(seed)
    loss = 0
    for name in IMAGES:
        image = getattr(output, name)
        loss = loss + (image * torch.randn(image.shape, generator=rng).to(dtype)).sum()
    loss.backward()
    return output, [t.grad for t in (*leaves.tensors(), features, output.means2d)]


def assert_close_to_maximum(actual, expected, tolerance):
    scale = expected.abs().max().clamp_min(1e-12)
    assert float(((actual.double() - expected).abs().max() / scale).detach()) < tolerance


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "size", "cutoff"),
    [
        *((seed, None, NO_CUTOFF) for seed in range(8)),
        (0, 0.3, NO_CUTOFF),
        (1, 0.3, NO_CUTOFF),
        (0, 0.05, NO_CUTOFF),
        (0, None, 2.5),
        (1, None, 1.0),
        (0, 0.3, 2.5),
    ],
)
def test_values_and_gradients_match_the_dense_float64_reference(seed, size, cutoff):
    """Antialiased if a size is named, by which splats shrink below a pixel."""
    width, height = [(70, 50), (33, 65), (16, 16), (100, 7)][seed % 4]
    camera = look_at(
        (2.5, 1.2, 0.3 * seed), width=width, height=height, principal=(3.0 * seed, -2.0 * seed)
    )
    gaussians = replace(random_gaussians(250, seed), cutoff_deviations=cutoff)
    if size is not None:
        gaussians = replace(gaussians, scales=gaussians.scales * size, antialiased=True)
    features = torch.randn(250, 2, generator=torch.Generator().manual_seed(seed))
    options = {
        "sh_degree": seed % 4,
        "farthest_depth_behind": seed % 2 == 0,
        "plane_reach": 2.5 if seed % 2 else math.inf,
    }
    expected, expected_gradients = render_with_gradients(
        rasterize_reference, gaussians, camera, features, torch.float64, seed, **options
    )
    actual, gradients = render_with_gradients(
        rasterize,
        gaussians,
        camera,
        features,
        torch.float32,
        seed,
        depth=True,
        normal=True,
        **options,
    )
    assert int((actual.radii > 0).sum()) > 50
    torch.testing.assert_close(actual.radii, expected.radii)
    for name in IMAGES:
        assert_close_to_maximum(getattr(actual, name), getattr(expected, name), 1e-5)
    for found, reference in zip(gradients, expected_gradients, strict=True):
        assert_close_to_maximum(found, reference, 2e-5)


@pytest.mark.parametrize("front", [0.2, 0.6])
def test_the_front_of_what_a_pixel_shows_matches_the_float64_reference(front):
    camera = look_at((2.5, 1.2, 0.3), width=50, height=40, principal=(3.0, -2.0))
    gaussians = random_gaussians(250, 1)
    gaussians = replace(gaussians, opacities=gaussians.opacities.clamp_min(0.5))
    features = torch.randn(250, 2, generator=torch.Generator().manual_seed(0))
    expected, expected_gradients = render_with_gradients(
        rasterize_reference,
        gaussians,
        camera,
        features,
        torch.float64,
        0,
        plane_reach=math.inf,
        front_transmittance=front,
    )
    actual, gradients = render_with_gradients(
        rasterize,
        gaussians,
        camera,
        features,
        torch.float32,
        0,
        depth=True,
        normal=True,
        plane_reach=math.inf,
        rasterizer=WarpRasterizer(front_transmittance=front),
    )
    for name in IMAGES:
        assert_close_to_maximum(getattr(actual, name), getattr(expected, name), 1e-5)
    for found, reference in zip(gradients, expected_gradients, strict=True):
        assert_close_to_maximum(found, reference, 2e-5)
    # What the front leaves out is behind it: pixels are as opaque as the limit asks for.
    everything = rasterize(leaves_of(gaussians, torch.float32), camera).alpha
    is_opaque = everything > 1 - 0.9 * front
    assert bool((actual.alpha[is_opaque] > 1 - front).all())
    assert float((everything - actual.alpha).detach().mean()) > 0.01


def test_an_antialiased_splat_adds_as_much_to_an_image_at_every_size():
    """Where a splat is smaller than a pixel, widening it alone would add more of it."""
    camera = look_at((0.0, -3.0, 0.4), width=48, height=48, principal=(0.0, 0.0))
    small = random_gaussians(1, 0)
    small = replace(
        small, means=torch.zeros_like(small.means), opacities=torch.full((1,), 0.5).double()
    )
    sums = {}
    for antialiased in (False, True):
        for size in (0.02, 0.04):
            scales = torch.full((1, 3), size).double()
            found = rasterize(
                leaves_of(replace(small, scales=scales, antialiased=antialiased), torch.float32),
                camera,
            )
            sums[antialiased, size] = float(found.alpha.sum().detach()) / size**2
    assert sums[True, 0.02] == pytest.approx(sums[True, 0.04], rel=0.1)
    assert sums[False, 0.02] > 1.3 * sums[True, 0.02]


@pytest.mark.parametrize("cutoff", [1.5, 2.5])
def test_a_splat_ends_at_its_cutoff_and_is_listed_in_the_tiles_up_to_it(cutoff):
    camera = look_at((0.0, -3.0, 0.0), width=193, height=193)
    one = random_gaussians(1, 0, torch.float32)
    one = replace(
        one,
        means=torch.zeros(1, 3),
        scales=torch.full((1, 3), 0.8),
        opacities=torch.full((1,), 0.9),
    )
    ended = replace(one, cutoff_deviations=cutoff)
    alpha = rasterize(ended, camera).alpha
    whole = rasterize(one, camera).alpha
    x, y, xx, xy, yy = project(one, camera).splats[0, :5].double()
    across = torch.arange(193) - x
    down = (torch.arange(193) - y)[:, None]
    squares = xx * across**2 + 2 * xy * across * down + yy * down**2
    is_inside = squares < cutoff**2
    assert torch.equal(alpha > 0, is_inside)
    assert torch.equal(alpha[is_inside], whole[is_inside])
    assert bool((whole[~is_inside] > 0).any())
    counts = [int(project(gaussians, camera).tile_counts) for gaussians in (ended, one)]
    assert counts[0] < counts[1]


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-8])
def test_an_antialiased_splat_far_below_a_pixel_keeps_what_other_programs_leave_of_it(size):
    """Opacities shrink with the area on the image, down to 0.005."""
    camera = look_at((0.0, -3.0, 0.0), width=33, height=33)
    one = random_gaussians(1, 0)
    one = replace(
        one,
        means=torch.zeros(1, 3).double(),
        scales=torch.full((1, 3), size).double(),
        opacities=torch.full((1,), 0.98).double(),
        antialiased=True,
    )
    leaves = leaves_of(one, torch.float32)
    alpha = rasterize(leaves, camera).alpha[16, 16]
    deviation = np.array([camera.fx, camera.fy]) * size / 3
    share = np.sqrt(np.prod(deviation**2 / (deviation**2 + 0.3)))
    assert float(alpha.detach()) == pytest.approx(0.98 * max(share, 0.005), rel=1e-3)
    alpha.backward()
    assert float(leaves.opacities.grad) == pytest.approx(max(share, 0.005), rel=1e-3)
    if share < 0.005:
        assert not leaves.scales.grad.any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "cutoff"), [(None, NO_CUTOFF), (0.1, NO_CUTOFF), (None, 2.5), (None, 1.0)]
)
def test_gradients_of_the_reference_match_finite_differences(size, cutoff):
    """Antialiased if a size is named, by which splats shrink below a pixel."""
    camera = look_at((2.5, 1.2, 0.8), width=20, height=16, focal=20.0)
    gaussians = replace(random_gaussians(12, 3), cutoff_deviations=cutoff)
    # Away from the cap and the cut-off, where the image is smooth.
    gaussians.opacities.clamp_(0.2, 0.6)
    gaussians.means *= 0.3
    if size is not None:
        gaussians = replace(gaussians, scales=gaussians.scales * size, antialiased=True)
    weights = torch.randn(
        16, 20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    leaves = leaves_of(gaussians, torch.float64)

    def loss():
        return (rasterize_reference(leaves, camera).image * weights).sum()

    loss().backward()
    step = 1e-6
    with torch.no_grad():
        for tensor in (leaves.means, leaves.scales, leaves.quats, leaves.sh_dc):
            flat, gradient = tensor.view(-1), tensor.grad.reshape(-1)
            for i in range(0, flat.numel(), 5):
                original = flat[i].clone()
                flat[i] = original + step
                above = loss()
                flat[i] = original - step
                below = loss()
                flat[i] = original
                numeric = float((above - below) / (2 * step))
                assert numeric == pytest.approx(float(gradient[i]), rel=2e-3, abs=2e-3)


RECORDED = [
    "0_deg3_black",
    "0_deg3_white",
    "0_deg0_black",
    "0_deg0_white",
    "2_deg3_black",
    "2_deg0_white",
]


@pytest.mark.parametrize("key", [f"cam{name}" for name in RECORDED])
def test_renders_match_the_recorded_ones(key):
    case = load_golden("case02_raster_A")
    camera_name, degree, background = key.split("_")
    camera = golden_cameras(case)[int(camera_name[3:])]
    cloud = golden_cloud(case)
    color = torch.ones(3) if background == "white" else None
    output = rasterize(cloud.activate(), camera, color, sh_degree=int(degree[3:]))
    error = np.abs(output.image.detach().numpy() - case[f"out_rgb_{key}"])
    assert error.mean() < 1e-5
    assert np.quantile(error, 0.995) < 1e-4
    assert error.max() < 6e-3
    np.testing.assert_array_equal(output.radii.numpy(), case[f"out_radii_{camera_name}"])
    alpha_error = np.abs(output.alpha.detach().numpy() - case[f"out_alpha_{camera_name}"])
    assert alpha_error.max() < 6e-3
    if f"grad_{key}_points" not in case:
        return
    output.means2d.retain_grad()
    (output.image * torch.tensor(case["in_weights"])).sum().backward()
    found = {GROUP_NAMES[n]: t.grad.numpy() for n, t in cloud.tensors().items()}
    found["means2D_ndc"] = output.means2d.grad.numpy() * [camera.width / 2, camera.height / 2]
    for name, value in found.items():
        expected = case[f"grad_{key}_{name}"]
        assert np.abs(value - expected).max() <= 2e-3 * np.abs(expected).max(), name
        norms = np.linalg.norm(value) * np.linalg.norm(expected)
        if norms > 0:
            assert (value * expected).sum() / norms > 0.9999, name


@pytest.mark.parametrize("index", [0, 1])
def test_depth_and_normals_match_the_recorded_ones(index):
    case = load_golden("case03_depth_normal_A")
    camera = golden_cameras(case)[index]
    cloud = golden_cloud(case)
    output = rasterize(cloud.activate(), camera, rgb=False, depth=True, normal=True)
    depth, normal = output.depth.detach().numpy(), output.normal.detach().numpy()
    expected_depth = case[f"out_depth_cam{index}"]
    relative = np.abs(depth - expected_depth) / np.maximum(expected_depth, 1e-3)
    assert np.quantile(relative, 0.99) < 1e-4
    assert np.abs(depth - expected_depth).max() < 2e-2
    assert np.abs(normal - case[f"out_normal_cam{index}"]).max() < 1e-3
    assert np.allclose(np.linalg.norm(normal, axis=-1), 1.0, atol=1e-5)
    intrinsics = (camera.fx, camera.fy, camera.cx, camera.cy)
    from_depth = normals_from_depth(output.depth, *intrinsics).detach().numpy()
    solid = expected_depth > 0.1
    error = np.abs(from_depth - case[f"out_normal_from_depth_cam{index}"])[solid]
    assert np.quantile(error, 0.99) < 1e-3
    loss = depth_normal_consistency(output.depth, output.normal, *intrinsics)
    assert float(loss.detach()) == pytest.approx(float(case[f"out_loss_cam{index}"]), abs=1e-4)
    loss.backward()
    for own, name in GROUP_NAMES.items():
        if f"grad_cam{index}_{name}" not in case:
            continue
        found = getattr(cloud, own).grad.numpy()
        expected = case[f"grad_cam{index}_{name}"]
        norms = np.linalg.norm(found) * np.linalg.norm(expected)
        assert (found * expected).sum() / norms > 0.999, name


def all_bits(seed=5, n=3000):
    camera = look_at((2.5, 1.2, 0.8), width=120, height=90, focal=90.0, principal=(5, 3))
    output, gradients = render_with_gradients(
        rasterize,
        random_gaussians(n, seed),
        camera,
        torch.ones(n, 1),
        torch.float32,
        seed,
        depth=True,
        normal=True,
        plane_reach=3.0,
    )
    return [getattr(output, name).detach() for name in IMAGES] + gradients


def test_every_repetition_gives_the_same_bits():
    first = all_bits()
    for _ in range(3):
        for a, b in zip(first, all_bits(), strict=True):
            assert torch.equal(a, b)


def test_bits_do_not_depend_on_the_number_of_threads():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = all_bits()
        for n in (2, 3, 5):
            torch.set_num_threads(n)
            for a, b in zip(single, all_bits(), strict=True):
                assert torch.equal(a, b)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("n_features", [1, 2, 5, 9])
def test_any_number_of_features_blends_like_colour(n_features):
    camera = look_at((2.5, 1.2, 0.8), width=40, height=30, focal=40.0)
    gaussians = leaves_of(random_gaussians(100, 1), torch.float32)
    features = torch.rand(100, n_features)
    together = rasterize(gaussians, camera, rgb=False, features=features).features
    for k in range(n_features):
        alone = rasterize(gaussians, camera, rgb=False, features=features[:, k : k + 1]).features
        torch.testing.assert_close(together[..., k], alone[..., 0], rtol=1e-6, atol=1e-6)


def test_a_shifted_principal_point_shifts_the_image():
    gaussians = leaves_of(random_gaussians(150, 2), torch.float32)
    centred = look_at((2.5, 1.2, 0.8), width=64, height=48, focal=200.0)
    shifted = look_at((2.5, 1.2, 0.8), width=64, height=48, focal=200.0, principal=(16, 0))
    a = rasterize(gaussians, centred).alpha[:, :48]
    b = rasterize(gaussians, shifted).alpha[:, 16:]
    # Only Gaussians whose tiles are cut differently may differ, by less than the 3-sigma tail.
    assert float((a - b).abs().max()) < 2e-2
    assert float((a - b).abs().mean()) < 1e-3


@pytest.fixture
def camera():
    return look_at((2.5, 1.2, 0.8), width=37, height=21, focal=30.0)


def test_no_gaussians_give_the_background(camera):
    empty = leaves_of(random_gaussians(0, 0), torch.float32)
    output = rasterize(empty, camera, torch.tensor([0.1, 0.2, 0.3]), depth=True, normal=True)
    assert torch.equal(output.image, torch.tensor([0.1, 0.2, 0.3]).expand(21, 37, 3))
    assert torch.equal(output.normal, torch.tensor([0.0, 0.0, -1.0]).expand(21, 37, 3))
    assert float(output.depth.abs().max()) == 0
    assert float(output.alpha.abs().max()) == 0
    output.image.sum().backward()
    assert output.radii.shape == (0,)


def test_gaussians_behind_the_camera_are_culled_and_have_no_gradient(camera):
    behind = leaves_of(random_gaussians(40, 0), torch.float32)
    with torch.no_grad():
        behind.means *= 0.1
        behind.means += torch.tensor([10.0, 5.0, 3.0])
    output = rasterize(behind, camera, depth=True)
    assert not bool(output.visible.any())
    assert float(output.image.abs().max()) == 0
    (output.image.sum() + output.depth.sum()).backward()
    assert all(float(t.grad.abs().sum()) == 0 for t in behind.tensors())


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (40, 1), (16, 16), (17, 16)])
def test_images_of_any_size_match_the_reference(size):
    camera = look_at((2.5, 1.2, 0.8), width=size[0], height=size[1], focal=25.0)
    gaussians = random_gaussians(80, 4)
    expected = rasterize_reference(gaussians, camera)
    actual = rasterize(leaves_of(gaussians, torch.float32), camera)
    assert_close_to_maximum(actual.image, expected.image, 1e-5)


@pytest.mark.parametrize("attribute", ["means", "scales", "quats", "opacities"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_gaussians_are_culled_and_leave_the_others_alone(camera, attribute, value):
    gaussians = random_gaussians(60, 7, torch.float32)
    clean = Gaussians(*(t[1:] for t in gaussians.tensors()))
    getattr(gaussians, attribute)[0] = value
    leaves = leaves_of(gaussians, torch.float32)
    output = rasterize(leaves, camera, depth=True, normal=True)
    expected = rasterize(clean, camera, depth=True, normal=True)
    assert int(output.radii[0]) == 0
    torch.testing.assert_close(output.image, expected.image)
    torch.testing.assert_close(output.depth, expected.depth)
    (output.image.sum() + output.depth.sum()).backward()
    for tensor in leaves.tensors():
        assert bool(tensor.grad.isfinite().all())


def test_equal_depths_blend_in_the_order_of_their_index(camera):
    gaussians = random_gaussians(2, 0, torch.float32)
    gaussians.means[:] = 0.0
    gaussians.opacities[:] = 0.8
    gaussians.scales[:] = 0.5
    red, green = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    image = rasterize(gaussians, camera, rgb=False, features=torch.stack([red, green])).features
    assert float(image[10, 18, 0]) > 2 * float(image[10, 18, 1])


def test_asking_for_nothing_is_an_error(camera):
    with pytest.raises(ValueError, match="nothing to render"):
        rasterize(random_gaussians(3, 0, torch.float32), camera, rgb=False)


def test_a_degree_beyond_the_coefficients_is_an_error(camera):
    gaussians = random_gaussians(3, 0, torch.float32)
    gaussians.sh_rest = gaussians.sh_rest[:, :3]
    with pytest.raises(ValueError, match="sh_degree 2"):
        rasterize(gaussians, camera, sh_degree=2)
