# SPDX-License-Identifier: Apache-2.0
"""Whole runs in blocks: same bits in turn and on a cluster, what is refused, what goes on."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

import train_full_pipeline
from gaussian_splatting.formats.ply import read_gaussian_ply
from gaussian_splatting.optim.optimizer_config import OptimizerConfig
from gaussian_splatting.scenes.scene import load_scene
from sugar_extractors.export.engines.web_page import read_page_gaussians
from sugar_extractors.mesh.refinement.photometric_refinement import REDUCTIONS
from sugar_extractors.placing import PlacementOptions
from sugar_pipeline.blocks import automatic
from sugar_pipeline.blocks.automatic import expected_gaussians, training_bytes, with_number
from sugar_pipeline.blocks.block_plan import Block, read_plan
from sugar_pipeline.blocks.block_task import BlockTask, TaskFailed, perform, run_task
from sugar_pipeline.blocks.blocks_run import stages_of
from sugar_pipeline.blocks.joining import JoinedParts
from sugar_pipeline.blocks.overview import overview_options
from sugar_pipeline.blocks.partition import BlockBox
from sugar_pipeline.blocks.preparation import block_flags
from sugar_pipeline.demo.demo_scene import make_demo_scene
from sugar_scene import triangle_mesh
from sugar_scene.mesh_files.textured_mesh_io import read_textured_mesh
from sugar_utils.console import Console, Pace
from sugar_utils.errors import UserError, say_nothing
from sugar_utils.files import read_json
from sugar_utils.flags import AUTO
from sugar_utils.recipe import note_path
from tests.support.command_line import as_flags
from tests.support.command_words import full_flags, full_plan
from tests.support.tiny_scene import run_cli

SHORT = as_flags(
    r="multiview",
    schedule_scale=0.004,
    max_gaussians=2000,
    v=3000,
    g=6,
    f=300,
    force=True,
    blocks=2,
    init="sparse",
)
_SILENT = Console.silent()


@pytest.fixture(scope="module")
def capture(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("capture") / "scan"
    make_demo_scene(root, n_views=16, width=96, height=72, notify=say_nothing)
    return root


@pytest.fixture(scope="module")
def output(capture, tmp_path_factory) -> Path:
    """The output of one whole run, one block after the other, all in this process."""
    folder = tmp_path_factory.mktemp("blocks") / "out"
    words = ("-s", capture, "--output_dir", folder, *SHORT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sugar_pipeline.blocks.blocks_run.run_task", perform)
        assert run_cli(train_full_pipeline.main, *words) == 0
    return folder


def refused(capsys, *words: object) -> str:
    """The error of a command line that is refused."""
    assert run_cli(train_full_pipeline.main, *words) == 2
    return capsys.readouterr().err


@pytest.mark.slow
def test_a_run_in_blocks_ends_in_one_mesh_and_all_gaussians(output):
    plan = read_plan(output / "blocks" / "scan" / "2_blocks")
    mesh = triangle_mesh.read_mesh_ply(output / "scan" / "mesh.ply")
    parts = [triangle_mesh.read_mesh_ply(block.mesh) for block in plan.blocks]
    assert 0 < mesh.n_faces <= sum(part.n_faces for part in parts)
    assert mesh.n_vertices < sum(part.n_vertices for part in parts)
    clouds = [read_gaussian_ply(block.splats) for block in plan.blocks]
    for block, cloud in zip(plan.blocks, clouds, strict=True):
        assert block.box.contains(cloud.means.double().numpy()).all()
        # Photographs of the block moved its vertices.
        assert len(read_json(note_path(block.mesh))["result"]["correlations"]) == len(REDUCTIONS)


@pytest.mark.slow
def test_refined_blocks_are_one_surface_with_a_page_and_a_tile_each(output):
    results = output / "scan"
    mesh = triangle_mesh.read_mesh_ply(results / "mesh.ply")
    pages = read_textured_mesh(results / "mesh.obj")
    assert pages.n_faces >= mesh.n_faces
    # Six Gaussians sit on each triangle of the blocks; some show what the mesh does not.
    n_beside = len(read_gaussian_ply(results / "splats.ply")) - 6 * pages.n_faces
    assert 0 <= n_beside < 4000
    tileset = json.loads((results / "tiles" / "tileset.json").read_text(encoding="utf-8"))
    names = [child["content"]["uri"] for child in tileset["root"]["children"]]
    assert sorted(names) == ["tile_00.glb", "tile_01.glb"]
    assert all((results / "tiles" / name).is_file() for name in names)
    # Mesh and Gaussians side by side.
    on_page = read_page_gaussians(results / "index.html", lambda line: None)
    assert len(on_page) == len(read_gaussian_ply(results / "splats.ply"))
    # What is closed in the middle stays closed where two blocks meet.
    plan = read_plan(output / "blocks" / "scan" / "2_blocks")
    open_share = triangle_mesh.topology(mesh).open_edge_share
    parts = [triangle_mesh.read_mesh_ply(block.mesh) for block in plan.blocks]
    assert open_share < min(triangle_mesh.topology(part).open_edge_share for part in parts)


@pytest.mark.slow
def test_held_out_views_are_held_out_of_all_blocks(capture, output):
    scene = load_scene(capture, size_rule=_AsItIs(), notify=say_nothing)
    plan = read_plan(output / "blocks" / "scan" / "2_blocks")
    for block in plan.blocks:
        names = {path.name.removesuffix(".jpg") for path in (block.scene / "images").iterdir()}
        assert names
        assert names <= {camera.name for camera in scene.train_cameras}


@pytest.mark.slow
def test_what_is_finished_is_not_repeated(output, capfd):
    folder = output / "blocks" / "scan" / "2_blocks"
    run_task(BlockTask("mesh", str(folder), 1))
    assert "exists already" in capfd.readouterr().out


# Like a queue it takes the script before it answers; who submitted it removes it then.
SBATCH = """#!/usr/bin/env bash
script=$(cat "$1")
bash -c "$script" > "{log}" 2>&1 &
echo "Submitted batch job $!"
"""
QUEUE = """
jobqueue:
  slurm: {cores: 1, memory: 4GiB, processes: 1, walltime: "00:30:00"}
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="SLURM runs on Linux")
def test_a_queue_is_asked_for_workers(capture, output, tmp_path):
    """With a stand-in for ``sbatch`` that starts a job at once; bits are those of one process."""
    pytest.importorskip("dask_jobqueue")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("sbatch", SBATCH), ("scancel", "#!/usr/bin/env bash\nkill $1\n")):
        (programs / name).write_text(text.format(log=tmp_path / "job.txt"), encoding="utf-8")
        (programs / name).chmod(0o755)
    (tmp_path / "jobqueue.yaml").write_text(QUEUE, encoding="utf-8")
    words = ["-s", capture, "--output_dir", tmp_path / "out", *SHORT, "--cluster", "slurm"]
    command = [sys.executable, "-m", "sugar_pipeline", "run", *map(str, words)]
    search = f"{programs}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": search, "DASK_CONFIG": str(tmp_path)}
    done = subprocess.run(
        [*command, "--stop_after", "mesh"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for name in ("mesh.ply", "splats.ply"):
        parts = ["blocks", "scan", "2_blocks", "block_01", name]
        assert tmp_path.joinpath("out", *parts).read_bytes() == output.joinpath(*parts).read_bytes()


def test_a_task_that_prints_nothing_is_reported(tmp_path):
    task = BlockTask("train", str(tmp_path), 1)
    assert task.state(210.0) == "train-block-01: 3:30 so far"
    log = tmp_path / "block_01" / "results" / "coarse" / "log.txt"
    log.parent.mkdir(parents=True)
    log.write_text("2026-01-01 10:00:00 first\n2026-01-01 10:00:09 coarse multiview 90/900\n")
    assert task.state(210.0) == "train-block-01: 3:30 so far; coarse multiview 90/900"
    stream = io.StringIO()
    console = Console(stream=stream, terminal=False, pace=Pace(silent_seconds=0.01))
    with console.reporting(task.state):
        time.sleep(0.2)
    assert stream.getvalue().count("train-block-01: 0:00 so far; coarse multiview 90/900") >= 2
    n_characters = len(stream.getvalue())
    time.sleep(0.05)
    assert len(stream.getvalue()) == n_characters


@pytest.mark.slow
def test_a_run_in_blocks_ends_with_the_sentences_of_any_run(capture, output, capfd):
    log = (output / "scan" / "log.txt").read_text(encoding="utf-8")
    words = ("-s", capture, "--output_dir", output, *SHORT)
    assert run_cli(train_full_pipeline.main, *words) == 0
    said = capfd.readouterr().out
    for sentence in ("took ", "the result is ", f"results in {output / 'scan'}: mesh.ply", "view"):
        assert sentence in said
        assert sentence in log
    # There was nothing to do.
    assert "task 1" not in said
    assert "task 1" in log


@pytest.mark.slow
def test_a_task_that_fails_says_where_its_reason_stands(output, tmp_path):
    folder = tmp_path / "2_blocks"
    shutil.copytree(output / "blocks" / "scan" / "2_blocks", folder)
    shutil.rmtree(folder / "block_01" / "depths")
    with pytest.raises(TaskFailed, match="mesh-block-00 ended with exit code 2"):
        run_task(BlockTask("mesh", str(folder), 0))


@pytest.mark.slow
def test_more_blocks_than_photographs(capture, tmp_path, capsys):
    words = ("-s", capture, "--output_dir", tmp_path / "out", *SHORT, "--blocks", 9)
    error = refused(capsys, *words)
    assert "has 16 photographs to train on" in error
    assert "at most 5 blocks" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--depths", "depths"), "--depths: not with --blocks"),
        (("--cluster", "moon"), "no such kind; use local"),
        (("--cluster", "local:none"), "none is no number of workers"),
        (("--masks", "alpha"), "masks of an object do not go with blocks"),
        (("--stop_after", "coarse"), "--stop_after coarse: not with --blocks"),
    ],
)
def test_flags_that_cannot_act_are_refused_before_anything_is_done(
    capture, tmp_path, capsys, flags, problem
):
    words = ("-s", capture, "--output_dir", tmp_path / "out", *SHORT, *flags)
    assert problem in refused(capsys, *words)
    assert not (tmp_path / "out").exists()


def add_maps(capture: Path, root: Path, folder: str, color: int | tuple[int, int, int]) -> Path:
    """A copy of a capture with a map of one colour for each photograph in a folder of it."""
    shutil.copytree(capture, root)
    (root / folder).mkdir()
    for path in (root / "images").iterdir():
        with Image.open(path) as photograph:
            size = photograph.size
        mode = "L" if isinstance(color, int) else "RGB"
        Image.new(mode, size, color).save(root / folder / f"{path.name}.png")
    return root


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "color", "flags", "problem"),
    [
        ("masks", 255, (), "masks of an object do not go with blocks"),
        ("mask", 255, (), "masks of an object do not go with blocks"),
        ("normals", (128, 128, 0), ("--masks", "none"), "pass --normals none"),
        ("none", 255, ("--masks", "auto", "--mask_mode", "ignore"), "masks of an object do not go"),
    ],
)
def test_what_lies_in_the_capture_is_refused_like_its_flag(
    capture, tmp_path, capsys, folder, color, flags, problem
):
    root = add_maps(capture, tmp_path / "scan", folder, color)
    words = ("-s", root, "--output_dir", tmp_path / "out", *SHORT, *flags)
    assert problem in refused(capsys, *words)
    assert not (tmp_path / "out").exists()


def test_masks_of_an_object_are_refused_before_cameras_are_found(capture, tmp_path, capsys):
    root = add_maps(capture, tmp_path / "scan", "masks", 255)
    shutil.rmtree(root / "sparse")
    before = sorted(root.rglob("*"))
    words = ("-s", root, "--output_dir", tmp_path / "out", *SHORT)
    assert "masks of an object do not go with blocks" in refused(capsys, *words)
    assert sorted(root.rglob("*")) == before


def n_blocks_of(capture: Path, *words: object) -> object:
    """The automatic number of blocks; AUTO where the capture is whole."""
    plan = full_plan("-s", capture, "-r", "multiview", *words)
    return with_number(plan, _SILENT).flags["blocks"]


def test_an_object_whose_masks_lie_in_the_capture_is_one_block(capture, tmp_path, monkeypatch):
    monkeypatch.setattr(automatic, "PIXELS_PER_GAUSSIAN", 1)
    root = add_maps(capture, tmp_path / "scan", "masks", 255)
    budget = 0.4 * training_bytes(14 * 96 * 72, 96, 72, OptimizerConfig()) / 2**30
    assert n_blocks_of(root, "--vram_budget", budget) == AUTO
    assert n_blocks_of(root, "--vram_budget", budget, "--mask_mode", "ignore") == 3
    assert n_blocks_of(root, "--vram_budget", budget, "--masks", "none") == 3


def test_where_the_whole_stands_is_no_matter_of_its_blocks(tmp_path):
    words = ["-s", "scan", "-r", "multiview", "--blocks", "2", "--known_distance", "a", "b", "2"]
    flags = full_flags(*words)
    assert "known_distance" in flags.given
    block = Block(0, tmp_path, BlockBox((0, 0, 0), (1, 1, 1)), 8)
    assert "known_distance" not in block_flags(flags, block, 16)


@pytest.mark.slow
def test_results_of_blocks_are_metres_where_a_distance_is_known(capture, output):
    scene = load_scene(capture, size_rule=_AsItIs(), eval_split=False, notify=say_nothing)
    first = scene.train_cameras[0]
    second = scene.train_cameras[5]
    metres = 2.5 * math.dist(first.center, second.center)
    plan = read_plan(output / "blocks" / "scan" / "2_blocks")
    flags = full_flags("-s", capture, *SHORT)
    stages = [stages_of(flags, block) for block in plan.blocks]
    options = PlacementOptions(known_distance=(first.name, second.name, str(metres)))
    parts = JoinedParts.of(plan, stages, scene, options)
    assert parts.placement.is_metric
    assert parts.placement.scale == pytest.approx(2.5, rel=1e-5)
    assert parts.placement.up == "+y"


def test_a_scheduler_that_does_not_answer(monkeypatch):
    pytest.importorskip("distributed")
    from sugar_pipeline.blocks import cluster

    monkeypatch.setattr(cluster, "CONNECTING", 0.5)
    task = BlockTask("train", "/nowhere", 0)
    with pytest.raises(UserError, match="the scheduler cannot be reached"):
        cluster.run_on_cluster([task], "tcp://127.0.0.1:9", _SILENT)


def test_workers_that_cannot_do_the_work(tmp_path):
    pytest.importorskip("distributed")
    from sugar_pipeline.blocks import cluster

    with pytest.raises(UserError, match="no worker offers the resource GPU"):
        cluster._check_workers(_Workers(facts=(cluster.__version__, True)), tmp_path, _SILENT)
    with pytest.raises(UserError, match="has version 0.0"):
        cluster._check_workers(_Workers(facts=("0.0", True)), tmp_path, _SILENT)
    with pytest.raises(UserError, match="does not see"):
        cluster._check_workers(_Workers(facts=(cluster.__version__, False)), tmp_path, _SILENT)
    # What Dask makes of errors on workers.
    lacking = Exception("ModuleNotFoundError(\"No module named 'sugar_pipeline'\")")
    with pytest.raises(UserError, match=r"tcp://worker does not have this program; install it"):
        cluster._check_workers(_Workers(facts=lacking), tmp_path, _SILENT)
    with pytest.raises(UserError, match=r"cannot run this program \(no torch\); install it"):
        cluster._check_workers(_Workers(facts=Exception("no torch")), tmp_path, _SILENT)


def test_the_number_of_blocks_follows_from_pixels_and_memory(capture, monkeypatch):
    assert n_blocks_of(capture) == AUTO
    monkeypatch.setattr(automatic, "PIXELS_PER_GAUSSIAN", 1)
    n_gaussians = expected_gaussians(load_scene(capture, size_rule=_AsItIs()).train_cameras, None)
    assert n_gaussians == 14 * 96 * 72
    assert expected_gaussians([], 5) == 0
    whole = training_bytes(n_gaussians, 96, 72, OptimizerConfig())
    budget = 0.4 * whole / 2**30
    assert n_blocks_of(capture, "--vram_budget", budget) == 3
    assert n_blocks_of(capture, "--vram_budget", budget, "--minutes", 5) == AUTO
    assert n_blocks_of(capture, "--vram_budget", budget, "--masks", "masks") == AUTO


def overview_config(capture, tmp_path, *flags: str):
    """Settings of the overview of a capture in four blocks."""
    words = ["-s", capture, "-r", "multiview", "--blocks", 4, *flags]
    return overview_options(full_flags(*words), tmp_path).config


def test_an_overview_visits_each_photograph_and_has_room_for_all_blocks(
    capture, tmp_path, monkeypatch
):
    config = overview_config(capture, tmp_path, "--max_gaussians", "5000")
    assert config.iterations == 3000
    assert config.densification.max_gaussians == 20_000
    short = overview_config(capture, tmp_path, "--schedule_scale", "0.002")
    assert short.iterations == 16  # photographs
    assert short.densification.max_gaussians == 200_000
    monkeypatch.setattr("sugar_pipeline.blocks.overview.count_photographs", lambda args: 5000)
    assert overview_config(capture, tmp_path, "--schedule_scale", "0.1").iterations == 5000


class _AsItIs:
    """Images at the size of their files."""

    def target(self, width: int, height: int) -> tuple[int, int]:
        return width, height


class _Workers:
    """A client of a cluster with one worker."""

    def __init__(self, facts: tuple[str, bool] | Exception) -> None:
        self._facts = facts

    def wait_for_workers(self, n: int, timeout: float) -> None:
        """They are there."""

    def run(
        self, function, plan_file: str, on_error: str
    ) -> dict[str, tuple[str, bool] | Exception]:
        assert on_error == "return"
        return {"tcp://worker": self._facts}

    def scheduler_info(self) -> dict[str, dict]:
        return {"workers": {"tcp://worker": {"resources": {}}}}
