# SPDX-License-Identifier: Apache-2.0
"""Photographs without cameras, or a video, are all that the full pipeline needs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image, ImageFilter

from sugar_capture.conversion.convert_run import unregistered_photographs
from sugar_pipeline.commands import run_full
from sugar_pipeline.pipeline.conclusion import print_result
from sugar_pipeline.pipeline.pipeline_result import PipelineResult
from sugar_pipeline.pipeline.plan import PipelinePlan
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from tests.support.command_words import full_flags, full_plan
from tests.support.photographed_room import WIDTH, write_photographs
from tests.support.tiny_scene import SHORT_PIPELINE


def planned(*words: object) -> PipelinePlan:
    return full_plan(*words, "-r", "density")


@pytest.fixture
def room(tmp_path) -> Path:
    write_photographs(tmp_path / "room" / "images", 3)
    return tmp_path / "room"


def test_cameras_are_found_where_there_are_none(room):
    plan = planned(
        "-s", room, "--matcher", "similar", "--frames", 7, "--masks", "none", "--cameras", "a.xml"
    )
    assert plan.convert.source_path == room
    assert plan.convert.sfm.cameras == "a.xml"
    assert plan.convert.sfm.matcher == "similar"
    assert plan.convert.sfm.frames == 7
    assert plan.convert.masks.masks == "none"
    assert len(plan.stages) == 6
    assert plan.vanilla.source_path == room


def test_a_video_gives_its_name_to_the_scene(tmp_path):
    (tmp_path / "walk.mov").write_bytes(b"")
    plan = planned("-s", tmp_path / "walk.mov")
    assert plan.convert.source_path == tmp_path / "walk.mov"
    assert plan.vanilla.source_path == tmp_path / "walk"
    assert plan.vanilla.model_path.name == "walk"


def test_cameras_that_are_there_are_taken(room):
    (room / "transforms.json").write_text("{}")
    assert planned("-s", room).convert is None
    assert planned("-s", room / "nothing").convert is None


def test_several_processes_are_asked_to_let_one_find_the_cameras(room, monkeypatch):
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match="let one process find them first"):
        planned("-s", room)


def test_a_scale_by_a_photograph_that_is_not_there_is_refused_before_the_cameras(room):
    words = ("-s", room, "--known_distance", "IMG 1.png", "IMG 9.png", 2, "-r", "density")
    flags = full_flags(*words)
    with pytest.raises(
        UserError, match="--known_distance IMG 9.png: neither a registered photograph"
    ):
        run_full(flags)
    assert sorted(path.name for path in room.iterdir()) == ["images"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--init_ply", "gone.ply"], "gone.ply: no such file"),
        (["--depths", "gone"], "--depths gone: no such folder"),
        (["--depths", "moge"], "--depths moge needs the program MoGe-2"),
        (["--normals", "gone"], "--normals gone: no such folder"),
        (["--images", "gone"], "--images gone: no such folder"),
        (["--cameras", "gone.xml"], "--cameras gone.xml: no such file"),
        (["--keep_views", "IMG 11.png"], "--keep_views IMG 11.png: .* for example IMG 1.png"),
        (["--gpu", "7", "--device", "cuda"], "--device cuda|GPU"),
    ],
)
@pytest.mark.parametrize("mode", [[], ["-r", "density"]])
def test_flags_of_later_stages_are_refused_before_the_cameras(room, words, message, mode):
    flags = full_flags("-s", room, *words, *mode)
    with pytest.raises(UserError, match=message):
        run_full(flags)
    assert sorted(path.name for path in room.iterdir()) == ["images"]


@pytest.mark.slow
def test_a_scale_by_a_photograph_that_got_no_place_is_refused_before_training(tmp_path):
    root, output = tmp_path / "room", tmp_path / "output"
    write_photographs(root / "images", 7)
    alone = root / "images" / "IMG 7.png"
    with Image.open(alone) as picture:
        blurred = picture.filter(ImageFilter.GaussianBlur(9))
    blurred.save(alone)
    words = [
        *("-s", root, "--output_dir", output, "--extraction_size", WIDTH, "--max_features", 1000),
        *("--known_distance", "IMG 1.png", "IMG 7.png", 2, "-r", "density"),
    ]
    with pytest.raises(UserError, match="IMG 7.png: neither a registered photograph"):
        run_full(full_flags(*words))
    assert (root / "sparse" / "0").is_dir()
    assert not output.exists()


@pytest.mark.slow
def test_from_photographs_to_gaussians_on_a_surface_in_one_command(
    tmp_path, capsys, small_pictures
):
    write_photographs(tmp_path / "room" / "images", 7)
    words = [
        *("-s", tmp_path / "room", "--output_dir", tmp_path / "output", "--stop_after", "coarse"),
        *("--extraction_size", WIDTH, "--max_features", 1000),
        *(*SHORT_PIPELINE, "--vanilla_iterations", 60_000, "--init", "sparse"),
    ]
    flags = full_flags(*words)
    result = run_full(flags)
    assert [record.name for record in result.records][:2] == ["camera positions", "vanilla 3DGS"]
    assert "stage 1 of 3: camera positions" in capsys.readouterr().out
    page = result.report.read_text(encoding="utf-8")
    assert "7 of 7" in page
    # The same command has nothing left to do.
    again = run_full(flags)
    assert [record.name for record in again.records][0] == "vanilla 3DGS"
    # With another photograph it has.
    room = tmp_path / "room"
    shutil.copy(room / "input" / "IMG 7.png", room / "input" / "IMG 8.png")
    assert planned("-s", room).convert is not None


def test_the_end_of_a_run_names_the_photographs_without_a_pose(tmp_path, capsys):
    folder = tmp_path / "distorted"
    folder.mkdir()
    outcome = {
        "line": "6 of 7",
        "registered": 6,
        "photographs": 7,
        "points": 100,
        "reprojection_error": 0.5,
        "left_out": {"IMG 7.png": "too few matches"},
    }
    (folder / "outcome.json").write_text(json.dumps(outcome), encoding="utf-8")
    unregistered = unregistered_photographs(tmp_path)
    print_result(PipelineResult(unregistered=unregistered), Console())
    line = "without a pose: 1 photographs: IMG 7.png (too few matches)"
    assert line in capsys.readouterr().out
    assert unregistered_photographs(tmp_path / "made by others") == {}
