# SPDX-License-Identifier: Apache-2.0
"""Pictures of a textured mesh without lighting, as metrics and reports show it."""

from __future__ import annotations

import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from sugar_extractors.texture.textured_mesh_io import TexturedMesh
from sugar_scene.mesh.triangle_rasterizer import rasterize_triangles


@torch.no_grad()
def render_textured(
    mesh: TexturedMesh, camera: Camera, background: Tensor | None = None, *, supersampling: int = 1
) -> Tensor:
    """Render the first hit of every pixel with the bilinear colour of the texture.

    Args:
        mesh: On any device.
        camera: Camera to render, at its own size and intrinsics.
        background: Colour behind the mesh; black when None. (3,)
        supersampling: Rays per pixel along each axis; their mean is the pixel.

    Returns:
        (H, W, 3) in [0, 1], on the device of the mesh.
    """
    device = mesh.vertices.device
    fine = camera.resized(camera.width * supersampling, camera.height * supersampling)
    hits = rasterize_triangles(mesh.vertices, mesh.faces, fine)
    image = torch.zeros(fine.height, fine.width, 3, device=device)
    if background is not None:
        image[:] = background.to(image)
    covered = hits.covered
    uvs = mesh.uvs[hits.face[covered].long()]
    at = (hits.barycentrics[covered][..., None] * uvs).sum(dim=1)
    image[covered] = sample_texture(mesh.texture, at)
    if supersampling == 1:
        return image
    shape = (camera.height, supersampling, camera.width, supersampling, 3)
    return image.reshape(shape).mean(dim=(1, 3))


def sample_texture(texture: Tensor, uvs: Tensor) -> Tensor:
    """Bilinear colours of a texture.

    Args:
        texture: Row 0 is at v = 1. (H, W, 3) uint8
        uvs: Coordinates in [0, 1], v upwards. (P, 2)

    Returns:
        (P, 3) in [0, 1]
    """
    height, width, _ = texture.shape
    x = (uvs[:, 0] * width - 0.5).clamp(0, width - 1)
    y = ((1 - uvs[:, 1]) * height - 0.5).clamp(0, height - 1)
    left, top = x.floor(), y.floor()
    x_share, y_share = (x - left)[:, None], (y - top)[:, None]
    x0, y0 = left.long(), top.long()
    x1, y1 = (x0 + 1).clamp_max(width - 1), (y0 + 1).clamp_max(height - 1)
    upper = texture[y0, x0] * (1 - x_share) + texture[y0, x1] * x_share
    lower = texture[y1, x0] * (1 - x_share) + texture[y1, x1] * x_share
    return (upper * (1 - y_share) + lower * y_share) / 255
