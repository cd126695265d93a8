# SPDX-License-Identifier: Apache-2.0
"""Cameras of other programs are found, matched with the photographs, and kept as they are."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pycolmap
import pytest
from PIL import Image

from sugar_capture import scene_folder
from sugar_capture.conversion.convert_run import convert
from sugar_capture.convert_options import ConvertOptions, SfmOptions
from sugar_capture.features.photographs import described_photographs
from sugar_capture.known_cameras import find_cameras, read_cameras, the_cameras
from sugar_capture.registration import mapping
from sugar_capture.scene_folder import needs_cameras
from sugar_utils.errors import UserError
from tests.support.camera_files import (
    CENTERS,
    POSES,
    F,
    H,
    N,
    W,
    metashape,
    photographs,
    polycam,
    record3d,
)
from tests.support.command_words import parse
from tests.support.heard_console import Heard
from tests.support.photographed_room import (
    FOCAL,
    HEIGHT,
    WIDTH,
    camera_poses,
    model_bytes,
    write_photographs,
)

XML = metashape()


def test_images_by_other_names_and_of_other_sizes(tmp_path):
    labels = ["C:\\scan\\a.JPG", "images/b", "sub/c.png", "d.x"]
    (tmp_path / "cameras.xml").write_text(metashape(labels=labels))
    images = photographs(["a.jpg", "b.JPG", "sub/c.png", "other/c.png", "d.x.jpg"], W // 2, H // 2)
    known = read_cameras(the_cameras(None, tmp_path), images)
    assert [p.name for p in known.photographs] == ["a.jpg", "b.JPG", "sub/c.png", "d.x.jpg"]
    assert all((c.lens.width, c.lens.params[0]) == (W / 2, F / 2) for c in known.cameras)
    assert len(known.lens_groups()) == 1


def test_far_coordinates_are_moved_by_whole_units(tmp_path):
    far = np.array([500_123.4, 5_400_000.0, 321.0])
    (tmp_path / "cameras.xml").write_text(metashape([(r, c + far) for r, c in POSES]))
    known = read_cameras(the_cameras(None, tmp_path), photographs())
    assert known.offset == [round(x) for x in far + CENTERS.mean(axis=0)]
    for camera, center in zip(known.cameras, CENTERS, strict=True):
        np.testing.assert_allclose(camera.center + known.offset, center + far, atol=1e-8)


def test_which_cameras_are_meant(tmp_path):
    (tmp_path / "a.xml").write_text(XML)
    (tmp_path / "b.xml").write_text(XML)
    (tmp_path / "other.xml").write_text("<annotation/>")
    with pytest.raises(UserError, match=r"2 sets of cameras \(.*a.xml, .*b.xml\); name one with"):
        the_cameras(None, tmp_path)
    assert the_cameras("none", tmp_path) is None
    chosen = the_cameras(str(tmp_path / "b.xml"), tmp_path)
    assert chosen.name == f"Metashape: {tmp_path / 'b.xml'}"
    assert len(find_cameras(str(tmp_path), Path("elsewhere"))) == 2
    for wrong in ("other.xml", "gone.xml"):
        with pytest.raises(UserError, match=f"--cameras .*{wrong}: has no cameras of Metashape, R"):
            the_cameras(str(tmp_path / wrong), tmp_path)


def test_a_photograph_of_another_shape_is_refused(tmp_path):
    (tmp_path / "cameras.xml").write_text(XML)
    upright = [replace(p, turned=True) for p in photographs(width=H, height=W)]
    with pytest.raises(UserError, match="is 640 x 480 px, but IMG_0.jpg is 480 x 640 px when turn"):
        read_cameras(the_cameras(None, tmp_path), upright)


def test_photographs_that_exif_turns_by_half_a_turn_are_refused(tmp_path):
    (tmp_path / "cameras.xml").write_text(XML)
    images = photographs()
    turned = replace(images[1], turned=True, keeps_size=True)
    with pytest.raises(UserError, match=r"turn 1 photographs by 180 degrees \(IMG_1.jpg\)"):
        read_cameras(the_cameras(None, tmp_path), [images[0], turned, *images[2:]])
    # The size of another one fits only if the program turned photographs as EXIF says.
    on_its_side = replace(images[0], turned=True)
    known = read_cameras(the_cameras(None, tmp_path), [on_its_side, turned, *images[2:]])
    assert len(known.cameras) == 4


@pytest.mark.parametrize(("orientation", "keeps"), [(1, False), (3, True), (6, False), (2, True)])
def test_which_turns_keep_the_size(tmp_path, orientation, keeps):
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (8, 6)).save(tmp_path / "a.jpg", exif=exif)
    assert described_photographs(tmp_path, False)[0].keeps_size == keeps


SMALL = SfmOptions(extraction_size=WIDTH, max_features=500)
ROOM = 5


def room_xml(shift=(0.0, 0.0, 0.0), focal: float = FOCAL, n: int = ROOM) -> str:
    poses = [(r, c + shift) for r, c in camera_poses(ROOM)][:n]
    labels = [f"IMG {k}" for k in range(1, n + 1)]
    return metashape(poses, labels, focal, (WIDTH, HEIGHT))


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    """Photographs in ``images``, with Metashape's cameras of all but the last beside them."""
    root = tmp_path_factory.mktemp("known") / "room"
    write_photographs(root / "images", ROOM)
    (root / "cameras.xml").write_text(room_xml(n=ROOM - 1))
    return root


@pytest.fixture(scope="module")
def converted(room, tmp_path_factory) -> tuple[Path, list[str]]:
    root, console = tmp_path_factory.mktemp("converted") / "room", Heard()
    shutil.copytree(room, root)
    convert(ConvertOptions(root, sfm=SMALL), console)
    return root, console.lines


def assert_given_poses(root: Path, shift=(0.0, 0.0, 0.0), n: int = ROOM - 1) -> None:
    model = pycolmap.Reconstruction(str(root / "sparse" / "0"))
    found = {image.name: image for image in model.images.values()}
    assert len(found) == n
    for k, (rotation, center) in enumerate(camera_poses(ROOM)[:n], start=1):
        image = found[f"IMG {k}.png"]
        np.testing.assert_allclose(image.cam_from_world().rotation.matrix(), rotation, atol=1e-9)
        np.testing.assert_allclose(image.projection_center(), center + shift, atol=1e-9)
    assert model.num_points3D() > 100
    assert model.compute_mean_reprojection_error() < 1


def test_poses_are_kept_and_points_are_triangulated(converted):
    root, lines = converted
    assert (
        f"cameras of Metashape: {root / 'cameras.xml'}, {ROOM - 1} of {ROOM} photographs" in lines
    )
    assert_given_poses(root)
    outcome = json.loads((root / "distorted" / "outcome.json").read_text())
    assert outcome["cameras"] == f"Metashape: {root / 'cameras.xml'}"
    assert outcome["offset"] is None
    assert outcome["registered"] == outcome["photographs"] == ROOM - 1
    # Points lie on the three posters.
    points = pycolmap.Reconstruction(str(root / "sparse" / "0")).points3D.values()
    away = [np.abs(point.xyz).min() for point in points]
    assert np.median(away) < 0.01


def test_a_changed_file_makes_the_model_anew(converted, tmp_path):
    root = tmp_path / "room"
    shutil.copytree(converted[0], root)
    assert not needs_cameras(root)
    console = Heard()
    assert convert(ConvertOptions(root, sfm=SMALL), console).seconds == 0
    assert console.lines[-1].startswith(f"finished before: {ROOM - 1} of {ROOM - 1}")
    far = np.array([40_000.0, 0.0, 0.0])
    (root / "cameras.xml").write_text(room_xml(far, n=ROOM))
    assert needs_cameras(root)
    convert(ConvertOptions(root, sfm=SMALL), console)
    offset = json.loads((root / "distorted" / "outcome.json").read_text())["offset"]
    assert offset == [40_002, 2, 1]
    assert any(f"; {[40_002.0, 2.0, 1.0]} subtracted from all places" in x for x in console.lines)
    assert_given_poses(root, far - offset, ROOM)
    assert not needs_cameras(root)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "name"), [(mapping, "map_photographs"), (scene_folder, "publish")]
)
def test_what_was_cut_short_goes_on_to_the_same_bits(
    place, name, room, converted, tmp_path, monkeypatch
):
    root = tmp_path / "room"
    shutil.copytree(room, root)

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(place, name, dies)
    with pytest.raises(KeyboardInterrupt):
        convert(ConvertOptions(root, sfm=SMALL), Heard())
    monkeypatch.undo()
    convert(ConvertOptions(root, sfm=SMALL), Heard())
    assert model_bytes(root) == model_bytes(converted[0])


@pytest.mark.slow
def test_cameras_of_other_images_are_refused(room, tmp_path):
    root = tmp_path / "room"
    shutil.copytree(room, root)
    poses = list(reversed([(r, c) for r, c in camera_poses(ROOM)]))
    turned = [(np.roll(r, 1, axis=0), c) for r, c in poses]
    labels = [f"IMG {k}" for k in range(1, ROOM + 1)]
    (root / "cameras.xml").write_text(metashape(turned, labels, FOCAL, (WIDTH, HEIGHT)))
    with pytest.raises(UserError, match="cameras.xml: its cameras do not fit the photographs, of"):
        convert(ConvertOptions(root, sfm=SMALL), Heard())
    result = convert(ConvertOptions(root, sfm=replace(SMALL, cameras="none")), Heard())
    assert result.outcome["registered"] == ROOM
    assert not needs_cameras(root)


def test_cameras_that_a_flag_names(room, tmp_path, monkeypatch):
    root, other = tmp_path / "room", tmp_path / "other.xml"
    shutil.copytree(room, root)
    other.write_text(room_xml(n=3))
    monkeypatch.chdir(tmp_path)
    options = ConvertOptions(root, sfm=replace(SMALL, cameras="other.xml"))
    assert convert(options, Heard()).outcome["photographs"] == 3
    monkeypatch.chdir(root)
    assert not needs_cameras(root)
    other.write_text(room_xml(n=4))
    assert needs_cameras(root)
    other.unlink()
    assert not needs_cameras(root)


def test_captures_of_phones_are_scenes(tmp_path):
    assert parse(ConvertOptions, ["-s", "x", "--cameras", "a.xml"]).sfm.cameras == "a.xml"
    root = tmp_path / "scan"
    polycam(root)
    Image.new("RGB", (8, 8)).save(root / "thumbnail.jpg")
    write_photographs(root / "keyframes" / "corrected_images", N, name="IMG_{}.png")
    assert needs_cameras(root)
    source = scene_folder.find_source(root)
    assert source.folder == root / "keyframes" / "corrected_images"
    scene_folder.note(source)
    assert scene_folder.find_source(root) == source
    record = tmp_path / "other"
    write_photographs(record / "rgb", N, name="{}.png")
    assert not needs_cameras(record)
    (record / "metadata.json").write_text("{}")
    assert scene_folder.find_source(record).folder == record / "rgb"


def test_an_unpacked_r3d_of_record3d_is_a_scene(tmp_path):
    write_photographs(tmp_path / "rgbd", N, name="{}.jpg")
    (tmp_path / "rgbd" / "0.depth").write_bytes(b"x")
    assert not needs_cameras(tmp_path)
    (tmp_path / "metadata").write_text(json.dumps(record3d(), default=float))
    assert needs_cameras(tmp_path)
    source = scene_folder.find_source(tmp_path)
    assert source.folder == tmp_path / "rgbd"
    (cameras,) = find_cameras(None, source.folder, source.root)
    assert cameras.name == f"Record3D: {tmp_path / 'metadata'}"


@pytest.mark.slow
def test_a_real_scene_with_the_cameras_of_metashape(scenes_dir, tmp_path):
    """A dozen photographs of the fox with the cameras of its COLMAP model."""
    model = pycolmap.Reconstruction(str(scenes_dir / "fox" / "sparse" / "0"))
    images = sorted(model.images.values(), key=lambda image: image.name)[:12]
    (tmp_path / "fox" / "images").mkdir(parents=True)
    poses = []
    for image in images:
        shutil.copy(scenes_dir / "fox" / "images" / image.name, tmp_path / "fox" / "images")
        poses.append((image.cam_from_world().rotation.matrix(), image.projection_center()))
    lens = model.cameras[images[0].camera_id]
    fx, fy, cx, cy = lens.params
    size = lens.width, lens.height
    extra = f"<cx>{cx - size[0] / 2}</cx><cy>{cy - size[1] / 2}</cy><b1>{fx - fy}</b1>"
    text = metashape(poses, [image.name for image in images], fy, size, extra)
    (tmp_path / "fox" / "cameras.xml").write_text(text)
    sfm = SfmOptions(extraction_size=800, max_features=2000)
    result = convert(ConvertOptions(tmp_path / "fox", sfm=sfm), Heard())
    assert result.outcome["registered"] == 12
    assert result.outcome["points"] > 500
    assert result.outcome["reprojection_error"] < 1.5
    made = pycolmap.Reconstruction(str(tmp_path / "fox" / "sparse" / "0"))
    found = {image.name: image for image in made.images.values()}
    for image, (rotation, center) in zip(images, poses, strict=True):
        pose = found[image.name].cam_from_world()
        np.testing.assert_allclose(pose.rotation.matrix(), rotation, atol=1e-9)
        np.testing.assert_allclose(found[image.name].projection_center(), center, atol=1e-9)


def test_described_photographs_have_the_sizes_that_cameras_are_fitted_to(room):
    found = described_photographs(room / "images", True)
    known = read_cameras(the_cameras(None, room), found)
    assert [p.name for p in known.photographs] == [f"IMG {k}.png" for k in range(1, ROOM)]
