# SPDX-License-Identifier: Apache-2.0
"""The fused colour loss against its torch twin and recorded values."""

import pytest
import torch

from tests.support.color_losses import color_loss, l1_and_ssim, ssim_reference
from tests.support.golden import load_golden


def image_pair(height, width, seed=0):
    rng = torch.Generator().manual_seed(seed)
    target = torch.rand(height, width, 3, generator=rng)
    image = (target + 0.2 * torch.randn(height, width, 3, generator=rng)).clamp(0, 1)
    return image, target


@pytest.mark.parametrize(
    "size", [(1, 1), (2, 9), (11, 11), (37, 45), (50, 86), (64, 85), (40, 171), (5, 300)]
)
def test_values_and_gradient_match_the_float64_reference(size):
    image, target = image_pair(*size)
    fused = image.clone().requires_grad_(True)
    l1, ssim = l1_and_ssim(fused, target)
    (0.8 * l1 + 0.3 * (1 - ssim)).backward()
    twin = image.double().requires_grad_(True)
    expected_l1 = (twin - target.double()).abs().mean()
    expected_ssim = ssim_reference(twin, target.double())
    (0.8 * expected_l1 + 0.3 * (1 - expected_ssim)).backward()
    assert float(l1.detach()) == pytest.approx(float(expected_l1.detach()), abs=1e-6)
    assert float(ssim.detach()) == pytest.approx(float(expected_ssim.detach()), abs=2e-5)
    error = (fused.grad.double() - twin.grad).abs().max()
    assert float(error / twin.grad.abs().max()) < 1e-3


def test_the_recorded_pair_gives_the_recorded_loss_and_gradient():
    case = load_golden("case06_losses_lr_prune_A")
    image = torch.tensor(case["in_pair_pred_chw"]).permute(1, 2, 0).contiguous()
    target = torch.tensor(case["in_pair_gt_chw"]).permute(1, 2, 0).contiguous()
    image.requires_grad_(True)
    l1, ssim = l1_and_ssim(image, target)
    assert float(l1.detach()) == pytest.approx(float(case["out_pair_l1"]), abs=1e-5)
    assert float(ssim.detach()) == pytest.approx(float(case["out_pair_ssim"]), abs=1e-5)
    loss = color_loss(image, target)
    assert float(loss.detach()) == pytest.approx(float(case["out_pair_loss"]), abs=1e-5)
    loss.backward()
    expected = torch.tensor(case["grad_pair_pred_chw"]).permute(1, 2, 0)
    assert float((image.grad - expected).abs().max()) < 1e-4 * float(expected.abs().max())


def test_equal_images_have_no_loss_and_no_gradient():
    image, _ = image_pair(30, 40)
    leaf = image.clone().requires_grad_(True)
    loss = color_loss(leaf, image)
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-6)
    loss.backward()
    assert float(leaf.grad.abs().max()) < 1e-7


def test_without_a_gradient_the_value_is_the_same():
    image, target = image_pair(33, 20)
    with torch.no_grad():
        value = color_loss(image, target)
    assert float(value) == float(color_loss(image.clone().requires_grad_(True), target).detach())


def test_bits_do_not_depend_on_the_number_of_threads():
    image, target = image_pair(90, 130)

    def run():
        leaf = image.clone().requires_grad_(True)
        loss = color_loss(leaf, target)
        loss.backward()
        return loss.detach(), leaf.grad

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = run()
        torch.set_num_threads(3)
        found = run()
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_images_of_different_shape_are_refused():
    with pytest.raises(ValueError, match="shape"):
        l1_and_ssim(torch.zeros(4, 5, 3), torch.zeros(5, 4, 3))
