# SPDX-License-Identifier: Apache-2.0
"""Depth maps as a loss term, weighted by the lack of texture in the image.

Where images have texture, they determine depth better than estimators and most sensors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.maps.depth_maps import KnownDepths
from gaussian_splatting.engine.component import Component
from gaussian_splatting.engine.loss_terms import LossTerm
from gaussian_splatting.engine.training_views import AddedLoss, ImageStrip, TrainingView
from gaussian_splatting.rasterization import RenderOutput

NAME = "depth"
N_COLUMNS = 2  # of what is blended for it
SOLID_ALPHA = 0.5  # opacity from which a pixel has a depth
DEPTH_NOISE = 0.1  # relative error up to which depth counts by its square
DEPTH_SHARE = 0.1
"""Share of the weight of depth maps that is left at the end of the vanilla stage, and later."""


class DepthSupervision(Component):
    """Draws rendered depth towards that of depth maps, and measures its error.

    Args:
        weight: Weight of the term in an iteration, as a factor of that of the maps.
    """

    name = NAME

    def __init__(self, known: KnownDepths, weight: Callable[[int], float]) -> None:
        self._known = known
        self._weight = weight

    def before_view(self, view: TrainingView) -> TrainingView:
        """Add the depth term, with the weight of the iteration; it reads blended depths."""
        term = depth_term(self._known, self._known.weight * self._weight(view.iteration))
        return view.with_loss(AddedLoss(self.name, (term,), inverse_depths))

    def view_figures(self, camera: Camera, output: RenderOutput) -> dict[str, float]:
        """Median relative error of depth where a depth map has values."""
        depth = self._known.of(camera, output.depth.device)
        if depth is None:
            return {}
        is_solid = (output.alpha > SOLID_ALPHA) & (depth > 0)
        errors = (output.depth / output.alpha / depth - 1).abs()[is_solid]
        return {"depth_error": float(errors.median())} if len(errors) else {}


def depth_supervision(
    known: KnownDepths, weight: Callable[[int], float]
) -> tuple[DepthSupervision, ...]:
    """The component where the scene has depth maps; else none."""
    return (DepthSupervision(known, weight),) if known.maps else ()


def later_weight(iteration: int) -> float:
    """Factor of the weight in the stages after the vanilla one."""
    return DEPTH_SHARE


def falling_weight(last: int) -> Callable[[int], float]:
    """Factor of the weight that falls log-linearly from 1 to ``DEPTH_SHARE`` at the last."""

    def weight(iteration: int) -> float:
        return DEPTH_SHARE ** (iteration / last)

    return weight


def inverse_depths(gaussians: Gaussians, camera: Camera) -> Tensor:
    """Reciprocals of the depths of Gaussians, and their squares. (N, 2)

    Blended reciprocals are bounded where something far away shines through, blended depths are not.
    """
    depth = camera.coordinate(gaussians.means, 2)
    inverse = 1 / depth.clamp_min(camera.near)[:, None]
    return torch.cat([inverse, inverse.square()], dim=1)


def depth_errors(blended: Tensor, depth: Tensor) -> Tensor:
    """Errors of what is blended at pixels of known depth; a pseudo-Huber function. (...)

    It is of the mean square of z* / z_i - 1 over the Gaussians of a pixel: what lies before it
    or behind is drawn to the surface even where the mean is right. What nothing covers counts
    as infinitely far.

    Args:
        blended: Reciprocal depths and their squares, blended; see :func:`inverse_depths`. (..., 2)
        depth: z*. (...) world units
    """
    mean_square = depth.square() * blended[..., 1] - 2 * depth * blended[..., 0] + 1
    # Not negative but for rounding, and the gradient of its root stays finite.
    relative = mean_square.clamp_min(0) / DEPTH_NOISE**2
    return DEPTH_NOISE * ((1 + relative).sqrt() - 1)


def depth_term(known: KnownDepths, weight: float) -> LossTerm:
    """Errors of depth where a depth map has values and the image has no texture."""

    def value(strip: ImageStrip) -> Tensor:
        blended = strip.feature(NAME)
        depth = known.of(strip.view.camera, blended.device)
        if depth is None:
            return blended.sum() * 0
        counted = strip.view.counted_pixels
        if counted is not None:
            depth = depth * counted
        weights = strip.view.texture_weights * (depth > 0)
        strip_depth = strip.rows_of(depth)[strip.counted_rows]
        strip_weights = strip.rows_of(weights)[strip.counted_rows]
        errors = strip_weights * depth_errors(blended, strip_depth)
        return errors.sum() / (depth > 0).sum().clamp_min(1)

    return LossTerm(NAME, weight, "image", value)
