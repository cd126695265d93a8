# SPDX-License-Identifier: Apache-2.0
"""Files are checked where they are read: one line for everything that cannot be meant."""

from __future__ import annotations

import json
import math
import os

import numpy as np
import pytest
from PIL import Image

from gaussian_splatting.data import names
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.names import ImageFolder
from gaussian_splatting.scenes.reference_layout import (
    load_reference_checkpoint,
    point_cloud_path,
    write_cameras_json,
)
from gaussian_splatting.scenes.scene import load_scene_for_checkpoint
from sugar_pipeline.quality.model_metrics import read_scene_config
from sugar_trainers.capture import SugarSize
from sugar_utils.errors import UserError
from sugar_utils.files import read_json, write_json_atomic
from sugar_utils.schemas import (
    MAX_DEPTH,
    Coordinate,
    FileName,
    ResultNote,
    RunRecord,
    conform,
    is_deeper,
    read_checked,
)

PHASE = {"seconds": 1.5, "peak_bytes": 7}


@pytest.mark.parametrize(
    ("schema", "value", "message"),
    [
        (RunRecord, [], "Expected object"),
        (RunRecord, {"settings": 3}, r"\$\.settings"),
        (RunRecord, {"timings": {"a": 1}}, r"\$\.timings"),
        (RunRecord, {"timings": {"a": {**PHASE, "seconds": "1"}}}, "seconds"),
        (RunRecord, {"timings": {"a": {**PHASE, "seconds": math.nan}}}, "seconds"),
        (RunRecord, {"timings": {"a": {**PHASE, "peak_bytes": -1}}}, "peak_bytes"),
        (RunRecord, {"obsolete": 5}, "obsolete"),
        (ResultNote, {"result": []}, "result"),
        (ResultNote, {"result": {"seconds": 10**400}}, "seconds"),
        (ResultNote, {"files": {"a\0": ""}}, "files"),
        (Coordinate, True, "Expected float"),
        (Coordinate, 1e30, "float <="),
        (Coordinate, math.nan, "float"),
        (FileName, "", "length"),
        (FileName, "\ud800", "file.json"),
    ],
)
def test_what_cannot_be_meant_is_told_with_its_place(schema, value, message):
    with pytest.raises(UserError, match=message) as caught:
        conform(value, schema, "file.json")
    assert str(caught.value).startswith("file.json: ")
    assert "\n" not in str(caught.value)


def test_what_other_programs_write_is_let_through():
    record = {"status": "running", "timings": {"a": {**PHASE, "seconds": 2}}, "more": [None]}
    assert conform(record, RunRecord, "run.json").timings["a"].seconds == 2.0
    for name in ("a/b c.png", "é\n.png", os.fsdecode(b"\xff.png")):
        assert conform(name, FileName, "x") == name


@pytest.mark.parametrize(
    "text", ["[" * 100_000 + "]" * 100_000, "7" * 5_000, '{"a": -1e' + "9" * 5]
)
def test_json_that_python_cannot_take_is_one_line(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"a\.json") as caught:
        read_json(path)
    assert len(str(caught.value)) < 300


def test_settings_nested_without_end_are_refused(tmp_path):
    nested: list = []
    for _ in range(MAX_DEPTH + 5):
        nested = [nested]
    write_json_atomic(tmp_path / "run.json", {"settings": {"a": nested}})
    with pytest.raises(UserError, match="nested more than"):
        read_checked(tmp_path / "run.json", RunRecord)


def test_depth_is_counted_in_containers():
    assert not is_deeper(3, 0)
    assert is_deeper([], 0) is False
    assert is_deeper([[]], 0)
    assert not is_deeper({"a": [{}]}, 2)
    assert is_deeper({"a": [{"b": ()}]}, 2)


def test_names_that_are_no_utf_8_survive_a_json_file(tmp_path):
    name = os.fsdecode(b"caf\xe9.png")
    write_json_atomic(tmp_path / "a.json", {"image": name})
    assert read_json(tmp_path / "a.json") == {"image": name}


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"a": 1}', "{}", '{"a": [' + "9" * 5_000 + "]}", '{"": "b"}']
)
def test_a_list_of_scenes_that_is_none_says_how_to_write_one(text):
    with pytest.raises(UserError, match="vanilla checkpoint folder") as caught:
        read_scene_config(text if text.startswith("{") else "{" + text)
    assert "\n" not in str(caught.value)


def checkpoint_with(tmp_path, settings: str):
    path = point_cloud_path(tmp_path, 7)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"ply\n")
    (tmp_path / "cfg_args").write_text(f"Namespace({settings})", encoding="utf-8")
    said: list[str] = []
    return load_reference_checkpoint(tmp_path, 7, said.append), said


@pytest.mark.parametrize("value", ["3", "[]", "None", "''", "'a\\0b'", "{'a': 1}", "True", "1e999"])
def test_a_folder_of_images_that_is_no_text_is_not_used(tmp_path, value):
    checkpoint, said = checkpoint_with(tmp_path, f"images={value}, sh_degree=2")
    assert checkpoint.images_dir == "images"
    assert checkpoint.settings["sh_degree"] == 2
    assert ("cfg_args" in "".join(said)) == (value != "None")


def test_windows_paths_in_cfg_args_warn_nobody(tmp_path, recwarn):
    checkpoint, _ = checkpoint_with(tmp_path, r"source_path='C:\data\images', images='i'")
    assert checkpoint.images_dir == "i"
    assert not recwarn.list


def camera(name: str) -> Camera:
    angle = float(len(name))
    rotation = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1.0]])
    return Camera(name, 8, 6, 9.0, 9.0, 4.0, 3.0, rotation, np.array([angle, 0, 4.0]))


@pytest.mark.parametrize("images_dir", ["/", "..", "../../.."])
def test_a_checkpoint_cannot_make_the_whole_disk_be_searched(tmp_path, monkeypatch, images_dir):
    scene, model = tmp_path / "a" / "scene", tmp_path / "model"
    scene.mkdir(parents=True)
    point_cloud_path(model, 7).parent.mkdir(parents=True)
    point_cloud_path(model, 7).write_bytes(b"ply\n")
    write_cameras_json(model, [camera("x"), camera("xy")], [])
    monkeypatch.setattr("pathlib.Path.rglob", lambda *_: pytest.fail("searched a whole tree"))
    with pytest.raises(UserError, match="2 of 2 images are missing"):
        load_scene_for_checkpoint(
            scene,
            load_reference_checkpoint(model, 7),
            size_rule=SugarSize(),
            images_dir=images_dir,
            notify=lambda _: None,
        )


def test_photographs_outside_of_the_scene_are_found_where_their_names_say(tmp_path):
    outside = tmp_path / "photos" / "left"
    outside.mkdir(parents=True)
    Image.new("RGB", (8, 6)).save(outside / "x.png")
    scene, model = tmp_path / "scene", tmp_path / "model"
    scene.mkdir()
    point_cloud_path(model, 7).parent.mkdir(parents=True)
    point_cloud_path(model, 7).write_bytes(b"ply\n")
    write_cameras_json(model, [camera("left/x.png")], [])
    loaded = load_scene_for_checkpoint(
        scene,
        load_reference_checkpoint(model, 7),
        size_rule=SugarSize(),
        images_dir=str(tmp_path / "photos"),
        eval_split=False,
        notify=lambda _: None,
    )
    assert loaded.train_cameras[0].image_path == outside / "x.png"


def test_a_search_in_a_scene_has_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(names, "_MAX_SEARCHED", 20)
    for number in range(30):
        (tmp_path / f"{number}.txt").touch()
    with pytest.raises(UserError, match="more than 20 files.*--images"):
        ImageFolder(tmp_path).find("photo")


def test_a_mesh_note_of_the_wrong_shape_is_one_line(tmp_path):
    path = tmp_path / "mesh.json"
    path.write_text(json.dumps({"result": {"seconds": [1]}}))
    with pytest.raises(UserError, match=r"mesh\.json: Expected float"):
        read_checked(path, ResultNote)
