# SPDX-License-Identifier: Apache-2.0
"""Figures of meshes that tell whether they are usable: what they cover, and their colours."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.masking import is_counted
from gaussian_splatting.engine.reporting.image_metrics import psnr
from gaussian_splatting.engine.reporting.view_findings import constant_psnr
from gaussian_splatting.engine.reporting.view_residuals import smaller
from sugar_extractors.texture.textured_mesh_io import TexturedMesh
from sugar_extractors.texture.textured_rendering import render_textured
from sugar_scene.mesh.triangle_mesh import TriangleMesh
from sugar_scene.mesh.triangle_rasterizer import rasterize_triangles

N_VIEWS = 8
_MIN_PIXELS = 50


def mesh_health(
    mesh: TriangleMesh | TexturedMesh,
    cameras: Sequence[Camera],
    load_image: Callable[[Camera], Tensor],
) -> dict[str, float]:
    """Coverage of some views, and of a textured mesh the colour error there.

    Args:
        mesh: In the world of the cameras.
        cameras: Views; some of them are measured, at a small size.
        load_image: Returns the image of a camera, as of ``ImageStore.shown``.

    Returns:
        ``mask_iou`` where there are object masks, else ``covered_share``; of a textured mesh also
        ``psnr`` and ``constant_psnr`` of the covered pixels.
    """
    chosen = cameras[:: -(-len(cameras) // N_VIEWS)]
    vertices = torch.as_tensor(mesh.vertices, dtype=torch.float32, device="cpu")
    faces = torch.as_tensor(mesh.faces, device="cpu")
    textured = mesh.to("cpu") if isinstance(mesh, TexturedMesh) else None
    figures: dict[str, list[float]] = {}
    for camera in chosen:
        view, image = smaller(camera, load_image(camera).cpu())
        covered = rasterize_triangles(vertices, faces, view).covered
        mask = is_counted(image) if camera.mask and camera.mask.mode == "object" else None
        if mask is None:
            figures.setdefault("covered_share", []).append(float(covered.float().mean()))
        else:
            union = max(1, int((covered | mask).sum()))
            figures.setdefault("mask_iou", []).append(int((covered & mask).sum()) / union)
            covered = covered & mask
        if textured is not None and int(covered.sum()) >= _MIN_PIXELS:
            colors = render_textured(textured, view)
            target = image[..., :3].float() / 255
            value = min(psnr(colors, target, covered.double()), 100.0)
            figures.setdefault("psnr", []).append(value)
            figures.setdefault("constant_psnr", []).append(constant_psnr(image[..., :3], covered))
    return {name: round(sum(values) / len(values), 4) for name, values in figures.items()}
