# SPDX-License-Identifier: Apache-2.0
"""Adaptive density control of 3DGS (Kerbl et al. 2023, section 5), and what Gaussians show.

After FastGS (2025), Gaussians are added only where several views agree that pixels are wrong, and
removed by the same score. A feature that is zero on all Gaussians changes no picture, but its
gradient is a sum over pixels: of the Gaussian's blending weight times what the pixel sends back.
Sent back are ones, and ones where the picture is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.cloud import rotation_matrices
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.strips import ImageTerm, StripMaps
from gaussian_splatting.engine.training_views import Target
from gaussian_splatting.optim.adam import GroupedAdam
from gaussian_splatting.shared_flags import max_gaussians
from gaussian_splatting.sky_sphere import SkySphere
from sugar_utils.device import constants
from sugar_utils.flags import positive_float, positive_int
from sugar_utils.settings import flag

SPLIT_CHILDREN = 2
SPLIT_SHRINK = 0.8 * SPLIT_CHILDREN
RESET_OPACITY = 0.01
LARGE_SHARE = 0.1
FINEST_ANGLE = 0.02
"""Radians, a degree: a Gaussian of the sky that is smaller has no children. By their size in the
world, which is that of a hundredth of a pixel, they would have hundreds of thousands."""

_iterations = partial(flag, group="vanilla trainer", parse=positive_int)

Densification = Literal["reference", "scored"]
N_SCORES = 2  # features: pixels in error, and pixels
PRUNING_SCORES = "pruning_scores"  # name of the sums in checkpoints


@dataclass(frozen=True)
class DensificationConfig:
    """When and how the number of Gaussians changes.

    Gradients are mean norms of the screen-space gradient, positions in units of half the image
    size.
    """

    densify_from_iter: int = _iterations(500, "densify after this iteration")
    densify_until_iter: int = _iterations(
        15_000, "densification and opacity resets end before this iteration"
    )
    densification_interval: int = _iterations(100, "iterations between two rounds of densification")
    densify_grad_threshold: float = _iterations(
        2e-4,
        "mean screen-space gradient from which a Gaussian is cloned or split",
        parse=positive_float,
    )
    percent_dense: float = _iterations(
        0.01,
        "share of the extent above which Gaussians are split instead of cloned",
        parse=positive_float,
    )
    prune_opacity: float = 0.005
    opacity_reset_interval: int = _iterations(
        3_000, "iterations between two resets of all opacities"
    )
    max_gaussians: int | None = max_gaussians()

    def due(self, iteration: int) -> bool:
        within = self.densify_from_iter < iteration < self.densify_until_iter
        return within and iteration % self.densification_interval == 0

    def reset_due(self, iteration: int) -> bool:
        return iteration < self.densify_until_iter and iteration % self.opacity_reset_interval == 0


class ViewSums:
    """Sums of (N, width) columns over views.

    The views of a step have a sum of their own first: the total depends on no order of processes.
    """

    def __init__(self, n: int, width: int, device: torch.device) -> None:
        self.total = torch.zeros(n, width, device=device)
        self._step: Tensor | None = None

    def add(self, found: Tensor) -> None:
        """One more view of this step. (N, width)"""
        self._step = found if self._step is None else self._step.add_(found)

    def step_statistics(self) -> tuple[Tensor, ...]:
        """What the processes of a run add up before the step is counted."""
        return () if self._step is None else (self._step,)

    def count_step(self) -> None:
        """The step's views count from now on."""
        if self._step is not None:
            self.total += self._step
            self._step = None

    def keep(self, rows: Tensor) -> None:
        """Those of some Gaussians. (N,) bool"""
        self.total = self.total[rows]

    def restart(self, n: int) -> None:
        """Nothing is known of N Gaussians."""
        self.total = self.total.new_zeros(n, self.total.shape[1])


class DensificationStatistics(ViewSums):
    """Norms of screen-space gradients, and views that saw a Gaussian, between two rounds."""

    def __init__(self, n: int, device: torch.device) -> None:
        super().__init__(n, 2, device)

    def see(self, d_means2d: Tensor, visible: Tensor, camera: Camera) -> None:
        """One more view: gradients of centres, (N, 2) per pixel, and who was seen, (N,) bool"""
        half_size = constants((camera.width / 2, camera.height / 2), d_means2d.device)
        norm = torch.linalg.vector_norm(d_means2d * half_size, dim=-1)
        seen = visible.to(norm.dtype)
        self.add(torch.stack([norm * seen, seen], dim=1))

    def mean(self) -> Tensor:
        """Mean gradient norm, 0 for Gaussians no view saw. (N,)"""
        gradient_sum, views = self.total.unbind(dim=1)
        return torch.where(views > 0, gradient_sum / views, 0.0)

    def state(self) -> dict[str, Tensor]:
        return dict(zip(("gradient_sum", "views"), self.total.unbind(dim=1), strict=True))

    def restore(self, state: dict[str, Any], n: int) -> None:
        self.restart(n)
        if "gradient_sum" in state:
            saved = torch.stack([state["gradient_sum"], state["views"]], dim=1)
            self.total = saved.to(self.total.device)


def densify_and_prune(
    optimizer: GroupedAdam,
    gradient: Tensor,
    config: DensificationConfig,
    *,
    extent: float,
    remove_large: bool,
    generator: torch.Generator,
    sky: SkySphere | None = None,
    may_grow: Tensor | None = None,
    unused: Tensor | None = None,
    allowed: Callable[[int], int] | None = None,
) -> None:
    """One round of clone, split and prune.

    The 3DGS rule that also removes Gaussians by their screen radius is left out: its counter is
    cleared by the clone step just before it is read, so it never acts.

    Args:
        gradient: Mean norms of the screen-space gradient. (N,)
        may_grow: Gaussians that may be cloned or split; None for all. (N,) bool
        unused: Gaussians to remove unless they are cloned or split; None for none. (N,) bool
        allowed: Says how many Gaussians there may be, from how many this round would add.
    """
    largest = optimizer.parameters["log_scales"].detach().amax(dim=-1).exp()
    if sky is not None:
        far = sky.distance(optimizer.parameters["means"].detach())
        gradient = torch.where(largest < FINEST_ANGLE * far, 0.0, gradient)
    if may_grow is not None:
        gradient = torch.where(may_grow, gradient, 0.0)
    grow = _within_budget(gradient, config, allowed)
    small = largest <= config.percent_dense * extent
    clone = grow & small
    split = grow & ~small
    rows = {name: p.detach() for name, p in optimizer.parameters.items()}
    n_children = int(clone.sum()) + SPLIT_CHILDREN * int(split.sum())
    children = _split(rows, split, generator)
    if sky is not None:
        children["means"] = sky.returned(children["means"], far[split].repeat(SPLIT_CHILDREN))
    optimizer.append_rows({name: torch.cat([p[clone], children[name]]) for name, p in rows.items()})
    gone = split if unused is None else split | (unused & ~grow)
    keep = torch.cat([~gone, split.new_ones(n_children)])
    parameters = {name: p.detach() for name, p in optimizer.parameters.items()}
    keep &= parameters["opacity_logits"].squeeze(-1) >= _logit(config.prune_opacity)
    if remove_large:
        fits = parameters["log_scales"].amax(dim=-1) <= math.log(LARGE_SHARE * extent)
        keep &= fits if sky is None else fits | (sky.distance(parameters["means"]) > 0)
    optimizer.keep_rows(keep)


def reset_opacity(optimizer: GroupedAdam, sky: SkySphere | None = None) -> None:
    """Lower all opacities, but for those of a sky, to at most 0.01 and clear their moments."""
    logits = optimizer.parameters["opacity_logits"].detach()
    lowered = logits.clamp_max(_logit(RESET_OPACITY))
    if sky is not None:
        far = sky.distance(optimizer.parameters["means"].detach())[:, None] > 0
        lowered = torch.where(far, logits, lowered)
    optimizer.replace("opacity_logits", lowered)


def _within_budget(
    gradient: Tensor, config: DensificationConfig, allowed: Callable[[int], int] | None
) -> Tensor:
    """Gaussians to clone or split: each adds one, the strongest first if not all may. (N,) bool"""
    grow = gradient >= config.densify_grad_threshold
    limits = [] if config.max_gaussians is None else [config.max_gaussians]
    if not limits and allowed is None:
        return grow
    wanted = int(grow.sum())
    if allowed is not None:
        limits.append(allowed(wanted))
    budget = max(0, min(limits) - gradient.shape[0])
    if wanted <= budget:
        return grow
    order = torch.argsort(torch.where(grow, gradient, -1.0), descending=True, stable=True)
    chosen = torch.zeros_like(grow)
    chosen[order[:budget]] = True
    return chosen


def _split(rows: dict[str, Tensor], split: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Children drawn from each split Gaussian's own distribution, a little over half its size."""
    parents = {n: p[split].repeat(SPLIT_CHILDREN, *([1] * (p.dim() - 1))) for n, p in rows.items()}
    scales = parents["log_scales"].exp()
    # Drawn on the CPU: a GPU's generator gives other numbers on another model.
    noise = torch.randn(scales.shape, generator=generator, device="cpu").to(scales.device)
    rotations = rotation_matrices(torch.nn.functional.normalize(parents["quats"], dim=-1))
    offsets = (rotations @ (scales * noise)[..., None]).squeeze(-1)
    return {
        **parents,
        "means": parents["means"] + offsets,
        "log_scales": parents["log_scales"] - math.log(SPLIT_SHRINK),
    }


def _logit(p: float) -> float:
    return math.log(p / (1.0 - p))


@dataclass(frozen=True)
class ScoreConfig:
    """Which Gaussians have children, and which are removed because they show next to nothing."""

    densification: Densification | None = flag(
        None,
        "reference: clone or split where the gradient is large; scored: only where the "
        "Gaussian shows wrong pixels as well, and remove faint ones that show next to nothing; "
        "unset: as --preset",
        group="vanilla stage",
        choices=get_args(Densification),
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


class PruningScores(ViewSums):
    """Of each Gaussian: pixels in error, pixels, and views, of the last before a round. (N, 3)"""

    def __init__(self, n: int, device: torch.device, config: ScoreConfig | None) -> None:
        super().__init__(n, N_SCORES + 1, device)
        self._config = config

    def probe(
        self, iteration: int, rules: DensificationConfig, views_per_step: int
    ) -> Tensor | None:
        """The features to blend, a leaf; None but for the last views before a round. (N, 2)"""
        if self._config is None:
            return None
        steps = -(-self._config.views // views_per_step)
        interval = rules.densification_interval
        following = -(-iteration // interval) * interval
        if not rules.due(following) or following - iteration >= steps:
            return None
        return self.total.new_zeros(len(self.total), N_SCORES).requires_grad_()

    def term(self, seen: Target) -> ImageTerm:
        """What a view sends back to the features; its loss is always zero."""

        def evaluate(maps: StripMaps) -> tuple[Tensor, dict[str, Tensor]]:
            with torch.no_grad():
                image = seen.exposed(maps)
                error = (image - maps.part_of(seen.photograph[..., :3])).abs().mean(dim=-1)
                counted = seen.counted
                if counted is not None:
                    error = error * counted[maps.shown.start : maps.shown.stop]
                wrong = (error > self._config.error).to(error.dtype)
                sent = torch.stack([wrong, torch.ones_like(wrong)], dim=-1)[maps.counted]
            return (maps.features[maps.counted][..., -N_SCORES:] * sent).sum(), {}

        return ImageTerm(0, evaluate)

    def see(self, d_probe: Tensor, visible: Tensor) -> None:
        """One more view of this step: gradient of the probe, (N, 2), and who was seen, (N,) bool"""
        self.add(torch.cat([d_probe, visible.to(d_probe.dtype)[:, None]], dim=1))

    def state(self) -> dict[str, Tensor]:
        return {PRUNING_SCORES: self.total} if self._config is not None else {}

    def restore(self, state: dict[str, Any], n: int) -> None:
        self.restart(n)
        if PRUNING_SCORES in state:
            self.total = state[PRUNING_SCORES].to(self.total.device)

    def may_grow(self) -> Tensor | None:
        """Gaussians that show more of what is wrong than others. (N,) bool; None: all"""
        if self._config is None:
            return None
        wrong, _, views = self.total.unbind(dim=1)
        # By numpy: torch's sums depend on the number of threads.
        _, shown, seen = self.total.cpu().numpy().sum(axis=0, dtype=np.float64)
        enough = self._config.wrong_share * float(shown / max(seen, 1.0))
        return (views > 0) & (wrong >= enough * views)

    def unused(self, opacities: Tensor, iteration: int, interval: int, until: int) -> Tensor | None:
        """Faint Gaussians that show next to nothing, in the rounds that remove them. (N,) bool"""
        if self._config is None:
            return None
        times = (share * until for share in self._config.removals)
        if not any(iteration < time <= iteration + interval for time in times):
            return None
        _, shown, views = self.total.unbind(dim=1)
        hidden = (views > 0) & (shown < self._config.shown_pixels * views)
        return hidden & (opacities < self._config.faint)
