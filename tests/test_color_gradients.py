# SPDX-License-Identifier: Apache-2.0
"""Gradients of colours that stay factors until Adam uses them: the same steps, fewer bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gaussian_splatting.components.densification import Region
from gaussian_splatting.components.poses import PoseConfig, PoseRefinement
from gaussian_splatting.core import color_gradients
from gaussian_splatting.core.color_gradients import ColorGradient
from gaussian_splatting.core.spherical_harmonics import sh_basis_of
from gaussian_splatting.engine.model import TrainableCloud
from gaussian_splatting.engine.stepping import RunContext, Stepper
from gaussian_splatting.optim import band_steps
from gaussian_splatting.optim.adam import GroupedAdam
from gaussian_splatting.optim.adam_steps import ADAM_EPS, MOMENTS, ParameterState
from gaussian_splatting.optim.band_steps import step_in_registers
from gaussian_splatting.optim.optimizer_config import (
    DEFAULT_OPTIMIZER,
    STATE_FORMATS,
    OptimizerConfig,
)
from gaussian_splatting.rasterization.coefficient_gradients import coefficient_gradients
from gaussian_splatting.rasterization.projection_kernels import camera_record
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_stage import VanillaStage
from sugar_scene.mesh_bound import bind_to_mesh
from sugar_trainers.coarse_stage import CoarseStage
from sugar_trainers.refine_stage import RefineStage
from sugar_trainers.stage_config import CoarseConfig, MultiviewConfig, RefineConfig
from sugar_utils.console import Console
from sugar_utils.errors import TrainingError
from tests.support.random_scenes import random
from tests.support.step_scenes import (
    Case,
    MadeUpPhotographs,
    as_cloud,
    make_multiview_stage,
    make_scene,
    make_wall,
    photograph,
)
from tests.support.training import parameters_and_moments

CASE = Case("color gradients", 300, 48, 36, 1, radius=6.0)
EXTENT = 5.0
CPU = torch.device("cpu")
FORMATS = [OptimizerConfig(s, use_bfloat16=half) for s in STATE_FORMATS for half in (False, True)]


def name_of(config: OptimizerConfig) -> str:
    return f"{config.optimizer_state}, {'bfloat16' if config.use_bfloat16 else 'float32'} values"


def scene():
    gaussians, camera = make_scene(CASE)
    return as_cloud(gaussians), camera


def vanilla(optimizer=DEFAULT_OPTIMIZER, components=()):
    config = VanillaConfig(optimizer=optimizer)
    cloud, _ = scene()
    return VanillaStage(cloud, config, Region(EXTENT), lambda *_: None, components=components)


def coarse(optimizer=DEFAULT_OPTIMIZER):
    config = CoarseConfig("dn_consistency", sdf_samples=100, optimizer=optimizer)
    return CoarseStage(scene()[0], config, Region(EXTENT), lambda message: None)


def multiview(optimizer=DEFAULT_OPTIMIZER):
    cloud, camera = scene()
    config = MultiviewConfig(multiview_pixels=100, optimizer=optimizer)
    return make_multiview_stage(cloud, camera, config, EXTENT, photograph)


def refine(optimizer=DEFAULT_OPTIMIZER):
    config = RefineConfig(optimizer=optimizer)
    return RefineStage(bind_to_mesh(*make_wall(60), 1, EXTENT), config, EXTENT)


STAGES = {
    "vanilla": (vanilla, 2_601),
    "coarse": (coarse, 9_101),
    "multiview": (multiview, 7_701),
    "refine": (refine, 4_001),
}


def train(stage, first, steps=3):
    """The stage after some steps, each with one view."""
    camera = scene()[1]
    context = RunContext(MadeUpPhotographs(photograph), Console())
    stepper = Stepper(stage, [camera] * 3, context, first=first, seed=0)
    for iteration in range(first, first + steps):
        stepper.step(iteration, None)
    return stage


@pytest.fixture
def kept_as_factors(monkeypatch):
    """Factors are kept however few Gaussians there are; counts steps that use them."""
    monkeypatch.setattr(color_gradients, "MIN_FACTORED", 1)
    monkeypatch.setattr(band_steps, "ROWS_AT_ONCE", 64)
    used, step = [], band_steps.step_bands

    def counted(state, gradient):
        used.append(gradient)
        step(state, gradient)

    monkeypatch.setattr("gaussian_splatting.optim.adam.step_bands", counted)
    return used


@pytest.mark.parametrize("name", STAGES)
def test_factors_train_to_the_same_bits(name, kept_as_factors, monkeypatch):
    make, first = STAGES[name]
    stage = train(make(), first)
    assert len(kept_as_factors) == 3
    monkeypatch.setattr(color_gradients, "MIN_FACTORED", 10**9)
    expected = parameters_and_moments(train(make(), first))
    assert len(kept_as_factors) == 3
    found = parameters_and_moments(stage)
    for key, values in expected.items():
        assert torch.equal(found[key], values), key


@pytest.mark.parametrize("config", FORMATS, ids=name_of)
def test_factors_round_as_whole_gradients_do(config, kept_as_factors, monkeypatch):
    stage = train(vanilla(config), 2_601)
    assert kept_as_factors
    monkeypatch.setattr(color_gradients, "MIN_FACTORED", 10**9)
    expected = parameters_and_moments(train(vanilla(config), 2_601))
    for key, values in parameters_and_moments(stage).items():
        assert torch.equal(values, expected[key]), key


def test_several_views_of_a_step_are_added_up(kept_as_factors):
    train(vanilla(OptimizerConfig(views_per_step=2)), 2_601)
    assert not kept_as_factors


def test_learned_poses_read_whole_gradients(kept_as_factors):
    poses = PoseRefinement([scene()[1]], EXTENT, PoseConfig())
    train(vanilla(components=[poses]), 2_601)
    assert not kept_as_factors
    assert any(bool(values.any()) for values in poses.state().values())


def test_bad_colours_stop_a_step_before_it_is_made(kept_as_factors):
    stage = vanilla()
    camera = scene()[1]
    train(stage, 2_601, steps=1)
    before = {key: values.clone() for key, values in parameters_and_moments(stage).items()}
    context = RunContext(MadeUpPhotographs(photograph), Console())
    stepper = Stepper(stage, [camera] * 3, context, first=2_602, seed=0)
    accumulate = stage.train_on

    def spoiled(view, resources):
        result = accumulate(view, resources)
        stage.model.optimizer.color_gradients[0].colors[7] = torch.nan
        return result

    stage.train_on = spoiled
    with pytest.raises(TrainingError, match=r"gradient of sh_dc is not finite in 1 of 300 rows"):
        stepper.step(2_602, None)
    after = parameters_and_moments(stage)
    assert all(torch.equal(after[key], values) for key, values in before.items())


def color_gradient(n: int, degree: int = 3) -> ColorGradient:
    """Of a view from beside the Gaussians; some are culled, one of these nowhere."""
    camera = replace(scene()[1], translation=np.array([0.3, -0.2, 5.0]))
    colors = random(n, 3, seed=1)
    means = random(n, 3, seed=2)
    colors[::5] = 0
    means[5] = torch.nan
    return ColorGradient(colors, means, camera_record(camera, CPU), degree)


def in_float64(gradient: ColorGradient) -> torch.Tensor:
    """The outer product, (n, 15, 3)."""
    center = gradient.camera_record[12:15].double()
    directions = torch.nn.functional.normalize(gradient.means.double() - center, dim=1)
    basis = sh_basis_of(directions)[:, 1:].clone()
    basis[:, (gradient.sh_degree + 1) ** 2 - 1 :] = 0
    product = basis[:, :, None] * gradient.colors.double()[:, None]
    product[gradient.colors.abs().sum(dim=1) == 0] = 0
    return product


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_coefficients_get_basis_functions_times_the_gradient_of_the_colour(degree):
    gradient = color_gradient(40, degree)
    rows = slice(3, 31)
    formed = coefficient_gradients(gradient, rows, torch.zeros(28, 15, 3))
    torch.testing.assert_close(formed.double(), in_float64(gradient)[rows], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("degree", [1, 3])
@pytest.mark.parametrize("config", FORMATS, ids=name_of)
def test_a_step_in_registers_is_that_of_adam(config, degree):
    n = 40
    gradient = color_gradient(n, degree)
    exact = in_float64(gradient)
    start = random(n, 15, 3, seed=3).to(config.value_dtype("sh_rest"))
    value = start.clone()
    moment_type = config.moment_dtype("sh_rest")
    moments = {
        "exp_avg": random(n, 15, 3, seed=4).to(moment_type),
        "exp_avg_sq": random(n, 15, 3, seed=5).square().to(moment_type),
    }
    before = {name: moment.double() for name, moment in moments.items()}
    step_in_registers(ParameterState(value, moments, rate=0.1, count=7, seed=11), gradient)
    first = 0.9 * before["exp_avg"] + 0.1 * exact
    second = 0.999 * before["exp_avg_sq"] + 0.001 * exact**2
    deviation = (second / (1 - 0.999**7)).sqrt() + ADAM_EPS
    expected = start.double() - 0.1 * first / (1 - 0.9**7) / deviation
    # Stochastic rounding goes to one of two neighbours, 2^-7 of a number apart at most.
    precise = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7}
    torch.testing.assert_close(value.double(), expected, rtol=precise[value.dtype], atol=2e-6)
    for name, truth in zip(MOMENTS, (first, second), strict=True):
        found = moments[name].double()
        torch.testing.assert_close(found, truth, rtol=precise[moment_type], atol=1e-7)


def test_rounding_in_registers_keeps_the_mean():
    n = 4_000
    camera = camera_record(scene()[1], CPU)
    gradient = ColorGradient(torch.ones(n, 3), random(1, 3, seed=2).repeat(n, 1), camera, 3)
    moments = {name: torch.zeros(n, 15, 3, dtype=torch.bfloat16) for name in MOMENTS}
    state = ParameterState(torch.zeros(n, 15, 3), moments, rate=0.0, count=1, seed=5)
    step_in_registers(state, gradient)
    exact = in_float64(gradient)
    for name, truth in zip(MOMENTS, (0.1 * exact, 0.001 * exact**2), strict=True):
        mean = moments[name].double().mean(dim=(0, 2))
        torch.testing.assert_close(mean, truth.mean(dim=(0, 2)), rtol=3e-4, atol=1e-12)


def test_gradients_of_two_passes_are_added_up():
    cloud = scene()[0]
    model = TrainableCloud(cloud, VanillaConfig().rates, EXTENT)
    adam: GroupedAdam = model.optimizer
    gradient = color_gradient(len(cloud))
    gradient = replace(gradient, means=cloud.means.clone())
    adam.color_gradients += [gradient, gradient]
    twin = TrainableCloud(cloud, VanillaConfig().rates, EXTENT).optimizer
    whole = coefficient_gradients(gradient, slice(0, len(cloud)), cloud.sh_rest)
    twin.parameters["sh_rest"].grad = 2 * whole
    twin.parameters["sh_dc"].grad = 2 * (gradient.colors * 0.28209479177387814)[:, None]
    adam.step()
    twin.step()
    for name in ("sh_dc", "sh_rest"):
        torch.testing.assert_close(adam.parameters[name], twin.parameters[name])
    assert not adam.color_gradients
