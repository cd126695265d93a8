# SPDX-License-Identifier: Apache-2.0
"""Masks that are imprecise or missing are estimated from a model of the whole scene."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gaussian_splatting.data.images import decode_mask
from gaussian_splatting.data.masks import MaskOptions, object_mask_path, overview, with_object_masks
from gaussian_splatting.data.observations import KEEP_ALL, ViewOptions
from gaussian_splatting.engine.runner import run_stage
from gaussian_splatting.rasterization import render_view
from gaussian_splatting.rasterization.compute import Compute
from gaussian_splatting.rasterization.render import masked_shares
from gaussian_splatting.scenes.reference_layout import load_reference_checkpoint
from gaussian_splatting.scenes.scene import (
    Scene,
    VanillaSize,
    load_scene,
    load_scene_for_checkpoint,
)
from gaussian_splatting.vanilla import dense_start, vanilla_run
from gaussian_splatting.vanilla.estimated_masks import MaskEstimation, needs_masks, render_mask
from gaussian_splatting.vanilla.scene_masks import all_views
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_run import VanillaOptions
from sugar_utils.errors import UserError
from tests.support.faulty_captures import copy_scene, faults
from tests.support.tiny_scene import tiny_cloud
from tests.support.tracks import make_observed_scene


@pytest.fixture(scope="module")
def capture(tmp_path_factory) -> Path:
    return make_observed_scene(tmp_path_factory.mktemp("observed") / "scene").root


def load(root: Path):
    return load_scene(
        root,
        size_rule=VanillaSize(),
        masks=MaskOptions(),
        eval_split=False,
        view_options=ViewOptions(),
        notify=lambda line: None,
    )


def iou(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a >= 128, b >= 128
    return (a & b).sum() / (a | b).sum()


@pytest.mark.slow
def test_shares_are_ratios_of_blending_weights(capture):
    gaussians = tiny_cloud().activate()
    camera = load(capture).train_cameras[0].reduced(40)
    rng = torch.Generator().manual_seed(0)
    mask = torch.rand(camera.height, camera.width, generator=rng)
    shares = masked_shares(gaussians, [(camera, mask), (camera, 1 - mask)])
    alpha = render_view(gaussians, camera, white=False, geometry=False)
    shown = alpha.radii > 0
    assert bool(shown.any())
    # Both masks together count every pixel once out of twice.
    seen = shares > 0
    assert torch.allclose(shares[seen], torch.full_like(shares[seen], 0.5), atol=1e-5)
    assert bool((shares[~shown] == 0).all())
    whole = masked_shares(gaussians, [(camera, torch.ones_like(mask))])
    assert torch.allclose(whole[seen], torch.ones_like(whole[seen]), atol=1e-5)
    full = render_mask(gaussians, torch.ones_like(shares), camera, (80, 60))
    assert full.shape == (60, 80)
    assert set(np.unique(full)) <= {0, 255}


def test_only_masks_that_are_imprecise_or_missing_are_estimated(capture, tmp_path):
    cameras = load(capture).train_cameras
    assert not needs_masks(cameras)
    assert needs_masks([replace(cameras[0], mask=None), *cameras[1:]])
    assert not needs_masks([replace(c, mask=None) for c in cameras])
    assert not needs_masks([*cameras[:3], *(replace(c, mask=None) for c in cameras[3:])])
    rough = [replace(c, mask=replace(c.mask, outline_error=0.01)) for c in cameras]
    assert needs_masks(rough)
    ignored = [replace(c, mask=replace(c.mask, mode="ignore")) for c in rough]
    assert not needs_masks(ignored)


def test_names_of_views_stay_inside_of_the_folder(tmp_path):
    for name in ("a.png", "sub/a.png", "../../a.png", "/etc/a.png", "sub\\a.png"):
        path = object_mask_path(tmp_path, name)
        assert path.resolve().is_relative_to(tmp_path.resolve())
        assert path.name == "a.png.png"
    assert with_object_masks([], tmp_path) == []


class StoodInEstimation(MaskEstimation):
    """Writes plain masks instead of training."""

    def _write_masks(self, scene: Scene, folder: Path, notify) -> float:
        for camera in all_views(scene):
            path = object_mask_path(folder, camera.name)
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (camera.width, camera.height), 255).save(path)
        self.train(scene, folder, self.iterations)
        return 1.0


@pytest.mark.slow
def test_estimated_masks_are_left_in_the_scene_and_edited_ones_win(capture, tmp_path):
    root = copy_scene(capture, tmp_path / "scene")
    shutil.rmtree(root / "masks")
    scene = load(root)
    estimates: list[Path] = []
    lines: list[str] = []

    def estimated(name: str) -> Scene:
        def train(whole: Scene, folder: Path, iterations: int) -> Path:
            estimates.append(folder)
            return folder

        estimation = StoodInEstimation(tmp_path / name, Compute(), {}, 10, train, "auto")
        return estimation(scene, lines.append)

    first = estimated("first")
    names = [camera.name for camera in scene.train_cameras]
    place = root / "masks_auto"
    assert {path.stem for path in place.glob("*.png")} == set(names)
    assert (place / "masks.html").is_file()
    assert str(place) in lines[-1]
    # What was not edited is estimated again by another run.
    estimated("second")
    assert len(estimates) == 2
    edited = object_mask_path(place, names[0])
    with Image.open(edited) as image:
        half = image.copy()
    half.paste(0, (0, 0, half.width // 2, half.height))
    half.save(edited)
    corrected = estimated("second")
    assert len(estimates) == 2
    assert corrected.object_masks != first.object_masks
    by_name = {camera.name: camera for camera in corrected.train_cameras}
    camera = by_name[names[0]]
    assert np.array_equal(decode_mask(camera.mask, *half.size), np.asarray(half))
    assert np.asarray(Image.open(edited))[:, 0].max() == 0
    assert overview(by_name[names[1]]).min() == 255
    named = MaskOptions(masks="masks_auto")
    options = {"size_rule": VanillaSize(), "eval_split": False, "notify": lambda line: None}
    reloaded = load_scene(root, masks=named, view_options=KEEP_ALL, **options)
    assert all(camera.mask is not None for camera in reloaded.train_cameras)
    object_mask_path(place, names[1]).unlink()
    with pytest.raises(UserError, match=f"1 of {len(names)} photographs have no mask there"):
        estimated("second")
    shutil.rmtree(place)
    estimated("third")
    assert len(estimates) == 3


@pytest.mark.slow
def test_missing_masks_are_estimated_once_and_later_stages_use_them(capture, tmp_path, monkeypatch):
    # Nearly half of the time would be plane sweeps.
    monkeypatch.setattr(dense_start, "MAX_VIEWS", 6)
    root = copy_scene(capture, tmp_path / "scene")
    faults(Path())["half of the masks missing"](root, [], np.random.default_rng(0))
    options = VanillaOptions(
        source_path=root, model_path=tmp_path / "model", config=VanillaConfig(iterations=40)
    )
    ply = run_stage(options)
    record = json.loads((tmp_path / "model" / "checkpoints" / "run.json").read_text())
    folder = tmp_path / "model" / "object_masks" / record["object_masks"]
    assert not (folder / "model").exists()
    given, full = load(root).train_cameras, load(capture).train_cameras
    missing = {camera.name for camera in given if camera.mask is None}
    assert {path.stem for path in folder.glob("*.png")} == missing
    scene = load_scene_for_checkpoint(
        root,
        load_reference_checkpoint(options.model_path, 40),
        size_rule=VanillaSize(),
        eval_split=False,
        masks=MaskOptions(),
        view_options=ViewOptions(),
        notify=lambda line: None,
    )
    found = {camera.name: camera for camera in scene.train_cameras}
    scores = [iou(overview(found[c.name]), overview(c)) for c in full if c.name in missing]
    assert np.median(scores) > 0.85
    monkeypatch.setattr(vanilla_run, "_train_whole", pytest.fail)
    assert run_stage(options) == ply
