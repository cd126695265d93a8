# SPDX-License-Identifier: Apache-2.0
"""The empty that all objects of a scan hang on, and what it remembers of the folder of results.

Objects below it are in the coordinates of the results, and it turns these to Blender's axes. So a
scan can be moved as a whole, and its mesh still goes back to where it came from.
"""

from pathlib import Path

import bpy
import numpy as np
from mathutils import Matrix

from ..plain.axes import file_to_blender
from ..plain.result_folder import ResultFolder

FOLDER = "sugar_scan_folder"
"""Custom property of the empty: the folder of results."""

_EMPTY_SIZE = 0.2


def blender_matrix(matrix: np.ndarray) -> Matrix:
    """Return a matrix of NumPy as one of Blender. (4, 4)"""
    return Matrix(matrix.tolist())


def make_root(result: ResultFolder, context: bpy.types.Context) -> bpy.types.Object:
    """Make the empty of a scan, in a collection of its own."""
    collection = bpy.data.collections.new(result.name)
    context.scene.collection.children.link(collection)
    root = bpy.data.objects.new(result.name, None)
    root.empty_display_type = "ARROWS"
    root.empty_display_size = _EMPTY_SIZE
    root.matrix_world = blender_matrix(file_to_blender(result.up))
    root[FOLDER] = str(result.path)
    collection.objects.link(root)
    return root


def add_object(
    name: str, data: bpy.types.ID, root: bpy.types.Object, collection: bpy.types.Collection
) -> bpy.types.Object:
    """Add an object in the coordinates of the results."""
    added = bpy.data.objects.new(name, data)
    added.parent = root
    collection.objects.link(added)
    return added


def add_collection(name: str, root: bpy.types.Object) -> bpy.types.Collection:
    """Add a collection inside that of a scan, so that what it holds can be hidden at once."""
    collection = bpy.data.collections.new(name)
    root.users_collection[0].children.link(collection)
    return collection


def root_of(scan_object: bpy.types.Object | None) -> bpy.types.Object | None:
    """Return the empty that an object hangs on; None for objects of no scan."""
    while scan_object is not None and FOLDER not in scan_object:
        scan_object = scan_object.parent
    return scan_object


def folder_of(root: bpy.types.Object) -> Path:
    """Return the folder of results of a scan."""
    return Path(root[FOLDER])
