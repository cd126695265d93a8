# SPDX-License-Identifier: Apache-2.0
"""Training views that a trained model cannot reproduce: their poses or images are wrong.

Views are compared at a small size, after a gain and an offset per channel, so that neither detail
nor exposure counts. A view far below the others is rendered again from the pose that fits best; if
that does not help, it contradicts the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.masking import is_counted
from gaussian_splatting.engine.poses import fitted_pose
from gaussian_splatting.engine.reporting.evaluation import plain_background, psnr
from gaussian_splatting.engine.stage import Stage
from gaussian_splatting.optim.learned_exposure import fit_gain_and_offset

SIDE = 240
"""Longest side in pixels at which views are compared."""

MIN_GAP, SPREAD = 7.0, 5.0
"""Decibels below the median, and the same in standard deviations, from which a view is suspect."""

CURED_SHARE = 0.5
"""Share of its gap to the median that a suspect view must gain by another pose to be kept."""

MAX_SHARE = 0.2
"""If more views are suspect, the model is at fault and not they."""

MIN_VIEWS = 8


@torch.no_grad()
def contradicting_views(
    stage: Stage,
    cameras: Sequence[Camera],
    load_image: Callable[[Camera], Tensor],
    white_background: bool,
) -> dict[str, str]:
    """Views whose colour residual is far above the others, by name, with the reason.

    Args:
        stage: Its model is rendered; not changed.
        load_image: Returns the image of a camera, as of ``ImageStore.shown``.
    """
    if len(cameras) < MIN_VIEWS:
        return {}
    if stage.poses is not None:
        cameras = [stage.poses.moved(camera) for camera in cameras]
    views = [smaller(camera, load_image(camera)) for camera in cameras]
    found = np.array([_decibels(stage, view, image) for view, image in views])
    middle = float(np.median(found))
    spread = 1.4826 * float(np.median(np.abs(found - middle)))
    limit = middle - max(MIN_GAP, SPREAD * spread)
    suspects = np.flatnonzero(found < limit)
    if len(suspects) > MAX_SHARE * len(cameras):
        return {}
    contradicting = {}
    for row in suspects:
        view, image = views[row]
        gaussians = stage.model.cloud.activate()
        background = plain_background(white_background, stage.model.device)
        moved = fitted_pose(gaussians, view, image, stage.extent, background, exposed=True)
        gained = _decibels(stage, moved, image) - found[row]
        if gained < CURED_SHARE * (middle - found[row]):
            contradicting[view.name] = (
                f"the model cannot reproduce it, {found[row]:.1f} dB instead of {middle:.1f} dB"
            )
    return contradicting


def smaller(camera: Camera, image: Tensor) -> tuple[Camera, Tensor]:
    """A view and its image, at most ``SIDE`` pixels long. (H, W, C) uint8"""
    small = camera.reduced(SIDE)
    values = image.permute(2, 0, 1)[None].float()
    values = functional.interpolate(values, (small.height, small.width), mode="area")[0]
    return small, values.permute(1, 2, 0).round().to(torch.uint8)


def _decibels(stage: Stage, camera: Camera, image: Tensor) -> float:
    """PSNR after gain and offset of what counts in a view; that of equal images is 100."""
    render = stage.render(camera, geometry=False).image.clamp(0, 1)
    target = image[..., :3].to(render) / 255
    gain, offset = fit_gain_and_offset(render, target)
    counted = is_counted(image)
    weights = None if counted is None else counted.to(render.device).double()
    if weights is not None and not bool(weights.any()):
        return 0.0
    fitted = (render.double() * gain + offset).to(render.dtype)
    return min(psnr(fitted, target, weights), 100.0)
