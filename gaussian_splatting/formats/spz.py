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

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.color_bytes import rounded_bytes
from gaussian_splatting.core.moved import moved_cloud
from gaussian_splatting.formats.packing import (
    BANDS,
    Columns,
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
_PARTS_OFFSET = 15  # byte of the header with the number of parts, version 4
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
    "RUB",
    "LDB",
    "RDB",
    "LUB",
    "RUB",
    "LDF",
    "RDF",
    "LUF",
    "RUF",
    "LFD",
    "RFD",
    "LFU",
    "RFU",
    "LBD",
    "RBD",
    "LBU",
    "RBU",
)
"""Directions of x, y and z by the number in the record: right, left, up, down, back, front.
Number 0 is none, which means the axes of the format."""


@dataclass(frozen=True)
class SpzFit:
    """The Gaussians of a cloud that SPZ can hold, and what happens to the others."""

    is_held: np.ndarray  # sizes are those that were written, up to the steps of the format, (N,)
    notes: tuple[str, ...]  # lines for the user


class _ScaleFit(NamedTuple):
    """The Gaussians whose sizes are beyond the range of SPZ."""

    is_held: np.ndarray  # (N,) bool
    n_small: int  # with axes that are too short
    n_large: int  # with axes that are too long


def spz_fit(path: Path, cloud: GaussianCloud) -> SpzFit:
    """Compare a cloud with the ranges of SPZ.

    Raises:
        UserError: Positions are beyond the range, or so many sizes that it would show.
    """
    require_gaussians(path, cloud)
    values = columns(cloud)
    notes = []
    means = values["means"]
    extent = float(np.abs(means).max())
    if extent > _MOST_FIXED:
        raise UserError(
            f"{path}: positions reach {extent:.3g} units, SPZ holds up to {_MOST_FIXED:,}; pass a "
            "--scale_factor below 1, or use --to sog or ply"
        )
    distances = np.abs(means - np.median(means, axis=0)).max(axis=1)
    spread = float(np.quantile(distances, 0.9))
    step = 0.5 ** _fraction_bits(extent)
    if 0 < _VISIBLE * spread < step / 2:
        notes.append(
            f"note: SPZ rounds positions to {step:.2g} units, because one is {extent:.3g} away; if "
            "that is too coarse, use --to sog or ply"
        )
    fit = _fit_scales(values["log_scales"])
    n_outside = fit.n_small + fit.n_large
    if n_outside == 0:
        return SpzFit(fit.is_held, tuple(notes))
    _refuse_visible_errors(path, values["log_scales"], fit, spread)
    smallest = np.exp(_LOWEST_SCALE)
    largest = np.exp(_HIGHEST_SCALE)
    notes.append(
        f"note: {n_outside:,} of {len(cloud):,} Gaussians have axes beyond what SPZ can say, "
        f"{smallest:.2g} to {largest:.0f} units, and get the nearest; errors are of the others"
    )
    return SpzFit(fit.is_held, tuple(notes))


def _fit_scales(log_scales: np.ndarray) -> _ScaleFit:
    """Compare sizes with the range of SPZ. (N, 3)"""
    longest = log_scales.max(axis=1)
    clipped = np.exp(log_scales.clip(_LOWEST_SCALE, _HIGHEST_SCALE))
    errors = np.abs(clipped - np.exp(log_scales)).max(axis=1) / np.exp(longest)
    is_held = errors <= _SCALE_ERROR
    is_large = longest > _HIGHEST_SCALE
    n_large = int((~is_held & is_large).sum())
    n_small = int((~is_held & ~is_large).sum())
    return _ScaleFit(is_held, n_small, n_large)


def _refuse_visible_errors(
    path: Path, log_scales: np.ndarray, fit: _ScaleFit, spread: float
) -> None:
    """Raise a ``UserError`` if so many sizes are beyond the range that it would show.

    Args:
        spread: Of the positions, in units.
    """
    n = len(log_scales)
    longest = log_scales.max(axis=1)
    smallest = np.exp(_LOWEST_SCALE)
    largest = np.exp(_HIGHEST_SCALE)
    if fit.n_small > _MAX_OUTSIDE * n and smallest > _VISIBLE * spread > 0:
        # So that even flat ones have a thickness that is in the range.
        needed = smallest / _SCALE_ERROR / np.exp(np.quantile(longest, 0.01))
        factor = 10.0 ** np.ceil(np.log10(max(needed, 10.0)))
        raise UserError(
            f"{path}: {fit.n_small:,} of {n:,} Gaussians are thinner than SPZ can say "
            f"({smallest:.2g} units), and this scene is so small that it would show; pass "
            f"--scale_factor {factor:g}, or use --to sog or ply"
        )
    if fit.n_large > _MAX_OUTSIDE * n:
        factor = 10.0 ** np.floor(np.log10(largest / np.exp(longest.max())))
        raise UserError(
            f"{path}: {fit.n_large:,} of {n:,} Gaussians are larger than SPZ can say "
            f"({largest:.0f} units); pass --scale_factor {factor:g}, or use --to sog or ply"
        )


def _fraction_bits(extent: float) -> int:
    """Return the bits behind the point of positions: as many as the farthest one leaves."""
    most = _MAX_FRACTION_BITS if extent >= 1 else _SMALL_FRACTION_BITS
    free_bits = np.floor(np.log2(_MOST_FIXED / max(extent, 1e-9)))
    return int(np.clip(free_bits, 0, most))


def write_spz(path: Path, cloud: GaussianCloud, version: int = 3) -> None:
    """Write an SPZ file of version 3 or 4, complete or not at all.

    Raises:
        UserError: As of :func:`spz_fit`.
    """
    spz_fit(path, cloud)
    fraction_bits, parts = _spz_parts(cloud)
    flags = _ANTIALIASED if cloud.antialiased else 0
    n_parts = 0 if version == 3 else len(parts)
    header = _HEADER.pack(MAGIC, version, len(cloud), 3, fraction_bits, flags, n_parts)
    if version == 3:
        # Without the time of day, the same Gaussians give the same bytes.
        content = gzip.compress(header + b"".join(parts), mtime=0)
    else:
        content = header + struct.pack("<I12x", _TABLE_START)
        packed = [zstandard.ZstdCompressor(level=12).compress(part) for part in parts]
        for packed_part, part in zip(packed, parts, strict=True):
            content += _TABLE.pack(len(packed_part), len(part))
        content += b"".join(packed)
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def _spz_parts(cloud: GaussianCloud) -> tuple[int, list[bytes]]:
    """Return the bits behind the point of positions, and the attributes in their order."""
    values = columns(cloud)
    fraction_bits = _fraction_bits(float(np.abs(values["means"]).max()))
    # Steps of 8 in band 1 and of 16 beyond compress well.
    steps = np.where(np.arange(15) < 3, 8, 16)[None, :, None]
    harmonics = np.rint(values["sh_rest"] * 128) + 128
    return fraction_bits, [
        _pack_positions(values["means"], fraction_bits),
        _bytes(sigmoid(values["opacity_logits"]) * 255),
        _bytes((values["sh_dc"][:, 0] * _COLOR_SCALE + 0.5) * 255),
        _bytes((values["log_scales"] - _LOWEST_SCALE) * _SCALE_STEPS),
        _pack_rotations(values["quats"]),
        _bytes((harmonics + steps // 2) // steps * steps),
    ]


def _pack_positions(means: np.ndarray, fraction_bits: int) -> bytes:
    """Return positions as numbers of three bytes. (N, 3)"""
    fixed = np.rint(means * (1 << fraction_bits)).astype("<i4")
    return fixed.view(np.uint8).reshape(-1, 4)[:, :3].tobytes()


def _pack_rotations(quats: np.ndarray) -> bytes:
    """Return quaternions as two bits for the largest part, and sign and size of each other."""
    largest, three = smallest_three(quats[:, _XYZW])
    steps = np.floor(np.abs(three) * np.sqrt(2) * _ROTATION_STEPS + 0.5).astype(np.uint32)
    sizes = np.minimum(steps, _ROTATION_STEPS)
    signs = (three < 0).astype(np.uint32)
    packed = largest.astype(np.uint32)
    for column in range(3):
        packed = packed << 10 | signs[:, column] << 9 | sizes[:, column]
    return packed.astype("<u4").tobytes()


def _bytes(values: np.ndarray) -> bytes:
    return rounded_bytes(values).tobytes()


class _Unpacked(NamedTuple):
    """The content of a file of any version."""

    attributes: bytes  # header and attributes; before version 4 also the records
    records: bytes | None  # of version 4


def _unpacked_spz(content: bytes) -> _Unpacked:
    if content[:4] != MAGIC.to_bytes(4, "little"):
        return _Unpacked(gzip.decompress(content), None)
    table_start = struct.unpack_from("<I", content, _HEADER.size)[0]
    records = content[_TABLE_START:table_start]
    n_parts = content[_PARTS_OFFSET]
    sizes = [_TABLE.unpack_from(content, table_start + _TABLE.size * k) for k in range(n_parts)]
    start = table_start + _TABLE.size * n_parts
    parts = [content[: _HEADER.size]]
    for packed_size, size in sizes:
        if size > _MOST_COMPRESSED * len(content):
            raise EOFError("sizes that cannot be")
        packed = content[start : start + packed_size]
        parts.append(zstandard.ZstdDecompressor().decompress(packed, size))
        start += packed_size
    return _Unpacked(b"".join(parts), records)


def _records(block: bytes) -> dict[int, bytes]:
    """Return extension records by their type; one that is cut off at the end is left out."""
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
    """Return the matrix from the axes that a record names to those of the format. (4, 4)"""
    number = int.from_bytes(payload[:4], "little") if len(payload) >= 4 else -1
    if not 0 <= number < len(_SYSTEMS):
        notify(f"note: {path}: names axes that are not known ({number}); taken as right, up, back")
        number = 0
    matrix = np.eye(4)
    matrix[:3, :3] = np.array([_LETTERS[letter] for letter in _SYSTEMS[number]], float).T
    return matrix


class _Header(NamedTuple):
    """The header of a file."""

    magic: int
    version: int
    n: int  # Gaussians
    degree: int  # of spherical harmonics
    fraction_bits: int  # behind the point of positions
    flags: int
    n_parts: int  # of version 4


class _Attributes(NamedTuple):
    """The bytes of all Gaussians, (N, bytes) uint8 each, in the order of the file."""

    positions: np.ndarray
    opacities: np.ndarray
    colors: np.ndarray
    scales: np.ndarray
    rotations: np.ndarray
    harmonics: np.ndarray


def read_spz(path: Path, notify: Notify = lambda line: None) -> GaussianCloud:
    """Read an SPZ file of version 2 to 4: Gaussians in the axes of the format, to degree 3."""
    kinds = (
        *(OSError, EOFError, LookupError, ValueError, OverflowError, MemoryError),
        *(zlib.error, struct.error, zstandard.ZstdError),
    )
    with explained(f"{path}: damaged, or no SPZ file", "export it again", *kinds):
        content, block = _unpacked_spz(require_regular_file(path).read_bytes())
        header = _Header(*_HEADER.unpack_from(content))
    is_supported = header.version in (2, 3, 4) and header.degree in BANDS
    if header.magic != MAGIC or not is_supported or header.fraction_bits > 23:
        raise UserError(f"{path}: not an SPZ file of version 2 to 4 and degree 0 to 4")
    attributes, end = _split_attributes(path, content, header)
    harmonics = (attributes.harmonics.astype(float) - 128) / 128
    values = Columns(
        means=_unpack_positions(attributes.positions, header.fraction_bits),
        quats=_quats(attributes.rotations)[:, [3, 0, 1, 2]],
        log_scales=attributes.scales / 16 - 10,
        opacities=attributes.opacities[:, 0] / 255,
        sh_dc=(attributes.colors / 255 - 0.5) / _COLOR_SCALE,
        sh_rest=harmonics.reshape(header.n, -1, 3)[:, :15],
    )
    cloud = cloud_of(path, values, notify)
    cloud = replace(cloud, antialiased=bool(header.flags & _ANTIALIASED))
    if not header.flags & _HAS_RECORDS:
        return cloud
    if block is None:
        block = content[end:]
    return _apply_records(path, cloud, _records(block), notify)


def _split_attributes(path: Path, content: bytes, header: _Header) -> tuple[_Attributes, int]:
    """Return the attributes behind the header, and the place of their end.

    Raises:
        UserError: The content is too short.
    """
    rotation_width = 3 if header.version == 2 else 4
    widths = (9, 1, 3, 3, rotation_width, 3 * BANDS[header.degree])
    size = header.n * sum(widths)
    end = _HEADER.size + size
    if header.n == 0 or len(content) < end:
        raise UserError(f"{path}: holds no {header.n} Gaussians, it was cut off; export it again")
    data = np.frombuffer(content, np.uint8, size, _HEADER.size)
    parts = np.split(data, header.n * np.cumsum(widths)[:-1])
    tables = [part.reshape(header.n, width) for part, width in zip(parts, widths, strict=True)]
    return _Attributes(*tables), end


def _unpack_positions(data: np.ndarray, fraction_bits: int) -> np.ndarray:
    """Return positions from signed numbers of three bytes. (N, 9) uint8 -> (N, 3)"""
    low_to_high = data.reshape(-1, 3).astype(np.int64)
    unsigned = low_to_high[:, 0] | low_to_high[:, 1] << 8 | low_to_high[:, 2] << 16
    signed = np.where(unsigned >= 1 << 23, unsigned - (1 << 24), unsigned)
    return signed.reshape(-1, 3) / (1 << fraction_bits)


def _apply_records(
    path: Path, cloud: GaussianCloud, records: dict[int, bytes], notify: Notify
) -> GaussianCloud:
    """Return the cloud in the axes of the format; records of other kinds are named."""
    others = [_RECORD_NAMES.get(kind, f"0x{kind:08X}") for kind in records if kind != AXES]
    if others:
        notify(f"note: {path}: left out the extension records {', '.join(others)}")
    if AXES not in records:
        return cloud
    return moved_cloud(cloud, _to_format_axes(path, records[AXES], notify))


def _quats(data: np.ndarray) -> np.ndarray:
    """Return unit quaternions, xyzw. (N, 3) or (N, 4) uint8 -> (N, 4)"""
    if data.shape[1] == 3:
        xyz = data / 127.5 - 1
        real = np.sqrt(np.maximum(0.0, 1 - (xyz**2).sum(axis=1)))
        return np.concatenate([xyz, real[:, None]], axis=1)
    packed = np.ascontiguousarray(data).view("<u4")[:, 0]
    three = np.stack([(packed >> shift) & 0x3FF for shift in (20, 10, 0)], axis=1)
    sizes = (three & _ROTATION_STEPS) / (_ROTATION_STEPS * np.sqrt(2))
    signed = np.where(three >> 9 == 1, -sizes, sizes)
    largest = (packed >> 30).astype(np.int64)
    return from_smallest_three(largest, signed)
