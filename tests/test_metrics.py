# SPDX-License-Identifier: Apache-2.0
"""Metrics against recorded values, independent numpy computations and known cases."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import correlate1d

from gaussian_splatting.core.random import generator
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.reporting import evaluation as metrics
from gaussian_splatting.engine.reporting.evaluation import ImageComparison, score_views
from gaussian_splatting.losses.ssim_reference import (
    gaussian_window,
    ssim_map_reference,
)
from sugar_utils.errors import UserError
from tests.support.color_losses import ssim_reference
from tests.support.golden import load_golden


def random_pair(height=40, width=51, noise=0.1, dtype=torch.float32):
    """A smooth picture and a noisy copy, in [0, 1]."""
    y = torch.linspace(0, 5, height, dtype=dtype)[:, None, None]
    x = torch.linspace(0, 7, width, dtype=dtype)[None, :, None]
    phase = torch.tensor([0.0, 1.0, 2.0], dtype=dtype)
    target = 0.5 + 0.4 * torch.sin(x + phase) * torch.cos(y)
    draws = torch.randn(target.shape, generator=generator(0, "noise"), dtype=dtype)
    return (target + noise * draws).clamp(0, 1), target


def golden_pair() -> tuple[torch.Tensor, torch.Tensor, dict]:
    case = load_golden("case06_losses_lr_prune_A")
    image = torch.tensor(case["in_pair_pred_chw"]).permute(1, 2, 0).contiguous()
    target = torch.tensor(case["in_pair_gt_chw"]).permute(1, 2, 0).contiguous()
    return image, target, case


def numpy_ssim(image: np.ndarray, target: np.ndarray) -> float:
    """Independent SSIM in float64 through scipy."""
    kernel = np.exp(-((np.arange(11) - 5.0) ** 2) / 4.5)
    kernel /= kernel.sum()

    def blur(channel):
        rows = correlate1d(channel, kernel, axis=0, mode="constant")
        return correlate1d(rows, kernel, axis=1, mode="constant")

    values = []
    for c in range(3):
        x, y = image[..., c].astype(np.float64), target[..., c].astype(np.float64)
        mx, my = blur(x), blur(y)
        vx, vy, cov = blur(x * x) - mx**2, blur(y * y) - my**2, blur(x * y) - mx * my
        top = (2 * mx * my + 1e-4) * (2 * cov + 9e-4)
        values.append(top / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4)))
    return float(np.mean(values))


def test_recorded_pair_has_the_recorded_l1_ssim_and_loss():
    image, target, case = golden_pair()
    assert metrics.l1(image, target) == pytest.approx(float(case["out_pair_l1"]), abs=1e-6)
    assert metrics.ssim(image, target) == pytest.approx(float(case["out_pair_ssim"]), abs=1e-6)
    loss = 0.8 * (image - target).abs().mean() + 0.2 * (1 - ssim_reference(image, target))
    assert float(loss) == pytest.approx(float(case["out_pair_loss"]), abs=1e-6)


def test_recorded_gradient_of_the_colour_loss():
    image, target, case = golden_pair()
    image.requires_grad_(True)
    loss = 0.8 * (image - target).abs().mean() + 0.2 * (1 - ssim_reference(image, target))
    loss.backward()
    expected = torch.tensor(case["grad_pair_pred_chw"]).permute(1, 2, 0)
    assert (image.grad - expected).abs().max() < 1e-5 * expected.abs().max()


def test_ssim_equals_an_independent_float64_computation():
    image, target = random_pair(dtype=torch.float64)
    expected = numpy_ssim(image.numpy(), target.numpy())
    assert float(ssim_reference(image, target)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("size", [(1, 1), (7, 300), (61, 90)])
def test_reported_ssim_is_that_of_float64(size):
    image, target = random_pair(*size)
    exact = float(ssim_reference(image.double(), target.double()))
    assert metrics.ssim(image, target) == pytest.approx(exact, abs=2e-6)
    assert metrics.ssim(image, target, torch.ones(size)) == pytest.approx(exact, abs=2e-6)


def test_ssim_gradient_matches_finite_differences():
    image, target = random_pair(7, 9, dtype=torch.float64)
    image.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda x: ssim_reference(x, target), image)


def test_ssim_of_an_image_with_itself_is_one_and_is_symmetric():
    image, target = random_pair()
    assert metrics.ssim(image, image) == pytest.approx(1.0, abs=1e-6)
    assert metrics.ssim(image, target) == pytest.approx(metrics.ssim(target, image), abs=1e-6)
    assert ssim_map_reference(image, target).shape == image.shape
    assert 0 < metrics.ssim(image, target) < 1


@pytest.mark.parametrize("size", [(1, 1), (3, 20), (11, 2)])
def test_ssim_of_images_smaller_than_the_window(size):
    image, target = random_pair(*size)
    expected = numpy_ssim(image.numpy(), target.numpy())
    assert metrics.ssim(image, target) == pytest.approx(expected, abs=1e-5)


def test_window_sums_to_one():
    window = gaussian_window(torch.float64, "cpu")
    assert window.shape == (11,)
    assert float(window.sum()) == pytest.approx(1.0, abs=1e-15)
    assert torch.equal(window, window.flip(0))


def test_psnr_by_hand_and_at_equality():
    black, grey = torch.zeros(4, 5, 3), torch.full((4, 5, 3), 0.1)
    assert metrics.psnr(grey, black) == pytest.approx(20.0, abs=1e-5)
    assert metrics.psnr(grey, grey) == math.inf
    assert metrics.l1(grey, black) == pytest.approx(0.1, abs=1e-7)


def test_psnr_takes_the_whole_image_not_the_mean_over_channels():
    image, black = torch.zeros(2, 2, 3), torch.zeros(2, 2, 3)
    image[..., 0] = 0.3
    assert metrics.psnr(image, black) == pytest.approx(-10 * math.log10(0.09 / 3), abs=1e-5)


def test_values_outside_the_unit_range_are_clamped():
    white = torch.ones(2, 2, 3)
    assert metrics.psnr(white * 5, white) == math.inf
    assert metrics.psnr(white * -5, white) == pytest.approx(0.0)


def test_bytes_and_floats_compare_in_any_mix():
    image, target = random_pair()
    image8, target8 = metrics.to_uint8(image), metrics.to_uint8(target)
    assert metrics.psnr(image8, target8) == metrics.psnr(image8.float() / 255, target8)
    assert torch.equal(metrics.to_uint8(target8.float() / 255), target8)


@pytest.mark.parametrize("metric", [metrics.l1, metrics.psnr, metrics.ssim])
def test_shape_mismatches_raise(metric):
    image = torch.zeros(4, 5, 3)
    for other in (torch.zeros(5, 4, 3), torch.zeros(4, 5, 1), torch.zeros(3, 4, 5)):
        with pytest.raises(ValueError, match="one shape"):
            metric(image, other)
    with pytest.raises(ValueError, match="at least one pixel"):
        metric(torch.zeros(0, 5, 3), torch.zeros(0, 5, 3))
    with pytest.raises(ValueError, match="uint8 or float"):
        metric(image.int(), image)


@pytest.mark.slow
def test_metrics_have_the_same_bits_for_any_number_of_threads():
    image, target = random_pair(180, 301)
    leaf = image.clone().requires_grad_(True)
    n_threads = torch.get_num_threads()
    seen, gradients = set(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            seen.add(tuple(m(image, target) for m in (metrics.l1, metrics.psnr, metrics.ssim)))
            (gradient,) = torch.autograd.grad(ssim_reference(leaf, target), leaf)
            gradients.append(gradient)
    finally:
        torch.set_num_threads(n_threads)
    assert len(seen) == 1
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


def make_cameras(n: int) -> list[Camera]:
    eye, zero = np.eye(3), np.zeros(3)
    return [Camera(f"{i}.png", 51, 40, 50, 50, 25.5, 20, eye, zero) for i in range(n)]


def test_evaluation_agrees_with_psnr_of_saved_images(tmp_path):
    cameras = make_cameras(3)
    renders, photographs = {}, {}
    for camera, noise in zip(cameras, (0.2, 0.08, 0.03), strict=True):
        image, target = random_pair(noise=noise)
        renders[camera.name] = image * 1.1 - 0.05
        photographs[camera.name] = metrics.to_uint8(target)
    result = score_views(lambda c: renders[c.name], cameras, lambda c: photographs[c.name])
    independent = []
    for camera in cameras:
        for kind, images in (("render", renders), ("truth", photographs)):
            pixels = metrics.to_uint8(images[camera.name]).numpy()
            Image.fromarray(pixels).save(tmp_path / f"{kind}_{camera.name}")
        left, right = (
            np.asarray(Image.open(tmp_path / f"{kind}_{camera.name}"), dtype=np.float64) / 255
            for kind in ("render", "truth")
        )
        independent.append(-10 * np.log10(np.mean((left - right) ** 2)))
    for view, expected in zip(result.per_view, independent, strict=True):
        assert view.psnr == pytest.approx(expected, abs=0.01)
    assert result.psnr == pytest.approx(np.mean(independent), abs=0.01)
    assert [view.name for view in result.per_view] == ["0.png", "1.png", "2.png"]


def test_quantised_evaluation_equals_saved_images_at_any_quality():
    (camera,) = make_cameras(1)
    image, target = random_pair(noise=0.002)
    photograph = metrics.to_uint8(target)
    result = score_views(lambda c: image, [camera], lambda c: photograph, quantise=True)
    left = metrics.to_uint8(image).double().numpy() / 255
    right = photograph.double().numpy() / 255
    expected = -10 * np.log10(np.mean((left - right) ** 2))
    assert result.psnr == pytest.approx(expected, abs=1e-4)
    exact = score_views(lambda c: image, [camera], lambda c: photograph)
    assert exact.psnr > result.psnr


def test_evaluation_means_are_over_views_and_need_no_gradients():
    cameras = make_cameras(2)
    offsets = {"0.png": 0.1, "1.png": 0.01}
    leaf = torch.zeros(40, 51, 3, requires_grad=True)
    black = torch.zeros(40, 51, 3, dtype=torch.uint8)
    result = score_views(lambda c: leaf + offsets[c.name], cameras, lambda c: black)
    assert result.psnr == pytest.approx((20 + 40) / 2, abs=1e-4)
    assert result.l1 == pytest.approx(0.055, abs=1e-6)
    assert result.ssim == pytest.approx(sum(v.ssim for v in result.per_view) / 2)


def test_render_of_another_size_is_named():
    (camera,) = make_cameras(1)
    photograph = torch.zeros(40, 50, 3, dtype=torch.uint8)
    with pytest.raises(UserError, match=r"camera 0\.png: the render is 40 x 51 x 3"):
        score_views(lambda c: torch.zeros(40, 51, 3), [camera], lambda c: photograph)
    with pytest.raises(ValueError, match="at least one camera"):
        score_views(lambda c: photograph, [], lambda c: photograph)


def test_only_pixels_that_mask_and_render_have_in_common_count():
    (camera,) = make_cameras(1)
    image, target = random_pair()
    right = torch.arange(51) >= 30
    upper = torch.arange(40) < 20
    mask = torch.where(right.expand(40, 51), 255, 0).to(torch.uint8)[..., None]
    photograph = torch.cat([metrics.to_uint8(target), mask], dim=-1)
    covered = upper[:, None].expand(40, 51)
    compared = ImageComparison.of(camera, image, photograph, covered)
    corner = ImageComparison(image[:20, 30:], photograph[:20, 30:, :3])
    assert compared.n_pixels == corner.n_pixels == 20 * 21
    assert compared.psnr() == pytest.approx(corner.psnr(), abs=1e-9)
    assert compared.fitted_psnr() == pytest.approx(corner.fitted_psnr(), abs=1e-6)
    assert compared.constant_psnr() == pytest.approx(corner.constant_psnr(), abs=1e-9)
    assert compared.whole().psnr() == pytest.approx(metrics.psnr(image, photograph[..., :3]))


def test_what_a_render_does_not_cover_does_not_change_the_similarity_of_the_rest():
    (camera,) = make_cameras(1)
    image, target = random_pair()
    photograph = metrics.to_uint8(target)
    covered = (torch.arange(51) >= 10).expand(40, 51)
    other = torch.where(covered[..., None], image, torch.zeros_like(image))
    scores = [ImageComparison.of(camera, each, photograph, covered) for each in (image, other)]
    assert scores[0].ssim() == scores[1].ssim()
    assert scores[0].whole().ssim() != scores[1].whole().ssim()


def test_equal_images_have_a_score_that_can_be_averaged():
    (camera,) = make_cameras(1)
    photograph = metrics.to_uint8(random_pair()[1])
    result = score_views(lambda c: photograph.float() / 255, [camera], lambda c: photograph)
    assert result.psnr == metrics.MAX_PSNR
