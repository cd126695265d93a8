# SPDX-License-Identifier: Apache-2.0
"""How well a neighbour agrees with a view on planes, on the CPU: C++ in ``native/``, one by one"""

from __future__ import annotations

import torch
import warp as wp
from torch import Tensor

from sugar_utils.warp_arrays import Floats2d, Floats3d
from sugar_utils.warp_launch import EXACT_OPTIONS, SIMD_SOURCE, launch, native_kernel, native_source

wp.set_module_options(EXACT_OPTIONS)

MIN_WIDTH = 8  # pixels; narrower images have not one block of eight


@native_kernel(SIMD_SOURCE + native_source(__file__, "plane_agreement"))
def _agree_on_planes(
    plane: int, radius: int, shift: wp.vec3, lens: wp.vec4, inverse_: Floats2d, rays_: Floats3d,
    grey_: Floats2d, mean_: Floats2d, other_: Floats2d, scratch_: Floats2d, variance_: Floats3d,
    covariance_: Floats3d,
): ...  # fmt: skip


def agreement_on_planes(
    grey: Tensor, mean: Tensor, deviation: Tensor, other: Tensor, rays: Tensor,
    shift: tuple[float, float, float], lens: tuple[float, float, float, float], inverse: Tensor,
    window: int, nowhere: float,
) -> Tensor:  # fmt: skip
    """Normalised cross-correlation with a neighbour on each plane, as torch computes it. (D, H, W)

    Args:
        grey: The view, at least ``MIN_WIDTH`` wide. (H, W) float32
        mean, deviation: Of the window around each of its pixels. (H, W) each
        other: The neighbour. (h, w)
        rays: Those of the view's pixels in the neighbour's axes. (H, W, 3)
        shift: From the neighbour to the view, in its axes, world units.
        lens: Factors on x and y, and what is added: to coordinates from -1 to 1.
        inverse: 1 / depth of the planes. (D, 1, 1) or (D, H, W)
        window: Side of the windows in pixels, odd.
        nowhere: The value where the neighbour does not see the plane.
    """
    n_planes, (height, width) = len(inverse), grey.shape
    scratch = grey.new_empty(n_planes, height * width + 3 * (width + window))
    variance, covariance = grey.new_empty(2, n_planes, height, width)
    images = [image.contiguous() for image in (rays.permute(2, 0, 1), grey, mean, other)]
    planes = inverse.reshape(n_planes, -1).contiguous()
    settings = [window // 2, wp.vec3(*shift), wp.vec4(*lens)]
    arguments = [*settings, planes, *images, scratch, variance, covariance]
    launch(_agree_on_planes, n_planes, arguments, device=grey.device)
    # The square roots of torch are its own.
    seen = variance >= 0
    both = variance.sqrt_().mul_(deviation).clamp_min_(1e-6)
    return torch.where(seen, covariance.div_(both), nowhere)
