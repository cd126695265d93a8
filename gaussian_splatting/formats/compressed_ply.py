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

from gaussian_splatting.core.spherical_harmonics import rgb_to_sh
from gaussian_splatting.formats.packing import from_smallest_three

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
    """Return the Gaussians of a compressed PLY with the properties of a plain one. (N,) records

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
    packed = {name: vertices[name].astype(np.uint32) for name in PACKED}
    columns = {
        **_positions(packed["packed_position"], row_chunks),
        **_scales(packed["packed_scale"], row_chunks),
        **_colors(packed["packed_color"], row_chunks),
        "opacity": _opacity_logits(packed["packed_color"]),
    }
    for number, part in enumerate(_quaternions(packed["packed_rotation"]).T):
        columns[f"rot_{number}"] = part
    if "sh" in data:
        harmonics = data["sh"].data
        if len(harmonics) != n:
            raise ValueError(f"{len(harmonics)} rows of spherical harmonics for {n} Gaussians")
        for name in harmonics.dtype.names:
            columns[name] = _harmonics(harmonics[name])
    records = np.empty(n, [(name, "<f8") for name in columns])
    for name, values in columns.items():
        records[name] = values
    return records


def _positions(packed: np.ndarray, row_chunks: np.ndarray) -> dict[str, np.ndarray]:
    columns = {}
    for axis, (shift, bits) in zip(_AXES, _PLACES_OF_AXES, strict=True):
        share = _share(packed, shift, bits)
        columns[axis] = _interpolate(row_chunks, f"min_{axis}", f"max_{axis}", share)
    return columns


def _scales(packed: np.ndarray, row_chunks: np.ndarray) -> dict[str, np.ndarray]:
    columns = {}
    for number, axis in enumerate(_AXES):
        shift, bits = _PLACES_OF_AXES[number]
        share = _share(packed, shift, bits)
        low = f"min_scale_{axis}"
        high = f"max_scale_{axis}"
        columns[f"scale_{number}"] = _interpolate(row_chunks, low, high, share)
    return columns


def _colors(packed: np.ndarray, row_chunks: np.ndarray) -> dict[str, np.ndarray]:
    columns = {}
    for number, channel in enumerate(_COLORS):
        share = _share(packed, 24 - 8 * number, 8)
        low = f"min_{channel}"
        if low in (row_chunks.dtype.names or ()):
            share = _interpolate(row_chunks, low, f"max_{channel}", share)
        columns[f"f_dc_{number}"] = rgb_to_sh(share)
    return columns


def _opacity_logits(packed_colors: np.ndarray) -> np.ndarray:
    opacity = _share(packed_colors, 0, 8)
    with np.errstate(divide="ignore"):
        return np.log(opacity) - np.log(1 - opacity)


def _share(packed: np.ndarray, shift: int, bits: int) -> np.ndarray:
    """Return some bits of numbers as shares of their range. (N,) float64 in [0, 1]"""
    largest = (1 << bits) - 1
    return ((packed >> np.uint32(shift)) & np.uint32(largest)) / largest


def _interpolate(row_chunks: np.ndarray, low: str, high: str, share: np.ndarray) -> np.ndarray:
    """Return numbers between two bounds of the chunk of each row. (N,) float64"""
    start = row_chunks[low].astype(np.float64)
    return start + (row_chunks[high] - start) * share


def _quaternions(packed: np.ndarray) -> np.ndarray:
    """Return unit quaternions, wxyz. (N,) uint32 -> (N, 4)"""
    shares = np.stack([_share(packed, shift, 10) for shift in (20, 10, 0)], axis=1)
    smaller_parts = (shares - 0.5) * np.sqrt(2)
    return from_smallest_three(packed >> np.uint32(30), smaller_parts)


def _harmonics(values: np.ndarray) -> np.ndarray:
    """Return coefficients of bytes: the ends are 0 and 255, others the middle of a step. (N,)"""
    share = (values.astype(np.float64) + 0.5) / 256
    share[values == 0] = 0.0
    share[values == 255] = 1.0
    return (share - 0.5) * _HARMONICS_RANGE
