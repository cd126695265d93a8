# SPDX-License-Identifier: Apache-2.0
"""Short trainings of all stages on the paths of GPUs, with recorded passes and without."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from gaussian_splatting.components.densification import Region
from gaussian_splatting.components.exposures import ExposureConfig, Exposures
from gaussian_splatting.engine.recording.recorded_runner import RecordedRunner
from gaussian_splatting.engine.step_runner import plain_runner
from gaussian_splatting.engine.stepping import RunContext, Stepper
from gaussian_splatting.optim.optimizer_config import DEFAULT_OPTIMIZER
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_stage import VanillaStage
from sugar_scene.mesh_bound import bind_to_mesh
from sugar_scene.reprojection import NeighborViews
from sugar_trainers.coarse_stage import CoarseStage
from sugar_trainers.multiview_stage import MultiviewStage, comparison_rule
from sugar_trainers.refine_stage import RefineStage
from sugar_trainers.stage_config import (
    CoarseConfig,
    CoarseSchedule,
    MultiviewConfig,
    RefineConfig,
)
from sugar_trainers.view_comparison import ComparisonRule, ViewComparer
from sugar_utils.console import Console
from tests.support.launches import gpu_paths
from tests.support.step_scenes import (
    Case,
    MadeUpPhotographs,
    as_cloud,
    make_scene,
    make_wall,
    photograph,
)
from tests.support.training import parameters_and_moments

CASE = Case("recorded passes", 150, 48, 36, 1, radius=6.0)
EXTENT = 5.0
FIRST = 592  # a round of densification follows iteration 600
STEPS = 16
SAMPLING = 8_998  # faint Gaussians are removed, and samples drawn, after the third iteration


def cameras():
    """Three views from different places."""
    camera = make_scene(CASE)[1]
    shifts = ((0.0, 0.0, 0.0), (0.2, 0.0, 0.1), (-0.2, 0.1, 0.0))
    return [
        replace(camera, name=f"view {i}", translation=np.array(shift))
        for i, shift in enumerate(shifts)
    ]


def cameras_apart():
    """Four views of which each shows some Gaussians that the others do not."""
    camera = make_scene(CASE)[1]
    shifts = ((3.0, 1.0, 0.0), (3.0, -1.0, 0.0), (-3.0, 0.5, 0.0), (0.0, -3.0, 0.0))
    return [
        replace(camera, name=f"view {i}", translation=camera.translation + np.array(shift))
        for i, shift in enumerate(shifts)
    ]


def picture(camera):
    """Bytes that tell one view from the other. (H, W, 3)"""
    return photograph(camera).roll(7 * int(camera.name[-1]), dims=1)


def vanilla_stage(views, photographs, exposed=False, optimizer=DEFAULT_OPTIMIZER):
    """The vanilla stage shortly before a round of densification."""
    components = []
    if exposed:
        names = [camera.name for camera in views]
        learning = ExposureConfig(True, start=0)
        components = [Exposures(learning, names, torch.device("cpu"), (FIRST, 700))]
    return VanillaStage(
        as_cloud(make_scene(CASE)[0]),
        VanillaConfig(exposure=ExposureConfig(exposed, start=0), optimizer=optimizer),
        Region(EXTENT),
        lambda *_: None,
        components=components,
    )


def multiview_stage(views, photographs):
    """The multi-view mode, likewise; each view is compared with one of the others."""
    config = MultiviewConfig(multiview_pixels=100)
    comparer = ViewComparer(
        NeighborViews(views, EXTENT),
        MadeUpPhotographs(photographs),
        EXTENT,
        comparison_rule(config),
        device=torch.device("cpu"),
    )
    cloud = as_cloud(make_scene(CASE)[0])
    return MultiviewStage(cloud, config, Region(EXTENT), views, comparer, lambda message: None)


def coarse_stage(views, photographs, mode="dn_consistency", samples=100, notes=None, **settings):
    """The stage of SuGaR; neighbours are searched in every eighth iteration."""
    cloud = as_cloud(make_scene(CASE)[0])
    schedule = CoarseSchedule(neighbor_interval=8)
    config = CoarseConfig(mode, schedule=schedule, sdf_samples=samples, **settings)
    return CoarseStage(cloud, config, Region(EXTENT), [].append if notes is None else notes.append)


def sampling(mode, **settings):
    """A case of the stage of SuGaR in which most iterations draw samples."""
    build = partial(coarse_stage, mode=mode, **settings)
    return {"build": build, "first": SAMPLING, "steps": 24}


def refine_stage(views, photographs, compared=False):
    """The refinement of Gaussians on a wall; views may be compared with their neighbours."""
    comparer = None
    if compared:
        comparer = ViewComparer(
            NeighborViews(views, EXTENT),
            MadeUpPhotographs(photographs),
            EXTENT,
            ComparisonRule(100, seed=0),
            device=torch.device("cpu"),
        )
    cloud = bind_to_mesh(*make_wall(60), 1, EXTENT)
    return RefineStage(cloud, RefineConfig(), EXTENT, comparer=comparer)


def runner_with(recorder):
    """Return the maker of the step runner: a recorded one, or a plain one without a recorder."""
    return plain_runner if recorder is None else partial(RecordedRunner, recorder)


def trained(
    recorder,
    *,
    build=vanilla_stage,
    first=FIRST,
    photographs=picture,
    steps=STEPS,
    views=None,
    losses=None,
    resumed_after=None,
    totals=None,
):
    """A stage after some steps on the paths of GPUs, and its warnings.

    Args:
        losses: Gets the weighted sum of each step.
        totals: Holds the sums of the last step while the next one is made, as the loop does.
        resumed_after: Steps after which another stage takes over what a checkpoint holds.
    """
    views = views or cameras()
    console = Console()
    warnings = []
    console.warn = warnings.append
    context = RunContext(MadeUpPhotographs(photographs), console, new_runner=runner_with(recorder))

    def begin():
        stage = build(views, photographs)
        return stage, Stepper(stage, views, context, first=first, seed=0)

    stage, stepper = begin()
    with gpu_paths():
        for step in range(steps):
            if step == resumed_after:
                stepper.check_last()
                saved = copy.deepcopy((stage.model.state(), stage.extra_state()))
                stage, stepper = begin()
                stage.model.restore(saved[0])
                stage.restore_extra(saved[1])
            total = stepper.step(first + step, None)
            if totals is not None:
                totals[:] = [total]
            if losses is not None:
                stepper.check_last()
                losses.append(float(total.terms["loss"]))
        stepper.check_last()
    return stage, warnings


class Training:
    """Steps of the vanilla stage that are repeated by one recording; the first ones are made."""

    def __init__(self, recorder=None):
        views = cameras()
        self.stage = vanilla_stage(views, picture)
        new_runner = runner_with(recorder)
        context = RunContext(MadeUpPhotographs(picture), Console(), new_runner=new_runner)
        self._stepper = Stepper(self.stage, views, context, first=FIRST + 10, seed=0)
        self.iteration = FIRST + 10
        for _ in range(8):
            self.step()
        self.check_last()

    def step(self):
        with gpu_paths():
            self._stepper.step(self.iteration, None)
        self.iteration += 1

    def check_last(self):
        with gpu_paths():
            self._stepper.check_last()


def state_of(stage):
    """Parameters, moments and what components know, by name."""
    more = stage.extra_state().items()
    tensors = {name: v for name, v in more if isinstance(v, torch.Tensor)}
    return parameters_and_moments(stage) | tensors


def assert_same_bits(stage, expected):
    found = state_of(stage)
    assert list(found) == list(expected)
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


STAGES = {
    "vanilla": (vanilla_stage, FIRST),
    "coarse": (coarse_stage, 8_982),
    "multiview": (multiview_stage, 7_592),
}
"""How a stage is built, and an iteration shortly before the number of its Gaussians changes."""
