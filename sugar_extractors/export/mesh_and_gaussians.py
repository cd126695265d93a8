# SPDX-License-Identifier: Apache-2.0
"""The Gaussians that belong to a textured mesh, by where runs leave both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gaussian_splatting.formats.placement import MESH, PLACED, SPLATS, placed_gaussians
from sugar_trainers.naming import REFINED_MESH_FOLDER, REFINED_PLY_FOLDER
from sugar_utils.errors import UserError


@dataclass(frozen=True)
class MeshAndGaussians:
    """Files of a textured mesh and of its Gaussians."""

    mesh: Path
    gaussians: Path


def mesh_and_gaussians_of(result: Path, gaussians: Path | None) -> MeshAndGaussians:
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
        return MeshAndGaussians(mesh, gaussians)
    expected = _expected_gaussians(mesh)
    if not expected.is_file():
        raise UserError(f"{mesh}: its Gaussians are not at {expected}; pass them as --gaussians")
    return MeshAndGaussians(mesh, expected)


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


def gaussians_of(result: Path) -> Path:
    """Return the Gaussians of a result: of a folder of results its file of them."""
    splats = result / SPLATS
    return splats if splats.is_file() else result


def points_of(result: Path) -> Path:
    """Return the file of a result whose points are exported: of a folder of results its mesh."""
    names = (f"{MESH}.obj", f"{MESH}.ply", SPLATS)
    files = [result / name for name in names if (result / name).is_file()]
    return files[0] if files else result


def _expected_gaussians(mesh: Path) -> Path:
    """Return the file where a run leaves the Gaussians of a mesh."""
    if mesh.stem == MESH:
        return mesh.with_name(SPLATS)
    if mesh.stem.endswith(PLACED):
        original = mesh.with_name(f"{mesh.stem.removesuffix(PLACED)}.obj")
        return placed_gaussians(original)
    if mesh.parent.parent.name == REFINED_MESH_FOLDER:
        # Gaussians have the names of the meshes.
        root = mesh.parent.parent.parent
        return root / REFINED_PLY_FOLDER / mesh.parent.name / f"{mesh.stem}.ply"
    return mesh.with_suffix(".ply")
