# SPDX-License-Identifier: Apache-2.0
"""Whole runs on a tiny scene: what they write, and that what they show is true."""

import ast
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from plyfile import PlyData, PlyElement

import train_coarse_density
import train_coarse_sdf
from gaussian_splatting import train as vanilla_train
from gaussian_splatting.core.random import derive_seed
from gaussian_splatting.engine.loss_terms import report
from gaussian_splatting.engine.model import cloud_from_state
from gaussian_splatting.formats.ply import read_gaussian_ply, write_gaussian_ply, write_point_ply
from gaussian_splatting.rasterization import rasterize
from gaussian_splatting.scenes.reference_layout import point_cloud_path
from gaussian_splatting.scenes.scene import load_scene
from sugar_scene.field_kernels import evaluate_fields
from sugar_scene.geometry import sdf_from_density
from sugar_trainers.capture import SugarSize
from sugar_trainers.coarse_stage import CoarseStage
from sugar_trainers.losses import (
    MIN_VIEW_Z,
    better_normal_loss,
    density_estimation_loss,
    opacity_entropy,
    sdf_estimation_loss,
)
from sugar_trainers.sampling import CameraAxes, depth_gap, sampling_mask
from sugar_trainers.stage_config import REGULARIZATIONS, CoarseConfig, CoarseSchedule
from sugar_trainers.terms import coarse_terms
from tests.support.brief_runs import brief_coarse, brief_vanilla
from tests.support.color_losses import color_loss
from tests.support.depth_normals import depth_normal_consistency
from tests.support.golden import GOLDEN_DIR
from tests.support.samples import draw_samples
from tests.support.tiny_scene import (
    N_FAINT,
    TinyScene,
    disturbed_cloud,
    events,
    load_pt,
    make_tiny_checkpoint,
    make_tiny_scene,
    psnr_of_files,
    render_8_bit,
    run_cli,
    save_png,
    write_model,
)
from tests.support.training import accumulate, everywhere

DENSITY_FOLDER = "sugarcoarse_3Dgs7000_densityestim02_sdfnorm02"
SDF_FOLDER = "sugarcoarse_3Dgs7000_sdfestim02_sdfnorm02"
SHORT: dict[str, object] = {"schedule_scale": 0.002, "sdf_samples": 500}
TERMS = {
    "density": {"color", "entropy", "density", "normal"},
    "sdf": {"color", "entropy", "sdf", "normal"},
    "dn_consistency": {"color", "entropy", "dn", "density", "normal"},
}


@pytest.fixture(scope="module")
def vanilla_run(scene, tmp_path_factory) -> Path:
    """100 iterations, densification in half of them."""
    output = tmp_path_factory.mktemp("vanilla") / "out"
    code = brief_vanilla(
        scene,
        output,
        iterations=100,
        densify_from_iter=10,
        densification_interval=20,
        densify_until_iter=70,
        opacity_reset_interval=None,
        save_iterations=60,
        test_iterations=1,
        checkpoint_interval=30,
        checkpoint_iterations=15,
    )
    assert code == 0
    return output


@pytest.fixture(scope="module")
def coarse_runs(scene, checkpoint, tmp_path_factory) -> dict[str, Path]:
    """Folders of one short run of each regularisation."""
    folders = {}
    for mode in REGULARIZATIONS:
        output = tmp_path_factory.mktemp(mode)
        assert brief_coarse(scene, checkpoint, output, r=mode, **SHORT) == 0
        name = SDF_FOLDER if mode == "sdf" else DENSITY_FOLDER
        folders[mode] = output / "coarse" / "scene" / name
    return folders


def files_of(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def short_vanilla(scene: TinyScene, output: Path, *flags: object) -> int:
    return run_cli(vanilla_train.main, "-s", scene.root, "-m", output, "--iterations", 2, *flags)


def short_coarse(scene: TinyScene, source: Path, output: Path, *flags: object) -> int:
    return brief_coarse(
        scene, source, output, *flags, r="density", schedule_scale=0.0003, force=True
    )


@pytest.mark.parametrize("mode", REGULARIZATIONS)
def test_the_loss_is_the_weighted_sum_of_the_table(mode):
    config = CoarseConfig(mode)
    weights = {
        "color": 1.0,
        "entropy": config.entropy_factor,
        "dn": config.dn_factor,
        "normal": config.normal_factor,
    }
    values = {name: torch.tensor(float(k)) for k, name in enumerate(TERMS[mode], start=1)}
    found = report(coarse_terms(config), values)
    expected = sum(
        weights.get(name, config.estimation_factor) * float(value) for name, value in values.items()
    )
    assert float(found["loss"]) == pytest.approx(expected)
    assert list(found)[0] == "loss"
    assert found.keys() == {"loss", *TERMS[mode]}


@pytest.mark.slow
def test_vanilla_writes_the_layout_of_the_reference(scene, vanilla_run):
    own = {path for path in files_of(vanilla_run) if not path.startswith("checkpoints/")}
    assert own == {
        "cfg_args",
        "cameras.json",
        "input.ply",
        "point_cloud/iteration_60/point_cloud.ply",
        "point_cloud/iteration_100/point_cloud.ply",
    }
    call = ast.parse((vanilla_run / "cfg_args").read_text(), mode="eval").body
    settings = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
    assert call.func.id == "Namespace"
    assert settings == {
        "sh_degree": 3,
        "source_path": str(scene.root),
        "model_path": str(vanilla_run),
        "images": "images",
        "resolution": -1,
        "white_background": False,
        "data_device": "cuda",
        "eval": True,
    }
    entries = json.loads((vanilla_run / "cameras.json").read_text())
    order = [0, 8, 1, 2, 3, 4, 5, 6, 7, 9]
    assert [entry["img_name"] for entry in entries] == [f"view_{i:02d}.png" for i in order]
    np.testing.assert_allclose(entries[0]["position"], scene.cameras[0].center, atol=1e-9)
    assert (entries[0]["cx"], entries[0]["cy"]) == (scene.cameras[0].cx, scene.cameras[0].cy)
    points = PlyData.read(vanilla_run / "input.ply")["vertex"]
    assert len(points) == len(scene.points)


def test_vanilla_keeps_the_milestones_and_the_newest_checkpoints(vanilla_run):
    stored = {name for name in files_of(vanilla_run / "checkpoints") if name.endswith(".pt")}
    assert stored == {"15.pt", "30.pt", "60.pt", "90.pt", "100.pt"}


def test_vanilla_learns_the_scene(vanilla_run):
    curves = events(vanilla_run / "checkpoints")
    losses = load_pt(vanilla_run / "checkpoints" / "100.pt")["train_losses"]
    assert losses[-1] < 0.6 * losses[0]
    first, last = (event.value for event in curves.Scalars("Test/PSNR"))
    assert last > first + 3
    assert {f"Loss/{name}" for name in ("loss", "l1", "ssim")} <= set(curves.Tags()["scalars"])


def test_vanilla_densifies_and_its_export_is_its_last_state(vanilla_run):
    state = load_pt(vanilla_run / "checkpoints" / "100.pt")["state_dict"]
    assert state["_points"].shape[0] > 310
    exported = read_gaussian_ply(point_cloud_path(vanilla_run, 100))
    for name, value in cloud_from_state(state).tensors().items():
        assert torch.equal(getattr(exported, name), value), name


@pytest.mark.slow
def test_vanilla_exports_the_model_that_was_trained_and_not_the_one_that_follows(scene, tmp_path):
    """At a round of densification, at a reset of opacities, and where no step would follow."""
    rounds = ("--densify_from_iter", 2, "--densification_interval", 4, "--densify_grad_threshold")
    save = ("--save_iterations", 4, 8, "--opacity_reset_interval")
    changed, plain = tmp_path / "changed", tmp_path / "plain"
    assert short_vanilla(scene, changed, "--iterations", 9, *rounds, 1e-9, *save, 8) == 0
    assert short_vanilla(scene, plain, "--iterations", 9, *rounds, 1e-9, *save, 99) == 0
    first, second, last = (
        {folder: read_gaussian_ply(point_cloud_path(folder, i)) for folder in (changed, plain)}
        for i in (4, 8, 9)
    )
    n_points = len(scene.points)
    assert len(first[changed]) == n_points
    assert len(second[changed]) > n_points
    # The reset of iteration 8 would be followed by iteration 9, which makes no step.
    assert len(last[changed]) == len(second[changed])
    for clouds in (second, last):
        assert clouds[changed].opacity_logits.sigmoid().max() > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("limit", [320, 120])
def test_vanilla_never_exceeds_the_number_allowed(scene, tmp_path, limit):
    code = short_vanilla(
        scene,
        tmp_path,
        "--iterations",
        24,
        "--max_gaussians",
        limit,
        "--densify_from_iter",
        2,
        "--densification_interval",
        4,
        "--checkpoint_interval",
        2,
        "--keep_checkpoints",
        99,
    )
    assert code == 0
    numbers = {
        load_pt(path)["state_dict"]["_points"].shape[0]
        for path in (tmp_path / "checkpoints").glob("*.pt")
    }
    assert max(numbers) == limit


@pytest.fixture(scope="module")
def psnr_in_units(tmp_path_factory) -> Callable[[float], float]:
    """PSNR after a short training on the scene in other units, by world units per unit."""

    @cache
    def psnr(factor: float) -> float:
        folder = tmp_path_factory.mktemp("units")
        scene = make_tiny_scene(folder / "scene")
        cameras = [replace(c, translation=factor * c.translation) for c in scene.cameras]
        model = scene.root / "sparse" / "0"
        shutil.rmtree(model)
        write_model(model, cameras, factor * scene.points, scene.points_rgb)
        output = folder / "out"
        short = ("-s", scene.root, "-m", output, "--eval", "--iterations", 60)
        rounds = ("--densify_from_iter", 10, "--densification_interval", 20)
        assert run_cli(vanilla_train.main, *short, *rounds) == 0
        return events(output / "checkpoints").Scalars("Test/PSNR")[-1].value

    return psnr


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.03, 0.001, 300.0])
def test_a_capture_in_other_units_is_learned_as_well(psnr_in_units, scale):
    """Nothing depends on the length of a world unit: no near plane, no least size."""
    assert psnr_in_units(scale) == pytest.approx(psnr_in_units(1.0), abs=0.5)


def test_vanilla_starts_from_points_of_a_ply(scene, tmp_path):
    points = scene.points[:50].astype(np.float32)
    write_point_ply(tmp_path / "start.ply", points, scene.points_rgb[:50])
    assert short_vanilla(scene, tmp_path / "out", "--init_ply", tmp_path / "start.ply") == 0
    cloud = read_gaussian_ply(point_cloud_path(tmp_path / "out", 2))
    torch.testing.assert_close(cloud.means, torch.from_numpy(points), atol=2e-3, rtol=0)


def test_vanilla_starts_from_gaussians_of_a_ply(scene, tmp_path):
    write_gaussian_ply(tmp_path / "start.ply", scene.cloud)
    assert short_vanilla(scene, tmp_path / "out", "--init_ply", tmp_path / "start.ply") == 0
    cloud = read_gaussian_ply(point_cloud_path(tmp_path / "out", 2))
    torch.testing.assert_close(cloud.log_scales, scene.cloud.log_scales, atol=0.02, rtol=0)
    torch.testing.assert_close(cloud.opacity_logits, scene.cloud.opacity_logits, atol=0.2, rtol=0)


def test_a_step_of_more_views_than_there_are_is_refused(scene, tmp_path, capsys):
    assert short_vanilla(scene, tmp_path, "--views_per_step", 2**31) == 2
    assert "there are only 10 views to train on" in capsys.readouterr().err


def test_vanilla_does_not_write_into_the_checkpoint_of_another_program(
    scene, checkpoint, tmp_path, capsys
):
    foreign = make_tiny_checkpoint(tmp_path / "foreign", scene)
    before = {name: (foreign / name).read_bytes() for name in files_of(foreign)}
    assert short_vanilla(scene, foreign) == 2
    error = capsys.readouterr().err
    assert "made by another program" in error
    assert "-m/--model_path" in error
    assert {name: (foreign / name).read_bytes() for name in files_of(foreign)} == before
    assert short_vanilla(scene, foreign, "--overwrite", True) == 0
    assert not point_cloud_path(foreign, 7000).exists()


def test_vanilla_result_is_a_checkpoint_for_sugar(scene, vanilla_run, tmp_path):
    assert short_coarse(scene, vanilla_run, tmp_path, "-i", 60) == 0
    assert [path.name for path in (tmp_path / "coarse" / "scene").iterdir()] == [
        DENSITY_FOLDER.replace("7000", "60")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["cfg_args", "cameras.json", "everything but the ply"])
def test_incomplete_checkpoints_of_other_programs_are_enough(scene, tmp_path, missing):
    foreign = make_tiny_checkpoint(tmp_path / "foreign", scene)
    source = foreign
    if missing == "everything but the ply":
        source = tmp_path / "cloud.ply"
        point_cloud_path(foreign, 7000).rename(source)
    else:
        (foreign / missing).unlink()
    assert short_coarse(scene, source, tmp_path / "out") == 0


def test_export_of_splatfacto_is_enough(scene, tmp_path, capsys):
    cloud = disturbed_cloud(scene.cloud)
    columns = {"x": cloud.means[:, 0], "y": cloud.means[:, 1], "z": cloud.means[:, 2]}
    columns |= {f"f_dc_{i}": cloud.sh_dc[:, 0, i] for i in range(3)}
    rest = cloud.sh_rest.transpose(1, 2).flatten(1)
    columns |= {f"f_rest_{i}": rest[:, i] for i in range(45)}
    columns |= {"opacity": cloud.opacity_logits[:, 0]}
    columns |= {f"scale_{i}": cloud.log_scales[:, i] for i in range(3)}
    columns |= {f"rot_{i}": cloud.quats[:, i] for i in range(4)}
    table = np.zeros(len(cloud), dtype=[(name, "<f4") for name in columns])
    for name, column in columns.items():
        table[name] = column.numpy()
    table["scale_1"][[3, 17]] = np.nan
    PlyData([PlyElement.describe(table, "vertex")]).write(str(tmp_path / "splat.ply"))
    assert short_coarse(scene, tmp_path / "splat.ply", tmp_path / "out") == 0
    assert "dropped 2 of 200 Gaussians" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("mode", REGULARIZATIONS)
def test_coarse_writes_its_files_and_nothing_else(coarse_runs, mode):
    run = coarse_runs[mode]
    found = {re.sub(r"events\.out.*", "events", name) for name in files_of(run)}
    made = {f"{i}.pt" for i in (14, 20, 22, 24, 26, 28, 30)} | {"views.png", "worst.png"}
    files = {"run.json", "log.txt", "report.html", "settings.toml", "tensorboard/events"}
    assert found == files | made
    assert json.loads((run / "run.json").read_text())["status"] == "finished"


def test_the_contact_sheet_shows_four_pictures_of_a_few_held_out_views(coarse_runs):
    from PIL import Image

    with Image.open(coarse_runs["dn_consistency"] / "views.png") as sheet:
        width, height = sheet.size
        pixels = np.asarray(sheet.convert("RGB"))
    assert width == 4 * 64
    assert height % 48 == 0
    photograph, render = pixels[:48, :64].astype(float), pixels[:48, 64:128].astype(float)
    assert np.abs(photograph - render).mean() < np.abs(photograph - 128).mean()


@pytest.mark.parametrize(
    ("entry", "folder"), [(train_coarse_density, DENSITY_FOLDER), (train_coarse_sdf, SDF_FOLDER)]
)
def test_entry_points_of_the_coarse_stage_alone_write_where_they_are_told(
    scene, checkpoint, tmp_path, entry, folder
):
    code = run_cli(
        entry.main,
        s=scene.root,
        c=checkpoint,
        o=tmp_path,
        e=0.3,
        schedule_scale=0.0003,
        sdf_samples=100,
    )
    assert code == 0
    assert (tmp_path / folder.replace("estim02", "estim03") / "4.pt").is_file()


def test_coarse_file_is_laid_out_as_the_recorded_one(coarse_runs):
    recorded = json.loads((GOLDEN_DIR / "case10_checkpoint_A" / "pt_listing.json").read_text())
    recorded = recorded["coarse_pt"]
    payload = load_pt(coarse_runs["dn_consistency"] / "30.pt")
    assert list(payload)[:5] == list(recorded)
    assert payload["state_dict"]["_points"].shape[0] == 200 - N_FAINT

    def layout(tensor):
        shape = ["N" if size == 200 - N_FAINT else size for size in tensor.shape]
        return shape, str(tensor.dtype).removeprefix("torch.")

    def recorded_layout(entry):
        return ["N" if size == 401 else size for size in entry["shape"]], entry["dtype"]

    assert [(name, *layout(value)) for name, value in payload["state_dict"].items()] == [
        (name, *recorded_layout(entry)) for name, entry in recorded["state_dict"].items()
    ]
    assert (type(payload["epoch"]), payload["iteration"]) == (int, 30)
    assert len(payload["train_losses"]) == 17
    optimizer, expected = payload["optimizer_state_dict"], recorded["optimizer_state_dict"]
    assert [str(index) for index in optimizer["state"]] == list(expected["state"])
    for index, moments in optimizer["state"].items():
        assert {name: layout(value) for name, value in moments.items()} == {
            name: recorded_layout(entry) for name, entry in expected["state"][str(index)].items()
        }
    for group, entry in zip(optimizer["param_groups"], expected["param_groups"], strict=True):
        assert set(group) == set(entry)
        for name, value in group.items():
            if name not in ("lr", "betas", "params"):
                assert repr(value) == entry[name].split("=", 1)[1], name


@pytest.mark.parametrize("mode", REGULARIZATIONS)
def test_every_term_of_the_coarse_stage_is_seen_acting(coarse_runs, mode):
    curves = events(coarse_runs[mode])
    acting = {
        tag.removeprefix("Loss/"): [(e.step, e.value) for e in curves.Scalars(tag)]
        for tag in curves.Tags()["scalars"]
        if tag.startswith("Loss/")
    }
    assert set(acting) == TERMS[mode] | {"loss"}
    for name, values in acting.items():
        first = {"loss": 14, "color": 14, "entropy": 15}.get(name, 19)
        last = 17 if name == "entropy" else 30
        assert [step for step, _ in values] == list(range(first, last + 1)), name
        assert all(value > 0 for _, value in values), name


def test_tensorboard_shows_rates_counts_memory_histograms_and_pictures(coarse_runs):
    curves = events(coarse_runs["dn_consistency"])
    scalars, pictures = set(curves.Tags()["scalars"]), set(curves.Tags()["images"])
    for name in ("means", "sh_dc", "sh_rest", "opacity_logits", "log_scales", "quats"):
        assert f"LearningRate/{name}" in scalars
    assert {"Test/L1", "Test/PSNR", "Test/SSIM", "View/normal_agreement"} <= scalars
    assert any(re.fullmatch(r"Memory/peak_geometry_GiB", tag) for tag in scalars)
    counts = [(e.step, e.value) for e in curves.Scalars("Gaussians/count")]
    assert counts[0][1] == 200
    assert counts[-1][1] == 200 - N_FAINT
    assert set(curves.Tags()["histograms"]) >= {"Parameters/means", "Parameters/scales"}
    kinds = ("photograph", "render", "depth", "normal")
    held_out = ("view_00.png", "view_08.png")
    assert pictures == {f"{view}/{kind}" for view in held_out for kind in kinds}
    for tag in pictures:
        assert [(e.step, e.width, e.height) for e in curves.Images(tag)][-1] == (30, 64, 48)


@pytest.mark.parametrize("mode", ["dn_consistency", "sdf"])
def test_reported_psnr_is_that_of_saved_images(scene, coarse_runs, mode, tmp_path):
    run = coarse_runs[mode]
    cloud = cloud_from_state(load_pt(run / "30.pt")["state_dict"])
    scores = []
    for camera in (scene.cameras[0], scene.cameras[8]):
        save_png(tmp_path / camera.name, render_8_bit(cloud, camera))
        scores.append(psnr_of_files(tmp_path / camera.name, camera.image_path))
    reported = events(run).Scalars("Test/PSNR")[-1]
    assert reported.step == 30
    assert reported.value == pytest.approx(np.mean(scores), abs=0.01)


def test_log_holds_configuration_progress_and_result(coarse_runs):
    log = (coarse_runs["sdf"] / "log.txt").read_text(encoding="utf-8")
    for text in (
        "schedule.last",
        "8 to train on, 2 held out",
        "kept 160 of 200 Gaussians",
        "PSNR",
        "sdf 30/30",
        "finished:",
    ):
        assert text in log


def test_half_size_normals_run_and_act(scene, checkpoint, coarse_runs, tmp_path):
    assert brief_coarse(scene, checkpoint, tmp_path, full_res_normals=False, **SHORT) == 0
    full = load_pt(coarse_runs["dn_consistency"] / "30.pt")
    half = load_pt(tmp_path / "coarse" / "scene" / DENSITY_FOLDER / "30.pt")
    assert half["train_losses"][:5] == full["train_losses"][:5]
    assert half["train_losses"][5] != full["train_losses"][5]
    assert half["train_losses"][5] == pytest.approx(full["train_losses"][5], rel=0.1)


def test_unchanged_flags_give_the_same_bits(scene, checkpoint, coarse_runs, tmp_path):
    intervals = {"checkpoint_interval": 9999, "test_iterations": 1}
    assert brief_coarse(scene, checkpoint, tmp_path, r="sdf", **intervals, **SHORT) == 0
    first = load_pt(coarse_runs["sdf"] / "30.pt")["state_dict"]
    second = load_pt(tmp_path / "coarse" / "scene" / SDF_FOLDER / "30.pt")["state_dict"]
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


ALL_TERMS_AT_ONCE = CoarseSchedule(
    first=1, last=10, entropy_start=0, entropy_stop=9, prune=50, regularize=0, neighbor_interval=5
)


def all_terms_config(mode: str, **changes) -> CoarseConfig:
    return CoarseConfig(
        regularization_type=mode,
        schedule=ALL_TERMS_AT_ONCE,
        sdf_samples=700,
        n_neighbors=8,
        **changes,
    )


def gradients_of(scene: TinyScene, config: CoarseConfig) -> tuple[dict, dict]:
    stage = CoarseStage(disturbed_cloud(scene.cloud), config, everywhere(3.3), pytest.fail)
    camera = scene.cameras[3]
    target = torch.from_numpy(render_8_bit(scene.cloud, camera)).float() / 255
    stage.begin(2)
    result = accumulate(stage, 2, camera, target)
    return stage.model.optimizer.gradients(), result.terms


def gradients_in_one_backward(scene: TinyScene, config: CoarseConfig) -> tuple[dict, torch.Tensor]:
    """The same iteration as one backward pass over one sum; nothing cut, nothing chunked."""
    stage = CoarseStage(disturbed_cloud(scene.cloud), config, everywhere(3.3), pytest.fail)
    stage.begin(2)
    camera = scene.cameras[3]
    target = torch.from_numpy(render_8_bit(scene.cloud, camera)).float() / 255
    intrinsics = camera.fx, camera.fy, camera.cx, camera.cy
    gaussians = stage.model.cloud.activate()
    output = rasterize(
        gaussians,
        camera,
        torch.zeros(3),
        depth=True,
        normal=True,
        farthest_depth_behind=config.uses_sdf,
    )
    depth = output.depth if config.uses_sdf else None
    loss = color_loss(output.image, target)
    loss = loss + config.entropy_factor * opacity_entropy(gaussians.opacities[output.visible])
    if config.uses_depth_normals:
        term = depth_normal_consistency(output.depth, output.normal, *intrinsics)
        loss = loss + config.dn_factor * term
    mask = sampling_mask(gaussians, camera, output.visible, depth)
    seed = derive_seed(config.random_seed, "samples", 2)
    indices, noise = draw_samples(mask, config.sdf_samples, seed)
    fields = evaluate_fields(
        gaussians.means,
        gaussians.quats,
        gaussians.scales,
        gaussians.opacities,
        stage.extra_state()["neighbors"],
        indices,
        noise,
        config.density_factor,
    )
    if config.uses_sdf:
        axes = CameraAxes(camera, fields.points.device)
        view_points = axes.to_view(fields.points)
        in_front = view_points[:, 2] > MIN_VIEW_Z
        gap = depth_gap(depth, view_points, axes)[in_front]
        sdf = sdf_from_density(fields.density, fields.beta)[in_front]
        estimation = sdf_estimation_loss(sdf, gap, 3.3)
    else:
        estimation = density_estimation_loss(fields.density, fields.plane_distance, fields.beta)
    loss = loss + config.estimation_factor * estimation
    loss = loss + config.normal_factor * better_normal_loss(fields.normal_error)
    loss.backward()
    return stage.model.optimizer.gradients(), loss.detach()


def assert_gradients_agree(actual: dict, expected: dict, tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert (actual[name] - value).abs().max() <= tolerance * value.abs().max(), name


@pytest.mark.parametrize("mode", REGULARIZATIONS)
def test_backward_per_term_is_one_backward_over_the_sum(scene, mode):
    config = all_terms_config(mode)
    actual, terms = gradients_of(scene, config)
    assert set(terms) == TERMS[mode] | {"loss"}
    expected, loss = gradients_in_one_backward(scene, config)
    assert float(terms["loss"]) == pytest.approx(float(loss), rel=1e-6)
    assert_gradients_agree(actual, expected, 1e-5)


@pytest.mark.parametrize("mode", REGULARIZATIONS)
def test_chunked_sampling_gives_the_gradients_of_the_whole(scene, mode):
    whole, terms = gradients_of(scene, all_terms_config(mode))
    chunked, chunked_terms = gradients_of(scene, all_terms_config(mode, sample_chunk=64))
    for name, value in terms.items():
        assert float(chunked_terms[name]) == pytest.approx(float(value), rel=1e-5), name
    assert_gradients_agree(chunked, whole, 1e-5)


def test_scene_on_disk_is_the_one_that_was_made(scene):
    loaded = load_scene(scene.root, size_rule=SugarSize(), eval_split=False, notify=pytest.fail)
    for made, found in zip(scene.cameras, loaded.train_cameras, strict=True):
        assert (made.name, made.cx, made.cy) == (found.name, found.cx, found.cy)
        np.testing.assert_allclose(made.rotation, found.rotation, atol=1e-9)
        np.testing.assert_allclose(made.translation, found.translation, atol=1e-9)
