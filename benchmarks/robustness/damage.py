# SPDX-License-Identifier: Apache-2.0
"""Damage of files that are packed, or that have a head which says how the rest is read."""

from __future__ import annotations

import ast
import gzip
import json
import re
import struct
import zipfile
import zlib
from pathlib import Path
from random import Random

from benchmarks.robustness import mutations
from benchmarks.robustness.mutations import DEEP, MANY_DIGITS, NUMBERS, STRINGS, mutate_text


def damage_bytes(path: Path, draw: Random) -> str:
    """Change some bytes of a file."""
    path.write_bytes(mutations.mutate_bytes(path.read_bytes(), draw))
    return f"{path.name}: bytes"


def damage_text(path: Path, draw: Random) -> str:
    """Change words, numbers, lines or the encoding of a text file."""
    if draw.random() < 0.3:
        return damage_bytes(path, draw)
    content = path.read_bytes()
    text = content.decode("utf-8", "surrogateescape")
    if draw.random() < 0.1:
        encoding = draw.choice(("utf-16", "utf-8-sig", "utf-32"))
        path.write_bytes(text.encode(encoding, "replace"))
        return f"{path.name}: in {encoding}"
    _write_text(path, mutate_text(text, draw))
    return f"{path.name}: text"


def damage_json(path: Path, draw: Random) -> str:
    """Change values and keys of a JSON file."""
    if draw.random() < 0.25:
        return damage_text(path, draw)
    if draw.random() < 0.1:
        return _numbers_as_text(path, draw)
    _write_text(path, mutations.mutate_json(path.read_text(encoding="utf-8"), draw))
    return f"{path.name}: JSON"


def _numbers_as_text(path: Path, draw: Random) -> str:
    def changed(value: object) -> object:
        if isinstance(value, dict):
            return {key: changed(item) for key, item in value.items()}
        if isinstance(value, list):
            return [changed(item) for item in value]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return str(value) if is_number and draw.random() < 0.5 else value

    content = json.loads(path.read_text(encoding="utf-8"))
    _write_text(path, json.dumps(changed(content)))
    return f"{path.name}: numbers as text"


def _write_text(path: Path, text: str) -> None:
    """Write a text that may hold halves of characters, and bytes that are no UTF-8."""
    try:
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        path.write_bytes(text.encode("utf-8", "surrogatepass"))


def damage_ply(path: Path, draw: Random) -> str:
    """Change the header of a PLY, which is text, or its bytes."""
    data = path.read_bytes()
    end = data.find(b"end_header\n") + len(b"end_header\n")
    if end <= 10 or draw.random() < 0.35:
        return damage_bytes(path, draw)
    header = data[:end].decode("ascii")
    forms = {
        r"property (\w+)": ("uchar", "double", "int", "list uchar float"),
        r"format (\w+)": ("ascii", "binary_big_endian"),
        r"element \w+ (\d+)": ("0", "1", "99999999999", str(2**63 - 1), "-5", MANY_DIGITS),
    }
    pattern = draw.choice((*forms, ""))
    found = list(re.finditer(pattern, header)) if pattern else []
    if found:
        start, stop = draw.choice(found).span(1)
        header = header[:start] + draw.choice(forms[pattern]) + header[stop:]
    else:
        header = mutate_text(header, draw)
    path.write_bytes(header.encode("utf-8", "surrogatepass") + data[end:])
    return f"{path.name}: header"


def damage_glb(path: Path, draw: Random) -> str:
    """Change the first chunk of a GLB, which is JSON, or its bytes."""
    data = path.read_bytes()
    if draw.random() < 0.4:
        return damage_bytes(path, draw)
    (length,) = struct.unpack_from("<I", data, 12)
    text = mutations.mutate_json(data[20 : 20 + length].decode("utf-8"), draw)
    chunk = text.encode("utf-8", "surrogatepass")
    chunk += b" " * (-len(chunk) % 4)
    rest = struct.pack("<I", len(chunk)) + b"JSON" + chunk + data[20 + length :]
    path.write_bytes(data[:8] + struct.pack("<I", 12 + len(rest)) + rest)
    return f"{path.name}: JSON chunk"


def damage_zip(path: Path, draw: Random) -> str:
    """Change what is in a ZIP file, with checksums that are right, or its bytes."""
    if draw.random() < 0.35:
        return damage_bytes(path, draw)
    with zipfile.ZipFile(path) as archive:
        files = {info.filename: archive.read(info) for info in archive.infolist()}
    chosen = draw.choice(list(files))
    if "meta.json" in files and draw.random() < 0.5:
        chosen = "meta.json"
    form = draw.choice(("content", "content", "content", "gone", "name"))
    content = files.pop(chosen)
    if form == "content" and chosen.endswith(".json"):
        text = mutations.mutate_json(content.decode(), draw)
        files[chosen] = text.encode("utf-8", "surrogatepass")
    elif form == "content":
        files[chosen] = mutations.mutate_bytes(content, draw)
    elif form == "name":
        files[draw.choice(("", "a\nb", "x" * 300, "\x1b[31m", "con", ".", "a//b"))] = content
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return f"{path.name}: {form} of {chosen}"


def damage_gzip(path: Path, draw: Random) -> str:
    """Change what is in a gzip stream, with a checksum that is right, or its bytes."""
    data = path.read_bytes()
    if data[:2] != b"\x1f\x8b" or draw.random() < 0.3:
        return damage_bytes(path, draw)
    try:
        content = gzip.decompress(data)
    except (OSError, EOFError, zlib.error):
        return damage_bytes(path, draw)
    if draw.random() < 0.4:
        # A header of 16 bytes.
        place = draw.randrange(16)
        changed = bytearray(content)
        changed[place] = draw.choice((0, 1, 2, 4, 25, 127, 255))
        content = bytes(changed)
    else:
        content = mutations.mutate_bytes(content, draw)
    path.write_bytes(gzip.compress(content, 1))
    return f"{path.name}: packed bytes"


def damage_cfg_args(path: Path, draw: Random) -> str:
    """Change values of ``cfg_args`` into other literals and expressions."""
    if draw.random() < 0.4:
        return damage_text(path, draw)
    call = ast.parse(path.read_text(encoding="utf-8"), mode="eval").body
    values = {word.arg: ast.unparse(word.value) for word in call.keywords}
    key = draw.choice(["images", "images", *values])
    values[key] = draw.choice(
        (
            *map(repr, STRINGS),
            *NUMBERS,
            "None",
            "True",
            "[]",
            "{}",
            "()",
            "b''",
            "{1: 2}",
            "1j",
            "-" * 3_000 + "1",
            "[" * 150 + "]" * 150,
            "(" * DEEP + ")" * DEEP,
            "'a' 'b'",
            "1 + 1",
            "__import__('os')",
            "...",
            "f'{1}'",
            "0x" + MANY_DIGITS,
        )
    )
    text = ", ".join(f"{name}={value}" for name, value in values.items())
    path.write_bytes(f"Namespace({text})".encode("utf-8", "surrogatepass"))
    return f"cfg_args: {key}={values[key][:40]}"


_BY_SUFFIX = {
    ".json": damage_json,
    ".ply": damage_ply,
    ".obj": damage_text,
    ".mtl": damage_text,
    ".xml": damage_text,
    ".xmp": damage_text,
    ".csv": damage_text,
    ".txt": damage_text,
    ".out": damage_text,
    ".toml": damage_text,
    ".glb": damage_glb,
    ".zip": damage_zip,
    ".sog": damage_zip,
    ".spz": damage_gzip,
    ".png": mutations.corrupt_image,
    ".tif": mutations.corrupt_image,
}


def damage_file(path: Path, draw: Random) -> str:
    """Damage a file as its kind can be damaged."""
    if path.name == "cfg_args":
        return damage_cfg_args(path, draw)
    return _BY_SUFFIX.get(path.suffix, damage_bytes)(path, draw)
