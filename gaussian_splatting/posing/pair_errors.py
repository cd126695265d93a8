# SPDX-License-Identifier: Apache-2.0
"""Image pairs whose verified matches contradict the poses that were found for them.

Matches of a pair fit one epipolar geometry of their own. If an image has a wrong pose, the matches
with most of its neighbours do not fit the geometry of the poses, whether or not the reconstruction
used them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sugar_utils.colmap_library import load_pycolmap
from sugar_utils.errors import UserError

MAX_ERROR = 0.005
"""Median epipolar distance from which a pair contradicts its poses, as a share of the longest side
of the photographs."""

MIN_MATCHES, MIN_PAIRS = 30, 2
CONTRADICTING_SHARE = 0.5
"""Share of the pairs of an image that must contradict its pose."""


def contradicting_pairs(
    model: Any, database_path: Path, names: Sequence[str], matches: Mapping[tuple[int, int], int]
) -> dict[str, tuple[int, int]]:
    """Images most of whose pairs contradict their poses.

    Args:
        model: ``pycolmap.Reconstruction``.
        database_path: Database with keypoints and verified matches.
        names: Of the photographs, in the order of their numbers in the database.
        matches: Numbers of verified matches by pair of places in that order.

    Returns:
        Name to the number of contradicting pairs and of all pairs of the image.

    Raises:
        UserError: The database is damaged.
    """
    pycolmap = load_pycolmap()

    by_name = {model.images[n].name: model.images[n] for n in model.reg_image_ids()}
    tally = np.zeros((len(names), 2), dtype=int)
    rays: dict[int, np.ndarray] = {}
    with pycolmap.Database.open(str(database_path)) as database:
        for (i, j), count in matches.items():
            if count < MIN_MATCHES or not {names[i], names[j]} <= by_name.keys():
                continue
            images = [by_name[names[k]] for k in (i, j)]
            for k, image in zip((i, j), images, strict=True):
                if k not in rays:
                    keypoints = database.read_keypoints(k + 1)[:, :2].astype(np.float64)
                    camera = model.cameras[image.camera_id]
                    rays[k] = np.asarray(camera.cam_from_img(keypoints))
            rows = database.read_two_view_geometry(i + 1, j + 1).inlier_matches
            if not len(rows) or (rows.max(axis=0) >= (len(rays[i]), len(rays[j]))).any():
                raise UserError(
                    f"{database_path}: damaged, the matches of {names[i]} and {names[j]} are of "
                    "other features; remove it"
                )
            camera = model.cameras[images[0].camera_id]
            scale = camera.mean_focal_length() / max(camera.width, camera.height)
            error = scale * _median_error(images, rays[i][rows[:, 0]], rays[j][rows[:, 1]])
            tally[[i, j]] += (error > MAX_ERROR, 1)
    # A wrong image adds one contradicting pair to each of its neighbours.
    return {
        name: (int(wrong), int(n))
        for name, (wrong, n) in zip(names, tally, strict=True)
        if n >= MIN_PAIRS and wrong > CONTRADICTING_SHARE * n
    }


def _median_error(images: Sequence[Any], first: np.ndarray, second: np.ndarray) -> float:
    """Median Sampson distance of matches from the epipolar geometry of two poses.

    Args:
        images: Two registered images.
        first: Undistorted keypoints of the first at depth 1. (n, 2)
        second: Of the second. (n, 2)
    """
    move = (images[1].cam_from_world() * images[0].cam_from_world().inverse()).matrix()
    rotation, (x, y, z) = move[:, :3], move[:, 3]
    essential = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]]) @ rotation
    a, b = (np.concatenate([p, np.ones((len(p), 1))], axis=1) for p in (first, second))
    lines_b, lines_a = a @ essential.T, b @ essential
    scale = np.sqrt((lines_b[:, :2] ** 2).sum(axis=1) + (lines_a[:, :2] ** 2).sum(axis=1))
    return float(np.median(np.abs((b * lines_b).sum(axis=1)) / np.maximum(scale, 1e-12)))
