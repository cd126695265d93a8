# SPDX-License-Identifier: Apache-2.0
"""Compressed PLY files of PlayCanvas and SuperSplat.

Element ``chunk`` has the bounds of 256 Gaussians each: positions, logarithmic scales and, in newer
files, colours. Element ``vertex`` has four numbers of 32 bits each, from the highest bit on:
``packed_position`` and ``packed_scale`` 11, 10 and 11 bits of x, y and z between those bounds;
``packed_rotation`` 2 bits for the place of the largest part of the quaternion (wxyz) and 10 for
each other; ``packed_color`` 8 each for red, green, blue and opacity. Element ``sh``, if there is
one, has a byte ``f_rest_*`` for each coefficient, from -4 to 4.
"""

from __future__ import annotations

import numpy as np
from plyfile import PlyData

from gaussian_splatting.rasterization.spherical_harmonics import rgb_to_sh

CHUNK_ROWS = 256
PACKED = ("packed_position", "packed_rotation", "packed_scale", "packed_color")
_AXES = ("x", "y", "z")
_PLACES_OF_AXES = ((21, 11), (11, 10), (0, 11))  # lowest bit and number of bits
_COLORS = ("r", "g", "b")
_HARMONICS_RANGE = 8.0


def is_compressed(data: PlyData) -> bool:
    """Whether a PLY has the layout of this module."""
    names = data["vertex"].data.dtype.names
    return "chunk" in data and set(PACKED) <= set(names)


def uncompressed(data: PlyData) -> np.ndarray:
    """The Gaussians of a compressed PLY with the properties of an uncompressed one. (N,) records

    Opacities of 0 and 1 have infinite logits.

    Raises:
        ValueError: Elements lack properties, or are too short.
    """
    vertices = data["vertex"].data
    chunks = data["chunk"].data
    n = len(vertices)
    if len(chunks) * CHUNK_ROWS < n:
        raise ValueError(f"{len(chunks)} chunks of {CHUNK_ROWS} for {n} Gaussians")
    row_chunks = chunks[np.arange(n) // CHUNK_ROWS]
    position, rotation, scale, color = (vertices[name].astype(np.uint32) for name in PACKED)
    columns: dict[str, np.ndarray] = {}
    for number, (axis, (shift, bits)) in enumerate(zip(_AXES, _PLACES_OF_AXES, strict=True)):
        share = _share(position, shift, bits)
        columns[axis] = _between(row_chunks, f"min_{axis}", f"max_{axis}", share)
        share = _share(scale, shift, bits)
        bounds = f"min_scale_{axis}", f"max_scale_{axis}"
        columns[f"scale_{number}"] = _between(row_chunks, *bounds, share)
    for number, channel in enumerate(_COLORS):
        share = _share(color, 24 - 8 * number, 8)
        if f"min_{channel}" in chunks.dtype.names:
            share = _between(row_chunks, f"min_{channel}", f"max_{channel}", share)
        columns[f"f_dc_{number}"] = rgb_to_sh(share)
    opacity = _share(color, 0, 8)
    with np.errstate(divide="ignore"):
        columns["opacity"] = np.log(opacity) - np.log(1 - opacity)
    for number, part in enumerate(_quaternions(rotation).T):
        columns[f"rot_{number}"] = part
    if "sh" in data:
        harmonics = data["sh"].data
        if len(harmonics) != n:
            raise ValueError(f"{len(harmonics)} rows of spherical harmonics for {n} Gaussians")
        for name in harmonics.dtype.names:
            columns[name] = _harmonic(harmonics[name])
    records = np.empty(n, [(name, "<f8") for name in columns])
    for name, values in columns.items():
        records[name] = values
    return records


def _share(packed: np.ndarray, shift: int, bits: int) -> np.ndarray:
    """Some bits of numbers as shares of their range. (N,) float64 in [0, 1]"""
    most = (1 << bits) - 1
    return ((packed >> np.uint32(shift)) & np.uint32(most)) / most


def _between(chunks: np.ndarray, low: str, high: str, share: np.ndarray) -> np.ndarray:
    first = chunks[low].astype(np.float64)
    return first + (chunks[high] - first) * share


def _quaternions(packed: np.ndarray) -> np.ndarray:
    """Unit quaternions, wxyz. (N,) uint32 -> (N, 4)"""
    shares = [_share(packed, shift, 10) for shift in (20, 10, 0)]
    three = (np.stack(shares, axis=1) - 0.5) * np.sqrt(2)
    largest = packed >> np.uint32(30)
    quats = np.empty((len(packed), 4))
    quats[np.arange(4) != largest[:, None]] = three.ravel()
    rest = np.sqrt(np.maximum(0.0, 1 - (three**2).sum(axis=1)))
    quats[np.arange(len(quats)), largest] = rest
    return quats


def _harmonic(values: np.ndarray) -> np.ndarray:
    """Coefficients of bytes: the ends of the range are 0 and 255, others the middle of a step."""
    share = (values.astype(np.float64) + 0.5) / 256
    share = np.where(values == 0, 0.0, np.where(values == 255, 1.0, share))
    return (share - 0.5) * _HARMONICS_RANGE
