# SPDX-License-Identifier: Apache-2.0
"""GPS in the forms that programs write is read, or said to be unreadable; never guessed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from gaussian_splatting.data.cameras import Camera
from sugar_capture.gps.gps_tags import gps_of_metadata, read_gps
from sugar_maps.gps_photographs import gps_photographs
from sugar_utils.errors import UserError
from tests.support.survey import Capture, tag_with_gps
from tests.support.tiny_scene import tiny_cameras

TAGS = ExifTags.GPS
NAN = float("nan")
POSITION = (15.25, 48.75)


def tags_of(latitude, longitude, north: object = "N", east: object = "E", **others) -> dict:
    """A GPS directory of EXIF; references that are None are missing."""
    values = {
        TAGS.GPSLatitude: latitude,
        TAGS.GPSLatitudeRef: north,
        TAGS.GPSLongitude: longitude,
        TAGS.GPSLongitudeRef: east,
    }
    values.update({getattr(TAGS, name): value for name, value in others.items()})
    return {tag: value for tag, value in values.items() if value is not None}


@pytest.mark.parametrize(
    ("latitude", "longitude", "north", "east"),
    [
        ((48.0, 45.0, 0.0), (15.0, 15.0, 0.0), "N", "E"),
        ((48, 45.0000001, NAN), (15, 15.0000001, NAN), "N", "E"),
        (48.75, 15.25, b"N\0", b"E\0"),
        ((48.75,), (15.25,), "n", "e"),
        ((48.75, NAN, NAN), (15.25, 0.0, 0.0), "North", "East"),
        ("48.75", "15.25", "N", "E"),
        ("48,75000", "15,25000", "N", "E"),
        ("48/1,45/1,0/1", "15 15 0", "N", "E"),
        ("48,45.0N", "15,15.0E", None, None),
        ("48 deg 45' 0.00\" N", "15° 15' 0\" E", None, None),
        ("+48.75", "+15.25", None, None),
    ],
)
def test_forms_of_degrees_are_read(latitude, longitude, north, east):
    position = gps_of_metadata(tags_of(latitude, longitude, north, east), None).position
    assert position is not None
    assert position[:2] == pytest.approx(POSITION, abs=1e-6)


def test_hemispheres_have_signs():
    south = gps_of_metadata(tags_of(48.75, 15.25, "south", "W"), None).position
    assert south == (-15.25, -48.75, None)
    # Where the degrees have the sign as well, it does not count twice.
    assert gps_of_metadata(tags_of(-48.75, -15.25, "S", "W"), None).position == south
    assert gps_of_metadata(tags_of(-48.75, -15.25, None, None), None).position == south


@pytest.mark.parametrize(
    ("tags", "reason"),
    [
        (tags_of(48.75, 15.25, None), "latitude has no N or S"),
        (tags_of((48, 45, 0), (15, 15, 0), "N", None), "longitude has no E or W"),
        (tags_of(48.75, 15.25, "?"), "latitude has the hemisphere '?'"),
        (tags_of(-48.75, 15.25, "N"), "latitude is negative"),
        (tags_of("48.75 S", 15.25, "N"), "two hemispheres"),
        (tags_of((48, 45, NAN), (15, 15.2, NAN)), "latitude has seconds of 0/0"),
        (tags_of((48, NAN, 12.0), (15, 15.2, 0)), "latitude has minutes of 0/0"),
        (tags_of((NAN, NAN, NAN), (15, 15.2, 0)), "latitude has no degrees"),
        (tags_of((48, 75, 0), (15, 15, 0)), "latitude has 75 minutes"),
        (tags_of(95.0, 15.0), "out of range"),
        (tags_of(0.0, 0.0), "without a fix"),
        (tags_of(48.75, None, east=None), "longitude has no degrees"),
    ],
)
def test_what_cannot_be_known_is_no_position_and_has_a_reason(tags, reason):
    reading = gps_of_metadata(tags, None)
    assert reading.position is None
    assert reason in reading.problem


@pytest.mark.parametrize(
    ("reference", "sign"),
    [
        *((number, -1 if number in (1, 3) else 1) for number in range(4)),
        *((bytes([number]), -1 if number in (1, 3) else 1) for number in range(4)),
        *((str(number), -1 if number in (1, 3) else 1) for number in range(4)),
        (b"1", -1),
        ("1\0", -1),
        ("\x01", -1),
        ((3,), -1),
        ("Below Sea Level", -1),
        (None, 1),
        (7, None),
        ("?", None),
    ],
)
def test_altitudes_are_above_or_below_as_their_reference_says(reference, sign):
    tags = tags_of(48.75, 15.25, GPSAltitude=430.5, GPSAltitudeRef=reference)
    position = gps_of_metadata(tags, None).position
    assert position is not None
    assert position.altitude == (None if sign is None else sign * 430.5)


@pytest.mark.parametrize(
    ("altitude", "metres"),
    [("430.5 m", 430.5), ("4305/10", 430.5), ("430,5", 430.5), ("430 ft", None), (NAN, None)],
)
def test_altitudes_in_text_are_metres(altitude, metres):
    position = gps_of_metadata(tags_of(48.75, 15.25, GPSAltitude=altitude), None).position
    assert position is not None
    assert position.altitude == metres


def packet(attributes: str) -> bytes:
    """An XMP packet with attributes."""
    return f"<x:xmpmeta><rdf:Description {attributes}/></x:xmpmeta>".encode()


@pytest.mark.parametrize(
    ("xmp", "position"),
    [
        (
            packet(
                'drone-dji:GpsLatitude="+48.75" drone-dji:GpsLongtitude="-15.25" '
                'drone-dji:RelativeAltitude="+30.1" drone-dji:AbsoluteAltitude="+430.5"'
            ),
            (-15.25, 48.75, 430.5),
        ),
        (
            packet('Camera:GPSLatitude="48.75" Camera:GPSLongitude="15.25"'),
            (15.25, 48.75, None),
        ),
        (
            packet(
                'exif:GPSLatitude="48,45.0S" exif:GPSLongitude="15,15.0W" '
                'exif:GPSAltitude="4305/10" exif:GPSAltitudeRef="1"'
            ),
            (-15.25, -48.75, -430.5),
        ),
        (
            b"<drone-dji:GpsLatitude>48.75</drone-dji:GpsLatitude>"
            b"<drone-dji:GpsLongitude>15.25</drone-dji:GpsLongitude>",
            (15.25, 48.75, None),
        ),
        (packet('exif:GPSLatitude="48.75" exif:GPSLongitude="15.25"'), None),
        (packet('drone-dji:GpsLatitude="0.0" drone-dji:GpsLongitude="0.0"'), None),
    ],
)
def test_xmp_has_the_position_where_exif_has_none(xmp, position):
    assert gps_of_metadata({}, xmp).position == position


def test_the_altitude_of_xmp_counts_where_exif_has_none_or_zero():
    xmp = packet(
        'drone-dji:GpsLatitude="48.75" drone-dji:GpsLongitude="15.25" '
        'drone-dji:AbsoluteAltitude="+430.5"'
    )
    for altitude, expected in ((None, 430.5), (0.0, 430.5), (420.0, 420.0)):
        tags = tags_of(48.75, 15.2, GPSAltitude=altitude)
        assert gps_of_metadata(tags, xmp).position == (15.2, 48.75, expected)


def test_xmp_of_an_image_file_is_read(tmp_path):
    path = tmp_path / "a.jpg"
    xmp = packet('drone-dji:GpsLatitude="48.75" drone-dji:GpsLongitude="15.25"')
    Image.new("RGB", (8, 8)).save(path, xmp=xmp)
    assert read_gps(path).position == (15.25, 48.75, None)


def tagged_capture(root: Path, altitudes: list[float]) -> Capture:
    """Photographs beside each other, one for each altitude."""
    cameras: list[Camera] = []
    for number, camera in enumerate(tiny_cameras(len(altitudes))):
        path = root / camera.name
        Image.new("RGB", (8, 8)).save(path)
        tag_with_gps(path, 15.0 + 1e-4 * number, 48.75, altitudes[number])
        cameras.append(replace(camera, image_path=path))
    return Capture(root, cameras)


def test_an_altitude_of_zero_in_all_photographs_is_none(tmp_path):
    with pytest.raises(UserError, match="4 more have no altitude, or exactly 0"):
        gps_photographs(tagged_capture(tmp_path, [0.0] * 4), print)
    # In others it is none where no photograph was taken near 0.
    assert len(gps_photographs(tagged_capture(tmp_path, [0.0, 300.0, 310.0, 320.0]), print)) == 3
    assert len(gps_photographs(tagged_capture(tmp_path, [0.0, -1.0, 2.0, 3.0]), print)) == 4


def test_positions_that_cannot_be_read_are_counted_with_their_reasons(tmp_path):
    capture = tagged_capture(tmp_path, [300.0, 310.0, 320.0, 330.0, 340.0])
    notes: list[str] = []

    def damage(number: int, tags: dict) -> None:
        exif = Image.Exif()
        exif[ExifTags.IFD.GPSInfo] = tags
        path = capture.calibrated_cameras[number].image_file
        Image.new("RGB", (8, 8)).save(path, exif=exif)

    damage(0, tags_of((48.0, 45.0, 0.0), (15.0, 0.0, 0.0), None))
    assert len(gps_photographs(capture, notes.append)) == 4
    assert "1 have a position that cannot be read" in notes[0]
    assert "latitude has no N or S" in notes[0]
    damage(1, tags_of((0.0, 0.0, 0.0), (0.0, 0.0, 0.0)))
    damage(2, tags_of((48.0, 45.0, 0.0), (15.0, 0.0, 0.0), None))
    with pytest.raises(UserError, match="2 photographs have GPS") as error:
        gps_photographs(capture, notes.append)
    message = str(error.value)
    assert "3 have a position that cannot be read" in message
    assert "2 x latitude has no N or S" in message
    assert "\n" not in message


@pytest.mark.parametrize("folder", [".", "input", "distorted_by_another_program"])
def test_positions_are_those_of_the_originals_wherever_they_are(folder, tmp_path):
    capture = tagged_capture(tmp_path, [300.0, 310.0, 320.0])
    cameras = []
    for camera in capture.calibrated_cameras:
        original = tmp_path / folder / camera.name
        original.parent.mkdir(exist_ok=True)
        camera.image_file.rename(original)
        flat = tmp_path / "images" / camera.name
        flat.parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(flat)
        source = original if folder.startswith("distorted") else None
        cameras.append(replace(camera, image_path=flat, source_path=source))
    photographs = gps_photographs(Capture(tmp_path, cameras), print)
    np.testing.assert_allclose(photographs[1].position, [15.0001, 48.75, 310.0], atol=1e-6)


def test_positions_of_heic_originals_are_read(tmp_path):
    heif = pytest.importorskip("pillow_heif")
    capture = tagged_capture(tmp_path, [300.0, 310.0, 320.0])
    cameras = []
    for camera in capture.calibrated_cameras:
        with Image.open(camera.image_file) as image:
            copy = heif.from_pillow(image)
            copy.save(tmp_path / f"{camera.image_file.stem}.heic", exif=image.info["exif"])
        flat = tmp_path / "images" / f"{camera.image_file.stem}.jpg"
        flat.parent.mkdir(exist_ok=True)
        camera.image_file.unlink()
        Image.new("RGB", (8, 8)).save(flat)
        cameras.append(replace(camera, name=flat.name, image_path=flat))
    photographs = gps_photographs(Capture(tmp_path, cameras), print)
    np.testing.assert_allclose(photographs[2].position, [15.0002, 48.75, 320.0], atol=1e-6)


RUBBISH = [
    *("", b"", b"\0", "N", "S", b"W\0", 1, -3.5, NAN, float("inf"), 10**400, "9" * 500, True),
    *((1, 2, 3), (1,), (), (1, 2, 3, 4), ("a", 2, 3), ((1, 2), (3, 4), (5, 6)), (None,) * 3),
    *("48/0,1,2", "48,45.2N", "1e5", "0x10", "+", "-", object(), {}),
]


def test_rubbish_gives_possible_positions_or_none():
    rng = np.random.default_rng(4)
    n_read = 0
    for _ in range(3000):
        values = [RUBBISH[index] for index in rng.integers(0, len(RUBBISH), 6)]
        reading = gps_of_metadata(dict(enumerate(values, start=1)), None)
        assert (reading.position is None) == bool(reading.problem)
        if reading.position is not None:
            n_read += 1
            assert abs(reading.position.latitude) <= 90
            assert abs(reading.position.longitude) <= 180
    assert n_read > 0
