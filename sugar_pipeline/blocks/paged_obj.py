# SPDX-License-Identifier: Apache-2.0
"""An OBJ with several pictures: a material, called a page, for each block."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import IO

import numpy as np

from sugar_extractors.texture.tangent_space import shared_corners
from sugar_extractors.texture.textured_mesh_io import TexturedMesh, png_bytes
from sugar_utils.files import atomic_path

_CHUNK_ROWS = 65_536


def write_paged_obj(path: Path, pages: Iterable[TexturedMesh]) -> list[Path]:
    """Write textured meshes into one OBJ, one after the other; return its files, the OBJ first.

    In memory is one of them at a time.
    """
    material_path = path.with_suffix(".mtl")
    pictures = []
    materials = []
    n_vertices = 0
    n_places = 0
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(f"mtllib {material_path.name}\n".encode())
        for number, page in enumerate(pages):
            picture = path.with_name(f"{path.stem}_{number:02d}.png")
            with atomic_path(picture) as picture_file:
                picture_file.write_bytes(png_bytes(page.texture))
            pictures.append(picture)
            materials.append(f"newmtl page_{number:02d}\nmap_Kd {picture.name}\n")
            shared = shared_corners(page.faces, page.uvs)
            file.write(f"usemtl page_{number:02d}\n".encode())
            # Nine digits give every float32 back as it was.
            _write_lines(file, "v %.9g %.9g %.9g\n", page.vertices.numpy())
            _write_lines(file, "vt %.9g %.9g\n", shared.uvs.numpy())
            corners = np.stack(
                [page.faces.numpy() + 1 + n_vertices, shared.rows.numpy() + 1 + n_places], axis=2
            )
            _write_lines(file, "f %d/%d %d/%d %d/%d\n", corners.reshape(-1, 6))
            n_vertices += len(page.vertices)
            n_places += len(shared.uvs)
        with atomic_path(material_path) as material_file:
            material_file.write_text("\n".join(materials), encoding="utf-8")
    return [path, material_path, *pictures]


def _write_lines(file: IO[bytes], pattern: str, rows: np.ndarray) -> None:
    """Write a line for each row, (N, K), in parts."""
    for first in range(0, len(rows), _CHUNK_ROWS):
        chunk = rows[first : first + _CHUNK_ROWS]
        file.write((pattern * len(chunk) % tuple(chunk.ravel().tolist())).encode())
