# SPDX-License-Identifier: Apache-2.0
"""Levels of detail of a textured mesh: each has a quarter of the triangles of the one before."""

from __future__ import annotations

from pathlib import Path

from sugar_extractors.texture import texture_atlas
from sugar_extractors.texture.mesh_reduction import simplified
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh
from sugar_utils.errors import UserError

_RATIO = 4  # of the triangles of two levels
_FEWEST = 50  # triangles of a level
_SMALLEST_PICTURE = 64  # texels per side


def coarser_levels(
    full: TexturedMesh, finest: TexturedMesh, n_levels: int, normal_map: bool
) -> tuple[TexturedMesh, ...]:
    """Return the levels after the first, each made of the full mesh.

    Quarters of the triangles have pictures of half the side, so that a triangle has as many texels
    in each level.

    Args:
        full: The mesh with all triangles, whose colours and normals each level gets.
        finest: The first level, the full mesh or one with fewer triangles.
        n_levels: Number of levels with the first.
        normal_map: Keep the normals of the full mesh as pictures.

    Raises:
        UserError: The last level would have too few triangles to be of use.
    """
    most = 1
    while finest.n_faces // _RATIO**most >= _FEWEST:
        most += 1
    if n_levels > most:
        advice = f"choose at most --lods {most}" if most > 1 else "leave out --lods"
        raise UserError(
            f"--lods {n_levels}: {finest.n_faces:,} triangles are enough for {most} levels; "
            f"{advice}"
        )
    levels = []
    for number in range(1, n_levels):
        n_faces = finest.n_faces // _RATIO**number
        side = max(_SMALLEST_PICTURE, finest.texture.shape[1] >> number)
        # Squares of all triangles have to fit, which small pictures of fine meshes may not hold.
        least = texture_atlas.MIN_SQUARE_SIZE * texture_atlas.squares_per_axis(n_faces)
        side = min(max(side, least), full.texture.shape[1])
        levels.append(simplified(full, n_faces, side, normal_map))
    return tuple(levels)


def level_file(target: Path, number: int) -> Path:
    """Return the file of a level beside the one with all levels."""
    return target.with_name(f"{target.stem}_LOD{number}{target.suffix}")


def level_files(target: Path, n_levels: int | None) -> list[Path]:
    """Return the files of all levels; none where there are no levels."""
    return [level_file(target, number) for number in range(n_levels or 0)]


def further_level_files(target: Path, n_levels: int | None) -> list[Path]:
    """Return the files of an earlier export with more levels, with the JSON files beside them."""
    files = []
    number = n_levels or 0
    while level_file(target, number).is_file():
        path = level_file(target, number)
        files.append(path)
        record = path.with_name(f"{path.name}.json")
        if record.is_file():
            files.append(record)
        number += 1
    return files
