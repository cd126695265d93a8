# SPDX-License-Identifier: Apache-2.0
"""Memory of SuGaR's stages: what their phases work on, and the plan that fits a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from gaussian_splatting.cloud import GaussianCloud, Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.engine.memory_model import (
    BOUND_ACTIVATION,
    FREE_ACTIVATION,
    MemoryPlan,
    ModelLoad,
    StepLoad,
    ViewLoad,
)
from gaussian_splatting.engine.memory_plan import (
    LoadsOf,
    MemoryChoice,
    MemoryOptions,
    choose,
    survey,
    surveyed,
    usable_bytes,
    worst_view,
)
from gaussian_splatting.optim.optimizer_config import OptimizerConfig
from gaussian_splatting.rasterization import rasterize
from sugar_scene.fields.field_kernels import pair_bytes
from sugar_scene.mesh_bound import BoundCloud
from sugar_scene.trainable_bound import GROUP_NAMES
from sugar_trainers.coarse_config import CoarseConfig
from sugar_trainers.multiview_config import MultiviewConfig
from sugar_trainers.refine_config import RefineConfig
from sugar_trainers.sampling_block import sampling_mask
from sugar_utils.console import Console

StageSettings = CoarseConfig | MultiviewConfig | RefineConfig
WithoutSamples = TypeVar("WithoutSamples", MultiviewConfig, RefineConfig)

_TOPOLOGY_BYTES = 26 + 50
"""Per triangle, as kernels take it: its corners; one and a half pairs of adjacent triangles, with
four corners each; the order of both by vertex."""


def sampling_candidates(
    gaussians: Gaussians, config: CoarseConfig, cameras: Sequence[Camera]
) -> int | None:
    """Gaussians that samples are drawn from in the fullest view; None: all that are visible."""
    if not config.uses_sdf:
        return None
    counts = []
    with torch.no_grad():
        for camera in cameras:
            output = rasterize(gaussians, camera, rgb=False, depth=True)
            mask = sampling_mask(gaussians, camera, output.visible, output.depth)
            counts.append(int(mask.sum()))
    return max(counts)


def coarse_loads(
    cloud: GaussianCloud,
    config: CoarseConfig,
    views: Sequence[ViewLoad],
    candidates: int | None = None,
) -> LoadsOf:
    """Both phases of the coarse stage, as if no Gaussian were pruned between them."""
    n, geometry = len(cloud), "none"
    if config.uses_sdf:
        geometry = "depth"
    elif config.uses_depth_normals:
        geometry = "full" if config.full_res_normals else "half"

    def loads(optimizer: OptimizerConfig) -> Mapping[str, StepLoad]:
        model = ModelLoad.of(cloud.tensors(), optimizer)
        entropy = StepLoad(
            n,
            model,
            views[0],
            activation=FREE_ACTIVATION * n,
            entropy=True,
            exposure=config.exposure.exposure_compensation,
        )
        surface = replace(
            entropy,
            geometry=geometry,
            samples=config.samples_for(n),
            candidates=candidates,
            neighbors=config.n_neighbors,
            pair_bytes=pair_bytes(cloud.means.device),
            entropy=False,
        )
        return {
            "entropy": worst_view(entropy, views),
            "geometry": worst_view(surface, views),
        }

    return loads


def multiview_loads(
    cloud: GaussianCloud, config: MultiviewConfig, views: Sequence[ViewLoad]
) -> LoadsOf:
    """The multi-view mode with the most Gaussians that it may have; without a limit, with those
    that it begins with."""
    n = max(len(cloud), config.densification.max_gaussians or 0)
    views = [view.grown(n / max(len(cloud), 1)) for view in views]
    # Of these nothing but shapes is asked for.
    tensors = {name: t[:1].expand(n, *t.shape[1:]) for name, t in cloud.tensors().items()}

    def loads(optimizer: OptimizerConfig) -> Mapping[str, StepLoad]:
        load = StepLoad(
            n,
            ModelLoad.of(tensors, optimizer),
            views[0],
            geometry="planes",
            activation=FREE_ACTIVATION * n,
            exposure=config.exposure.exposure_compensation,
        )
        return {"multiview": worst_view(load, views)}

    return loads


def refinement_loads(
    cloud: BoundCloud, views: Sequence[ViewLoad], exposure: bool = False, compared: bool = False
) -> LoadsOf:
    """The one phase of the refinement.

    Args:
        compared: Whether views are compared; counted as in the multi-view mode, a little more.
    """
    tensors: dict[str, Tensor] = {name: getattr(cloud, name) for name in GROUP_NAMES}
    n, n_faces = cloud.opacity_logits.shape[0], cloud.faces.shape[0]
    per_face, per_gaussian = BOUND_ACTIVATION
    fixed = cloud.faces.nbytes + _TOPOLOGY_BYTES * n_faces

    def loads(optimizer: OptimizerConfig) -> Mapping[str, StepLoad]:
        load = StepLoad(
            n,
            ModelLoad.of(tensors, optimizer),
            views[0],
            activation=per_face * n_faces + per_gaussian * n,
            fixed=fixed,
            geometry="planes" if compared else "none",
            exposure=exposure,
        )
        return {"refine": worst_view(load, views)}

    return loads


def plan_coarse(
    cloud: GaussianCloud,
    config: CoarseConfig,
    options: MemoryOptions,
    scene: Scene,
    store: ImageStore,
    console: Console,
) -> CoarseConfig:
    """The settings with strips and chunks that fit; prints them and bounds the photographs."""
    first = MemoryPlan(options.split, _first_chunk(cloud, config))
    plan = _plan(cloud, config, options, first, scene, store, console)
    return replace(config, split=plan.split, sample_chunk=plan.sample_chunk)


def plan_strips(
    cloud: GaussianCloud | BoundCloud,
    config: WithoutSamples,
    options: MemoryOptions,
    scene: Scene,
    store: ImageStore,
    console: Console,
) -> WithoutSamples:
    """As :func:`plan_coarse`, of a stage that draws no samples."""
    plan = _plan(cloud, config, options, MemoryPlan(options.split), scene, store, console)
    return replace(config, split=plan.split)


def predict_coarse(
    cloud: GaussianCloud,
    config: CoarseConfig | MultiviewConfig,
    options: MemoryOptions,
    scene: Scene,
) -> MemoryChoice | None:
    """The plan of a coarse run and what it needs; None where the system does not say what is free."""
    first = MemoryPlan(options.split)
    if isinstance(config, CoarseConfig):
        first = replace(
            first, sample_chunk=min(config.sample_chunk, config.samples_for(len(cloud)))
        )
    return _choice(cloud, config, options, first, scene)


def _first_chunk(cloud: GaussianCloud | BoundCloud, config: CoarseConfig) -> int:
    return min(config.sample_chunk, config.samples_for(len(cloud)))


def _plan(
    cloud: GaussianCloud | BoundCloud,
    config: StageSettings,
    options: MemoryOptions,
    first: MemoryPlan,
    scene: Scene,
    store: ImageStore,
    console: Console,
) -> MemoryPlan:
    chosen = _choice(cloud, config, options, first, scene)
    if chosen is None:
        return first
    if chosen.image_bytes:
        store.limit(chosen.image_bytes)
    for line in chosen.lines():
        console.info(line)
    return chosen.plan


def _choice(
    cloud: GaussianCloud | BoundCloud,
    config: StageSettings,
    options: MemoryOptions,
    first: MemoryPlan,
    scene: Scene,
) -> MemoryChoice | None:
    device = cloud.opacity_logits.device
    # The caller lets go of these; the stage makes a copy of its own.
    held = sum(t.nbytes for t in vars(cloud).values())
    budget = usable_bytes(options, device, held)
    if budget is None:
        return None
    if config.optimizer.views_per_step > options.processes:
        # Gradients of the views before, beside those of the view in work.
        budget -= sum(t.nbytes for t in vars(cloud).values())
    looked_at = surveyed(scene.train_cameras)
    with torch.no_grad():
        gaussians = cloud.activate()
    views = survey(gaussians, looked_at)
    if isinstance(config, MultiviewConfig):
        loads = multiview_loads(cloud, config, views)
    elif isinstance(cloud, GaussianCloud):
        candidates = sampling_candidates(gaussians, config, looked_at)
        loads = coarse_loads(cloud, config, views, candidates)
    else:
        learned = config.exposure.exposure_compensation
        loads = refinement_loads(cloud, views, learned, config.refine_surface_terms)
    cameras = (*scene.train_cameras, *scene.test_cameras)
    # Those of a GPU wait on the host, which is other memory.
    shared = device.type == "cpu"
    photographs = [(3 + (c.mask is not None)) * c.width * c.height for c in cameras]
    photographs = photographs if shared else []
    return choose(loads, config.optimizer, first, options, budget, photographs)
