# SPDX-License-Identifier: Apache-2.0
"""Parts of the extension for Blender that need no Blender: files, axes, commands, progress."""

from __future__ import annotations

import io
import json
import re
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from blender.build import build
from blender.sugar_scan.plain import commands
from blender.sugar_scan.plain.axes import camera_to_file, file_to_blender
from blender.sugar_scan.plain.background_process import BackgroundProcess
from blender.sugar_scan.plain.edited_mesh import write_edited
from blender.sugar_scan.plain.ellipses import REACH, ellipses_of
from blender.sugar_scan.plain.errors import ScanError
from blender.sugar_scan.plain.gaussian_ply import read_gaussians
from blender.sugar_scan.plain.obj_file import read_obj
from blender.sugar_scan.plain.photographs import SENSOR_WIDTH, read_photographs
from blender.sugar_scan.plain.progress import Progress
from blender.sugar_scan.plain.result_folder import read_result_folder
from gaussian_splatting.core.spherical_harmonics import sh_to_rgb
from gaussian_splatting.formats.ply import read_gaussian_ply, write_gaussian_ply
from gaussian_splatting.scenes.scene import VanillaSize, load_scene
from gaussian_splatting.shared_flags import Preset
from sugar_extractors.export.export_options import ExportOptions, export_parser
from sugar_extractors.outputs.result_folder import FinalResults, write_result_folder
from sugar_extractors.outputs.result_photographs import write_photographs
from sugar_extractors.placing import PlacementOptions
from sugar_pipeline.pipeline.conclusion import print_result
from sugar_pipeline.pipeline.pipeline_result import PipelineResult
from sugar_scene.geometry import covariances
from sugar_scene.mesh_files.textured_mesh_io import read_textured_mesh, write_textured_mesh
from sugar_utils.console import Console, Pace
from sugar_utils.settings import from_args
from tests.support.command_words import full_flags
from tests.support.random_scenes import look_at
from tests.support.tiny_scene import REPOSITORY, make_tiny_scene, tiny_cloud
from tests.test_export_placement import four_colored_faces

EXTENSION = REPOSITORY / "blender" / "sugar_scan"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder of results."""
    root = tmp_path_factory.mktemp("results")
    tiny = make_tiny_scene(root / "capture")
    scene = load_scene(tiny.root, size_rule=VanillaSize(1), notify=lambda line: None)
    write_textured_mesh(root / "refined.obj", four_colored_faces())
    model = root / "model.pt"
    model.write_bytes(b"stands for a model")
    made = FinalResults(root / "refined.obj", model, tiny_cloud)
    write_result_folder(root / "scan", made, scene, PlacementOptions(scale_factor=2.0))
    return root / "scan"


def test_a_folder_of_results_is_read_with_all_its_files(folder):
    result = read_result_folder(folder)
    record = json.loads((folder / "transform.json").read_text())
    assert (result.name, result.up) == ("scan", "+y")
    assert result.mesh == (folder / "mesh.obj").resolve()
    assert result.splats == (folder / "splats.ply").resolve()
    assert result.model == (folder.parent / "model.pt").resolve()
    np.testing.assert_array_equal(result.matrix, record["matrix"])
    photographs = read_photographs(folder)
    assert len(photographs) == 10
    assert all(one.image is not None and one.image.is_file() for one in photographs)


@pytest.mark.parametrize("content", ["", "[]", '{"matrix": [1, 2]}', '{"up": "+y"}'])
def test_a_damaged_record_is_one_line(content, tmp_path):
    (tmp_path / "transform.json").write_text(content)
    with pytest.raises(ScanError, match="damaged") as caught:
        read_result_folder(tmp_path)
    assert "\n" not in str(caught.value)


def test_other_folders_and_damaged_files_are_one_line(tmp_path):
    with pytest.raises(ScanError, match=r"has no transform\.json"):
        read_result_folder(tmp_path)
    (tmp_path / "transform.json").write_text(json.dumps({"matrix": np.eye(4).tolist()}))
    with pytest.raises(ScanError, match=r"neither mesh\.obj nor splats\.ply"):
        read_result_folder(tmp_path)
    for name, read in (("a.ply", read_gaussians), ("a.obj", read_obj)):
        (tmp_path / name).write_bytes(b"ply\nf 1/2 nothing\nend_header\n")
        with pytest.raises(ScanError, match="damaged"):
            read(tmp_path / name)
    (tmp_path / "photographs.json").write_text('[{"img_name": "a"}]')
    with pytest.raises(ScanError, match="damaged"):
        read_photographs(tmp_path)


def test_a_mesh_is_read_as_the_program_reads_it(folder):
    ours = read_textured_mesh(folder / "mesh.obj")
    obj = read_obj(folder / "mesh.obj")
    np.testing.assert_array_equal(obj.vertices.astype(np.float32), ours.vertices.numpy())
    np.testing.assert_array_equal(obj.faces, ours.faces.numpy())
    np.testing.assert_allclose(obj.uvs, ours.uvs.numpy(), atol=1e-7)
    assert obj.pictures == (folder / "mesh.png",)


def test_faces_know_which_of_several_materials_they_have(tmp_path):
    (tmp_path / "a.mtl").write_text("newmtl one\nmap_Kd 1.png\nnewmtl two\nKd 1 1 1\n")
    corners = "v 0 0 0\nv 1 0 0\nv 0 1 0\nvt 0 0\n"
    faces = "usemtl two\nf 1/1 2/1 3/1\nusemtl one\nf 3/1 2/1 1/1\nf 1/1 3/1 2/1\n"
    (tmp_path / "a.obj").write_text(f"mtllib a.mtl\n{corners}{faces}")
    obj = read_obj(tmp_path / "a.obj")
    assert obj.pictures == (None, tmp_path / "1.png")
    assert obj.material_of_face.tolist() == [0, 1, 1]


def test_gaussians_are_read_as_the_program_reads_them(folder):
    ours = read_gaussian_ply(folder / "splats.ply")
    gaussians = read_gaussians(folder / "splats.ply")
    np.testing.assert_array_equal(gaussians.means, ours.means.numpy())
    np.testing.assert_allclose(gaussians.scales, ours.log_scales.exp().numpy(), rtol=1e-6)
    opacities = torch.sigmoid(ours.opacity_logits[:, 0])
    np.testing.assert_allclose(gaussians.opacities, opacities.numpy(), atol=1e-6)
    # Back from linear light to the values of screens.
    linear = gaussians.colors
    shown = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    expected = np.clip(sh_to_rgb(ours.sh_dc[:, 0].numpy()), 0, 1)
    np.testing.assert_allclose(shown, expected, atol=1e-5)


def test_ellipses_lie_across_the_two_longest_axes(tmp_path):
    cloud = replace(tiny_cloud(50), log_scales=torch.tensor([[-5.0, -2, -1]]).expand(50, 3).clone())
    write_gaussian_ply(tmp_path / "a.ply", cloud)
    ellipses = ellipses_of(read_gaussians(tmp_path / "a.ply"))
    corners = ellipses.vertices.reshape(-1, 4, 3)
    np.testing.assert_allclose(corners.mean(axis=1), cloud.means.numpy(), atol=1e-5)
    first = (corners[:, 1] - corners[:, 0]) / (2 * REACH)
    second = (corners[:, 3] - corners[:, 0]) / (2 * REACH)
    shape = np.einsum("ni,nj->nij", first, first) + np.einsum("ni,nj->nij", second, second)
    quats = torch.nn.functional.normalize(cloud.quats, dim=1)
    expected = covariances(quats, cloud.log_scales.exp()).numpy()
    np.testing.assert_allclose(shape, expected, atol=1e-3)


@pytest.mark.parametrize("up", ["+y", None])
def test_blender_sees_a_point_where_the_photograph_shows_it(up, tmp_path):
    """Its camera looks along -z; shifts and the focal length are shares of the width."""
    camera = look_at((2, 1, 0.5), width=60, height=90, principal=(4, -3))
    write_photographs(tmp_path, [camera], np.eye(4))
    (photograph,) = read_photographs(tmp_path)
    points = np.array([[0.1, 0.2, 0.3], [-0.4, 0.1, 0.0]])
    seen = points @ camera.rotation.T + camera.translation
    expected = seen[:, :2] / seen[:, 2:] * [camera.fx, camera.fy] + [camera.cx, camera.cy]
    to_blender = file_to_blender(up)
    placed = points @ to_blender[:3, :3].T
    pose = to_blender @ camera_to_file(photograph.position, photograph.rotation)
    local = (placed - pose[:3, 3]) @ pose[:3, :3]
    assert (local[:, 2] < 0).all()
    # On the sensor in widths of the picture, y up, as Blender describes its cameras.
    sensor = photograph.focal_length / SENSOR_WIDTH * local[:, :2] / -local[:, 2:]
    sensor -= photograph.shift
    across, along = photograph.pixel_aspect
    right = sensor[:, 0] * camera.width + camera.width / 2
    down = camera.height / 2 - sensor[:, 1] * camera.width * across / along
    np.testing.assert_allclose(np.stack([right, down], axis=1), expected, atol=1e-9)


def test_what_is_upright_has_z_up():
    np.testing.assert_array_equal(file_to_blender("+y")[:3, :3] @ [0, 1, 0], [0, 0, 1])
    # Down and forward of a capture.
    np.testing.assert_array_equal(file_to_blender(None)[:3, :3] @ [0, 1, 0], [0, 0, -1])
    np.testing.assert_array_equal(file_to_blender(None)[:3, :3] @ [0, 0, 1], [0, 1, 0])
    for up in ("+y", None):
        assert np.linalg.det(file_to_blender(up)) == pytest.approx(1)


def test_deleted_vertices_keep_their_rows(folder, tmp_path):
    result = read_result_folder(folder)
    vertices = np.array([[3.0, 3, 3], [0, 0, 0], [1, 1, 1]])
    faces = np.array([[2, 0, 1]])
    path = tmp_path / "edited.obj"
    write_edited(path, result, np.array([3, 0, 1]), vertices, faces)
    lines = path.read_text().splitlines()
    assert sum(line.startswith("v ") for line in lines) == 4
    assert lines[0] == "v 0 0 0"
    assert lines[3] == "v 3 3 3"
    assert lines[-1] == "f 2 4 1"
    record = json.loads((tmp_path / "edited.obj.json").read_text())
    assert record == {"matrix": result.matrix.tolist(), "up": "+y"}


@pytest.mark.parametrize("numbers", [[0, 0, 1], [0, 1, 4], [0, 1, -1]])
def test_new_vertices_are_refused(numbers, folder, tmp_path):
    arrays = (np.array(numbers), np.zeros((3, 3)), np.array([[0, 1, 2]]))
    with pytest.raises(ScanError, match="new vertices"):
        write_edited(tmp_path / "a.obj", read_result_folder(folder), *arrays)
    assert not list(tmp_path.iterdir())


def test_a_mesh_without_triangles_is_refused(folder, tmp_path):
    arrays = (np.array([0]), np.zeros((1, 3)), np.zeros((0, 3), int))
    with pytest.raises(ScanError, match="no triangles left"):
        write_edited(tmp_path / "a.obj", read_result_folder(folder), *arrays)


def test_the_program_takes_the_command_lines(tmp_path):
    words = commands.run_arguments(tmp_path, tmp_path / "out", "fast", '--minutes 15 -B "2,2,2"')
    flags = full_flags(*words[1:])
    assert flags["scene_path"] == tmp_path
    assert flags["output_dir"] == tmp_path / "out"
    assert flags["minutes"] == 15
    for suffix in (".ply", ".spz"):
        target = tmp_path / f"a{suffix}"
        words = commands.export_arguments(tmp_path / "1.pt", tmp_path / "e.obj", target)
        options = from_args(ExportOptions, export_parser(None).parse_flags(words[1:]))
        assert options.target == target
        assert options.repose == tmp_path / "e.obj"
        assert options.overwrite


def test_presets_are_those_of_the_program():
    assert set(commands.PRESETS) == set(Preset.__args__)


def test_programs_that_are_not_there_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    cases = {
        commands.Program(): "name the Python",
        commands.Program(python=str(tmp_path / "python")): "no such file",
        commands.Program(python=sys.executable, folder=str(tmp_path)): "not the folder",
    }
    for program, message in cases.items():
        with pytest.raises(ScanError, match=message):
            program.words("run")
    with pytest.raises(ScanError, match="more flags"):
        commands.run_arguments(tmp_path, tmp_path, "fast", '"')


def test_progress_follows_the_lines_of_a_run(tmp_path):
    stream = io.StringIO()
    console = Console(stream=stream, terminal=False, verbose=False, pace=Pace(plain_seconds=0))
    progress = Progress()
    fractions = []

    def read() -> None:
        for line in stream.getvalue().splitlines():
            progress.read(line)
        stream.truncate(0)
        stream.seek(0)
        fractions.append(progress.fraction)

    read()
    for number in (1, 2):
        console.headline(f"stage {number} of 2: coarse SuGaR, multiview")
        read()
        with console.progress("coarse SuGaR, multiview", 1, 500) as loop:
            loop.update(250)
            read()
            loop.update(500)
        read()
    assert fractions == [0, 0, 0.25, 0.5, 0.5, 0.75, 1]
    assert progress.text.startswith("2 of 2: coarse SuGaR, multiview, 100%")
    files = [tmp_path / "my scan: a" / name for name in ("mesh.obj", "splats.ply")]
    print_result(PipelineResult(files=files), console)
    read()
    assert progress.results == tmp_path / "my scan: a"
    progress.read("error: no space left; free some")
    assert progress.error == "no space left; free some"


def wait_for(process: BackgroundProcess) -> tuple[int, list[str]]:
    """The exit code of a process and all its lines."""
    end = time.monotonic() + 60
    while process.exit_code is None:
        assert time.monotonic() < end
        time.sleep(0.02)
    return process.exit_code, process.new_lines()


def test_lines_of_a_process_arrive_while_it_runs():
    # Whatever starts the tests may ignore interrupts, which its processes inherit.
    script = (
        "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "print('größer'); time.sleep(600)"
    )
    process = BackgroundProcess([sys.executable, "-c", script])
    lines: list[str] = []
    end = time.monotonic() + 60
    while not lines:
        assert time.monotonic() < end
        lines = process.new_lines()
    assert lines == ["größer"]
    assert process.exit_code is None
    process.stop()
    code, rest = wait_for(process)
    assert code != 0
    assert "KeyboardInterrupt" in "".join(rest)


def test_a_process_does_not_get_the_settings_of_blenders_python(monkeypatch):
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    process = BackgroundProcess([sys.executable, "-c", "raise SystemExit(3)"])
    assert wait_for(process)[0] == 3
    with pytest.raises(ScanError, match="cannot be started"):
        BackgroundProcess([str(REPOSITORY / "missing")])


def test_the_package_has_all_modules_and_is_the_same_each_time(tmp_path):
    package = build(tmp_path / "a")
    assert package.read_bytes() == build(tmp_path / "b").read_bytes()
    with zipfile.ZipFile(package) as archive:
        names = set(archive.namelist())
        manifest = archive.read("blender_manifest.toml").decode()
    modules = {path.relative_to(EXTENSION).as_posix() for path in EXTENSION.rglob("*.py")}
    assert names == modules | {"blender_manifest.toml", "LICENSE"}
    version = re.search(r'^version = "(.+)"', manifest, re.MULTILINE)
    assert version is not None
    assert package.name == f"sugar_scan-{version[1]}.zip"
    assert 'license = ["SPDX:Apache-2.0"]' in manifest


def test_what_is_plain_needs_neither_blender_nor_the_program():
    for path in (EXTENSION / "plain").glob("*.py"):
        for line in path.read_text().splitlines():
            words = line.split()
            if words[:1] in (["import"], ["from"]):
                package = words[1].split(".")[0]
                assert package in {"", "numpy"} | sys.stdlib_module_names, f"{path.name}: {line}"
