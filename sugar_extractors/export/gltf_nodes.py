# SPDX-License-Identifier: Apache-2.0
"""World transforms of the nodes of a glTF."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def mesh_matrix(content: Mapping[str, Any], mesh: int) -> np.ndarray:
    """Return the matrix from the axes of a mesh to the world of its glTF. (4, 4) float64

    Args:
        content: The JSON of the glTF.
        mesh: Number of the mesh, which hangs on at most one node.

    Raises:
        ValueError: It hangs on several nodes, or nodes hang on each other.
    """
    nodes: Sequence[Mapping[str, Any]] = content.get("nodes", [])
    parents = {child: i for i, node in enumerate(nodes) for child in node.get("children", [])}
    holders = [i for i, node in enumerate(nodes) if node.get("mesh") == mesh]
    if not holders:
        return np.eye(4)
    if len(holders) > 1:
        raise ValueError(f"{len(holders)} nodes show it")
    (number,) = holders
    matrix = _node_matrix(nodes[number])
    for _ in nodes:
        if number not in parents:
            return matrix
        number = parents[number]
        matrix = _node_matrix(nodes[number]) @ matrix
    raise ValueError("its nodes hang on each other")


def _node_matrix(node: Mapping[str, Any]) -> np.ndarray:
    """Return the matrix of a node: its own, or that of its translation, rotation and scale."""
    if "matrix" in node:
        return np.array(node["matrix"], float).reshape(4, 4).T
    # A tenth of a program's start, and few programs read nodes.
    from scipy.spatial.transform import Rotation

    rotation = Rotation.from_quat(node.get("rotation", (0, 0, 0, 1))).as_matrix()
    matrix = np.eye(4)
    matrix[:3, :3] = rotation * np.array(node.get("scale", (1, 1, 1)), float)
    matrix[:3, 3] = node.get("translation", (0, 0, 0))
    return matrix
