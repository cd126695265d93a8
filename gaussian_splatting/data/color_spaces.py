# SPDX-License-Identifier: Apache-2.0
"""Colours that are not sRGB, converted to it: HDR video, wide gamuts, ICC profiles.

Training, textures and pages take the values of images for sRGB. What a file declares about its
colours is read here: an ICC profile, code points of ITU-T H.273 (video, HEIC, AVIF and PNG), or
the Adobe RGB of cameras in EXIF. Values of files that declare sRGB, BT.709 or nothing stay as they
are.
"""

from __future__ import annotations

import contextlib
import functools
import io
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageCms

from sugar_utils.errors import UserError

Transfer = Literal["SDR", "linear", "HLG", "PQ"]
_D65 = (0.3127, 0.3290)
_BT709 = ((0.640, 0.330), (0.300, 0.600), (0.150, 0.060))
_BT2020 = ((0.708, 0.292), (0.170, 0.797), (0.131, 0.046))
_P3 = ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060))
_ADOBE_RGB = ((0.640, 0.330), (0.210, 0.710), (0.150, 0.060))
# Code points of H.273, tables 2 and 3. BT.601 differs too little from BT.709 to be converted; the
# transfer functions of SDR video are shown as sRGB is.
_SRGB_PRIMARIES = (0, 1, 2, 5, 6, 7)
_WIDE_PRIMARIES = {9: ("BT.2020", _BT2020), 11: ("P3", _P3), 12: ("P3", _P3)}
_SDR_TRANSFERS = (0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 14, 15)
_TRANSFERS: dict[int, Transfer] = {8: "linear", 16: "PQ", 18: "HLG"}
# Diffuse white: 75 % of an HLG signal, 203 cd/m^2 of a PQ signal (ITU-R BT.2408). Brighter is
# white.
_HLG_WHITE = 0.75
_PQ_WHITE = 203 / 10_000
_MOST = 65_535  # of the values between which linear light is looked up

_INTEROPERABILITY = 1  # tag of EXIF's directory of that name
_ADOBE_RGB_INDEX = "R03"  # its value for Adobe RGB (DCF 2.0)
_HEADER_BYTES = 1 << 16  # of a file, in which its code points are
_PNG_CODES = b"\x00\x00\x00\x04cICP"
_BMFF_CODES = b"colrnclx"
_PROFILE_MODES = {"RGB ": "RGB", "GRAY": "L", "CMYK": "CMYK"}  # of Pillow, by colour space of ICC
# Modes of Pillow that a profile of a mode is for.
_MODES = {"RGB": ("RGB", "RGBA", "RGBX", "P", "L"), "L": ("L", "LA"), "CMYK": ("CMYK",)}
_SAME = 2  # of 255, difference up to which a profile means sRGB
_KEPT_TRANSFORMS = 16


class ColorCodes(NamedTuple):
    """Code points of ITU-T H.273 that declare the colours of a file."""

    primaries: int
    transfer: int


@dataclass(frozen=True)
class ColorSpace:
    """A colour space with the white of sRGB that is not sRGB."""

    name: str
    primaries: Sequence[tuple[float, float]]  # chromaticities x, y of red, green, blue
    transfer: Transfer

    def to_srgb(self, values: np.ndarray) -> np.ndarray:
        """Convert an image to sRGB. (H, W, 3) uint8 or uint16 -> (H, W, 3) uint8"""
        codes = np.arange(np.iinfo(values.dtype).max + 1, dtype=np.float64)
        light = _linear_light(codes / codes[-1], self.transfer).astype(np.float32)[values]
        to_srgb = np.linalg.inv(_to_xyz(_BT709)) @ _to_xyz(self.primaries)
        light = light @ to_srgb.T.astype(np.float32)
        steps = np.rint(light.clip(0, 1) * _MOST).astype(np.uint16)
        return srgb_of_light(np.arange(_MOST + 1) / _MOST)[steps]


ADOBE_RGB = ColorSpace("Adobe RGB", _ADOBE_RGB, "SDR")


def color_space(codes: ColorCodes, path: object) -> ColorSpace | None:
    """Return the colour space of code points; None for sRGB, or where they say nothing.

    Args:
        path: The file, for messages.

    Raises:
        UserError: They mean colours that cannot be converted, such as the logarithm of light.
    """
    if codes.primaries in _SRGB_PRIMARIES and codes.transfer in _SDR_TRANSFERS:
        return None
    is_wide = codes.primaries in _WIDE_PRIMARIES
    is_known = is_wide or codes.primaries in _SRGB_PRIMARIES
    if not is_known or codes.transfer not in (*_SDR_TRANSFERS, *_TRANSFERS):
        raise UserError(
            f"{path}: its colours (primaries {codes.primaries}, transfer {codes.transfer} of ITU-T "
            "H.273) cannot be converted to sRGB; export it as SDR, in sRGB or BT.709"
        )
    gamut, primaries = _WIDE_PRIMARIES.get(codes.primaries, ("BT.709", _BT709))
    transfer = _TRANSFERS.get(codes.transfer, "SDR")
    return ColorSpace(f"{transfer}, {gamut}", primaries, transfer)


def declared_colors(image: Image.Image) -> str:
    """Return the name of the colours that an opened image declares; empty for sRGB."""
    declared = _declared(image)
    return "" if declared is None else declared.name


def srgb_of(image: Image.Image) -> Image.Image | None:
    """Convert the colours of an opened image of 8 bits to RGB in sRGB, without its transparency.

    Returns:
        The image; None where it declares sRGB, or nothing.
    """
    declared = _declared(image)
    if declared is None:
        return None
    if isinstance(declared, _Profile):
        return ImageCms.applyTransform(image.convert(declared.mode), declared.transform)
    return Image.fromarray(declared.to_srgb(np.asarray(image.convert("RGB"))))


class _Profile(NamedTuple):
    """An ICC profile that is not sRGB."""

    name: str
    mode: str  # of the images that it is for
    transform: ImageCms.ImageCmsTransform  # to RGB in sRGB


def _declared(image: Image.Image) -> _Profile | ColorSpace | None:
    """Return the colour space that an opened image declares; an ICC profile has priority."""
    content = image.info.get("icc_profile")
    if not content:
        return _declared_space(image) if image.mode in _MODES["RGB"] else None
    profile = _profile(content)
    return profile if profile is not None and image.mode in _MODES[profile.mode] else None


@functools.lru_cache(maxsize=_KEPT_TRANSFORMS)
def _profile(content: bytes) -> _Profile | None:
    """Return a profile; None for one that means sRGB, or cannot be used, as in viewers."""
    with contextlib.suppress(ImageCms.PyCMSError, OSError, ValueError, TypeError):
        source = ImageCms.ImageCmsProfile(io.BytesIO(content))
        profile: Any = source.profile
        mode = _PROFILE_MODES.get(profile.xcolor_space)
        if mode is None:
            return None
        intent = ImageCms.Intent.RELATIVE_COLORIMETRIC
        transform = ImageCms.buildTransform(
            source, ImageCms.createProfile("sRGB"), mode, "RGB", intent
        )
        if mode != "CMYK":
            samples = _samples().convert(mode)
            converted = np.asarray(ImageCms.applyTransform(samples, transform)).astype(int)
            if np.abs(converted - np.asarray(samples.convert("RGB"))).max() <= _SAME:
                return None
        name = " ".join(ImageCms.getProfileDescription(source).split())
        return _Profile(name or "an ICC profile", mode, transform)
    return None


def _samples() -> Image.Image:
    """Return an image with colours from all over RGB."""
    steps = np.linspace(0, 255, 9).astype(np.uint8)
    colors = np.stack(np.meshgrid(steps, steps, steps), axis=-1)
    return Image.fromarray(colors.reshape(27, 27, 3))


def _declared_space(image: Image.Image) -> ColorSpace | None:
    """Return the colour space of code points in a file, or of EXIF; None for sRGB."""
    path = getattr(image, "filename", "")
    codes = _codes_of(image, path)
    if codes is not None:
        return color_space(codes, path)
    with contextlib.suppress(Exception):  # damaged EXIF data declare nothing
        directory = image.getexif().get_ifd(ExifTags.IFD.Interop)
        index = str(directory.get(_INTEROPERABILITY, "")).strip(" \0")
        return ADOBE_RGB if index == _ADOBE_RGB_INDEX else None
    return None


def _codes_of(image: Image.Image, path: str) -> ColorCodes | None:
    """Return the code points of a HEIC, AVIF or PNG file; None where it has none."""
    entries = image.info.get("nclx_profile")
    if entries:
        return ColorCodes(entries["color_primaries"], entries["transfer_characteristics"])
    if not path or image.format not in ("PNG", "AVIF"):
        return None
    with Path(path).open("rb") as file:
        header = file.read(_HEADER_BYTES)
    marker = _PNG_CODES if image.format == "PNG" else _BMFF_CODES
    start = header.find(marker)
    data = header[start + len(marker) :][:4]
    if start < 0 or len(data) < 4:
        return None
    return ColorCodes(*(data[:2] if image.format == "PNG" else struct.unpack(">HH", data)))


def _to_xyz(primaries: Sequence[tuple[float, float]]) -> np.ndarray:
    """Return the matrix from linear RGB with the white of sRGB to CIE XYZ. (3, 3)"""
    columns = [[x / y, 1.0, (1 - x - y) / y] for x, y in (*primaries, _D65)]
    colors = np.array(columns[:3]).T
    return colors * np.linalg.solve(colors, np.array(columns[3]))


def _linear_light(signal: np.ndarray, transfer: Transfer) -> np.ndarray:
    """Return light, 1 for diffuse white, of a signal from 0 to 1."""
    if transfer == "HLG":
        return _hlg_light(signal) / _hlg_light(np.array(_HLG_WHITE))
    if transfer == "PQ":
        return _pq_light(signal) / _PQ_WHITE
    if transfer == "linear":
        return signal
    return light_of_srgb(signal)


def _hlg_light(signal: np.ndarray) -> np.ndarray:
    """Return the light of a scene (ITU-R BT.2100, table 5, inverse OETF)."""
    a = 0.17883277
    b = 1 - 4 * a
    c = 0.5 - a * np.log(4 * a)
    return np.where(signal <= 0.5, signal**2 / 3, (np.exp((signal - c) / a) + b) / 12)


def _pq_light(signal: np.ndarray) -> np.ndarray:
    """Return the light of a display, 1 for 10,000 cd/m^2 (ITU-R BT.2100, table 4, EOTF)."""
    m1 = 2610 / 16384
    m2 = 2523 / 4096 * 128
    c2 = 2413 / 4096 * 32
    c3 = 2392 / 4096 * 32
    c1 = c3 - c2 + 1
    power = signal ** (1 / m2)
    return (np.maximum(power - c1, 0) / (c2 - c3 * power)) ** (1 / m1)


def light_of_srgb(values: np.ndarray) -> np.ndarray:
    """Return linear light of sRGB values, both from 0 to 1 (IEC 61966-2-1)."""
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def srgb_of_light(light: np.ndarray) -> np.ndarray:
    """Return sRGB in 8 bits of linear light from 0 to 1 (IEC 61966-2-1)."""
    encoded = np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)
    return np.rint(255 * encoded).astype(np.uint8)
