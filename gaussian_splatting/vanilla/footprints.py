# SPDX-License-Identifier: Apache-2.0
"""What Gaussians show of the photographs: how many pixels, and how many of them badly.

After FastGS (2025), which adds Gaussians only where several views agree that pixels are wrong, and
removes them by the same score. A feature that is zero on all Gaussians changes no picture, but its
gradient is a sum over pixels: of the Gaussian's blending weight times what the pixel sends back.
Sent back are ones, and ones where the picture is wrong. So the views that are trained on say it
beside their gradients, by the kernels that are there and in the same order of sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.engine.masking import Target, exposed_strip, is_counted
from gaussian_splatting.engine.strips import ImageTerm, StripMaps
from gaussian_splatting.optim.densification import DensificationConfig
from sugar_utils.settings import flag

Densification = Literal["reference", "scored"]

N_MARKS = 2
"""Features: pixels in error, and pixels."""

FOOTPRINTS = "footprints"
"""Name of the sums in checkpoints."""


@dataclass(frozen=True)
class ScoreConfig:
    """Which Gaussians have children, and which are removed because they show next to nothing.

    Attributes:
        views: Views before a round of densification that are asked.
        error: Mean absolute difference of the colours, 0 to 1, from which a pixel is wrong.
        wrong_share: What a Gaussian must show of such pixels to be cloned or split, in the mean of
            the views that see it: a share of what Gaussians show of any pixels in the mean.
        shown_pixels: What a faint Gaussian must show of any pixels not to be removed.
        faint: Opacity below which it is faint. Others may be hidden in the views that were asked.
        removals: Shares of the densification; removed is in the rounds before them.
    """

    densification: Densification | None = flag(
        None, "reference: clone or split where the gradient is large; scored: only where the "
        "Gaussian shows wrong pixels as well, and remove faint ones that show next to nothing; "
        "unset: as --preset",
        group="vanilla stage", choices=get_args(Densification), idle="with --gs_output_dir",
    )  # fmt: skip
    views: int = 10
    error: float = 0.05
    wrong_share: float = 0.2
    shown_pixels: float = 0.1
    faint: float = 0.1
    removals: tuple[float, ...] = (0.5, 0.75, 1.0)


class FootprintWatch:
    """Adds up what the last views before a round of densification say.

    The views of a step have a sum of their own first, so that the total does not depend on which
    process saw them.

    Args:
        n: Number of Gaussians.
        device: Where they are.
        config: Whom to ask; None for nobody.

    Attributes:
        sums: Of each Gaussian: pixels in error, pixels, and views that saw it. (N, 3)
    """

    def __init__(self, n: int, device: torch.device, config: ScoreConfig | None) -> None:
        self._config = config
        self.sums = torch.zeros(n, N_MARKS + 1, device=device)
        self._step: Tensor | None = None

    def marks(
        self, iteration: int, rules: DensificationConfig, views_per_step: int
    ) -> Tensor | None:
        """The features to blend, a leaf; None where the views of an iteration are not asked. (N, 2)

        Asked are the last ones before a round.
        """
        if self._config is None:
            return None
        steps, interval = -(-self._config.views // views_per_step), rules.densification_interval
        following = -(-iteration // interval) * interval
        if not rules.due(following) or following - iteration >= steps:
            return None
        return self.sums.new_zeros(self.sums.shape[0], N_MARKS).requires_grad_()

    def term(self, seen: Target) -> ImageTerm:
        """What a view sends back to the features; its loss is always zero."""

        def evaluate(maps: StripMaps) -> tuple[Tensor, dict[str, Tensor]]:
            with torch.no_grad():
                image = exposed_strip(maps, seen.exposure, seen.inside)
                wrong = _wrong(image, maps, seen.photograph, self._config.error)
                sent = torch.stack([wrong, torch.ones_like(wrong)], dim=-1)[maps.counted]
            return (maps.features[maps.counted] * sent).sum(), {}

        return ImageTerm(0, evaluate)

    def see(self, d_marks: Tensor, visible: Tensor) -> None:
        """One more view of this step: gradient of the marks, (N, 2), and who was seen, (N,) bool"""
        found = torch.cat([d_marks, visible.to(d_marks.dtype)[:, None]], dim=1)
        self._step = found if self._step is None else self._step.add_(found)

    def step_statistics(self) -> tuple[Tensor, ...]:
        """What the processes of a run add up before the step is counted."""
        return () if self._step is None else (self._step,)

    def count_step(self) -> None:
        """The step's views count from now on."""
        if self._step is not None:
            self.sums += self._step
            self._step = None

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return {FOOTPRINTS: self.sums} if self._config is not None else {}

    def restore(self, state: dict[str, Any], n: int, device: torch.device) -> None:
        """What a checkpoint of N Gaussians has, or nothing yet."""
        self.restart(n)
        if FOOTPRINTS in state:
            self.sums = state[FOOTPRINTS].to(device)

    def may_grow(self) -> Tensor | None:
        """Gaussians that show enough of what is wrong; None where nothing is scored. (N,) bool

        Enough is measured by the others, not in pixels: those are coarse while images are small,
        and small images hold fewer of them for each Gaussian.
        """
        if self._config is None:
            return None
        wrong, _, views = self.sums.unbind(dim=1)
        # By numpy: torch's sums depend on the number of threads.
        _, shown, seen = self.sums.cpu().numpy().sum(axis=0, dtype=np.float64)
        enough = self._config.wrong_share * float(shown / max(seen, 1.0))
        return (views > 0) & (wrong >= enough * views)

    def idle(self, opacities: Tensor, iteration: int, interval: int, until: int) -> Tensor | None:
        """Faint Gaussians that show next to nothing, in the rounds that remove them. (N,) bool

        Args:
            opacities: (N,)
            iteration: Of the round.
            interval: Iterations between two rounds.
            until: Iteration at which densification ends.
        """
        if self._config is None:
            return None
        times = (share * until for share in self._config.removals)
        if not any(iteration < time <= iteration + interval for time in times):
            return None
        _, shown, views = self.sums.unbind(dim=1)
        hidden = (views > 0) & (shown < self._config.shown_pixels * views)
        return hidden & (opacities < self._config.faint)

    def restart(self, n: int) -> None:
        """Nothing is known of N Gaussians."""
        self.sums = self.sums.new_zeros(n, N_MARKS + 1)


def _wrong(image: Tensor, maps: StripMaps, photograph: Tensor, threshold: float) -> Tensor:
    error = (image - maps.part_of(photograph[..., :3])).abs().mean(dim=-1)
    counted = is_counted(photograph)
    if counted is not None:
        error = error * counted[maps.shown.start : maps.shown.stop]
    return (error > threshold).to(error.dtype)
