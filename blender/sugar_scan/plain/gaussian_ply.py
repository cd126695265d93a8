# SPDX-License-Identifier: Apache-2.0
"""Gaussians from PLY files in the layout of 3DGS, as values that can be drawn."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .errors import ScanError

_TYPES = {"float": "<f4", "float32": "<f4", "double": "<f8", "float64": "<f8", "uchar": "u1"}
_HEADER_LIMIT = 1 << 16  # bytes
_DEGREE_0 = 0.28209479177387814  # the constant spherical harmonic


@dataclass(frozen=True)
class Gaussians:
    """Gaussians without what depends on the view."""

    means: np.ndarray  # (N, 3) float32
    scales: np.ndarray  # standard deviations along the axes, (N, 3) float32
    quats: np.ndarray  # rotations of the axes, w first, of length 1, (N, 4) float32
    opacities: np.ndarray  # (N,) float32 in [0, 1]
    colors: np.ndarray  # linear light as Blender wants it, (N, 3) float32

    def __len__(self) -> int:
        return len(self.means)

    def rows(self, rows: np.ndarray) -> "Gaussians":
        """Return some of the Gaussians."""
        return Gaussians(
            means=self.means[rows],
            scales=self.scales[rows],
            quats=self.quats[rows],
            opacities=self.opacities[rows],
            colors=self.colors[rows],
        )


def read_gaussians(path: Path) -> Gaussians:
    """Read a binary PLY of Gaussians.

    Raises:
        ScanError: The file is damaged, or has no Gaussians.
    """
    try:
        table = _read_table(path)
        quats = _columns(table, "rot_0", "rot_1", "rot_2", "rot_3")
        lengths = np.linalg.norm(quats, axis=1, keepdims=True)
        screen_colors = 0.5 + _DEGREE_0 * _columns(table, "f_dc_0", "f_dc_1", "f_dc_2")
        return Gaussians(
            means=_columns(table, "x", "y", "z"),
            scales=np.exp(_columns(table, "scale_0", "scale_1", "scale_2")),
            quats=quats / np.maximum(lengths, np.float32(1e-12)),
            opacities=1 / (1 + np.exp(-table["opacity"].astype(np.float32))),
            colors=linear_light(screen_colors),
        )
    except (OSError, ValueError, LookupError) as error:
        raise ScanError(f"{path}: damaged, or no PLY of Gaussians ({error})") from error


def linear_light(colors: np.ndarray) -> np.ndarray:
    """Return the linear light of colours of screens, sRGB in [0, 1] (IEC 61966-2-1)."""
    colors = np.clip(colors, 0, 1)
    bright = ((colors + 0.055) / 1.055) ** 2.4
    return np.where(colors <= 0.04045, colors / 12.92, bright).astype(np.float32)


def _read_table(path: Path) -> np.ndarray:
    """Return the vertices of a binary PLY as a structured array."""
    with path.open("rb") as file:
        header = file.read(_HEADER_LIMIT)
        end = header.index(b"end_header\n") + len(b"end_header\n")
        fields = []
        count = 0
        for line in header[:end].decode("ascii", errors="replace").splitlines():
            words = line.split()
            if words[:2] == ["element", "vertex"]:
                count = int(words[2])
            elif words[:1] == ["property"]:
                fields.append((words[2], _TYPES[words[1]]))
            elif words[:1] == ["format"] and words[1] != "binary_little_endian":
                raise ValueError(f"its format is {words[1]}")
        file.seek(end)
        kind = np.dtype(fields)
        content = file.read(count * kind.itemsize)
    return np.frombuffer(content, kind, count)


def _columns(table: np.ndarray, *names: str) -> np.ndarray:
    """Return properties as columns. (N, K) float32"""
    return np.stack([table[name] for name in names], axis=1).astype(np.float32)
