# SPDX-License-Identifier: Apache-2.0
"""Numbers gone bad in the middle of a run end it in that iteration, with the culprit named."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map

from gaussian_splatting.engine import loss_terms
from gaussian_splatting.engine.training_views import ColorGradient, ColorLoss
from gaussian_splatting.formats.ply import write_gaussian_ply
from gaussian_splatting.scenes.reference_layout import point_cloud_path
from gaussian_splatting.vanilla.vanilla_stage import VanillaStage
from sugar_trainers import losses
from sugar_trainers.coarse_stage import CoarseStage
from tests.support.brief_runs import brief_coarse, brief_vanilla
from tests.support.tiny_scene import (
    TinyScene,
    disturbed_cloud,
    load_pt,
    make_tiny_checkpoint,
    newest,
)

PARAMETERS = ("means", "sh_dc", "sh_rest", "opacity_logits", "log_scales", "quats")
FIRST, PRUNED, LAST = 14, 19, 30
CHECKPOINT_EVERY = 2


def run_coarse(scene: TinyScene, source: Path, output: Path, *flags: object) -> int:
    return brief_coarse(
        scene,
        source,
        output,
        *flags,
        schedule_scale=0.002,
        sdf_samples=200,
        test_iterations=1,
        checkpoint_milestones=1,
    )


def run_vanilla(scene: TinyScene, output: Path, *flags: object) -> int:
    return brief_vanilla(
        scene,
        output,
        *flags,
        eval=None,
        iterations=12,
        densify_until_iter=None,
        opacity_reset_interval=None,
        checkpoint_interval=CHECKPOINT_EVERY,
    )


def folder_of(output: Path) -> Path:
    found = [path.parent for path in output.rglob("run.json")]
    assert len(found) == 1
    return found[0]


def plant(monkeypatch, stage: type, method: str, iteration: int, spoil, *, before: bool) -> None:
    """Call ``spoil(stage)`` around a method of the stage at one iteration."""
    original = getattr(stage, method)

    def spoiled(self, now, *arguments):
        is_due = getattr(now, "iteration", now) == iteration
        if is_due and before:
            spoil(self)
        result = original(self, now, *arguments)
        if is_due and not before:
            spoil(self)
        return result

    monkeypatch.setattr(stage, method, spoiled)


def assert_stopped(code: int, err: str, iteration: int, *texts: str) -> None:
    assert code == 3
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert f"at iteration {iteration}" in err
    for text in texts:
        assert text in err


def assert_last_checkpoint_is_good(output: Path, before: int) -> None:
    folder = folder_of(output)
    last = newest(folder)
    assert 0 < last < before
    for name, value in load_pt(folder / f"{last}.pt")["state_dict"].items():
        assert bool(value.isfinite().all()), name
    assert json.loads((folder / "run.json").read_text())["status"] == "running"


def planted_nan(name: str):
    def spoil(stage):
        stage.model.optimizer.parameters[name].data[5] = torch.nan

    return spoil


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMETERS)
def test_nan_in_a_parameter_of_the_coarse_stage(
    scene, checkpoint, tmp_path, monkeypatch, capsys, name
):
    plant(monkeypatch, CoarseStage, "begin", 24, planted_nan(name), before=True)
    code = run_coarse(scene, checkpoint, tmp_path)
    assert_stopped(
        code,
        capsys.readouterr().err,
        24,
        f"parameter {name} ",
        "1 of 160 rows (first: 5)",
        "camera view_0",
        "last good checkpoint is kept",
    )
    assert_last_checkpoint_is_good(tmp_path, 24)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMETERS)
def test_nan_in_a_parameter_of_the_vanilla_stage(scene, tmp_path, monkeypatch, capsys, name):
    plant(monkeypatch, VanillaStage, "begin", 8, planted_nan(name), before=True)
    code = run_vanilla(scene, tmp_path)
    assert_stopped(code, capsys.readouterr().err, 8, f"parameter {name} ", "camera view_0")
    assert_last_checkpoint_is_good(tmp_path, 8)


@pytest.mark.parametrize("name", ["sh_dc", "means"])
def test_a_bad_parameter_without_a_gradient_is_found_soon(
    scene, tmp_path, monkeypatch, capsys, name
):
    plant(monkeypatch, VanillaStage, "begin", 7, planted_nan(name), before=True)
    code = run_vanilla(scene, tmp_path, "--checkpoint_interval", 3)
    assert_stopped(code, capsys.readouterr().err, 8, f"parameter {name} ")
    assert_last_checkpoint_is_good(tmp_path, 7)


@pytest.mark.slow
def test_parameters_that_a_step_spoiled_are_not_saved(
    scene, checkpoint, tmp_path, monkeypatch, capsys
):
    plant(monkeypatch, CoarseStage, "apply", 24, planted_nan("quats"), before=False)
    code = run_coarse(scene, checkpoint, tmp_path)
    assert_stopped(code, capsys.readouterr().err, 24, "parameter quats ")
    assert_last_checkpoint_is_good(tmp_path, 24)
    monkeypatch.undo()
    assert run_coarse(scene, checkpoint, tmp_path) == 0
    assert newest(folder_of(tmp_path)) == LAST


@pytest.mark.parametrize(
    ("module", "function", "term", "iteration"),
    [
        (loss_terms, "color_gradient_of", "color", FIRST),
        (losses, "opacity_entropy", "entropy", FIRST + 1),
        (losses, "fused_depth_normal_consistency", "dn", PRUNED),
    ],
)
def test_loss_term_that_is_not_a_number(
    scene, checkpoint, tmp_path, monkeypatch, capsys, module, function, term, iteration
):
    original = getattr(module, function)

    def spoiled(*arguments, **options):
        return tree_map(lambda value: value * torch.nan, original(*arguments, **options))

    monkeypatch.setattr(module, function, spoiled)
    code = run_coarse(scene, checkpoint, tmp_path)
    assert_stopped(
        code, capsys.readouterr().err, iteration, "loss term", f"{term} is nan", "camera view_0"
    )


@pytest.mark.parametrize("name", ["sampled", "photometric"])
def test_loss_that_is_infinite(scene, checkpoint, tmp_path, monkeypatch, capsys, name):
    if name == "sampled":
        monkeypatch.setattr(losses, "density_estimation_loss", lambda d, *_: d.sum() * torch.inf)
        code, iteration, term = run_coarse(scene, checkpoint, tmp_path), PRUNED, "density"
    else:
        original = loss_terms.color_gradient_of

        def infinite(*arguments, **options):
            (loss, l1, ssim), gradient = original(*arguments, **options)
            return ColorGradient(ColorLoss(loss * torch.inf, l1 * torch.inf, ssim), gradient)

        monkeypatch.setattr(loss_terms, "color_gradient_of", infinite)
        code, iteration, term = run_vanilla(scene, tmp_path), 1, "l1"
    assert_stopped(code, capsys.readouterr().err, iteration, f"{term} is inf")


@pytest.mark.parametrize("stage", [CoarseStage, VanillaStage])
def test_gradient_that_is_not_finite(scene, checkpoint, tmp_path, monkeypatch, capsys, stage):
    def spoil(stage):
        stage.model.optimizer.parameters["quats"].grad[[3, 8]] = torch.inf

    iteration = 23 if stage is CoarseStage else 7
    plant(monkeypatch, stage, "accumulate", iteration, spoil, before=False)
    if stage is CoarseStage:
        code = run_coarse(scene, checkpoint, tmp_path)
    else:
        code = run_vanilla(scene, tmp_path)
    assert_stopped(
        code,
        capsys.readouterr().err,
        iteration,
        "gradient of quats is not finite in 2 of",
        "(first: 3, 8)",
        "camera view_0",
    )
    assert_last_checkpoint_is_good(tmp_path, iteration)


@pytest.mark.parametrize("log_scale", [12.0, 60.0])
def test_exploding_scales(scene, checkpoint, tmp_path, monkeypatch, capsys, log_scale):
    def spoil(stage):
        stage.model.optimizer.parameters["log_scales"].data[4, 1] = log_scale

    plant(monkeypatch, CoarseStage, "begin", 23, spoil, before=True)
    code = run_coarse(scene, checkpoint, tmp_path)
    assert_stopped(
        code,
        capsys.readouterr().err,
        23,
        "scales out of bounds",
        "1 of 160 rows (first: 4)",
        "camera view_0",
    )
    assert_last_checkpoint_is_good(tmp_path, 23)


def test_a_view_that_shows_nothing_is_named_once_and_the_run_goes_on(scene, tmp_path, capsys):
    source = make_tiny_checkpoint(tmp_path / "checkpoint", scene)
    entries = json.loads((source / "cameras.json").read_text())
    rotation = torch.tensor(entries[3]["rotation"])
    # Half a turn about its own y axis.
    entries[3]["rotation"] = (rotation * torch.tensor([-1.0, 1.0, -1.0])).tolist()
    (source / "cameras.json").write_text(json.dumps(entries))
    assert run_coarse(scene, source, tmp_path / "out", "--eval", False) == 0
    out = capsys.readouterr().out
    assert "warning: view_03.png shows no Gaussian (iteration " in out
    assert out.count("and teaches nothing") == 1


def test_a_run_whose_views_all_show_nothing_stops_after_an_epoch(scene, tmp_path, capsys):
    far = disturbed_cloud(scene.cloud)
    far.means[:] = far.means * 0.1 + torch.tensor([0.0, 0.0, 50.0])
    write_gaussian_ply(tmp_path / "far.ply", far)
    code = run_vanilla(scene, tmp_path / "out", "--init_ply", tmp_path / "far.ply")
    n_views = len(scene.cameras)
    assert_stopped(
        code,
        capsys.readouterr().err,
        n_views,
        f"none of the 200 Gaussians is visible in the last {n_views} views",
    )


def test_prune_that_leaves_nothing(scene, tmp_path, capsys):
    source = make_tiny_checkpoint(tmp_path / "checkpoint", scene)
    faint = disturbed_cloud(scene.cloud)
    faint.opacity_logits[:] = -3.0
    write_gaussian_ply(point_cloud_path(source, 7000), faint)
    code = run_coarse(scene, source, tmp_path / "out")
    assert_stopped(
        code, capsys.readouterr().err, PRUNED, "no Gaussians left after pruning by opacity"
    )
    assert_last_checkpoint_is_good(tmp_path / "out", PRUNED)


def test_densification_that_leaves_nothing(scene, tmp_path, capsys):
    faint = disturbed_cloud(scene.cloud)
    faint.opacity_logits[:] = -9.0
    write_gaussian_ply(tmp_path / "faint.ply", faint)
    code = run_vanilla(scene, tmp_path / "out", "--init_ply", tmp_path / "faint.ply")
    assert_stopped(code, capsys.readouterr().err, 4, "no Gaussians left after densification")
    # That of iteration 4 holds the model before its round.
    assert_last_checkpoint_is_good(tmp_path / "out", 5)
