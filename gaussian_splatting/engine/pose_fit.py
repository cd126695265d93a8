# SPDX-License-Identifier: Apache-2.0
"""The pose of a held-out photograph in a world whose other poses were learned.

Learned poses agree with each other, not with poses that nobody learned: the world may have bent by
a pixel. So a held-out view is also measured from the pose in which the finished Gaussians show its
photograph best, as BARF (Lin et al., ICCV 2021, section 4.2) does. The Gaussians stay as they are.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gaussian_splatting.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.masking import is_counted
from gaussian_splatting.engine.poses import with_motion
from gaussian_splatting.losses.exposure import fit_gain_and_offset
from gaussian_splatting.optim.rigid_motion import pose_gradient
from gaussian_splatting.optim.visited_adam import VisitedAdam, rate_at
from gaussian_splatting.rasterization import WARP, Rasterizer, rasterize

STEPS = 50
RATE, FINAL_SHARE = 2e-3, 0.02
"""Radians, and extents of the cameras; the whole way is some 0.03, two degrees."""

_MOVED = ("means", "quats", "sh_rest")


def fitted_pose(
    gaussians: Gaussians,
    camera: Camera,
    photograph: Tensor,
    extent: float,
    background: Tensor,
    *,
    exposed: bool = False,
    rasterizer: Rasterizer = WARP,
) -> Camera:
    """The camera moved to where its photograph is shown best.

    Args:
        gaussians: The model; not changed.
        camera: The view in its known pose.
        photograph: What it took. (H, W, 3) uint8, or (H, W, 4) with a mask
        extent: World units of one extent of the cameras.
        background: Colour behind the Gaussians. (3,)
        exposed: Compare after a gain and an offset per channel.
        rasterizer: Rendering backend.
    """
    leaves = {n: getattr(gaussians, n).detach().clone().requires_grad_(True) for n in _MOVED}
    frozen = replace(gaussians, **leaves)
    target, counted = photograph[..., :3].to(background) / 255, is_counted(photograph)
    weights = torch.ones_like(target[..., :1]) if counted is None else counted[..., None].to(target)
    motion = torch.zeros(1, 6, dtype=torch.float64, device="cpu")
    adam = VisitedAdam(motion.shape, motion.dtype, motion.device)
    best, least = camera, float("inf")
    for step in range(STEPS + 1):
        moved = with_motion(camera, motion[0], extent)
        with torch.enable_grad():
            image = rasterize(frozen, moved, background, rasterizer=rasterizer).image
            if exposed:
                gain, offset = fit_gain_and_offset(image.detach(), target)
                image = image * gain.to(image) + offset.to(image)
            loss = ((image - target).abs() * weights).mean()
            gradients = torch.autograd.grad(loss, list(leaves.values()))
        if float(loss.detach()) < least:
            best, least = moved, float(loss.detach())
        pulls = dict(zip(_MOVED, gradients, strict=True))
        found = pose_gradient(leaves, pulls, torch.from_numpy(moved.center))
        found[3:] *= extent
        adam.gradient[0] = found
        motion = motion - rate_at(RATE, FINAL_SHARE, 0, STEPS, step) * adam.direction()
    return best
