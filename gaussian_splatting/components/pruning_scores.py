# SPDX-License-Identifier: Apache-2.0
"""Pruning scores: how much Gaussians show, and of wrong pixels; they also limit densification.

After FastGS (2025), Gaussians are added only where several views agree that pixels are wrong, and
removed by the same score. A feature that is zero on all Gaussians changes no picture, but its
gradient is a sum over pixels: of the Gaussian's blending weight times what the pixel sends back.
Sent back are ones, and ones where the picture is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.components.view_sums import ViewSums
from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.component import Component, ViewResult
from gaussian_splatting.engine.loss_terms import LossTerm
from gaussian_splatting.engine.model import TrainableModel
from gaussian_splatting.engine.state_schema import N, StateRule
from gaussian_splatting.engine.training_views import AddedLoss, ImageStrip, TrainingView
from sugar_utils.settings import flag

if TYPE_CHECKING:
    from gaussian_splatting.components.densification import DensificationConfig

DensificationRule = Literal["reference", "scored"]
N_SCORES = 2  # features: pixels in error, and pixels
PRUNING_SCORES = "pruning_scores"  # name of the sums in checkpoints


@dataclass(frozen=True)
class ScoreConfig:
    """Which Gaussians have children, and which are removed because they show next to nothing."""

    densification: DensificationRule | None = flag(
        None,
        "reference: clone or split where the gradient is large; scored: only where the "
        "Gaussian shows wrong pixels as well, and remove faint ones that show next to nothing; "
        "unset: as --preset",
        group="vanilla stage",
        choices=get_args(DensificationRule),
        no_effect_when="with --gs_output_dir",
    )
    views: int = 10
    # Mean absolute difference of the colours, 0 to 1, from which a pixel is wrong.
    error: float = 0.05
    # What a Gaussian must show of such pixels to be cloned or split, in the mean of the views that
    # see it: a share of what Gaussians show of any pixels in the mean.
    wrong_share: float = 0.2
    shown_pixels: float = 0.1  # what a faint Gaussian must show of any pixels not to be removed
    faint: float = 0.1
    removals: tuple[float, ...] = (0.5, 0.75, 1.0)


class PruningScores(Component):
    """Of each Gaussian: pixels in error, pixels, and views, of the last before a round. (N, 3)

    Args:
        last_round: Iteration at which densification ends; faint Gaussians are removed at shares
            of it.
    """

    name = PRUNING_SCORES
    obeys_step_mask = True  # views with a probe are not recorded
    schema = (StateRule(PRUNING_SCORES, (N, N_SCORES + 1), not_negative=True),)

    def __init__(
        self,
        n: int,
        device: torch.device,
        config: ScoreConfig,
        rounds: DensificationConfig,
        last_round: int,
        views_per_step: int = 1,
    ) -> None:
        self.sums = ViewSums(n, N_SCORES + 1, device)
        self._config = config
        self._rounds = rounds
        self._last_round = last_round
        self._views_per_step = views_per_step
        self._probe: Tensor | None = None  # of the view in work

    def collects(self, iteration: int) -> bool:
        """Whether an iteration is among the last views before a round."""
        n_steps = -(-self._config.views // self._views_per_step)
        interval = self._rounds.densification_interval
        next_round = -(-iteration // interval) * interval
        return self._rounds.due(next_round) and next_round - iteration < n_steps

    def before_view(self, view: TrainingView) -> TrainingView:
        """Add a term that sends ones back to a probe, in the views that are counted."""
        self._probe = None
        if not self.collects(view.iteration):
            return view
        # Its loss is always zero.
        term = LossTerm(PRUNING_SCORES, 1.0, "image", self._sent_back, is_reported=False)
        return view.with_loss(AddedLoss(self.name, (term,), self._new_probe))

    def after_view(self, result: ViewResult, model: TrainableModel) -> None:
        """Add the gradient of the probe, and which Gaussians the view shows."""
        scores = None if self._probe is None else self._probe.grad
        if scores is not None:
            is_visible = result.visible.to(scores.dtype)[:, None]
            self.sums.add(torch.cat([scores, is_visible], dim=1))
        self._probe = None

    def statistics(self) -> tuple[Tensor, ...]:
        """Sums of the views of this step."""
        return self.sums.statistics()

    def after_step(self, iteration: int) -> None:
        """Count the step."""
        self.sums.count_step()

    def keep_rows(self, rows: Tensor) -> None:
        """Keep the rows of the Gaussians that stay in the model. (N,) bool"""
        self.sums.keep_rows(rows)

    def restart(self, n: int) -> None:
        """Forget all scores; there are N Gaussians now."""
        self.sums.restart(n)

    def state(self) -> dict[str, Tensor]:
        """Sums over the views since the last round. (N, 3)"""
        return {PRUNING_SCORES: self.sums.total}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take the sums back, or begin anew where a checkpoint has none."""
        self.restart(len(self.sums.total))
        if PRUNING_SCORES in state:
            self.sums.total = state[PRUNING_SCORES].to(self.sums.total.device)

    def may_grow(self) -> Tensor:
        """Select Gaussians that show more wrong pixels than others. (N,) bool"""
        wrong_pixels, _, n_views = self.sums.total.unbind(dim=1)
        # By numpy: torch's sums depend on the number of threads.
        totals = self.sums.total.cpu().numpy().sum(axis=0, dtype=np.float64)
        _, all_pixels, all_views = totals
        enough = self._config.wrong_share * float(all_pixels / max(all_views, 1.0))
        return (n_views > 0) & (wrong_pixels >= enough * n_views)

    def unused(self, opacities: Tensor, iteration: int) -> Tensor | None:
        """Faint Gaussians that show next to nothing, in the rounds that remove them. (N,) bool"""
        interval = self._rounds.densification_interval
        times = [share * self._last_round for share in self._config.removals]
        if not any(iteration < time <= iteration + interval for time in times):
            return None
        _, pixels, n_views = self.sums.total.unbind(dim=1)
        is_hidden = (n_views > 0) & (pixels < self._config.shown_pixels * n_views)
        return is_hidden & (opacities < self._config.faint)

    def _new_probe(self, gaussians: Gaussians, camera: Camera) -> Tensor:
        """Zeros whose gradients are the scores. (N, 2)"""
        probe = self.sums.total.new_zeros(len(gaussians), N_SCORES).requires_grad_()
        self._probe = probe
        return probe

    def _sent_back(self, strip: ImageStrip) -> Tensor:
        with torch.no_grad():
            error = (strip.exposed_color() - strip.target_color()).abs().mean(dim=-1)
            counted = strip.counted_pixels()
            if counted is not None:
                error = error * counted
            is_wrong = (error > self._config.error).to(error.dtype)
            sent = torch.stack([is_wrong, torch.ones_like(is_wrong)], dim=-1)
        return (strip.feature(PRUNING_SCORES) * sent[strip.counted_rows]).sum()
