# SPDX-License-Identifier: Apache-2.0
"""The coarse SuGaR stage: free Gaussians drawn towards the surface.

Guédon & Lepetit, CVPR 2024, section 4, with the depth-normal consistency that the authors added
in 2024. One stage serves the three regularisations; they differ in the terms of
:meth:`CoarseStage.accumulate` and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from gaussian_splatting.cloud import GaussianCloud, Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.graph import backward_through, cut
from gaussian_splatting.engine.guard import check_population
from gaussian_splatting.engine.memory_model import MemoryPlan
from gaussian_splatting.engine.rendering import plain_background, render_view
from gaussian_splatting.engine.stage import Stage, StepResult
from gaussian_splatting.engine.strips import ImageTerm, StripMaps, ViewPass, color_term
from gaussian_splatting.engine.trainable import TrainableCloud
from gaussian_splatting.rasterization import WARP, Rasterizer, RenderOutput, project
from sugar_scene.sampling import draw_samples
from sugar_trainers.coarse_config import CoarseConfig
from sugar_trainers.losses import (
    depth_normal_consistency,
    normals_from_depth,
    opacity_entropy,
)
from sugar_trainers.sampling_block import SAMPLED_TERMS, SurfaceSampler, sampling_mask
from sugar_utils.neighbor_backends import NeighborSearch
from sugar_utils.neighbors import nearest_neighbors
from sugar_utils.random import draw_labels, generator

SampleSource = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]
"""(mask, number, iteration) -> (indices, noise), see :func:`draw_samples`."""

SOLID_ALPHA = 0.5


class CoarseStage(Stage):
    """Colour, entropy and geometric terms on free Gaussians.

    Args:
        cloud: Gaussians of the vanilla checkpoint, on the device to train on.
        config: Settings.
        extent: Camera extent in world units.
        notify: Told about iterations whose sampling terms had nothing to sample.
        sample_source: Replaces the random draws, for comparisons with recorded ones.
        rasterizer: Who blends.
        neighbors: Who finds the neighbours of all Gaussians.
    """

    def __init__(
        self,
        cloud: GaussianCloud,
        config: CoarseConfig,
        extent: float,
        notify: Callable[[str], None],
        sample_source: SampleSource | None = None,
        *,
        rasterizer: Rasterizer = WARP,
        neighbors: NeighborSearch = nearest_neighbors,
    ) -> None:
        self.name = f"coarse {config.regularization_type}"
        self.extent = extent
        self.model = TrainableCloud(
            cloud, config.rates, extent, config.optimizer, config.random_seed
        )
        self.neighbors: Tensor | None = None
        self._config = config
        self._notify = notify
        self._rasterizer = rasterizer
        self._find_neighbors = neighbors
        self._given_samples = sample_source
        self._sampler = SurfaceSampler(config, extent)

    @property
    def memory_plan(self) -> MemoryPlan:
        """Strips of the image and chunks of the samples."""
        return MemoryPlan(
            self._config.split, min(self._config.sample_chunk, self._config.sdf_samples)
        )

    @memory_plan.setter
    def memory_plan(self, plan: MemoryPlan) -> None:
        chunk = plan.sample_chunk or self._config.sdf_samples
        self._config = replace(self._config, split=plan.split, sample_chunk=chunk)
        self._sampler = SurfaceSampler(self._config, self.extent)

    def phase(self, iteration: int) -> str:
        """Opacities are made binary, then the geometry is regularised."""
        geometric = self._config.schedule.regularization_active(iteration)
        return "geometry" if geometric else "entropy"

    def begin(self, iteration: int) -> None:
        """Learning rate, the one prune, and neighbours where they are due or missing."""
        schedule = self._config.schedule
        self.model.schedule_position_rate(iteration / schedule.scale)
        if schedule.prune_due(iteration):
            self._prune(iteration)
        stale = self.neighbors is None or schedule.neighbors_due(iteration)
        if schedule.regularization_active(iteration) and stale:
            self._search_neighbors()

    def accumulate(
        self, iteration: int, camera: Camera, target: Tensor, slot: int = 0
    ) -> StepResult:
        """Backpropagate every active term; see :mod:`gaussian_splatting.engine.graph`.

        What needs the image comes last: nothing as large as it is alive beside the other terms.
        """
        config, schedule = self._config, self._config.schedule
        geometric = schedule.regularization_active(iteration)
        gaussians = self.model.cloud.activate()
        leaves = gaussians.as_leaves()
        view = self._view(leaves, camera, geometric)
        image_terms, terms, depth = [color_term(target)], {}, None
        if schedule.entropy_active(iteration) and bool(view.visible.any()):
            entropy = opacity_entropy(leaves.opacities[view.visible])
            (config.entropy_factor * entropy).backward()
            terms["entropy"] = entropy.detach()
        if geometric:
            if config.uses_sdf:
                depth = cut(view.depth())
            view.release()
            if config.uses_depth_normals and config.full_res_normals:
                image_terms.append(depth_normal_term(camera, config.dn_factor))
            elif config.uses_depth_normals:
                terms["dn"] = self._half_size_term(leaves, camera)
            mask = sampling_mask(leaves, camera, view.visible, depth)
            samples = self._samples(mask, iteration, slot)
            terms.update(self._sampling_terms(iteration, leaves, camera, samples, depth))
        found, _ = view.backpropagate(image_terms, None if depth is None else depth.grad)
        backward_through(gaussians.tensors(), leaves.tensors())
        terms.update(found)
        return StepResult(self._with_sum(terms), view.radii)

    def apply(self, iteration: int) -> None:
        """One optimiser step."""
        self.model.optimizer.step()

    def render(self, camera: Camera, *, geometry: bool) -> RenderOutput:
        """Render all degrees of the colour."""
        return render_view(
            self.model.cloud.activate(),
            camera,
            white=self._config.white_background,
            geometry=geometry,
            rasterizer=self._rasterizer,
        )

    def view_metrics(self, camera: Camera, output: RenderOutput) -> dict[str, float]:
        """Mean |cos| between rendered normals and those of the depth map, on solid pixels."""
        from_depth = normals_from_depth(output.depth, camera.fx, camera.fy, camera.cx, camera.cy)
        counted = (output.alpha > SOLID_ALPHA) & (from_depth.abs().sum(dim=-1) > 0)
        if not bool(counted.any()):
            return {}
        cosine = (output.normal * from_depth).sum(dim=-1).abs()
        return {"normal_agreement": float(cosine[counted].mean())}

    def extra_state(self) -> dict[str, Any]:
        """Neighbours: they are those of the last search, not of the current positions."""
        return {} if self.neighbors is None else {"neighbors": self.neighbors}

    def restore_extra(self, state: dict[str, Any]) -> None:
        """Neighbours, if there were any yet."""
        if "neighbors" in state:
            self.neighbors = state["neighbors"].to(self.model.device)

    def _prune(self, iteration: int) -> None:
        opacities = self.model.cloud.detached().activate().opacities
        keep = opacities >= self._config.prune_opacity
        check_population(int(keep.sum()), iteration, "pruning by opacity")
        self._notify(
            f"iteration {iteration}: kept {int(keep.sum()):,} of {len(keep):,} Gaussians, "
            f"those of opacity {self._config.prune_opacity:g} and more"
        )
        self.model.optimizer.keep_rows(keep)
        self.neighbors = None

    def _search_neighbors(self) -> None:
        found = self._find_neighbors(
            self.model.cloud.means.detach(),
            self._config.n_neighbors,
            query_batch=self._config.knn_batch_size,
        )
        self.neighbors = found.indices

    def _view(self, leaves: Gaussians, camera: Camera, geometric: bool) -> ViewPass:
        """The view with colour, and the geometry that active terms need."""
        config = self._config
        normal = geometric and config.uses_depth_normals and config.full_res_normals
        depth = normal or (geometric and config.uses_sdf)
        return ViewPass(
            lambda: project(leaves, camera, depth=depth, normal=normal),
            plain_background(config.white_background, self.model.device),
            config.split,
            farthest_depth_behind=config.uses_sdf,
            rasterizer=self._rasterizer,
        )

    def _half_size_term(self, leaves: Gaussians, camera: Camera) -> Tensor:
        """Backpropagate depth-normal consistency from a pass of its own at half the size."""
        config = self._config
        half = camera.resized(max(1, camera.width // 2), max(1, camera.height // 2))
        # No colour is rendered: zeros as its gradient, three quarters of all, need not be kept.
        shapes = replace(leaves, sh_dc=leaves.sh_dc.detach(), sh_rest=leaves.sh_rest.detach())
        view = ViewPass(
            lambda: project(shapes, half, rgb=False, depth=True, normal=True),
            None,
            config.split,
            rasterizer=self._rasterizer,
        )
        found, _ = view.backpropagate([depth_normal_term(half, config.dn_factor)])
        return found["dn"]

    def _with_sum(self, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weighted sum and the terms, in the order of the paper.

        Raises:
            KeyError: A term has no weight, so it would be missing in the sum.
        """
        weights = self._config.term_weights
        if not terms.keys() <= weights.keys():
            raise KeyError(f"loss terms without a weight: {sorted(terms.keys() - weights.keys())}")
        shown = {name: terms[name] for name in weights if name in terms}
        weighted = {name: weights[name] * value for name, value in shown.items()}
        sampled = [weighted.pop(name) for name in SAMPLED_TERMS if name in weighted]
        # Those at samples are summed apart, as they are backpropagated.
        return {"loss": sum(weighted.values()) + sum(sampled), **shown}

    def _sampling_terms(
        self,
        iteration: int,
        leaves: Gaussians,
        camera: Camera,
        samples: tuple[Tensor, Tensor],
        depth: Tensor | None,
    ) -> dict[str, Tensor]:
        indices, noise = samples
        if indices.numel() == 0:
            self._notify(
                f"iteration {iteration}: {camera.name} shows no Gaussian to sample; its surface "
                "terms are left out"
            )
            return {}
        return self._sampler.backward(leaves, self.neighbors, indices, noise, camera, depth)

    def _samples(self, mask: Tensor, iteration: int, slot: int) -> tuple[Tensor, Tensor]:
        n = self._config.sdf_samples
        if self._given_samples is not None:
            return self._given_samples(mask, n, iteration)
        labels = draw_labels(iteration, slot)
        rng = generator(self._config.random_seed, "samples", *labels, device=mask.device)
        return draw_samples(mask, n, rng)


def depth_normal_term(camera: Camera, weight: float) -> ImageTerm:
    """Depth-normal consistency of the strips of a view; reported as ``"dn"``.

    Args:
        camera: The view, at the size of the maps.
        weight: Weight in the loss.
    """

    def evaluate(maps: StripMaps) -> tuple[Tensor, dict[str, Tensor]]:
        error = depth_normal_consistency(
            maps.depth,
            maps.normal,
            camera.fx,
            camera.fy,
            camera.cx,
            camera.cy - maps.shown.start,
            rows=maps.counted,
            total=maps.height * camera.width,
        )
        return weight * error, {"dn": error}

    return ImageTerm(1, evaluate)
