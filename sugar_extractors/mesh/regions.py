# SPDX-License-Identifier: Apache-2.0
"""Where a scene is meshed: boxes of foreground and background, and what is said of empty ones."""

from __future__ import annotations

import numpy as np

from gaussian_splatting.data.cameras import middle_of
from gaussian_splatting.data.scene import Scene
from sugar_extractors.mesh.mesh_config import MeshOptions
from sugar_extractors.mesh.surface_samples import Box
from sugar_utils.errors import UserError


def require_extent(options: MeshOptions, scene: Scene) -> None:
    """"""
    if scene.extent <= 0 and options.bboxmin is None:
        raise UserError(
            f"all training cameras of {options.scene_path} stand in one place, so the scene "
            "has no size; give the foreground with --bboxmin and --bboxmax"
        )


def region_boxes(options: MeshOptions, scene: Scene) -> tuple[Box, Box]:
    """Foreground and background box."""
    center = middle_of(scene.train_cameras)
    at = np.zeros(3) if options.center_bbox is False else center
    if options.bboxmin is not None:
        foreground = Box(options.bboxmin, options.bboxmax)
        if options.center_bbox:
            foreground = foreground.shifted(center)
    else:
        foreground = Box.cube(at, options.foreground_factor * scene.extent)
    return foreground, Box.cube(at, options.background_factor * scene.extent)


def left_out(options: MeshOptions, name: str, n: int, points: np.ndarray) -> str:
    """What to say of a region with few points; an empty box that the user drew is an error.

    Args:
        points: All surface points. (P, 3) world units
    """
    if name == "foreground" and options.bboxmin is not None:
        moved = ", the box was moved by --center_bbox True" if options.center_bbox else ""
        raise UserError(
            f"the box of --bboxmin and --bboxmax holds {n} of {len(points):,} surface "
            f"points; they lie in {span(points)} (world coordinates{moved})"
        )
    return f"{name}: only {n} of {len(points):,} surface points, left out"


def span(points: np.ndarray) -> str:
    """Box of the middle 98 % of points on each axis. (P, 3)"""
    low, high = np.quantile(points[:: max(1, len(points) // 100_000)], (0.01, 0.99), axis=0)
    return str(Box(tuple(map(float, low)), tuple(map(float, high))))
