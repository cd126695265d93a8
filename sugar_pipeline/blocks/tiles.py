# SPDX-License-Identifier: Apache-2.0
"""3D Tiles 1.1: a textured GLB for each block, and above them one coarse model of all.

A viewer shows the coarse model from afar and replaces it, where it comes near, by the tiles. In
glTF y is up, in 3D Tiles z; viewers turn the content.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sugar_extractors.texture.gltf_container import BinaryPart, glb_head, gltf_start
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_utils.files import atomic_path, write_json_atomic

TILESET = "tileset.json"
OVERVIEW = "overview.glb"
_ROOT_ERROR = 4.0  # geometric error of the whole tileset, in those of its coarse model
_UNLIT = "KHR_materials_unlit"
_TRIANGLES = 4
_UP_TO_TILES = np.array([[1.0, 0, 0], [0, 0, -1.0], [0, 1.0, 0]])  # y up to z up
Box = tuple[np.ndarray, np.ndarray]  # low and high corner, y up


def box_of(vertices: np.ndarray) -> Box:
    """Return the corners of the box around points. (V, 3)"""
    return vertices.min(axis=0), vertices.max(axis=0)


def write_tileset(
    folder: Path, overview: TriangleMesh, tiles: Sequence[tuple[str, Box]]
) -> list[Path]:
    """Write the coarse model and the tileset.

    Args:
        folder: Of the tiles.
        overview: The coarse model, y up.
        tiles: Names of the files of the tiles, and their boxes.
    """
    error = edge_length(overview)
    write_colored_glb(folder / OVERVIEW, overview)
    low = np.min([box[0] for _, box in tiles], axis=0)
    high = np.max([box[1] for _, box in tiles], axis=0)
    children = []
    for name, box in tiles:
        children.append(
            {
                "boundingVolume": {"box": _bounding_box(box)},
                "geometricError": 0.0,
                "content": {"uri": name},
            }
        )
    root = {
        "boundingVolume": {"box": _bounding_box((low, high))},
        "geometricError": error,
        "refine": "REPLACE",
        "content": {"uri": OVERVIEW},
        "children": children,
    }
    tileset = {
        "asset": {"version": "1.1", "generator": "sugar-trainer"},
        "geometricError": _ROOT_ERROR * error,
        "root": root,
    }
    write_json_atomic(folder / TILESET, tileset)
    return [folder / TILESET, folder / OVERVIEW]


def edge_length(mesh: TriangleMesh) -> float:
    """Return the median length of the edges of a mesh, world units."""
    corners = mesh.vertices[mesh.faces]
    return float(np.median(np.linalg.norm(corners - np.roll(corners, 1, axis=1), axis=-1)))


def write_colored_glb(path: Path, mesh: TriangleMesh) -> None:
    """Write a mesh, y up, with the colours of its vertices, which viewers do not light."""
    binary = BinaryPart()
    # ``COLOR_0`` holds linear light.
    srgb = mesh.colors / 255.0
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
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
    content["accessors"] = binary.accessors
    content["bufferViews"] = binary.views
    content["buffers"] = [{"byteLength": binary.size}]
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(glb_head(content, path, "use fewer triangles"))
        file.writelines(binary.parts)


def _bounding_box(box: Box) -> list[float]:
    """Centre and half axes of a box in the axes of 3D Tiles. 12 numbers"""
    low, high = box
    center = _UP_TO_TILES @ ((low + high) / 2)
    half = np.abs(_UP_TO_TILES @ ((high - low) / 2))
    return [*center.tolist(), *np.diag(half).reshape(-1).tolist()]
