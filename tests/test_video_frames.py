# SPDX-License-Identifier: Apache-2.0
"""A video becomes photographs: sharp ones, upright, no two alike; what cannot is one line."""

from __future__ import annotations

import contextlib
import itertools
import json
import struct
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image, ImageFilter

from sugar_capture.conversion.convert_run import convert
from sugar_capture.convert_options import ConvertOptions, SfmOptions
from sugar_capture.scene_folder import needs_cameras, scene_root
from sugar_capture.video_frames import choose_frames, extract_frames
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from tests.support.photographed_room import HEIGHT, WIDTH, camera_poses, photograph


@contextlib.contextmanager
def quiet(title: str, total: int):
    yield lambda done: None


def write_video(path: Path, pictures: list[np.ndarray], repeat: int = 1) -> Path:
    """A video of pictures, each shown ``repeat`` times."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height = pictures[0].shape[1], pictures[0].shape[0]
        stream.pix_fmt = "yuv420p"
        stream.bit_rate = 6_000_000
        for picture in itertools.chain.from_iterable([p] * repeat for p in pictures):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return path


def blurred(pixels: np.ndarray) -> np.ndarray:
    return np.asarray(Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(3)))


@pytest.fixture(scope="module")
def pictures() -> list[np.ndarray]:
    return [photograph(*pose) for pose in camera_poses(8)]


def numbers_in(folder: Path) -> list[int]:
    return sorted(int(path.stem.rpartition("_")[2]) for path in folder.glob("frame_*.jpg"))


def test_the_sharpest_frame_of_each_interval_is_taken(pictures, tmp_path):
    shown = [p if k % 2 else blurred(p) for k, p in enumerate(pictures)]
    video = write_video(tmp_path / "walk.mp4", shown)
    choice = extract_frames(video, tmp_path / "input", 4, quiet)
    assert choice.frames == [1, 3, 5, 7]
    assert numbers_in(tmp_path / "input") == choice.frames
    with Image.open(tmp_path / "input" / "frame_00003.jpg") as frame:
        difference = np.asarray(frame).astype(int) - pictures[3]
    assert np.abs(difference).mean() < 8


def test_frames_in_which_nothing_moved_are_left_out(pictures, tmp_path):
    video = write_video(tmp_path / "slow.mp4", pictures[:4], repeat=5)
    choice = extract_frames(video, tmp_path / "input", 20, quiet)
    assert [number // 5 for number in choice.frames] == [0, 1, 2, 3]
    assert (choice.of, choice.repeated) == (20, 16)


def test_a_choice_cut_short_goes_on(pictures, tmp_path):
    video = write_video(tmp_path / "walk.mp4", pictures)
    folder = tmp_path / "input"
    extract_frames(video, folder, 6, quiet)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / sorted(before)[2]).unlink()
    extract_frames(video, folder, 6, quiet)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    extract_frames(video, folder, 3, quiet)
    assert json.loads((folder / "frames.json").read_text())["wanted"] == 3
    assert len(numbers_in(folder)) == 3


def test_no_frame_of_a_replaced_video_survives(pictures, tmp_path):
    video, folder = tmp_path / "walk.mp4", tmp_path / "input"
    for shown in (pictures, pictures[::-1]):
        write_video(video, shown)
        # Name and size of both are the same.
        video.write_bytes(video.read_bytes().ljust(1 << 20, b"\0"))
        extract_frames(video, folder, 8, quiet)
    with Image.open(folder / "frame_00001.jpg") as frame:
        assert np.abs(np.asarray(frame).astype(int) - pictures[6]).mean() < 8


def test_frames_are_turned_as_the_phone_was_held(pictures, tmp_path):
    video = write_video(tmp_path / "portrait.mp4", pictures[:4])
    data = video.read_bytes()
    one, zero = struct.pack(">i", 1 << 16), struct.pack(">i", 0)
    plain = one + zero * 3 + one + zero * 3
    at = data.index(plain, data.index(b"tkhd"))
    # Shown after a quarter turn clockwise: (x, y) goes to (-y, x).
    turned = zero + one + zero + struct.pack(">i", -(1 << 16)) + zero * 4
    video.write_bytes(data[:at] + turned + data[at + len(turned) :])
    extract_frames(video, tmp_path / "input", 4, quiet)
    with Image.open(tmp_path / "input" / "frame_00000.jpg") as frame:
        assert frame.size == (HEIGHT, WIDTH)
        back = np.asarray(frame.transpose(Image.Transpose.ROTATE_90)).astype(int)
    assert np.abs(back - pictures[0]).mean() < 8


def test_a_video_that_a_phone_trimmed_is_not_damaged(pictures, tmp_path):
    video = write_video(tmp_path / "trimmed.mp4", pictures, repeat=4)
    data = bytearray(video.read_bytes())
    # Durations in the header of the film, of its track, and in the list of edits.
    for name, offset in ((b"mvhd", 20), (b"tkhd", 24), (b"elst", 12)):
        place = data.index(name) + offset
        (duration,) = struct.unpack_from(">I", data, place)
        struct.pack_into(">I", data, place, duration // 2)
    video.write_bytes(data)
    assert extract_frames(video, tmp_path / "input", 4, quiet).of == 16


def test_choosing_from_nothing_is_nothing():
    assert choose_frames(iter(()), 5, "").frames == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path, p: write_video(path, [p[0]], repeat=20), "20 frames, of which only 1 differ"),
        (lambda path, p: path.write_bytes(b"no video" * 500), "cannot be read as a video"),
        (lambda path, p: path.write_bytes(b""), "cannot be read as a video"),
        (lambda path, p: _damaged(write_video(path, p * 3)), "the video is damaged"),
        (lambda path, p: _sound(path), "only sound"),
    ],
    ids=["still", "malformed", "empty", "damaged", "sound"],
)
def test_what_is_no_video_of_a_walk_is_one_line(make, message, pictures, tmp_path):
    path = tmp_path / "a.mp4"
    make(path, pictures)
    with pytest.raises(UserError, match=message):
        extract_frames(path, tmp_path / "input", 50, quiet)
    assert numbers_in(tmp_path / "input") == []


def _damaged(path: Path) -> None:
    """Overwrite the middle of the pictures; the index stays."""
    data = bytearray(path.read_bytes())
    start = data.index(b"mdat") + 2000
    end = data.index(b"moov") - 2000
    data[start:end] = bytes(end - start)
    path.write_bytes(data)


def _sound(path: Path) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16_000)
        frame = av.AudioFrame.from_ndarray(
            np.zeros((1, 1024), np.float32), format="fltp", layout="mono"
        )
        frame.sample_rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())


@pytest.mark.slow
def test_a_video_becomes_a_scene_beside_it(pictures, tmp_path):
    video = write_video(tmp_path / "walk.mp4", pictures)
    assert scene_root(video) == tmp_path / "walk"
    assert needs_cameras(video)
    options = ConvertOptions(video, sfm=SfmOptions(extraction_size=WIDTH, max_features=1000))
    with Console.silent() as console:
        result = convert(options, console)
        assert result.root == tmp_path / "walk"
        assert result.outcome["registered"] == 8
        assert not needs_cameras(video)
        assert convert(options, console).seconds == 0
    write_video(video, pictures[::-1])
    assert needs_cameras(video)
    assert needs_cameras(tmp_path / "walk")


def test_a_video_and_photographs_are_not_mixed(pictures, tmp_path):
    video = write_video(tmp_path / "walk.mp4", pictures[:3])
    (tmp_path / "walk" / "input").mkdir(parents=True)
    Image.fromarray(pictures[0]).save(tmp_path / "walk" / "input" / "mine.png")
    with pytest.raises(UserError, match="holds other photographs than frames of walk.mp4"):
        convert(ConvertOptions(video), Console.silent())
