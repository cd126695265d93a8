# SPDX-License-Identifier: Apache-2.0
"""Likely faults are reported of captures that have them, and of no others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pycolmap
import pytest
from PIL import Image, ImageFilter

import train
from gaussian_splatting.data.masks import MaskOptions
from gaussian_splatting.data.observations import ViewOptions
from gaussian_splatting.scenes.scene import Scene, VanillaSize, load_scene
from sugar_capture.conversion.capture_check import (
    Directions,
    check_capture,
    direction_map,
    directions_of,
)
from sugar_capture.conversion.convert_run import convert
from sugar_capture.convert_options import ConvertOptions, SfmOptions
from tests.support import glossy_sphere
from tests.support.random_scenes import look_at
from tests.support.tiny_scene import run_cli, save_png
from tests.support.tracks import make_observed_scene


def read(root: Path) -> Scene:
    return load_scene(
        root,
        size_rule=VanillaSize(),
        eval_split=False,
        masks=MaskOptions(),
        view_options=ViewOptions(),
        notify=lambda line: None,
    )


def told(scene: Scene) -> dict[str, str]:
    return {found.what: found.where for found in check_capture(scene)[0]}


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return make_observed_scene(tmp_path_factory.mktemp("checked") / "scene").root


def changed(good: Path, root: Path, change: Callable[[int, np.ndarray], np.ndarray]) -> Path:
    """A copy of a capture with other photographs: made of each one's number and pixels."""
    shutil.copytree(good, root)
    for number, path in enumerate(sorted((root / "images").iterdir())):
        pixels = change(number, np.asarray(Image.open(path)).astype(float))
        save_png(path, np.clip(pixels, 0, 255).astype(np.uint8))
    return root


def blurred(number: int, pixels: np.ndarray) -> np.ndarray:
    if number % 2:
        return pixels
    picture = Image.fromarray(pixels.astype(np.uint8))
    return np.asarray(picture.filter(ImageFilter.GaussianBlur(3)))


@pytest.mark.slow
def test_nothing_is_said_of_a_good_capture(good):
    assert told(read(good)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fox", "bunny", "spot"])
def test_nothing_is_said_of_the_real_scenes(scenes_dir, name):
    assert told(read(scenes_dir / name)) == {}


@pytest.mark.slow
def test_blurred_photographs_are_named(good, tmp_path, capsys):
    root = changed(good, tmp_path / "scene", blurred)
    found = told(read(root))
    assert found.keys() == {"blurred"}
    assert found["blurred"].startswith("12 of 24 photographs: view_00.png, view_02.png")
    run_cli(train.main, "--doctor", "-s", root)
    shown = " ".join(capsys.readouterr().out.split())
    assert "blurred warning 12 of 24 photographs" in shown
    assert "-> replace them: hold the camera still" in shown


@pytest.mark.slow
def test_exposures_that_differ_are_measured(good, tmp_path):
    gains = 0.6, 1.0, 1.4
    root = changed(good, tmp_path / "scene", lambda number, pixels: gains[number % 3] * pixels)
    assert told(read(root)).keys() == {"exposure"}


@pytest.mark.slow
def test_a_surface_without_texture_is_told(good, tmp_path):
    noise = np.random.default_rng(0)
    root = changed(good, tmp_path / "scene", lambda _, p: noise.normal(120, 1.5, p.shape))
    assert "little texture" in told(read(root))


@pytest.mark.slow
def test_tracks_that_slide_over_the_surface_are_told(good, tmp_path):
    root = tmp_path / "scene"
    shutil.copytree(good, root)
    model = pycolmap.Reconstruction(root / "sparse" / "0")
    shiny = [number for number in model.points3D if model.points3D[number].xyz[2] > 0.1]
    for image in model.images.values():
        x, y, _ = image.projection_center()
        # A highlight goes along with the camera.
        slide = 5 * np.array([np.sin(np.arctan2(y, x)), np.cos(np.arctan2(y, x))])
        for point in image.points2D:
            if point.has_point3D() and point.point3D_id in shiny:
                point.xy = point.xy + slide
    model.update_point_3d_errors()
    model.write_binary(str(root / "sparse" / "0"))
    assert told(read(root)).keys() == {"reflections or movement"}


def test_half_of_the_round_and_the_top_are_missed(good):
    scene = read(good)
    directions = directions_of(scene.train_cameras, scene.points)
    half = [c for c, a in zip(scene.train_cameras, directions.azimuths, strict=True) if a < 180]
    found = told(replace(scene, train_cameras=half))
    assert found.keys() == {"unseen side"}
    assert found["unseen side"].split(" between ")[0] in ("135 degrees", "150 degrees")
    low = [c for c, e in zip(scene.train_cameras, directions.elevations, strict=True) if e < 28]
    assert "unseen top" in told(replace(scene, train_cameras=low))


def test_too_few_photographs_for_the_size_are_told(good):
    scene = read(good)
    few = replace(scene, train_cameras=scene.train_cameras[::4])
    assert "too few photographs" in told(few)


def outward(azimuths: range) -> Directions:
    cameras = []
    for degrees in azimuths:
        x, y = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
        inward = look_at((-0.2 * x, -0.2 * y, 0.0), width=64, height=64, focal=40.0)
        cameras.append(replace(inward, name=f"{degrees}", translation=np.zeros(3)))
    return directions_of(cameras, np.zeros((0, 3)))


def test_photographs_from_the_inside_are_judged_by_where_they_look():
    whole, part = outward(range(0, 360, 30)), outward(range(0, 240, 30))
    assert not whole.around
    assert whole.gap() == (0, 0)
    assert 60 <= part.gap()[1] <= 90
    picture = direction_map(part)
    assert "that the photographs look in" in picture.caption
    assert picture.image.ndim == 3


@pytest.mark.slow
@pytest.mark.parametrize(("gloss", "expected"), [(0.0, set()), (0.5, {"reflections or movement"})])
def test_converting_tells_of_a_surface_that_mirrors(tmp_path, gloss, expected):
    glossy_sphere.write_photographs(tmp_path / "input", gloss, n=20)
    done = convert(ConvertOptions(tmp_path, sfm=SfmOptions(max_features=700, features="sift")))
    told = json.loads((tmp_path / "distorted" / "outcome.json").read_text(encoding="utf-8"))
    assert {found["what"] for found in told["findings"]} == expected
    page = done.page.read_text(encoding="utf-8")
    assert "Map of directions" in page
    assert ("What is likely to go wrong" in page) == bool(expected)
