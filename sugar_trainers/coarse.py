# SPDX-License-Identifier: Apache-2.0
"""The coarse SuGaR stage: free Gaussians drawn towards the surface.

Guédon & Lepetit, CVPR 2024, section 4, with the depth-normal consistency that the authors added
in 2024. One stage serves the three regularisations; they differ in the terms of
:meth:`CoarseStage.accumulate` and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gaussian_splatting.cameras import Camera
from gaussian_splatting.cloud import GaussianCloud, Gaussians
from gaussian_splatting.engine.graph import backward_through, cut
from gaussian_splatting.engine.guard import check_population
from gaussian_splatting.engine.rendering import plain_background, render_view
from gaussian_splatting.engine.stage import StepResult
from gaussian_splatting.engine.trainable import TrainableCloud
from gaussian_splatting.photometric import color_loss
from gaussian_splatting.rasterization import RenderOutput, rasterize
from sugar_scene.sampling import draw_samples
from sugar_trainers.coarse_config import CoarseConfig
from sugar_trainers.losses import (
    depth_normal_consistency,
    normals_from_depth,
    opacity_entropy,
)
from sugar_trainers.sampling_block import SurfaceSampler
from sugar_utils.neighbors import nearest_neighbors
from sugar_utils.random import generator

SampleSource = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]
"""(mask, number, iteration) -> (indices, noise), see :func:`draw_samples`."""

SOLID_ALPHA = 0.5


class CoarseStage:
    """Colour, entropy and geometric terms on free Gaussians.

    Args:
        cloud: Gaussians of the vanilla checkpoint, on the device to train on.
        config: Settings.
        extent: Camera extent in world units.
        notify: Told about iterations whose sampling terms had nothing to sample.
        sample_source: Replaces the random draws, for comparisons with recorded ones.
    """

    def __init__(
        self,
        cloud: GaussianCloud,
        config: CoarseConfig,
        extent: float,
        notify: Callable[[str], None],
        sample_source: SampleSource | None = None,
    ) -> None:
        self.name = f"coarse {config.regularization}"
        self.extent = extent
        self.model = TrainableCloud(cloud, config.rates, extent, config.optimizer, config.seed)
        self.neighbors: Tensor | None = None
        self._config = config
        self._notify = notify
        self._draw = sample_source or self._draw_samples
        self._sampler = SurfaceSampler(config, extent)

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

    def accumulate(self, iteration: int, camera: Camera, target: Tensor) -> StepResult:
        """Backpropagate every active term; see :mod:`gaussian_splatting.engine.graph`."""
        config, schedule = self._config, self._config.schedule
        geometric = schedule.regularization_active(iteration)
        full_size_normals = geometric and config.uses_depth_normals and config.full_res_normals
        gaussians = self.model.cloud.activate()
        leaves = gaussians.as_leaves()
        output = rasterize(
            leaves,
            camera,
            plain_background(config.white_background, self.model.device),
            depth=full_size_normals or (geometric and config.uses_sdf),
            normal=full_size_normals,
            farthest_depth_behind=config.uses_sdf,
        )
        rendered = [t for t in (output.image, output.depth, output.normal) if t is not None]
        pixels = [cut(t) for t in rendered]

        terms = {"color": color_loss(pixels[0], target)}
        loss = _backward(terms["color"], 1.0)
        if schedule.entropy_active(iteration) and bool(output.visible.any()):
            terms["entropy"] = opacity_entropy(leaves.opacities[output.visible])
            loss += _backward(terms["entropy"], config.entropy_factor)
        if geometric and config.uses_depth_normals:
            terms["dn"] = self._depth_normal_term(leaves, camera, pixels[1:])
            loss += _backward(terms["dn"], config.dn_factor)
        if geometric:
            depth = pixels[1] if config.uses_sdf else None
            sampled = self._sampling_terms(iteration, leaves, camera, output.visible, depth)
            loss += sampled.pop("weighted", 0.0)
            terms.update(sampled)
        backward_through(rendered, pixels)
        backward_through(gaussians.tensors(), leaves.tensors())
        return StepResult(
            {"loss": loss, **{name: term.detach() for name, term in terms.items()}}, output.radii
        )

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

    def export(self, iteration: int) -> None:
        """Nothing: the checkpoint itself is the stage's result."""

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
        found = nearest_neighbors(
            self.model.cloud.means.detach(),
            self._config.n_neighbors,
            query_batch=self._config.knn_batch_size,
        )
        self.neighbors = found.indices

    def _depth_normal_term(self, leaves: Gaussians, camera: Camera, maps: list[Tensor]) -> Tensor:
        """The term at full size from the pass already made, or from one of its own at half."""
        if maps:
            depth, normal = maps
        else:
            camera = camera.resized(max(1, camera.width // 2), max(1, camera.height // 2))
            half = rasterize(leaves, camera, rgb=False, depth=True, normal=True)
            depth, normal = half.depth, half.normal
        return depth_normal_consistency(depth, normal, camera.fx, camera.fy, camera.cx, camera.cy)

    def _sampling_terms(
        self,
        iteration: int,
        leaves: Gaussians,
        camera: Camera,
        visible: Tensor,
        depth: Tensor | None,
    ) -> dict[str, Tensor]:
        mask = self._sampler.mask(leaves, camera, visible, depth)
        indices, noise = self._draw(mask, self._config.samples, iteration)
        if indices.numel() == 0:
            self._notify(
                f"iteration {iteration}: {camera.name} shows no Gaussian to sample; its surface "
                "terms are left out"
            )
            return {}
        return self._sampler.backward(leaves, self.neighbors, indices, noise, camera, depth)

    def _draw_samples(self, mask: Tensor, n: int, iteration: int) -> tuple[Tensor, Tensor]:
        rng = generator(self._config.seed, "samples", iteration, device=mask.device)
        return draw_samples(mask, n, rng)


def _backward(term: Tensor, weight: float) -> Tensor:
    """Backpropagate a weighted term at once and return its weighted value."""
    weighted = weight * term
    weighted.backward()
    return weighted.detach()
