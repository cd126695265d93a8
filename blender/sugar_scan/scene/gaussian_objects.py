# SPDX-License-Identifier: Apache-2.0
"""Gaussians as a point cloud with attributes, or as ellipses that look like them."""

import bpy
import numpy as np

from ..plain.ellipses import ellipses_of
from ..plain.gaussian_ply import Gaussians
from .materials import COLOR, OPACITY, ellipse_material, point_material
from .mesh_objects import add_attribute, add_uvs, mesh_of_polygons
from .point_nodes import RADIUS, point_nodes
from .scan_objects import add_object

_TRANSPARENT_BOUNCES = 64
"""Ellipses that a ray passes; Cycles stops after 8 by default."""


def most_visible(gaussians: Gaussians, count: int) -> Gaussians:
    """Return the Gaussians that cover most, at most so many, in their order."""
    if len(gaussians) <= count:
        return gaussians
    sizes = np.sort(gaussians.scales, axis=1)
    weights = gaussians.opacities * sizes[:, 1] * sizes[:, 2]
    rows = np.argpartition(-weights, count)[:count]
    return gaussians.rows(np.sort(rows))


def add_points(gaussians: Gaussians, root: bpy.types.Object, context: bpy.types.Context) -> None:
    """Add Gaussians as vertices that a modifier makes a point cloud of.

    Its attributes are ``radius``, ``gaussian_color``, ``opacity``, ``scale`` and ``rotation``.
    """
    name = f"{root.name} Gaussians"
    mesh = bpy.data.meshes.new(name)
    mesh.vertices.add(len(gaussians))
    mesh.vertices.foreach_set("co", gaussians.means.ravel())
    radii = np.sort(gaussians.scales, axis=1)[:, 1]
    add_attribute(mesh, RADIUS, "FLOAT", "POINT", radii)
    add_attribute(mesh, COLOR, "FLOAT_COLOR", "POINT", _with_alpha(gaussians.colors))
    add_attribute(mesh, OPACITY, "FLOAT", "POINT", gaussians.opacities)
    add_attribute(mesh, "scale", "FLOAT_VECTOR", "POINT", gaussians.scales)
    add_attribute(mesh, "rotation", "QUATERNION", "POINT", gaussians.quats)
    added = add_object(name, mesh, root, root.users_collection[0])
    modifier = added.modifiers.new("Points", "NODES")
    modifier.node_group = point_nodes(point_material())


def add_ellipses(gaussians: Gaussians, root: bpy.types.Object, context: bpy.types.Context) -> None:
    """Add Gaussians as rectangles whose material fades as Gaussians do."""
    name = f"{root.name} Gaussians"
    ellipses = ellipses_of(gaussians)
    mesh = mesh_of_polygons(name, ellipses.vertices, ellipses.faces)
    add_uvs(mesh, ellipses.uvs)
    add_attribute(mesh, COLOR, "FLOAT_COLOR", "FACE", _with_alpha(gaussians.colors))
    add_attribute(mesh, OPACITY, "FLOAT", "FACE", gaussians.opacities)
    mesh.materials.append(ellipse_material())
    add_object(name, mesh, root, root.users_collection[0])
    cycles = context.scene.cycles
    bounces = max(cycles.transparent_max_bounces, _TRANSPARENT_BOUNCES)
    cycles.transparent_max_bounces = bounces


def _with_alpha(colors: np.ndarray) -> np.ndarray:
    """Return colours with a fourth column of ones. (N, 3) -> (N, 4)"""
    ones = np.ones((len(colors), 1), dtype=np.float32)
    return np.concatenate([colors, ones], axis=1)
