# SPDX-License-Identifier: Apache-2.0
"""Small captures as other programs write them: COLMAP models, and transforms*.json."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pycolmap
from PIL import Image

PINHOLE = ("PINHOLE", 40, 30, [35.0, 36.0, 18.0, 16.5])


def make_scene(
    root: Path,
    images: dict[str, tuple[str, int, int, list[float]]],
    *,
    binary: bool = True,
    n_points: int = 5,
    sparse: str = "sparse/0",
) -> list[np.ndarray]:
    """Write a COLMAP model and noise photographs; returns the 3 x 4 poses in the order given."""
    rng = np.random.default_rng(0)
    model = pycolmap.Reconstruction()
    poses = []
    for number, (name, (lens, width, height, params)) in enumerate(images.items(), start=1):
        camera = pycolmap.Camera(model=lens, width=width, height=height, params=params)
        camera.camera_id = number
        model.add_camera_with_trivial_rig(camera)
        quaternion = rng.normal(size=4)
        pose = pycolmap.Rigid3d(
            pycolmap.Rotation3d(quaternion / np.linalg.norm(quaternion)), rng.normal(size=3)
        )
        image = pycolmap.Image(name=name, camera_id=number, image_id=number)
        model.add_image_with_trivial_frame(image, pose)
        poses.append(np.array(pose.matrix()))
        path = root / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    for number in range(n_points):
        model.add_point3D(np.full(3, number + 0.25), pycolmap.Track(), np.full(3, number, np.uint8))
    folder = root / sparse
    folder.mkdir(parents=True)
    (model.write_binary if binary else model.write_text)(str(folder))
    return poses


ANGLE = 0.7


def look_at_origin(position: tuple[float, float, float]) -> list[list[float]]:
    """Camera-to-world matrix with OpenGL axes (x right, y up, looking along -z)."""
    back = np.array(position) / np.linalg.norm(position)
    right = np.cross([0.0, 0.0, 1.0], back)
    right /= np.linalg.norm(right)
    matrix = np.eye(4)
    matrix[:3, :4] = np.stack([right, np.cross(back, right), back, position], axis=1)
    return matrix.tolist()


def write_scene(root: Path, name: str = "transforms_train.json", **extra) -> Path:
    """Write three photographs and their transforms*.json; extra keys, or None to leave one out."""
    folder = "test" if "test" in name else "train"
    (root / folder).mkdir(parents=True, exist_ok=True)
    frames = []
    for i in range(3):
        Image.new("RGBA", (20, 16)).save(root / folder / f"r_{i}.png")
        pose = look_at_origin((3.0, 0.5 * i - 0.4, 1.0))
        frames.append({"file_path": f"./{folder}/r_{i}", "transform_matrix": pose})
    content = {"camera_angle_x": ANGLE, "frames": frames} | extra
    (root / name).write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    return root / name
