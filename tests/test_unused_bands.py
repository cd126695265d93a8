# SPDX-License-Identifier: Apache-2.0
"""Colour bands that do not act yet cost nothing, and training has the bits that it had before."""

from pathlib import Path

import pytest
import torch

from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.optim.adam import GroupedAdam
from gaussian_splatting.optim.optimizer_config import OptimizerConfig
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_stage import VanillaStage
from tests.support.brief_runs import brief_vanilla
from tests.support.tiny_scene import (
    TinyScene,
    assert_same_bits,
    disturbed_cloud,
    load_pt,
    tiny_cameras,
    tiny_cloud,
)
from tests.support.training import accumulate, everywhere

EXTENT = 1.0

SCALE = 0.008
"""The first degree from iteration 8 on, opacities lowered at 24."""

STORAGE = [
    (),
    ("--use_bfloat16",),
    ("--optimizer_state", "bf16", "--views_per_step", 2),
    ("--refine_poses", "True"),
]


def trained(scene: TinyScene, output: Path, *flags: object) -> Path:
    """28 iterations, densification in half of them."""
    code = brief_vanilla(
        scene,
        output,
        *flags,
        eval=None,
        iterations=28,
        schedule_scale=SCALE,
        densify_from_iter=250,
        densification_interval=500,
        densify_until_iter=3400,
        opacity_reset_interval=None,
        max_gaussians=500,
        checkpoint_iterations=7,
    )
    assert code == 0
    return output / "checkpoints"


@pytest.mark.slow
@pytest.mark.parametrize("flags", STORAGE, ids=lambda flags: " ".join(map(str, flags)) or "fp32")
def test_runs_have_the_bits_of_a_renderer_and_optimizer_that_take_all_bands(
    scene, tmp_path, monkeypatch, flags
):
    saving = trained(scene, tmp_path / "saving", *flags)
    with monkeypatch.context() as changed:
        changed.setattr(Gaussians, "without_bands", lambda self: self)
        changed.setattr(GroupedAdam, "mark_unused", lambda self, name: None)
        taking_all = trained(scene, tmp_path / "all", *flags)
    for name in ("7.pt", "28.pt"):
        assert_same_bits(saving / name, taking_all / name)
    rest = [load_pt(saving / f"{n}.pt")["state_dict"]["_sh_coordinates_rest"] for n in (7, 28)]
    assert not rest[0].any()
    assert rest[1].any()


@pytest.mark.parametrize("degree", [0, 1])
def test_bands_have_a_gradient_only_where_they_act(degree):
    config = VanillaConfig(sh_interval=5)
    stage = VanillaStage(disturbed_cloud(tiny_cloud()), config, everywhere(EXTENT), print)
    camera = tiny_cameras()[0]
    photograph = torch.zeros(camera.height, camera.width, 3, dtype=torch.uint8)
    accumulate(stage, 5 * degree + 1, camera, photograph)
    assert ("sh_rest" in stage.model.optimizer.gradients()) == (degree > 0)


def adam_with_steps(n: int, **settings) -> GroupedAdam:
    rng = torch.Generator().manual_seed(0)
    values = {name: torch.randn(40, 15, 3, generator=rng) for name in ("a", "sh_rest")}
    adam = GroupedAdam(values, dict.fromkeys(values, 0.1), OptimizerConfig(**settings))
    for _ in range(n):
        for parameter in adam.parameters.values():
            gradient = torch.randn(parameter.shape, generator=rng)
            parameter.grad = gradient.to(parameter.dtype)
        adam.step()
    return adam


def assert_equal(a: GroupedAdam, b: GroupedAdam) -> None:
    states = a.state_dict()["state"], b.state_dict()["state"]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    torch.testing.assert_close(a.parameters, b.parameters, rtol=0, atol=0)


@pytest.mark.parametrize("state", ["fp32", "bf16"])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("before", [0, 3])
def test_an_unused_parameter_steps_as_with_a_gradient_of_zeros(state, half, before):
    unused, zeros = (
        adam_with_steps(before, optimizer_state=state, use_bfloat16=half) for _ in range(2)
    )
    for _ in range(2):
        unused.mark_unused("sh_rest")
        zeros.parameters["sh_rest"].grad = torch.zeros_like(zeros.parameters["sh_rest"])
        unused.step()
        zeros.step()
    assert_equal(unused, zeros)


def test_moments_of_a_file_go_on_moving_what_is_unused():
    unused, zeros = adam_with_steps(0), adam_with_steps(0)
    for adam in (unused, zeros):
        adam.load_state_dict(adam_with_steps(2).state_dict())
    before = unused.parameters["sh_rest"].detach().clone()
    unused.mark_unused("sh_rest")
    zeros.parameters["sh_rest"].grad = torch.zeros_like(before)
    unused.step()
    zeros.step()
    assert_equal(unused, zeros)
    assert not torch.equal(unused.parameters["sh_rest"], before)


@pytest.mark.parametrize("change", ["keep_rows", "zero_grad"])
def test_what_was_unused_sits_out_where_gradients_were_dropped(change):
    adam = adam_with_steps(1)
    adam.mark_unused("sh_rest")
    if change == "keep_rows":
        adam.keep_rows(torch.ones(40, dtype=torch.bool))
    else:
        adam.zero_grad()
    adam.step()
    assert float(adam.state_dict()["state"][1]["step"]) == 1.0
