# SPDX-License-Identifier: Apache-2.0
"""Panoramas become rigs of pinhole views, whose poses are those of the panoramas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import gaussian_splatting.convert as entry
from gaussian_splatting.data.masks import MaskOptions
from sugar_capture.conversion.convert_run import convert
from sugar_capture.convert_options import ConvertOptions, SfmOptions
from sugar_capture.features.photographs import described_photographs
from sugar_capture.panoramas import FACES, are_panoramas, write_views
from sugar_pipeline.commands import run_full
from sugar_pipeline.pipeline.pipeline_flags import full_parser
from sugar_utils.errors import UserError
from tests.support.panorama_room import TRIPOD, poses, write_panoramas
from tests.support.photographed_room import write_photographs
from tests.support.pose_errors import pose_errors, pose_of, registered_poses
from tests.support.tiny_scene import SHORT_PIPELINE, run_cli

FEATURES = 400


def silent(done: int) -> None:
    pass


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("panoramas") / "input"
    write_panoramas(folder, 4, width=640)
    return folder


@pytest.mark.slow
def test_panoramas_are_told_from_photographs(room, tmp_path):
    assert are_panoramas(described_photographs(room, True), "auto")
    assert not are_panoramas(described_photographs(room, True), False)
    write_photographs(tmp_path, 3)
    assert not are_panoramas(described_photographs(tmp_path, True), "auto")
    for path in tmp_path.iterdir():
        Image.open(path).crop((0, 0, 240, 120)).save(path)
    assert not are_panoramas(described_photographs(tmp_path, True), "auto")


def write_objects(folder: Path, table: bool, noise: float) -> None:
    """Three photographs of 2:1 of a patterned disc on a plain background, or on a level table."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:320, :640]
    folder.mkdir(parents=True)
    for number in range(3):
        pixels = np.full((320, 640), 225.0)
        if table:
            pixels[200:] = 90.0
        disc = (x - 320) ** 2 + (y - 160) ** 2 < 140**2
        pixels[disc] = rng.uniform(0, 255, size=(64, 128)).repeat(5, 0).repeat(5, 1)[disc]
        pixels += rng.normal(size=pixels.shape) * noise
        picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert("RGB")
        picture.save(folder / f"{number}.jpg", quality=95)


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("noise", [0.0, 3.0])
def test_photographs_of_2_to_1_on_a_plain_background_are_no_panoramas(tmp_path, table, noise):
    """Their borders meet without showing the same place."""
    write_objects(tmp_path / "input", table, noise)
    photographs = described_photographs(tmp_path / "input", True)
    notes = []
    assert not are_panoramas(photographs, "auto", notes.append)
    assert "pass --panoramas True if they show all directions" in notes[0]
    assert are_panoramas(photographs, True)
    xmp = b'<x:xmpmeta GPano:ProjectionType="equirectangular"/>'
    for path in (tmp_path / "input").iterdir():
        Image.open(path).save(path, xmp=xmp)
    assert are_panoramas(described_photographs(tmp_path / "input", True), "auto")


def test_what_cannot_be_a_whole_panorama_is_refused_in_one_line(room, tmp_path, capsys):
    write_photographs(tmp_path / "input", 3)
    assert run_cli(entry.main, "-s", tmp_path, "--panoramas", "True") == 2
    told = capsys.readouterr().err.strip()
    assert told.endswith(
        "IMG 1.png: 240 x 180 px is no whole panorama, which is twice as wide as high; export it "
        "uncropped, or pass --panoramas False for ordinary photographs"
    )
    (tmp_path / "mixed").mkdir()
    xmp = b'<x:xmpmeta GPano:ProjectionType="equirectangular"/>'
    Image.open(room / "pano_0.jpg").save(tmp_path / "mixed" / "a.jpg", xmp=xmp)
    Image.open(room / "pano_1.jpg").crop((0, 0, 320, 320)).save(tmp_path / "mixed" / "b.jpg")
    with pytest.raises(UserError, match=r"1 of 2 photographs are panoramas \(a.jpg\); put them"):
        are_panoramas(described_photographs(tmp_path / "mixed", True), "auto")


def test_views_show_what_pinhole_cameras_there_would(tmp_path):
    # A panorama whose colours are the directions that it looks in.
    latitude, longitude = np.meshgrid(
        ((np.arange(256) + 0.5) / 256 - 0.5) * np.pi,
        ((np.arange(512) + 0.5) / 256 - 1) * np.pi,
        indexing="ij",
    )
    flat = np.cos(latitude)
    rays = np.stack([flat * np.sin(longitude), np.sin(latitude), flat * np.cos(longitude)], -1)
    (tmp_path / "input").mkdir()
    Image.fromarray((rays * 127 + 128).astype(np.uint8)).save(tmp_path / "input" / "p.png")
    photographs = described_photographs(tmp_path / "input", True)
    views, masks = write_views(photographs, [None], tmp_path / "views", 40.0, silent)
    assert [view.name for view in views] == [f"p_{face}.png" for face in FACES]
    for view, mask, rotation in zip(views, masks, FACES.values(), strict=True):
        size, half = view.width, view.focal
        assert (size, half) == (163, 81.5)
        at = (np.arange(size) + 0.5 - half) / half
        x, y = np.meshgrid(at, at)
        expected = np.stack([x, y, np.ones_like(x)], axis=-1)
        expected = expected / np.linalg.norm(expected, axis=-1, keepdims=True) @ np.array(rotation)
        shown = (np.asarray(Image.open(view.path)).astype(float) - 128) / 127
        assert np.abs(shown - expected).max() < 0.02
        counts = np.asarray(Image.open(mask.path)) >= 128
        # Straight down is y.
        assert (counts == (expected[..., 1] < np.sin(np.radians(50)))).mean() > 0.995
        assert mask.mode == "ignore"


def assert_poses_are_known(root: Path, n: int) -> None:
    """Compare the model of a scene with where its panoramas were taken."""
    known = {f"pano_{k}_front.jpg": pose_of(*pose) for k, pose in enumerate(poses(n))}
    errors = pose_errors(registered_poses(root / "sparse" / "0"), known)
    assert len(errors.rotation) == n
    # The cameras reach about a metre from their middle: half a percent is 5 mm.
    assert errors.position.max() < 0.5
    assert errors.rotation.max() < 0.1


@pytest.mark.slow
def test_poses_are_found_with_rigs(tmp_path):
    n = 4
    write_panoramas(tmp_path / "input", n, width=800)
    sfm = SfmOptions(max_features=FEATURES, features="sift")
    done = convert(ConvertOptions(tmp_path, sfm=sfm, masks=MaskOptions(mask_mode="ignore")))
    assert (done.outcome["registered"], done.outcome["photographs"]) == (6 * n, 6 * n)
    assert_poses_are_known(tmp_path, n)
    assert not (tmp_path / "masks").exists()


def test_the_photographer_needs_masks_that_say_nothing(room):
    options = ConvertOptions(room.parent, sfm=SfmOptions(photographer=20.0))
    with pytest.raises(UserError, match="--photographer: .* pass --mask_mode ignore"):
        convert(options)


@pytest.mark.slow
def test_from_panoramas_to_a_textured_mesh_in_one_command(tmp_path, small_pictures):
    """Without who carries the camera."""
    n = 4
    write_panoramas(tmp_path / "room" / "input", n, width=640, tripod=True)
    words = [
        *("-s", tmp_path / "room", "--output_dir", tmp_path / "output"),
        *("--photographer", TRIPOD + 1, "--mask_mode", "ignore", "--max_features", FEATURES),
        *("--features", "sift", "--init", "sparse"),
        *(*SHORT_PIPELINE, "--vanilla_iterations", 60_000, "--background_mesh", True),
    ]
    result = run_full(full_parser(None).parse_flags(list(map(str, words))))
    assert f"{6 * n} of {6 * n}" in result.report.read_text(encoding="utf-8")
    assert_poses_are_known(tmp_path / "room", n)
    assert len(list((tmp_path / "room" / "masks").glob("*.png"))) == 6 * n
    assert result.mesh.is_file()
