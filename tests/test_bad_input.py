# SPDX-License-Identifier: Apache-2.0
"""Errors of users: one line that says so, exit code 2, and nothing left half-written."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import train
import train_coarse_sdf
from gaussian_splatting import train as vanilla_train
from gaussian_splatting.scenes.reference_layout import point_cloud_path
from tests.support import brief_runs
from tests.support.tiny_scene import (
    TinyScene,
    assert_refused,
    finish,
    make_tiny_checkpoint,
    make_tiny_scene,
    refusal,
    run_cli,
    start,
    write_model,
)

Files = Callable[[Path, Path], None]


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> tuple[TinyScene, Path]:
    """A scene and a checkpoint that are in order."""
    root = tmp_path_factory.mktemp("tiny")
    scene = make_tiny_scene(root / "scene")
    return scene, make_tiny_checkpoint(root / "checkpoint", scene)


@pytest.fixture
def files(original, tmp_path) -> tuple[Path, Path]:
    """Copies of scene and checkpoint to spoil."""
    scene, checkpoint = original
    shutil.copytree(scene.root, tmp_path / "scene")
    shutil.copytree(checkpoint, tmp_path / "checkpoint")
    return tmp_path / "scene", tmp_path / "checkpoint"


def keep_as_is(scene: Path, checkpoint: Path) -> None:
    """For mistakes that are in the flags."""


def remove_scene(scene: Path, checkpoint: Path) -> None:
    shutil.rmtree(scene)


def remove_sparse(scene: Path, checkpoint: Path) -> None:
    shutil.rmtree(scene / "sparse")


def remove_sparse_and_cameras_json(scene: Path, checkpoint: Path) -> None:
    shutil.rmtree(scene / "sparse")
    (checkpoint / "cameras.json").unlink()


def truncate_model(scene: Path, checkpoint: Path) -> None:
    halve(scene / "sparse" / "0" / "images.bin")


def remove_two_images(scene: Path, checkpoint: Path) -> None:
    for name in ("view_03.png", "view_07.png"):
        (scene / "images" / name).unlink()


def remove_all_images(scene: Path, checkpoint: Path) -> None:
    shutil.rmtree(scene / "images")


def crop_images(scene: Path, checkpoint: Path) -> None:
    for number in range(4, 8):
        path = scene / "images" / f"view_{number:02d}.png"
        with Image.open(path) as image:
            cropped = image.crop((0, 0, 40, 48))
        cropped.save(path)


def damage_all_images(scene: Path, checkpoint: Path) -> None:
    for path in (scene / "images").iterdir():
        path.write_bytes(b"not an image")


def remove_points(scene: Path, checkpoint: Path) -> None:
    from tests.support.tiny_scene import tiny_cameras

    write_model(scene / "sparse" / "0", tiny_cameras(), np.zeros((0, 3)), np.zeros((0, 3)))


def truncate_ply(scene: Path, checkpoint: Path) -> None:
    halve(point_cloud_path(checkpoint, 7000))


def remove_ply(scene: Path, checkpoint: Path) -> None:
    shutil.rmtree(checkpoint / "point_cloud")


def damage_cameras_json(scene: Path, checkpoint: Path) -> None:
    halve(checkpoint / "cameras.json")


def file_instead_of_output(scene: Path, checkpoint: Path) -> None:
    (scene.parent / "out").write_text("in the way")


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@dataclass(frozen=True)
class Mistake:
    """Something done wrong.

    Attributes:
        name: What it is.
        texts: Parts of the message.
        spoil: Changes to the files.
        flags: Flags after the correct ones; the last of a flag counts.
        drop: A correct flag that is left out, with its value.
    """

    name: str
    texts: tuple[str, ...]
    spoil: Files = keep_as_is
    flags: tuple[object, ...] = ()
    drop: str | None = None


def flags_of(mistake: Mistake, correct: list[object]) -> list[object]:
    if mistake.drop is not None:
        at = correct.index(mistake.drop)
        correct = correct[:at] + correct[at + 2 :]
    return [*correct, *mistake.flags]


def vanilla_flags(scene: Path) -> list[object]:
    return ["-s", scene, "-m", scene.parent / "out", "--iterations", 2]


def coarse_flags(scene: Path, checkpoint: Path) -> list[object]:
    settings = {"r": "density", "schedule_scale": 0.0003, "sdf_samples": 50}
    output = scene.parent / "out"
    return list(brief_runs.coarse_flags(scene, checkpoint, output_dir=output, **settings))


def assert_nothing_written(root: Path) -> None:
    output = root / "out"
    if output.is_file():
        assert output.read_text() == "in the way"
        return
    assert not [path for path in output.rglob("*") if path.is_file()]
    assert not list(root.rglob("*.tmp-*"))


SHARED = [
    Mistake("missing scene", ("scene", "no such"), remove_scene),
    Mistake("cropped images", ("view_04.png is 64 x 48 px", "40 x 48 px"), crop_images),
    Mistake("missing images", ("2 of 10 images", "view_03.png, view_07.png"), remove_two_images),
    Mistake("damaged images", ("no training cameras are left",), damage_all_images),
    Mistake("file as output", ("cannot create the folder", "out"), file_instead_of_output),
    Mistake("unknown flag", ("--overwrit3", "did you mean --overwrite?"), flags=("--overwrit3", 1)),
    Mistake("stray word", ("unexpected argument 'fox'",), flags=("fox",)),
    Mistake("seed as text", ("--random_seed", "'seven'"), flags=("--random_seed", "seven")),
    Mistake("zero scale", ("--schedule_scale", "greater than 0"), flags=("--schedule_scale", 0)),
    Mistake("bad boolean", ("--overwrite", "'maybe'"), flags=("--overwrite", "maybe")),
    Mistake("none kept", ("--keep_checkpoints",), flags=("--keep_checkpoints", 0)),
    Mistake("missing checkpoint to resume", ("nowhere.pt",), flags=("--resume", "nowhere.pt")),
    Mistake("list of words", ("--test_iterations", "'a'"), flags=("--test_iterations", "a")),
]

VANILLA = [
    Mistake("missing model", ("sparse",), remove_sparse),
    Mistake("truncated model", ("images.bin",), truncate_model),
    Mistake("no images", ("images: no such image folder",), remove_all_images),
    Mistake("no points", ("no 3D points", "--init_ply"), remove_points),
    Mistake("no source path", ("-s/--source_path",), drop="-s"),
    Mistake("no model path", ("-m/--model_path",), drop="-m"),
    Mistake("zero iterations", ("--iterations", "at least 1"), flags=("--iterations", 0)),
    Mistake("degree 4", ("--sh_degree", "4"), flags=("--sh_degree", 4)),
    Mistake("weight above 1", ("--lambda_dssim", "'2'", "0 and 1"), flags=("--lambda_dssim", 2)),
    Mistake("negative size", ("--resolution", "-3"), flags=("--resolution", -3)),
    Mistake("missing start", ("start.ply", "no such file"), flags=("--init_ply", "start.ply")),
    Mistake("folder of images", ("images_4: no such",), flags=("--images", "images_4")),
]

COARSE = [
    Mistake("no cameras", ("sparse",), remove_sparse_and_cameras_json),
    Mistake("truncated PLY", ("point_cloud.ply", "truncated"), truncate_ply),
    Mistake("no images", ("10 of 10 images are missing",), remove_all_images),
    Mistake("no PLY", ("point_cloud/iteration_N",), remove_ply),
    Mistake("damaged cameras.json", ("cameras.json, line", "not valid JSON"), damage_cameras_json),
    Mistake("wrong iteration", ("no iteration 30000, only 7000", "-i 7000"), flags=("-i", 30_000)),
    Mistake("missing checkpoint", ("nowhere", "--checkpoint_path"), flags=("-c", "nowhere")),
    Mistake("no scene", ("-s/--scene_path is missing",), drop="-s"),
    Mistake("no checkpoint", ("-c/--checkpoint_path is missing",), drop="-c"),
    Mistake("no regularization", ("-r/--regularization_type is missing",), drop="-r"),
    Mistake("unknown regularization", ("-r", "'dn'", "dn_consistency"), flags=("-r", "dn")),
    Mistake("no such stage", ("--stop_after", "'paint'"), flags=("--stop_after", "paint")),
    Mistake("16 bits", ("--optimizer_state",), flags=("--optimizer_state", "fp16")),
    Mistake("no strips", ("--accumulation_steps", "at least 1"), flags=("--accumulation_steps", 0)),
    Mistake("half a box", ("--bboxmin", "--bboxmax"), flags=("--bboxmin", "(-1,-1,-1)")),
    Mistake("box of two", ("--bboxmin", "three numbers"), flags=("--bboxmin", "(1,2)")),
    Mistake("tiny squares", ("--square_size 2",), flags=("--square_size", 2)),
    Mistake("unknown time", ("--refinement_time fast",), flags=("--refinement_time", "fast")),
    Mistake("two per triangle", ("--gaussians_per_triangle",), flags=("-g", 2)),
    Mistake("no size", ("--resolution_factor",), flags=("--resolution_factor", 0)),
    Mistake("no samples", ("--sdf_samples",), flags=("--sdf_samples", 0)),
]


def ids(mistakes: list[Mistake]) -> list[str]:
    return [mistake.name for mistake in mistakes]


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [*SHARED, *VANILLA], ids=ids([*SHARED, *VANILLA]))
def test_vanilla_trainer_says_what_is_wrong(mistake, files, capsys):
    scene, checkpoint = files
    mistake.spoil(scene, checkpoint)
    code = run_cli(vanilla_train.main, *flags_of(mistake, vanilla_flags(scene)))
    assert_refused(code, capsys.readouterr().err, *mistake.texts)
    assert_nothing_written(scene.parent)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [*SHARED, *COARSE], ids=ids([*SHARED, *COARSE]))
def test_sugar_says_what_is_wrong(mistake, files, capsys):
    scene, checkpoint = files
    mistake.spoil(scene, checkpoint)
    code = run_cli(train.main, *flags_of(mistake, coarse_flags(scene, checkpoint)))
    assert_refused(code, capsys.readouterr().err, *mistake.texts)
    assert_nothing_written(scene.parent)


def test_script_of_one_stage_says_what_is_missing(capsys):
    assert "-s/--scene_path is missing" in refusal(capsys, train_coarse_sdf.main)


def test_coarse_stage_does_without_the_model_where_cameras_json_is_there(files):
    scene, checkpoint = files
    remove_sparse(scene, checkpoint)
    assert run_cli(train.main, *coarse_flags(scene, checkpoint)) == 0


PROCESSES = [
    ("train.py", "truncated PLY", COARSE),
    ("gaussian_splatting/train.py", "no points", VANILLA),
]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "name", "mistakes"), PROCESSES)
def test_processes_print_one_line_without_a_traceback(files, tmp_path, script, name, mistakes):
    mistake = next(mistake for mistake in mistakes if mistake.name == name)
    scene, checkpoint = files
    mistake.spoil(scene, checkpoint)
    correct = coarse_flags(scene, checkpoint) if script == "train.py" else vanilla_flags(scene)
    code, out, err = finish(start(script, *flags_of(mistake, correct), cwd=tmp_path))
    assert_refused(code, err, *mistake.texts)
    assert "Traceback" not in out
    assert_nothing_written(tmp_path)
