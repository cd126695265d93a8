# SPDX-License-Identifier: Apache-2.0
"""First step of the mesh stage: the Gaussians, the views, and the space that is meshed."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gaussian_splatting.core.cloud import GaussianCloud, opacities_of
from gaussian_splatting.data.cameras import middle_of
from gaussian_splatting.data.masks import VisualHull, hull_of
from gaussian_splatting.data.world_offset import offset_for
from gaussian_splatting.engine.model import cloud_from_state
from gaussian_splatting.scenes.reference_layout import ReferenceCheckpoint
from gaussian_splatting.scenes.scene import Scene
from sugar_extractors.mesh import depth_views, level_sets, meshing_backends
from sugar_extractors.mesh.fusion.tsdf import TsdfConfig
from sugar_extractors.mesh.level_sets import LevelSetModel
from sugar_extractors.mesh.mesh_config import MeshOptions
from sugar_extractors.mesh.mesh_steps import Extraction
from sugar_extractors.mesh.refinement.compared_views import Photograph
from sugar_extractors.results import read_state
from sugar_scene.depth_view import FusedViews, Renderer
from sugar_scene.regions import Box, Region
from sugar_scene.reprojection import NeighborViews
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.memory import reset_peak

BACKGROUND_HALF_SIDE = 4.0  # of the background's cube, in camera extents; 1 of the foreground's


class Loaded(NamedTuple):
    """The whole capture, ready for its surfaces to be made."""

    extraction: Extraction
    cloud: GaussianCloud
    model: LevelSetModel  # its opaque Gaussians
    background: Box  # box around the foreground


def load(
    options: MeshOptions,
    console: Console,
    checkpoint: ReferenceCheckpoint,
    scene: Scene,
    photograph: Photograph | None,
) -> Loaded:
    """Read the Gaussians and determine the boxes that are meshed.

    Args:
        photograph: The photographs that move vertices; None for none.

    Raises:
        UserError: The scene has no size, or no Gaussian is opaque.
    """
    start = time.monotonic()
    device = options.compute.device
    reset_peak(device)
    foreground, background = region_boxes(options, scene)
    path = options.model
    if path is None:
        path = checkpoint.ply_path
        cloud = checkpoint.read_cloud(console.note, scene.offset)
    else:
        cloud = read_state(path, partial(cloud_from_state, kind="coarse SuGaR model"))
    cloud = cloud.to(device)
    hull = hull_of(scene.train_cameras, device)
    model = _opaque_model(path, cloud, console)
    console.info(f"foreground {foreground}, background {background}")
    backend = meshing_backends.choose_backend(options.meshing_backend)
    console.info(f"meshing with {backend.name}")
    renderer = partial(_masked_renderer, cloud, scene, options.tsdf, hull)
    extraction = Extraction(
        options=options,
        console=console,
        scene=scene,
        region=Region(foreground),
        views=FusedViews(scene.train_cameras, renderer, hull, device),
        backend=backend,
        photograph=photograph,
        start=start,
    )
    return Loaded(extraction, cloud, model, background)


def region_boxes(options: MeshOptions, scene: Scene) -> tuple[Box, Box]:
    """Return the foreground and background box.

    Raises:
        UserError: The scene has no size, and the user gave no box.
    """
    if scene.extent <= 0 and options.bboxmin is None:
        raise UserError(
            f"all training cameras of {options.scene_path} stand in one place, so the scene "
            "has no size; give the foreground with --bboxmin and --bboxmax"
        )
    center = middle_of(scene.train_cameras)
    box_center = np.zeros(3) if options.center_bbox is False else center
    background = Box.cube(box_center, BACKGROUND_HALF_SIDE * scene.extent)
    if options.bboxmin is None:
        return Box.cube(box_center, scene.extent), background
    corners = np.array([options.bboxmin, options.bboxmax], dtype=np.float64)
    if options.center_bbox:
        corners = corners + center
    else:
        # Of captures far from the origin the user may know the original coordinates alone.
        corners = corners - offset_for(corners, scene.offset)
    low, high = corners.tolist()
    return Box(tuple(low), tuple(high)), background


def depth_renderer(cloud: GaussianCloud, scene: Scene, config: TsdfConfig) -> Renderer:
    """Return the renderer of depth that the settings of a fusion ask for."""
    if config.tsdf_depth != "plane":
        return depth_views.view_renderer(cloud, config.min_alpha)
    cameras = scene.train_cameras
    neighbors = NeighborViews(cameras, scene.extent, observations=scene.observations)
    gaussians = cloud.detached().activate()
    return depth_views.plane_renderer(gaussians, cameras, neighbors, scene.extent)


def _masked_renderer(
    cloud: GaussianCloud, scene: Scene, config: TsdfConfig, hull: VisualHull | None
) -> Renderer:
    """Return the renderer of depth that the settings ask for, within the masks."""
    carved = depth_views.carved_renderer(depth_renderer(cloud, scene, config), hull)
    return depth_views.cached_renderer(carved, scene.train_cameras)


def _opaque_model(path: Path, cloud: GaussianCloud, console: Console) -> LevelSetModel:
    """Return the opaque Gaussians; there have to be some."""
    least = level_sets.MIN_OPACITY
    model = level_sets.build_model(cloud)
    opacities = opacities_of(cloud.opacity_logits).cpu().numpy()
    deciles = np.quantile(opacities, np.linspace(0, 1, 11))
    decile_text = " ".join(f"{value:.2f}" for value in deciles)
    console.info(
        f"{path}: {len(model):,} of {len(cloud):,} Gaussians are more opaque than "
        f"{least:g}; deciles of opacity {decile_text}"
    )
    if len(model) == 0:
        raise UserError(
            f"{path}: no Gaussian has an opacity above {least:g} (the largest "
            f"is {opacities.max():.2f}), so there is no surface; train the model longer"
        )
    return model
