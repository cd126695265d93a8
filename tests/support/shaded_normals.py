# SPDX-License-Identifier: Apache-2.0
"""Normals that a renderer shades textured meshes with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from gaussian_splatting.data.cameras import Camera
from sugar_scene.mesh_files.tangent_space import tangent_frames
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh, sample_texture
from sugar_scene.triangle_rasterizer import rasterize_triangles


@torch.no_grad()
def render_normals(mesh: TexturedMesh, camera: Camera) -> tuple[Tensor, Tensor]:
    """World normals that a renderer shades with, (H, W, 3), and the pixels with a mesh, (H, W)."""
    hits = rasterize_triangles(mesh.vertices, mesh.faces, camera)
    rows, weights = hits.face[hits.covered].long(), hits.barycentrics[hits.covered]
    frames = tangent_frames(*mesh.corner_axes(rows), weights)
    shaded = frames[..., 2]
    if mesh.normal_map is not None:
        at = (mesh.uvs[rows] * weights[..., None]).sum(dim=1)
        own = sample_texture(mesh.normal_map, at) * 2 - 1
        shaded = normalize((frames @ own[..., None])[..., 0], dim=1)
    image = torch.zeros(*hits.face.shape, 3, device=shaded.device)
    image[hits.covered] = shaded
    return image, hits.covered
