# SPDX-License-Identifier: Apache-2.0
"""Results as points: the vertices of a mesh, or the centres of Gaussians."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.color_bytes import color_bytes
from gaussian_splatting.core.spherical_harmonics import SH_C0
from gaussian_splatting.formats.packing import require_gaussians
from sugar_extractors.export.reading import open_result
from sugar_extractors.export_contents import PointCloud
from sugar_scene.mesh_files.textured_mesh_io import (
    TexturedMesh,
    sample_texture,
    written_normals,
)
from sugar_scene.triangle_mesh import vertex_normals
from sugar_utils.errors import Notify, UserError


def read_points(path: Path, notify: Notify) -> PointCloud:
    """Read the vertices of a textured OBJ or of a mesh PLY, or the centres of Gaussians.

    Coordinates are near, see :class:`~gaussian_splatting.formats.placement.Placement`.

    Raises:
        UserError: The file is of another kind, or has no points.
    """
    result, _ = open_result(path, notify)
    if isinstance(result, TexturedMesh):
        return _of_textured_mesh(result)
    if isinstance(result, GaussianCloud):
        require_gaussians(path, result)
        base_colors = (result.sh_dc[:, 0].double() * SH_C0 + 0.5).clamp(0, 1).numpy()
        opacities = torch.sigmoid(result.opacity_logits.double())[:, 0].numpy()
        return PointCloud(
            positions=result.means.double().numpy(),
            colors=np.round(base_colors * 255).astype(np.uint8),
            opacities=opacities,
        )
    if not result.n_vertices:
        raise UserError(f"{path}: has no vertices to export; make the mesh again")
    return PointCloud(
        positions=np.asarray(result.vertices, np.float64),
        colors=np.asarray(result.colors, np.uint8),
        normals=vertex_normals(result),
    )


def _of_textured_mesh(mesh: TexturedMesh) -> PointCloud:
    """Return the vertices that triangles use, with the colours that the texture has there."""
    corners = mesh.faces.reshape(-1).numpy()
    # Of a vertex with several places in the picture the first counts.
    vertices, first_corners = np.unique(corners, return_index=True)
    uvs = mesh.uvs.reshape(-1, 2)[torch.from_numpy(first_corners)]
    colors = color_bytes(sample_texture(mesh.texture, uvs))
    normals = written_normals(mesh)
    return PointCloud(
        positions=mesh.vertices.double().numpy()[vertices],
        colors=colors.numpy(),
        normals=normals.double().numpy()[vertices],
    )
