# SPDX-License-Identifier: Apache-2.0
"""The Gaussians that belong to a textured mesh, by where runs leave both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sugar_extractors.export.exported_frame import PLACED, matrix_to_scene
from sugar_extractors.texture.placed_export import placed_gaussians
from sugar_trainers.naming import MESH, SPLATS
from sugar_utils.errors import Notify, UserError

_MESHES = "refined_mesh"  # folder of the meshes of a run
_GAUSSIANS = "refined_ply"  # folder of its Gaussians, which have the names of the meshes


@dataclass(frozen=True)
class Companions:
    """Files of a textured mesh and of its Gaussians."""

    mesh: Path
    gaussians: Path

    def to_mesh(self, notify: Notify) -> np.ndarray:
        """Return the matrix from the world of the Gaussians to that of the mesh. (4, 4)

        Raises:
            UserError: One of them was moved to unknown axes.
        """
        mesh_to_scene = matrix_to_scene(self.mesh, notify)
        gaussians_to_scene = matrix_to_scene(self.gaussians, notify)
        if np.array_equal(mesh_to_scene, gaussians_to_scene):
            return np.eye(4)
        return np.linalg.inv(mesh_to_scene) @ gaussians_to_scene


def companions_of(result: Path, gaussians: Path | None) -> Companions:
    """Return a textured mesh and its Gaussians.

    Args:
        result: The folder of results, or a textured OBJ.
        gaussians: Its Gaussians; None for those that a run left with the mesh.

    Raises:
        UserError: One of them is missing.
    """
    mesh = mesh_of(result)
    if gaussians is not None:
        if not gaussians.exists():
            raise UserError(f"--gaussians {gaussians}: no such file or folder")
        return Companions(mesh, gaussians)
    expected = _expected_gaussians(mesh)
    if not expected.is_file():
        raise UserError(f"{mesh}: its Gaussians are not at {expected}; pass them as --gaussians")
    return Companions(mesh, expected)


def mesh_of(result: Path) -> Path:
    """Return the textured OBJ of a result, which may be the folder of results."""
    if result.is_dir():
        mesh = result / f"{MESH}.obj"
        if not mesh.is_file():
            raise UserError(f"{result}: has no {mesh.name}; pass a folder of results, or an .obj")
        return mesh
    if result.suffix.lower() != ".obj":
        raise UserError(f"{result}: is no textured mesh; pass a folder of results, or an .obj")
    return result


def _expected_gaussians(mesh: Path) -> Path:
    """Return the file where a run leaves the Gaussians of a mesh."""
    if mesh.stem == MESH:
        return mesh.with_name(SPLATS)
    if mesh.stem.endswith(PLACED):
        original = mesh.with_name(f"{mesh.stem.removesuffix(PLACED)}.obj")
        return placed_gaussians(original)
    if mesh.parent.parent.name == _MESHES:
        root = mesh.parent.parent.parent
        return root / _GAUSSIANS / mesh.parent.name / f"{mesh.stem}.ply"
    return mesh.with_suffix(".ply")
