# SPDX-License-Identifier: Apache-2.0
"""The coarse stage in multi-view mode: Gaussians as planes that photographs agree on.

The terms are in :mod:`sugar_trainers.terms`; densification goes on for a while, and what
fewer than two views see is dropped, because nothing can be said about where it lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gaussian_splatting.components.densification import Densification, Region
from gaussian_splatting.components.sky_sphere import SkySphere
from gaussian_splatting.core.cloud import NO_CUTOFF, GaussianCloud, Gaussians
from gaussian_splatting.core.subsets import at_most
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.component import Component, IterationRules, ViewResult
from gaussian_splatting.engine.guard import check_population
from gaussian_splatting.engine.loss_terms import acting, backpropagate, report
from gaussian_splatting.engine.memory_plan import MemoryPlan
from gaussian_splatting.engine.model import TrainableCloud
from gaussian_splatting.engine.stage import Stage, StepResources
from gaussian_splatting.engine.training_views import TrainingView
from gaussian_splatting.rasterization import WARP, Rasterizer, project
from gaussian_splatting.rasterization.render import weight_sums
from sugar_scene.reprojection import NeighborViews
from sugar_trainers.stage_config import MultiviewConfig, MultiviewSchedule
from sugar_trainers.stage_options import StageContext
from sugar_trainers.terms import PLANE, VisibleGaussians, multiview_terms
from sugar_trainers.view_comparison import ComparisonRule, ViewComparer
from sugar_utils.errors import Notify, shortened

SEEN_PIXELS = 0.5  # sum of blending weights from which a view sees a Gaussian
MAX_TRIM_VIEWS = 200  # views that count who sees a Gaussian, evenly spread over all


@dataclass(frozen=True)
class MultiviewDensity:
    """When densification of the mode changes the population; opacities are never reset."""

    schedule: MultiviewSchedule

    def collects(self, iteration: int) -> bool:
        """Whether views of an iteration count for the next round."""
        return self.schedule.densifies(iteration)

    def round_due(self, iteration: int) -> bool:
        """Whether a round follows an iteration."""
        return self.schedule.densification_due(iteration)

    def reset_due(self, iteration: int) -> bool:
        """Never."""
        return False

    def is_last(self, iteration: int) -> bool:
        """Never: the last iteration makes a step, too."""
        return False

    def removes_large(self, iteration: int) -> bool:
        """Never."""
        return False


class MultiviewStage(Stage[TrainableCloud, MultiviewConfig]):
    """Colour, plane normals and the agreement of neighbouring views, on free Gaussians.

    Args:
        cameras: All training views; trims look at them.
        region: Where Gaussians may be.
        comparer: Chooses what a view is compared with.
        notify: Told of trims.
        components: What is learned beside the model.
    """

    name = "coarse multiview"

    def __init__(
        self,
        cloud: GaussianCloud,
        config: MultiviewConfig,
        region: Region,
        cameras: Sequence[Camera],
        comparer: ViewComparer,
        notify: Notify,
        components: Iterable[Component] = (),
    ) -> None:
        self.extent = region.extent
        cutoff = config.cutoff_deviations or NO_CUTOFF
        if not comparer.rasterizer.ends_splats:
            cutoff = NO_CUTOFF
        cloud = replace(cloud, cutoff_deviations=cutoff)
        rates = config.rates.times(config.schedule.rate_factor)
        self.model = TrainableCloud(
            cloud, rates, region.extent, config.optimizer, config.random_seed
        )
        self.terms = multiview_terms(config, region.extent)
        self.memory_plan = MemoryPlan(config.split, records=config.records)
        self._config = config
        self._cameras = list(cameras)
        self._comparer = comparer
        self.further_images = comparer
        self._rasterizer = comparer.rasterizer
        self._notify = notify
        sky = SkySphere.around(self._cameras, region.extent)
        densification = Densification(
            self.model,
            config.densification,
            MultiviewDensity(config.schedule),
            replace(region, sky=sky),
            config.random_seed,
        )
        self.components = [*components, densification]

    def phase(self, iteration: int) -> str:
        """Gaussians grow in number, then are refined."""
        return "densify" if self._config.schedule.densifies(iteration) else "optimize"

    def begin(self, iteration: int) -> None:
        """Densify where that is due; set the rate; trim."""
        super().begin(iteration)
        schedule = self._config.schedule
        self.model.schedule_position_rate(schedule.paper_iteration(iteration))
        if schedule.trim_due(iteration):
            self._trim(iteration)

    def rules(self, iteration: int) -> IterationRules:
        """Trims remove Gaussians, too."""
        rules = super().rules(iteration)
        is_trimmed = self._config.schedule.trim_due(iteration)
        return replace(rules, changes_population=True) if is_trimmed else rules

    def prepare(self, view: TrainingView) -> TrainingView:
        """Complete a view, choose its neighbour, and put it on its background."""
        view = super().prepare(view)
        return self.composited(replace(view, surface=self._comparer.inputs(view)))

    def train_on(self, view: TrainingView, resources: StepResources) -> ViewResult:
        """Backpropagate all terms; those of the image come last."""
        activated = self.model.trained_cloud.activate(graph=False)
        gaussians = self.collecting(activated, view, resources)
        leaves = gaussians.as_leaves()
        surface = self._comparer.surface_view(leaves, view, resources)
        view = replace(view, surface=surface)
        view, features = self.with_features(view, leaves)
        terms = self.all_terms(view)
        active = acting(terms, view.iteration)
        reads_planes = any(PLANE in term.maps for term in active["image"])
        projection = project(
            leaves,
            view.camera,
            plane_reach=self._comparer.reach if reads_planes else None,
            features=features,
            graph=False,
        )
        view_pass = self.view_pass(projection, view, resources)
        in_reach = view_pass.visible & (view_pass.depths <= self._comparer.reach)
        values = backpropagate(active["model"], VisibleGaussians(leaves, in_reach))
        of_image, d_means2d = view_pass.backpropagate(active["image"])
        gaussians.collect(leaves)
        figures = report(terms, {**values, **of_image})
        return ViewResult(
            view,
            figures,
            view_pass.radii,
            d_means2d,
            (*surface.predicted, *view_pass.predictions),
            visible_rows=view_pass.visible,
        )

    def view_maps(self, camera: Camera) -> dict[str, Tensor]:
        """Agreement of colour and of depth with a neighbour. (H, W, 3) uint8"""
        gaussians = self.model.cloud.detached().activate()
        return self._comparer.pictures(gaussians, camera, self.memory_plan.split)

    def _trim(self, iteration: int) -> None:
        """Remove Gaussians that too few views see."""
        cameras = at_most(self._cameras, MAX_TRIM_VIEWS)
        least = min(self._config.min_views, len(cameras))
        gaussians = self.model.cloud.detached().activate()
        n_views = views_that_see(gaussians, cameras, self._rasterizer)
        keep = n_views >= least
        n_kept = int(keep.sum())
        check_population(n_kept, iteration, "dropping what too few views see")
        self._notify(
            f"iteration {iteration}: kept {n_kept:,} of {len(keep):,} Gaussians, those "
            f"that {least} and more views see"
        )
        self.keep_rows(keep)


def views_that_see(
    gaussians: Gaussians, cameras: Sequence[Camera], rasterizer: Rasterizer = WARP
) -> Tensor:
    """Count the views that see each Gaussian: the sum of its blending weights is large.

    (N,) int64
    """
    counts = torch.zeros(len(gaussians), dtype=torch.int64, device=gaussians.means.device)
    for camera in cameras:
        ones = gaussians.means.new_ones(camera.height, camera.width, 1)
        weights = weight_sums(gaussians, camera, ones, rasterizer)[:, 0]
        counts += weights >= SEEN_PIXELS
    return counts


def comparison_rule(config: MultiviewConfig) -> ComparisonRule:
    """Which pixels a view is compared by; none where no term needs them."""
    n_pixels = config.multiview_pixels if any(config.view_factors) else 0
    return ComparisonRule(n_pixels, config.random_seed, config.schedule.first)


def build_multiview_stage(
    cloud: GaussianCloud, config: MultiviewConfig, context: StageContext
) -> MultiviewStage:
    """Build the stage of a run; views without a neighbour are named."""
    scene = context.scene
    cameras = scene.train_cameras
    neighbors = NeighborViews(cameras, scene.extent, observations=scene.observations)
    if neighbors.without_neighbors:
        names = neighbors.without_neighbors
        context.console.info(
            f"{len(names)} of {len(cameras)} views have no neighbour to be compared with "
            f"({shortened(names)}); they train without the terms that need one"
        )
    if config.cutoff_deviations and not context.rasterizer.ends_splats:
        context.console.info(
            f"note: --rasterizer {context.rasterizer.name} cannot end Gaussians at "
            f"{config.cutoff_deviations:g} deviations; this model is trained without"
        )
    comparer = ViewComparer(
        neighbors,
        context.images,
        scene.extent,
        comparison_rule(config),
        context.rasterizer,
        device=cloud.means.device,
    )
    return MultiviewStage(
        cloud,
        config,
        context.region(),
        cameras,
        comparer,
        context.console.info,
        context.components,
    )
