# SPDX-License-Identifier: Apache-2.0
"""The fused depth-normal term against its torch twin in float64."""

from __future__ import annotations

import pytest
import torch

from gaussian_splatting.rasterization import complete_normals
from sugar_trainers.losses import fused_depth_normal_consistency
from tests.support.depth_normals import depth_normal_consistency

ROWS = 16  # of which strips and maps have more or less
LENS = torch.tensor([21.0, 19.0, 11.5, 8.0])  # fx, fy, cx, cy


def made_maps(height, width, seed=0):
    """Depth with holes and normals, columns of wider pixels as a rasterizer leaves them."""
    rng = torch.Generator().manual_seed(seed)
    pixels = 0.3 * torch.randn(height, width, 6, generator=rng)
    pixels[..., 3] = 2 + 0.1 * torch.rand(height, width, generator=rng)
    pixels[..., 3][torch.rand(height, width, generator=rng) < 0.05] = 0.0
    # Some normals are longer than one can be: their third component is held at its smallest.
    pixels[0, :, 4:] = 0.9
    counted = torch.rand(height, width, generator=rng) < 0.7
    return pixels[..., 3], pixels[..., 4:6], counted


def as_leaves(*maps):
    return [m.detach().requires_grad_(True) for m in maps]


def twin(depth, normal_xy, *lens, **how):
    return depth_normal_consistency(depth, complete_normals(normal_xy), *lens, **how)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "mask"])
@pytest.mark.parametrize("size", [(3, 3), (20, 9), (ROWS, 40), (2 * ROWS + 1, 33), (5, 70)])
def test_values_and_gradients_are_those_of_the_float64_twin(size, masked):
    depth, normal_xy, counted = made_maps(*size)
    how = {"counted": counted, "total": counted.sum().clamp_min(1)} if masked else {}
    leaves, exact = as_leaves(depth, normal_xy), as_leaves(depth.double(), normal_xy.double())
    found, expected = (
        fused_depth_normal_consistency(*leaves, LENS, **how),
        twin(*exact, *LENS, **how),
    )
    (3 * found).backward()
    (3 * expected).backward()
    assert float(found.detach()) == pytest.approx(float(expected.detach()), abs=2e-7)
    for leaf, other in zip(leaves, exact, strict=True):
        scale = float(other.grad.abs().max()) or 1.0
        torch.testing.assert_close(leaf.grad.double(), other.grad, rtol=1e-4, atol=1e-5 * scale)


def test_gradients_are_those_of_finite_differences():
    depth, normal_xy, _ = made_maps(12, 10, seed=3)
    depth = depth.clamp_min(1.5)
    leaves = as_leaves(depth, normal_xy)
    fused_depth_normal_consistency(*leaves, LENS).backward()
    rng = torch.Generator().manual_seed(5)
    for leaf, place in zip(leaves, range(2), strict=True):
        for _ in range(4):
            step = torch.randn(leaf.shape, generator=rng, dtype=torch.float64)
            step *= 1e-6
            ahead, behind = ([m.double() for m in (depth, normal_xy)] for _ in range(2))
            ahead[place], behind[place] = ahead[place] + step, behind[place] - step
            slope = (twin(*ahead, *LENS) - twin(*behind, *LENS)) / 2
            along = (leaf.grad.double() * step).sum()
            assert float(along) == pytest.approx(float(slope), rel=2e-4, abs=1e-12)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "mask"])
def test_strips_add_up_to_the_map(masked):
    height, width = 3 * ROWS + 5, 23
    depth, normal_xy, counted = made_maps(height, width)
    total = counted.sum() if masked else height * width
    whole = as_leaves(depth, normal_xy)
    loss = fused_depth_normal_consistency(
        *whole, LENS, total=total, counted=counted if masked else None
    )
    loss.backward()
    parts, sums = 0.0, [torch.zeros_like(leaf) for leaf in whole]
    for first, last in ((0, 8), (8, 30), (30, height)):
        top, end = max(first - 1, 0), min(last + 1, height)
        strip = as_leaves(depth[top:end], normal_xy[top:end])
        part = fused_depth_normal_consistency(
            *strip,
            LENS - torch.tensor([0.0, 0.0, 0.0, top]),
            rows=slice(first - top, last - top),
            total=total,
            counted=counted[top:end] if masked else None,
        )
        part.backward()
        parts += float(part.detach())
        for total_of, leaf in zip(sums, strip, strict=True):
            total_of[top:end] += leaf.grad
    assert parts == pytest.approx(float(loss.detach()), rel=1e-6)
    for found, leaf in zip(sums, whole, strict=True):
        torch.testing.assert_close(found, leaf.grad, rtol=1e-5, atol=1e-9)


def test_bits_do_not_depend_on_the_threads():
    depth, normal_xy, counted = made_maps(60, 90)
    found, threads = [], torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            leaves = as_leaves(depth, normal_xy)
            loss = fused_depth_normal_consistency(*leaves, LENS, counted=counted)
            loss.backward()
            found.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("size", [(2, 5), (1, 1), (6, 2), (6, 7)])
def test_maps_without_a_surface_count_one_and_pull_at_nothing(size):
    depth, normal_xy, _ = made_maps(*size)
    leaves = as_leaves(torch.zeros_like(depth) if size == (6, 7) else depth, normal_xy)
    loss = fused_depth_normal_consistency(*leaves, LENS)
    loss.backward()
    assert float(loss.detach()) == 1.0
    assert not any(leaf.grad.any() for leaf in leaves)


def test_pixels_that_are_not_numbers_pull_at_nothing_else():
    depth, normal_xy, _ = made_maps(20, 20)
    depth = depth.clone()
    depth[10, 10] = torch.nan
    leaves = as_leaves(depth, normal_xy)
    fused_depth_normal_consistency(*leaves, LENS).backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)
