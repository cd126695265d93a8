# SPDX-License-Identifier: Apache-2.0
"""Pictures of a pipeline's meshes for its report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from gaussian_splatting.data.cameras import Camera
from sugar_extractors.quality.any_mesh import read_any_mesh
from sugar_extractors.quality.mesh_pictures import pick_views, shaded_views, textured_views
from sugar_extractors.quality.turning_preview import preview_glb
from sugar_extractors.texture.textured_mesh_io import TexturedMesh
from sugar_utils.errors import UserError

N_VIEWS, WIDTH = 4, 640


def mesh_picture_rows(
    cameras: Sequence[Camera],
    *,
    coarse_mesh: Path | None,
    refined: Path | None,
    textured: TexturedMesh | None,
    white_background: bool = False,
    device: torch.device | str = "cpu",
) -> dict[str, list[np.ndarray]]:
    """Four views of each mesh there is, from cameras of the scene.

    Args:
        cameras: Cameras to choose from; at least one.
        coarse_mesh: PLY.
        refined: ``.pt`` of a refined model.
        textured: That of our own.
        white_background: What the textured mesh is shown on.
        device: Where to rasterize.

    Returns:
        Title of a row to its pictures, (H, W, 3) uint8 each.
    """
    views = pick_views(cameras, N_VIEWS)
    rows: dict[str, list[np.ndarray]] = {}
    if coarse_mesh is not None:
        rows["Coarse mesh"] = shaded_views(read_any_mesh(coarse_mesh), views, WIDTH, device=device)
    if refined is not None:
        rows["Refined mesh"] = shaded_views(read_any_mesh(refined), views, WIDTH, device=device)
    if textured is not None:
        rows["Textured mesh, without lighting"] = textured_views(
            textured.to(device), views, WIDTH, white_background
        )
    return rows


def model_to_turn(
    textured: TexturedMesh | None, cameras: Sequence[Camera], notify: Callable[[str], None]
) -> bytes | None:
    """The textured mesh, small and upright, for the report.

    Args:
        textured: That of our own; None where there is none.
        cameras: Of the capture.
        notify: Told why there is none.

    Returns:
        As :func:`~sugar_extractors.quality.turning_preview.preview_glb`.
    """
    if textured is None:
        return None
    try:
        return preview_glb(textured, cameras)
    except UserError as error:
        notify(f"the report has no model to turn: {error}")
        return None
