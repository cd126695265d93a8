# SPDX-License-Identifier: Apache-2.0
"""Layouts in which the data sets are distributed, as scenes that this program trains on.

| data set | files of a scene |
|---|---|
| DTU of IDR, of NeuS | ``image/000000.png``, ``mask/000.png``, ``cameras.npz`` |
| DTU of 2DGS | ``images/``, ``mask/``, ``cameras.npz``, and a COLMAP model in ``sparse/0`` |
| Tanks and Temples | ``images/``, or the images beside ``sparse/0``, which has a COLMAP model |
| Mip-NeRF 360 | ``images``, ``images_2``, ``images_4``, ``images_8``, ``sparse/0`` |
| NeRF-synthetic | ``transforms_train.json``, ``transforms_test.json``, ``train/``, ``test/`` |

``cameras.npz``, which NeuS calls ``cameras_sphere.npz``, has ``world_mat_N``, millimetres to pixels
of image N, and ``scale_mat_N``, the normalised world to millimetres. Nothing is written into the
folders of the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from scipy.linalg import rq

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.colmap import find_model
from gaussian_splatting.data.names import IMAGE_SUFFIXES
from sugar_utils.command_text import command_text
from sugar_utils.errors import UserError, explained
from sugar_utils.files import write_json_atomic

DTU_SCENES = tuple(
    f"scan{number}" for number in (24, 37, 40, 55, 63, 65, 69, 83, 97, 105, 106, 110, 114, 118, 122)
)
TANKS_SCENES = ("Barn", "Caterpillar", "Courthouse", "Ignatius", "Meetingroom", "Truck")
OUTDOOR_SCENES = ("bicycle", "flowers", "garden", "stump", "treehill")
INDOOR_SCENES = ("room", "counter", "kitchen", "bonsai")
SYNTHETIC_SCENES = ("chair", "drums", "ficus", "hotdog", "lego", "materials", "mic", "ship")
SCENES = {
    "dtu": DTU_SCENES,
    "tanks": TANKS_SCENES,
    "mipnerf360": (*OUTDOOR_SCENES, *INDOOR_SCENES),
    "synthetic": SYNTHETIC_SCENES,
}
"""Scenes of each table, in its order."""

_PARENTS = ("", "DTU", "TrainingSet", "training", "360_v2", "nerf_synthetic")
_PREFIXES = ("", "dtu_")
_CAMERA_FILES = ("cameras.npz", "cameras_sphere.npz")
_HALF_PIXEL = 0.5  # centres of pixels are at whole numbers in cameras.npz, not here


@dataclass(frozen=True)
class Capture:
    """A scene of a data set: the folder that is trained on, and how it is read."""

    root: Path  # folder of the data set's scene
    folder: Path  # scene folder of this program: the same, or one that was written for it
    images: str = "images"  # folder of the images inside of it
    flags: Sequence[str] = ()  # that the training needs for the layout

    def image_files(self) -> list[Path]:
        """Return the images of the data set, in its order."""
        folders = (self.root / "image", self.root / self.images)
        folder = next(path for path in folders if path.is_dir())
        return sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)

    def rows_of(self, cameras: Sequence[Camera]) -> np.ndarray:
        """Return the numbers of the images of cameras in the order of the data set. (C,)"""
        numbers = {path.name: number for number, path in enumerate(self.image_files())}
        return np.array([numbers[Path(camera.name).name] for camera in cameras])


class DtuCameras(NamedTuple):
    """Cameras of ``cameras.npz``."""

    projections: np.ndarray  # millimetres to pixels, (C, 3, 4)
    scale: np.ndarray  # normalised world to millimetres, (4, 4)

    @property
    def centers(self) -> np.ndarray:
        """Centres of the cameras. (C, 3) mm"""
        inverses = np.linalg.inv(self.projections[:, :, :3])
        return -(inverses @ self.projections[:, :, 3:])[:, :, 0]


def scene_folder(data: Path, name: str) -> Path:
    """Find the folder of a scene in a data set.

    Raises:
        UserError: There is none.
    """
    for parent in _PARENTS:
        for prefix in _PREFIXES:
            folder = data / parent / f"{prefix}{name}"
            if folder.is_dir():
                return folder
    raise UserError(f"{data}: no scene {name}; --data is the folder that has it, see --scenes")


def find_capture(benchmark: str, root: Path, work: Path) -> Capture:
    """Return a scene of a data set as a scene of this program.

    Args:
        benchmark: A key of ``SCENES``.
        root: Folder of the scene.
        work: Folder in which a scene is written where the layout is none that is read.

    Raises:
        UserError: Files are missing.
    """
    if benchmark == "synthetic":
        return Capture(root, root, flags=("--white_background",))
    if benchmark == "mipnerf360":
        images = "images_2" if root.name in INDOOR_SCENES else "images_4"
        if not (root / images).is_dir():
            raise UserError(f"{root / images}: missing; the table of 3DGS uses this size")
        return Capture(root, root, images, ("--images", images))
    if benchmark == "dtu" and find_model(root) is None:
        return Capture(root, write_idr_scene(root, work), flags=("--masks", "none"))
    if find_model(root) is None:
        advice = command_text("convert", "-s", root)
        raise UserError(f"{root}: no COLMAP model in sparse/0; make one with {advice}")
    images = "images" if (root / "images").is_dir() else "."
    return Capture(root, root, images, ("--images", images, "--masks", "none"))


def read_dtu_cameras(root: Path) -> DtuCameras:
    """Read ``cameras.npz``, with one camera for each image.

    Raises:
        UserError: It is missing or damaged.
    """
    path = next((root / name for name in _CAMERA_FILES if (root / name).is_file()), None)
    if path is None:
        raise UserError(
            f"{root}: no {' or '.join(_CAMERA_FILES)}; use the DTU scenes of IDR, NeuS or 2DGS"
        )
    what = f"{path}: cannot be read"
    with explained(what, "download the scene again", Exception), np.load(path) as content:
        return _dtu_cameras(content)


def _dtu_cameras(content: Mapping[str, np.ndarray]) -> DtuCameras:
    projections = []
    while (name := f"world_mat_{len(projections)}") in content:
        projections.append(content[name][:3].astype(np.float64))
    return DtuCameras(np.stack(projections), content["scale_mat_0"].astype(np.float64))


def read_masks(root: Path) -> list[np.ndarray]:
    """Read the masks of a DTU scene, in the order of its images. (H, W) bool each"""
    paths = sorted((root / "mask").glob("*.png"))
    masks = []
    for path in paths:
        with Image.open(path) as image:
            masks.append(np.asarray(image.convert("L")) >= 128)
    return masks


def write_idr_scene(root: Path, work: Path) -> Path:
    """Write a DTU scene of IDR's layout as ``transforms.json``, in its normalised world.

    Args:
        root: Folder of the scene; its images stay there.
        work: The folder to write.
    """
    cameras = read_dtu_cameras(root)
    paths = Capture(root, root).image_files()
    if len(paths) != len(cameras.projections):
        raise UserError(
            f"{root}: {len(paths)} images, but cameras.npz has {len(cameras.projections)} cameras; "
            "download the scene again"
        )
    frames = []
    for path, projection in zip(paths, cameras.projections, strict=True):
        frame = _frame_of(projection @ cameras.scale)
        with Image.open(path) as image:
            frame["w"], frame["h"] = image.size
        frames.append({"file_path": path.resolve().as_posix(), **frame})
    work.mkdir(parents=True, exist_ok=True)
    write_json_atomic(work / "transforms.json", {"frames": frames})
    return work


def _frame_of(projection: np.ndarray) -> dict[str, object]:
    """Return intrinsics and pose of a projection, (3, 4), as ``transforms.json`` has them."""
    lens, rotation = rq(projection[:, :3])
    # The decomposition leaves signs open: focal lengths are positive.
    signs = np.sign(np.diag(lens))
    lens = lens * signs
    rotation = signs[:, None] * rotation
    if np.linalg.det(rotation) < 0:
        rotation = -rotation
    lens = lens / lens[2, 2]
    center = -np.linalg.solve(projection[:, :3], projection[:, 3])
    pose = np.eye(4)
    pose[:3, :3] = rotation.T * (1, -1, -1)
    pose[:3, 3] = center
    return {
        "fl_x": lens[0, 0],
        "fl_y": lens[1, 1],
        "cx": lens[0, 2] + _HALF_PIXEL,
        "cy": lens[1, 2] + _HALF_PIXEL,
        "transform_matrix": pose.tolist(),
    }
