# SPDX-License-Identifier: Apache-2.0
"""Which Gaussians of a scene its mesh does not show: sky, distance, parts thinner than triangles.

They stay beside the mesh-bound ones in the refinement.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gaussian_splatting.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.rasterization import WARP, Rasterizer
from gaussian_splatting.rasterization.blending_weights import masked_shares
from sugar_scene.triangle_rasterizer import rasterize_triangles

MIN_SHARE = 0.2  # of the blending weights beside the mesh
_MAX_SIDE = 480


def background_rows(
    gaussians: Gaussians,
    vertices: Tensor,
    faces: Tensor,
    cameras: Sequence[Camera],
    rasterizer: Rasterizer = WARP,
) -> Tensor:
    """Gaussians that blend into pixels which the mesh does not cover. (N,) bool

    With a fifth of their weights there, so that no gap is left around the mesh.
    """
    views = [_smaller(camera) for camera in cameras]
    hits = (rasterize_triangles(vertices, faces, view) for view in views)
    beside = ((view, (~hit.covered).float()) for view, hit in zip(views, hits, strict=True))
    shares = masked_shares(gaussians, beside, rasterizer)
    return shares > MIN_SHARE


def _smaller(camera: Camera) -> Camera:
    factor = _MAX_SIDE / max(camera.width, camera.height)
    if factor >= 1:
        return camera
    return camera.resized(*(max(1, round(side * factor)) for side in (camera.width, camera.height)))
