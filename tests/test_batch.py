# SPDX-License-Identifier: Apache-2.0
"""Settings in a file, and several scenes one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

import train_full_pipeline
from gaussian_splatting.engine.loop import Interrupted
from gaussian_splatting.engine.reporting.health import FailedResult
from sugar_pipeline import commands
from sugar_pipeline.pipeline.pipeline_flags import full_parser
from sugar_pipeline.pipeline.pipeline_result import PipelineResult
from sugar_utils.errors import UserError
from tests.support.command_words import full_flags
from tests.support.tiny_scene import refusal, run_cli

FILE = """\
# A scan.
scene_path = "{scene}"
regularization_type = "sdf"
low_poly = true
bboxmin = [-1, -1, -1]
"bboxmax" = "(1,1,1)"
checkpoint_milestones = [100, 200]
known_distance = ["a.jpg", "b.jpg", 2]
"""


@pytest.fixture
def scenes(tmp_path) -> Path:
    """A folder of three scenes of one photograph each, and what is no scene."""
    for name in ("cup", "fox", "jar"):
        (tmp_path / "scans" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "scans" / name / "a.png")
    (tmp_path / "scans" / "notes").mkdir()
    return tmp_path / "scans"


@pytest.fixture
def started(monkeypatch) -> list[Path]:
    """The scenes that were begun; fox fails."""
    seen: list[Path] = []

    def run_scene(flags, console) -> PipelineResult:
        scene = flags["scene_path"]
        seen.append(scene)
        if scene.name == "fox":
            raise FailedResult("refinement: worse than grey")
        if scene.name == "missing":
            raise RuntimeError("a defect")
        return PipelineResult(report=scene / "report.html")

    monkeypatch.setattr(commands, "run_scene", run_scene)
    return seen


def parsed(tmp_path: Path, text: str, *words: object):
    file = tmp_path / "scan.toml"
    file.write_text(text)
    return full_flags("--config", file, *words)


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    flags = parsed(tmp_path, FILE.format(scene="cup"), "-r", "density", "-s", "fox")
    assert (flags["scene_path"], flags["regularization_type"]) == (Path("fox"), "density")
    assert flags["all_scene_path"] == [Path("fox")]
    assert flags["low_poly"]
    assert (flags["bboxmin"], flags["bboxmax"]) == ((-1, -1, -1), (1, 1, 1))
    assert flags["checkpoint_milestones"] == [100, 200]
    assert flags["known_distance"] == ["a.jpg", "b.jpg", "2"]
    assert flags["vanilla_iterations"] == 7_000
    several = parsed(tmp_path, 'scene_path = ["cup", "fox"]')["all_scene_path"]
    assert several == [Path("cup"), Path("fox")]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_file_may_begin_with_the_mark_of_an_encoding(tmp_path, encoding):
    file = tmp_path / "scan.toml"
    file.write_text("vanilla_iterations = 30\r\n", encoding=encoding)
    assert full_flags("--config", file)["vanilla_iterations"] == 30


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sdf_sampels = 3", "line 9: unknown setting sdf_sampels; did you mean sdf_samples?"),
        ("qqqq = 3", "line 9: unknown setting qqqq; --help_all lists all flags"),
        ("config = 'a'", "line 9: unknown setting config"),
        ("sdf_samples = 'x'", "line 9: sdf_samples: 'x' is not a whole number"),
        ("sdf_samples = [1, 2]", "line 9: sdf_samples: '1,2' is not a whole number"),
        ("sdf_samples = {a = 1}", "line 9: sdf_samples: neither a number"),
        ("vanilla_iterations = 0", "line 9: vanilla_iterations: '0' must be at least 1"),
        ("high_poly = 3", "line 9: high_poly: '3' is neither true"),
        ("preset = 'slow'", "line 9: preset: invalid choice: 'slow'"),
        ("[mesh]", "line 9: unknown setting mesh"),
        ("x = ", "Invalid value (at line 9, column 5); give a TOML file"),
        ('output_dir = "C:\\Users\\me"', '\\ begins an escape in "..."; write C:/Users/... or \''),
        ('output_dir = "C:\\temp\\new"', "output_dir is 'C:\\temp\\new'; \\ begins an escape"),
        ("output_dir = C:/me", "line 9, column 14); text stands in '...'"),
        ("low_poly = True", "true and false are written small"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line_with_its_place(line, message, tmp_path, capsys):
    file = tmp_path / "scan.toml"
    file.write_text(f"{FILE.format(scene='cup')}{line}\n")
    error = refusal(capsys, train_full_pipeline.main, "--config", file)
    assert message in error
    assert str(file) in error


def test_a_file_that_is_missing_or_no_text_is_one_line(tmp_path, capsys):
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    for file in (tmp_path / "none.toml", tmp_path, tmp_path / "bytes.toml"):
        error = refusal(capsys, train_full_pipeline.main, "--config", file)
        assert f"--config {file}: " in error


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="has no device files")
def test_a_device_is_no_file_of_settings(capsys):
    assert "/dev/zero" in refusal(capsys, train_full_pipeline.main, "--config", "/dev/zero")


def test_a_failed_scene_does_not_stop_the_others(scenes, started, capsys):
    missing = scenes / "missing"
    missing.mkdir()
    words = [word for name in ("cup", "fox", "missing", "jar") for word in ("-s", scenes / name)]
    assert run_cli(train_full_pipeline.main, *words) == FailedResult.exit_code
    assert started == [scenes / "cup", scenes / "fox", missing, scenes / "jar"]
    captured = capsys.readouterr()
    table = captured.out.split("scenes: exit code or ok, time, result\n")[1].splitlines()
    assert [line.split()[:2] for line in table] == [
        [str(scenes / "cup"), "ok"],
        [str(scenes / "fox"), "5"],
        [str(missing), "1"],
        [str(scenes / "jar"), "ok"],
    ]
    assert "worse than grey" in table[1]
    assert table[3].endswith("report.html")
    assert "a defect" in captured.err
    assert captured.err.endswith("error: 2 of 4 scenes failed, see the table\n")


def test_a_folder_of_scenes_is_each_of_them(scenes, started):
    (scenes / "fox" / "a.png").unlink()
    assert run_cli(train_full_pipeline.main, "-s", scenes) == 0
    assert started == [scenes / "cup", scenes / "jar"]
    started.clear()
    (scenes / "jar" / "a.png").unlink()
    assert run_cli(train_full_pipeline.main, "-s", scenes) == 0
    assert started == [scenes / "cup"]


def test_scenes_that_cannot_be_run_together_are_one_line(scenes, started, tmp_path, capsys):
    (tmp_path / "cup").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "cup" / "a.png")
    cases = {
        ("-s", scenes, "-s", tmp_path / "cup"): "two scenes have the same name",
        ("-s", scenes, "--gs_output_dir", "x"): "no --gs_output_dir; run them one by one",
    }
    for words, message in cases.items():
        error = refusal(capsys, train_full_pipeline.main, *words)
        assert message in error
    assert not started


def test_interrupting_a_scene_ends_all(scenes, monkeypatch):
    def run_scene(flags, console):
        raise Interrupted("stopped", "SIGINT")

    monkeypatch.setattr(commands, "run_scene", run_scene)
    assert run_cli(train_full_pipeline.main, "-s", scenes) == 130


def test_values_of_a_function_are_checked_as_those_of_flags():
    parser = full_parser(None)
    assert parser.with_values({"low_poly": True, "scene_path": Path("a")}).scene_path == Path("a")
    with pytest.raises(UserError, match="^unknown setting lowpoly; did you mean low_poly"):
        parser.with_values({"lowpoly": True})
