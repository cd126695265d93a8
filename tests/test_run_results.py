# SPDX-License-Identifier: Apache-2.0
"""The end of a run: its folder of results, the report, one duration, and one log."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import train
from sugar_pipeline import commands
from sugar_pipeline.commands import run_train
from sugar_pipeline.pipeline import pipeline_run
from sugar_pipeline.pipeline.pipeline_flags import train_parser
from sugar_utils.errors import UserError
from sugar_utils.html import duration_text
from tests.support.tiny_scene import (
    SHORT_PIPELINE,
    make_tiny_checkpoint,
    make_tiny_scene,
    run_cli,
)

pytestmark = pytest.mark.usefixtures("small_pictures")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple:
    root = tmp_path_factory.mktemp("inputs")
    scene = make_tiny_scene(root / "scan")
    return ("-s", scene.root, "-c", make_tiny_checkpoint(root / "vanilla", scene), *SHORT_PIPELINE)


@pytest.fixture(scope="module")
def finished(inputs, tmp_path_factory) -> Path:
    """The output of a whole run."""
    output = tmp_path_factory.mktemp("finished") / "out"
    assert run_cli(train.main, *inputs, "--output_dir", output) == 0
    return output


@pytest.fixture
def output(finished, tmp_path) -> Path:
    """A copy of the output of a whole run, to be changed."""
    return Path(shutil.copytree(finished, tmp_path / "out"))


def repeated(inputs, output: Path, capsys, exit_code: int = 0) -> str:
    """Return the output of the same command given again."""
    capsys.readouterr()
    assert run_cli(train.main, *inputs, "--output_dir", output) == exit_code
    printed = capsys.readouterr()
    return printed.out + printed.err


def duration_in(text: str) -> str:
    return re.search(r"\d+ min \d\d s", text)[0]


@pytest.mark.slow
def test_console_reports_and_a_repetition_name_one_duration(inputs, output, capsys):
    folder = output / "scan"
    noted = json.loads((folder / "times.json").read_text())["parts"]
    for part in noted.values():
        part["seconds"] += 100.0
    (folder / "times.json").write_text(json.dumps({"parts": noted}))
    (folder / "report.html").unlink()
    console_texts = [repeated(inputs, output, capsys) for _ in range(2)]
    durations = {duration_in(text.split("took ")[1]) for text in console_texts}
    (report_in_run,) = (output / "refined" / "scan").glob("*/report.html")
    for page in (folder / "report.html", report_in_run):
        head = page.read_text(encoding="utf-8").split("<h2", 1)[0]
        durations.add(duration_in(head.split("</h1>", 1)[1]))
    assert len(durations) == 1
    seconds = sum(part["seconds"] for part in noted.values())
    assert durations == {f"{round(seconds) // 60} min {round(seconds) % 60:02} s"}


def test_both_reports_frame_the_page_of_the_results(finished):
    (report_in_run,) = (finished / "refined" / "scan").glob("*/report.html")
    for report in (finished / "scan" / "report.html", report_in_run):
        (address,) = re.findall(r'<iframe src="([^"]+)"', report.read_text(encoding="utf-8"))
        assert (report.parent / address).samefile(finished / "scan" / "index.html")


def test_the_log_begins_with_the_first_stage(finished):
    log = (finished / "scan" / "log.txt").read_text(encoding="utf-8")
    stages = re.findall(r"stage (\d) of 4", log)
    assert stages == ["1", "2", "3", "4"]
    assert "coarse SuGaR" in log.splitlines()[0] + log.splitlines()[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "warning"),
    [
        ("_measure", "the mesh is not measured: no"),
        ("Conclusion._report_content", "no report: no"),
    ],
)
def test_what_fails_at_the_end_costs_no_folder_of_results(
    inputs, output, capsys, monkeypatch, step, warning
):
    def refuse(*arguments):
        raise UserError("no")

    monkeypatch.setattr(f"sugar_pipeline.pipeline.conclusion.{step}", refuse)
    shutil.rmtree(output / "scan")
    assert warning in repeated(inputs, output, capsys)
    names = {path.name for path in (output / "scan").iterdir()}
    assert {"mesh.obj", "mesh.glb", "splats.ply", "transform.json", "index.html"} <= names


@pytest.mark.slow
def test_known_geometry_of_something_else_costs_no_folder_of_results(inputs, output, capsys):
    shutil.rmtree(output / "scan")
    scene = inputs[1]
    (scene / "gt_object.ply").write_bytes(b"no mesh")
    try:
        said = repeated(inputs, output, capsys)
    finally:
        (scene / "gt_object.ply").unlink()
    assert "warning: the mesh is not measured" in said
    assert (output / "scan" / "mesh.obj").is_file()


@pytest.mark.slow
def test_a_folder_of_results_that_fails_ends_in_an_error_and_leaves_the_rest(
    inputs, output, capsys
):
    (output / "scan" / "transform.json").unlink()
    (output / "scan" / "splats.ply").unlink()
    (output / "scan" / "splats.ply").mkdir()
    said = repeated(inputs, output, capsys, exit_code=2)
    assert "error: no folder of results" in said
    assert "splats.ply: is a folder; move it away" in said
    assert list((output / "refined").rglob("*.pt"))
    (output / "scan" / "splats.ply").rmdir()
    repeated(inputs, output, capsys)
    assert (output / "scan" / "splats.ply").is_file()


def test_the_result_of_the_function_names_the_files_in_one_line(inputs, output, capsys):
    flags = train_parser(None).parse_flags([str(word) for word in inputs])
    result = run_train(flags.replaced(output_dir=output))
    assert result.folder == output / "scan"
    names = {path.name for path in result.files}
    here = {path.name for path in (output / "scan").iterdir()}
    assert names == here - {"log.txt", "times.json", "finished.json", "settings.toml"}
    assert all(path.is_file() for path in result.files)
    text = repr(result)
    assert "\n" not in text
    assert str(result.folder) in text
    assert "mesh.glb" in text
    assert duration_text(result.seconds) in text


@pytest.fixture
def own(inputs, output, tmp_path, capsys) -> tuple[tuple, Path]:
    """Flags of a run with a scene of its own, which has ended, and its output."""
    root = shutil.copytree(inputs[1], tmp_path / "scan")
    words = (inputs[0], root, *inputs[2:])
    shutil.rmtree(output / "scan")
    repeated(words, output, capsys)
    return words, output


def count_runs(monkeypatch) -> list[object]:
    """A list that gets an entry whenever the stages are run."""
    runs: list[object] = []
    run_planned = commands.run_planned

    def counted(*arguments):
        runs.append(arguments)
        return run_planned(*arguments)

    monkeypatch.setattr(commands, "run_planned", counted)
    return runs


@pytest.mark.slow
def test_a_repetition_with_nothing_to_do_reads_no_scene_and_tells_the_same(
    own, capsys, monkeypatch
):
    words, output = own
    runs = count_runs(monkeypatch)
    said = repeated(words, output, capsys)
    assert runs == []
    assert said.count("finished already") == 4
    assert "expected minutes" not in said
    for sentence in ("took ", "the result is ", f"results in {output / 'scan'}", "to look at them"):
        assert sentence in said


@pytest.mark.slow
@pytest.mark.parametrize("change", ["photograph", "mask", "result", "flag", "notes"])
def test_a_repetition_looks_again_where_anything_has_changed(own, capsys, monkeypatch, change):
    words, output = own
    root = words[1]
    if change == "photograph":
        path = sorted((root / "images").iterdir())[0]
        path.write_bytes(path.read_bytes() + b"0")
    elif change == "mask":
        (root / "masks").mkdir()
        (root / "masks" / "notes.txt").touch()
    elif change == "result":
        (output / "scan" / "mesh.glb").unlink()
    elif change == "flag":
        words = (*words, "--lit", "True", "--overwrite", "True")
    else:
        (output / "scan" / "finished.json").write_text("{}")
    runs = count_runs(monkeypatch)
    run_cli(train.main, *words, "--output_dir", output)
    assert len(runs) == 1


@pytest.mark.slow
def test_images_behind_a_link_are_looked_at(own, tmp_path, capsys, monkeypatch):
    words, output = own
    images = words[1] / "images"
    images.rename(tmp_path / "elsewhere")
    try:
        images.symlink_to(tmp_path / "elsewhere")
    except OSError:
        pytest.skip("no links here")
    path = sorted((tmp_path / "elsewhere").iterdir())[0]
    path.write_bytes(path.read_bytes() + b"0")
    runs = count_runs(monkeypatch)
    run_cli(train.main, *words, "--output_dir", output)
    assert len(runs) == 1


@pytest.mark.slow
def test_the_report_comes_back_into_the_folder_of_results(inputs, output, capsys):
    (output / "scan" / "report.html").unlink()
    repeated(inputs, output, capsys)
    assert (output / "scan" / "report.html").is_file()


@pytest.mark.slow
def test_the_report_shows_the_gaussians_that_are_handed_out(inputs, output, capsys, monkeypatch):
    monkeypatch.setattr(pipeline_run, "loses", lambda refined, coarse: 3.0)
    shutil.rmtree(output / "scan")
    repeated(inputs, output, capsys)
    report = (output / "scan" / "report.html").read_text(encoding="utf-8")
    assert "Coarse Gaussians" in report
    assert "Refined Gaussians" not in report
