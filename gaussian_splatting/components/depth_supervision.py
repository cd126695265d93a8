# SPDX-License-Identifier: Apache-2.0
"""Depth maps of photographs as a loss term: rendered depth is compared where a map knows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from gaussian_splatting.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.depth_maps import KnownDepths
from gaussian_splatting.engine.component import Component
from gaussian_splatting.engine.loss_terms import LossTerm
from gaussian_splatting.engine.training_views import ImageStrip, TrainingView
from gaussian_splatting.rasterization import RenderOutput

NAME = "depth"
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

    def features(self, gaussians: Gaussians, view: TrainingView) -> Tensor:
        """Reciprocal depths, which the term reads blended. (N, 1)"""
        return inverse_depths(gaussians, view.camera)

    def terms(self, view: TrainingView) -> Sequence[LossTerm]:
        """The depth term with the weight of the iteration."""
        return (depth_term(self._known, self._known.weight * self._weight(view.iteration)),)

    def view_figures(self, camera: Camera, output: RenderOutput) -> dict[str, float]:
        """Median relative error of depth, where a depth map says what it is."""
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
    """Reciprocals of the depths of Gaussians. (N, 1)

    Blended reciprocals are bounded where something far away shines through, blended depths are not.
    """
    depth = camera.coordinate(gaussians.means, 2)
    return 1 / depth.clamp_min(camera.near)[:, None]


def depth_term(known: KnownDepths, weight: float) -> LossTerm:
    """Mean relative error of reciprocal depth where a depth map says what it is."""

    def value(strip: ImageStrip) -> Tensor:
        blended = strip.feature(NAME)[..., 0]
        depth = known.of(strip.view.camera, blended.device)
        if depth is None:
            return blended.sum() * 0
        counted = strip.view.counted_pixels
        if counted is not None:
            depth = depth * counted
        strip_depth = strip.rows_of(depth)[strip.counted_rows]
        is_known = (strip_depth > 0).to(blended.dtype)
        errors = blended * strip_depth - is_known
        # Quadratic where sensors are no better, or their noise would drive Gaussians apart.
        errors = huber_loss(errors, torch.zeros_like(errors), reduction="sum", delta=DEPTH_NOISE)
        return errors / (DEPTH_NOISE * (depth > 0).sum().clamp_min(1))

    return LossTerm(NAME, weight, "image", value)
