# SPDX-License-Identifier: Apache-2.0
"""Adaptive density control of 3DGS (Kerbl et al. 2023, section 5), as a component.

Gaussians with a large screen-space gradient are cloned or split, transparent ones removed, and
opacities reset now and then. :mod:`.pruning_scores` can restrict which grow and which stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from gaussian_splatting.components.pruning_scores import PruningScores
from gaussian_splatting.components.sky_sphere import SkySphere
from gaussian_splatting.components.view_sums import ViewSums
from gaussian_splatting.core.cloud import opacities_of, rotation_matrices
from gaussian_splatting.core.random import generator
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.masks import VisualHull
from gaussian_splatting.engine.component import Component, IterationRules, ViewResult, kept_if
from gaussian_splatting.engine.guard import check_population
from gaussian_splatting.engine.model import TrainableCloud, TrainableModel
from gaussian_splatting.engine.state_schema import N, StateRule
from gaussian_splatting.optim.adam import GroupedAdam
from gaussian_splatting.shared_flags import max_gaussians
from sugar_utils.device import constants
from sugar_utils.flags import positive_float, positive_int
from sugar_utils.settings import flag

SPLIT_CHILDREN = 2
SPLIT_SHRINK = 0.8 * SPLIT_CHILDREN
RESET_OPACITY = 0.01
LARGE_SHARE = 0.1  # of the extent, from which a Gaussian is removed
FINEST_ANGLE = 0.02
"""Radians, a degree: a Gaussian of the sky that is smaller has no children. By their size in the
world, which is that of a hundredth of a pixel, they would have hundreds of thousands."""

# Names of the sums in checkpoints.
GRADIENT_SUM = "gradient_sum"
VIEWS = "views"

_iterations = partial(flag, group="vanilla trainer", parse=positive_int)


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
        """Whether a round follows the iteration."""
        within = self.densify_from_iter < iteration < self.densify_until_iter
        return within and iteration % self.densification_interval == 0

    def reset_due(self, iteration: int) -> bool:
        """Whether opacities are reset after the iteration."""
        return iteration < self.densify_until_iter and iteration % self.opacity_reset_interval == 0


class DensitySchedule(Protocol):
    """When the population changes; iterations are absolute."""

    def collects(self, iteration: int) -> bool:
        """Whether views of an iteration count for the next round."""
        ...

    def round_due(self, iteration: int) -> bool:
        """Whether a round follows an iteration, so its step must keep all tensors."""
        ...

    def reset_due(self, iteration: int) -> bool:
        """Whether a reset of opacities follows an iteration."""
        ...

    def is_last(self, iteration: int) -> bool:
        """Whether an iteration makes no step, so that nothing changes for it or after it."""
        ...

    def removes_large(self, iteration: int) -> bool:
        """Whether a round removes Gaussians that are large in the world."""
        ...


@dataclass(frozen=True)
class Region:
    """Where Gaussians may be, and how large."""

    extent: float  # of the cameras, world units
    sky: SkySphere | None = None  # Gaussians of the sky keep their distance and opacity
    hull: VisualHull | None = None  # Gaussians outside of it are removed


class DensificationStatistics(ViewSums):
    """Norms of screen-space gradients, and views that saw a Gaussian, between two rounds."""

    def __init__(self, n: int, device: torch.device) -> None:
        super().__init__(n, 2, device)

    def see(
        self,
        d_means2d: Tensor,
        visible: Tensor,
        camera: Camera,
        step_mask: Tensor | None = None,
    ) -> None:
        """Add a view: gradients of centres, (N, 2) per pixel, and which it shows, (N,) bool"""
        half_size = constants((camera.width / 2, camera.height / 2), d_means2d.device)
        norm = torch.linalg.vector_norm(d_means2d * half_size, dim=-1)
        is_visible = visible.to(norm.dtype)
        columns = torch.stack([norm * is_visible, is_visible], dim=1)
        self.add(kept_if(step_mask, columns))

    def mean(self) -> Tensor:
        """Mean gradient norm, 0 for Gaussians no view saw. (N,)"""
        gradient_sum, n_views = self.total.unbind(dim=1)
        return torch.where(n_views > 0, gradient_sum / n_views, 0.0)

    def state(self) -> dict[str, Tensor]:
        """Both sums, (N,) each."""
        gradient_sum, n_views = self.total.unbind(dim=1)
        return {GRADIENT_SUM: gradient_sum, VIEWS: n_views}

    def load_state(self, state: Mapping[str, Any], n: int) -> None:
        """Take :meth:`state` back, or begin anew where a checkpoint has none."""
        self.restart(n)
        if GRADIENT_SUM in state:
            columns = torch.stack([state[GRADIENT_SUM], state[VIEWS]], dim=1)
            self.total = columns.to(self.total.device)


@dataclass(frozen=True)
class GrowthLimits:
    """Restrictions of densification beyond its settings."""

    # Which Gaussians grow and which stay; a component of its own.
    scores: PruningScores | None = None
    # Number of Gaussians that there may be after a round, from the iteration and the number that
    # the round would add.
    allowed: Callable[[int, int], int] | None = None


class Densification(Component):
    """Clones, splits, prunes and resets Gaussians of a model as a schedule says.

    A change follows an iteration, but is made when the next one begins: an iteration is measured,
    exported and saved with the model that was trained, as in 3DGS.

    Args:
        seed: Of the run; children are drawn from it.
        limits: What restricts it beyond the settings.
    """

    name = "densification"
    obeys_step_mask = True  # changes follow steps with frozen parameters, which the host makes
    schema = (
        StateRule(GRADIENT_SUM, (N,), not_negative=True, needs=VIEWS),
        StateRule(VIEWS, (N,), not_negative=True, needs=GRADIENT_SUM),
    )

    def __init__(
        self,
        model: TrainableCloud,
        config: DensificationConfig,
        schedule: DensitySchedule,
        region: Region,
        seed: int,
        limits: GrowthLimits | None = None,
    ) -> None:
        self._model = model
        self._config = config
        self._schedule = schedule
        self._region = region
        self._seed = seed
        self._scores = None if limits is None else limits.scores
        self._allowed = None if limits is None else limits.allowed
        self._sums = DensificationStatistics(len(model), model.device)

    def rules(self, iteration: int) -> IterationRules:
        """As in 3DGS, tensors that change after an iteration sit its step out."""
        schedule = self._schedule
        frozen: Collection[str] = ()
        if schedule.is_last(iteration) or schedule.round_due(iteration):
            frozen = self._model.optimizer.leaves
        elif schedule.reset_due(iteration):
            frozen = ("opacity_logits",)
        adds_or_removes = self._may_change(iteration) and schedule.round_due(iteration - 1)
        return IterationRules(frozen=frozen, changes_population=adds_or_removes)

    def begin(self, iteration: int) -> None:
        """Change the population where the previous iteration left a change due."""
        previous = iteration - 1
        if not self._may_change(iteration):
            return
        if self._schedule.round_due(previous):
            self._densify(previous)
        if self._schedule.reset_due(previous):
            reset_opacity(self._model.optimizer, self._region.sky)

    def after_view(self, result: ViewResult, model: TrainableModel) -> None:
        """Count the view."""
        is_counted = self._schedule.collects(result.view.iteration)
        if is_counted and result.d_means2d is not None:
            camera = result.view.camera
            self._sums.see(result.d_means2d, result.visible, camera, result.step_mask)

    def statistics(self) -> tuple[Tensor, ...]:
        """Sums of the views of this step."""
        return self._sums.statistics()

    def after_step(self, iteration: int) -> None:
        """Count the step."""
        self._sums.count_step()

    def keep_rows(self, rows: Tensor) -> None:
        """Keep the rows of the Gaussians that stay in the model. (N,) bool"""
        self._sums.keep_rows(rows)

    def state(self) -> dict[str, Tensor]:
        """Sums over the views since the last round."""
        return self._sums.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take the sums back, or begin anew where a checkpoint has none."""
        n_gaussians = len(self._model)
        self._sums.load_state(state, n_gaussians)
        if self._scores is not None:
            self._scores.restart(n_gaussians)

    def _may_change(self, iteration: int) -> bool:
        """Whether Gaussians may be changed as an iteration begins."""
        # Nothing that is changed for an iteration without a step could recover.
        return iteration > 1 and not self._schedule.is_last(iteration)

    def _densify(self, iteration: int) -> None:
        optimizer = self._model.optimizer
        may_grow = None
        unused = None
        if self._scores is not None:
            opacities = opacities_of(self._model.cloud.opacity_logits.detach())
            may_grow = self._scores.may_grow()
            unused = self._scores.unused(opacities, iteration)
        allowed = None if self._allowed is None else partial(self._allowed, iteration)
        has_extent = self._region.extent > 0
        limits = RoundLimits(
            extent=self._region.extent,
            # Without an extent every Gaussian would be large.
            remove_large=has_extent and self._schedule.removes_large(iteration),
            sky=self._region.sky,
            may_grow=may_grow,
            unused=unused,
            allowed=allowed,
        )
        draws = generator(self._seed, "split", iteration)
        densify_and_prune(optimizer, self._sums.mean(), self._config, draws, limits)
        if self._region.hull is not None:
            optimizer.keep_rows(self._region.hull.contains(self._model.cloud.means))
        n_gaussians = len(self._model)
        self._sums.restart(n_gaussians)
        if self._scores is not None:
            self._scores.restart(n_gaussians)
        check_population(n_gaussians, iteration, "densification")


@dataclass(frozen=True)
class RoundLimits:
    """Limits of one round of clone, split and prune."""

    extent: float  # of the cameras, world units
    remove_large: bool  # whether Gaussians go that are large in the world
    sky: SkySphere | None = None
    # Gaussians that may be cloned or split; None for all. (N,) bool
    may_grow: Tensor | None = None
    # Gaussians to remove unless they are cloned or split; None for none. (N,) bool
    unused: Tensor | None = None
    # How many Gaussians there may be, from how many this round would add.
    allowed: Callable[[int], int] | None = None


def densify_and_prune(
    optimizer: GroupedAdam,
    gradient: Tensor,
    config: DensificationConfig,
    generator: torch.Generator,
    limits: RoundLimits,
) -> None:
    """Make one round of clone, split and prune.

    The 3DGS rule that also removes Gaussians by their screen radius is left out: its counter is
    cleared by the clone step just before it is read, so it never acts.

    Args:
        gradient: Mean norms of the screen-space gradient. (N,)
    """
    sky = limits.sky
    largest = optimizer.parameters["log_scales"].detach().amax(dim=-1).exp()
    if sky is not None:
        sky_distance = sky.distance(optimizer.parameters["means"].detach())
        gradient = torch.where(largest < FINEST_ANGLE * sky_distance, 0.0, gradient)
    if limits.may_grow is not None:
        gradient = torch.where(limits.may_grow, gradient, 0.0)
    grow = _within_budget(gradient, config, limits.allowed)
    is_small = largest <= config.percent_dense * limits.extent
    clone = grow & is_small
    split = grow & ~is_small
    parents = {name: p.detach() for name, p in optimizer.parameters.items()}
    n_children = int(clone.sum()) + SPLIT_CHILDREN * int(split.sum())
    children = _split(parents, split, generator)
    if sky is not None:
        distance = sky_distance[split].repeat(SPLIT_CHILDREN)
        children["means"] = sky.returned(children["means"], distance)
    added = {name: torch.cat([p[clone], children[name]]) for name, p in parents.items()}
    optimizer.append_rows(added)
    removed = split if limits.unused is None else split | (limits.unused & ~grow)
    keep = torch.cat([~removed, split.new_ones(n_children)])
    keep &= _solid_rows(optimizer, config, limits)
    optimizer.keep_rows(keep)


def _solid_rows(optimizer: GroupedAdam, config: DensificationConfig, limits: RoundLimits) -> Tensor:
    """Gaussians that are opaque enough, and not too large where that counts. (N,) bool"""
    parameters = {name: p.detach() for name, p in optimizer.parameters.items()}
    keep = parameters["opacity_logits"].squeeze(-1) >= _logit(config.prune_opacity)
    if limits.remove_large:
        largest = parameters["log_scales"].amax(dim=-1)
        fits = largest <= math.log(LARGE_SHARE * limits.extent)
        if limits.sky is not None:
            fits = fits | (limits.sky.distance(parameters["means"]) > 0)
        keep &= fits
    return keep


def reset_opacity(optimizer: GroupedAdam, sky: SkySphere | None = None) -> None:
    """Lower all opacities, but for those of a sky, to at most 0.01 and clear their moments."""
    logits = optimizer.parameters["opacity_logits"].detach()
    lowered = logits.clamp_max(_logit(RESET_OPACITY))
    if sky is not None:
        is_sky = sky.distance(optimizer.parameters["means"].detach())[:, None] > 0
        lowered = torch.where(is_sky, logits, lowered)
    optimizer.replace("opacity_logits", lowered)


def _within_budget(
    gradient: Tensor, config: DensificationConfig, allowed: Callable[[int], int] | None
) -> Tensor:
    """Gaussians to clone or split: each adds one, the strongest first if not all may. (N,) bool"""
    grow = gradient >= config.densify_grad_threshold
    limits = [] if config.max_gaussians is None else [config.max_gaussians]
    if not limits and allowed is None:
        return grow
    n_growing = int(grow.sum())
    if allowed is not None:
        limits.append(allowed(n_growing))
    budget = max(0, min(limits) - gradient.shape[0])
    if n_growing <= budget:
        return grow
    candidates = torch.where(grow, gradient, -1.0)
    order = torch.argsort(candidates, descending=True, stable=True)
    chosen = torch.zeros_like(grow)
    chosen[order[:budget]] = True
    return chosen


def _split(rows: dict[str, Tensor], split: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Children drawn from each split Gaussian's own distribution, a little over half its size."""
    parents = {}
    for name, values in rows.items():
        repeats = (SPLIT_CHILDREN, *[1] * (values.dim() - 1))
        parents[name] = values[split].repeat(*repeats)
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
