# SPDX-License-Identifier: Apache-2.0
"""Scenes in every layout that is read, whose views can be told apart by their pixels.

Views look along z at a slanted plane. The red of view k is ``STEP * k``; its mask and its depth map
are its own as well, so what is read says whether names were looked up right.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pycolmap
from PIL import Image

from benchmarks.robustness.facts import Facts
from gaussian_splatting.data.images import decode_image, decode_mask
from gaussian_splatting.data.maps.depth_maps import DepthOptions
from gaussian_splatting.data.masks import MaskOptions
from gaussian_splatting.data.observations import ViewOptions
from gaussian_splatting.formats.ply import write_point_ply
from gaussian_splatting.scenes.scene import Scene, VanillaSize, load_scene
from sugar_utils.errors import Notify

N_VIEWS = 6
N_POINTS = 60
WIDTH = 64
HEIGHT = 48
FOCAL = 60.0
STEP = 40  # of red from view to view
_DEPTH = 4.0  # of the plane at x = 0, world units
_SLOPE = 0.5
_CENTERS = np.array([[0.3 * k - 0.8, 0.1 * (k % 2), 0.0] for k in range(N_VIEWS)])
NAMES = tuple(f"view_{k:02d}.png" for k in range(N_VIEWS))


@dataclass(frozen=True)
class Capture:
    """Contents of a scene to be made.

    Attributes:
        files: Names of the photographs inside of their folder.
        stored: Names of the photographs as the cameras spell them.
        scale: World units per unit of the scene.
        shift: Where the middle of the scene lies, world units. (3,)
    """

    files: tuple[str, ...] = NAMES
    stored: tuple[bytes, ...] = tuple(name.encode() for name in NAMES)
    scale: float = 1.0
    shift: tuple[float, float, float] = (0.0, 0.0, 0.0)
    lists: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def placed(self, points: np.ndarray) -> np.ndarray:
        """Points of the scene, (N, 3), in the world."""
        return points * self.scale + np.array(self.shift)

    @property
    def centers(self) -> np.ndarray:
        """Centres of the cameras in the world. (N_VIEWS, 3) float64"""
        return self.placed(_CENTERS)

    @property
    def points(self) -> np.ndarray:
        """Points on the plane, in the world. (N_POINTS, 3) float64"""
        draw = np.random.default_rng(0)
        x, y = draw.uniform(-1.5, 1.5, (2, N_POINTS))
        return self.placed(np.stack([x, y, _DEPTH + _SLOPE * x], axis=1))


def write_photographs(folder: Path, capture: Capture) -> None:
    """Write the photographs of a capture, PNG whatever their names end with."""
    texture = np.random.default_rng(1).integers(0, 255, (HEIGHT, WIDTH))
    for number, name in enumerate(capture.files):
        pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
        pixels[..., 0] = STEP * number
        pixels[..., 1] = texture
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path, "PNG", compress_level=1)


def write_colmap(root: Path, capture: Capture, kind: str) -> None:
    """Write photographs and a COLMAP model, ``bin`` or ``txt``, whose points have tracks."""
    write_photographs(root / "images", capture)
    model = pycolmap.Reconstruction()
    camera = pycolmap.Camera(
        model="PINHOLE", width=WIDTH, height=HEIGHT, params=[FOCAL, FOCAL, WIDTH / 2, HEIGHT / 2]
    )
    camera.camera_id = 1
    model.add_camera_with_trivial_rig(camera)
    points = capture.points
    for number, center in enumerate(capture.centers, start=1):
        keypoints = FOCAL * (points - center)[:, :2] / (points - center)[:, 2:]
        keypoints = keypoints + (WIDTH / 2, HEIGHT / 2)
        image = pycolmap.Image(name=_placeholder(number - 1), camera_id=1, image_id=number)
        image.points2D = [pycolmap.Point2D(keypoint) for keypoint in keypoints]
        pose = pycolmap.Rigid3d(pycolmap.Rotation3d(), -center)
        model.add_image_with_trivial_frame(image, pose)
    for index, point in enumerate(points):
        track = pycolmap.Track()
        for number in range(1, N_VIEWS + 1):
            track.add_element(number, index)
        model.add_point3D(point, track, np.array([200, 100, 50], np.uint8))
    folder = root / "sparse" / "0"
    folder.mkdir(parents=True)
    write = model.write_binary if kind == "bin" else model.write_text
    write(str(folder))
    # pycolmap writes names that are UTF-8 alone.
    path = folder / f"images.{kind}"
    content = path.read_bytes()
    for number, name in enumerate(capture.stored):
        content = content.replace(_placeholder(number).encode(), name)
    path.write_bytes(content)


def _placeholder(number: int) -> str:
    return f"placeholder-of-view-{number}"


def write_transforms(root: Path, capture: Capture, encoding: str = "utf-8") -> None:
    """Write photographs, points, masks, depth maps and ``transforms.json`` that names them."""
    write_photographs(root / "images", capture)
    write_masks(root / "masks", capture.files)
    depths = write_depths(root / "depths", capture.files, scale=capture.scale)
    write_points(root / "points.ply", capture.points)
    stored = [name.decode(encoding) for name in capture.stored]
    frames = []
    for number, name in enumerate(stored):
        pose = np.diag([1.0, -1.0, -1.0, 1.0])
        pose[:3, 3] = capture.centers[number]
        frame = {
            "file_path": f"images/{name}",
            "mask_path": f"masks/{capture.files[number]}",
            "depth_file_path": f"depths/{depths[number]}",
            "transform_matrix": pose.tolist(),
        }
        frames.append(frame)
    content = {
        "w": WIDTH,
        "h": HEIGHT,
        "fl_x": FOCAL,
        "fl_y": FOCAL,
        "cx": WIDTH / 2,
        "cy": HEIGHT / 2,
        "camera_model": "OPENCV",
        "ply_file_path": "points.ply",
        "frames": frames,
    }
    for key, views in capture.lists.items():
        content[key] = [f"images/{stored[view]}" for view in views]
    text = json.dumps(content, indent=1, ensure_ascii=False)
    (root / "transforms.json").write_bytes(text.encode(encoding))


def write_points(path: Path, points: np.ndarray) -> None:
    """Write points as a PLY, in float64 where float32 would lose them. (N, 3)"""
    colors = np.full((len(points), 3), 100, np.uint8)
    if np.abs(points).max() < 1e4:
        write_point_ply(path, points, colors)
        return
    rows = [f"{x:.17g} {y:.17g} {z:.17g} 100 100 100" for x, y, z in points]
    head = ["ply", "format ascii 1.0", f"element vertex {len(points)}"]
    head += [f"property double {axis}" for axis in "xyz"]
    head += [f"property uchar {color}" for color in ("red", "green", "blue")]
    path.write_text("\n".join([*head, "end_header", *rows, ""]), encoding="utf-8")


def counted_rows(number: int) -> int:
    """Rows of the mask of a view, from the top, that count."""
    return 8 + 4 * number


def write_masks(folder: Path, names: Sequence[str], values: Sequence[int] = (255,)) -> None:
    """Write masks of views; what counts has some values in turn, column by column."""
    for number, name in enumerate(names):
        pixels = np.zeros((HEIGHT, WIDTH), np.uint8)
        pixels[: counted_rows(number)] = np.resize(np.array(values, np.uint8), WIDTH)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path, "PNG")


def depth_of(number: int) -> np.ndarray:
    """Depth of a view, in units of the scene. (HEIGHT, WIDTH) float64"""
    x = (np.arange(WIDTH) + 0.5 - WIDTH / 2) / FOCAL
    depth = (_DEPTH + _SLOPE * _CENTERS[number, 0]) / (1 - _SLOPE * x)
    return np.broadcast_to(depth, (HEIGHT, WIDTH)).copy()


def write_depths(
    folder: Path, names: Sequence[str], confidence: Path | None = None, scale: float = 1.0
) -> list[str]:
    """Write depth maps of views, and perhaps confidence maps; return the names of the depth maps.

    They are 16-bit PNG in thousandths, or floats as TIFF where world units are no units of the
    scene.
    """
    written = []
    for number, name in enumerate(names):
        depth = depth_of(number) * scale
        stored = name if scale == 1 else f"{name}.tif"
        path = folder / stored
        path.parent.mkdir(parents=True, exist_ok=True)
        if scale == 1:
            Image.fromarray(np.rint(1000 * depth).astype(np.uint16)).save(path, "PNG")
        else:
            Image.fromarray(depth.astype(np.float32)).save(path, "TIFF")
        if confidence is not None:
            path = confidence / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((HEIGHT, WIDTH), 2, np.uint8)).save(path, "PNG")
        written.append(stored)
    return written


def write_zip(path: Path, folder: Path, compression: int = zipfile.ZIP_DEFLATED) -> None:
    """Pack all files of a folder, which is removed."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                archive.write(file, file.relative_to(folder.parent).as_posix())
    shutil.rmtree(folder)


def read_scene(root: Path, notify: Notify, **options: Any) -> Facts:
    """Facts of a scene: of each view, called by its pixels, and of the points."""
    options = {
        "masks": MaskOptions(),
        "depths": DepthOptions(),
        "view_options": ViewOptions(),
    } | options
    has_split = (root / "transforms.json").is_file()
    size = VanillaSize(-1)
    scene = load_scene(root, size_rule=size, eval_split=has_split, notify=notify, **options)
    return facts_of_scene(scene)


def facts_of_scene(scene: Scene) -> Facts:
    """Facts of the cameras, masks, depth maps and points of a scene."""
    facts: Facts = {}
    held_out = {camera.name for camera in scene.test_cameras}
    for camera in (*scene.train_cameras, *scene.test_cameras):
        pixels = decode_image(camera.image_path, camera.width, camera.height)
        view = f"view {round(float(pixels[..., 0].mean()) / STEP)}"
        while f"{view} place" in facts:
            view += " again"
        facts[f"{view} place"] = (camera.center + scene.offset).tolist()
        facts[f"{view} held out"] = int(camera.name in held_out)
        facts[f"{view} lens"] = [camera.width, camera.height, camera.fx, camera.fy]
        if camera.mask is not None:
            values = decode_mask(camera.mask, camera.width, camera.height)
            facts[f"{view} masked"] = float((values >= 128).mean())
        depth = scene.depths.maps.get(camera.name)
        if depth is not None:
            facts[f"{view} depth length"] = float(depth.values.median())
            facts[f"{view} largest depth length"] = float(depth.values.max())
    facts["points"] = len(scene.points)
    if len(scene.points):
        middle = scene.points.astype(np.float64).mean(axis=0)
        facts["points place"] = (middle + scene.offset).tolist()
    return facts
