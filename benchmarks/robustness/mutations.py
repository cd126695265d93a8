# SPDX-License-Identifier: Apache-2.0
"""Ways to corrupt files: bytes, text, JSON, images, checkpoints, and what is in a file's place.

Every function draws from the generator that it is given and from nothing else. Linux only.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import struct
import zlib
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

MANY_DIGITS = "7" * 5_000
DEEP = 100_000
NUMBERS = (
    "0",
    "-1",
    "1",
    "2",
    "-0.0",
    "0.5",
    "1e308",
    "-1e308",
    "1e-320",
    "1e400",
    "2147483648",
    "-2147483649",
    "4294967296",
    "9223372036854775808",
    "1e19",
    "NaN",
    "Infinity",
    "-Infinity",
    MANY_DIGITS,
)
STRINGS = (
    "",
    " ",
    ".",
    "..",
    "/",
    "//",
    "../../../..",
    "a\nb",
    "\x1b[31mred\x1b[0m",
    "\x00",
    "a\tb\r",
    "\u202egnp.exe",
    "\ufeff",
    "é" * 40,
    "x" * 300,
    "x" * 70_000,
    "C:\\images\\a.png",
    "None",
    "/dev/zero",
    "/proc/self/mem",
    "images",
    "view_01.png",
    "-1",
    "%s%n",
    "\ud800",
    "{}",
    "~",
)
_VALUES = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [1, 2],
    [[1, 2], [3]],
    {"a": {"b": []}},
    3,
    -1,
    0.25,
    ["a"],
    {"": None},
    [None] * 16,
    [[0.0] * 4] * 4,
    [["1"] * 4] * 4,
)
_RAW = "\ue000"
"""Delimits text that ``json.dumps`` cannot write, until it is written."""


def mutate_bytes(data: bytes, draw: Random) -> bytes:
    """Damage of disks, of transfers and of programs that write binary files."""
    kind = draw.choice(
        (
            "flip",
            "flip",
            "early",
            "cut",
            "extend",
            "repeat",
            "remove",
            "fill",
            "number",
            "number",
            "replace",
        )
    )
    first = draw.randrange(len(data) + 1)
    last = min(len(data), first + draw.choice((1, 4, 8, 64, 1000)))
    if kind in ("flip", "early"):
        changed, end = bytearray(data), len(data) if kind == "flip" else min(len(data), 512)
        for _ in range(draw.choice((1, 1, 2, 8, 64)) if data else 0):
            changed[draw.randrange(end)] ^= 1 << draw.randrange(8)
        return bytes(changed)
    if kind == "cut":
        return data[:first]
    if kind == "extend":
        return data + draw.choice((b"\0" * 100, draw.randbytes(100), data[:200], b"\n"))
    if kind == "repeat":
        return data[:last] + data[first:last] * draw.choice((1, 1, 20)) + data[last:]
    if kind == "remove":
        return data[:first] + data[last:]
    if kind == "fill":
        filling = draw.choice((b"\0", b"\xff", b" ", bytes([draw.randrange(256)])))
        return data[:first] + filling * (last - first) + data[last:]
    if kind == "replace":
        return draw.choice((b"", b"\0", b"\n", b"{}", b"[]", b"something else"))
    form, values = draw.choice(
        (
            ("<i", (0, -1, 1, 2**31 - 1, -(2**31))),
            ("<q", (0, -1, 2**31, 2**40, 2**63 - 1, -(2**63))),
            ("<d", (0.0, -1.0, float("nan"), float("inf"), 1e308, 1e-320)),
            ("<f", (float("nan"), float("-inf"), 3e38, -1.0)),
        )
    )
    number = struct.pack(form, draw.choice(values))
    # Fields are near the beginning of headers and records, mostly at multiples of 4.
    at = 4 * draw.randrange(len(data) // 4 + 1) if draw.random() < 0.7 else draw.randrange(80)
    return data[:at] + number + data[at + len(number) :]


def mutate_text(text: str, draw: Random) -> str:
    """Other numbers and words, lines removed, repeated or moved."""
    kind = draw.randrange(8)
    if kind < 5:
        number = kind < 4
        pattern = r"-?\d+(\.\d+)?([eE][-+]?\d+)?" if number else r"[A-Za-z_][\w./]*"
        found = list(re.finditer(pattern, text))
        chosen = draw.sample(found, min(len(found), draw.choice((1, 1, 2))))
        for match in sorted(chosen, key=lambda m: -m.start()):
            word = draw.choice(NUMBERS if number else (*STRINGS, *NUMBERS))
            text = text[: match.start()] + word + text[match.end() :]
        return text
    lines = text.splitlines(keepends=True) or [""]
    at = draw.randrange(len(lines))
    if kind == 5:
        del lines[at]
    elif kind == 6:
        lines.insert(draw.randrange(len(lines)), lines[at] * draw.choice((1, 3)))
    else:
        lines[at] = lines[at][: draw.randrange(len(lines[at]) + 1)] + draw.choice(("", "\n", "\0"))
    return "".join(lines)


def mutate_json(text: str, draw: Random) -> str:
    """Wrong types, values and keys at random places; still JSON, or almost."""
    value, raw = json.loads(text), []

    def junk(old: Any) -> Any:
        kind = draw.randrange(10)
        if kind < 3:
            raw.append(draw.choice(NUMBERS))
        elif kind == 3 and draw.random() < 0.5:
            opening, closing = draw.choice(("[]", ('{"a":', "}")))
            raw.append(opening * DEEP + "0" + closing * DEEP)
        else:
            return draw.choice(STRINGS) if kind < 6 else deepcopy(draw.choice(_VALUES))
        return f"{_RAW}{len(raw) - 1}{_RAW}"

    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        value, _ = _mutate(value, draw, junk, list(_places(value, (), draw)))
    written = json.dumps(value, ensure_ascii=True)
    for number, part in enumerate(raw):
        written = written.replace(json.dumps(f"{_RAW}{number}{_RAW}"), part)
    return written


def _places(value: Any, path: tuple, draw: Random) -> Iterator[tuple]:
    keys: Any = list(value) if isinstance(value, dict) else ()
    if isinstance(value, list):
        keys = sorted(draw.sample(range(len(value)), min(len(value), 12)))
    for key in keys:
        yield (*path, key)
        yield from _places(value[key], (*path, key), draw)


def _mutate(value: Any, draw: Random, junk: Any, places: list[tuple]) -> tuple[Any, str]:
    """Change one of some places of nested dictionaries and lists; the value, and what changed."""
    if not places or draw.random() < 0.04:
        other = junk(None)
        return other, f"all of it is {_shown(other)}"
    path = draw.choice(places)
    holder, key = value, path[-1]
    for step in path[:-1]:
        holder = holder[step]
    place, action = "".join(f"[{step!r}]" for step in path), draw.randrange(8)
    if action == 0:
        del holder[key]
        return value, f"{place} is missing"
    if action == 1 and isinstance(holder, list):
        holder.insert(key, holder[key])
        return value, f"{place} is repeated"
    if action == 1:
        holder[draw.choice(STRINGS)] = holder.pop(key)
        return value, f"{place} has another key"
    if action == 2 and isinstance(holder, dict):
        other = draw.choice(list(holder))
        holder[key], holder[other] = holder[other], holder[key]
        return value, f"{place} is swapped with {other!r}"
    holder[key] = junk(holder[key])
    return value, f"{place} is {_shown(holder[key])}"


def corrupt_checkpoint(path: Path, draw: Random) -> str:
    """Change the contents of a checkpoint, with checksums that are right."""
    contents, said = torch.load(path, weights_only=True), []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = list(_places(contents, (), draw))
        if places:
            # Each key of the file in turn, or the optimizer would be chosen nearly always.
            top = draw.choice(sorted({str(place[0]) for place in places}))
            places = [place for place in places if str(place[0]) == top]
        contents, what = _mutate(contents, draw, lambda old: _other_object(old, draw), places)
        said.append(what)
    torch.save(contents, path)
    return f"{path.name}: {'; '.join(said)}"


def _other_object(value: Any, draw: Random) -> Any:
    if isinstance(value, Tensor) and draw.random() < 0.75:
        return _other_tensor(value, draw)
    nested: Any = []
    for _ in range(200):
        nested = [nested]
    return draw.choice(
        (
            *deepcopy(_VALUES),
            0,
            2**31,
            2**63,
            -(2**70),
            10**4_999,
            -1.0,
            float("nan"),
            float("inf"),
            1e308,
            b"bytes",
            *draw.sample(STRINGS, 4),
            (),
            (1, 2),
            {0: {}},
            {1, 2},
            nested,
            torch.zeros(()),
            torch.zeros(0),
            torch.zeros(3, 3),
            torch.tensor(float("nan")),
            torch.Size([2, 3]),
            torch.float16,
        )
    )


def _other_tensor(tensor: Tensor, draw: Random) -> Tensor:
    """Another shape, type, layout or value."""
    types = torch.float64, torch.int64, torch.bool, torch.complex64, torch.bfloat16
    if tensor.layout != torch.strided or not tensor.dim() or not tensor.numel():
        return torch.zeros(tensor.shape, dtype=draw.choice(types))
    changed = tensor.clone()
    number = draw.choice((float("nan"), float("inf"), -1e30, -1.0, 1e9, 0.0))
    if not changed.is_floating_point():
        number = draw.choice((-1, 2**31 - 1, 10**6))
    changed.reshape(-1)[draw.randrange(changed.numel())] = number
    return draw.choice(
        (
            changed,
            changed,
            torch.full_like(tensor, number),
            tensor.to(draw.choice(types)),
            tensor[: len(tensor) // 2],
            torch.cat([tensor, tensor[:1]]),
            tensor.flatten(),
            tensor[..., None],
            tensor[:0],
            tensor.to_sparse(),
            torch.zeros((), dtype=tensor.dtype).expand(tensor.shape),
        )
    )


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.layout} tensor of {value.dtype} {tuple(value.shape)}"
    # Numbers of thousands of digits have no text.
    large = isinstance(value, int) and abs(value) > 10**30
    return "a large number" if large else f"{type(value).__name__} {value!r}"[:60]


_FORMATS = (
    ("PNG", ".png", "RGB"),
    ("PNG", ".png", "RGBA"),
    ("PNG", ".png", "LA"),
    ("PNG", ".png", "P"),
    ("PNG", ".png", "1"),
    ("PNG", ".png", "I;16"),
    ("JPEG", ".jpg", "RGB"),
    ("JPEG", ".jpeg", "L"),
    ("JPEG", ".jpg", "CMYK"),
    ("WEBP", ".webp", "RGBA"),
    ("TIFF", ".tif", "RGB"),
    ("TIFF", ".tiff", "I;16"),
    ("TIFF", ".tif", "F"),
    ("TIFF", ".tif", "LAB"),
    ("TIFF", ".tif", "I"),
    ("BMP", ".bmp", "RGB"),
    ("PPM", ".ppm", "RGB"),
    ("GIF", ".gif", "P"),
    ("JPEG2000", ".jp2", "RGB"),
)


def corrupt_image(path: Path, draw: Random) -> str:
    """Another format, damaged or not, or a PNG header of another size or depth."""
    if draw.random() < 0.15:
        sizes = (64, 48), (1, 1), (0, 48), (48, 64), (70_000, 1), (60_000, 45_000), (2**31 - 1,) * 2
        depths = (8, 2), (16, 2), (1, 0), (8, 6), (3, 2), (8, 3)
        facts = (*draw.choice(sizes), *draw.choice(depths))
        header = b"IHDR" + struct.pack(">IIBBBBB", *facts, 0, 0, 0)
        png = path.read_bytes()
        path.write_bytes(png[:12] + header + struct.pack(">I", zlib.crc32(header)) + png[33:])
        return f"{path.name}: PNG header {facts}"
    name, suffix, mode = draw.choice(_FORMATS)
    data, how = _encoded(path, name, mode, draw), "valid"
    if draw.random() < 0.8:
        data, how = mutate_bytes(data, draw), "damaged"
    path.unlink()
    target = path if draw.random() < 0.3 else path.with_suffix(suffix)
    target.write_bytes(data)
    return f"{target.name}: {name} of {mode}, {how}"


def _encoded(path: Path, name: str, mode: str, draw: Random) -> bytes:
    with Image.open(path) as image:
        rgb = image.convert("RGB")
    gray = np.asarray(rgb.convert("L")).astype(np.float32) / 255
    deep = {"I;16": (65535, np.uint16), "I": (2**31 - 1, np.int32), "F": (1e30, np.float32)}
    if mode in deep:
        scale, kind = deep[mode]
        image = Image.fromarray((gray.astype(np.float64) * scale).astype(kind))
    else:
        image = Image.merge("LAB", rgb.split()) if mode == "LAB" else rgb.convert(mode)
    options: dict = {}
    if name in ("JPEG", "PNG", "WEBP") and draw.random() < 0.3:
        exif = Image.Exif()
        exif[0x0112] = draw.choice((1, 3, 6, 8, 99))
        options["exif"] = draw.choice((exif.tobytes(), draw.randbytes(60)))
    if name in ("GIF", "TIFF", "WEBP", "PNG") and draw.random() < 0.2:
        options |= {"save_all": True, "append_images": [image, image]}
    buffer = io.BytesIO()
    image.save(buffer, name, **options)
    return buffer.getvalue()


IN_PLACE = (
    "nothing",
    "empty",
    "folder",
    "pipe",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "loop",
    "dangling",
    "parent",
    "/proc/self/mem",
    "socket",
)


def put_in_place(path: Path, what: str) -> None:
    """Something else where a file is expected."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    links = {"loop": path.name, "dangling": "nowhere", "parent": ".."}
    if what in links or what.startswith("/"):
        path.symlink_to(links.get(what, what))
    elif what == "empty":
        path.write_bytes(b"")
    elif what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "socket":
        os.mknod(path, 0o140644)
