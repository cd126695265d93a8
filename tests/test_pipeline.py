# SPDX-License-Identifier: Apache-2.0
"""The stages together: how flags become settings, whole tiny runs, skipping and going on."""

from __future__ import annotations

import ast
import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.spatial.transform import Rotation

import metrics
import train
import train_full_pipeline
from gaussian_splatting.data import images as image_module
from gaussian_splatting.engine.model import TrainableCloud
from gaussian_splatting.optim.schedule import LearningRates
from gaussian_splatting.scenes.reference_layout import write_cfg_args
from gaussian_splatting.scenes.scene import VanillaSize, load_scene
from sugar_pipeline import commands
from sugar_pipeline.demo.demo_scene import demo_plan
from sugar_pipeline.pipeline.pipeline_flags import train_parser
from sugar_pipeline.pipeline.plan import PipelinePlan, mode_of
from sugar_pipeline.quality.model_metrics import metrics_options, metrics_parser, read_scene_config
from sugar_pipeline.timing.one_run import checked_plan
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from tests.support.command_line import as_flags
from tests.support.command_words import full_flags, full_plan, train_plan
from tests.support.repository import ROOT
from tests.support.tiny_scene import (
    SHORT_PIPELINE,
    assert_same_bits,
    make_tiny_checkpoint,
    make_tiny_scene,
    refusal,
    run_cli,
    tiny_cloud,
)
from tests.support.tracks import make_observed_scene

COARSE = "sugarcoarse_3Dgs7000_densityestim02_sdfnorm02"
MESH = "sugarmesh_3Dgs7000_densityestim02_sdfnorm02_level03_decim300"
FINE = (
    "sugarfine_3Dgs7000_densityestim02_sdfnorm02_level03_decim300_normalconsistency01_gaussperface1"
)


pytestmark = pytest.mark.usefixtures("small_pictures")


def planned(*words: object) -> PipelinePlan:
    start = ["-s", "scans/cup", "-c", "vanilla", "-r", "density"]
    return train_plan(*start, *words)


def full_planned(*words: object) -> PipelinePlan:
    start = ["-s", "scans/cup", "-r", "density"]
    return full_plan(*start, *words)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple:
    root = tmp_path_factory.mktemp("pipeline")
    scene = make_tiny_scene(root / "scene")
    return ("-s", scene.root, "-c", make_tiny_checkpoint(root / "vanilla", scene), *SHORT_PIPELINE)


@pytest.fixture(scope="module")
def run(inputs, tmp_path_factory) -> Path:
    """The output of one whole run."""
    output = tmp_path_factory.mktemp("whole") / "out"
    assert run_cli(train.main, *inputs, "--output_dir", output) == 0
    return output


def state_of(root: Path) -> dict[str, int]:
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(p): p.stat().st_mtime_ns for p in files if p.name != "log.txt"}


@pytest.mark.parametrize(
    ("words", "triangles", "per_triangle", "iterations"),
    [
        ("", 1_000_000, 1, 15_000),
        ("-v 5000 -g 3 -f 100", 5_000, 3, 100),
        ("--low_poly True", 200_000, 6, 15_000),
        ("--low_poly True -v 5000 -g 3", 200_000, 6, 15_000),
        ("--high_poly True -g 6", 1_000_000, 1, 15_000),
        ("--low_poly True --high_poly True", 1_000_000, 1, 15_000),
        ("--refinement_time short", 1_000_000, 1, 2_000),
        ("--refinement_time medium -f 9", 1_000_000, 1, 7_000),
        ("--refinement_time long", 1_000_000, 1, 15_000),
        ("--refinement_time None -f 9", 1_000_000, 1, 9),
    ],
)
def test_presets_win_over_single_flags(words, triangles, per_triangle, iterations):
    plan = planned(*words.split())
    assert plan.mesh.decimation_targets == (triangles,)
    assert plan.refine.config.gaussians_per_triangle == per_triangle
    assert plan.refine.config.refinement_iterations == iterations
    assert plan.refine.config.n_vertices_in_fg == triangles


def test_an_unknown_refinement_time_is_refused():
    with pytest.raises(UserError, match="--refinement_time fast is unknown"):
        planned("--refinement_time", "fast")


def test_files_have_the_names_of_the_original():
    plan = planned()
    root = Path("output")
    mesh = "3Dgs7000_densityestim02_sdfnorm02_level03_decim1000000"
    fine = f"sugarfine_{mesh}_normalconsistency01_gaussperface1"
    assert plan.coarse.result == root / "coarse" / "cup" / COARSE / "15000.pt"
    assert plan.mesh.mesh_paths == [root / "coarse_mesh" / "cup" / f"sugarmesh_{mesh}.ply"]
    assert plan.refine.result == root / "refined" / "cup" / fine / "15000.pt"
    assert plan.refine.ply_path == root / "refined_ply" / "cup" / f"{fine}.ply"
    assert plan.texture.obj_path == root / "refined_mesh" / "cup" / f"{fine}.obj"


def test_every_stage_sees_the_same_input():
    plan = planned("--eval", "False", "--resolution_factor", "3", "--images", "photos", "-i", "30")
    for stage in (plan.coarse, plan.mesh, plan.refine, plan.texture):
        assert not stage.eval
        assert stage.size.resolution_factor == 3
        assert stage.images == "photos"
        assert stage.iteration_to_load == 30


@pytest.mark.parametrize(
    ("words", "stages"),
    [
        ("--stop_after coarse", 1),
        ("--stop_after mesh", 2),
        ("--stop_after refine", 3),
        ("-t False", 3),
        ("--stop_after texture", 4),
        ("", 4),
    ],
)
def test_stages_can_be_left_out(words, stages):
    assert len(planned(*words.split()).stages) == stages


@pytest.mark.parametrize("full", [False, True])
def test_a_scale_by_a_photograph_that_is_not_there_is_refused_first(full, inputs, tmp_path, capsys):
    script = train_full_pipeline if full else train
    words = [*inputs[:2], *inputs[4 if full else 2 :], "--output_dir", tmp_path / "output"]
    names = ("--known_distance", "view_01.png", "absent.png", 2)
    error = refusal(capsys, script.main, *words, *names)
    assert "--known_distance absent.png: neither a registered photograph" in error
    assert not (tmp_path / "output").exists()


def test_an_atlas_whose_library_is_missing_is_refused_first(monkeypatch):
    monkeypatch.setitem(sys.modules, "xatlas", None)
    with pytest.raises(UserError, match="needs the package xatlas"):
        planned("--texture_atlas", "xatlas")
    planned("--texture_atlas", "xatlas", "--stop_after", "mesh")


def test_flags_of_stages_that_do_not_run_are_announced():
    plan = planned("--stop_after", "mesh", "-g", "6", "--square_size", "9", "-l", "0.2")
    assert "--gaussians_per_triangle: no effect, the refine stage does not run" in plan.messages
    assert "--square_size: no effect, the texture stage does not run" in plan.messages
    assert len(plan.messages) == 2


def test_a_checkpoint_given_by_path_goes_to_the_stage_that_made_it(tmp_path):
    fine, coarse = (tmp_path / name / "9.pt" for name in (FINE, COARSE))
    plan = planned("--resume", fine)
    assert (plan.coarse.run.resume, plan.refine.run.resume) == ("auto", str(fine))
    plan = planned("--resume", coarse)
    assert (plan.coarse.run.resume, plan.refine.run.resume) == (str(coarse), "auto")


def test_the_full_pipeline_trains_vanilla_on_the_views_that_are_not_held_out():
    plan = full_planned("--schedule_scale", "0.1", "--resolution_factor", "2")
    assert plan.vanilla.eval
    assert plan.vanilla.config.iterations == 700
    assert plan.vanilla.size.resolution_factor == 2
    assert plan.vanilla.config.densification.densification_interval == 50
    assert plan.vanilla.config.densification.opacity_reset_interval > 700
    assert plan.vanilla.model_path == plan.coarse.checkpoint_path
    assert plan.coarse.iteration_to_load == 700
    assert not full_planned("--eval", "False").vanilla.eval


def test_the_full_pipeline_starts_from_a_given_checkpoint():
    plan = full_planned("--gs_output_dir", "mine/", "--max_gaussians", "10")
    assert plan.vanilla is None
    assert plan.coarse.checkpoint_path == Path("mine")
    assert plan.coarse.iteration_to_load == 7_000
    assert any("--max_gaussians: no effect" in message for message in plan.messages)
    assert full_planned("--gs_output_dir", "None").vanilla is not None


@pytest.mark.slow
def test_a_whole_run_writes_all_results(run):
    assert (run / "coarse" / "scene" / COARSE / "30.pt").is_file()
    assert (run / "coarse_mesh" / "scene" / f"{MESH}.ply").is_file()
    assert (run / "refined" / "scene" / FINE / "6.pt").is_file()
    assert (run / "refined_ply" / "scene" / f"{FINE}.ply").is_file()
    for suffix in (".obj", ".mtl", ".png", ".glb"):
        assert (run / "refined_mesh" / "scene" / f"{FINE}{suffix}").is_file()
    report = (run / "refined" / "scene" / FINE / "report.html").read_text(encoding="utf-8")
    for word in ("Coarse mesh", "Refined mesh", "Textured mesh", "coarse SuGaR", "refinement"):
        assert word in report


WITHOUT_EXTRAS = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if f"{name}.".startswith(("sugar_maps.", "sugar_viewer.", "sugar_pipeline.blocks.")):
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
import train_full_pipeline
sys.exit(train_full_pipeline.main())
"""


@pytest.mark.slow
def test_a_run_does_without_maps_blocks_and_viewer(inputs, tmp_path):
    words = list(map(str, inputs))
    words[2] = "--gs_output_dir"
    command = [sys.executable, "-c", WITHOUT_EXTRAS, *words, "--output_dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "scene" / "mesh.obj").is_file()


def test_a_finished_run_is_not_repeated(inputs, run, capsys):
    before = state_of(run)
    assert run_cli(train.main, *inputs, "--output_dir", run) == 0
    assert state_of(run) == before
    assert capsys.readouterr().out.count("already") == 4


@pytest.mark.slow
def test_a_run_that_stopped_in_the_refinement_goes_on_and_ends_alike(inputs, run, tmp_path):
    copy = tmp_path / "out"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "refined_mesh")
    for name in (copy / "refined" / "scene" / FINE).glob("[3-6].pt"):
        name.unlink()
    assert run_cli(train.main, *inputs, "--output_dir", copy) == 0
    assert_same_bits(
        run / "refined" / "scene" / FINE / "6.pt", copy / "refined" / "scene" / FINE / "6.pt"
    )
    for suffix in (".obj", ".png"):
        first, second = (r / "refined_mesh" / "scene" / f"{FINE}{suffix}" for r in (run, copy))
        assert first.read_bytes() == second.read_bytes()


@pytest.mark.slow
def test_photographs_are_decoded_once_for_all_stages(inputs, tmp_path, monkeypatch):
    decoded: list[Path] = []
    original = image_module.decode_image

    def count(path, *rest):
        decoded.append(path)
        return original(path, *rest)

    monkeypatch.setattr(image_module, "decode_image", count)
    assert run_cli(train.main, *inputs, "--output_dir", tmp_path / "out") == 0
    assert len(decoded) == len(set(decoded)) == 10


@pytest.mark.slow
def test_the_full_pipeline_runs_in_folders_with_spaces_and_brackets(tmp_path):
    scene = make_tiny_scene(tmp_path / "my scan (1)")
    output = tmp_path / "out [b]"
    words = ("-s", scene.root, *SHORT_PIPELINE, "--output_dir", output)
    flags = (*words, "--vanilla_iterations", 150_000)
    assert run_cli(train_full_pipeline.main, *flags, "--bboxmin", "(-2,-2,-2)", "-B", "2,2,2") == 0
    vanilla = output / "vanilla_gs" / scene.root.name
    call = ast.parse((vanilla / "cfg_args").read_text(), mode="eval").body
    assert {k.arg: ast.literal_eval(k.value) for k in call.keywords}["eval"] is True
    assert (vanilla / "point_cloud" / "iteration_300" / "point_cloud.ply").is_file()
    assert len(list((output / "refined_mesh" / scene.root.name).glob("*.obj"))) == 1


def test_a_run_writes_the_settings_that_repeat_it(run, capsys):
    (file,) = (run / "refined").rglob("settings.toml")
    assert file.parent.parent.parent == run / "refined"
    before = state_of(run)
    assert run_cli(train.main, "--config", file) == 0
    assert "finished already" in capsys.readouterr().out
    assert state_of(run) == before


def test_metrics_are_those_of_the_run(inputs, run, capsys):
    config = json.dumps({str(inputs[1]): str(inputs[3])})
    shared = as_flags(scene_config=config, r="dn_consistency", v=300, f=6, output_dir=run)
    assert run_cli(metrics.main, *shared, "--evaluate_vanilla", True) == 0
    saved = json.loads((run / "metrics" / "results_density02_normal02.json").read_text())
    assert set(saved["scene"]) == {"3dgs_7k", "sugar_03_300_6"}
    for scores in saved["scene"].values():
        assert set(scores) == {"ssim", "psnr", "lpips"}
    log = (run / "refined" / "scene" / FINE / "log.txt").read_text()
    held_out = log.rsplit("held-out views", 1)[1]
    reported = float(held_out.split("PSNR ", 1)[1].split()[0])
    assert saved["scene"]["sugar_03_300_6"]["psnr"] == pytest.approx(reported, abs=0.05)
    assert run_cli(metrics.main, *shared, "--use_uv_texture", True) == 0
    textured = json.loads(
        (run / "metrics" / "results_density02_normal02_uvtexture.json").read_text()
    )
    assert textured["scene"]["sugar_03_300_6"]["psnr"] > 8
    assert "has no iteration 30000" in capsys.readouterr().out


def test_metrics_after_gain_and_offset_do_not_mind_darker_photographs(inputs, run, tmp_path):
    darker = tmp_path / "scene"
    shutil.copytree(inputs[1], darker)
    for path in (darker / "images").iterdir():
        with Image.open(path) as photograph:
            photograph.point(lambda value: round(0.6 * value)).save(path)

    def scores(scene) -> dict[str, float]:
        config = json.dumps({str(scene): str(inputs[3])})
        assert (
            run_cli(
                metrics.main,
                "--exposure_compensation",
                scene_config=config,
                r="dn_consistency",
                v=300,
                f=6,
                output_dir=run,
            )
            == 0
        )
        saved = json.loads((run / "metrics" / "results_density02_normal02.json").read_text())
        return saved["scene"]["sugar_03_300_6"]

    before, after = scores(inputs[1]), scores(darker)
    gain = -20 * math.log10(0.6)
    assert abs(after["psnr"] - before["psnr"] - gain) > 1
    assert before["psnr_after_gain_and_offset"] > before["psnr"]
    # What is left is 0.6 times as large, but for what the clamp to [0, 1] took away.
    assert after["psnr_after_gain_and_offset"] == pytest.approx(
        before["psnr_after_gain_and_offset"] + gain, abs=0.5
    )


def test_metrics_of_a_model_that_saw_the_held_out_views_say_so(inputs, run, tmp_path, capsys):
    checkpoint = tmp_path / "vanilla"
    shutil.copytree(inputs[3], checkpoint)
    output = tmp_path / "out"
    shutil.copytree(run / "refined", output / "refined")
    flags = ("-r", "dn_consistency", "-v", 300, "-f", 6, "--output_dir", output)

    def said(eval_split: bool) -> str:
        write_cfg_args(checkpoint, source_path=inputs[1], eval_split=eval_split)
        config = json.dumps({str(inputs[1]): str(checkpoint)})
        assert run_cli(metrics.main, "--scene_config", config, *flags) == 0
        return capsys.readouterr().out

    warnings = [line for line in said(False).splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1
    assert "held-out views" in warnings[0]
    saved = json.loads((output / "metrics" / "results_density02_normal02.json").read_text())
    assert set(saved) == {"scene"}
    assert set(saved["scene"]) == {"sugar_03_300_6"}
    assert "warning" not in said(True)


@pytest.mark.parametrize("extractor", ["poisson", "tsdf", "tetrahedra"])
def test_metrics_find_what_the_pipeline_writes(extractor, tmp_path):
    way = ("--mesh_extractor", extractor, "--output_dir", tmp_path)
    plan = planned(*way)
    config = json.dumps({"scans/cup": "vanilla"})
    words = ("--scene_config", config, "-r", "density", *way)
    options = metrics_options(metrics_parser(None).parse_flags([*map(str, words)]))
    assert options.refined_name == plan.refine.name
    assert options.result_path.stem.endswith(f"_{extractor}") == (extractor != "poisson")


def test_a_mesh_was_made_in_one_way():
    words = ["--scene_config", '{"a": "b"}', "-r", "sdf", "--mesh_extractor", "tsdf"]
    for other in ("--use_poisson_center", "--use_marching_cubes"):
        args = metrics_parser(None).parse_flags([*words, other, "True"])
        with pytest.raises(UserError, match="--mesh_extractor tsdf excludes"):
            metrics_options(args)


def test_metrics_name_the_model_that_is_missing(inputs, tmp_path, capsys):
    config = tmp_path / "scenes.json"
    config.write_text(json.dumps({str(inputs[1]): str(inputs[3])}))
    flags = ("--scene_config", config, "-r", "density", "--output_dir", tmp_path)
    assert "15000.pt" in refusal(capsys, metrics.main, *flags)


def test_metrics_name_the_model_that_is_no_refined_one(inputs, tmp_path, capsys):
    config = json.dumps({str(inputs[1]): str(inputs[3])})
    words = ["--scene_config", config, "-r", "density", "--output_dir", tmp_path]
    options = metrics_options(metrics_parser(None).parse_flags([*map(str, words)]))
    folder = tmp_path / "refined" / inputs[1].name / options.refined_name
    path = folder / "15000.pt"
    folder.mkdir(parents=True)
    coarse = TrainableCloud(tiny_cloud(), LearningRates(), 1.0).state()
    rest = {"train_losses": [], "epoch": 0, "iteration": 15000}
    # Free Gaussians of the coarse stage; and none at all.
    for state in (coarse, {**coarse, "state_dict": {}}):
        torch.save({**state, **rest}, path)
        error = refusal(capsys, metrics.main, *words)
        assert f"error: {path}: " in error


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", '{"a": 1}'])
def test_a_wrong_scene_config_is_refused(text, tmp_path):
    if text == "[1]":
        path = tmp_path / "list.json"
        path.write_text(text)
        text = str(path)
    with pytest.raises(UserError, match="--scene_config"):
        read_scene_config(text)


def test_the_refined_model_carries_its_topology(run):
    payload = torch.load(run / "refined" / "scene" / FINE / "6.pt", weights_only=True)
    assert payload["state_dict"]["_surface_mesh_faces"].shape[1] == 3


def test_the_demo_says_which_flags_it_ignores(tmp_path, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(commands, "run_demo", seen.append)
    assert run_cli(train.main, "--demo", "--output_dir", tmp_path, "-g", 6) == 0
    assert seen[0]["output_dir"] == tmp_path
    assert "--gaussians_per_triangle: no effect with --demo" in capsys.readouterr().out
    assert run_cli(train.main, "--demo") == 0
    assert "no effect" not in capsys.readouterr().out


def test_the_demo_runs_all_stages_on_short_schedules(tmp_path):
    args = train_parser(None).parse_flags(["--demo", "--output_dir", str(tmp_path)])
    plan = demo_plan(args, tmp_path / "demo_scene")
    assert len(plan.stages) == 5
    assert plan.coarse.iteration_to_load == plan.vanilla.config.iterations == 850
    assert plan.vanilla.config.densification.densify_until_iter < plan.vanilla.config.iterations
    assert plan.coarse.config.schedule.last == 500
    assert plan.coarse.checkpoint_path == plan.vanilla.model_path
    assert plan.texture.obj_path.is_relative_to(tmp_path)


@pytest.fixture(scope="module")
def observed(tmp_path_factory) -> Path:
    """A scene of 24 views that overlap."""
    return make_observed_scene(tmp_path_factory.mktemp("observed") / "scene").root


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_views", "far", "mode"),
    [(24, False, "multiview"), (8, False, "dn_consistency"), (24, True, "dn_consistency")],
)
def test_the_mode_follows_from_the_overlap_of_the_views(observed, n_views, far, mode, tmp_path):
    root = observed if n_views == 24 else make_observed_scene(tmp_path / "scene", n_views).root
    scene = load_scene(root, eval_split=False, size_rule=VanillaSize(), notify=lambda line: None)
    if far:
        # Each looks in a direction of its own.
        turns = Rotation.from_euler(
            "xyz", 2 * np.random.default_rng(0).uniform(-90, 90, (24, 3)), degrees=True
        ).as_matrix()
        apart = [replace(c, rotation=t) for c, t in zip(scene.train_cameras, turns, strict=True)]
        scene = replace(scene, train_cameras=apart, extent=0.01)
    found, reason = mode_of(scene)
    assert found == mode
    assert "training views" in reason


def test_a_mode_that_is_given_wins():
    plan = checked_plan(full_flags("-s", "nowhere", "-r", "sdf"), Console.silent())
    assert plan.coarse.config.regularization_type == "sdf"


def test_the_chosen_mode_is_named(observed, capsys):
    plan = checked_plan(full_flags("-s", observed), Console())
    assert plan.flags["regularization_type"] == plan.coarse.config.regularization_type
    assert plan.coarse.config.regularization_type == "multiview"
    assert "--regularization_type multiview: 21 of 21 training views" in capsys.readouterr().out


def test_cameras_are_found_before_the_mode_is_chosen(observed, tmp_path, monkeypatch, capsys):
    photographs = tmp_path / "photographs"
    shutil.copytree(observed / "images", photographs)

    def find_cameras(options, console):
        shutil.rmtree(options.source_path)
        shutil.copytree(observed, options.source_path)

    monkeypatch.setattr("sugar_capture.conversion.convert_run.convert", find_cameras)
    plan = checked_plan(full_flags("-s", photographs), Console())
    assert plan.coarse.config.regularization_type == "multiview"
    assert plan.convert is None


def test_a_folder_without_a_scene_is_one_line_without_a_mode(tmp_path, capsys):
    refusal(capsys, train_full_pipeline.main, "-s", tmp_path)
