# SPDX-License-Identifier: Apache-2.0
"""Shapes to collide with in a GLB, as nodes with the names that engines look for.

Unreal takes ``UCX_NAME_00`` as a convex piece of the mesh ``NAME``, Godot a name that ends with
``-colonly`` as a body of any shape. The material of the shapes lets nothing through its alpha
mask, so that no viewer draws them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gaussian_splatting.core.moved import GLB_AXES
from gaussian_splatting.formats.gltf_container import BinaryPart
from sugar_extractors.export_contents import Collider

COLLISION_KEY = "collision"
"""Key of a node's extras: ``convex`` or ``mesh``."""

_TRIANGLES = 4  # number of the glTF 2.0 specification
_UNSEEN = {
    "name": "collision",
    "alphaMode": "MASK",
    "alphaCutoff": 0.5,
    "pbrMetallicRoughness": {"baseColorFactor": [1.0, 1.0, 1.0, 0.0]},
}


def add_collider(
    content: dict[str, Any], binary: BinaryPart, collider: Collider, name: str, y_up: bool
) -> None:
    """Add the shapes of a collider to a GLB under construction.

    Args:
        content: The JSON part.
        binary: The binary part.
        collider: In the axes of the mesh.
        name: Of the mesh that it belongs to.
        y_up: Whether y is up already; else the shapes are turned from the capture's axes.
    """
    turn = np.ones(3) if y_up else np.diag(GLB_AXES)[:3]
    content["materials"].append(_UNSEEN)
    extras = {COLLISION_KEY: "convex" if collider.convex else "mesh"}
    for number, shape in enumerate(collider.shapes):
        node_name = f"UCX_{name}_{number:02d}" if collider.convex else f"{name}-colonly"
        positions = torch.from_numpy(shape.vertices * turn)
        primitive = {
            "attributes": {"POSITION": binary.add_floats(positions, bounds=True)},
            "indices": binary.add_indices(torch.from_numpy(shape.faces), len(shape.vertices)),
            "material": len(content["materials"]) - 1,
            "mode": _TRIANGLES,
        }
        content["meshes"].append({"name": node_name, "primitives": [primitive]})
        node = {"name": node_name, "mesh": len(content["meshes"]) - 1, "extras": extras}
        content["nodes"].append(node)
        content["scenes"][0]["nodes"].append(len(content["nodes"]) - 1)
