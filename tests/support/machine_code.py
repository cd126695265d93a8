# SPDX-License-Identifier: Apache-2.0
"""Registers and stack of kernels, read from the machine code that Warp compiles for a GPU.

The code is an ELF file. Its section ``.nv.info`` is a list of attributes: a byte for the format, a
byte for the attribute, and two for the number of bytes of the value. Values of attributes of a
function are its index in the table of symbols, and a number.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import warp as wp

SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
SIZED_VALUE = 4  # format of attributes that have a number of bytes
FRAME_SIZE = 0x11
REGISTER_COUNT = 0x2F
KERNEL = re.compile(r"(?:.*__locals__)?(\w+?)_[0-9a-f]{8}_cuda_kernel_forward")


class Usage(NamedTuple):
    """What a thread of a kernel uses."""

    registers: int
    stack: int  # bytes: what is spilled from registers, and arrays with an index


class _Section(NamedTuple):
    name: str
    offset: int
    size: int
    link: int


def usages(
    module: wp.Module | ModuleType, architecture: int, folder: Path
) -> dict[str, list[Usage]]:
    """Compile a module for a GPU; return what its kernels use, for each overload, by name."""
    paths = wp.compile_aot_module(
        module, device=None, arch=architecture, module_dir=folder, use_ptx=False
    )
    found: dict[str, list[Usage]] = {}
    for path in paths:
        if path.suffix != ".cubin":
            continue
        attributes = _attributes(path.read_bytes())
        for symbol, values in attributes.items():
            if name := KERNEL.fullmatch(symbol):
                usage = Usage(values[REGISTER_COUNT], values[FRAME_SIZE])
                found.setdefault(name.group(1), []).append(usage)
    return found


def _attributes(code: bytes) -> dict[str, dict[int, int]]:
    """Attributes of functions by name, each a number by its kind."""
    sections = _sections(code)
    by_name = {section.name: section for section in sections}
    symbols = by_name[".symtab"]
    names = sections[symbols.link]
    info = by_name[".nv.info"]
    position = info.offset
    found: dict[str, dict[int, int]] = {}
    while position < info.offset + info.size:
        kind, attribute, size = struct.unpack_from("<BBH", code, position)
        position += 4
        if kind != SIZED_VALUE:
            continue
        if attribute in (FRAME_SIZE, REGISTER_COUNT):
            index, value = struct.unpack_from("<II", code, position)
            entry = SYMBOL.unpack_from(code, symbols.offset + SYMBOL.size * index)
            found.setdefault(_text(code, names.offset + entry[0]), {})[attribute] = value
        position += size
    return found


def _sections(code: bytes) -> list[_Section]:
    """The table of sections of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", code, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", code, 0x3A)
    rows = [SECTION.unpack_from(code, table + size * number) for number in range(count)]
    names = rows[of_names][4]
    return [_Section(_text(code, names + row[0]), row[4], row[5], row[6]) for row in rows]


def _text(code: bytes, start: int) -> str:
    return code[start : code.index(b"\0", start)].decode()
