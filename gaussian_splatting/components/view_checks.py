# SPDX-License-Identifier: Apache-2.0
"""Training views that the model contradicts are left out of training, as a component.

A view with a wrong pose, another scene or a large occluder fits far worse than the others, and no
small motion of its camera helps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gaussian_splatting.components.poses import fitted_pose
from gaussian_splatting.data.cameras import Camera, LoadImage
from gaussian_splatting.data.observations import far_below
from gaussian_splatting.engine.component import Component, IterationContext, TrainedStage
from gaussian_splatting.engine.reporting.evaluation import ImageComparison
from gaussian_splatting.engine.view_sampling import smaller
from gaussian_splatting.rasterization import plain_background

LEFT_OUT = "left_out_views"  # key of the views that were left out so far, in a checkpoint
SIDE = 240  # longest side in pixels at which views are compared
MIN_GAP = 7.0
SPREAD = 5.0
"""Decibels below the median, and the same in standard deviations, from which a view is suspect."""
CURED_SHARE = 0.5
"""Share of its gap to the median that a suspect view must gain by another pose to be kept."""
MAX_SHARE = 0.2  # if more views are suspect, the model is at fault and not they
MIN_CHECKED_VIEWS = 8


class ViewChecks(Component):
    """Checks all training views after some iterations; all processes find the same.

    Args:
        keep_views: Names of views that are never left out.
    """

    name = "view checks"

    def __init__(self, iterations: Collection[int], keep_views: Collection[str]) -> None:
        self._iterations = frozenset(iterations)
        self._keep_views = frozenset(keep_views)
        self._left_out: dict[str, str] = {}

    def excluded_views(self) -> Mapping[str, str]:
        """The views that were left out so far: name to reason."""
        return self._left_out

    def looks_at(self, iteration: int) -> bool:
        """Whether a check is due."""
        return iteration in self._iterations

    def after_iteration(self, context: IterationContext) -> None:
        """Find and leave out views."""
        cameras = [camera for camera in context.cameras if camera.name not in self._left_out]
        contradicting = contradicting_views(
            context.stage, cameras, context.load_photograph, context.white_background
        )
        for name in self._keep_views & contradicting.keys():
            del contradicting[name]
        contradicting = context.group.broadcast(contradicting)
        if not contradicting:
            return
        self._left_out |= contradicting
        reasons = ", ".join(f"{name} ({reason})" for name, reason in contradicting.items())
        context.console.warn(
            f"iteration {context.iteration}: left out {len(contradicting)} of "
            f"{len(context.cameras)} training views that contradict the rest: {reasons}; "
            "--keep_views NAME, or all, keeps them"
        )

    def state(self) -> dict[str, Any]:
        """The views that were left out so far."""
        return {LEFT_OUT: dict(self._left_out)} if self._left_out else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take :meth:`state` back."""
        self._left_out = dict(state.get(LEFT_OUT, {}))


@torch.no_grad()
def contradicting_views(
    stage: TrainedStage,
    cameras: Sequence[Camera],
    load_image: LoadImage,
    white_background: bool,
) -> dict[str, str]:
    """Find views with a colour residual far above the others: name to reason."""
    if len(cameras) < MIN_CHECKED_VIEWS:
        return {}
    cameras = [stage.calibrated(camera) for camera in cameras]
    decibels = {}
    for row, camera in enumerate(cameras):
        view, image = smaller(camera, load_image(camera), SIDE)
        decibels[row] = _decibels(stage, view, image)
    middle, suspects = far_below(decibels, MIN_GAP, SPREAD)
    if len(suspects) > MAX_SHARE * len(cameras):
        return {}
    contradicting = {}
    for row in suspects:
        view, image = smaller(cameras[row], load_image(cameras[row]), SIDE)
        gaussians = stage.gaussians()
        background = plain_background(white_background, stage.model.device)
        moved = fitted_pose(gaussians, view, image, stage.extent, background, exposed=True)
        gained = _decibels(stage, moved, image) - decibels[row]
        if gained < CURED_SHARE * (middle - decibels[row]):
            contradicting[view.name] = (
                f"the model cannot reproduce it, {decibels[row]:.1f} dB instead of {middle:.1f} dB"
            )
    return contradicting


def _decibels(stage: TrainedStage, camera: Camera, image: Tensor) -> float:
    """PSNR after gain and offset of what counts in a view; 0 where nothing does."""
    comparison = ImageComparison.of(camera, stage.render(camera, geometry=False).image, image)
    return comparison.fitted_psnr() if comparison.n_pixels else 0.0
