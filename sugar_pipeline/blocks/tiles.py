# SPDX-License-Identifier: Apache-2.0
"""3D Tiles 1.1: levels of detail by distance.

The root is a coarse model of all blocks, with colours at the vertices. Below it each half of the
blocks has one of as many triangles, and so on down to the single block, which is a textured GLB:
with a picture of a quarter of the side from some distance, and as it is. A viewer shows a level
until its error is large on the screen, then those below it. In glTF y is up, in 3D Tiles z; viewers
turn the content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.data.color_spaces import light_of_srgb
from gaussian_splatting.formats.gltf_container import BinaryPart, finished_glb, gltf_start
from sugar_extractors.mesh.decimation import decimated
from sugar_pipeline.blocks.joined_mesh import welded
from sugar_scene.mesh_files.textured_mesh_io import MeshStyle, TexturedMesh, write_glb
from sugar_scene.triangle_mesh import TriangleMesh, area_normals
from sugar_utils.files import atomic_path, write_json_atomic

TILESET = "tileset.json"
OVERVIEW = "overview"
LEVEL_FACES = 100_000  # of each level with colours at its vertices
SMALL_TEXTURE = 4  # the side of the picture of a tile, in that of the one from some distance
_LEAST_SIDE = 512  # pixels; smaller pictures have no second level
_ROOT_ERROR = 4.0  # geometric error of the whole tileset, in those of its coarse model
_FINER = 0.5  # error of a level, at most, in that of the one above it
_UNLIT = "KHR_materials_unlit"
_TRIANGLES = 4
_UP_TO_TILES = np.array([[1.0, 0, 0], [0, 0, -1.0], [0, 1.0, 0]])  # y up to z up
Box = tuple[np.ndarray, np.ndarray]  # low and high corner, y up


@dataclass(frozen=True)
class Level:
    """One file of a tile."""

    name: str
    error: float  # by which it misses what it shows, world units


@dataclass(frozen=True)
class Tile:
    """A block in a tileset."""

    levels: Sequence[Level]  # the coarsest first
    mesh: TriangleMesh  # with colours at the vertices, y up

    @property
    def box(self) -> Box:
        """Corners of the box around the tile."""
        return box_of(self.mesh.vertices)


def box_of(vertices: np.ndarray) -> Box:
    """Return the corners of the box around points. (V, 3)"""
    return vertices.min(axis=0), vertices.max(axis=0)


def write_tile(folder: Path, number: int, textured: TexturedMesh, mesh: TriangleMesh) -> Tile:
    """Write the files of a block.

    Args:
        mesh: The same with colours at the vertices.
    """
    style = MeshStyle(y_up=True)
    name = f"tile_{number:02d}"
    small = _with_small_texture(textured)
    levels = []
    if small is not None:
        path = folder / f"{name}_small.glb"
        with atomic_path(path) as temporary:
            write_glb(temporary, small, path, style)
        levels.append(Level(path.name, texel_size(small)))
    path = folder / f"{name}.glb"
    with atomic_path(path) as temporary:
        write_glb(temporary, textured, path, style)
    levels.append(Level(path.name, 0.0))
    return Tile(levels, mesh)


def write_tileset(
    folder: Path,
    tiles: Sequence[Tile],
    weld: float,
    record: Mapping[str, object],
) -> list[Path]:
    """Write the tileset, and the levels above the tiles; return all files.

    Args:
        folder: Of the tiles.
        weld: Distance of vertices that are one, world units.
        record: Of where the tiles stand.
    """
    writer = _LevelWriter(folder, weld)
    root = writer.node(tiles, OVERVIEW, np.inf)
    tileset = {
        "asset": {"version": "1.1", "generator": "sugar-trainer"},
        "geometricError": _ROOT_ERROR * root["geometricError"],
        "root": {"refine": "REPLACE", **root},
        "extras": dict(record),
    }
    write_json_atomic(folder / TILESET, tileset)
    return [folder / TILESET, *writer.files]


class _LevelWriter:
    """Writes the levels with colours at the vertices."""

    def __init__(self, folder: Path, weld: float) -> None:
        self._folder = folder
        self._weld = weld
        self.files: list[Path] = []

    def node(self, tiles: Sequence[Tile], name: str, error_above: float) -> dict[str, Any]:
        """Write a level and those below it; return its entry.

        Args:
            name: Of the file, without ending.
            error_above: Geometric error of the level above.
        """
        if len(tiles) == 1 and name != OVERVIEW:
            return _levels_of(tiles[0], error_above)
        joined = welded([tile.mesh for tile in tiles], self._weld)
        mesh = decimated(replace(joined, normals=None), LEVEL_FACES)
        path = self._folder / f"{name}.glb"
        write_colored_glb(path, mesh)
        self.files.append(path)
        error = min(edge_length(mesh), _FINER * error_above)
        children = []
        for number, half in enumerate(_halves(tiles)):
            children.append(self.node(half, f"{name}_{number}", error))
        return {**_entry(box_of(joined.vertices), path.name, error), "children": children}


def _halves(tiles: Sequence[Tile]) -> list[Sequence[Tile]]:
    """Divide tiles across the longest side of their box; a single tile stays whole."""
    if len(tiles) == 1:
        return [tiles]
    centers = np.array([np.add(*tile.box) / 2 for tile in tiles])
    order = np.argsort(centers[:, int(np.ptp(centers, axis=0).argmax())], kind="stable")
    ordered = [tiles[row] for row in order]
    middle = len(tiles) // 2
    return [ordered[:middle], ordered[middle:]]


def _levels_of(tile: Tile, error_above: float) -> dict[str, Any]:
    """The entry of a tile, with finer levels below coarser ones."""
    coarsest, *finer = tile.levels
    error = min(coarsest.error, _FINER * error_above)
    entry = _entry(tile.box, coarsest.name, error)
    if finer:
        entry["children"] = [_levels_of(replace(tile, levels=finer), error)]
    return entry


def _entry(box: Box, name: str, error: float) -> dict[str, Any]:
    return {
        "boundingVolume": {"box": _bounding_box(box)},
        "geometricError": error,
        "content": {"uri": name},
    }


def texel_size(mesh: TexturedMesh) -> float:
    """Return the median side of a texel on the surface, world units."""
    height, width = mesh.texture.shape[:2]
    corners = mesh.vertices.double()[mesh.faces]
    texels = mesh.uvs.double() * mesh.uvs.new_tensor([width, height], dtype=torch.float64)
    first = texels[:, 1] - texels[:, 0]
    second = texels[:, 2] - texels[:, 0]
    texel_areas = (first[:, 0] * second[:, 1] - first[:, 1] * second[:, 0]).abs()
    shares = torch.linalg.vector_norm(area_normals(corners), dim=1) / texel_areas.clamp_min(1e-12)
    return float(shares.median().sqrt())


def _with_small_texture(mesh: TexturedMesh) -> TexturedMesh | None:
    """Return the mesh with a smaller picture; None where it is small already."""
    height, width = mesh.texture.shape[:2]
    if min(height, width) < SMALL_TEXTURE * _LEAST_SIDE:
        return None
    return replace(mesh, texture=_reduced(mesh.texture), normal_map=None)


def _reduced(picture: Tensor) -> Tensor:
    """Average squares of pixels. (H, W, 3) uint8"""
    height, width = picture.shape[:2]
    rows = height // SMALL_TEXTURE
    columns = width // SMALL_TEXTURE
    resized = torch.nn.functional.interpolate(
        picture.permute(2, 0, 1)[None].float(), size=(rows, columns), mode="area"
    )
    return resized[0].permute(1, 2, 0).round().byte()


def edge_length(mesh: TriangleMesh) -> float:
    """Return the median length of the edges of a mesh, world units."""
    corners = mesh.vertices[mesh.faces]
    return float(np.median(np.linalg.norm(corners - np.roll(corners, 1, axis=1), axis=-1)))


def write_colored_glb(path: Path, mesh: TriangleMesh) -> None:
    """Write a mesh, y up, with the colours of its vertices, which viewers do not light."""
    binary = BinaryPart()
    # ``COLOR_0`` holds linear light.
    linear = light_of_srgb(mesh.colors / 255.0)
    attributes = {
        "POSITION": binary.add_floats(torch.from_numpy(mesh.vertices), bounds=True),
        "COLOR_0": binary.add_floats(torch.from_numpy(linear)),
    }
    binary.add_indices(torch.from_numpy(mesh.faces), mesh.n_vertices)
    primitive: dict[str, Any] = {
        "attributes": attributes,
        "indices": len(binary.accessors) - 1,
        "material": 0,
        "mode": _TRIANGLES,
    }
    content = gltf_start(path.stem, primitive, [_UNLIT])
    content["materials"] = [{"doubleSided": True, "extensions": {_UNLIT: {}}}]
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.writelines(finished_glb(content, binary, path, "use fewer triangles"))


def _bounding_box(box: Box) -> list[float]:
    """Centre and half axes of a box in the axes of 3D Tiles. 12 numbers"""
    low, high = box
    center = _UP_TO_TILES @ ((low + high) / 2)
    half = np.abs(_UP_TO_TILES @ ((high - low) / 2))
    return [*center.tolist(), *np.diag(half).reshape(-1).tolist()]
