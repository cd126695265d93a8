# SPDX-License-Identifier: Apache-2.0
"""Whole runs that store less: rendering from bfloat16, resuming bit for bit."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import train
from gaussian_splatting import train as vanilla_train
from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.rasterization import rasterize
from tests.support import brief_runs
from tests.support.tiny_scene import (
    assert_same_bits,
    load_pt,
    refusal,
    run_cli,
    tiny_cameras,
    tiny_cloud,
)

MODES = {
    "bf16": ("--optimizer_state", "bf16"),
    "bfloat16": ("--use_bfloat16", True),
    "all": ("--optimizer_state", "bf16", "--use_bfloat16"),
}
COARSE = Path("coarse/scene/sugarcoarse_3Dgs7000_densityestim02_sdfnorm02")


def vanilla_flags(scene, output: Path, *more: object) -> list[object]:
    settings = {
        "iterations": 13,
        "densify_until_iter": 11,
        "opacity_reset_interval": 6,
        "max_gaussians": 500,
        "checkpoint_interval": 3,
        "keep_checkpoints": 99,
        "test_iterations": 1,
        "save_iterations": 1,
    }
    return [*brief_runs.vanilla_flags(scene.root, m=output, **settings), *more]


def coarse_flags(scene, checkpoint: Path, output: Path, *more: object) -> list[object]:
    settings = {
        "schedule_scale": 0.003,
        "sdf_samples": 400,
        "checkpoint_interval": 99_999,
        "test_iterations": 1,
        "checkpoint_milestones": (8000, 9334),
    }
    flags = brief_runs.coarse_flags(scene.root, checkpoint, output_dir=output, **settings)
    return [*flags, *more]


def rewind(source: Path, target: Path, iteration: int) -> None:
    """Return the folder that a run killed after this checkpoint leaves."""
    target.mkdir(parents=True)
    shutil.copy(source / f"{iteration}.pt", target)
    record = json.loads((source / "run.json").read_text(encoding="utf-8"))
    record["status"] = "running"
    (target / "run.json").write_text(json.dumps(record), encoding="utf-8")


FAST, SLOW = ("all",), ("bf16", "bfloat16")


@pytest.mark.parametrize("mode", [*FAST, *(pytest.param(m, marks=pytest.mark.slow) for m in SLOW)])
def test_vanilla_run_resumes_with_the_same_bits(scene, tmp_path, mode):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    flags = MODES[mode]
    assert run_cli(vanilla_train.main, *vanilla_flags(scene, straight, *flags)) == 0
    for iteration in (3, 9):
        rewind(straight / "checkpoints", broken / "checkpoints", iteration)
        assert run_cli(vanilla_train.main, *vanilla_flags(scene, broken, *flags)) == 0
        assert_same_bits(straight / "checkpoints/13.pt", broken / "checkpoints/13.pt")
        shutil.rmtree(broken)


@pytest.mark.slow
def test_coarse_run_resumes_with_the_same_bits_and_files_are_float32(scene, checkpoint, tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    flags = MODES["all"]
    assert run_cli(train.main, *coarse_flags(scene, checkpoint, straight, *flags)) == 0
    for iteration in (24, 28):
        rewind(straight / COARSE, broken / COARSE, iteration)
        assert run_cli(train.main, *coarse_flags(scene, checkpoint, broken, *flags)) == 0
        assert_same_bits(straight / COARSE / "45.pt", broken / COARSE / "45.pt")
        shutil.rmtree(broken)
    saved = load_pt(straight / COARSE / "45.pt")
    assert {t.dtype for t in saved["state_dict"].values()} == {torch.float32}
    settings = saved["resume"]["settings"]
    assert settings["optimizer_state"] == "bf16"
    assert settings["use_bfloat16"] is True


@pytest.mark.slow
def test_formats_are_part_of_the_identity_and_can_be_changed_on_purpose(scene, tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    assert run_cli(vanilla_train.main, *vanilla_flags(scene, first)) == 0
    other = MODES["bf16"]
    assert "--optimizer_state unset -> bf16" in refusal(
        capsys, vanilla_train.main, *vanilla_flags(scene, first, *other)
    )
    source = first / "checkpoints" / "9.pt"
    flags = vanilla_flags(scene, second, "--resume", source, *other)
    assert run_cli(vanilla_train.main, *flags) == 0
    assert "continuing with another setting" in capsys.readouterr().out
    state = load_pt(second / "checkpoints" / "13.pt")["optimizer_state_dict"]["state"]
    assert state[2]["exp_avg"].dtype == torch.bfloat16


def gaussians(dtype: torch.dtype) -> Gaussians:
    cloud = tiny_cloud()
    rng = torch.Generator().manual_seed(4)
    # Numbers that bfloat16 holds, so that both renders show the same.
    cloud.sh_rest = (0.1 * torch.randn(200, 15, 3, generator=rng)).bfloat16().to(dtype)
    return cloud.activate().as_leaves()


@pytest.mark.parametrize("degree", [0, 1, 3])
def test_rendering_from_bfloat16_is_rendering_from_the_same_numbers(degree):
    camera, leaves = tiny_cameras()[1], [gaussians(t) for t in (torch.float32, torch.bfloat16)]
    outputs = [rasterize(g, camera, torch.zeros(3), sh_degree=degree) for g in leaves]
    assert torch.equal(outputs[0].image, outputs[1].image)
    for output in outputs:
        output.image.square().sum().backward()
    for name in ("means", "quats", "scales", "opacities", "sh_dc"):
        assert torch.equal(getattr(leaves[0], name).grad, getattr(leaves[1], name).grad), name
    exact, half = (g.sh_rest.grad for g in leaves)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, exact.bfloat16())


def test_raw_parameters_collect_their_gradients_once():
    """Leaves are the parameters themselves: no second tensor of their size."""
    cloud = tiny_cloud()
    for tensor in cloud.tensors().values():
        tensor.requires_grad_(True)
    leaves = cloud.activate().as_leaves()
    for name in ("means", "sh_dc", "sh_rest"):
        assert getattr(leaves, name) is getattr(cloud, name)
    assert leaves.scales.is_leaf
    assert leaves.scales is not cloud.log_scales
