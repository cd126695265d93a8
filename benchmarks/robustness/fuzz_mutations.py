# SPDX-License-Identifier: Apache-2.0
"""Ways to spoil files: bytes, numbers in text, JSON by its structure, and what lies in their place.

Every function draws from the generator it is given and from nothing else. Linux only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

MANY_DIGITS = "7" * 5_000
DEEP = 100_000
NUMBERS = (
    "0", "-1", "1", "2", "-0.0", "0.5", "1e308", "-1e308", "1e-320", "1e400", "2147483648",
    "-2147483649", "4294967296", "9223372036854775808", "1e19", "NaN", "Infinity", "-Infinity",
    MANY_DIGITS,
)  # fmt: skip
STRINGS = (
    "", " ", ".", "..", "/", "//", "../../../..", "a\nb", "\x1b[31mred\x1b[0m", "\x00", "a\tb\r",
    "\u202egnp.exe", "\ufeff", "é" * 40, "x" * 300, "x" * 70_000, "C:\\images\\a.png", "None",
    "/dev/zero", "/proc/self/mem", "images", "view_01.png", "-1", "%s%n", "\ud800", "{}", "~",
)  # fmt: skip
_RAW = "\ue000"
"""Stands for text that ``json.dumps`` cannot write, until it is written."""

_PLACES = 12


def mutate_bytes(data: bytes, draw: Random) -> bytes:
    """Damage of disks, of transfers and of programs that write binary files."""
    return draw.choice(_BYTE_MUTATORS)(data, draw)


def _flip_bits(data: bytes, draw: Random) -> bytes:
    spoiled = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8, 64)) if data else 0):
        spoiled[draw.randrange(len(spoiled))] ^= 1 << draw.randrange(8)
    return bytes(spoiled)


def _flip_early(data: bytes, draw: Random) -> bytes:
    head = 512
    return _flip_bits(data[:head], draw) + data[head:]


def _truncate(data: bytes, draw: Random) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _extend(data: bytes, draw: Random) -> bytes:
    return data + draw.choice((b"\0" * 100, draw.randbytes(100), data[:200], b"\n"))


def _chunk(data: bytes, draw: Random) -> tuple[int, int]:
    first = draw.randrange(len(data) + 1)
    return first, min(len(data), first + draw.choice((1, 4, 8, 64, 1000)))


def _repeat_chunk(data: bytes, draw: Random) -> bytes:
    first, last = _chunk(data, draw)
    return data[:last] + data[first:last] * draw.choice((1, 1, 20)) + data[last:]


def _remove_chunk(data: bytes, draw: Random) -> bytes:
    first, last = _chunk(data, draw)
    return data[:first] + data[last:]


def _fill_chunk(data: bytes, draw: Random) -> bytes:
    first, last = _chunk(data, draw)
    filling = draw.choice((b"\0", b"\xff", b" ", bytes([draw.randrange(256)])))
    return data[:first] + filling * (last - first) + data[last:]


def _overwrite_number(data: bytes, draw: Random) -> bytes:
    numbers = (
        struct.pack("<i", draw.choice((0, -1, 1, 2**31 - 1, -(2**31)))),
        struct.pack("<q", draw.choice((0, -1, 2**31, 2**40, 2**63 - 1, -(2**63)))),
        struct.pack("<d", draw.choice((0.0, -1.0, float("nan"), float("inf"), 1e308, 1e-320))),
        struct.pack("<f", draw.choice((float("nan"), float("-inf"), 3e38, -1.0))),
    )
    number = draw.choice(numbers)
    # Fields lie near the beginning of headers and records, more often than not at multiples of 4.
    at = 4 * draw.randrange(len(data) // 4 + 1) if draw.random() < 0.7 else draw.randrange(80)
    return data[:at] + number + data[at + len(number) :]


def _nothing(data: bytes, draw: Random) -> bytes:
    return draw.choice((b"", b"\0", b"\n", b"{}", b"[]", b"not what you think"))


_BYTE_MUTATORS: tuple[Callable[[bytes, Random], bytes], ...] = (
    _flip_bits, _flip_bits, _flip_early, _truncate, _extend, _repeat_chunk, _remove_chunk,
    _fill_chunk, _overwrite_number, _overwrite_number, _nothing,
)  # fmt: skip


def mutate_text(text: str, draw: Random) -> str:
    """Other numbers and words, lines gone, doubled or in another order."""
    kind = draw.randrange(8)
    if kind < 4:
        return _replace_word(text, draw, re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?"), NUMBERS)
    if kind == 4:
        return _replace_word(text, draw, re.compile(r"[A-Za-z_][\w./]*"), (*STRINGS, *NUMBERS))
    lines = text.splitlines(keepends=True) or [""]
    at = draw.randrange(len(lines))
    if kind == 5:
        del lines[at]
    elif kind == 6:
        lines.insert(draw.randrange(len(lines)), lines[at] * draw.choice((1, 3)))
    else:
        lines[at] = lines[at][: draw.randrange(len(lines[at]) + 1)] + draw.choice(("", "\n", "\0"))
    return "".join(lines)


def _replace_word(text: str, draw: Random, pattern: re.Pattern, words: tuple[str, ...]) -> str:
    found = list(pattern.finditer(text))
    for match in sorted(draw.sample(found, min(len(found), draw.choice((1, 1, 2)))),
                        key=lambda m: -m.start()):  # fmt: skip
        text = text[: match.start()] + draw.choice(words) + text[match.end() :]
    return text


def mutate_json(text: str, draw: Random) -> str:
    """Wrong types, values and keys at random places; still JSON, or what often passes for it."""
    value = json.loads(text)
    raw: list[str] = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        value = _mutate_value(value, draw, raw)
    written = json.dumps(value, ensure_ascii=True)
    for number, part in enumerate(raw):
        written = written.replace(json.dumps(f"{_RAW}{number}{_RAW}"), part)
    return written


def _junk(draw: Random, raw: list[str]) -> Any:
    """A value of some type; text that is not JSON is kept for later."""
    kind = draw.randrange(10)
    if kind < 3:
        raw.append(draw.choice(NUMBERS))
    elif kind == 3 and draw.random() < 0.5:
        opening, closing = draw.choice(("[]", ('{"a":', "}")))
        raw.append(opening * DEEP + "0" + closing * DEEP)
    elif kind < 6:
        return draw.choice(STRINGS)
    else:
        return draw.choice((
            None, True, False, [], {}, [[]], [1, 2], [[1, 2], [3]], {"a": {"b": []}}, 3, -1, 0.25,
            ["a"], {"": None}, [None] * 16, [[0.0] * 4] * 4, [["1"] * 4] * 4,
        ))  # fmt: skip
    return f"{_RAW}{len(raw) - 1}{_RAW}"


def _mutate_value(value: Any, draw: Random, raw: list[str]) -> Any:
    if draw.random() < 0.04:
        return _junk(draw, raw)
    places = list(_places(value, (), draw))
    if not places:
        return _junk(draw, raw)
    path = draw.choice(places)
    holder = value
    for step in path[:-1]:
        holder = holder[step]
    key, action = path[-1], draw.randrange(8)
    if action == 0:
        del holder[key]
    elif action == 1 and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif action == 1:
        holder[draw.choice(STRINGS)] = holder[key]
    elif action == 2 and isinstance(holder, dict):
        other = draw.choice(list(holder))
        holder[key], holder[other] = holder[other], holder[key]
    else:
        holder[key] = _junk(draw, raw)
    return value


def _places(value: Any, path: tuple, draw: Random) -> Any:
    """Paths of entries, of long lists only some: one number of a matrix is like another."""
    if isinstance(value, dict):
        keys: list = list(value)
    elif isinstance(value, list):
        keys = sorted(draw.sample(range(len(value)), min(len(value), _PLACES)))
    else:
        return
    for key in keys:
        yield (*path, key)
        yield from _places(value[key], (*path, key), draw)


IN_PLACE = (
    "nothing", "empty", "folder", "pipe", "/dev/zero", "/dev/full", "/dev/random", "loop",
    "dangling", "parent", "/proc/self/mem", "socket",
)  # fmt: skip


def put_in_place(path: Path, what: str) -> None:
    """Something else where a file is expected."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    if what == "empty":
        path.write_bytes(b"")
    elif what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "loop":
        path.symlink_to(path.name)
    elif what == "dangling":
        path.symlink_to("nowhere")
    elif what == "parent":
        path.symlink_to("..")
    elif what == "socket":
        os.mknod(path, 0o140644)
    elif what.startswith("/"):
        path.symlink_to(what)
