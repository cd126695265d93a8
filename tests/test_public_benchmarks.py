# SPDX-License-Identifier: Apache-2.0
"""The command of public benchmarks: layouts, runs, resuming, and the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from plyfile import PlyData

from benchmarks.public.__main__ import make_jobs, parser
from benchmarks.public.jobs import Job, Trained, read_result
from benchmarks.public.layouts import DTU_SCENES, SCENES, Capture, find_capture, read_dtu_cameras
from benchmarks.public.published import ALL_SCENES, PUBLISHED
from benchmarks.public.runner import run_job, run_jobs
from benchmarks.public.table import FIGURES, write_table
from gaussian_splatting.formats.ply import write_gaussian_ply
from gaussian_splatting.scenes.scene import VanillaSize, load_scene
from sugar_scene.triangle_mesh import write_mesh_ply
from sugar_utils.errors import UserError
from tests.support.mesh_scenes import sphere
from tests.support.public_data import (
    MILLIMETRES,
    make_dtu,
    make_mipnerf360,
    make_synthetic,
    make_tanks,
)
from tests.support.tiny_scene import REPOSITORY, tiny_cameras, tiny_cloud

MAKERS = {
    "dtu": lambda data: make_dtu(data, "2dgs"),
    "tanks": make_tanks,
    "mipnerf360": make_mipnerf360,
    "synthetic": make_synthetic,
}


def jobs_of(data: Path, out: Path, benchmark: str, scene: str, *words: str) -> list[Job]:
    flags = [benchmark, "--data", str(data), "--out", str(out), "--scenes", scene, *words]
    return make_jobs(parser().parse_args(flags))


def stub_training(job: Job, capture: Capture) -> Trained:
    """Write what the images show, as a training would: a sphere, or its Gaussians."""
    folder = Path(job.out)
    if job.benchmark in ("dtu", "tanks"):
        path = folder / "mesh.ply"
        write_mesh_ply(path, sphere(radius=1.0, rings=100))
    else:
        path = folder / "gaussians.ply"
        write_gaussian_ply(path, tiny_cloud())
    return Trained(path=str(path), seconds=90.0, peak_gib=1.5, size=1234)


def start_stub(job: Job, gpu: int | None) -> None:
    Path(job.out).mkdir(parents=True)
    run_job(job, stub_training)


@pytest.mark.parametrize("layout", ["idr", "2dgs"])
def test_dtu_is_read_in_both_layouts(tmp_path, layout):
    root = make_dtu(tmp_path, layout)
    files = sorted(root.rglob("*"))
    capture = find_capture("dtu", root, tmp_path / "work")
    scene = load_scene(capture.folder, size_rule=VanillaSize(), eval_split=False)
    for camera, expected in zip(scene.train_cameras, tiny_cameras(), strict=True):
        for name in ("fx", "fy", "cx", "cy", "width", "height"):
            assert getattr(camera, name) == pytest.approx(getattr(expected, name)), name
        np.testing.assert_allclose(camera.rotation, expected.rotation, atol=1e-9)
        np.testing.assert_allclose(camera.translation, expected.translation, atol=1e-9)
    np.testing.assert_array_equal(capture.rows_of(scene.train_cameras), range(10))
    centers = [MILLIMETRES.moved(camera.center[None])[0] for camera in tiny_cameras()]
    np.testing.assert_allclose(read_dtu_cameras(root).centers, centers)
    assert sorted(root.rglob("*")) == files, "nothing is written into the data"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["idr", "2dgs"])
def test_dtu_scores_the_true_sphere_with_nearly_nothing(tmp_path, layout):
    make_dtu(tmp_path / "data", layout)
    (job,) = jobs_of(tmp_path / "data", tmp_path / "out", "dtu", "24")
    start_stub(job, None)
    scores = read_result(job.result_path).scores
    # Facets are inside of the sphere, and points of scan and mesh are 0.2 to 0.7 mm apart.
    assert scores["accuracy"] < 0.4
    assert scores["completeness"] < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("images", ["images", "."])
def test_tanks_scores_the_true_sphere_with_nearly_one(tmp_path, images):
    root = make_tanks(tmp_path / "data")
    if images == ".":
        for path in sorted((root / "images").iterdir()):
            path.rename(root / path.name)
        (root / "images").rmdir()
    (job,) = jobs_of(tmp_path / "data", tmp_path / "out", "tanks", "Barn")
    start_stub(job, None)
    scores = read_result(job.result_path).scores
    assert scores["f_score"] > 0.99
    assert scores["f_score_uniform"] > 0.99


def test_views_are_those_of_the_table_of_3dgs(tmp_path):
    make_mipnerf360(tmp_path / "data")
    make_synthetic(tmp_path / "data")
    jobs = jobs_of(tmp_path / "data", tmp_path / "out", "mipnerf360", "bicycle")
    jobs += jobs_of(tmp_path / "data", tmp_path / "out", "synthetic", "lego")
    results = []
    for job in jobs:
        start_stub(job, None)
        results.append(read_result(job.result_path))
    # Small images are averages of pixels, renders are not; lego's are opaque within a circle.
    assert 15 < results[0].scores["psnr"] < 40
    assert 15 < results[1].scores["psnr"] < 40
    assert "7 held-out views of 17, not the test split" in results[1].notes


def test_without_a_test_split_every_8th_image_is_held_out_and_the_table_says_so(tmp_path):
    make_synthetic(tmp_path / "data", has_test=False)
    (job,) = jobs_of(tmp_path / "data", tmp_path / "out", "synthetic", "lego")
    start_stub(job, None)
    table = write_table(tmp_path / "out", "synthetic").read_text(encoding="utf-8")
    assert "2 held-out views of 10, not the test split" in table


def test_a_finished_scene_is_not_run_again_and_other_flags_need_another_row(tmp_path):
    make_synthetic(tmp_path / "data")
    jobs = jobs_of(tmp_path / "data", tmp_path / "out", "synthetic", "lego")
    assert run_jobs(jobs, 1, start_stub) == []
    written = jobs[0].result_path.stat().st_mtime_ns
    assert run_jobs(jobs, 1, start_stub) == []
    assert jobs[0].result_path.stat().st_mtime_ns == written
    words = ("--flags", "--preset", "fast")
    others = jobs_of(tmp_path / "data", tmp_path / "out", "synthetic", "lego", *words)
    with pytest.raises(UserError, match="choose another --row"):
        run_jobs(others, 1, start_stub)
    named = jobs_of(tmp_path / "data", tmp_path / "out", "synthetic", "lego", "--row", "f", *words)
    assert named[0].flags == ("--preset", "fast")
    assert run_jobs(named, 1, start_stub) == []
    table = write_table(tmp_path / "out", "synthetic").read_text(encoding="utf-8")
    assert "| this program |" in table
    assert "| this program, f |" in table


def test_a_scene_that_fails_stops_no_other_one(tmp_path):
    for number in (24, 37):
        (tmp_path / f"scan{number}").mkdir()

    def start(job: Job, gpu: int | None) -> None:
        if job.scene == "scan24":
            raise UserError("scan24 ended with 5")
        done.append(job.scene)

    done: list[str] = []
    arguments = ["dtu", "--data", str(tmp_path), "--out", str(tmp_path), "--scenes", "24", "37"]
    jobs = make_jobs(parser().parse_args(arguments))
    assert run_jobs(jobs, 1, start) == ["scan24 ended with 5"]
    assert done == ["scan37"]
    table = write_table(tmp_path, "dtu").read_text(encoding="utf-8")
    assert "| 2DGS | – | 0.800 |" in table, "published rows alone where nothing was measured"


@pytest.mark.slow
def test_a_process_that_fails_is_named_with_its_last_line(tmp_path):
    make_dtu(tmp_path / "data", "2dgs")
    (tmp_path / "data" / "SampleSet").rename(tmp_path / "data" / "other")
    jobs = jobs_of(tmp_path / "data", tmp_path / "out", "dtu", "24")
    (line,) = run_jobs(jobs, 1)
    assert line.startswith("scan24 ended with 2 (error: ")
    assert "no folder ObsMask of DTU's SampleSet" in line


def test_several_workers_run_scenes_at_the_same_time(tmp_path):
    for number in (24, 37, 40):
        (tmp_path / f"scan{number}").mkdir()
    arguments = ["dtu", "--data", str(tmp_path), "--out", str(tmp_path)]
    jobs = make_jobs(parser().parse_args([*arguments, "--scenes", "24", "37", "40"]))

    def start(job: Job, gpu: int | None) -> None:
        if job.scene == "scan40":
            raise UserError("scan40 ended with 5")
        Path(job.out).mkdir(parents=True)

    assert run_jobs(jobs, 2, start) == ["scan40 ended with 5"]
    assert [Path(job.out).is_dir() for job in jobs] == [True, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", SCENES)
def test_the_table_has_our_rows_published_rows_and_costs(tmp_path, benchmark):
    MAKERS[benchmark](tmp_path / "data")
    scene = {"dtu": "24", "tanks": "Barn", "mipnerf360": "bicycle", "synthetic": "lego"}[benchmark]
    jobs = jobs_of(tmp_path / "data", tmp_path / "out", benchmark, scene)
    assert run_jobs(jobs, 1, start_stub) == []
    table = write_table(tmp_path / "out", benchmark).read_text(encoding="utf-8")
    content = json.loads((tmp_path / "out" / "table.json").read_text(encoding="utf-8"))
    (run,) = content["runs"]["this program"]
    for figure, title in FIGURES[benchmark].items():
        assert f"## {title}" in table
        rows = content["figures"][figure]
        assert rows[0]["values"].get(run["job"]["scene"]) == run["scores"].get(figure)
        published = PUBLISHED.get((benchmark, figure), ())
        assert [row["method"] for row in rows[1:]] == [row.method for row in published]
        assert all(row.source in table for row in published)
    assert "| 1.5 |" in table, "minutes of training"
    assert "| 1,234 |" in table, "size"


def test_printed_means_are_those_of_the_scenes():
    """A typing error in a row would show in its mean; SuGaR's and 3DGS's of DTU are cut off."""
    for rows in PUBLISHED.values():
        for row in rows:
            numbers = [value for scene, value in row.values.items() if scene != ALL_SCENES]
            if numbers and ALL_SCENES in row.values:
                assert np.mean(numbers) == pytest.approx(row.values[ALL_SCENES], abs=0.0101)


def test_the_page_names_the_source_of_every_published_row():
    page = (REPOSITORY / "DOCS" / "PUBLIC_BENCHMARKS.md").read_text(encoding="utf-8")
    for rows in PUBLISHED.values():
        for row in rows:
            assert f"| {row.method} |" in page
            assert row.source in page


def test_what_is_missing_is_said_before_anything_is_trained(tmp_path):
    make_dtu(tmp_path / "dtu", "2dgs")
    (tmp_path / "dtu" / "SampleSet" / "MVS Data" / "ObsMask" / "Plane24.mat").unlink()
    (job,) = jobs_of(tmp_path / "dtu", tmp_path / "out", "dtu", "24")

    def training(job: Job, capture: Capture) -> Trained:
        raise AssertionError("trained")

    with pytest.raises(UserError, match=r"Plane24\.mat: missing; unpack SampleSet\.zip"):
        run_job(job, training)
    make_tanks(tmp_path / "tanks")
    (tmp_path / "tanks" / "TrainingSet" / "Barn" / "Barn.json").unlink()
    (job,) = jobs_of(tmp_path / "tanks", tmp_path / "out", "tanks", "Barn")
    with pytest.raises(UserError, match=r"Barn\.json: missing"):
        run_job(job, training)


def test_cameras_that_do_not_belong_to_the_model_are_refused(tmp_path):
    root = make_dtu(tmp_path / "data", "2dgs")
    with np.load(root / "cameras.npz") as content:
        arrays = dict(content)
    arrays["world_mat_3"], arrays["world_mat_7"] = arrays["world_mat_7"], arrays["world_mat_3"]
    np.savez(root / "cameras.npz", **arrays)
    (job,) = jobs_of(tmp_path / "data", tmp_path / "out", "dtu", "24")
    with pytest.raises(UserError, match=r"cameras\.npz and the COLMAP model do not belong"):
        start_stub(job, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("dtu", "--scenes", "23"), f"--scenes scan23: choose from {DTU_SCENES[0]}"),
        (("dtu", "--scenes", "24"), "no scene scan24; --data is the folder that has it"),
        (("synthetic", "--minutes", "5"), "pass --flags --schedule_scale"),
    ],
)
def test_flags_that_cannot_be_honoured_are_refused(tmp_path, words, message):
    with pytest.raises(UserError, match=message):
        make_jobs(parser().parse_args([*words, "--data", str(tmp_path)]))


@pytest.mark.slow
def test_the_command_trains_scores_and_writes_the_table(tmp_path):
    """As a person types it, for seconds: NeRF-synthetic, 30 iterations."""
    make_synthetic(tmp_path / "data")
    command = [sys.executable, "-m", "benchmarks.public", "synthetic", "--data", "data"]
    command += ["--scenes", "lego", "--out", "out", "--flags", "--iterations", "30"]
    ended = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    log = tmp_path / "out" / "this program" / "lego" / "log.txt"
    assert ended.returncode == 0, (ended.stderr, log.read_text(encoding="utf-8"))
    assert "| 3DGS |" in ended.stdout
    result = read_result(log.with_name("result.json"))
    assert result.trained.size > 0
    assert result.trained.seconds > 0
    ply = PlyData.read(result.trained.path)
    assert ply["vertex"].count == result.trained.size
    assert 5 < result.scores["psnr"] < 40
