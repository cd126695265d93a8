# SPDX-License-Identifier: Apache-2.0
"""SPZ files: Gaussians in a tenth of the bytes.

A gzip stream of a header of 16 bytes and, one after the other for all Gaussians, positions (24-bit
fixed point), opacities, colours, logarithmic scales (8 bits each), rotations (the three smallest
parts of a quaternion in 10 bits each) and spherical harmonics (8 bits, of which 5 are used in band
1 and 4 beyond). Version 4 has a table of sizes behind the header, and attributes are zstd frames.
Axes are x right, y up, z back, unless an extension record names others. Records are a type, a
length and that many bytes: between header and table in version 4, behind the attributes before.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import zstandard

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.formats.moved import moved_cloud
from gaussian_splatting.formats.packing import (
    BANDS,
    cloud_of,
    columns,
    from_smallest_three,
    require_gaussians,
    sigmoid,
    smallest_three,
)
from sugar_utils.errors import Notify, UserError, explained
from sugar_utils.files import atomic_path, require_regular_file

MAGIC = 0x5053474E
AXES = 0xADBE0003  # type of the extension record that names the axes, SPZ_ADOBE_coordinate_system
_RECORD_NAMES = {0xADBE0002: "SPZ_ADOBE_safe_orbit_camera"}
_HEADER = struct.Struct("<IIIBBBB")
_TABLE = struct.Struct("<QQ")
_RECORD = struct.Struct("<II")
_TABLE_START = 32
_MOST_COMPRESSED = 1024
_ANTIALIASED = 1  # flag
_HAS_RECORDS = 2  # flag
_MOST_FIXED = (1 << 23) - 1  # of the 24 bits of a position
_MAX_FRACTION_BITS = 20
_SMALL_FRACTION_BITS = 23  # where nothing is a unit or more away
_COLOR_SCALE = 0.15
_ROTATION_STEPS = 511
_XYZW = [1, 2, 3, 0]
_SCALE_STEPS = 16.0  # of a natural logarithm
_LOWEST_SCALE = -10.0
_HIGHEST_SCALE = _LOWEST_SCALE + 255 / _SCALE_STEPS
_SCALE_ERROR = 0.04  # of the longest axis: more than half a step, so a size beyond the ends
_VISIBLE = 5e-4  # of the spread of a scene: half a pixel of a picture of a thousand
_MAX_OUTSIDE = 0.01  # share of Gaussians whose sizes may be beyond the ends
_LETTERS = {
    "R": (1, 0, 0),
    "L": (-1, 0, 0),
    "U": (0, 1, 0),
    "D": (0, -1, 0),
    "B": (0, 0, 1),
    "F": (0, 0, -1),
}
_SYSTEMS = (
    *("RUB", "LDB", "RDB", "LUB", "RUB", "LDF", "RDF", "LUF", "RUF"),
    *("LFD", "RFD", "LFU", "RFU", "LBD", "RBD", "LBU", "RBU"),
)
"""Directions of x, y and z by the number in the record: right, left, up, down, back, front.
Number 0 is none, which means the axes of the format."""


@dataclass(frozen=True)
class SpzFit:
    """Which of a cloud's Gaussians SPZ can hold, and what it does to the others."""

    is_held: np.ndarray  # sizes are those that were written, up to the steps of the format, (N,)
    notes: tuple[str, ...]  # lines for the user


def spz_fit(path: Path, cloud: GaussianCloud) -> SpzFit:
    """Compare a cloud with the ranges of SPZ.

    Raises:
        UserError: Positions are beyond the range, or so many sizes that it would show.
    """
    require_gaussians(path, cloud)
    values = columns(cloud)
    notes = []
    means = values["means"]
    reach = float(np.abs(means).max())
    if reach > _MOST_FIXED:
        raise UserError(
            f"{path}: positions reach {reach:.3g} units, SPZ holds up to {_MOST_FIXED:,}; pass a "
            "--scale_factor below 1, or use --to sog or ply"
        )
    spread = float(np.quantile(np.abs(means - np.median(means, axis=0)).max(axis=1), 0.9))
    step = 0.5 ** _fraction_bits(reach)
    if 0 < _VISIBLE * spread < step / 2:
        notes.append(
            f"note: SPZ rounds positions to {step:.2g} units, because one is {reach:.3g} away; if "
            "that is too coarse, use --to sog or ply"
        )
    log_scales = values["log_scales"]
    longest = log_scales.max(axis=1)
    clipped = np.exp(log_scales.clip(_LOWEST_SCALE, _HIGHEST_SCALE))
    errors = np.abs(clipped - np.exp(log_scales)).max(axis=1) / np.exp(longest)
    is_held = errors <= _SCALE_ERROR
    n_outside = int((~is_held).sum())
    if n_outside == 0:
        return SpzFit(is_held, tuple(notes))
    smallest = np.exp(_LOWEST_SCALE)
    largest = np.exp(_HIGHEST_SCALE)
    is_large = longest > _HIGHEST_SCALE
    n_large = int((~is_held & is_large).sum())
    n_small = n_outside - n_large
    most = _MAX_OUTSIDE * len(cloud)
    if n_small > most and smallest > _VISIBLE * spread > 0:
        # So that even flat ones have a thickness that is in the range.
        needed = smallest / _SCALE_ERROR / np.exp(np.quantile(longest, 0.01))
        factor = 10.0 ** np.ceil(np.log10(max(needed, 10.0)))
        raise UserError(
            f"{path}: {n_small:,} of {len(cloud):,} Gaussians are thinner than SPZ can say "
            f"({smallest:.2g} units), and this scene is so small that it would show; pass "
            f"--scale_factor {factor:g}, or use --to sog or ply"
        )
    if n_large > most:
        factor = 10.0 ** np.floor(np.log10(largest / np.exp(longest.max())))
        raise UserError(
            f"{path}: {n_large:,} of {len(cloud):,} Gaussians are larger than SPZ can say "
            f"({largest:.0f} units); pass --scale_factor {factor:g}, or use --to sog or ply"
        )
    notes.append(
        f"note: {n_outside:,} of {len(cloud):,} Gaussians have axes beyond what SPZ can say, "
        f"{smallest:.2g} to {largest:.0f} units, and get the nearest; errors are of the others"
    )
    return SpzFit(is_held, tuple(notes))


def _fraction_bits(reach: float) -> int:
    """Bits behind the point of positions: as many as the farthest one leaves room for."""
    most = _MAX_FRACTION_BITS if reach >= 1 else _SMALL_FRACTION_BITS
    return int(np.clip(np.floor(np.log2(_MOST_FIXED / max(reach, 1e-9))), 0, most))


def write_spz(path: Path, cloud: GaussianCloud, version: int = 3) -> None:
    """Write an SPZ file of version 3 or 4, complete or not at all.

    Raises:
        UserError: As of :func:`spz_fit`.
    """
    spz_fit(path, cloud)
    fraction_bits, parts = _spz_parts(cloud)
    head = MAGIC, version, len(cloud), 3, fraction_bits, _ANTIALIASED * cloud.antialiased
    if version == 3:
        # Without the time of day, the same Gaussians give the same bytes.
        content = gzip.compress(_HEADER.pack(*head, 0) + b"".join(parts), mtime=0)
    else:
        packed = [zstandard.ZstdCompressor(level=12).compress(part) for part in parts]
        sizes = (_TABLE.pack(len(p), len(part)) for p, part in zip(packed, parts, strict=True))
        start = _HEADER.pack(*head, len(parts)) + struct.pack("<I12x", _TABLE_START)
        content = b"".join((start, *sizes, *packed))
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def _spz_parts(cloud: GaussianCloud) -> tuple[int, list[bytes]]:
    """Bits behind the point of positions, and the attributes one after the other."""
    values = columns(cloud)
    means = values["means"]
    fraction_bits = _fraction_bits(float(np.abs(means).max()))
    fixed = np.rint(means * (1 << fraction_bits))
    largest, three = smallest_three(values["quats"][:, _XYZW])
    size = np.floor(np.abs(three) * np.sqrt(2) * _ROTATION_STEPS + 0.5).astype(np.uint32)
    rotations = largest.astype(np.uint32)
    # Two bits for the place of the largest part, ten for each other: sign and size.
    for column in range(3):
        sign = (three[:, column] < 0).astype(np.uint32)
        rotations = rotations << 10 | sign << 9 | np.minimum(size[:, column], _ROTATION_STEPS)
    # Steps of 8 in band 1 and of 16 beyond compress well.
    steps = np.where(np.arange(15) < 3, 8, 16)[None, :, None]
    harmonics = (np.rint(values["sh_rest"] * 128) + 128 + steps // 2) // steps * steps
    return fraction_bits, [
        fixed.astype("<i4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes(),
        _bytes(sigmoid(values["opacity_logits"]) * 255),
        _bytes((values["sh_dc"][:, 0] * _COLOR_SCALE + 0.5) * 255),
        _bytes((values["log_scales"] - _LOWEST_SCALE) * _SCALE_STEPS),
        rotations.astype("<u4").tobytes(),
        _bytes(harmonics),
    ]


def _bytes(values: np.ndarray) -> bytes:
    return np.clip(np.rint(values), 0, 255).astype(np.uint8).tobytes()


class _Unpacked(NamedTuple):
    """The content of a file of any version."""

    attributes: bytes  # behind the header, one after the other; before version 4 also the records
    records: bytes | None  # of version 4


def _unpacked_spz(content: bytes) -> _Unpacked:
    if content[:4] != MAGIC.to_bytes(4, "little"):
        return _Unpacked(gzip.decompress(content), None)
    start = struct.unpack_from("<I", content, _HEADER.size)[0]
    records = content[_TABLE_START:start]
    table = [_TABLE.unpack_from(content, start + _TABLE.size * k) for k in range(content[15])]
    place = start + _TABLE.size * len(table)
    parts = [content[: _HEADER.size]]
    for size, unpacked in table:
        if unpacked > _MOST_COMPRESSED * len(content):
            raise EOFError("sizes that cannot be")
        unpacker = zstandard.ZstdDecompressor()
        parts.append(unpacker.decompress(content[place : place + size], unpacked))
        place += size
    return _Unpacked(b"".join(parts), records)


def _records(block: bytes) -> dict[int, bytes]:
    """Extension records by their type; what is cut off at the end is left out."""
    records = {}
    place = 0
    while place + _RECORD.size <= len(block):
        kind, length = _RECORD.unpack_from(block, place)
        place += _RECORD.size
        if place + length > len(block):
            break
        records[kind] = block[place : place + length]
        place += length
    return records


def _to_format_axes(path: Path, payload: bytes, notify: Notify) -> np.ndarray:
    """From the axes that a record names to those of the format. (4, 4)"""
    number = int.from_bytes(payload[:4], "little") if len(payload) >= 4 else -1
    if not 0 <= number < len(_SYSTEMS):
        notify(f"note: {path}: names axes that are not known ({number}); taken as right, up, back")
        number = 0
    matrix = np.eye(4)
    matrix[:3, :3] = np.array([_LETTERS[letter] for letter in _SYSTEMS[number]], float).T
    return matrix


def read_spz(path: Path, notify: Notify = lambda line: None) -> GaussianCloud:
    """Read an SPZ file of version 2 to 4: Gaussians in the axes of the format, to degree 3."""
    kinds = (
        *(OSError, EOFError, LookupError, ValueError, OverflowError, MemoryError),
        *(zlib.error, struct.error, zstandard.ZstdError),
    )
    with explained(f"{path}: damaged, or no SPZ file", "export it again", *kinds):
        content, block = _unpacked_spz(require_regular_file(path).read_bytes())
        magic, version, n, degree, fraction_bits, flags, _ = _HEADER.unpack_from(content)
    if magic != MAGIC or version not in (2, 3, 4) or degree not in BANDS or fraction_bits > 23:
        raise UserError(f"{path}: not an SPZ file of version 2 to 4 and degree 0 to 4")
    widths = (9, 1, 3, 3, 3 if version == 2 else 4, 3 * BANDS[degree])
    if n == 0 or len(content) < _HEADER.size + n * sum(widths):
        raise UserError(f"{path}: holds no {n} Gaussians, it was cut off; export it again")
    data = np.frombuffer(content, np.uint8, n * sum(widths), _HEADER.size)
    parts = np.split(data, n * np.cumsum(widths)[:-1])
    positions, alphas, colors, scales, rotations, harmonics = (
        part.reshape(n, width) for part, width in zip(parts, widths, strict=True)
    )
    # Signed numbers of three bytes each.
    three = positions.reshape(-1, 3).astype(np.int64)
    fixed = three[:, 0] | three[:, 1] << 8 | three[:, 2] << 16
    fixed = np.where(fixed >= 1 << 23, fixed - (1 << 24), fixed).reshape(-1, 3)
    cloud = cloud_of(
        path,
        fixed / (1 << fraction_bits),
        _quats(rotations)[:, [3, 0, 1, 2]],
        scales / 16 - 10,
        alphas[:, 0] / 255,
        (colors / 255 - 0.5) / _COLOR_SCALE,
        ((harmonics.astype(float) - 128) / 128).reshape(n, -1, 3)[:, :15],
    )
    cloud = replace(cloud, antialiased=bool(flags & _ANTIALIASED))
    if not flags & _HAS_RECORDS:
        return cloud
    if block is None:
        block = content[_HEADER.size + len(data) :]
    records = _records(block)
    others = [_RECORD_NAMES.get(kind, f"0x{kind:08X}") for kind in records if kind != AXES]
    if others:
        notify(f"note: {path}: left out the extension records {', '.join(others)}")
    if AXES not in records:
        return cloud
    matrix = _to_format_axes(path, records[AXES], notify)
    return cloud if np.array_equal(matrix, np.eye(4)) else moved_cloud(cloud, matrix)


def _quats(data: np.ndarray) -> np.ndarray:
    """Unit quaternions, xyzw. (N, 3) or (N, 4) uint8 -> (N, 4)"""
    if data.shape[1] == 3:
        xyz = data / 127.5 - 1
        real = np.sqrt(np.maximum(0.0, 1 - (xyz**2).sum(axis=1)))
        return np.concatenate([xyz, real[:, None]], axis=1)
    packed = np.ascontiguousarray(data).view("<u4")[:, 0]
    three = np.stack([(packed >> shift) & 0x3FF for shift in (20, 10, 0)], axis=1)
    size = (three & _ROTATION_STEPS) / (_ROTATION_STEPS * np.sqrt(2))
    signed = np.where(three >> 9 == 1, -size, size)
    return from_smallest_three((packed >> 30).astype(np.int64), signed)
