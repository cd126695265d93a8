# SPDX-License-Identifier: Apache-2.0
"""Memory of SuGaR's stages: workloads of their phases, and the plan that fits a budget."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from gaussian_splatting.components import depth_supervision, normal_supervision
from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.device_checks import obstacle
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.engine import memory_plan
from gaussian_splatting.engine.memory_plan import MemoryChoice, MemoryOptions, MemoryPlan, StepLoad
from gaussian_splatting.optim.optimizer_config import OptimizerConfig
from gaussian_splatting.rasterization import project
from gaussian_splatting.scenes.scene import Scene
from sugar_scene.field_kernels import pair_bytes
from sugar_scene.mesh_bound import BoundCloud
from sugar_trainers.sampling import room_of_samples
from sugar_trainers.stage_config import CoarseConfig, MultiviewConfig, RefineConfig
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.memory import available_bytes, format_bytes

StageSettings = CoarseConfig | MultiviewConfig | RefineConfig
Settings = TypeVar("Settings", bound=CoarseConfig | MultiviewConfig | RefineConfig)

_BANDS_CHECK = "gaussian_splatting.engine.checks.host_bands_check"
_ACTIVATION_BYTES = 36  # per Gaussian: scales, opacities, unit quaternions and their lengths
_BOUND_BYTES = 44  # per Gaussian on a mesh: centre, quaternion, scales, opacity
_JOINED_BYTES = 236  # per Gaussian, with a background: all values of both in one tensor each
_TRIANGLE_BYTES = 36  # gradients of its corners
# As kernels take them: corners; pairs of adjacent triangles with theirs; both orders by vertex.
_TOPOLOGY_BYTES = 26 + 50


def stage_loads(
    cloud: GaussianCloud | BoundCloud,
    config: StageSettings,
    views: Sequence[memory_plan.ViewLoad],
    features: int = 0,
) -> memory_plan.LoadsOf:
    """The step of each phase on the view that needs most, for a format of the optimiser."""
    n = len(cloud)
    tensors = cloud.tensors()
    if isinstance(config, MultiviewConfig):
        # The most Gaussians that there may be; without a limit, those at the beginning.
        n = max(n, config.densification.max_gaussians or 0)
        views = [view.grown(n / max(len(cloud), 1)) for view in views]
        # Of these nothing but shapes is asked for.
        tensors = {name: t[:1].expand(n, *t.shape[1:]) for name, t in tensors.items()}

    def loads(optimizer: OptimizerConfig) -> Mapping[str, StepLoad]:
        model = memory_plan.ModelLoad.of(tensors, optimizer)
        step = StepLoad(n, model, views[0], activation=_ACTIVATION_BYTES * n, features=features)
        if isinstance(cloud, BoundCloud):
            if not isinstance(config, RefineConfig):
                raise TypeError("Gaussians on a mesh are refined")
            phases = {"refine": _refinement_load(step, cloud, config)}
        elif isinstance(config, MultiviewConfig):
            phases = {"multiview": replace(step, geometry="planes")}
        elif isinstance(config, CoarseConfig):
            phases = {"entropy": step, "geometry": _surface_load(step, cloud, config)}
        else:
            raise TypeError("free Gaussians are not refined")
        return {name: memory_plan.worst_view(load, views) for name, load in phases.items()}

    return loads


def _surface_load(step: StepLoad, cloud: GaussianCloud, config: CoarseConfig) -> StepLoad:
    geometry = "none"
    if config.uses_sdf:
        geometry = "depth"
    elif config.uses_depth_normals:
        geometry = "full" if config.full_res_normals else "half"
    return replace(
        step,
        geometry=geometry,
        samples=config.samples_for(len(cloud)),
        sampled_room=room_of_samples(cloud.means.device),
        neighbors=config.n_neighbors,
        pair_bytes=pair_bytes(cloud.means.device),
    )


def _refinement_load(step: StepLoad, cloud: BoundCloud, config: RefineConfig) -> StepLoad:
    n = len(cloud)
    n_faces = cloud.faces.shape[0]
    joined = 0 if cloud.background is None else _JOINED_BYTES
    return replace(
        step,
        # More than comparing views takes: no planes are rendered, two meshes are.
        geometry="planes" if config.refine_surface_terms else "none",
        activation=_TRIANGLE_BYTES * n_faces + (_BOUND_BYTES + joined) * n,
        fixed=cloud.faces.nbytes + _TOPOLOGY_BYTES * n_faces,
        features=step.features + config.refine_surface_terms * depth_supervision.N_COLUMNS,
    )


def with_memory_plan(
    config: Settings,
    cloud: GaussianCloud | BoundCloud,
    options: MemoryOptions,
    scene: Scene,
    store: ImageStore,
    console: Console,
) -> Settings:
    """The settings with strips and chunks that fit; prints them and bounds the image store."""
    chosen = predict_coarse(cloud, config, options, scene)
    if chosen is None:
        plan = _first_plan(cloud, config, options)
    else:
        plan = chosen.plan
        if chosen.image_bytes:
            store.limit(chosen.image_bytes)
        for line in chosen.lines():
            console.info(line)
    samples = {"sample_chunk": plan.sample_chunk} if isinstance(config, CoarseConfig) else {}
    if chosen is None:
        on_host = options.keeps_bands_on_host(cloud.opacity_logits.device)
    else:
        on_host = chosen.host_bytes > 0
    optimizer = replace(config.optimizer, bands_on_host=on_host)
    return replace(config, split=plan.split, records=plan.records, optimizer=optimizer, **samples)


def predict_coarse(
    cloud: GaussianCloud | BoundCloud, config: StageSettings, options: MemoryOptions, scene: Scene
) -> MemoryChoice | None:
    """Predict the memory plan of a run and its bytes.

    None where the system does not say what is free.
    """
    device = cloud.opacity_logits.device
    # The caller lets go of these; the stage makes a copy of its own.
    cloud_bytes = sum(t.nbytes for t in cloud.tensors().values())
    budget = memory_plan.usable_bytes(options, device, cloud_bytes)
    if budget is None:
        return None
    if config.optimizer.views_per_step > options.processes:
        # Gradients of the views before, beside those of the view in work.
        budget -= cloud_bytes
    with torch.no_grad():
        bound = isinstance(cloud, BoundCloud)
        gaussians = cloud.activate_all() if bound else cloud.activate()
        chosen = memory_plan.surveyed(scene.train_cameras)
        views = [memory_plan.ViewLoad.of(project(gaussians, camera)) for camera in chosen]
    # Those of a GPU wait on the host, which is other memory.
    cameras = scene.cameras if device.type == "cpu" else []
    images = [(3 + (c.mask is not None)) * c.n_pixels for c in cameras]
    n_features = depth_supervision.N_COLUMNS if scene.depths.maps else 0
    n_features += normal_supervision.N_COLUMNS if scene.normals.maps else 0
    loads = stage_loads(cloud, config, views, features=n_features)
    first = _first_plan(cloud, config, options)

    def choose(on_host: bool) -> MemoryChoice:
        optimizer = replace(config.optimizer, bands_on_host=on_host)
        records = device.type == "cuda"
        return memory_plan.choose(loads, optimizer, first, options, budget, images, records=records)

    *others, last = options.places_of_bands(device)
    for on_host in others:
        with contextlib.suppress(UserError):
            return choose(on_host)
    if others:
        _check_bands(device)
    chosen = choose(last)
    _check_host(chosen.host_bytes)
    return chosen


def _check_bands(device: torch.device) -> None:
    """Raise ``UserError`` where a GPU is not known to reach colour bands on the host."""
    reason = obstacle(_BANDS_CHECK, device)
    if reason is not None:
        raise UserError(
            "the Gaussians do not fit on the GPU, and their colour bands cannot lie on the host "
            f"({reason}): use --optimizer_state bf16, fewer Gaussians, or --blocks"
        )


def _check_host(n_bytes: int) -> None:
    """Raise ``UserError`` where the host has no room for colour bands."""
    available = available_bytes("cpu")
    if available is not None and n_bytes > available:
        raise UserError(
            f"colour bands need {format_bytes(n_bytes)} of the host's memory, "
            f"{format_bytes(available)} are free (--sh_on_host): use --use_bfloat16 True, fewer "
            "Gaussians, or --blocks"
        )


def _first_plan(
    cloud: GaussianCloud | BoundCloud, config: StageSettings, options: MemoryOptions
) -> MemoryPlan:
    if not isinstance(config, CoarseConfig):
        return MemoryPlan(options.split)
    return MemoryPlan(options.split, min(config.sample_chunk, config.samples_for(len(cloud))))
