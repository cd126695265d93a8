# SPDX-License-Identifier: Apache-2.0
"""GLB files of textured meshes with shapes to collide with, and with levels of detail.

A file with several levels has the extension ``MSFT_lod``: the scene holds the node of the first
level, which names the nodes of the others. Programs without the extension show the first level.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gaussian_splatting.formats.gltf_container import BinaryPart, finished_glb
from sugar_extractors.export.engines.collision_gltf import add_collider
from sugar_extractors.export.engines.levels import level_file
from sugar_extractors.export_contents import MeshExport
from sugar_scene.mesh_files.textured_mesh_io import (
    MeshStyle,
    TexturedMesh,
    gltf_with_mesh,
    small_picture,
)

LEVELS_EXTENSION = "MSFT_lod"
COVERAGE_KEY = "MSFT_screencoverage"
"""Key of the extras with the share of the screen down to which each level is shown."""

_SCREEN_PIXELS = 1920 * 1080
_TRIANGLE_PIXELS = 2.0  # of a triangle of the next level where it takes over


def write_glb(export: MeshExport) -> None:
    """Write the GLB of an export, and one for each level where there are several.

    Raises:
        UserError: A file would be larger than 4 GiB.
    """
    levels = (export.mesh, *export.coarser)
    if len(levels) == 1:
        _write_levels(export, export.target, levels, export.target.stem)
        return
    for number, level in enumerate(levels):
        path = level_file(export.target, number)
        _write_levels(export, path, (level,), path.stem, with_collider=number == 0)
    _write_levels(export, export.target, levels, level_file(export.target, 0).stem)


def _write_levels(
    export: MeshExport,
    path: Path,
    levels: tuple[TexturedMesh, ...],
    name: str,
    with_collider: bool = True,
) -> None:
    """Write one GLB.

    Args:
        export: What is exported.
        path: File that is written.
        levels: Meshes in it, the finest first.
        name: Of the first mesh.
        with_collider: Whether it has the shapes to collide with, too.
    """
    # Where only some levels were lit, the look would change with the distance.
    has_normals = any(level.normal_map is not None for level in (export.mesh, *export.coarser))
    lit = export.lit or has_normals
    style = MeshStyle(y_up=export.upright, lit=lit)
    binary = BinaryPart()
    content = gltf_with_mesh(binary, levels[0], small_picture(levels[0].texture), name, style)
    for number, level in enumerate(levels[1:], start=1):
        level_name = level_file(export.target, number).stem
        picture = small_picture(level.texture)
        _append_level(content, gltf_with_mesh(binary, level, picture, level_name, style))
    if len(levels) > 1:
        node = content["nodes"][0]
        node["extensions"] = {LEVELS_EXTENSION: {"ids": list(range(1, len(levels)))}}
        node["extras"] = {COVERAGE_KEY: _screen_coverage(levels)}
        content.setdefault("extensionsUsed", []).append(LEVELS_EXTENSION)
    if export.collider is not None and with_collider:
        add_collider(content, binary, export.collider, name, y_up=export.upright)
    with export.paths[path].open("wb") as file:
        file.writelines(finished_glb(content, binary, path, "use --texture_size"))


def _append_level(content: dict[str, Any], level: dict[str, Any]) -> None:
    """Append the mesh of a JSON part to another one, outside of its scene."""
    n_textures = len(content["textures"])
    n_images = len(content["images"])
    (material,) = level["materials"]
    material["pbrMetallicRoughness"]["baseColorTexture"]["index"] += n_textures
    if "normalTexture" in material:
        material["normalTexture"]["index"] += n_textures
    for texture in level["textures"]:
        texture["source"] += n_images
    (mesh,) = level["meshes"]
    mesh["primitives"][0]["material"] = len(content["materials"])
    for key in ("materials", "textures", "images"):
        content[key] += level[key]
    content["meshes"].append(mesh)
    content["nodes"].append({"name": mesh["name"], "mesh": len(content["meshes"]) - 1})


def _screen_coverage(levels: tuple[TexturedMesh, ...]) -> list[float]:
    """Return the smallest screen coverage of each level; the last one is always shown.

    Half of the triangles face the camera. A level takes over where they are small.
    """
    shares = []
    for level in levels[1:]:
        pixels = _TRIANGLE_PIXELS * level.n_faces / 2
        shares.append(min(1.0, pixels / _SCREEN_PIXELS))
    return [*shares, 0.0]
