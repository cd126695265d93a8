# SPDX-License-Identifier: Apache-2.0
"""Results that were turned upright, and their capture in the same world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.formats.moved import scale_of_matrix
from sugar_extractors.result_folder import TRANSFORM
from sugar_extractors.result_photographs import placed_camera
from sugar_extractors.texture.placed_export import moved_points
from sugar_utils.errors import UserError
from sugar_utils.files import read_json


def common_placement(paths: Sequence[Path]) -> np.ndarray | None:
    """Return the matrix from the capture to upright results; None where they are not. (4, 4)

    Raises:
        UserError: The results stand in different places.
    """
    matrices = [placement_of(path) for path in paths]
    first = matrices[0]
    for path, matrix in zip(paths, matrices, strict=True):
        if first is None or matrix is None:
            is_equal = matrix is first
        else:
            is_equal = np.array_equal(matrix, first)
        if not is_equal:
            raise UserError(
                f"{paths[0]} and {path} stand in different places: files that were turned upright "
                "are shown apart from others; name one folder"
            )
    return first


def placement_of(path: Path) -> np.ndarray | None:
    """Return the matrix that turned a file or folder upright; None for others. (4, 4)"""
    folder = path if path.is_dir() else path.parent
    notes = [folder / TRANSFORM]
    stem = path.stem.removesuffix("_gaussians")
    if stem.endswith("_placed"):
        notes.append(folder / f"{stem}.json")
    for note in notes:
        content = read_json(note) if note.is_file() else None
        if isinstance(content, dict) and content.get("up") == "+y":
            try:
                return np.array(content.get("matrix"), dtype=np.float64).reshape(4, 4)
            except (TypeError, ValueError) as error:
                raise UserError(f"{note}: has no matrix of 4 x 4; write it again") from error
    return None


def moved_scene(scene: Scene, matrix: np.ndarray) -> Scene:
    """Return a capture in the world of upright results: rotated, scaled and shifted. (4, 4)"""

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
