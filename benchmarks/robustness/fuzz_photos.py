# SPDX-License-Identifier: Apache-2.0
"""Photographs in every format and depth, whole and spoiled."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image

from benchmarks.robustness.fuzz_mutations import mutate_bytes

_FORMATS = (
    ("PNG", ".png", "RGB"), ("PNG", ".png", "RGBA"), ("PNG", ".png", "LA"), ("PNG", ".png", "P"),
    ("PNG", ".png", "1"), ("PNG", ".png", "I;16"), ("JPEG", ".jpg", "RGB"), ("JPEG", ".jpeg", "L"),
    ("JPEG", ".jpg", "CMYK"), ("WEBP", ".webp", "RGBA"), ("WEBP", ".webp", "RGB"),
    ("TIFF", ".tif", "RGB"), ("TIFF", ".tiff", "I;16"), ("TIFF", ".tif", "F"),
    ("TIFF", ".tif", "CMYK"), ("TIFF", ".tif", "LAB"), ("BMP", ".bmp", "RGB"),
    ("PPM", ".ppm", "RGB"), ("GIF", ".gif", "P"), ("JPEG2000", ".jp2", "RGB"),
    ("TIFF", ".tif", "I"),
)  # fmt: skip
_SIZES = ((64, 48), (128, 96), (1, 1), (0, 48), (48, 64), (70_000, 1), (60_000, 45_000),
          (2**31 - 1, 2**31 - 1), (63, 48))  # fmt: skip


def spoil_photo(path: Path, draw: Random) -> str:
    """Replace a photograph and say how."""
    if draw.random() < 0.15:
        path.write_bytes(_with_header(path.read_bytes(), draw))
        return f"{path.name}: another PNG header"
    name, suffix, mode = draw.choice(_FORMATS)
    data = _encoded(path, name, mode, draw)
    how = "whole"
    if draw.random() < 0.8:
        data, how = mutate_bytes(data, draw), "spoiled"
    path.unlink()
    target = path if draw.random() < 0.3 else path.with_suffix(suffix)
    target.write_bytes(data)
    return f"{target.name}: {name} of {mode}, {how}"


def _encoded(path: Path, name: str, mode: str, draw: Random) -> bytes:
    with Image.open(path) as image:
        rgb = image.convert("RGB")
    deep = np.asarray(rgb.convert("L")).astype(np.float64) / 255
    if mode == "I;16":
        image = Image.fromarray((deep * 65535).astype(np.uint16))
    elif mode == "I":
        image = Image.fromarray((deep * (2**31 - 1)).astype(np.int32))
    elif mode == "F":
        values = (deep * draw.choice((1, 1e30))).astype(np.float32)
        values[0, 0] = draw.choice((0.5, np.nan, np.inf))
        image = Image.fromarray(values)
    elif mode == "LAB":
        image = Image.merge("LAB", rgb.split())
    else:
        image = rgb.convert(mode)
    options: dict = {}
    if draw.random() < 0.3 and name in ("JPEG", "PNG", "WEBP"):
        exif = Image.Exif()
        exif[0x0112] = draw.choice((1, 3, 6, 8, 99))
        options["exif"] = draw.choice((exif.tobytes(), draw.randbytes(60)))
    if draw.random() < 0.2 and name in ("JPEG", "PNG", "TIFF"):
        options["icc_profile"] = draw.randbytes(200)
    if draw.random() < 0.2 and name in ("GIF", "TIFF", "WEBP", "PNG"):
        options |= {"save_all": True, "append_images": [image, image]}
    buffer = io.BytesIO()
    image.save(buffer, name, **options)
    return buffer.getvalue()


def _with_header(png: bytes, draw: Random) -> bytes:
    """A PNG that claims another size or depth, with a checksum that is right."""
    width, height = draw.choice(_SIZES)
    depth, colour = draw.choice(((8, 2), (8, 2), (16, 2), (1, 0), (8, 6), (3, 2), (8, 3)))
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return png[:12] + header + struct.pack(">I", zlib.crc32(header)) + png[33:]
