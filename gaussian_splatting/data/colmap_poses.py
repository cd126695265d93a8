# SPDX-License-Identifier: Apache-2.0
"""Writing a COLMAP model again with other poses."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.colmap_files import write_model
from sugar_utils.colmap_library import load_pycolmap
from sugar_utils.errors import UserError
from sugar_utils.files import check_writable


def write_poses(model: Path, target: Path, cameras: Sequence[Camera]) -> Path:
    """Copy a COLMAP model with the poses of some of its images replaced.

    Points stay where they are, and so do images that none of the cameras is named after. Of
    cameras that are mounted together the first one of each mount decides.

    Args:
        model: Folder of the model.
        target: Folder to write; the model lies below it in ``0``, in binary form.
        cameras: Cameras whose names are those of images.

    Returns:
        The folder of the copy.

    Raises:
        UserError: The model cannot be read, or the folder not be written.
    """
    pycolmap = load_pycolmap()
    try:
        reconstruction = pycolmap.Reconstruction(str(model))
    except Exception as error:  # pycolmap raises what its C++ threw
        raise UserError(f"{model}: cannot be read again ({error}); export it again") from error
    by_name = {camera.name: camera for camera in cameras}
    for image in reconstruction.images.values():
        camera = by_name.get(image.name)
        if camera is not None and image.has_pose and image.is_ref_in_frame():
            pose = pycolmap.Rigid3d(pycolmap.Rotation3d(camera.rotation), camera.translation)
            image.frame.set_cam_from_world(image.camera_id, pose)
    folder, fresh = target / "0", target / ".new"
    check_writable(target)
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        write_model(reconstruction, fresh)
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    except OSError as error:
        raise UserError(
            f"{target}: cannot be written ({error}); free space or fix the permissions"
        ) from error
    return folder
