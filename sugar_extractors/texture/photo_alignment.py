# SPDX-License-Identifier: Apache-2.0
"""Photographs brought into agreement with a texture: their exposure, small shifts, and outliers.

Cameras and meshes are never exact, so photographs of one place differ by some pixels, and their
mean is blurred. Each photograph is compared with the render of the texture that all of them made,
and moved by the optical flow between both (Lucas and Kanade, 1981, in a pyramid). What differs
even so is no part of the surface and counts little.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

WINDOW = 6  # radius in pixels of the windows that move together
LEVELS = 3
STEPS = 3
LARGE = 1200  # pixels along the longest side
STIFFNESS = 2e-4  # squared gradients, below which a window does not move
MAX_SHIFT = 0.01  # of the longest side
OUTLIER = 3.0  # residuals of so many times the usual one count half
MIN_ERROR = 0.02
MIN_WEIGHT = 1e-5  # of what differs, for places that nothing else shows
OUTLIER_COLOR = 0.25  # differences of colour that say nothing about the exposure


def smoothed(planes: Tensor, radius: int) -> Tensor:
    """Means over windows, twice. (C, H, W) -> (C, H, W)"""
    for dim in (1, 2, 1, 2):
        size = planes.shape[dim]
        pad = (0, 0, radius, radius) if dim == 1 else (radius, radius)
        padded = functional.pad(planes, pad)
        # A sum of slices takes a quarter of the time of pooling on the CPU, and has the same bits.
        total = padded.narrow(dim, 0, size).clone()
        for start in range(1, 2 * radius + 1):
            total += padded.narrow(dim, start, size)
        at = torch.arange(size, device=planes.device)
        count = (at + radius + 1).clamp_max(size) - (at - radius).clamp_min(0)
        planes = total / (count[:, None] if dim == 1 else count)
    return planes


def moved_by(planes: Tensor, flow: Tensor, mode: str = "bilinear") -> Tensor:
    """Each pixel from where the flow points. (C, H, W), (2, H, W) in pixels -> (C, H, W)"""
    _, height, width = planes.shape
    y = torch.arange(height, device=planes.device) + 0.5
    x = torch.arange(width, device=planes.device) + 0.5
    at = torch.stack([(x + flow[0]) / width, (y[:, None] + flow[1]) / height], dim=-1) * 2 - 1
    return functional.grid_sample(
        planes[None], at[None], mode=mode, padding_mode="border", align_corners=False
    )[0]


def optical_flow(image: Tensor, target: Tensor, inside: Tensor) -> Tensor:
    """Where each pixel of the target is in the image, as an offset. (2, H, W) pixels

    Args:
        image: (C, H, W) in [0, 1]
        target: (C, H, W) in [0, 1]
        inside: How much each pixel counts. (H, W) in [0, 1]
    """
    pyramid = [(image, target, inside[None])]
    while len(pyramid) < LEVELS and min(pyramid[-1][0].shape[1:]) >= 8 * WINDOW:
        pyramid.append(tuple(functional.avg_pool2d(planes[None], 2)[0] for planes in pyramid[-1]))
    flow = torch.zeros(2, *pyramid[-1][0].shape[1:], device=image.device)
    for image, target, inside in reversed(pyramid):
        size = image.shape[1:]
        if flow.shape[1:] != size:
            flow = 2 * functional.interpolate(flow[None], size, mode="bilinear")[0]
        # The finest level of a large image would take most of the time and add little.
        for _ in range(STEPS if max(size) <= LARGE else 0):
            moved = moved_by(image, flow)
            gy, gx = torch.gradient(moved, dim=(1, 2))
            error = moved - target
            products = torch.stack([gx * gx, gx * gy, gy * gy, gx * error, gy * error]).sum(dim=1)
            xx, xy, yy, xe, ye = smoothed(products * inside, WINDOW)
            xx, yy = xx + STIFFNESS, yy + STIFFNESS
            step = torch.stack([xy * ye - yy * xe, xy * xe - xx * ye]) / (xx * yy - xy * xy)
            flow = flow + step.clamp(-1, 1)
        flow = smoothed(flow, WINDOW // 2)
    limit = MAX_SHIFT * max(flow.shape[1:])
    return flow * (limit / flow.norm(dim=0).clamp_min(limit))


def aligned(image: Tensor, target: Tensor, covered: Tensor, gain: Tensor) -> Tensor:
    """A photograph moved to the places of a render; what differs even so counts little.

    Args:
        image: Colours and how much each pixel counts. (4, H, W) in [0, 1]
        target: The render. (3, H, W) in [0, 1]
        covered: Its pixels that show the surface. (H, W) bool
        gain: That of :func:`gain_between`. (3, 1, 1)
    """
    colors, weight = image.split([3, 1])
    inside = weight[0] * covered
    greys = (planes.mean(dim=0, keepdim=True) for planes in (colors * gain, target))
    flow = optical_flow(*greys, inside)
    # Bilinear twice would blur. Bicubic reads two pixels around, of which all have to count.
    colors = moved_by(colors, flow, "bicubic").clamp(0, 1)
    weight = moved_by(-functional.max_pool2d(-weight, 5, 1, 2), flow)
    agreement = _agreement(colors * gain, target, inside).clamp_min(MIN_WEIGHT)
    return torch.cat([colors, weight * agreement])


def gain_between(image: Tensor, target: Tensor, covered: Tensor) -> Tensor:
    """Gain per channel that brings a photograph to a render. Shapes as of :func:`aligned`"""
    colors, weight = image.split([3, 1])
    # By the means: least squares would darken, because noise counts as a smaller gain.
    weight = weight * covered * ((colors - target).abs().amax(dim=0) < OUTLIER_COLOR)
    above, below = ((planes * weight).sum(dim=(1, 2)) + 1e-3 for planes in (target, colors))
    return (above / below)[:, None, None]


def _agreement(colors: Tensor, target: Tensor, inside: Tensor) -> Tensor:
    """How much colours are those of a target: 1 where they are, down to 0. (H, W)"""
    error = (colors - target).square().mean(dim=0)
    error, counts = smoothed(torch.stack([error * inside, inside]), 2)
    error = error / counts.clamp_min(1e-6)
    within = error[inside > 0]
    usual = within.median().clamp_min(MIN_ERROR**2) if within.numel() else MIN_ERROR**2
    return 1 / (1 + (error / (OUTLIER**2 * usual)).square())
