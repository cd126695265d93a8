# SPDX-License-Identifier: Apache-2.0
"""The vanilla 3DGS stage (Kerbl et al. 2023): colour loss only, with adaptive density."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gaussian_splatting.cloud import GaussianCloud, opacities_of
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.depth_maps import NOTHING_KNOWN, KnownDepths
from gaussian_splatting.data.masks import VisualHull
from gaussian_splatting.engine.guard import TOTAL, check_population
from gaussian_splatting.engine.memory_plan import MemoryPlan
from gaussian_splatting.engine.model import TrainableCloud
from gaussian_splatting.engine.poses import PoseRefinement, fitted_pose
from gaussian_splatting.engine.stage import DEPTH_SHARE, Stage, StepResult, depth_term
from gaussian_splatting.engine.strips import ImageTerm, StripMaps, ViewPass
from gaussian_splatting.engine.training_views import Target, color_terms_of
from gaussian_splatting.losses.photometric import SSIM_HALO
from gaussian_splatting.optim import densification
from gaussian_splatting.optim.learned_exposure import Exposures
from gaussian_splatting.rasterization import WARP, Projection, Rasterizer, plain_background, project
from gaussian_splatting.rasterization.spherical_harmonics import rgb_to_sh
from gaussian_splatting.sky_sphere import SkySphere
from gaussian_splatting.vanilla.growing_resolution import GaussianBudget, ResolutionGrowth
from gaussian_splatting.vanilla.vanilla_config import SH_DEGREE, VanillaConfig
from sugar_utils.errors import UserError
from sugar_utils.neighbors import mean_sq_distance_to_nearest
from sugar_utils.random import draw_labels, generator

INITIAL_OPACITY = 0.1
LEAST_SQ_DISTANCE = 1e-7  # between points, of 3DGS, in square world units
LEAST_SHARE = 1e-4  # the same as a share of the spread of all points, for captures in large units


def initial_cloud(points: Tensor, colors: Tensor) -> GaussianCloud:
    """Gaussians from points, (N, 3) in world units, and their colours, (N, 3) uint8.

    Isotropic, as large as the root mean squared distance to the three nearest other points.
    """
    n = points.shape[0]
    if n == 0:
        raise UserError(
            "the scene has no 3D points to start from; reconstruct it again with COLMAP so that "
            "it has points, or pass a point cloud with --init_ply"
        )
    if not torch.isfinite(points).all():
        raise UserError("the scene's 3D points have non-finite coordinates; remove those points")
    least = LEAST_SQ_DISTANCE
    spread = float(points.float().std(dim=0).norm()) if n > 1 else 0.0
    if spread > 0:
        least = min(least, (LEAST_SHARE * spread) ** 2)
    distance = mean_sq_distance_to_nearest(points).clamp_min(least).sqrt()
    quats = points.new_zeros(n, 4)
    quats[:, 0] = 1.0
    logit = torch.logit(points.new_tensor(INITIAL_OPACITY))
    return GaussianCloud(
        means=points.float(),
        sh_dc=rgb_to_sh(colors.float() / 255.0)[:, None, :],
        sh_rest=points.new_zeros(n, (SH_DEGREE + 1) ** 2 - 1, 3),
        quats=quats,
        opacity_logits=logit.expand(n, 1).clone(),
        log_scales=distance.log()[:, None].expand(n, 3).clone(),
    )


class VanillaStage(Stage):
    """Colour loss, densification, pruning and opacity reset; ``hull`` is where Gaussians may be."""

    name = "vanilla"

    def __init__(
        self,
        cloud: GaussianCloud,
        config: VanillaConfig,
        extent: float,
        export: Callable[[int, GaussianCloud], object],
        rasterizer: Rasterizer = WARP,
        *,
        poses: PoseRefinement | None = None,
        hull: VisualHull | None = None,
        exposures: Exposures | None = None,
        sky: SkySphere | None = None,
        growth: ResolutionGrowth | None = None,
        depths: KnownDepths = NOTHING_KNOWN,
    ) -> None:
        self._growth = growth
        self._budget = None if growth is None else GaussianBudget(growth, len(cloud))
        self.extent = extent
        self.exposures = exposures
        self.poses = poses
        self._hull = hull
        self._sky = sky
        self.depths = depths
        seed = config.random_seed
        self.model = TrainableCloud(cloud, config.rates, extent, config.optimizer, seed)
        self.memory_plan = MemoryPlan(config.split)
        self._config = config
        self._export = export
        self._rasterizer = rasterizer
        self._watch = densification.DensificationStatistics(len(cloud), self.model.device)
        self._pruning_scores = densification.PruningScores(
            len(cloud), self.model.device, config.scoring if config.scores else None
        )

    def phase(self, iteration: int) -> str:
        return "densify" if iteration < self._config.densification.densify_until_iter else "refine"

    def begin(self, iteration: int) -> None:
        """Change the population where the previous iteration left a change due; set the rate.

        The change comes this late so that an iteration is measured, exported and saved with the
        model that was trained, as in 3DGS. The last iteration makes no step, so nothing that is
        changed for it could recover.
        """
        if iteration < self._config.iterations:
            self._change_population(iteration - 1)
        self.model.schedule_position_rate(iteration)

    def view_scale(self, iteration: int) -> float:
        return 1.0 if self._growth is None else self._growth.scale(iteration)

    def accumulate(
        self, iteration: int, camera: Camera, target: Tensor, view_index: int = 0
    ) -> StepResult:
        seen = self.target(target, camera, iteration, view_index)
        terms = [self._color_term(seen)]
        rules = self._config.densification
        n_views = self._config.optimizer.views_per_step
        probe = self._pruning_scores.probe(iteration, rules, n_views)
        if probe is not None:
            terms.append(self._pruning_scores.term(seen))
        if self.depths.maps:
            passed = iteration / self._config.iterations
            weight = self.depths.weight * DEPTH_SHARE**passed
            terms.append(depth_term(self.depths, weight).bind(camera, seen))
        projected = self._projected(iteration, camera, probe)
        split = self.memory_plan.split
        view = ViewPass(
            projected, seen.background, split, rasterizer=self._rasterizer, pairs=self.pairs
        )
        found, d_means2d = view.backpropagate(terms)

        def commit() -> None:
            if probe is not None:
                self._pruning_scores.see(probe.grad, view.visible)
            if iteration < rules.densify_until_iter:
                self._watch.see(d_means2d, view.visible, camera)
            self.collect_exposure(camera.name, seen.exposure)

        return StepResult(found, view.radii, view.guess, commit)

    def step_statistics(self) -> tuple[Tensor, ...]:
        own = (*self._watch.step_statistics(), *self._pruning_scores.step_statistics())
        return *own, *super().step_statistics()

    def apply(self, iteration: int) -> None:
        """Count the step's statistics, then step.

        As in 3DGS, tensors that change after this iteration sit the step out, and the last
        iteration makes none.
        """
        self._watch.count_step()
        self._pruning_scores.count_step()
        optimizer = self.model.optimizer
        last = iteration == self._config.iterations
        if last or self._config.densification.due(iteration):
            optimizer.zero_grad()
        elif self._reset_due(iteration):
            optimizer.drop_gradient("opacity_logits")
        optimizer.step()
        if not last and self.exposures is not None:
            self.exposures.step(iteration)

    def rendered_degree(self) -> int:
        return self._config.sh_degree

    def fitted_pose(self, camera: Camera, photograph: Tensor) -> Camera:
        if self.poses is None:
            return camera
        background = plain_background(self._config.white_background, self.model.device)
        return fitted_pose(
            self.gaussians(),
            camera,
            photograph.to(background.device),
            self.extent,
            background,
            exposed=self.exposures is not None,
            rasterizer=self._rasterizer,
        )

    def extra_state(self) -> dict[str, Any]:
        own: dict[str, Any] = {**self._watch.state(), **self._pruning_scores.state()}
        for more in (self.exposures, self.poses, self._budget):
            if more is not None:
                own |= more.state()
        return own

    def restore_extra(self, state: dict[str, Any]) -> None:
        """Densification statistics, or fresh ones where the checkpoint has none."""
        for more in (self.exposures, self.poses, self._budget):
            if more is not None:
                more.restore(state)
        self._watch.restore(state, len(self.model))
        self._pruning_scores.restore(state, len(self.model))

    def export(self, iteration: int) -> None:
        self._export(iteration, self.model.cloud.detached())

    def _change_population(self, iteration: int) -> None:
        """Densify, prune and reset opacities as the schedule asks for after an iteration."""
        if iteration < 1:
            return
        if self._config.densification.due(iteration):
            self._densify(iteration)
        if self._reset_due(iteration):
            densification.reset_opacity(self.model.optimizer, self._sky)

    def _reset_due(self, iteration: int) -> bool:
        rules = self._config.densification
        white_reset = self._config.white_background and iteration == rules.densify_from_iter
        return rules.reset_due(iteration) or white_reset

    def _densify(self, iteration: int) -> None:
        rules = self._config.densification
        opacities = opacities_of(self.model.cloud.opacity_logits.detach())
        unused = self._pruning_scores.unused(
            opacities, iteration, rules.densification_interval, self._config.densifies_until
        )
        densification.densify_and_prune(
            self.model.optimizer,
            self._watch.mean(),
            rules,
            extent=self.extent,
            # Without an extent every Gaussian would be large.
            remove_large=self.extent > 0 and iteration > rules.opacity_reset_interval,
            generator=generator(self._config.random_seed, "split", iteration),
            sky=self._sky,
            may_grow=self._pruning_scores.may_grow(),
            unused=unused,
            allowed=None if self._budget is None else partial(self._budget.allowed, iteration),
        )
        if self._hull is not None:
            self.model.optimizer.keep_rows(self._hull.contains(self.model.cloud.means))
        self._watch.restart(len(self.model))
        self._pruning_scores.restart(len(self.model))
        check_population(len(self.model), iteration, "densification")

    def _color_term(self, seen: Target) -> ImageTerm:
        weight = self._config.lambda_dssim

        def evaluate(maps: StripMaps) -> tuple[Tensor, dict[str, Tensor]]:
            image = seen.exposed(maps)
            loss, l1, ssim = color_terms_of(image, maps, seen.photograph, weight)
            return loss, {TOTAL: loss, "l1": l1, "ssim": ssim}

        return ImageTerm(SSIM_HALO, evaluate)

    def _projected(self, iteration: int, camera: Camera, probe: Tensor | None) -> Projection:
        """The view of an iteration; three quarters of all values rest until colours turn."""
        degree = min(self._config.sh_degree, iteration // self._config.sh_interval)
        if degree == 0:
            self.model.optimizer.mark_unused("sh_rest")
        gaussians = self.gaussians()
        shown = gaussians if degree > 0 else gaussians.without_bands()
        features = [f for f in (self.depth_feature(shown, camera), probe) if f is not None]
        joined = torch.cat(features, dim=1) if features else None
        return project(shown, camera, sh_degree=degree, features=joined)

    def background(self, iteration: int, view_index: int) -> Tensor:
        if not self._config.random_background:
            return super().background(iteration, view_index)
        rng = generator(self._config.random_seed, "background", *draw_labels(iteration, view_index))
        return torch.rand(3, generator=rng, device="cpu").to(self.model.device)
