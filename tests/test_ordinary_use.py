# SPDX-License-Identifier: Apache-2.0
"""Accidents of long runs: full disks, closed outputs, odd names, killed runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import train
from gaussian_splatting import train as vanilla_train
from tests.support.tiny_scene import REPOSITORY, assert_refused, make_tiny_scene, run_cli

FULL = Path("/dev/full")
posix_only = pytest.mark.skipif(sys.platform == "win32", reason="POSIX streams and file names")
DEAD = 1_048_577_000
"""A process number that no system gives."""


def vanilla_words(scene, output: Path, *more: object) -> list[str]:
    words = ("-s", scene.root, "-m", output, "--iterations", 2, *more)
    return [str(word) for word in words]


def run_process(scene, output: Path, **settings) -> subprocess.CompletedProcess:
    script = str(REPOSITORY / "gaussian_splatting" / "train.py")
    return subprocess.run(
        [sys.executable, script, *vanilla_words(scene, output)],
        stdout=settings.pop("stdout", subprocess.PIPE),
        stderr=settings.pop("stderr", subprocess.PIPE),
        text=True,
        timeout=200,
        **settings,
    )


def assert_complete(output: Path) -> None:
    assert (output / "point_cloud" / "iteration_2" / "point_cloud.ply").is_file()
    assert "finished" in (output / "checkpoints" / "log.txt").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_run_whose_output_is_full_goes_on_and_says_so_once(scene, tmp_path):
    with FULL.open("w") as full:
        done = run_process(scene, tmp_path, stdout=full)
    assert done.returncode == 0
    assert done.stderr == "warning: the output is not continued: No space left on device\n"
    assert_complete(tmp_path)


@pytest.mark.slow
@posix_only
def test_a_run_without_any_stream_goes_on(scene, tmp_path):
    done = run_process(scene, tmp_path, preexec_fn=lambda: [os.close(n) for n in (0, 1, 2)])
    assert done.returncode == 0
    assert_complete(tmp_path)


@posix_only
@pytest.mark.parametrize("flag", ["-s", "-m", "--images", "--init_ply"])
def test_names_that_are_too_long_are_one_line(scene, tmp_path, flag, capsys):
    words = vanilla_words(scene, tmp_path / "out", flag, tmp_path / ("x" * 300))
    code = run_cli(vanilla_train.main, *words)
    assert_refused(code, capsys.readouterr().err, "xxx")


@posix_only
@pytest.mark.parametrize("flag", ["-s", "-c", "--output_dir"])
def test_names_that_are_too_long_for_the_pipeline_are_one_line(scene, checkpoint, flag, capsys):
    words = ["-s", scene.root, "-c", checkpoint, "-r", "density", flag, "x" * 300]
    assert_refused(run_cli(train.main, *words), capsys.readouterr().err, "xxx")


@posix_only
def test_an_image_name_that_is_too_long_is_one_line(tmp_path, capsys):
    scene = make_tiny_scene(tmp_path / "scene", n_views=3)
    path = scene.root / "sparse" / "0" / "images.bin"
    path.write_bytes(path.read_bytes().replace(b"view_01.png\0", b"y" * 300 + b".png\0"))
    code = run_cli(vanilla_train.main, *vanilla_words(scene, tmp_path / "out"))
    assert_refused(code, capsys.readouterr().err, "yyy")


@posix_only
def test_a_scene_with_a_line_end_in_its_name_forges_no_line(scene, tmp_path, capsys):
    root = tmp_path / "fox\nwarning: forged\x1b[2J"
    shutil.copytree(scene.root, root)
    shutil.rmtree(root / "images")
    code = run_cli(vanilla_train.main, "-s", root, "-m", tmp_path / "out", "--iterations", 2)
    assert_refused(code, capsys.readouterr().err, r"fox\nwarning: forged\x1b[2J")


@posix_only
def test_a_pipe_as_photograph_is_one_line(tmp_path, capsys):
    scene = make_tiny_scene(tmp_path / "scene", n_views=3)
    path = scene.root / "images" / "view_01.png"
    path.unlink()
    os.mkfifo(path)
    code = run_cli(vanilla_train.main, *vanilla_words(scene, tmp_path / "out"))
    assert_refused(code, capsys.readouterr().err, "view_01.png is a pipe")


@pytest.mark.slow
def test_what_killed_runs_left_is_removed_by_the_next_run(scene, tmp_path):
    left = [
        tmp_path / f"cameras.json.tmp-{DEAD}.json",
        tmp_path / f"input.ply.tmp-{DEAD}.ply",
        tmp_path / "checkpoints" / f"1.pt.tmp-{DEAD}.pt",
        tmp_path / "point_cloud" / "iteration_1" / f"point_cloud.ply.tmp-{DEAD}.ply",
        tmp_path / "point_cloud" / "iteration_2" / f"point_cloud.ply.tmp-{DEAD}.ply",
    ]
    words = vanilla_words(scene, tmp_path)
    assert run_cli(vanilla_train.main, *words) == 0
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    (tmp_path / "checkpoints" / "2.pt").unlink()
    assert run_cli(vanilla_train.main, *words) == 0
    assert not [path for path in left if path.exists()]
