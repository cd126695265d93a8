# SPDX-License-Identifier: Apache-2.0
"""The object that all photographs look at is found among the Gaussians of the whole scene."""

from __future__ import annotations

import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.data.masks import MaskOptions, overview
from gaussian_splatting.data.observations import ViewOptions
from gaussian_splatting.engine.runner import run_stage
from gaussian_splatting.scenes.reference_layout import OBJECT_MASKS, load_reference_checkpoint
from gaussian_splatting.scenes.scene import VanillaSize, load_scene, load_scene_for_checkpoint
from gaussian_splatting.vanilla import dense_start
from gaussian_splatting.vanilla.object_region import crossing_of, object_rows, support_plane
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_run import VanillaOptions
from sugar_utils.errors import UserError
from tests.support.faulty_captures import copy_scene
from tests.support.random_scenes import look_at
from tests.support.tracks import make_observed_scene

CENTER = np.array([0.4, -0.3, 0.5])


def cameras_around(n: int = 24) -> list:
    """Views from above that look at the centre."""
    views = []
    for k in range(n):
        angle, height = 2.4 * k, 0.6 + 1.2 * k / n
        offset = np.array([3 * math.cos(angle), 3 * math.sin(angle), height])
        views.append(
            look_at(
                tuple(CENTER + offset), target=tuple(CENTER), width=160, height=120, focal=240.0
            )
        )
    return views


def cloud_of(points: np.ndarray, scale: float = 0.03) -> GaussianCloud:
    n = len(points)
    return GaussianCloud(
        means=torch.tensor(points, dtype=torch.float32),
        sh_dc=torch.zeros(n, 1, 3),
        sh_rest=torch.zeros(n, 0, 3),
        opacity_logits=torch.full((n, 1), 3.0),
        log_scales=torch.full((n, 3), math.log(scale)),
        quats=torch.tensor([[1.0, 0, 0, 0]]).expand(n, 4).clone(),
    )


def sphere(n: int = 1500, radius: float = 0.4) -> np.ndarray:
    rows = np.random.default_rng(0).normal(size=(n, 3))
    return CENTER + radius * rows / np.linalg.norm(rows, axis=1, keepdims=True)


def ground(n: int = 4000, half: float = 4.0, height: float = 0.1) -> np.ndarray:
    """A floor that touches the sphere."""
    rows = np.random.default_rng(1).uniform(-half, half, size=(n, 3))
    return np.stack([rows[:, 0], rows[:, 1], np.full(n, height)], axis=1)


def found(*parts: np.ndarray) -> list[float]:
    """Share of each part that is taken for the object."""
    rows = object_rows(cloud_of(np.concatenate(parts)).activate(), cameras_around())
    return [float(own.mean()) for own in np.split(rows, np.cumsum([len(p) for p in parts])[:-1])]


def test_axes_cross_in_the_object():
    center, radius = crossing_of(cameras_around())
    assert np.allclose(center, CENTER, atol=1e-6)
    assert 0.5 < radius < 3


def test_the_object_is_what_stands_on_the_ground():
    far = np.random.default_rng(2).normal(size=(500, 3)) * 0.2 + np.array([3.5, 3.5, 1.0])
    on_object, on_ground, elsewhere = found(sphere(), ground(), far)
    assert on_object > 0.93
    assert on_ground == 0
    assert elsewhere == 0


def test_an_object_without_ground_is_whole():
    assert found(sphere()) == [1.0]


def test_the_ground_is_a_plane_below_the_cameras():
    points = np.concatenate([sphere(), ground()])
    normal, offset = support_plane(points, np.ones(len(points)), cameras_around(), 1.0)
    assert normal[2] > 0.999
    assert offset == pytest.approx(0.1, abs=0.01)


def test_a_wall_with_something_on_it_is_refused():
    rng = np.random.default_rng(3)
    wall = rng.uniform(-2, 2, size=(20_000, 3)) * (1, 1, 0.15) + (0, 0, 0.2)
    with pytest.raises(UserError, match="not separate from its surroundings"):
        found(sphere(), wall)


def test_cameras_that_look_elsewhere_are_refused():
    views = cameras_around()
    outwards = []
    for view in views:
        turned = np.diag([1.0, -1.0, -1.0]) @ view.rotation
        outwards.append(replace(view, rotation=turned, translation=-turned @ view.center))
    with pytest.raises(UserError, match="do not look at one place"):
        object_rows(cloud_of(sphere()).activate(), outwards)


def test_nothing_there_is_refused():
    with pytest.raises(UserError, match="nothing is where they look at"):
        found(sphere() + 30.0)


def scene_without_masks(folder: Path) -> Path:
    root = copy_scene(make_observed_scene(folder / "observed").root, folder / "scene")
    shutil.rmtree(root / "masks")
    return root


def options_of(root: Path, model: Path, masks: str, iterations: int) -> VanillaOptions:
    return VanillaOptions(
        source_path=root,
        model_path=model,
        config=VanillaConfig(iterations=iterations),
        mask_options=MaskOptions(masks=masks),
    )


@pytest.mark.slow
def test_masks_are_made_once_and_later_stages_use_them(tmp_path, monkeypatch):
    # Nearly half of the time would be plane sweeps.
    monkeypatch.setattr(dense_start, "MAX_VIEWS", 12)
    root, masked = scene_without_masks(tmp_path), tmp_path / "observed"
    options = options_of(root, tmp_path / "model", "auto", 80)
    asked = options.mask_options
    run_stage(options)
    how = {
        "size_rule": VanillaSize(),
        "view_options": ViewOptions(),
        "eval_split": False,
        "notify": lambda line: None,
    }
    checkpoint = load_reference_checkpoint(options.model_path, 80)
    scene = load_scene_for_checkpoint(root, checkpoint, masks=asked, **how)
    true = {
        c.name: overview(c) >= 128
        for c in load_scene(masked, masks=MaskOptions(), **how).train_cameras
    }
    scores = []
    for camera in scene.train_cameras:
        mask = overview(camera) >= 128
        scores.append((mask & true[camera.name]).sum() / (mask | true[camera.name]).sum())
    assert np.median(scores) > 0.9
    other = replace(checkpoint, object_masks=None)
    with pytest.raises(UserError, match="has no estimated masks"):
        load_scene_for_checkpoint(root, other, masks=asked, **how)
    assert not Path(root / "masks").exists()
    (page,) = (options.model_path / OBJECT_MASKS).glob("*/masks.html")
    assert page.read_text(encoding="utf-8").count("<img") == len(scene.train_cameras)


@pytest.mark.slow
def test_another_package_finds_the_foreground(tmp_path, monkeypatch):
    """A stand-in: what is brighter than the mean of a photograph is its foreground."""

    def remove(photograph, session, only_mask):
        assert only_mask
        assert session == "session"
        gray = photograph.mean(axis=2)
        return ((gray > gray.mean()) * 255).astype(np.uint8)

    package = SimpleNamespace(new_session=lambda: "session", remove=remove)
    monkeypatch.setitem(sys.modules, "rembg", package)
    options = options_of(scene_without_masks(tmp_path), tmp_path / "model", "rembg", 2)
    run_stage(options)
    (folder,) = (options.model_path / OBJECT_MASKS).iterdir()
    scene = load_scene_for_checkpoint(
        options.source_path,
        load_reference_checkpoint(options.model_path, 2),
        size_rule=VanillaSize(),
        masks=options.mask_options,
        view_options=ViewOptions(),
        notify=lambda line: None,
    )
    camera = scene.train_cameras[0]
    gray = np.asarray(Image.open(camera.image_path)).mean(axis=2)
    assert np.array_equal(overview(camera) >= 128, gray > gray.mean())
    assert camera.mask.path.parent == folder


def test_a_missing_package_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rembg", None)
    options = options_of(scene_without_masks(tmp_path), tmp_path / "model", "rembg", 2)
    with pytest.raises(UserError, match="pip install rembg"):
        run_stage(options)
