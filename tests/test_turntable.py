# SPDX-License-Identifier: Apache-2.0
"""Objects that turn before a camera that stands still: found, masked, and placed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gaussian_splatting.data.masks import MaskOptions
from gaussian_splatting.scenes.scene import load_scene
from sugar_capture.conversion.convert_run import convert
from sugar_capture.convert_options import ConvertOptions, SfmOptions
from sugar_capture.features.photographs import described_photographs
from sugar_capture.turntable import moving_masks, rounds_of, write_turntable_masks
from sugar_trainers.capture import SugarSize
from tests.support import turntables
from tests.support.photographed_room import poster, write_photographs
from tests.support.pose_errors import pose_errors

HEIGHT, WIDTH = 60, 80


def turning(n: int = 12, seed: int = 0, gain: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """A painted ellipse that turns: images, (N, H, W, 3) uint8, and where it is, (N, H, W)."""
    rng = np.random.default_rng(seed)
    behind = 40 + 0.6 * np.asarray(Image.fromarray(poster(seed).astype(np.uint8)).resize((80, 60)))
    paint = poster(seed + 7)
    y, x = np.mgrid[:HEIGHT, :WIDTH] - np.array([HEIGHT / 2, WIDTH / 2])[:, None, None]
    images, masks = [], []
    for k in range(n):
        angle = 2 * np.pi * k / n
        u, v = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
        inside = (u / 22) ** 2 + (v / 17) ** 2 < 1
        rows, columns = (np.clip(3 * at + 96, 0, 191).astype(int) for at in (v, u))
        image = np.where(inside[..., None], paint[rows, columns], behind)
        image = image * (1 + gain * np.sin(k)) + rng.normal(size=image.shape)
        images.append(image.clip(0, 255).round().astype(np.uint8))
        masks.append(inside)
    return np.stack(images), np.stack(masks)


def iou(a: np.ndarray, b: np.ndarray) -> float:
    return float((a & b).sum() / (a | b).sum())


@pytest.mark.parametrize("gain", [0.0, 0.15])
def test_masks_are_where_the_object_is(gain):
    images, inside = turning(gain=gain)
    assert [len(rows) for rows in rounds_of(images, len(images))] == [12]
    masks = moving_masks(images)
    assert min(iou(a, b) for a, b in zip(masks, inside, strict=True)) > 0.9


def test_rounds_have_their_own_backgrounds():
    images = np.concatenate([turning(seed=0)[0], turning(seed=3)[0]])
    assert [list(rows) for rows in rounds_of(images, len(images))] == [
        [*range(12)],
        [*range(12, 24)],
    ]


def test_nothing_moves_in_copies_of_one_photograph():
    assert moving_masks(np.repeat(turning()[0][:1], 12, axis=0)) is None


def written(folder: Path, images: np.ndarray) -> list:
    for k, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{k:02}.png")
    return described_photographs(folder, recursive=True)


def test_masks_are_written_as_large_as_the_photographs(tmp_path):
    (tmp_path / "input").mkdir()
    images, inside = turning()
    photographs = written(tmp_path / "input", images)
    assert write_turntable_masks(photographs, tmp_path / "masks") == 1
    found = np.asarray(Image.open(tmp_path / "masks" / "03.png.png"))
    assert found.shape == (HEIGHT, WIDTH)
    assert set(np.unique(found)) == {0, 255}
    assert iou(found > 0, inside[3]) > 0.9


def test_a_camera_that_moves_is_no_turntable(tmp_path):
    write_photographs(tmp_path / "input", 12)
    photographs = described_photographs(tmp_path / "input", recursive=True)
    assert write_turntable_masks(photographs, tmp_path / "masks") == 0
    assert list(tmp_path.iterdir()) == [tmp_path / "input"]


@pytest.mark.slow
@pytest.mark.parametrize("frame", ["circle", "border"])
@pytest.mark.parametrize("color", [0, 255])
def test_a_frame_around_photographs_of_a_moving_camera_is_no_turntable(tmp_path, frame, color):
    y, x = np.mgrid[:480, :640]
    outside = (x - 320) ** 2 + (y - 240) ** 2 > 235**2
    if frame == "border":
        outside = (np.minimum(x, 639 - x) < 40) | (np.minimum(y, 479 - y) < 40)
    write_photographs(tmp_path / "input", 12)
    for path in sorted((tmp_path / "input").iterdir()):
        pixels = np.array(Image.open(path).convert("RGB").resize((640, 480)))
        pixels[outside] = color
        Image.fromarray(pixels).save(path)
    photographs = described_photographs(tmp_path / "input", recursive=True)
    assert write_turntable_masks(photographs, tmp_path / "masks") == 0


def test_a_round_of_few_photographs_is_not_told_from_a_moving_camera(tmp_path):
    (tmp_path / "input").mkdir()
    images = np.concatenate([turning(seed=0)[0], turning(seed=3, n=4)[0]])
    photographs = written(tmp_path / "input", images)
    assert write_turntable_masks(photographs, tmp_path / "masks") == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fox", "bunny", "spot"])
def test_captures_by_hand_are_no_turntables(name, tmp_path, scenes_dir):
    photographs = described_photographs(scenes_dir / name / "images", recursive=True)
    assert write_turntable_masks(photographs, tmp_path / "masks") == 0


@pytest.mark.slow
def test_poses_come_from_the_object_alone(tmp_path):
    known = turntables.write_turntable(tmp_path / "input", 20, [35.0])
    convert(ConvertOptions(tmp_path, sfm=SfmOptions(max_features=1_000, features="sift")))
    scene = load_scene(tmp_path, size_rule=SugarSize(), eval_split=False, masks=MaskOptions())
    found = {camera.name: camera for camera in scene.train_cameras}
    assert len(found) == len(known)
    assert all(camera.shows_object for camera in scene.train_cameras)
    assert pose_errors(found, known).rotation.max() < 0.3
