# SPDX-License-Identifier: Apache-2.0
"""The tiny scene in the layouts of public data sets, with its sphere as the scan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.formats.ply import write_point_ply
from sugar_maps.similarity import Similarity
from tests.support.mesh_scenes import sphere_points
from tests.support.tiny_scene import (
    make_tiny_scene,
    render_8_bit,
    save_png,
    tiny_cameras,
    tiny_cloud,
    write_model,
)

MILLIMETRES = Similarity(40.0, np.eye(3), np.array([10.0, 20.0, 500.0]))
"""From the tiny scene, in which the sphere has a radius of 1, to the scan of DTU."""

TO_LOG = Similarity(2.0, np.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]]), np.array([1.0, 2, 3]))
TO_METRES = Similarity(0.05, np.eye(3)[[1, 2, 0]], np.array([0.3, -0.2, 0.1]))
"""From the tiny scene to the trajectory of Tanks and Temples, and from there to the scan."""

VOXEL = 2.0  # mm, of the observation mask
RADIUS = 40.0  # mm, of the sphere
MASK_RADIUS = 1.08  # of the sphere that masks show: a pixel more than the object
TABLE = -25.0  # height of the table of DTU above the centre of the sphere, mm


def lens_matrix(camera: Camera) -> np.ndarray:
    """Intrinsics with centres of pixels at whole numbers. (3, 3)"""
    return np.array([[camera.fx, 0, camera.cx - 0.5], [0, camera.fy, camera.cy - 0.5], [0, 0, 1]])


def silhouette(camera: Camera, radius: float = 1.0) -> np.ndarray:
    """Pixels whose ray meets a sphere around the origin. (H, W) bool"""
    rows, columns = np.mgrid[: camera.height, : camera.width]
    x = (columns + 0.5 - camera.cx) / camera.fx
    y = (rows + 0.5 - camera.cy) / camera.fy
    rays = np.stack([x, y, np.ones_like(x)], axis=-1)
    rays /= np.linalg.norm(rays, axis=-1, keepdims=True)
    center = camera.translation  # of the sphere, in the camera
    along = rays @ center
    return center @ center - along**2 <= radius**2


def make_dtu(data: Path, layout: str, n_points: int = 20_000) -> Path:
    """Write ``scan24`` in the layout ``idr`` or ``2dgs``, and its truth; return its folder."""
    root = data / "scan24"
    (root / "mask").mkdir(parents=True)
    cameras = tiny_cameras()
    arrays = {}
    for number, camera in enumerate(cameras):
        inner = camera.translation * MILLIMETRES.scale - camera.rotation @ MILLIMETRES.translation
        pose = np.concatenate([camera.rotation, inner[:, None]], axis=1)
        arrays[f"world_mat_{number}"] = np.eye(4)
        arrays[f"world_mat_{number}"][:3] = lens_matrix(camera) @ pose
        arrays[f"scale_mat_{number}"] = MILLIMETRES.matrix
        mask = np.uint8(255 * silhouette(camera, MASK_RADIUS))
        Image.fromarray(np.stack([mask] * 3, axis=2)).save(root / "mask" / f"{number:03d}.png")
    np.savez(root / "cameras.npz", **arrays)
    folder = root / ("image" if layout == "idr" else "images")
    folder.mkdir()
    names = [f"{number:06d}.png" for number in range(len(cameras))]
    for name, camera in zip(names, cameras, strict=True):
        save_png(folder / name, render_8_bit(tiny_cloud(), camera))
    if layout == "2dgs":
        views = [replace(camera, name=name) for camera, name in zip(cameras, names, strict=True)]
        points = sphere_points(300)
        write_model(root / "sparse" / "0", views, points, np.full(points.shape, 128, np.uint8))
    write_dtu_truth(data / "SampleSet" / "MVS Data", n_points)
    return root


def write_dtu_truth(root: Path, n_points: int) -> None:
    """Write the sphere as a scan, all around it observed, above a table."""
    (root / "ObsMask").mkdir(parents=True)
    (root / "Points" / "stl").mkdir(parents=True)
    low = MILLIMETRES.translation - RADIUS - 5 * VOXEL
    n_voxels = int(2 * RADIUS / VOXEL) + 10
    grid = np.ones((n_voxels, n_voxels, n_voxels), np.uint8)
    box = np.stack([low, low + VOXEL * n_voxels])
    savemat(root / "ObsMask" / "ObsMask24_10.mat", {"ObsMask": grid, "BB": box, "Res": VOXEL})
    height = MILLIMETRES.translation[2] + TABLE
    savemat(root / "ObsMask" / "Plane24.mat", {"P": np.array([[0.0], [0], [1], [-height]])})
    points = MILLIMETRES.moved(sphere_points(n_points))
    write_point_ply(
        root / "Points" / "stl" / "stl024_total.ply", points, np.full(points.shape, 9, np.uint8)
    )


def make_tanks(data: Path, n_points: int = 20_000) -> Path:
    """Write ``Barn`` with a COLMAP model, and its truth in the same folder; return the folder."""
    root = data / "TrainingSet" / "Barn"
    scene = make_tiny_scene(root)
    lines = []
    for number, camera in enumerate(scene.cameras):
        pose = np.eye(4)
        pose[:3, :3] = TO_LOG.rotation @ camera.rotation.T
        pose[:3, 3] = TO_LOG.moved(camera.center[None])[0]
        lines += [f"{number} {number} 0", *(" ".join(map(repr, row)) for row in pose.tolist())]
    (root / "Barn_COLMAP_SfM.log").write_text("\n".join(lines) + "\n", encoding="utf-8")
    rows = [" ".join(map(repr, row)) for row in TO_METRES.matrix.tolist()]
    (root / "Barn_trans.txt").write_text("\n".join(rows) + "\n", encoding="utf-8")
    points = TO_METRES.moved(TO_LOG.moved(sphere_points(n_points)))
    write_point_ply(root / "Barn.ply", points, np.full(points.shape, 9, np.uint8))
    low = points.min(axis=0) - 0.01
    high = points.max(axis=0) + 0.01
    corners = [(low[0], low[2]), (high[0], low[2]), (high[0], high[2]), (low[0], high[2])]
    crop = {
        "class_name": "SelectionPolygonVolume",
        "orthogonal_axis": "Y",
        "axis_min": low[1],
        "axis_max": high[1],
        "bounding_polygon": [[x, 0.0, z] for x, z in corners],
    }
    (root / "Barn.json").write_text(json.dumps(crop), encoding="utf-8")
    return root


def make_mipnerf360(data: Path) -> Path:
    """Write ``bicycle`` with ``images`` and ``images_4``; return its folder."""
    root = data / "360_v2" / "bicycle"
    scene = make_tiny_scene(root)
    (root / "images_4").mkdir()
    for camera in scene.cameras:
        with Image.open(root / "images" / camera.name) as image:
            image.reduce(4).save(root / "images_4" / camera.name)
    return root


def make_synthetic(data: Path, has_test: bool = True) -> Path:
    """Write ``lego`` in Blender's layout, on transparent ground; return its folder."""
    root = data / "nerf_synthetic" / "lego"
    splits = {"train": tiny_cameras(10), "test": tiny_cameras(7)}
    for split, cameras in splits.items():
        if split == "test" and not has_test:
            continue
        (root / split).mkdir(parents=True)
        frames = []
        for number, camera in enumerate(cameras):
            camera = replace(camera, fy=camera.fx, cx=camera.width / 2, cy=camera.height / 2)
            alpha = np.uint8(255 * silhouette(camera))
            pixels = np.dstack([render_8_bit(tiny_cloud(), camera), alpha])
            Image.fromarray(pixels).save(root / split / f"r_{number}.png")
            pose = np.eye(4)
            pose[:3, :3] = camera.rotation.T * (1, -1, -1)
            pose[:3, 3] = camera.center
            matrix = pose.tolist()
            frames.append({"file_path": f"./{split}/r_{number}", "transform_matrix": matrix})
        angle = 2 * np.arctan(cameras[0].width / 2 / cameras[0].fx)
        content = {"camera_angle_x": angle, "frames": frames}
        path = root / f"transforms_{split}.json"
        path.write_text(json.dumps(content), encoding="utf-8")
    return root
