# SPDX-License-Identifier: Apache-2.0
"""GPS tracks of videos end in the EXIF data of their frames; damaged ones end in no positions."""

from __future__ import annotations

import contextlib
import io
import json

import numpy as np
import pytest

from sugar_capture.conversion.convert_inputs import read_inputs
from sugar_capture.convert_options import ConvertOptions
from sugar_capture.gps.gps_tags import read_gps
from sugar_capture.gps.video_positions import (
    position_of_text,
    positions_of_telemetry,
    video_track,
)
from sugar_capture.scene_folder import Source, Work
from sugar_capture.video_frames import CHOICE_FILE, extract_frames
from sugar_utils.console import Console
from tests.support.gps_videos import (
    ALTITUDE,
    FRAME_RATE,
    LONGITUDE,
    SECONDS,
    SPEED,
    latitude_at,
    srt_text,
    telemetry_packet,
    write_gps_video,
)


@contextlib.contextmanager
def quiet(title: str, total: int):
    yield lambda done: None


@pytest.mark.slow
@pytest.mark.parametrize("origin", ["GPS5", "GPS9", "SRT"])
def test_frames_have_the_position_of_their_moment(origin, tmp_path):
    video = write_gps_video(tmp_path / "walk.mp4", "none" if origin == "SRT" else origin)
    if origin == "SRT":
        (tmp_path / "walk.SRT").write_text(srt_text(SECONDS * FRAME_RATE))
    folder = tmp_path / "input"
    extract_frames(video, folder, 8, quiet)
    numbers = json.loads((folder / CHOICE_FILE).read_text())["frames"]
    assert len(numbers) == 8
    for number in numbers:
        position = read_gps(folder / f"frame_{number:05}.jpg").position
        expected = latitude_at(number / FRAME_RATE)
        assert position.latitude == pytest.approx(expected, abs=0.02 * SPEED)
        assert position.longitude == pytest.approx(LONGITUDE, abs=1e-6)
        assert position.altitude == pytest.approx(ALTITUDE, abs=1e-3)


def test_subtitles_of_drones_are_read_with_the_altitude_above_the_sea():
    text = "[latitude : 47.5] [longtitude : -8.25] [rel_alt: 12.0 abs_alt: 431.5]"
    assert position_of_text(text) == (-8.25, 47.5, 431.5)
    assert position_of_text("[latitude: 47.5] [longitude: 8.25] [rel_alt: 3.0]").altitude is None
    assert position_of_text("[latitude: 0.000000] [longitude: 0.000000]") is None
    assert position_of_text("[latitude: 95.0] [longitude: 8.0]") is None
    assert position_of_text("F/2.8, SS 320, ISO 100") is None


def triples(*lines: str) -> str:
    """An SRT file with a line for each second."""
    blocks = [
        f"{number}\n00:00:0{number},000 --> 00:00:0{number},900\nHOME(14.9,48.7)\n{line}\n"
        for number, line in enumerate(lines)
    ]
    return "\n".join(blocks)


@pytest.mark.parametrize(
    ("lines", "position"),
    [
        (["GPS(14.9995,48.7528,328.2) BAROMETER:28.2"], (14.9995, 48.7528, 328.2)),
        (["GPS (-122.3699, 37.8166, 15), D 24.26m"], (-122.3699, 37.8166, None)),
        (["GPS(14.9,48.7,16) BAROMETER:1.9", "GPS(14.9,48.7,17)"], (14.9, 48.7, None)),
        (["GPS(14.9,48.7,30) BAROMETER:1.9", "GPS(14.9,48.7,330)"], (14.9, 48.7, 30.0)),
        # Matrice 300 writes the latitude first, and the unit.
        (["GPS(36.6146,-6.1120,81.5M) BAROMETER:0.3M"], (-6.112, 36.6146, 81.5)),
        (["[latitude: 47,5] [longtitude: -8,25] [altitude: 431,5]"], (-8.25, 47.5, 431.5)),
        (["Lat: 47.5 Long: 8.25 abs_alt: 431.5"], (8.25, 47.5, 431.5)),
        (["GPS(0.0000,0.0000,0)"], None),
        (["GPS(14.9,95.0,300.5)"], None),
        (["ISO:100 Shutter:400"], None),
    ],
)
def test_lines_of_older_drones_have_the_longitude_first(lines, position, tmp_path):
    video = write_gps_video(tmp_path / "walk.mp4", "none")
    (tmp_path / "walk.SRT").write_text(triples(*lines), encoding="utf-16")
    track = video_track(video)
    if position is None:
        assert track is None
    else:
        assert track.points[0].position == position


@pytest.mark.parametrize("kind", ["GPS5", "GPS9"])
def test_positions_without_reception_do_not_count(kind):
    assert len(positions_of_telemetry(telemetry_packet(0, kind))) == 10
    assert positions_of_telemetry(telemetry_packet(0, kind, fix=0)) == []


@pytest.mark.parametrize("kind", ["GPS5", "GPS9"])
def test_damaged_telemetry_gives_possible_positions_or_none(kind):
    whole = telemetry_packet(0, kind)
    rng = np.random.default_rng(1)
    for _ in range(300):
        data = bytearray(whole)
        for place in rng.integers(0, len(data), 4):
            data[place] = rng.integers(0, 256)
        for position in positions_of_telemetry(bytes(data[: rng.integers(0, len(data) + 1)])):
            assert abs(position.latitude) <= 90
            assert abs(position.longitude) <= 180


def test_a_video_without_a_track_has_frames_without_positions(tmp_path):
    video = write_gps_video(tmp_path / "walk.mp4", "none")
    assert video_track(video) is None
    extract_frames(video, tmp_path / "input", 4, quiet)
    assert read_gps(next((tmp_path / "input").glob("*.jpg"))).position is None


def test_an_srt_without_positions_is_named_once(tmp_path):
    video = write_gps_video(tmp_path / "walk.mp4", "none")
    (tmp_path / "walk.SRT").write_text(triples("ISO:100 Shutter:400"))
    stream = io.StringIO()
    work = Work(
        Source(tmp_path / "walk", tmp_path / "walk" / "input", video),
        ConvertOptions(source_path=video),
        Console(stream=stream, terminal=False),
    )
    read_inputs(work)
    assert stream.getvalue().count("walk.SRT has no positions that can be read") == 1


def test_a_track_across_the_date_line_and_its_ends(tmp_path):
    lines = srt_text(4).replace(f"{LONGITUDE:.6f}", "179.999900", 1)
    video = write_gps_video(tmp_path / "walk.mp4", "none")
    (tmp_path / "walk.srt").write_text(lines.replace(f"{LONGITUDE:.6f}", "-179.999900"))
    track = video_track(video)
    assert abs(track.at(0.05).longitude) == pytest.approx(180.0, abs=1e-6)
    assert track.at(1.2) == track.at(0.3)
    assert track.at(1.4) is None
