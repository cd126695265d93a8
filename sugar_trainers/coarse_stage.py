# SPDX-License-Identifier: Apache-2.0
"""The coarse SuGaR stage: free Gaussians drawn towards the surface.

Guédon & Lepetit, CVPR 2024, section 4, with the depth-normal consistency that the authors added
in 2024. One stage serves the three regularisations; they differ in their terms
(:mod:`sugar_trainers.terms`) and in what is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from gaussian_splatting.cloud import GaussianCloud, Gaussians
from gaussian_splatting.components.densification import Region
from gaussian_splatting.components.depth_supervision import SOLID_ALPHA
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.component import Component, ViewResult
from gaussian_splatting.engine.gradients import cut
from gaussian_splatting.engine.guard import check_population
from gaussian_splatting.engine.loss_terms import LossTerm, Place, acting, backpropagate, report
from gaussian_splatting.engine.memory_plan import MemoryPlan
from gaussian_splatting.engine.model import TrainableCloud
from gaussian_splatting.engine.stage import Stage, StepResources
from gaussian_splatting.engine.strips import ImageSplit, ViewPass
from gaussian_splatting.engine.training_views import TrainingView, halved_mask
from gaussian_splatting.rasterization import WARP, Rasterizer, RenderOutput, project
from sugar_scene.geometry import draw_samples
from sugar_trainers.losses import normals_from_depth
from sugar_trainers.neighbor_search import NeighborSearch
from sugar_trainers.sampling import SampledView, Samples, SurfaceSampler, sampling_mask
from sugar_trainers.stage_config import CoarseConfig
from sugar_trainers.stage_options import StageContext
from sugar_trainers.terms import VisibleGaussians, coarse_terms
from sugar_utils.errors import Notify
from sugar_utils.random import derive_seed, draw_labels

SampleSource = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]
"""Draws indices and noise from a mask, a number of samples, and the iteration."""


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
        self.memory_plan = MemoryPlan(config.split, min(config.sample_chunk, most_samples))
        self._config = config
        self._hull = region.hull
        self._notify = notify
        self._rasterizer = rasterizer
        self._sample_source = sample_source
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
        if iteration - 1 == schedule.prune:
            self._prune(iteration)
        super().begin(iteration)

    def prepare(self, view: TrainingView) -> TrainingView:
        """Complete a view, and put it on its background."""
        return self.composited(super().prepare(view))

    def recorded_as(self, view: TrainingView) -> Hashable | None:
        """Return the terms; None where samples are drawn, whose number the host reads."""
        active = acting(self.terms, view.iteration)
        has_samples = bool(active["samples"] or active["half-size image"])
        if has_samples or not self._is_plain(view.iteration):
            return None
        return tuple(term.name for terms in active.values() for term in terms)

    def train_on(self, view: TrainingView, resources: StepResources) -> ViewResult:
        """Backpropagate every active term; see :mod:`gaussian_splatting.engine.strips`.

        What needs the image comes last: nothing as large as it is alive beside the other terms.
        """
        gaussians = self.leaving_factors(self.model.cloud.activate(graph=False), resources)
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
        values, depth = self._backpropagate_samples(active, leaves, view, view_pass, resources)
        of_image, _ = view_pass.backpropagate(
            active["image"], None if depth is None else depth.grad
        )
        gaussians.collect(leaves)
        figures = report(terms, {**values, **of_image})
        return ViewResult(view, figures, view_pass.radii, predicted=view_pass.predictions)

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
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Backpropagate the terms that do not look at the full image.

        Returns:
            Their values by name, and a leaf with the rendered depth that holds the gradient of
            terms at samples; None where none of them reads depth. (H, W)
        """
        sample_terms = active["samples"]
        reads_depth = any("depth" in term.maps for term in sample_terms)
        n_visible = None
        if sample_terms and not reads_depth:
            n_visible = view_pass.count()
        inputs = VisibleGaussians(leaves, view_pass.visible)
        values = backpropagate(active["model"], inputs)
        depth = cut(view_pass.depth()) if reads_depth else None
        if active["half-size image"]:
            terms = active["half-size image"]
            values |= self._half_size_terms(terms, leaves, view, resources.memory.split)
        if sample_terms:
            mask = sampling_mask(leaves, view.camera, view_pass.visible, depth)
            n_candidates = n_visible
            if depth is not None or n_candidates is None:
                n_candidates = int(mask.sum())
            samples = self._draw(mask, n_candidates, view)
            values |= self._sampler.backward(
                sample_terms,
                leaves,
                self._neighbors.found(),
                samples,
                SampledView(view.camera, depth, n_candidates),
                resources.memory.sample_chunk or max(1, len(samples.indices)),
            )
        return values, depth

    def _half_size_terms(
        self, terms: Sequence[LossTerm], leaves: Gaussians, view: TrainingView, split: ImageSplit
    ) -> dict[str, Tensor]:
        """Backpropagate terms of depth and normals from a pass of their own at half the size."""
        camera = view.camera
        half = camera.resized(max(1, camera.width // 2), max(1, camera.height // 2))
        # No colour is rendered: zeros as its gradient, three quarters of all, need not be kept.
        shapes = replace(leaves, sh_dc=leaves.sh_dc.detach(), sh_rest=leaves.sh_rest.detach())
        projection = project(shapes, half, rgb=False, depth=True, normal=True, graph=False)
        half_view = TrainingView(half, halved_mask(view.target, half), view.iteration)
        view_pass = ViewPass(projection, half_view, split, rasterizer=self._rasterizer)
        return view_pass.backpropagate(terms).values

    def _draw(self, mask: Tensor, n_candidates: int, view: TrainingView) -> Samples:
        """Draw samples in Gaussians of the mask, (N,) bool."""
        n_samples = self._config.samples_for(n_candidates)
        if self._sample_source is not None:
            indices, noise = self._sample_source(mask, n_samples, view.iteration)
        else:
            labels = draw_labels(view.iteration, view.index)
            seed = derive_seed(self._config.random_seed, "samples", *labels)
            indices, noise = draw_samples(mask, n_samples, seed, n_candidates)
        if indices.numel() == 0:
            self._notify(
                f"iteration {view.iteration}: {view.camera.name} shows no Gaussian to sample; its "
                "surface terms are left out"
            )
        return Samples(indices, noise)


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
