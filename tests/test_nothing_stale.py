# SPDX-License-Identifier: Apache-2.0
"""No result is taken for another one, and none goes before its successor is there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import extract_mesh
import train
import train_coarse_multiview
import train_refined
from gaussian_splatting import train as vanilla_train
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.run_identity import _camera_digest
from gaussian_splatting.formats.ply import read_gaussian_ply, write_gaussian_ply
from gaussian_splatting.scenes.reference_layout import point_cloud_path, write_cfg_args
from gaussian_splatting.vanilla.vanilla_stage import VanillaStage
from sugar_scene.triangle_mesh import write_mesh_ply
from sugar_trainers.coarse_stage import CoarseStage
from sugar_utils import files as file_writing
from tests.support import brief_runs
from tests.support.command_line import as_flags
from tests.support.mesh_scenes import (
    ITERATION,
    cameras_around,
    icosahedron,
    sphere_cloud,
    write_mesh_scene,
)
from tests.support.tiny_scene import (
    assert_refused,
    assert_same_bits,
    events,
    kill,
    make_tiny_checkpoint,
    make_tiny_scene,
    newest,
    run_cli,
    start,
    wait_for_checkpoint,
)
from tests.support.tracks import add_tracks

COARSE = Path("coarse/scene/sugarcoarse_3Dgs7000_densityestim02_sdfnorm02")
LAST = 4


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    """A scene and a vanilla checkpoint of it, side by side."""
    root = tmp_path_factory.mktemp("pristine")
    make_tiny_checkpoint(root / "vanilla", make_tiny_scene(root / "scene"))
    return root


@pytest.fixture
def inputs(pristine, tmp_path) -> Path:
    """A copy of them to change."""
    return Path(shutil.copytree(pristine, tmp_path / "inputs"))


def coarse_flags(inputs: Path, output: Path, *flags: object) -> tuple[object, ...]:
    """Iterations 2 to 4, each with a checkpoint."""
    return (
        *brief_runs.coarse_flags(
            inputs / "scene",
            inputs / "vanilla",
            r="density",
            output_dir=output,
            schedule_scale=0.0003,
            checkpoint_milestones=10_000,
        ),
        *flags,
    )


def coarse(inputs: Path, output: Path, *flags: object) -> int:
    return run_cli(train.main, *coarse_flags(inputs, output, *flags))


def vanilla(inputs: Path, output: Path, *flags: object) -> int:
    return run_cli(
        vanilla_train.main,
        *flags,
        s=inputs / "scene",
        m=output,
        iterations=4,
        checkpoint_interval=2,
    )


def unfinished(folder: Path) -> None:
    """Leave what a run that was killed after its first checkpoint leaves."""
    *_, last = sorted(folder.glob("*.pt"), key=lambda path: int(path.stem))
    last.unlink()
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    (folder / "run.json").write_text(json.dumps({**record, "status": "running"}))


def contents(root: Path) -> dict[str, bytes]:
    """All files but those that tell about a run instead of being its result."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and ".replacing" not in path.parts
    }


def recolour(path: Path) -> None:
    with Image.open(path) as image:
        pixels = np.array(image)
    pixels[0, 0] ^= 1
    Image.fromarray(pixels).save(path)


def test_a_vanilla_model_that_was_trained_again_makes_the_coarse_run_another_one(
    inputs, tmp_path, capsys
):
    assert coarse(inputs, tmp_path / "out") == 0
    ply = point_cloud_path(inputs / "vanilla", 7000)
    cloud = read_gaussian_ply(ply)
    cloud.means[3] += 0.01
    write_gaussian_ply(ply, cloud)
    before = contents(tmp_path / "out" / COARSE)
    code = coarse(inputs, tmp_path / "out")
    assert_refused(code, capsys.readouterr().err, "Gaussians: changed", "--overwrite True")
    assert contents(tmp_path / "out" / COARSE) == before


@pytest.mark.slow
def test_scene_and_checkpoint_may_move(inputs, tmp_path, capsys):
    assert coarse(inputs, tmp_path / "out") == 0
    shutil.copytree(tmp_path / "out", tmp_path / "straight")
    unfinished(tmp_path / "out" / COARSE)
    moved = inputs.rename(tmp_path / "moved")
    assert coarse(moved, tmp_path / "out") == 0
    assert "continuing after iteration 3" in capsys.readouterr().out
    assert_same_bits(*(tmp_path / out / COARSE / f"{LAST}.pt" for out in ("straight", "out")))
    assert coarse(moved, tmp_path / "out") == 0
    assert "finished already" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vanilla", "coarse"])
def test_a_photograph_that_changed_meanwhile_is_named(inputs, tmp_path, capsys, kind):
    train_it, folder = {"vanilla": (vanilla, "checkpoints"), "coarse": (coarse, COARSE)}[kind]
    assert train_it(inputs, tmp_path / "out") == 0
    unfinished(tmp_path / "out" / folder)
    recolour(inputs / "scene" / "images" / "view_03.png")
    before = contents(tmp_path / "out")
    code = train_it(inputs, tmp_path / "out")
    assert_refused(code, capsys.readouterr().err, "photographs: view_03.png changed")
    assert contents(tmp_path / "out") == before


def test_a_camera_that_moved_is_named(inputs, tmp_path, capsys):
    assert coarse(inputs, tmp_path / "out") == 0
    path = inputs / "vanilla" / "cameras.json"
    entries = json.loads(path.read_text(encoding="utf-8"))
    entries[2]["position"][0] += 0.1
    path.write_text(json.dumps(entries))
    code = coarse(inputs, tmp_path / "out")
    assert_refused(code, capsys.readouterr().err, "cameras: view_02.png changed")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["multiview", "refined", "mesh"])
def test_a_result_that_depends_on_point_tracks_is_not_taken_for_that_of_others(
    inputs, tmp_path, capsys, kind
):
    model = inputs / "scene" / "sparse" / "0"
    add_tracks(model, 5, ("view_01.png", "view_02.png"))
    common = ("-s", inputs / "scene", "-c", inputs / "vanilla", "-o", tmp_path / "out")
    write_mesh_ply(tmp_path / "sugarmesh_ball.ply", icosahedron())
    run, *flags = {
        "multiview": (train_coarse_multiview.main, "--schedule_scale", 0.0002),
        "refined": (
            train_refined.main,
            "-m",
            tmp_path / "sugarmesh_ball.ply",
            "-g",
            1,
            "-f",
            2,
            "--refine_surface_terms",
            True,
        ),
        "mesh": (
            extract_mesh.main,
            "--use_vanilla_3dgs",
            True,
            "-m",
            "unused",
            "-d",
            500,
            "--mesh_extractor",
            "tsdf",
            "--tsdf_depth",
            "plane",
            "--tsdf_voxel_size",
            0.2,
            "--background_mesh",
            False,
            "--meshing_backend",
            "pycolmap",
        ),
    }[kind]
    assert run_cli(run, *common, *flags) == 0
    assert run_cli(run, *common, *flags) == 0
    assert "already" in capsys.readouterr().out
    add_tracks(model, 5, ("view_03.png",))
    code = run_cli(run, *common, *flags)
    assert_refused(code, capsys.readouterr().err, "point tracks: changed", "--overwrite True")


@pytest.mark.slow
def test_a_mesh_of_another_coarse_model_is_not_taken_for_this_one(inputs, tmp_path, capsys):
    flags = as_flags(
        s=inputs / "scene",
        c=inputs / "vanilla",
        m="unused",
        l=0.3,
        d=500,
        use_vanilla_3dgs=True,
        o=tmp_path,
        surface_points=20_000,
        poisson_depth=5,
        meshing_backend="pycolmap",
    )
    assert run_cli(extract_mesh.main, *flags) == 0
    mesh = next(tmp_path.glob("*.ply"))
    before = mesh.read_bytes()
    ply = point_cloud_path(inputs / "vanilla", 7000)
    cloud = read_gaussian_ply(ply)
    cloud.means[:] *= 1.05
    write_gaussian_ply(ply, cloud)
    capsys.readouterr()
    code = run_cli(extract_mesh.main, *flags)
    assert_refused(code, capsys.readouterr().err, "Gaussians: changed", "--overwrite True")
    assert mesh.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vanilla", "coarse"])
def test_damaged_photographs_do_not_cost_the_run_that_was_to_be_replaced(
    inputs, tmp_path, capsys, kind
):
    train_it, _ = {"vanilla": (vanilla, 0), "coarse": (coarse, 0)}[kind]
    assert train_it(inputs, tmp_path / "out") == 0
    before = contents(tmp_path / "out")
    photographs = {path: path.read_bytes() for path in (inputs / "scene" / "images").iterdir()}
    for path, content in photographs.items():
        path.write_bytes(content[: len(content) // 2])
    code = train_it(inputs, tmp_path / "out", "--random_seed", 3, "--overwrite", True)
    assert_refused(code, capsys.readouterr().err, "no training cameras are left")
    assert contents(tmp_path / "out") == before
    for path, content in photographs.items():
        path.write_bytes(content)
    assert train_it(inputs, tmp_path / "out") == 0
    assert "finished already" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vanilla", "coarse"])
def test_a_run_that_dies_before_its_first_checkpoint_replaces_nothing(
    inputs, tmp_path, capsys, monkeypatch, kind
):
    train_it, stage = {"vanilla": (vanilla, VanillaStage), "coarse": (coarse, CoarseStage)}[kind]
    assert train_it(inputs, tmp_path / "out") == 0
    before = contents(tmp_path / "out")

    def die(*_):
        raise SystemExit(9)

    with monkeypatch.context() as patch:
        patch.setattr(stage, "apply", die)
        assert train_it(inputs, tmp_path / "out", "--random_seed", 3, "--overwrite", True) == 9
    assert contents(tmp_path / "out") == before
    assert train_it(inputs, tmp_path / "out") == 0
    assert "finished already" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vanilla", "coarse"])
def test_a_run_whose_folder_is_removed_meanwhile_stops_and_starts_anew(
    inputs, tmp_path, capsys, monkeypatch, kind
):
    train_it, stage = {"vanilla": (vanilla, VanillaStage), "coarse": (coarse, CoarseStage)}[kind]
    apply = stage.apply

    def removed(self, iteration):
        apply(self, iteration)
        if iteration == LAST:
            shutil.rmtree(tmp_path / "out")

    with monkeypatch.context() as patch:
        patch.setattr(stage, "apply", removed)
        code = train_it(inputs, tmp_path / "out")
    assert_refused(code, capsys.readouterr().err, "was removed while the run was going on")
    assert train_it(inputs, tmp_path / "out") == 0
    assert train_it(inputs, tmp_path / "straight") == 0
    found, expected = contents(tmp_path / "out"), contents(tmp_path / "straight")
    assert {n for n in found if "events" not in n} == {n for n in expected if "events" not in n}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vanilla", "coarse"])
def test_a_run_that_replaces_another_leaves_what_it_leaves_alone(inputs, tmp_path, kind):
    train_it, folder = {"vanilla": (vanilla, "checkpoints"), "coarse": (coarse, COARSE)}[kind]
    longer = ("--save_iterations", 2) if kind == "vanilla" else ("--checkpoint_interval", 3_333)
    assert train_it(inputs, tmp_path / "out", *longer) == 0
    changed = ("--random_seed", 3)
    assert train_it(inputs, tmp_path / "out", *changed, "--overwrite", True) == 0
    assert train_it(inputs, tmp_path / "alone", *changed) == 0
    found, alone = contents(tmp_path / "out"), contents(tmp_path / "alone")
    assert {n for n in found if "events" not in n} == {n for n in alone if "events" not in n}
    finals = [tmp_path / out / folder / f"{LAST}.pt" for out in ("out", "alone")]
    assert_same_bits(*finals)
    curves = [
        [event.step for event in events(tmp_path / out / folder).Scalars("Loss/loss")]
        for out in ("out", "alone")
    ]
    assert curves[0] == curves[1]
    assert not list((tmp_path / "out").rglob(".replacing"))
    log = (tmp_path / "out" / folder / "log.txt").read_text(encoding="utf-8")
    assert log.count("finished: ") == 1


@pytest.mark.slow
def test_a_half_removed_run_is_removed_by_the_next_start(inputs, tmp_path, capsys):
    assert coarse(inputs, tmp_path / "out", "--random_seed", 3) == 0
    folder = tmp_path / "out" / COARSE
    unfinished(folder)
    # Killed between its first checkpoint and the removal of a run that had gone further.
    (folder / "9.pt").write_bytes(b"of the run before")
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    (folder / "run.json").write_text(json.dumps({**record, "obsolete": ["9.pt", "../../x"]}))
    assert coarse(inputs, tmp_path / "out", "--random_seed", 3) == 0
    assert "continuing after iteration 3" in capsys.readouterr().out
    assert not (folder / "9.pt").exists()
    assert "obsolete" not in json.loads((folder / "run.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_a_second_process_in_a_folder_is_refused(inputs, tmp_path, capsys):
    output = tmp_path / "out"
    long = coarse_flags(inputs, output, "--schedule_scale", 0.5, "--checkpoint_interval", 20)
    first = start("train.py", *long)
    wait_for_checkpoint(first, output / COARSE, -1, limit=60, linger=0)
    assert first.poll() is None
    for flags in (("--random_seed", 3), ("--random_seed", 3, "--overwrite", True)):
        code = run_cli(train.main, *long, *flags)
        error = capsys.readouterr().err
        assert_refused(code, error, f"process {first.pid} on ", "is at work in it", "--output_dir")
    assert first.poll() is None
    kill(first)
    # The lock of a killed process blocks no other.
    again = start("train.py", *long)
    wait_for_checkpoint(again, output / COARSE, newest(output / COARSE), limit=60, linger=0)
    assert again.poll() is None
    kill(again)


@pytest.mark.slow
def test_a_box_does_not_keep_a_refinement_from_going_on(inputs, tmp_path, capsys):
    mesh = tmp_path / "sugarmesh_ball.ply"
    write_mesh_ply(mesh, icosahedron())
    flags = as_flags(
        s=inputs / "scene",
        c=inputs / "vanilla",
        m=mesh,
        g=1,
        f=4,
        checkpoint_interval=3,
        b="(-1,-1,-1)",
        B="(1,1,1)",
        o=tmp_path / "out",
    )
    assert run_cli(train_refined.main, *flags) == 0
    unfinished(next((tmp_path / "out").glob("sugarfine_*/run.json")).parent)
    assert run_cli(train_refined.main, *flags) == 0
    assert "continuing after iteration 3" in capsys.readouterr().out


@pytest.mark.parametrize("upper", ["(1,-1,1)", "(1,-2,1)"])
def test_a_box_without_volume_is_refused_before_anything_is_written(
    inputs, tmp_path, capsys, upper
):
    code = coarse(inputs, tmp_path / "out", "--bboxmin", "(-1,-1,-1)", "--bboxmax", upper)
    assert_refused(code, capsys.readouterr().err, "--bboxmin", "--bboxmax", "on every axis")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_checkpoint_under_another_number_is_not_continued(inputs, tmp_path, capsys):
    assert coarse(inputs, tmp_path / "out") == 0
    folder = tmp_path / "out" / COARSE
    unfinished(folder)
    shutil.copy(folder / "3.pt", folder / f"{LAST}.pt")
    assert coarse(inputs, tmp_path / "out") == 0
    out = capsys.readouterr().out
    assert f"{LAST}.pt: holds iteration 3, not that of its name" in out
    assert "continuing after iteration 3" in out
    shutil.copy(folder / "3.pt", tmp_path / "2.pt")
    code = coarse(inputs, tmp_path / "other", "--resume", tmp_path / "2.pt")
    assert_refused(code, capsys.readouterr().err, "2.pt: holds iteration 3")


@pytest.mark.slow
def test_held_out_views_that_the_checkpoint_has_seen_are_named_with_their_figures(
    inputs, tmp_path, capsys
):
    write_cfg_args(inputs / "vanilla", source_path=inputs / "scene", eval_split=False)
    assert coarse(inputs, tmp_path / "out", "--verbose") == 0
    out = capsys.readouterr().out
    seen = "trained on by the checkpoint, so figures on them are too good"
    assert f"note: the held-out views were {seen}" in out
    figures = [line for line in out.splitlines() if "held-out views" in line and "SSIM" in line]
    assert figures
    assert all(f"({seen})" in line for line in figures)
    report = (tmp_path / "out" / COARSE / "report.html").read_text(encoding="utf-8")
    assert f"Held-out views were {seen}." in report
    assert coarse(inputs, tmp_path / "out", "--eval", False, "--overwrite", True) == 0
    assert seen not in capsys.readouterr().out


@pytest.mark.parametrize("scale", [0.0, 1e-300, 1.0, 1e308])
def test_cameras_are_told_apart_at_any_scale(scale):
    def digest(offset: tuple[float, ...]) -> str:
        camera = Camera("a", 4, 3, 5.0, 5.0, 2.0, 1.5, np.eye(3), scale * np.array(offset))
        return _camera_digest(camera, "train")

    assert digest((1.0, 0.5, -0.3)) == digest((1.0, 0.5, -0.3 + 1e-13))
    assert (digest((1.0, 0.5, -0.3)) == digest((1.0, 0.5, -0.2999))) == (scale == 0.0)


def mesh_of(ball, output: Path, *flags: object) -> int:
    return run_cli(
        extract_mesh.main,
        *flags,
        s=ball.root,
        c=ball.checkpoint,
        i=ITERATION,
        m=ball.coarse,
        o=output,
        d=2_000,
        surface_points=20_000,
        poisson_depth=5,
        meshing_backend="pycolmap",
    )


@pytest.fixture(scope="module")
def ball(tmp_path_factory):
    return write_mesh_scene(tmp_path_factory.mktemp("ball"), sphere_cloud(), cameras_around())


@pytest.mark.slow
def test_a_mesh_does_not_depend_on_the_levels_beside_it(ball, tmp_path):
    assert mesh_of(ball, tmp_path / "alone", "-l", 0.3) == 0
    assert mesh_of(ball, tmp_path / "three") == 0
    (alone,) = (tmp_path / "alone").glob("*.ply")
    assert len(list((tmp_path / "three").glob("*.ply"))) == 3
    assert (tmp_path / "three" / alone.name).read_bytes() == alone.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suffix", "number", "new_one"), [(".json", 1, False), (".ply", 1, False), (".json", 2, True)]
)
def test_a_process_killed_while_it_replaces_a_mesh_leaves_the_old_or_the_new_one(
    ball, tmp_path, monkeypatch, capsys, suffix, number, new_one
):
    old, new = ("-l", 0.3), ("-l", 0.3, "--surface_points", 3_000)
    assert mesh_of(ball, tmp_path, *old) == 0
    (mesh,) = tmp_path.glob("*.ply")
    before, real, renamed = mesh.read_bytes(), file_writing._replace, []

    def die(source, target):
        # The note of the lock is renamed, too.
        if target.name.startswith("sugarmesh_"):
            renamed.append(target.suffix)
            if target.suffix == suffix and renamed.count(suffix) == number:
                raise SystemExit(9)
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(file_writing, "_replace", die)
        assert mesh_of(ball, tmp_path, *new, "--overwrite", True) == 9
    assert (mesh.read_bytes() != before) == new_one
    there, other = (new, old) if new_one else (old, new)
    capsys.readouterr()
    assert mesh_of(ball, tmp_path, *there) == 0
    assert "exists already" in capsys.readouterr().out
    code = mesh_of(ball, tmp_path, *other)
    assert_refused(code, capsys.readouterr().err, "surface_points", "--overwrite True")
