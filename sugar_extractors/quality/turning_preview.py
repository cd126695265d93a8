# SPDX-License-Identifier: Apache-2.0
"""A textured mesh small enough to be carried inside a report, to be turned there."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from sugar_extractors.export.simplified_mesh import simplified
from sugar_extractors.texture.placed_export import PlacementOptions, moved_points, placement
from sugar_extractors.texture.textured_mesh_io import TexturedMesh, glb_chunks

MAX_TRIANGLES = 30_000
TEXTURE_SIDE = 1_024
_JPEG_QUALITY = 85


def preview_glb(mesh: TexturedMesh, cameras: Sequence[Camera]) -> bytes:
    """A GLB of 3 MB at most, upright, with the variants ``textured`` and ``clay``.

    Args:
        mesh: In the axes of the capture.
        cameras: Of the capture; they tell which way is up.

    Raises:
        UserError: Nothing is left of it.
    """
    small = simplified(mesh, MAX_TRIANGLES, TEXTURE_SIDE)
    vertices = small.vertices.double().cpu().numpy()
    upright = PlacementOptions(orient="up")
    matrix = placement(cameras, np.zeros((0, 3)), vertices, upright)
    moved = torch.from_numpy(moved_points(vertices, matrix).astype(np.float32))
    parts = glb_chunks(
        replace(small, vertices=moved, faces=small.faces.cpu(), uvs=small.uvs.cpu()),
        jpeg_bytes(small.texture),
        Path("preview"),
        y_up=True,
        variants=True,
    )
    return b"".join(parts)


def jpeg_bytes(texture: Tensor) -> bytes:
    """A picture as JPEG. (H, W, 3) uint8"""
    buffer = io.BytesIO()
    Image.fromarray(texture.cpu().numpy()).save(buffer, "jpeg", quality=_JPEG_QUALITY)
    return buffer.getvalue()
