# SPDX-License-Identifier: Apache-2.0
"""The coarse SuGaR stage: free Gaussians drawn towards the surface, and its run.

Guédon & Lepetit, CVPR 2024, section 4, with the depth-normal consistency that the authors added
in 2024. One stage serves the three regularisations; they differ in their terms
(:mod:`sugar_trainers.terms`) and in what is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from gaussian_splatting.cloud import GaussianCloud, Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.depth_maps import NOTHING_KNOWN, DepthOptions, KnownDepths
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.data.masks import VisualHull, hull_of
from gaussian_splatting.data.reference_layout import ReferenceCheckpoint
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.engine.guard import check_population
from gaussian_splatting.engine.loop import LoopConfig
from gaussian_splatting.engine.memory_plan import MemoryPlan
from gaussian_splatting.engine.model import TrainableCloud
from gaussian_splatting.engine.runner import Messages
from gaussian_splatting.engine.stage import (
    SOLID_ALPHA,
    LossTerm,
    Stage,
    StepResult,
    acting,
    backpropagate,
    later_depth_terms,
    report,
)
from gaussian_splatting.engine.strips import ViewPass, backward_through, cut
from gaussian_splatting.engine.training_views import Target, halved_mask
from gaussian_splatting.optim.learned_exposure import Exposures
from gaussian_splatting.optim.schedule import scaled_all, spaced
from gaussian_splatting.rasterization import WARP, Rasterizer, RenderOutput, project
from gaussian_splatting.shared_flags import (
    Preset,
    checkpoint_interval,
    least_checkpoint_interval,
    preset,
    scaled_checkpoint_interval,
)
from sugar_scene.geometry import draw_samples
from sugar_trainers.losses import normals_from_depth
from sugar_trainers.naming import OUTPUT_ROOT, coarse_name, scene_name
from sugar_trainers.stage_config import CoarseConfig
from sugar_trainers.stage_options import TrainingOptions
from sugar_trainers.terms import SurfaceSampler, VisibleGaussians, coarse_terms, sampling_mask
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import file_digest
from sugar_utils.neighbors import nearest_neighbors
from sugar_utils.random import derive_seed, draw_labels
from sugar_utils.settings import flag

SampleSource = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]  # mask, n, iteration -> draws

INTENDED_START = 7_000
LEAST_BETWEEN_TESTS = 500  # iterations; to measure all held-out views takes as long as some dozens
_flag = partial(flag, group="coarse stage")


class CoarseStage(Stage):
    """Colour, entropy and geometric terms on free Gaussians.

    ``sample_source`` replaces the random draws, for comparisons with recorded ones.
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
        hull: VisualHull | None = None,
        exposures: Exposures | None = None,
        depths: KnownDepths = NOTHING_KNOWN,
    ) -> None:
        self.name = f"coarse {config.regularization_type}"
        self.extent = extent
        self.exposures = exposures
        self.depths = depths
        self.terms = coarse_terms(config) + later_depth_terms(depths)
        self.model = TrainableCloud(
            cloud, config.rates, extent, config.optimizer, config.random_seed
        )
        self.neighbors: Tensor | None = None
        self._config = config
        self._notify = notify
        self._rasterizer = rasterizer
        self._given_samples = sample_source
        self._hull = hull
        self._sampler = SurfaceSampler(config, extent)

    @property
    def memory_plan(self) -> MemoryPlan:
        most = self._config.samples_for(len(self.model))
        return MemoryPlan(self._config.split, min(self._config.sample_chunk, most))

    @memory_plan.setter
    def memory_plan(self, plan: MemoryPlan) -> None:
        chunk = plan.sample_chunk or self._config.samples_for(len(self.model))
        self._config = replace(self._config, split=plan.split, sample_chunk=chunk)
        self._sampler = SurfaceSampler(self._config, self.extent)

    def phase(self, iteration: int) -> str:
        """Opacities are made binary, then the geometry is regularised."""
        geometric = self._config.schedule.regularization_active(iteration)
        return "geometry" if geometric else "entropy"

    def begin(self, iteration: int) -> None:
        """Learning rate, the one prune, and neighbours where they are due or missing."""
        schedule = self._config.schedule
        self.model.schedule_position_rate(iteration / schedule.schedule_scale)
        if iteration - 1 == schedule.prune:
            self._prune(iteration)
        stale = self.neighbors is None or iteration % schedule.neighbor_interval == 0
        if stale and acting(self.terms, iteration)["samples"]:
            means = self.model.cloud.means.detach()
            k = self._config.n_neighbors
            found = nearest_neighbors(means, k, query_batch=self._config.knn_batch_size)
            self.neighbors = found.indices

    def accumulate(
        self, iteration: int, camera: Camera, target: Tensor, view_index: int = 0
    ) -> StepResult:
        """Backpropagate every active term; see :mod:`gaussian_splatting.engine.strips`.

        What needs the image comes last: nothing as large as it is alive beside the other terms.
        """
        on = acting(self.terms, iteration)
        gaussians = self.gaussians()
        leaves = gaussians.as_leaves()
        seen = self.target(target, camera, iteration, view_index)
        read = [name for term in on["image"] + on["samples"] for name in term.maps]
        view = ViewPass(
            project(
                leaves,
                camera,
                depth="depth" in read,
                normal="normal" in read,
                features=self.depth_feature(leaves, camera),
            ),
            seen.background,
            self._config.split,
            farthest_depth_behind=self._config.uses_sdf,
            rasterizer=self._rasterizer,
            pairs=self.pairs,
        )
        near_depth = any("depth" in term.maps for term in on["samples"])
        asked = on["model"] or (on["samples"] and not near_depth)
        n_visible = view.count() if asked else None
        found = backpropagate(on["model"], VisibleGaussians(leaves, view.visible, n_visible))
        depth = cut(view.depth()) if near_depth else None
        if small := on["half-size image"]:
            found.update(self._half_size_terms(small, leaves, camera, seen.photograph))
        if on["samples"]:
            mask = sampling_mask(leaves, camera, view.visible, depth)
            n_candidates = n_visible if depth is None else int(mask.sum())
            samples = self._samples(mask, n_candidates, camera, iteration, view_index)
            found |= self._sampler.backward(
                on["samples"], leaves, self.neighbors, *samples, camera, depth, n_candidates
            )
        images = [term.bind(camera, seen) for term in on["image"]]
        of_image, _ = view.backpropagate(images, None if depth is None else depth.grad)
        backward_through(gaussians.tensors(), leaves.tensors())
        commit = partial(self.collect_exposure, camera.name, seen.exposure)
        terms = report(self.terms, {**found, **of_image})
        return StepResult(terms, view.radii, view.guess, commit)

    def view_metrics(self, camera: Camera, output: RenderOutput) -> dict[str, float]:
        """Mean |cos| between rendered normals and those of the depth map, on solid pixels."""
        figures = super().view_metrics(camera, output)
        from_depth = normals_from_depth(output.depth, camera.fx, camera.fy, camera.cx, camera.cy)
        counted = (output.alpha > SOLID_ALPHA) & (from_depth.abs().sum(dim=-1) > 0)
        if not bool(counted.any()):
            return figures
        cosine = (output.normal * from_depth).sum(dim=-1).abs()
        return {**figures, "normal_agreement": float(cosine[counted].mean())}

    def extra_state(self) -> dict[str, Any]:
        """Neighbours of the last search, not of the current positions; exposures."""
        own = {} if self.neighbors is None else {"neighbors": self.neighbors}
        return {**own, **super().extra_state()}

    def restore_extra(self, state: dict[str, Any]) -> None:
        super().restore_extra(state)
        if "neighbors" in state:
            self.neighbors = state["neighbors"].to(self.model.device)

    def _prune(self, iteration: int) -> None:
        keep = self.model.cloud.detached().activate().opacities >= self._config.prune_opacity
        inside = ""
        if self._hull is not None:
            keep &= self._hull.contains(self.model.cloud.means)
            inside = " inside of the masks' hull"
        check_population(int(keep.sum()), iteration, "pruning by opacity")
        self._notify(
            f"iteration {iteration}: kept {int(keep.sum()):,} of {len(keep):,} Gaussians, "
            f"those of opacity {self._config.prune_opacity:g} and more{inside}"
        )
        self.model.optimizer.keep_rows(keep)
        self.neighbors = None

    def _half_size_terms(
        self, terms: Sequence[LossTerm], leaves: Gaussians, camera: Camera, target: Tensor
    ) -> dict[str, Tensor]:
        """Backpropagate terms of depth and normals from a pass of their own at half the size."""
        half = camera.resized(max(1, camera.width // 2), max(1, camera.height // 2))
        # No colour is rendered: zeros as its gradient, three quarters of all, need not be kept.
        shapes = replace(leaves, sh_dc=leaves.sh_dc.detach(), sh_rest=leaves.sh_rest.detach())
        projected = project(shapes, half, rgb=False, depth=True, normal=True)
        view = ViewPass(projected, None, self._config.split, rasterizer=self._rasterizer)
        counted = Target(halved_mask(target, half))
        found, _ = view.backpropagate([term.bind(half, counted) for term in terms])
        return found

    def _samples(
        self, mask: Tensor, n_candidates: int, camera: Camera, iteration: int, view_index: int
    ) -> tuple[Tensor, Tensor]:
        n = self._config.samples_for(n_candidates)
        if self._given_samples is not None:
            indices, noise = self._given_samples(mask, n, iteration)
        else:
            labels = draw_labels(iteration, view_index)
            seed = derive_seed(self._config.random_seed, "samples", *labels)
            indices, noise = draw_samples(mask, n, seed, n_candidates)
        if indices.numel() == 0:
            self._notify(
                f"iteration {iteration}: {camera.name} shows no Gaussian to sample; its surface "
                "terms are left out"
            )
        return indices, noise


@dataclass(frozen=True, kw_only=True)
class CoarseOptions(TrainingOptions):
    """A coarse run.

    Milestones and intervals are in iterations of the paper's schedule; the schedule's scale
    applies to them as well.
    """

    output_dir: Path | None = flag(
        None,
        "folder in which the run's folder is made; unset: output/coarse/<scene>",
        group="single coarse stage",
        short="-o",
        parse=Path,
    )
    preset: Preset = preset("single coarse stage")
    config: CoarseConfig = field(default_factory=CoarseConfig)
    depth_options: DepthOptions = field(default_factory=DepthOptions)
    checkpoint_interval: int = checkpoint_interval("coarse stage")
    checkpoint_milestones: tuple[int, ...] = _flag(
        (5_000, 7_000, 10_000, 13_000, 15_000),
        "further checkpoints, never thinned out; those "
        "before the first iteration, 7000, never come",
    )
    test_iterations: tuple[int, ...] = _flag(
        (7_000, 8_000, 9_000, 10_000, 12_000, 15_000),
        "when to measure the held-out views and "
        "picture some; the last iteration always; on short schedules no closer than 500",
        no_effect_when="with --eval False nothing is measured; pictures are then of training views",
    )

    @property
    def title(self) -> str:
        return f"coarse SuGaR, {self.config.regularization_type}"

    @property
    def messages(self) -> tuple[str, ...]:
        lines = [*super().messages, *self.config.messages]
        if not self.eval and self.test_iterations != CoarseOptions.test_iterations:
            lines.append("--test_iterations has no effect with --eval False: nothing is held out")
        return tuple(lines)

    @property
    def directory(self) -> Path:
        parent = self.output_dir or OUTPUT_ROOT / "coarse" / scene_name(self.scene_path)
        mode = self.config.regularization_type
        weights = self.config.named_weights
        return parent / coarse_name(self.iteration_to_load, mode, *weights)

    @property
    def result(self) -> Path:
        return self.directory / f"{self.config.schedule.last}.pt"

    @property
    def loop(self) -> LoopConfig:
        schedule = self.config.schedule
        scale = self.config.schedule.schedule_scale
        tests = scaled_all(self.test_iterations, scale)
        if self.test_iterations == CoarseOptions.test_iterations:
            tests = spaced(tests, schedule.last, LEAST_BETWEEN_TESTS)
        length = schedule.last - schedule.first
        milestones = scaled_all(self.checkpoint_milestones, scale)
        if self.checkpoint_milestones == CoarseOptions.checkpoint_milestones:
            milestones = spaced(milestones, schedule.last, least_checkpoint_interval(length))
        return LoopConfig(
            first=schedule.first,
            last=schedule.last,
            seed=self.config.random_seed,
            log_interval=schedule.log_interval,
            checkpoint_interval=scaled_checkpoint_interval(self.checkpoint_interval, scale, length),
            checkpoint_milestones=milestones,
            keep_checkpoints=self.run.keep_checkpoints,
            test_iterations=tests,
        )

    def initial(
        self, checkpoint: ReferenceCheckpoint, scene: Scene, messages: Messages
    ) -> tuple[GaussianCloud, dict[str, Any]]:
        advise(self, checkpoint, messages)
        cloud = checkpoint.read_cloud(messages)
        if len(cloud) == 0:
            raise UserError(
                f"{checkpoint.ply_path} holds no Gaussians; train the vanilla stage again"
            )
        messages.detail(f"{len(cloud):,} Gaussians of {checkpoint.ply_path}")
        return cloud.to(self.compute.device), {"Gaussians": file_digest(checkpoint.ply_path)}

    def stage(
        self,
        model: GaussianCloud,
        config: CoarseConfig,
        scene: Scene,
        store: ImageStore,
        console: Console,
        exposures: Exposures | None,
    ) -> Stage:
        return CoarseStage(
            model,
            config,
            scene.extent,
            console.info,
            rasterizer=self.compute.rasterizer,
            hull=hull_of(scene.train_cameras, self.compute.device),
            exposures=exposures,
            depths=scene.depths,
        )


def advise(options: CoarseOptions, checkpoint: ReferenceCheckpoint, messages: Messages) -> None:
    """Point out inputs that work but seldom do what was meant."""
    if checkpoint.iteration is not None and checkpoint.iteration > INTENDED_START:
        messages(
            f"note: SuGaR is made to start from iteration {INTENDED_START}; the Gaussians of "
            f"iteration {checkpoint.iteration} have settled and align less well with the surface"
        )
    lone_ply = options.checkpoint_path.suffix.lower() == ".ply"
    if lone_ply and options.iteration_to_load != INTENDED_START:
        messages("-i/--iteration_to_load only names the output: the checkpoint is a single PLY")
    white = checkpoint.settings.get("white_background")
    if white is not None and white != options.config.white_background:
        messages(
            f"note: the checkpoint was trained with white_background={white}; pass "
            f"--white_background {white} unless the difference is wanted"
        )
