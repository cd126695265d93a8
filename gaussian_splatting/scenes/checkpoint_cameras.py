# SPDX-License-Identifier: Apache-2.0
"""The cameras that a checkpoint stores, completed by the scene's own model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gaussian_splatting.data.cameras import Camera, camera_extent
from gaussian_splatting.data.colmap import find_model
from gaussian_splatting.data.names import CamerasByName
from gaussian_splatting.data.observations import CaptureModel, Observations
from gaussian_splatting.data.world_offset import moved_back
from gaussian_splatting.scenes.reference_layout import ReferenceCheckpoint, StoredCamera
from sugar_utils.errors import Notify

POSE_TOLERANCE = 1e-3  # of the camera extent, and of an entry of the rotation
_SAME_OFFSET = 1e-6  # world units; offsets have few digits
_SYNTHETIC_SCENES = {"chair", "drums", "ficus", "hotdog", "lego", "materials", "mic", "ship"}
_SYNTHETIC_TEST_CAMERAS = 200


class MergedCameras(NamedTuple):
    """Cameras of a checkpoint, completed by the scene's own model."""

    cameras: list[Camera]
    all_in_source: bool  # whether the scene's own model has all of them


def without_synthetic_test(
    root: Path, cameras: Sequence[StoredCamera], notify: Notify
) -> Sequence[StoredCamera]:
    """Drop the test views of the NeRF-synthetic scenes from another program's cameras.json."""
    if any(stored.has_principal_point for stored in cameras):
        return cameras
    is_synthetic = root.resolve().name in _SYNTHETIC_SCENES and find_model(root) is None
    if not is_synthetic or len(cameras) <= _SYNTHETIC_TEST_CAMERAS:
        return cameras
    notify(f"NeRF-synthetic scene: left out its {_SYNTHETIC_TEST_CAMERAS} test cameras")
    return cameras[_SYNTHETIC_TEST_CAMERAS:]


def unique_cameras(cameras: Sequence[StoredCamera], notify: Notify) -> list[StoredCamera]:
    """Return the last camera of each name, sorted by name."""
    by_name = {stored.camera.name: stored for stored in cameras}
    if len(by_name) < len(cameras):
        notify(
            f"cameras.json names {len(cameras) - len(by_name)} images more than once; "
            "the last entry of each counts"
        )
    return [by_name[name] for name in sorted(by_name)]


def model_offset(checkpoint: ReferenceCheckpoint, folder_offset: np.ndarray | None) -> np.ndarray:
    """Return the offset between the scene folder and a checkpoint. (3,)

    Args:
        folder_offset: Offset of the coordinates in the scene folder, (3,); None: there is none.
    """
    if checkpoint.recorded_offset is None:
        return checkpoint.subtracted
    if folder_offset is None:
        return checkpoint.recorded_offset
    return checkpoint.recorded_offset - folder_offset


def in_world_of(
    source: CaptureModel, checkpoint: ReferenceCheckpoint, folder_offset: np.ndarray | None
) -> CaptureModel:
    """Shift a scene's own cameras and points into the world of a checkpoint.

    Both had an offset subtracted, of the same kind but perhaps of other cameras.

    Args:
        folder_offset: Offset of the coordinates in the scene folder, (3,); None: there is none.
    """
    offset = model_offset(checkpoint, folder_offset)
    if np.allclose(offset, source.offset, rtol=0, atol=_SAME_OFFSET):
        return source
    shift = offset - source.offset
    test_cameras = source.test_cameras
    if test_cameras is not None:
        test_cameras = moved_back(test_cameras, shift)
    observations = source.observations
    if observations is not None:
        observations = observations.moved_back(shift)
    return replace(
        source,
        train_cameras=moved_back(source.train_cameras, shift),
        test_cameras=test_cameras,
        points=(source.points - shift).astype(np.float32),
        observations=observations,
        offset=offset,
    )


def merge_cameras(
    stored: Sequence[StoredCamera], source: CaptureModel | None, notify: Notify
) -> MergedCameras:
    """Complete stored cameras by the files and intrinsics of the scene's own model.

    Args:
        source: The scene's own model in the world of the checkpoint; None: there is none.
    """
    train_cameras = [] if source is None else source.train_cameras
    test_cameras = [] if source is None else source.test_cameras or []
    find = CamerasByName(train_cameras, test_cameras)
    limit = _distance_limit([entry.camera for entry in stored])
    cameras = []
    posed_differently = []
    n_unmatched = 0
    n_centred = 0
    for entry in stored:
        camera = entry.camera
        match = find(camera.name)
        if match is not None and _is_same_pose(camera, match, limit):
            intrinsics = camera if entry.has_principal_point else match
            posed = replace(intrinsics, rotation=camera.rotation, translation=camera.translation)
            # An undistorted copy has the intrinsics of its own size.
            cameras.append(_with_files_of(posed, match))
            continue
        if match is None:
            n_unmatched += 1
        else:
            posed_differently.append(camera.name)
            if match.size == camera.size:
                camera = _with_files_of(camera, match)
            else:
                camera = replace(camera, name=match.name)
        n_centred += not entry.has_principal_point
        cameras.append(camera)
    if posed_differently:
        notify(
            f"{len(posed_differently)} of {len(stored)} cameras (first: {posed_differently[0]}) "
            "are posed differently in cameras.json and in the scene's own model; using "
            "cameras.json for them, because the Gaussians live in its world"
        )
    if n_centred and source is not None:
        notify(f"{n_centred} cameras have no known principal point; the image centre is assumed")
    return MergedCameras(cameras, n_unmatched == 0)


def observations_of(cameras: Sequence[Camera], source: CaptureModel) -> Observations | None:
    """Return the observations of the cameras that the scene's own model has with the same pose."""
    if source.observations is None:
        return None
    by_name = {camera.name: camera for camera in source.cameras}
    limit = _distance_limit(cameras)
    names = []
    for camera in cameras:
        match = by_name.get(camera.name)
        if match is not None and _is_same_pose(camera, match, limit):
            names.append(camera.name)
    return source.observations.only(names)


def _distance_limit(cameras: Sequence[Camera]) -> float:
    """Return the largest distance of centres that are the same, in world units."""
    # A single camera has no extent; a world unit then stands in for it.
    return POSE_TOLERANCE * (camera_extent(cameras) or 1.0)


def _is_same_pose(a: Camera, b: Camera, limit: float) -> bool:
    distance = np.linalg.norm(a.center - b.center)
    turn = np.abs(a.rotation - b.rotation).max()
    return bool(distance <= limit and turn <= POSE_TOLERANCE)


def _with_files_of(camera: Camera, other: Camera) -> Camera:
    """Return a camera with the name and the files of another one."""
    return replace(
        camera,
        name=other.name,
        image_path=other.image_path,
        source_path=other.source_path,
        lens=other.lens,
        mask_path=other.mask_path,
        depth_path=other.depth_path,
    )
