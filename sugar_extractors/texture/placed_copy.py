# SPDX-License-Identifier: Apache-2.0
"""Copies of textured meshes that stand elsewhere, and the one that the texture stage writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.moved import moved_cloud, moved_points
from gaussian_splatting.formats.placement import (
    METRE,
    UP,
    Origin,
    Placement,
    glb_matrix,
    placed_gaussians,
    placed_path,
)
from gaussian_splatting.formats.ply import write_gaussian_ply
from gaussian_splatting.scenes.scene import Scene
from sugar_extractors.placing import PlacementOptions, placing_matrix
from sugar_scene.mesh_files import textured_mesh_io
from sugar_scene.mesh_files.textured_mesh_io import MeshStyle, TexturedMesh
from sugar_utils.device import float32_tensor
from sugar_utils.errors import Notify
from sugar_utils.files import file_digest
from sugar_utils.recipe import Recipe


def write_placed(
    obj_path: Path,
    scene: Scene,
    gaussians: Callable[[], GaussianCloud],
    options: PlacementOptions,
    glb: bool,
    notify: Notify,
    lit: bool = False,
) -> None:
    """Write the copy of a textured mesh and its Gaussians, unless it is there as asked for."""
    mesh = textured_mesh_io.read_textured_mesh(obj_path)
    vertices = mesh.vertices.numpy().astype(np.float64)
    placement = placement_in(scene, vertices, options)
    target = placed_path(obj_path)
    upright = placement.up == UP
    note_file = target.with_suffix(".json")
    moved = moved_points(vertices, placement.matrix)
    size = np.ptp(moved, axis=0)
    record = placement.record(target.parent)
    recipe = Recipe({"placement": record, "lit": lit}, {obj_path.name: file_digest(obj_path)})
    files = [*textured_mesh_io.mesh_files(target, glb), placed_gaussians(obj_path)]
    if not recipe.is_current(note_file, files):
        note_file.unlink(missing_ok=True)
        write_gaussian_ply(placed_gaussians(obj_path), moved_cloud(gaussians(), placement.matrix))
        write_moved_mesh(target, mesh, moved, glb=glb, upright=upright, lit=lit)
        glb_rows = glb_matrix(placement).tolist()
        recipe.write(note_file, [], **record, glb_matrix=glb_rows, size=size.tolist())
    sides = " x ".join(f"{side:.3g}" for side in size)
    unit = " m" if placement.is_metric else ""
    notify(f"placed mesh and Gaussians, {sides}{unit}: {target}")


def placement_in(scene: Scene, vertices: np.ndarray, options: PlacementOptions) -> Placement:
    """Return where results are to stand that have the coordinates of a scene.

    Args:
        scene: With its cameras.
        vertices: Points of the results, in the scene. (V, 3) float64
        options: How they are to stand.
    """
    matrix = placing_matrix(scene.calibrated_cameras, scene.points, vertices, options, scene.offset)
    return Placement(
        matrix,
        up=UP if options.orient == "up" else None,
        unit=METRE if options.known_distance is not None else None,
        origin=Origin(scene=scene.root, world_offset=scene.offset),
    )


def write_moved_mesh(
    obj_path: Path, mesh: TexturedMesh, moved: np.ndarray, glb: bool, upright: bool, lit: bool
) -> None:
    """Write a textured mesh with its vertices elsewhere.

    Args:
        moved: The vertices, (V, 3); rounded to float32.
        upright: Whether y is up in them, as the GLB wants it.
    """
    placed = replace(mesh, vertices=float32_tensor(moved))
    style = MeshStyle(y_up=upright, lit=lit, obj_normals=True)
    textured_mesh_io.write_textured_mesh(obj_path, placed, glb=glb, style=style)
