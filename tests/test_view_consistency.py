# SPDX-License-Identifier: Apache-2.0
"""Views that contradict the rest of a capture are named and left out, and no others are."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pycolmap
import pytest
from PIL import Image

from gaussian_splatting.data import image_checks
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.image_checks import _exposure_noise, inconsistent_images, reduced_grey
from gaussian_splatting.data.images import colors_of
from gaussian_splatting.data.mask_agreement import mask_agreement
from gaussian_splatting.data.masks import NO_MASKS, MaskOptions
from gaussian_splatting.data.observations import ViewOptions, repair_reconstruction
from gaussian_splatting.formats.ply import write_gaussian_ply
from gaussian_splatting.scenes.reference_layout import (
    load_reference_checkpoint,
    point_cloud_path,
    write_cameras_json,
    write_cfg_args,
)
from gaussian_splatting.scenes.scene import (
    Scene,
    VanillaSize,
    load_scene,
    load_scene_for_checkpoint,
)
from sugar_utils.errors import UserError
from tests.support.faulty_captures import (
    OF_MASKS,
    changed_image,
    copy_scene,
    faults,
    view_names,
)
from tests.support.random_scenes import look_at
from tests.support.tiny_scene import tiny_cameras, tiny_cloud
from tests.support.tracks import make_observed_scene

SPOILT = "view_05.png"


@pytest.fixture(scope="module")
def capture(tmp_path_factory) -> Path:
    """A good capture with tracks and masks, and an image of another place beside it."""
    root = make_observed_scene(tmp_path_factory.mktemp("observed") / "scene").root
    rng = np.random.default_rng(9)
    coarse = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8))
    coarse.resize((256, 192), Image.Resampling.BICUBIC).save(root.parent / "elsewhere.png")
    return root


def load(
    root: Path, *keep: str, eval_split: bool = False, masks: bool = True
) -> tuple[Scene, list[str]]:
    lines: list[str] = []
    scene = load_scene(
        root,
        size_rule=VanillaSize(),
        masks=MaskOptions() if masks else NO_MASKS,
        eval_split=eval_split,
        view_options=ViewOptions(keep_views=keep),
        notify=lines.append,
    )
    return scene, lines


def named(lines: list[str], root: Path) -> set[str]:
    told = [line for line in lines if "left out" in line or "estimated the poses" in line]
    return {name for name in view_names(root) if any(name in line for line in told)}


@pytest.mark.slow
@pytest.mark.parametrize("name", faults(Path()))
def test_each_fault_names_the_spoilt_views_and_no_others(capture, tmp_path, name):
    """Masks take most of the time, so they are read for what is wrong with them alone."""
    root = copy_scene(capture, tmp_path / "scene")
    fault = faults(capture.parent / "elsewhere.png")[name]
    spoilt = fault(root, [SPOILT], np.random.default_rng(0))
    scene, lines = load(root, masks=name.startswith(OF_MASKS))
    assert named(lines, root) == spoilt
    assert set(scene.dropped_views) <= spoilt
    assert all(camera.name not in scene.dropped_views for camera in scene.train_cameras)


@pytest.mark.slow
def test_a_good_capture_stays_as_it_is(capture):
    scene, lines = load(capture)
    assert scene.dropped_views == {}
    assert not [line for line in lines if "left out" in line or "estimated" in line]
    model = pycolmap.Reconstruction(capture / "sparse" / "0")
    before = {i: np.array(model.images[i].cam_from_world().matrix()) for i in model.images}
    repair_reconstruction(model, pytest.fail)
    assert all(np.array_equal(before[i], model.images[i].cam_from_world().matrix()) for i in before)
    assert all(camera.mask.outline_error == 0 for camera in scene.train_cameras)


def test_a_turned_pose_is_estimated_again(capture, tmp_path):
    root = copy_scene(capture, tmp_path / "scene")
    faults(Path())["pose turned by 20 degrees"](root, [SPOILT], np.random.default_rng(0))
    good, turned = (
        next(c for c in load(path, masks=False)[0].train_cameras if c.name == SPOILT)
        for path in (capture, root)
    )
    assert np.abs(good.rotation - turned.rotation).max() < 5e-3
    assert np.abs(good.center - turned.center).max() < 2e-2


def test_views_that_are_asked_for_are_kept(capture, tmp_path):
    root = copy_scene(capture, tmp_path / "scene")
    faults(Path())["image black"](root, [SPOILT], np.random.default_rng(0))
    assert SPOILT in load(root, masks=False)[0].dropped_views
    for keep in (SPOILT, "all"):
        scene, lines = load(root, keep, masks=False)
        assert scene.dropped_views == {}
        assert SPOILT in [camera.name for camera in scene.train_cameras]
        assert named(lines, root) == set()
    with pytest.raises(UserError, match="--keep_views view_99.png: no view has this name"):
        load(root, "view_99.png", masks=False)


def test_a_check_that_most_views_fail_is_not_applied(capture, tmp_path):
    root = copy_scene(capture, tmp_path / "scene")
    blurred = changed_image(lambda image: Image.new("RGB", image.size, (90, 90, 90)))
    blurred(root, view_names(root)[:15], np.random.default_rng(0))
    scene, _ = load(root, masks=False)
    assert scene.dropped_views == {}


def test_the_spread_of_exposures_is_measured(capture, tmp_path):
    stops = 1.5
    scene = copy_scene(capture, tmp_path / "scene")
    for path in sorted((scene / "images").iterdir())[::2]:
        with Image.open(path) as image:
            linear = (np.asarray(image) / 255.0) ** 2.2 * 2**stops
        Image.fromarray(np.uint8(255 * linear.clip(0, 1) ** (1 / 2.2))).save(path)

    loaded = load(scene, masks=False)[0]
    # The median difference from the middle is half the stops.
    assert loaded.exposure_spread == pytest.approx(1.4826 * stops / 2, rel=0.25)
    # Of the three nearest views in a ring at two heights one or two have the other exposure.
    assert loaded.exposure_noise > 0.25 * stops
    as_taken = load(capture, masks=False)[0]
    assert as_taken.exposure_spread < 0.3
    assert as_taken.exposure_noise < 0.3
    unchecked = load(capture, "all", masks=False)[0]
    assert np.isnan([unchecked.exposure_spread, unchecked.exposure_noise]).all()


def test_an_exposure_that_follows_the_direction_of_view_is_no_noise():
    cameras = tiny_cameras(40)
    smooth = {c.name: np.sin(2 * np.pi * n / 40) for n, c in enumerate(cameras)}
    jumping = {c.name: float(n % 4 < 2) for n, c in enumerate(cameras)}
    assert np.std(list(smooth.values())) > 0.5
    assert _exposure_noise(cameras, smooth) < 0.2
    assert _exposure_noise(cameras, jumping) > 0.3


def test_copies_leave_the_image_that_fits_its_points(capture, tmp_path):
    root = copy_scene(capture, tmp_path / "scene")
    shutil.copy(root / "images" / "view_06.png", root / "images" / SPOILT)
    scene, _ = load(root, masks=False)
    assert list(scene.dropped_views) == [SPOILT]
    assert inconsistent_images([], None)[0] == {}


@pytest.mark.slow
def test_outlines_that_are_off_are_measured(capture, tmp_path):
    root = copy_scene(capture, tmp_path / "scene")
    faults(Path())["outlines off by 2 %"](root, [SPOILT], np.random.default_rng(0))
    scene, lines = load(root)
    error = scene.train_cameras[0].mask.outline_error
    assert 0.003 < error < 0.03
    assert any("outlines of the masks are off" in line for line in lines)
    exact = mask_agreement(load(capture)[0].train_cameras, scene.points)
    assert exact.outline_error == 0
    assert exact.inconsistent == {}
    assert mask_agreement(scene.train_cameras[:4], scene.points) is None


@pytest.mark.slow
def test_held_out_views_are_those_of_the_whole_capture_in_all_stages(capture, tmp_path):
    """One dropped view must not shift which views are held out."""
    root = copy_scene(capture, tmp_path / "scene")
    faults(Path())["image black"](root, ["view_03.png"], np.random.default_rng(0))
    scene, _ = load(root, eval_split=True)
    assert scene.held_out_views == ["view_00.png", "view_08.png", "view_16.png"]
    assert list(scene.dropped_views) == ["view_03.png"]
    checkpoint = tmp_path / "model"
    write_cfg_args(checkpoint, source_path=root, eval_split=True)
    write_cameras_json(checkpoint, scene.original_train_cameras, scene.original_test_cameras)
    write_gaussian_ply(point_cloud_path(checkpoint, 7), tiny_cloud())
    for recorded in (True, False):
        record = checkpoint / "checkpoints" / "run.json"
        record.unlink(missing_ok=True)
        if recorded:
            record.parent.mkdir()
            record.write_text(json.dumps({"status": "finished", **scene.record()}))
        read = load_reference_checkpoint(checkpoint, 7)
        later = load_scene_for_checkpoint(
            root,
            read,
            size_rule=VanillaSize(),
            masks=MaskOptions(),
            view_options=ViewOptions(),
            notify=lambda line: None,
        )
        assert later.held_out_views == scene.held_out_views
        assert later.dropped_views == scene.dropped_views
        assert [c.name for c in later.train_cameras] == [c.name for c in scene.train_cameras]


@pytest.mark.slow
def test_later_stages_leave_out_what_training_left_out(capture, tmp_path):
    scene, _ = load(capture, eval_split=True)
    checkpoint = tmp_path / "model"
    write_cameras_json(checkpoint, scene.original_train_cameras, scene.original_test_cameras)
    write_gaussian_ply(point_cloud_path(checkpoint, 7), tiny_cloud())
    (checkpoint / "checkpoints").mkdir()
    views = {"held_out_views": ["view_02.png"], "dropped_views": {"view_04.png": "why"}}
    (checkpoint / "checkpoints" / "run.json").write_text(json.dumps(views))
    later = load_scene_for_checkpoint(
        capture,
        load_reference_checkpoint(checkpoint, 7),
        size_rule=VanillaSize(),
        masks=MaskOptions(),
        view_options=ViewOptions(),
        notify=lambda line: None,
    )
    assert [camera.name for camera in later.test_cameras] == ["view_02.png"]
    assert later.dropped_views == {"view_04.png": "why"}
    assert len(later.train_cameras) == 22


def test_held_out_views_that_contradict_the_rest_are_measured_apart(capture, tmp_path):
    root = copy_scene(capture, tmp_path / "scene")
    faults(Path())["image black"](root, ["view_08.png"], np.random.default_rng(0))
    scene, _ = load(root, eval_split=True, masks=False)
    assert scene.held_out_views == ["view_00.png", "view_08.png", "view_16.png"]
    assert [camera.name for camera in scene.test_cameras] == ["view_00.png", "view_16.png"]
    assert [camera.name for camera in scene.dropped_test_cameras] == ["view_08.png"]


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "LA", "I;16"])
def test_a_small_grey_copy_is_that_of_the_whole_image(tmp_path, mode):
    pixels = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    if mode == "I;16":
        image = Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    elif mode != "RGB":
        image = image.convert(mode)
    path = tmp_path / "a.png"
    image.save(path)
    camera = replace(look_at((0.0, -3.0, 0.0), width=120, height=90), image_path=path)
    _, grey = reduced_grey(camera, 40)
    whole = colors_of(Image.open(path)).convert("RGB")
    expected = whole.resize((40, 30), Image.Resampling.BOX).convert("L")
    assert np.array_equal(grey, np.asarray(expected))


def test_a_jpeg_is_read_in_grey_at_a_fraction_of_its_size(tmp_path):
    slopes = np.stack(np.meshgrid(np.arange(640), np.arange(480)), axis=-1) * 255 / 640
    pixels = np.concatenate([slopes, 255 - slopes[..., :1]], axis=2).astype(np.uint8)
    path = tmp_path / "a.jpg"
    Image.fromarray(pixels).save(path, quality=95)
    camera = replace(look_at((0.0, -3.0, 0.0), width=640, height=480), image_path=path)
    _, grey = reduced_grey(camera, 80)
    expected = Image.fromarray(pixels).resize((80, 60), Image.Resampling.BOX).convert("L")
    assert np.abs(grey.astype(int) - np.asarray(expected).astype(int)).max() <= 2


def test_stages_of_one_process_decode_each_image_for_the_checks_once(
    capture, tmp_path, monkeypatch
):
    root = copy_scene(capture, tmp_path / "scene")
    decoded = []

    def counted(camera: Camera, longest_side: int) -> tuple[Camera, np.ndarray]:
        decoded.append(camera.name)
        return reduced_grey(camera, longest_side)

    monkeypatch.setattr(image_checks, "reduced_grey", counted)
    first, _ = load(root, masks=False)
    assert sorted(decoded) == sorted(view_names(root))
    again, _ = load(root, masks=False, eval_split=True)
    assert sorted(decoded) == sorted(view_names(root))
    assert again.exposure_spread == first.exposure_spread
