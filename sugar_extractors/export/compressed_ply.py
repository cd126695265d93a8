# SPDX-License-Identifier: Apache-2.0
"""Compressed PLY files of Gaussians, as PlayCanvas and SuperSplat read them.

Chunks of 256 Gaussians have the bounds of their positions, logarithmic scales and colours; each
Gaussian has four numbers of 32 bits within these: position and scale (11, 10 and 11 bits), rotation
(2 bits for the largest part, 10 for each other) and colour with opacity (8 bits each). Spherical
harmonics beyond band 0 are bytes of -4 to 4.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from plyfile import PlyData, PlyElement, PlyParseError

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.rasterization.spherical_harmonics import SH_C0
from sugar_extractors.export.packing import (
    cloud_of,
    columns,
    from_smallest_three,
    shares,
    sigmoid,
    smallest_three,
)
from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path, require_regular_file

CHUNK = 256
_BOUNDS = [
    f"{end}_{name}"
    for names in (("x", "y", "z"), ("scale_x", "scale_y", "scale_z"), ("r", "g", "b"))
    for end in ("min", "max")
    for name in names
]
_PACKED = ("packed_position", "packed_rotation", "packed_scale", "packed_color")
_HEADER_BYTES = 1 << 16
_FLAT = 1e-5
_SCALE_LIMIT = 20.0
_HARMONICS_REACH = 8.0


def write_compressed_ply(path: Path, cloud: GaussianCloud) -> np.ndarray:
    """Write a compressed PLY, complete or not at all.

    Returns:
        Rows of the cloud in the order of the file. (N,)

    Raises:
        UserError: The file cannot be written.
    """
    values = columns(cloud)
    order = space_order(values["means"])
    values = {name: array[order] for name, array in values.items()}
    parts = (
        values["means"],
        np.clip(values["log_scales"], -_SCALE_LIMIT, _SCALE_LIMIT),
        values["sh_dc"][:, 0] * SH_C0 + 0.5,
    )
    places, bounds = zip(*(_within_chunks(part) for part in parts), strict=True)
    chunks = np.concatenate([b.reshape(len(b), 6) for b in bounds], axis=1).astype("<f4")
    opacities = sigmoid(values["opacity_logits"])
    packed = np.stack(
        [
            _joined(places[0], (11, 10, 11)),
            _packed_rotations(values["quats"]),
            _joined(places[1], (11, 10, 11)),
            _joined(np.concatenate([places[2], opacities], axis=1), (8, 8, 8, 8)),
        ],
        axis=1,
    ).astype("<u4")
    harmonics = values["sh_rest"].transpose(0, 2, 1).reshape(len(order), -1)
    stored = np.clip(np.trunc((harmonics / _HARMONICS_REACH + 0.5) * 256), 0, 255)
    names = [f"f_rest_{k}" for k in range(stored.shape[1])]
    elements = [
        _element(chunks, "chunk", _BOUNDS, "<f4"),
        _element(packed, "vertex", _PACKED, "<u4"),
        _element(stored.astype("u1"), "sh", names, "u1"),
    ]
    with atomic_path(path) as temporary:
        PlyData(elements, text=False, byte_order="<").write(str(temporary))
    return order


def _element(table: np.ndarray, name: str, columns_of: list[str] | tuple[str, ...], kind: str):
    record = np.dtype([(column, kind) for column in columns_of])
    return PlyElement.describe(np.ascontiguousarray(table).view(record).reshape(-1), name)


def space_order(points: np.ndarray) -> np.ndarray:
    """An order in which neighbours in space are near each other: by interleaved bits. (N,)"""
    low, high = points.min(axis=0), points.max(axis=0)
    cells = ((points - low) / np.maximum(high - low, 1e-12) * 1023).astype(np.uint64)
    code = np.zeros(len(points), np.uint64)
    for bit in range(10):
        for axis in range(3):
            code |= ((cells[:, axis] >> np.uint64(bit)) & np.uint64(1)) << np.uint64(3 * bit + axis)
    return np.argsort(code, kind="stable")


def _within_chunks(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places from 0 to 1 between the bounds of each chunk (N, 3), and these bounds (M, 2, 3)."""
    starts = np.arange(0, len(values), CHUNK)
    # Readers know the bounds in single precision.
    low = np.minimum.reduceat(values, starts).astype(np.float32).astype(float)
    high = np.maximum.reduceat(values, starts).astype(np.float32).astype(float)
    rows = np.arange(len(values)) // CHUNK
    width = (high - low)[rows]
    place = np.where(width < _FLAT, 0.0, (values - low[rows]) / np.maximum(width, _FLAT))
    return np.clip(place, 0, 1), np.stack([low, high], axis=1)


def _joined(values: np.ndarray, bits: tuple[int, ...]) -> np.ndarray:
    """Numbers from 0 to 1 in one of 32 bits, the first uppermost. (N, K) -> (N,)"""
    packed = np.zeros(len(values), np.uint32)
    for column, width in enumerate(bits):
        packed = packed << width | shares(values[:, column], width)
    return packed


def _parted(packed: np.ndarray, bits: tuple[int, ...]) -> np.ndarray:
    """What :func:`_joined` joined. (N,) -> (N, K)"""
    found, below = [], 32
    for width in bits:
        below -= width
        most = (1 << width) - 1
        found.append(((packed >> below) & most) / most)
    return np.stack(found, axis=1)


def _packed_rotations(quats: np.ndarray) -> np.ndarray:
    largest, three = smallest_three(quats)
    packed = largest.astype(np.uint32)
    for column in range(3):
        packed = packed << 10 | shares(three[:, column] * np.sqrt(0.5) + 0.5, 10)
    return packed


def is_compressed_ply(path: Path) -> bool:
    """Whether a file is a compressed PLY, by its header."""
    with require_regular_file(path).open("rb") as file:
        header = file.read(_HEADER_BYTES).split(b"end_header")[0]
    return header.startswith(b"ply") and _PACKED[0].encode() in header


def read_compressed_ply(path: Path) -> GaussianCloud:
    """Read a compressed PLY.

    Raises:
        UserError: It is missing or damaged.
    """
    try:
        cloud = _unpacked(PlyData.read(str(require_regular_file(path))))
    # plyfile trusts the header: numbers that make no sense surface as any of these.
    except (PlyParseError, OSError, LookupError, ValueError, TypeError, OverflowError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: damaged compressed PLY ({reason}); export it again") from error
    if not len(cloud) or not all(t.isfinite().all() for t in cloud.tensors().values()):
        raise UserError(f"{path}: holds no Gaussians, or NaN or infinity; export it again")
    return cloud


def _unpacked(data: PlyData) -> GaussianCloud:
    chunks, vertices = data["chunk"].data, data["vertex"].data
    rows = np.arange(len(vertices)) // CHUNK
    table = np.stack([chunks[name].astype(float) for name in _BOUNDS], axis=1)[rows]
    low, high = table.reshape(-1, 3, 2, 3)[:, :, 0], table.reshape(-1, 3, 2, 3)[:, :, 1]
    colors = _parted(vertices["packed_color"], (8, 8, 8, 8))
    places = np.stack(
        [
            _parted(vertices["packed_position"], (11, 10, 11)),
            _parted(vertices["packed_scale"], (11, 10, 11)),
            colors[:, :3],
        ],
        axis=1,
    )
    means, log_scales, base = (low + places * (high - low)).transpose(1, 0, 2)
    packed = vertices["packed_rotation"]
    three = np.stack([(packed >> shift) & 0x3FF for shift in (20, 10, 0)], axis=1)
    quats = from_smallest_three((packed >> 30).astype(np.int64), (three / 1023 - 0.5) * np.sqrt(2))
    rest = None
    if "sh" in data:
        stored = data["sh"].data
        names = [f"f_rest_{k}" for k in range(len(stored.dtype.names))]
        values = np.stack([stored[name] for name in names], axis=1).astype(float)
        rest = ((values + 0.5) / 256 - 0.5) * _HARMONICS_REACH
        rest = rest.reshape(len(rest), 3, -1).transpose(0, 2, 1)
    return cloud_of(means, quats, log_scales, colors[:, 3], (base - 0.5) / SH_C0, rest)
