# SPDX-License-Identifier: Apache-2.0
"""Tracks for the points of the tiny scene, whose model is written without any."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pycolmap


def add_tracks(model_folder: Path, n_points: int, names: tuple[str, ...]) -> None:
    """Have the first points of a model observed by some of its images."""
    model = pycolmap.Reconstruction(model_folder)
    numbers = {image.name: number for number, image in model.images.items()}
    for point in sorted(model.points3D)[:n_points]:
        for name in names:
            image = model.images[numbers[name]]
            image.points2D.append(pycolmap.Point2D(np.array([1.0, 2.0])))
            element = pycolmap.TrackElement(numbers[name], len(image.points2D) - 1)
            model.add_observation(point, element)
    model.write_binary(str(model_folder))
