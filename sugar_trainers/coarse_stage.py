# SPDX-License-Identifier: Apache-2.0
"""The coarse SuGaR stage: free Gaussians drawn towards the surface.

Guédon & Lepetit, CVPR 2024, section 4, with the depth-normal consistency that the authors added
in 2024. One stage serves the three regularisations; they differ in their terms
(:mod:`sugar_trainers.terms`) and in what is sampled.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace

from torch import Tensor

from gaussian_splatting.components.densification import Region
from gaussian_splatting.components.depth_supervision import SOLID_ALPHA
from gaussian_splatting.core.cloud import GaussianCloud, Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.component import Component, IterationRules, ViewResult
from gaussian_splatting.engine.gradients import cut
from gaussian_splatting.engine.guard import check_population
from gaussian_splatting.engine.loss_terms import LossTerm, Place, acting, backpropagate, report
from gaussian_splatting.engine.memory_plan import MemoryPlan
from gaussian_splatting.engine.model import TrainableCloud
from gaussian_splatting.engine.stage import Stage, StepResources
from gaussian_splatting.engine.strips import ViewPass
from gaussian_splatting.engine.training_views import TrainingView, halved_mask
from gaussian_splatting.rasterization import WARP, Rasterizer, RenderOutput, project
from gaussian_splatting.rasterization.projection import PredictedCount
from sugar_trainers.losses import normals_from_depth
from sugar_trainers.neighbor_search import NeighborSearch
from sugar_trainers.sampling import (
    SampleDraws,
    SampledView,
    SampleSource,
    SurfaceSampler,
    sampling_mask,
)
from sugar_trainers.stage_config import CoarseConfig
from sugar_trainers.stage_options import StageContext
from sugar_trainers.terms import VisibleGaussians, coarse_terms
from sugar_utils.errors import Notify


@dataclass(frozen=True)
class CoarseView:
    """Choices of the host for a view, before it is rendered, while the geometry is regularised."""

    seed: Tensor  # of the draw of samples. (2,) int32
    half: Camera | None  # the camera with images of half the size, for terms that look at those


@dataclass
class _FirstTerms:
    """Results of the terms that do not look at the full image."""

    values: dict[str, Tensor]  # by name
    depth: Tensor | None = None  # leaf of the rendered depth, if a term at samples reads it. (H, W)
    predicted: list[PredictedCount] = field(default_factory=list)

    @property
    def d_depth(self) -> Tensor | None:
        """Gradient of terms at samples by the rendered depth. (H, W)"""
        return None if self.depth is None else self.depth.grad


class CoarseStage(Stage[TrainableCloud, CoarseConfig]):
    """Colour, entropy and geometric terms on free Gaussians.

    Args:
        region: Where Gaussians may be; the prune keeps those inside of its hull.
        notify: Told of the prune, and of views that show nothing to sample.
        components: What is learned beside the model.
        sample_source: Replaces the random draws, for comparisons with recorded ones.
    """

    def __init__(
        self,
        cloud: GaussianCloud,
        config: CoarseConfig,
        region: Region,
        notify: Notify,
        rasterizer: Rasterizer = WARP,
        components: Iterable[Component] = (),
        sample_source: SampleSource | None = None,
    ) -> None:
        self.name = f"coarse {config.regularization_type}"
        self.extent = region.extent
        self.terms = coarse_terms(config)
        self.model = TrainableCloud(
            cloud, config.rates, region.extent, config.optimizer, config.random_seed
        )
        most_samples = config.samples_for(len(self.model))
        chunk = min(config.sample_chunk, most_samples)
        self.memory_plan = MemoryPlan(config.split, chunk, config.records)
        self._config = config
        self._hull = region.hull
        self._notify = notify
        self._rasterizer = rasterizer
        self._draws = SampleDraws(config, self.model.device, notify, sample_source)
        self._sampler = SurfaceSampler(config, region.extent)
        self._neighbors = NeighborSearch(self.model, config, self._samples_are_drawn)
        self.components = [*components, self._neighbors]

    def phase(self, iteration: int) -> str:
        """Opacities are made binary, then the geometry is regularised."""
        is_geometric = self._config.schedule.regularization_active(iteration)
        return "geometry" if is_geometric else "entropy"

    def begin(self, iteration: int) -> None:
        """Set the learning rate, make the one prune, and search neighbours where they are due."""
        schedule = self._config.schedule
        self.model.schedule_position_rate(iteration / schedule.schedule_scale)
        if self._is_prune_due(iteration):
            self._prune(iteration)
        super().begin(iteration)

    def rules(self, iteration: int) -> IterationRules:
        """The one prune removes Gaussians."""
        rules = super().rules(iteration)
        return replace(rules, changes_population=True) if self._is_prune_due(iteration) else rules

    def prepare(self, view: TrainingView) -> TrainingView:
        """Complete a view, put it on its background, and choose the seed of its samples."""
        view = self.composited(super().prepare(view))
        if not self._samples_are_drawn(view.iteration):
            return view
        camera = view.camera
        half = None
        if acting(self.terms, view.iteration)["half-size image"]:
            half = camera.resized(max(1, camera.width // 2), max(1, camera.height // 2))
        return replace(view, surface=CoarseView(self._draws.seed(view), half))

    def variant(self, view: TrainingView) -> Hashable | None:
        """Add the capacity for samples; None where the host has to count them."""
        if not self._samples_are_drawn(view.iteration):
            return super().variant(view)
        guess = self._draws.room(view.camera, len(self.model))
        return None if guess is None else (super().variant(view), guess.capacity)

    def train_on(self, view: TrainingView, resources: StepResources) -> ViewResult:
        """Backpropagate every active term; see :mod:`gaussian_splatting.engine.strips`.

        What needs the image comes last: nothing as large as it is alive beside the other terms.
        """
        activated = self.model.trained_cloud.activate(graph=False)
        gaussians = self.collecting(activated, view, resources)
        leaves = gaussians.as_leaves()
        view, features = self.with_features(view, leaves)
        terms = self.all_terms(view)
        active = acting(terms, view.iteration)
        maps = {name for term in active["image"] + active["samples"] for name in term.maps}
        projection = project(
            leaves,
            view.camera,
            depth="depth" in maps,
            normal="normal" in maps,
            features=features,
            graph=False,
        )
        view_pass = self.view_pass(
            projection, view, resources, farthest_depth_behind=self._config.uses_sdf
        )
        first = self._backpropagate_samples(active, leaves, view, view_pass, resources)
        of_image, _ = view_pass.backpropagate(active["image"], first.d_depth)
        gaussians.collect(leaves)
        figures = report(terms, {**first.values, **of_image})
        predicted = [*first.predicted, *view_pass.predictions]
        return ViewResult(view, figures, view_pass.radii, predicted=predicted)

    def note(self, result: ViewResult) -> None:
        """Let the draws take note of a view's number of candidates."""
        self._draws.note(result)

    def view_metrics(self, camera: Camera, output: RenderOutput) -> dict[str, float]:
        """Mean |cos| between rendered normals and those of the depth map, on solid pixels."""
        figures = super().view_metrics(camera, output)
        from_depth = normals_from_depth(output.depth, camera.fx, camera.fy, camera.cx, camera.cy)
        has_normal = from_depth.abs().sum(dim=-1) > 0
        counted = (output.alpha > SOLID_ALPHA) & has_normal
        if not bool(counted.any()):
            return figures
        cosine = (output.normal * from_depth).sum(dim=-1).abs()
        return {**figures, "normal_agreement": float(cosine[counted].mean())}

    def _is_prune_due(self, iteration: int) -> bool:
        return iteration - 1 == self._config.schedule.prune

    def _samples_are_drawn(self, iteration: int) -> bool:
        return bool(acting(self.terms, iteration)["samples"])

    def _prune(self, iteration: int) -> None:
        """Remove Gaussians that are nearly transparent, or outside of the masks' hull."""
        opacities = self.model.cloud.detached().activate().opacities
        keep = opacities >= self._config.prune_opacity
        inside = ""
        if self._hull is not None:
            keep &= self._hull.contains(self.model.cloud.means)
            inside = " inside of the masks' hull"
        n_kept = int(keep.sum())
        check_population(n_kept, iteration, "pruning by opacity")
        self._notify(
            f"iteration {iteration}: kept {n_kept:,} of {len(keep):,} Gaussians, "
            f"those of opacity {self._config.prune_opacity:g} and more{inside}"
        )
        self.keep_rows(keep)

    def _backpropagate_samples(
        self,
        active: dict[Place, list[LossTerm]],
        leaves: Gaussians,
        view: TrainingView,
        view_pass: ViewPass,
        resources: StepResources,
    ) -> _FirstTerms:
        """Backpropagate the terms that do not look at the full image."""
        sample_terms = active["samples"]
        inputs = VisibleGaussians(leaves, view_pass.visible)
        results = _FirstTerms(backpropagate(active["model"], inputs))
        if any("depth" in term.maps for term in sample_terms):
            results.depth = cut(view_pass.depth())
        if active["half-size image"]:
            half_pass = self._half_size_pass(leaves, view, resources)
            results.values |= half_pass.backpropagate(active["half-size image"]).values
            results.predicted += half_pass.predictions
        if sample_terms:
            mask = sampling_mask(leaves, view.camera, view_pass.visible, results.depth)
            samples = self._draws.draw(mask, view, view.surface.seed)
            if samples.guess is not None:
                results.predicted.append(samples.guess)
            results.values |= self._sampler.backward(
                sample_terms,
                leaves,
                self._neighbors.found(),
                samples,
                SampledView(view.camera, results.depth),
                resources.memory.sample_chunk or max(1, len(samples.indices)),
            )
        return results

    def _half_size_pass(
        self, leaves: Gaussians, view: TrainingView, resources: StepResources
    ) -> ViewPass:
        """Project depth and normals at half the size, for terms that look at nothing else."""
        half = view.surface.half
        # No colour is rendered: zeros as its gradient, three quarters of all, need not be kept.
        shapes = replace(leaves, sh_dc=leaves.sh_dc.detach(), sh_rest=leaves.sh_rest.detach())
        projection = project(shapes, half, rgb=False, depth=True, normal=True, graph=False)
        half_view = TrainingView(half, halved_mask(view.target, half), view.iteration)
        return self.view_pass(projection, half_view, resources)


def build_coarse_stage(
    cloud: GaussianCloud, config: CoarseConfig, context: StageContext
) -> CoarseStage:
    """Build the stage of a run."""
    return CoarseStage(
        cloud,
        config,
        context.region(),
        context.console.info,
        context.rasterizer,
        context.components,
    )
