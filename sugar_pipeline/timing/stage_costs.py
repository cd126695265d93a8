# SPDX-License-Identifier: Apache-2.0
"""Predicted seconds of stages outside of training, and of meshes by their triangles."""

from __future__ import annotations

from collections.abc import Iterable

from gaussian_splatting.vanilla.vanilla_run import VanillaOptions
from sugar_pipeline.pipeline.plan import PipelinePlan
from sugar_pipeline.timing.stage_speed import Speed
from sugar_scene.triangle_mesh import read_mesh_ply
from sugar_trainers.stage_config import MULTIVIEW
from sugar_trainers.stage_options import TrainingOptions

# Times of steps as multiples of the vanilla stage's; that of a mesh for each view.
COSTS = {"vanilla": 1.0, "coarse": 1.7, "refine": 2.5, "mesh": 14.0}
MULTIVIEW_COSTS = COSTS | {"coarse": 3.2, "refine": 4.0, "mesh": 7.0}
REFINEMENT_COST = 16.0  # of the vertices of a mesh by photographs, for each view
RESULTS = "results"  # what follows the last stage: a folder, a page and a report
# Measured on two cores, from meshes of 45,000 to 586,000 triangles.
SECONDS_OF_TRIANGLE = {"mesh": 2.0e-4, "texture": 1.5e-4, RESULTS: 0.5e-4}
SECONDS_OF_MEGAPIXEL = 0.7  # of photographs, which a texture reads at their full size
SECONDS_OF_RESULTS = 13.0  # and those of triangles
TRIANGLES_PER_PIXEL = 0.6  # of a training image
# Of the whole time, that triangles may take. Larger meshes of short runs were refined too little:
# their Gaussians showed the views 3 dB worse than those of the coarse model.
TRIANGLE_SHARE = 0.15
# Meshes over what is asked for: a background has as many triangles again, where there is one.
EXPECTED_MESHES = 1.5


def costs_of(plan: PipelinePlan) -> dict[str, float]:
    """Costs of the stages in the mode of the plan."""
    return MULTIVIEW_COSTS if plan.coarse.config.regularization_type == MULTIVIEW else COSTS


def seconds_without_training(
    names: Iterable[str], plan: PipelinePlan, speed: Speed, step: float
) -> dict[str, float]:
    """Expected seconds of stages that do not train, and of the results, by name.

    Args:
        step: Seconds of a step of the vanilla stage.
    """
    n_triangles = expected_triangles(plan)
    costs = costs_of(plan)
    seconds = {}
    for name in names:
        seconds[name] = SECONDS_OF_TRIANGLE[name] * n_triangles
        if name == RESULTS:
            seconds[name] += SECONDS_OF_RESULTS
        elif name == "texture":
            seconds[name] += SECONDS_OF_MEGAPIXEL * speed.megapixels
        else:
            cost = costs[name]
            if plan.mesh is not None and plan.mesh.refines_vertices:
                cost += REFINEMENT_COST
            seconds[name] += cost * speed.n_views * step
    return seconds


def expected_triangles(plan: PipelinePlan) -> float:
    """Triangles of the coarse mesh; as many as are expected before it is there."""
    if plan.refine is not None and plan.refine.mesh_path.is_file():
        return len(read_mesh_ply(plan.refine.mesh_path).faces)
    asked_for = 0 if plan.mesh is None else sum(plan.mesh.decimation_targets)
    return EXPECTED_MESHES * asked_for


def affordable_triangles(minutes: float) -> float:
    """Triangles of the foreground that take their share of the time."""
    seconds = EXPECTED_MESHES * sum(SECONDS_OF_TRIANGLE.values())
    return TRIANGLE_SHARE * 60 * minutes / seconds


def n_iterations(options: VanillaOptions | TrainingOptions) -> int:
    """Iterations of a training stage."""
    if isinstance(options, VanillaOptions):
        return options.config.iterations
    return options.loop.last - options.loop.first
