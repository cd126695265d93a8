# SPDX-License-Identifier: Apache-2.0
"""Textured OBJ files of triangles. Vertices keep their order, by which Gaussians are bound."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .errors import ScanError


@dataclass(frozen=True)
class ObjMesh:
    """Triangles with texture coordinates and materials."""

    vertices: np.ndarray  # (V, 3) float64
    faces: np.ndarray  # rows of the vertices, (F, 3) int64
    uvs: np.ndarray  # texture coordinates of the corners, v upwards, (F, 3, 2) float64
    material_of_face: np.ndarray  # rows of ``pictures``, (F,) int64
    pictures: tuple[Path | None, ...]  # of the materials; None for one without a picture


def read_obj(path: Path) -> ObjMesh:
    """Read an OBJ of triangles and the pictures that its material file names.

    Raises:
        ScanError: A file is missing or damaged.
    """
    try:
        lines = path.read_bytes().split(b"\n")
        vertices = _table(lines, b"v ", 3).astype(np.float64)
        points = _table(lines, b"vt ", 2).astype(np.float64)
        corners = _corners(lines)
        names, material_of_face = _materials_of_faces(lines)
        pictures = _pictures(path, lines)
        return ObjMesh(
            vertices=vertices,
            faces=corners[..., 0],
            uvs=points[corners[..., 1]],
            material_of_face=material_of_face,
            pictures=tuple(pictures.get(name) for name in names),
        )
    except (OSError, ValueError, IndexError) as error:
        raise ScanError(f"{path}: damaged, or not a textured OBJ of triangles ({error})") from error


def write_obj(path: Path, vertices: np.ndarray, faces: np.ndarray) -> None:
    """Write an OBJ without texture. (V, 3), (F, 3)"""
    with path.open("w", encoding="ascii") as file:
        # Nine digits give every float32 back as it was.
        np.savetxt(file, vertices, fmt="v %.9g %.9g %.9g")
        np.savetxt(file, faces + 1, fmt="f %d %d %d")


def _table(lines: Sequence[bytes], prefix: bytes, width: int) -> np.ndarray:
    """Return the first words of all lines with a prefix. (N, width) of bytes"""
    rows = [line.split()[1 : 1 + width] for line in lines if line.startswith(prefix)]
    return np.array(rows).reshape(-1, width)


def _corners(lines: Sequence[bytes]) -> np.ndarray:
    """Return the rows of vertex and texture coordinate of all corners. (F, 3, 2) int64"""
    text = b" ".join(line[2:] for line in lines if line.startswith(b"f "))
    words = text.split()
    numbers = np.array(text.replace(b"/", b" ").split()).astype(np.int64)
    per_corner = len(numbers) // max(1, len(words))
    return numbers.reshape(-1, 3, per_corner)[..., :2] - 1


def _materials_of_faces(lines: Sequence[bytes]) -> tuple[list[str], np.ndarray]:
    """Return the names of materials and, of each face, the row of its own. (F,) int64"""
    names: list[str] = []
    rows = []
    row = 0
    for line in lines:
        if line.startswith(b"usemtl "):
            name = _name(line)
            if name not in names:
                names.append(name)
            row = names.index(name)
        elif line.startswith(b"f "):
            rows.append(row)
    return names or [""], np.array(rows, dtype=np.int64)


def _pictures(path: Path, lines: Sequence[bytes]) -> dict[str, Path]:
    """Return the pictures of the materials by their names."""
    pictures: dict[str, Path] = {}
    library = next((line for line in lines if line.startswith(b"mtllib ")), None)
    if library is None:
        return pictures
    material = ""
    for line in (path.parent / _name(library)).read_bytes().split(b"\n"):
        if line.startswith(b"newmtl "):
            material = _name(line)
        elif line.startswith(b"map_Kd "):
            pictures[material] = path.parent / _name(line)
    return pictures


def _name(line: bytes) -> str:
    """Return what follows the first word of a line."""
    return line.split(None, 1)[1].strip().decode("utf-8", errors="surrogateescape")
