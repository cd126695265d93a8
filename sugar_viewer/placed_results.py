# SPDX-License-Identifier: Apache-2.0
"""Results that were moved, and their capture in the same world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from gaussian_splatting.core.moved import moved_points, scale_of_matrix
from gaussian_splatting.data.cameras import Camera, camera_extent
from gaussian_splatting.formats.placement import Placement
from gaussian_splatting.scenes.scene import Scene, SizeRule
from sugar_extractors.outputs.result_photographs import PHOTOGRAPHS, placed_camera, read_photographs
from sugar_utils.errors import UserError


def common_placement(paths: Sequence[Path]) -> Placement:
    """Return the placement of results in the axes of their readers.

    Raises:
        UserError: The results stand in different places.
    """
    first = Placement.as_read(paths[0])
    for path in paths[1:]:
        if not np.array_equal(Placement.as_read(path).matrix, first.matrix):
            raise UserError(
                f"{paths[0]} and {path} stand in different places: files that were moved are shown "
                "apart from others; name one folder"
            )
    return first


def scene_of_folder(paths: Sequence[Path], size: SizeRule) -> Scene | None:
    """Return the cameras that the folder of some results holds, as a scene without points.

    Args:
        paths: Of the results.
        size: Of the images.

    Returns:
        The scene, in the world of the capture; None where no folder of results has cameras.
    """
    folders = [path if path.is_dir() else path.parent for path in paths]
    folder = next((folder for folder in folders if (folder / PHOTOGRAPHS).is_file()), None)
    if folder is None:
        return None
    placement = Placement.of(folder)
    to_scene = placement.to_scene()
    cameras = [placed_camera(camera, to_scene) for camera in read_photographs(folder)]
    sized = [camera.resized(*size.target(*camera.size)) for camera in cameras]
    offset = placement.origin.world_offset
    return Scene(
        root=folder,
        train_cameras=sized,
        test_cameras=[],
        original_train_cameras=cameras,
        original_test_cameras=[],
        points=np.zeros((0, 3), np.float32),
        points_rgb=np.zeros((0, 3), np.uint8),
        extent=camera_extent(cameras),
        white_background=False,
        description=f"{len(cameras)} cameras of {folder / PHOTOGRAPHS}",
        offset=np.zeros(3) if offset is None else offset,
    )


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
