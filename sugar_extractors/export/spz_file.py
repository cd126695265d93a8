# SPDX-License-Identifier: Apache-2.0
"""SPZ files, version 3: Gaussians in a tenth of the bytes (Niantic's public description).

A gzip stream of a header of 16 bytes and, one after the other for all Gaussians, positions (24-bit
fixed point), opacities, colours, logarithmic scales (8 bits each), rotations (the three smallest
parts of a quaternion in 10 bits each) and spherical harmonics (8 bits, of which 5 are used in band
1 and 4 beyond). Axes are x right, y up, z back.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np

from gaussian_splatting.cloud import GaussianCloud
from sugar_extractors.export.packing import (
    cloud_of,
    columns,
    from_smallest_three,
    sigmoid,
    smallest_three,
)
from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path, require_regular_file

MAGIC, VERSION = 0x5053474E, 3
_HEADER = struct.Struct("<IIIBBBB")
_BANDS = {0: 0, 1: 3, 2: 8, 3: 15}
_MAX_FRACTION_BITS = 20
_COLOR_SCALE = 0.15
_ROTATION_STEPS = 511
_XYZW = [1, 2, 3, 0]


def write_spz(path: Path, cloud: GaussianCloud) -> np.ndarray:
    """Write an SPZ file, complete or not at all.

    Args:
        path: File to write.
        cloud: In the axes of the format.

    Returns:
        Rows of the cloud in the order of the file: their own. (N,)

    Raises:
        UserError: The file cannot be written.
    """
    with atomic_path(path) as temporary:
        # Without the time of day, the same Gaussians give the same bytes.
        temporary.write_bytes(gzip.compress(spz_content(cloud), mtime=0))
    return np.arange(len(cloud))


def spz_content(cloud: GaussianCloud) -> bytes:
    """What an SPZ file holds before it is compressed."""
    values = columns(cloud)
    means = values["means"]
    reach = max(float(np.abs(means).max(initial=0.0)), 1e-9)
    # As many bits behind the point as the farthest one leaves room for.
    fraction_bits = int(np.clip(np.floor(np.log2(((1 << 23) - 1) / reach)), 0, _MAX_FRACTION_BITS))
    fixed = np.clip(np.rint(means * (1 << fraction_bits)), -(1 << 23), (1 << 23) - 1)
    parts = [
        _HEADER.pack(MAGIC, VERSION, len(means), 3, fraction_bits, 0, 0),
        fixed.astype("<i4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes(),
        _bytes(sigmoid(values["opacity_logits"]) * 255),
        _bytes((values["sh_dc"][:, 0] * _COLOR_SCALE + 0.5) * 255),
        _bytes((values["log_scales"] + 10) * 16),
        _packed_rotations(values["quats"][:, _XYZW]).tobytes(),
        _packed_harmonics(values["sh_rest"]).tobytes(),
    ]
    return b"".join(parts)


def _bytes(values: np.ndarray) -> bytes:
    return np.clip(np.rint(values), 0, 255).astype(np.uint8).tobytes()


def _packed_rotations(quats: np.ndarray) -> np.ndarray:
    """Two bits for the place of the largest part, ten for each other: sign and size. (N,)"""
    largest, three = smallest_three(quats)
    size = np.floor(np.abs(three) * np.sqrt(2) * _ROTATION_STEPS + 0.5).astype(np.uint32)
    packed = largest.astype(np.uint32)
    for column in range(3):
        sign = (three[:, column] < 0).astype(np.uint32)
        packed = packed << 10 | sign << 9 | np.minimum(size[:, column], _ROTATION_STEPS)
    return packed.astype("<u4")


def _packed_harmonics(sh_rest: np.ndarray) -> np.ndarray:
    """(N, 15, 3) uint8; steps of 8 in band 1 and of 16 beyond compress well."""
    steps = np.where(np.arange(15) < 3, 8, 16)[None, :, None]
    values = np.rint(sh_rest * 128) + 128
    return np.clip((values + steps // 2) // steps * steps, 0, 255).astype(np.uint8)


def read_spz(path: Path) -> GaussianCloud:
    """Read an SPZ file of version 2 or 3: Gaussians in the axes of the format.

    Raises:
        UserError: It is missing or damaged, or of another version.
    """
    try:
        content = gzip.decompress(require_regular_file(path).read_bytes())
        magic, version, n, degree, fraction_bits, _, _ = _HEADER.unpack_from(content)
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise UserError(f"{path}: damaged, or no SPZ file ({error}); export it again") from error
    if magic != MAGIC or version not in (2, 3) or degree not in _BANDS or fraction_bits > 23:
        raise UserError(f"{path}: not an SPZ file of version 2 or 3 and degree 0 to 3")
    widths = (9, 1, 3, 3, 4 if version == 3 else 3, 3 * _BANDS[degree])
    if n == 0 or len(content) < _HEADER.size + n * sum(widths):
        raise UserError(f"{path}: holds no {n} Gaussians, it was cut off; export it again")
    data, parts = np.frombuffer(content, np.uint8, offset=_HEADER.size), []
    for width in widths:
        parts.append(data[: n * width].reshape(n, width))
        data = data[n * width :]
    positions, alphas, colors, scales, rotations, harmonics = parts
    quats = _quats(rotations)
    return cloud_of(
        _fixed_point(positions) / (1 << fraction_bits),
        quats[:, [3, 0, 1, 2]],
        scales / 16 - 10,
        alphas[:, 0] / 255,
        (colors / 255 - 0.5) / _COLOR_SCALE,
        ((harmonics.astype(float) - 128) / 128).reshape(n, -1, 3),
    )


def _fixed_point(data: np.ndarray) -> np.ndarray:
    """Signed numbers of three bytes each. (N, 9) -> (N, 3) float64"""
    three = data.reshape(-1, 3).astype(np.int64)
    values = three[:, 0] | three[:, 1] << 8 | three[:, 2] << 16
    return np.where(values >= 1 << 23, values - (1 << 24), values).reshape(-1, 3).astype(float)


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
