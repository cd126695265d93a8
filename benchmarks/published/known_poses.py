# SPDX-License-Identifier: Apache-2.0
"""A COLMAP model for photographs whose cameras are known: only points are looked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gaussian_splatting.posing.matching import (
    create_database,
    database_name,
    extract_features,
    match_pairs,
    pairs_to_match,
)
from gaussian_splatting.posing.photographs import described_photographs
from sugar_utils.errors import UserError
from sugar_utils.libraries import load_pycolmap

LONGEST_SIDE, MAX_FEATURES = 1600, 8192
_WORK = "database.db"


@dataclass(frozen=True)
class KnownPose:
    """One photograph's camera.

    Attributes:
        name: File name of the photograph.
        intrinsics: (3, 3) pixels
        rotation: From world to camera axes. (3, 3)
        translation: X' = rotation X + translation. (3,) world units
    """

    name: str
    intrinsics: np.ndarray
    rotation: np.ndarray
    translation: np.ndarray


def write_model(root: Path, poses: Sequence[KnownPose]) -> Path:
    """Triangulate the points that photographs share, with cameras as they are.

    Args:
        root: Scene folder with ``images``; gets ``sparse/0``, whole or not at all.
        poses: Of all photographs.

    Returns:
        Folder of the model.

    Raises:
        UserError: No point is found.
    """
    pycolmap = load_pycolmap()
    # Every photograph has a lens of its own in such data.
    photographs = [
        replace(photograph, device=photograph.name)
        for photograph in described_photographs(root / "images", recursive=False)
    ]
    by_name = {pose.name: pose for pose in poses}
    database = root / _WORK
    create_database(database, photographs, "PINHOLE")
    masks = [None] * len(photographs)
    extract_features(database, photographs, masks, LONGEST_SIDE, MAX_FEATURES, lambda _: None)
    pairs = pairs_to_match(database, len(photographs), "exhaustive")
    match_pairs(database, pairs, 0, lambda _: None)
    start = pycolmap.Reconstruction()
    for index, photograph in enumerate(photographs):
        pose = by_name[photograph.name]
        k = pose.intrinsics
        lens = pycolmap.Camera.create_from_model_name(
            index + 1, "PINHOLE", float(k[0, 0]), photograph.width, photograph.height
        )
        lens.params = [k[0, 0], k[1, 1], k[0, 2], k[1, 2]]
        start.add_camera_with_trivial_rig(lens)
        image = pycolmap.Image(name=database_name(index), camera_id=index + 1, image_id=index + 1)
        world = pycolmap.Rigid3d(pycolmap.Rotation3d(pose.rotation), pose.translation)
        start.add_image_with_trivial_frame(image, world)
    fresh = root / ".sparse"
    fresh.mkdir(exist_ok=True)
    model = pycolmap.triangulate_points(
        start, str(database), str(root / "images"), str(fresh), clear_points=True
    )
    if model.num_points3D() == 0:
        raise UserError(f"{root}: no point is seen in two photographs; check images and cameras")
    for index, photograph in enumerate(photographs):
        model.images[index + 1].name = photograph.name
    folder = fresh / "0"
    folder.mkdir(exist_ok=True)
    model.write_binary(str(folder))
    fresh.rename(root / "sparse")
    database.unlink()
    return root / "sparse" / "0"
