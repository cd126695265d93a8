# SPDX-License-Identifier: Apache-2.0
"""The coarse stage in multi-view mode: Gaussians as planes that photographs agree on; its run.

The terms are in :mod:`sugar_trainers.terms`; densification goes on for a while, and what
fewer than two views see is dropped, because nothing can be said about where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from gaussian_splatting.cloud import GaussianCloud, Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.depth_maps import NOTHING_KNOWN, KnownDepths
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.data.masks import VisualHull, hull_of
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.engine.guard import check_population
from gaussian_splatting.engine.memory_plan import MemoryPlan
from gaussian_splatting.engine.model import TrainableCloud
from gaussian_splatting.engine.stage import (
    Stage,
    StepResult,
    acting,
    backpropagate,
    later_depth_terms,
    report,
)
from gaussian_splatting.engine.strips import ViewPass, backward_through
from gaussian_splatting.optim.densification import DensificationStatistics, densify_and_prune
from gaussian_splatting.optim.learned_exposure import Exposures
from gaussian_splatting.rasterization import WARP, Rasterizer, project
from gaussian_splatting.rasterization.render import weight_sums
from gaussian_splatting.sky_sphere import SkySphere
from sugar_scene.reprojection import NeighborViews
from sugar_trainers.coarse_stage import CoarseOptions
from sugar_trainers.stage_config import MULTIVIEW, MultiviewConfig
from sugar_trainers.terms import VisibleGaussians, multiview_terms
from sugar_trainers.view_comparison import ViewComparer
from sugar_utils.console import Console
from sugar_utils.errors import shortened
from sugar_utils.random import generator

SEEN_PIXELS = 0.5  # sum of blending weights from which a view sees a Gaussian
MAX_TRIM_VIEWS = 200  # views that count who sees a Gaussian, evenly spread over all


class MultiviewStage(Stage):
    """Colour, plane normals and the agreement of neighbouring views, on free Gaussians."""

    name = "coarse multiview"

    def __init__(
        self,
        cloud: GaussianCloud,
        config: MultiviewConfig,
        extent: float,
        cameras: Sequence[Camera],
        neighbors: NeighborViews,
        images: ImageStore,
        notify: Callable[[str], None],
        *,
        rasterizer: Rasterizer = WARP,
        hull: VisualHull | None = None,
        exposures: Exposures | None = None,
        depths: KnownDepths = NOTHING_KNOWN,
    ) -> None:
        self.extent = extent
        self.exposures = exposures
        self.depths = depths
        rates = config.rates.times(config.schedule.haste)
        self.model = TrainableCloud(cloud, rates, extent, config.optimizer, config.random_seed)
        self.terms = multiview_terms(config, extent) + later_depth_terms(depths)
        self.memory_plan = MemoryPlan(config.split)
        self._config = config
        self._notify = notify
        self._rasterizer = rasterizer
        self._cameras = list(cameras)
        self._hull = hull
        pixels = config.multiview_pixels if any(config.view_factors) else 0
        self._comparer = ViewComparer(
            neighbors, images, extent, pixels, config.random_seed, rasterizer, config.schedule.first
        )
        self._watch = DensificationStatistics(len(cloud), self.model.device)

    def phase(self, iteration: int) -> str:
        """Gaussians grow in number, then settle."""
        return "densify" if self._config.schedule.densifies(iteration) else "settle"

    def begin(self, iteration: int) -> None:
        """Densify where the previous iteration left it due; set the rate; trim.

        A round of densification comes this late so that an iteration is measured and saved with
        the model that was trained.
        """
        schedule = self._config.schedule
        if schedule.densification_due(iteration - 1):
            self._densify(iteration - 1)
        self.model.schedule_position_rate(schedule.paper_iteration(iteration))
        if schedule.trim_due(iteration):
            self._trim(iteration)

    def accumulate(
        self, iteration: int, camera: Camera, target: Tensor, view_index: int = 0
    ) -> StepResult:
        on = acting(self.terms, iteration)
        gaussians = self.gaussians()
        leaves = gaussians.as_leaves()
        split = self.memory_plan.split
        drawn = (iteration, view_index)
        beside = self._comparer.surface_view(leaves, camera, target, split, *drawn)
        seen = self.target(target, camera, *drawn)
        reach = self._comparer.reach if any("plane" in term.maps for term in on["image"]) else None
        inverse = self.depth_feature(leaves, camera)
        view = ViewPass(
            project(leaves, camera, plane_reach=reach, features=inverse),
            seen.background,
            split,
            rasterizer=self._rasterizer,
            pairs=self.pairs,
        )
        near = view.visible & (view.depths <= self._comparer.reach)
        found = backpropagate(on["model"], VisibleGaussians(leaves, near))
        images = [term.bind(camera, seen, beside) for term in on["image"]]
        of_image, d_means2d = view.backpropagate(images)
        backward_through(gaussians.tensors(), leaves.tensors())

        def commit() -> None:
            if self._config.schedule.densifies(iteration):
                self._watch.see(d_means2d, view.visible, camera)
            self.collect_exposure(camera.name, seen.exposure)

        terms = report(self.terms, {**found, **of_image})
        return StepResult(terms, view.radii, view.guess, commit)

    def step_statistics(self) -> tuple[Tensor, ...]:
        return *self._watch.step_statistics(), *super().step_statistics()

    def apply(self, iteration: int) -> None:
        """Count the step's statistics, then step; before a round all tensors sit it out."""
        self._watch.count_step()
        if self._config.schedule.densification_due(iteration):
            self.model.optimizer.zero_grad()
        super().apply(iteration)

    def view_maps(self, camera: Camera) -> dict[str, Tensor]:
        gaussians = self.model.cloud.detached().activate()
        return self._comparer.pictures(gaussians, camera, self.memory_plan.split)

    def extra_state(self) -> dict[str, Any]:
        return {**self._watch.state(), **super().extra_state()}

    def restore_extra(self, state: dict[str, Any]) -> None:
        super().restore_extra(state)
        self._watch.restore(state, len(self.model))

    def _densify(self, iteration: int) -> None:
        config = self._config
        densify_and_prune(
            self.model.optimizer,
            self._watch.mean(),
            config.densification,
            extent=self.extent,
            remove_large=False,
            generator=generator(config.random_seed, "split", iteration),
            sky=SkySphere.around(self._cameras, self.extent),
        )
        if self._hull is not None:
            self.model.optimizer.keep_rows(self._hull.contains(self.model.cloud.means))
        self._watch.restart(len(self.model))
        check_population(len(self.model), iteration, "densification")

    def _trim(self, iteration: int) -> None:
        cameras = self._cameras[:: -(-len(self._cameras) // MAX_TRIM_VIEWS)]
        least = min(self._config.min_views, len(cameras))
        seen = views_that_see(self.model.cloud.detached().activate(), cameras, self._rasterizer)
        keep = seen >= least
        check_population(int(keep.sum()), iteration, "dropping what too few views see")
        self._notify(
            f"iteration {iteration}: kept {int(keep.sum()):,} of {len(keep):,} Gaussians, those "
            f"that {least} and more views see"
        )
        self.model.optimizer.keep_rows(keep)
        self._watch.keep(keep)


def views_that_see(
    gaussians: Gaussians, cameras: Sequence[Camera], rasterizer: Rasterizer = WARP
) -> Tensor:
    """How many views see each Gaussian: the sum of its blending weights is large. (N,) int64"""
    counts = torch.zeros(len(gaussians), dtype=torch.int64, device=gaussians.means.device)
    for camera in cameras:
        ones = gaussians.means.new_ones(camera.height, camera.width, 1)
        counts += weight_sums(gaussians, camera, ones, rasterizer)[:, 0] >= SEEN_PIXELS
    return counts


@dataclass(frozen=True, kw_only=True)
class MultiviewOptions(CoarseOptions):
    reads_tracks: ClassVar[bool] = True

    config: MultiviewConfig = field(default_factory=MultiviewConfig)

    def stage(
        self,
        model: GaussianCloud,
        config: MultiviewConfig,
        scene: Scene,
        store: ImageStore,
        console: Console,
        exposures: Exposures | None,
    ) -> MultiviewStage:
        cameras = scene.train_cameras
        neighbors = NeighborViews(cameras, scene.extent, observations=scene.observations)
        if alone := neighbors.without_neighbors:
            console.info(
                f"{len(alone)} of {len(cameras)} views have no neighbour to be compared with "
                f"({shortened(alone)}); they train without the terms that need one"
            )
        return MultiviewStage(
            model,
            config,
            scene.extent,
            cameras,
            neighbors,
            store,
            console.info,
            rasterizer=self.compute.rasterizer,
            hull=hull_of(cameras, self.compute.device),
            exposures=exposures,
            depths=scene.depths,
        )


def options_of_mode(mode: str) -> type[CoarseOptions]:
    return MultiviewOptions if mode == MULTIVIEW else CoarseOptions
