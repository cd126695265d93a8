# SPDX-License-Identifier: Apache-2.0
"""Colours that a photograph or a video declares are converted to sRGB; sRGB stays."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image, ImageCms

from gaussian_splatting.data.images import decode_image
from sugar_capture.features.photographs import described_photographs, read_upright
from sugar_capture.scene_folder import Original, write_flat_pictures
from sugar_capture.video_frames import extract_frames
from sugar_utils.errors import UserError

COLORS = np.array([[200, 100, 50], [70, 160, 80], [60, 60, 180], [128, 128, 128]], np.uint8)
SRGB_TO_P3 = np.array(
    [[0.8224621, 0.1775380, 0], [0.0331941, 0.9668058, 0], [0.0170827, 0.0723974, 0.9105199]]
)
"""CSS Color 4, section 10.9."""

P3_COLORANTS = (
    (0.51512, 0.24120, -0.00105),
    (0.29198, 0.69225, 0.04189),
    (0.15710, 0.06657, 0.78407),
)
SRGB_COLORANTS = (
    (0.43607, 0.22249, 0.01392),
    (0.38515, 0.71687, 0.09708),
    (0.14307, 0.06061, 0.71410),
)
BT709_TO_BT2020 = np.array(
    [[0.6274, 0.3293, 0.0433], [0.0691, 0.9195, 0.0114], [0.0164, 0.0880, 0.8956]]
)
"""ITU-R BT.2087, table 2."""


@contextlib.contextmanager
def quiet(title: str, total: int):
    yield lambda done: None


def stripes(colors: np.ndarray, size: int = 64) -> np.ndarray:
    """An image with a stripe of each colour. (size, size, 3)"""
    return np.repeat(np.repeat(colors[None], size // len(colors), axis=1), size, axis=0)


def middles(image: np.ndarray) -> np.ndarray:
    """The colours of the stripes of an image. (4, 3) int"""
    return image[32, 8::16].astype(int)


def linear_light(colors: np.ndarray) -> np.ndarray:
    """Light of colours in sRGB."""
    values = colors / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def in_p3(colors: np.ndarray) -> np.ndarray:
    """Colours of sRGB in Display P3."""
    light = linear_light(colors) @ SRGB_TO_P3.T
    return np.rint(255 * (1.055 * light ** (1 / 2.4) - 0.055)).astype(np.uint8)


def profile(colorants, name: str = "Display P3") -> bytes:
    """An ICC profile with the curve of sRGB."""

    def fixed(*values: float) -> bytes:
        return b"".join(struct.pack(">i", round(value * 65536)) for value in values)

    curve = b"para\0\0\0\0\0\x03\0\0" + fixed(2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)
    text = name.encode("utf-16-be")
    words = struct.pack(">4sIII2s2sII", b"mluc", 0, 1, 12, b"en", b"US", len(text), 28) + text
    tags = {b"desc": words, b"wtpt": b"XYZ \0\0\0\0" + fixed(0.9642, 1, 0.8249)}
    for letter, colorant in zip(b"rgb", colorants, strict=True):
        tags[bytes([letter]) + b"XYZ"] = b"XYZ \0\0\0\0" + fixed(*colorant)
        tags[bytes([letter]) + b"TRC"] = curve
    table = struct.pack(">I", len(tags))
    content = b""
    start = 128 + 4 + 12 * len(tags)
    for tag, value in tags.items():
        table += struct.pack(">4sII", tag, start + len(content), len(value))
        content += value + b"\0" * (-len(value) % 4)
    header = struct.pack(">II4s4s4s", start + len(content), 0, b"\x04\0\0\0", b"mntr", b"RGB ")
    header = header[:4] + b"\0\0\0\0" + b"\x04\0\0\0" + b"mntr" + b"RGB " + b"XYZ "
    header += b"\0" * 12 + b"acsp" + b"\0" * 28 + fixed(0.9642, 1, 0.8249)
    return header.ljust(128, b"\0") + table + content


def hdr_signal(colors: np.ndarray, transfer: str) -> np.ndarray:
    """HLG or PQ with BT.2020 of colours in sRGB, whose white is 75 % of HLG, 203 cd/m^2 of PQ."""
    light = linear_light(colors) @ BT709_TO_BT2020.T
    if transfer == "PQ":
        power = (light * 203 / 10000) ** 0.1593017578125
        return ((0.8359375 + 18.8515625 * power) / (1 + 18.6875 * power)) ** 78.84375
    light = light * 0.26496
    logarithm = 0.17883277 * np.log(np.maximum(12 * light - 0.28466892, 1e-9)) + 0.55991073
    return np.where(light <= 1 / 12, np.sqrt(3 * light), logarithm)


def write_hdr_video(path: Path, transfer: str, color_range: str = "tv") -> Path:
    """Five frames of 10 bits that differ."""
    number = {"PQ": 16, "HLG": 18}[transfer]
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=5)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p10le"
        context = stream.codec_context
        context.color_primaries = 9
        context.color_trc = number
        context.colorspace = 9
        context.color_range = 2 if color_range == "pc" else 1
        for turn in range(5):
            signal = hdr_signal(stripes(np.roll(COLORS, turn, axis=0)), transfer)
            red, green, blue = np.moveaxis(signal, -1, 0)
            luma = 0.2627 * red + 0.678 * green + 0.0593 * blue
            chroma = [(blue - luma) / 1.8814, (red - luma) / 1.4746]
            spans = (0, 1023, 1023) if color_range == "pc" else (64, 876, 896)
            planes = [spans[0] + spans[1] * luma, *(512 + spans[2] * part for part in chroma)]
            planes[1:] = [plane[::2, ::2].reshape(16, 64) for plane in planes[1:]]
            values = np.concatenate(planes).round().clip(0, 1023).astype(np.uint16)
            frame = av.VideoFrame.from_ndarray(values, format="yuv420p10le")
            frame.colorspace = 9
            frame.color_range = context.color_range
            frame.color_trc = number
            frame.color_primaries = 9
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize(("transfer", "color_range"), [("HLG", "tv"), ("PQ", "tv"), ("HLG", "pc")])
def test_frames_of_hdr_video_are_srgb(tmp_path, transfer, color_range):
    video = write_hdr_video(tmp_path / "IMG_0042.mkv", transfer, color_range)
    choice = extract_frames(video, tmp_path / "input", 5, quiet)
    assert choice.colors == f"{transfer}, BT.2020"
    with Image.open(tmp_path / "input" / "frame_00000.jpg") as frame:
        assert np.abs(middles(np.asarray(frame)) - COLORS).max() <= 6


def test_a_video_of_unknown_colours_is_refused_before_anything_is_written(tmp_path):
    video = write_hdr_video(tmp_path / "log.mkv", "HLG")
    content = video.read_bytes()
    # The transfer of Matroska (0x55BA, one byte): 9, a logarithm.
    assert b"\x55\xba\x81\x12" in content
    video.write_bytes(content.replace(b"\x55\xba\x81\x12", b"\x55\xba\x81\x09"))
    with pytest.raises(UserError, match=r"log.mkv: its colours .*transfer 9.* export it as SDR"):
        extract_frames(video, tmp_path / "input", 5, quiet)
    assert not list((tmp_path).glob("input/*"))


def write_in_p3(path: Path, **tags: object) -> Path:
    Image.fromarray(stripes(in_p3(COLORS))).save(path, icc_profile=profile(P3_COLORANTS), **tags)
    return path


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.tif", "a.avif", "a.webp"])
def test_photographs_with_a_profile_are_srgb(tmp_path, name):
    path = write_in_p3(tmp_path / name, quality=98)
    assert np.abs(middles(decode_image(path, 64, 64)) - COLORS).max() <= 8
    (described,) = described_photographs(tmp_path, True)
    assert described.depth == "Display P3"
    assert np.abs(middles(np.asarray(read_upright(path))) - COLORS).max() <= 8


def test_transparency_stays_where_colours_are_converted(tmp_path):
    pixels = np.dstack([stripes(in_p3(COLORS)), np.full((64, 64), 77, np.uint8)])
    Image.fromarray(pixels).save(tmp_path / "a.png", icc_profile=profile(P3_COLORANTS))
    upright = np.asarray(read_upright(tmp_path / "a.png"))
    assert np.abs(middles(upright[..., :3]) - COLORS).max() <= 2
    assert (upright[..., 3] == 77).all()


def test_copies_of_photographs_in_other_colours_are_srgb(tmp_path):
    path = write_in_p3(tmp_path / "a.png")
    (described,) = described_photographs(tmp_path, True)
    model = one_image_model()
    write_flat_pictures(
        model, {"a.png": Original(described, None, "a.png")}, tmp_path / "o", False, lambda n: None
    )
    with Image.open(tmp_path / "o" / "images" / "a.png") as copy:
        assert "icc_profile" not in copy.info
        assert np.abs(middles(np.asarray(copy)) - COLORS).max() <= 2
    assert path.is_file()


def one_image_model():
    """Stand-in of a pycolmap.Reconstruction of one photograph without distortion."""

    class Model:
        images = {1: type("Image", (), {"name": "a.png", "camera_id": 1})}
        cameras = {1: type("Lens", (), {"is_undistorted": staticmethod(lambda: True)})}

        def reg_image_ids(self):
            return [1]

    return Model()


@pytest.mark.parametrize(
    "content",
    [
        ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes(),
        profile(SRGB_COLORANTS, "c2"),
        b"no profile",
    ],
)
def test_bits_of_photographs_in_srgb_stay(tmp_path, content):
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png", icc_profile=content)
    np.testing.assert_array_equal(decode_image(tmp_path / "a.png", 64, 64), pixels)
    (described,) = described_photographs(tmp_path, True)
    assert described.depth == ""


def test_adobe_rgb_of_cameras_is_read_from_exif(tmp_path):
    exif = Image.Exif()
    exif[0x8769] = {0xA005: {1: "R03"}}
    pixels = stripes(COLORS)
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    converted = middles(decode_image(tmp_path / "a.png", 64, 64))
    assert converted[0, 0] > 210
    assert np.abs(converted[3] - 128).max() <= 1


def test_png_in_pq_is_srgb(tmp_path):
    signal = np.rint(255 * hdr_signal(stripes(COLORS), "PQ")).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(signal).save(buffer, format="PNG")
    content = buffer.getvalue()
    chunk = b"cICP" + bytes([9, 16, 0, 1])
    chunk = struct.pack(">I", 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    (tmp_path / "a.png").write_bytes(content[:33] + chunk + content[33:])
    # A step of 8 bits of PQ is several of sRGB.
    assert np.abs(middles(decode_image(tmp_path / "a.png", 64, 64)) - COLORS).max() <= 8
