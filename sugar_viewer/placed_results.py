# SPDX-License-Identifier: Apache-2.0
"""Results that were moved, and their capture in the same world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from gaussian_splatting.core.moved import moved_points, scale_of_matrix
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.formats.placement import Placement
from gaussian_splatting.scenes.scene import Scene
from sugar_extractors.outputs.result_photographs import placed_camera
from sugar_utils.errors import UserError


def common_placement(paths: Sequence[Path]) -> Placement:
    """Return where results stand, in the axes in which they are read.

    Raises:
        UserError: The results stand in different places.
    """
    first = _placement_in_own_axes(paths[0])
    for path in paths[1:]:
        if not np.array_equal(_placement_in_own_axes(path).matrix, first.matrix):
            raise UserError(
                f"{paths[0]} and {path} stand in different places: files that were moved are shown "
                "apart from others; name one folder"
            )
    return first


def _placement_in_own_axes(path: Path) -> Placement:
    placement = Placement.of(path)
    turn = placement.to_own_axes(path)
    return placement if turn is None else placement.moved(turn)


def moved_scene(scene: Scene, matrix: np.ndarray) -> Scene:
    """Return a capture in the world of moved results: rotated, scaled and shifted. (4, 4)"""

    def moved(cameras: Sequence[Camera]) -> list[Camera]:
        return [placed_camera(camera, matrix) for camera in cameras]

    return replace(
        scene,
        train_cameras=moved(scene.train_cameras),
        test_cameras=moved(scene.test_cameras),
        original_train_cameras=moved(scene.original_train_cameras),
        original_test_cameras=moved(scene.original_test_cameras),
        points=moved_points(scene.points, matrix).astype(np.float32),
        extent=scene.extent * scale_of_matrix(matrix),
    )
