# SPDX-License-Identifier: Apache-2.0
"""Files of exports: names that follow the format, and all of them or none."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gaussian_splatting.formats.ply import read_gaussian_ply, write_gaussian_ply
from gaussian_splatting.formats.splat_file import ROW, write_splat
from sugar_extractors.export.formats import FORMATS
from sugar_extractors.export.reading import read_gaussians_in_scene
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh, write_textured_mesh
from sugar_utils.errors import UserError
from tests.support.limits import largest_file
from tests.support.mesh_scenes import sphere
from tests.support.refined_models import refined_state, save_model
from tests.support.tiny_scene import refusal, run_cli, tiny_cloud
from tests.support.verbs import export


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> SimpleNamespace:
    root = tmp_path_factory.mktemp("inputs")
    ball = sphere(rings=12)
    mesh = TexturedMesh(
        torch.from_numpy(ball.vertices).float(),
        torch.from_numpy(ball.faces),
        torch.rand(ball.n_faces, 3, 2, generator=torch.Generator().manual_seed(0)),
        torch.full((256, 256, 3), 90).byte(),
    )
    write_textured_mesh(root / "ball.obj", mesh, glb=False)
    write_gaussian_ply(root / "cloud.ply", tiny_cloud())
    refined = save_model(root, refined_state(), "refined")
    return SimpleNamespace(obj=root / "ball.obj", ply=root / "cloud.ply", refined=refined)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("to", "output", "written"),
    [
        ("spz", "scan", ["scan.spz"]),
        ("splat", "scan.v2", ["scan.v2.splat"]),
        ("ply", "scan", ["scan.ply"]),
        ("ply", "scan.PLY", ["scan.ply"]),
        ("gltf", "scan", ["scan.gltf.glb"]),
        ("gltf", "scan.glb", ["scan.glb"]),
        ("gltf", "scan.gltf", ["scan.gltf.glb"]),
        ("gltf", "scan.GLTF", ["scan.gltf.glb"]),
        ("glb", "scan", ["scan.glb"]),
        ("stl", "scan.GLB", ["scan.GLB.stl", "scan.GLB.stl.json"]),
        ("glb", "scan.GLB", ["scan.glb"]),
        ("obj", "scan.mesh", ["scan.mesh.mtl", "scan.mesh.obj", "scan.mesh.png"]),
    ],
)
def test_a_name_without_the_suffix_of_the_format_gets_it(
    to, output, written, inputs, tmp_path, capsys
):
    source = inputs.obj if to in ("glb", "obj", "stl") else inputs.ply
    words = ("--scale_factor", 1) if to == "stl" else ()
    assert run_cli(export.main, source, "--to", to, "-o", tmp_path / output, *words) == 0
    assert names(tmp_path) == written
    told = capsys.readouterr().out
    (named,) = (name for name in written if f"{tmp_path / name}\n" in told)
    assert (tmp_path / named).is_file()
    if source == inputs.ply:
        assert len(read_gaussians_in_scene(tmp_path / named, print)) == 200
    # The same words mean the same file.
    assert "is there already" in refusal(
        capsys, export.main, source, "--to", to, "-o", tmp_path / output, *words
    )


@pytest.mark.parametrize("output", [".", "..", "...", "/", "folder"])
def test_a_folder_is_no_file_to_write(output, inputs, tmp_path, monkeypatch, capsys):
    (tmp_path / "here" / "folder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    for source, to in ((inputs.ply, "spz"), (inputs.obj, "obj"), (inputs.obj, "glb")):
        assert run_cli(export.main, source, "--to", to, "-o", output, "--overwrite", True) == 2
        assert capsys.readouterr().err.endswith(" is a folder; name the file to write\n")
    assert names(tmp_path) == ["here"]


@pytest.mark.parametrize("number", [np.inf, np.nan, 0.0, -1.0])
def test_rows_of_impossible_sizes_are_dropped_and_a_file_of_them_is_refused(
    number, inputs, tmp_path, capsys
):
    source, out = tmp_path / "cloud.splat", tmp_path / "out"
    write_splat(source, tiny_cloud())
    rows = np.fromfile(source, ROW)
    rows["scale"][7, 1] = number
    rows.tofile(source)
    assert run_cli(export.main, source, "--to", "ply", "-o", tmp_path / "a.ply") == 0
    n = len(rows)
    assert f"{source}: dropped 1 of {n} Gaussians with NaN" in capsys.readouterr().out
    assert len(read_gaussian_ply(tmp_path / "a.ply", pytest.fail)) == n - 1
    rows["scale"][:, 1] = number
    rows.tofile(source)
    for to in ("gltf", "spz", "ply"):
        error = refusal(capsys, export.main, source, "--to", to, "-o", out / "a")
        assert f"error: {source}: holds no Gaussians: its {n} rows hold numbers" in error
    assert not out.exists() or names(out) == []


def test_a_glb_of_brackets_without_end_is_one_line(tmp_path, capsys):
    source, text = tmp_path / "deep.glb", b'{"KHR_gaussian_splatting": ' + b"[" * 100_000
    head = struct.pack("<4sIII4s", b"glTF", 2, 20 + len(text), len(text), b"JSON")
    source.write_bytes(head + text)
    error = refusal(capsys, export.main, source, "--to", "spz", "-o", tmp_path / "a")
    assert error.startswith(f"error: {source}: ")
    assert names(tmp_path) == ["deep.glb"]


@pytest.mark.parametrize(
    ("place", "value"),
    [((4, "type"), "SCALAR"), ((3, "type"), "VEC3"), ((0, "count"), 7), ((9, "count"), 0)],
)
def test_a_gltf_whose_attributes_do_not_fit_is_damaged(place, value, inputs, tmp_path, capsys):
    source = tmp_path / "cloud.glb"
    assert run_cli(export.main, inputs.ply, "--to", "gltf", "-o", source) == 0
    data = source.read_bytes()
    (length,) = struct.unpack_from("<I", data, 12)
    content = json.loads(data[20 : 20 + length])
    content["accessors"][place[0]][place[1]] = value
    text = json.dumps(content).encode()
    head = struct.pack("<I4s", len(text), b"JSON") + text + data[20 + length :]
    source.write_bytes(struct.pack("<4sII", b"glTF", 2, 12 + len(head)) + head)
    capsys.readouterr()
    assert "have other types or lengths than Gaussians have" in refusal(
        capsys, export.main, source, "--to", "spz", "-o", tmp_path / "a"
    )


def test_a_picture_too_small_for_its_triangles_leaves_what_was_there(inputs, tmp_path, capsys):
    (tmp_path / "a.glb").write_text("mine")
    words = (inputs.obj, "--to", "glb", "-o", tmp_path / "a.glb", "--overwrite", "True")
    assert "do not fit into a picture" in refusal(capsys, export.main, *words, "--texture_size", 20)
    assert names(tmp_path) == ["a.glb"]
    assert (tmp_path / "a.glb").read_text() == "mine"


def test_an_export_that_fails_when_it_is_read_back_leaves_nothing(
    inputs, tmp_path, monkeypatch, capsys
):
    def damaged(path, notify):
        raise UserError(f"{path}: damaged; export it again")

    for name in ("spz", "ply"):
        monkeypatch.setitem(FORMATS, name, replace(FORMATS[name], reader=damaged))
    words = ("--to", "ply", "-o", tmp_path / "a.ply", "--repose", inputs.obj, "--scale_factor", 2)
    assert f"error: {tmp_path / 'a.spz'}: damaged; export it again\n" in refusal(
        capsys, export.main, inputs.ply, "--to", "spz", "-o", tmp_path / "a.spz"
    )
    assert run_cli(export.main, inputs.refined, *words) == 2
    assert names(tmp_path) == []


@pytest.mark.skipif(os.name == "nt", reason="no limit of the size of files")
@pytest.mark.parametrize("to", ["glb", "obj", "usdz", "stl", "spz", "splat", "ply", "gltf"])
def test_a_full_disk_is_one_line_and_leaves_nothing(to, inputs, tmp_path, capsys):
    if to == "usdz":
        pytest.importorskip("pxr")
    source = inputs.obj if to in ("glb", "obj", "usdz", "stl") else inputs.ply
    words = ("--to", to, "-o", tmp_path / "a", "--scale_factor", 2)
    with largest_file(1000):
        assert run_cli(export.main, source, *words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: cannot write ")
    assert error.count("\n") == 1
    assert "tmp-" not in error
    assert names(tmp_path) == []
