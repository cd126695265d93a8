# SPDX-License-Identifier: Apache-2.0
"""Components of the vanilla stage beside its model: what a run learns of a scene, and when."""

from __future__ import annotations

import torch

from gaussian_splatting.components.densification import Densification
from gaussian_splatting.components.depth_supervision import (
    N_COLUMNS,
    depth_supervision,
    falling_weight,
)
from gaussian_splatting.components.exposures import Exposures
from gaussian_splatting.components.growing_resolution import GrowingResolution, measured_growth
from gaussian_splatting.components.poses import PoseConfig, PoseRefinement
from gaussian_splatting.components.pruning_scores import N_SCORES, PruningScores
from gaussian_splatting.components.track_exposures import track_exposures
from gaussian_splatting.components.transients import Transients, search_iterations
from gaussian_splatting.components.view_checks import ViewChecks
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.data.observations import ViewOptions
from gaussian_splatting.engine.component import Component
from gaussian_splatting.engine.model import check_free_payload, count_gaussians
from gaussian_splatting.engine.state_schema import payload_check
from gaussian_splatting.scenes.scene import Scene
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig

POSES_START = 500
VIEW_CHECK_SHARE = 0.3  # of the iterations, until contradicting training views are left out
_STATE_RULES = (
    *Densification.schema,
    *PruningScores.schema,
    *GrowingResolution.schema,
    *Exposures.schema,
    *Transients.schema,
)
PAYLOAD_CHECK = payload_check(check_free_payload, count_gaussians, _STATE_RULES)
"""Check of the checkpoints of a vanilla run, with the state of all components it may have."""


def components_of(
    config: VanillaConfig,
    scene: Scene,
    images: ImageStore,
    views: ViewOptions,
    device: torch.device,
    n_gaussians: int,
) -> list[Component]:
    """Build the components of a run; densification and its scores are the stage's.

    Args:
        config: Resolved settings: nothing is left to the scene.
        n_gaussians: Of the initial model.
    """
    last = config.iterations
    cameras = scene.train_cameras
    components: list[Component] = []
    if config.transient.transients and not all(c.shows_object for c in cameras):
        densified_from = config.densification.densify_from_iter
        searches = search_iterations(last, densified_from, len(cameras))
        components.append(Transients(searches, config.sh_degree, len(cameras)))
    if config.exposure.exposure_compensation:
        names = [camera.name for camera in cameras]
        exposures = Exposures(config.exposure, names, device, (1, last), steps_last=False)
        exposures.begin_with(track_exposures(cameras, scene.observations, images.shown))
        components.append(exposures)
    if config.refine_poses:
        components.append(_poses(config, scene))
    components += depth_supervision(scene.depths, falling_weight(last))
    if not views.keeps_all:
        components.append(ViewChecks((round(VIEW_CHECK_SHARE * last), last), views.keep_views))
    if config.growth.growing_resolution:
        growth = measured_growth(cameras, images.shown, config.growth, config.densifies_until)
        components.append(GrowingResolution(growth, n_gaussians))
    return components


def rendered_channels(config: VanillaConfig, scene: Scene) -> tuple[int, ...]:
    """Return the numbers of channels that views are blended with."""
    n_features = 3 + N_COLUMNS if scene.depths.maps else 3
    return (n_features, n_features + N_SCORES) if config.scores else (n_features,)


def _poses(config: VanillaConfig, scene: Scene) -> PoseRefinement:
    """Poses to learn; they wait until the Gaussians have converged."""
    start = min(POSES_START, config.iterations // 5)
    cameras = scene.train_cameras
    each = config.optimizer.views_per_step
    rates = PoseConfig.of_run(start, config.iterations, len(cameras), each)
    return PoseRefinement(cameras, scene.extent, rates)
