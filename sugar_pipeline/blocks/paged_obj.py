# SPDX-License-Identifier: Apache-2.0
"""An OBJ with several pictures: a material, called a page, for each block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from sugar_scene.mesh_files.tangent_space import shared_corners
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh, png_bytes
from sugar_utils.files import atomic_path, write_text_atomic

_CHUNK_ROWS = 65_536


class PagedObj:
    """An OBJ that textured meshes are added to, one after the other."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path = path
        self._file = file
        self._pictures: list[Path] = []
        self._n_vertices = 0
        self._n_places = 0
        file.write(f"mtllib {self._materials.name}\n".encode())

    @property
    def _materials(self) -> Path:
        return self._path.with_suffix(".mtl")

    @property
    def files(self) -> list[Path]:
        """The files, the OBJ first."""
        return [self._path, self._materials, *self._pictures]

    def add(self, page: TexturedMesh) -> None:
        """Write a textured mesh with a material of its own."""
        number = len(self._pictures)
        picture = self._path.with_name(f"{self._path.stem}_{number:02d}.png")
        with atomic_path(picture) as temporary:
            temporary.write_bytes(png_bytes(page.texture))
        self._pictures.append(picture)
        shared = shared_corners(page.faces, page.uvs)
        vertex_rows = page.faces.numpy() + 1 + self._n_vertices
        place_rows = shared.rows.numpy() + 1 + self._n_places
        self._file.write(f"usemtl page_{number:02d}\n".encode())
        # Nine digits give every float32 back as it was.
        self._write_lines("v %.9g %.9g %.9g\n", page.vertices.numpy())
        self._write_lines("vt %.9g %.9g\n", shared.uvs.numpy())
        corners = np.stack([vertex_rows, place_rows], axis=2).reshape(-1, 6)
        self._write_lines("f %d/%d %d/%d %d/%d\n", corners)
        self._n_vertices += len(page.vertices)
        self._n_places += len(shared.uvs)

    def write_materials(self) -> None:
        """Write the file that names the picture of each page."""
        pages = []
        for number, picture in enumerate(self._pictures):
            pages.append(f"newmtl page_{number:02d}\nmap_Kd {picture.name}\n")
        write_text_atomic(self._materials, "\n".join(pages))

    def _write_lines(self, pattern: str, rows: np.ndarray) -> None:
        """Write a line for each row, (N, K), in parts."""
        for first in range(0, len(rows), _CHUNK_ROWS):
            chunk = rows[first : first + _CHUNK_ROWS]
            self._file.write((pattern * len(chunk) % tuple(chunk.ravel().tolist())).encode())


@contextmanager
def paged_obj(path: Path) -> Iterator[PagedObj]:
    """Write an OBJ with pages; its pictures and its material file are there before it."""
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        obj = PagedObj(path, file)
        yield obj
        obj.write_materials()
