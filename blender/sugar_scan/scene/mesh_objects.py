# SPDX-License-Identifier: Apache-2.0
"""Meshes of Blender from arrays, and back after an edit."""

from dataclasses import dataclass

import bpy
import numpy as np

from ..plain.errors import ScanError
from ..plain.obj_file import ObjMesh
from .materials import picture_material

VERTEX_NUMBER = "scan_vertex"
"""Attribute of vertices: their row in the mesh of the results, which edits do not change."""


@dataclass(frozen=True)
class EditedArrays:
    """A mesh as the user left it."""

    numbers: np.ndarray  # row of each vertex in the mesh of the results, (N,)
    vertices: np.ndarray  # in the coordinates of the results, (N, 3)
    faces: np.ndarray  # rows of ``vertices``, (K, 3)


def mesh_of_polygons(name: str, vertices: np.ndarray, faces: np.ndarray) -> bpy.types.Mesh:
    """Make a mesh of polygons with equally many corners. (V, 3), (F, K)"""
    n_faces, n_corners = faces.shape
    mesh = bpy.data.meshes.new(name)
    mesh.vertices.add(len(vertices))
    mesh.vertices.foreach_set("co", vertices.astype(np.float32).ravel())
    mesh.loops.add(faces.size)
    mesh.loops.foreach_set("vertex_index", faces.astype(np.int32).ravel())
    mesh.polygons.add(n_faces)
    starts = np.arange(0, faces.size, n_corners, dtype=np.int32)
    mesh.polygons.foreach_set("loop_start", starts)
    mesh.polygons.foreach_set("use_smooth", np.ones(n_faces, dtype=bool))
    mesh.update(calc_edges=True)
    return mesh


def add_uvs(mesh: bpy.types.Mesh, uvs: np.ndarray) -> None:
    """Add texture coordinates of the corners. (L, 2)"""
    layer = mesh.uv_layers.new(name="UVMap")
    layer.uv.foreach_set("vector", uvs.astype(np.float32).ravel())


def add_attribute(
    mesh: bpy.types.Mesh, name: str, kind: str, domain: str, values: np.ndarray
) -> None:
    """Add an attribute.

    Args:
        mesh: The mesh.
        name: Name of the attribute.
        kind: Type of it, such as ``FLOAT`` or ``FLOAT_COLOR``.
        domain: What has a value each, such as ``POINT`` or ``FACE``.
        values: One row for each.
    """
    fields = {"FLOAT_COLOR": "color", "FLOAT_VECTOR": "vector"}
    attribute = mesh.attributes.new(name, kind, domain)
    attribute.data.foreach_set(fields.get(kind, "value"), values.ravel())


def textured_mesh(name: str, obj: ObjMesh, lit: bool) -> bpy.types.Mesh:
    """Make the mesh of a scan with its materials; vertices are numbered for later edits."""
    mesh = mesh_of_polygons(name, obj.vertices, obj.faces)
    add_uvs(mesh, obj.uvs.reshape(-1, 2))
    numbers = np.arange(len(obj.vertices), dtype=np.int32)
    add_attribute(mesh, VERTEX_NUMBER, "INT", "POINT", numbers)
    for picture in obj.pictures:
        stem = name if picture is None else picture.stem
        mesh.materials.append(picture_material(stem, picture, lit))
    mesh.polygons.foreach_set("material_index", obj.material_of_face.astype(np.int32))
    return mesh


def edited_arrays(
    mesh_object: bpy.types.Object, root: bpy.types.Object, context: bpy.types.Context
) -> EditedArrays:
    """Read a mesh as it is shown: sculpted, posed by an armature, with parts deleted.

    Raises:
        ScanError: It has polygons that are no triangles, or lost the numbers of its vertices.
    """
    was_edited = mesh_object.mode == "EDIT"
    if was_edited:
        # Modifiers, such as an armature, do not reach a mesh in edit mode.
        bpy.ops.object.mode_set(mode="OBJECT")
    try:
        return _evaluated_arrays(mesh_object, root, context)
    finally:
        if was_edited:
            bpy.ops.object.mode_set(mode="EDIT")


def _evaluated_arrays(
    mesh_object: bpy.types.Object, root: bpy.types.Object, context: bpy.types.Context
) -> EditedArrays:
    """Read a mesh after its modifiers."""
    evaluated = mesh_object.evaluated_get(context.evaluated_depsgraph_get())
    mesh = evaluated.to_mesh()
    try:
        attribute = mesh.attributes.get(VERTEX_NUMBER)
        if attribute is None:
            raise ScanError(f"{mesh_object.name}: was not imported as a scan; import it again")
        n_vertices = len(mesh.vertices)
        n_faces = len(mesh.polygons)
        if len(mesh.loops) != 3 * n_faces:
            raise ScanError(f"{mesh_object.name}: has polygons that are no triangles")
        numbers = np.empty(n_vertices, dtype=np.int32)
        attribute.data.foreach_get("value", numbers)
        vertices = np.empty(3 * n_vertices, dtype=np.float32)
        mesh.vertices.foreach_get("co", vertices)
        faces = np.empty(3 * n_faces, dtype=np.int32)
        mesh.loops.foreach_get("vertex_index", faces)
    finally:
        evaluated.to_mesh_clear()
    # An object that was moved by itself is edited, a scan that was moved as a whole is not.
    matrix = np.array(root.matrix_world.inverted() @ evaluated.matrix_world)
    placed = vertices.reshape(-1, 3) @ matrix[:3, :3].T + matrix[:3, 3]
    return EditedArrays(numbers, placed, faces.reshape(-1, 3))
