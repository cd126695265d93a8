# SPDX-License-Identifier: Apache-2.0
"""Faults that real captures have, put into a copy of a good one.

A fault is a function of a scene folder (``images/``, ``sparse/0`` and perhaps ``masks/``), the
names of the views to spoil and a random generator. It returns the names of the views that
contradict the others afterwards; a fault of the whole capture returns none.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pycolmap
from PIL import Image, ImageFilter
from scipy.ndimage import map_coordinates, zoom

Fault = Callable[[Path, Sequence[str], np.random.Generator], set[str]]

SHIFT = 0.1
"""Shares of the image width by which masks are shifted, and outlines are off."""

OUTLINE = 0.02
STOPS = 2.0


def copy_scene(source: Path, target: Path) -> Path:
    """A copy of a scene that faults can be put into."""
    ignored = shutil.ignore_patterns("undistorted_cache", "gt*", "*.md", "*.txt")
    shutil.copytree(source, target, ignore=ignored)
    return target


def view_names(root: Path) -> list[str]:
    """Names of the registered images, sorted."""
    model = pycolmap.Reconstruction(root / "sparse" / "0")
    return sorted(model.images[i].name for i in model.reg_image_ids())


class _Model:
    """A COLMAP model that is written back when the block ends."""

    def __init__(self, root: Path) -> None:
        self._folder = root / "sparse" / "0"
        self.model = pycolmap.Reconstruction(self._folder)
        self._ids = {image.name: number for number, image in self.model.images.items()}

    def __enter__(self) -> _Model:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.model.write_binary(str(self._folder))

    def image(self, name: str) -> pycolmap.Image:
        return self.model.images[self._ids[name]]

    def move(self, name: str, pose: pycolmap.Rigid3d, refit_keypoints: bool = True) -> None:
        """Give an image another pose; its keypoints follow, as if it had been found so."""
        image = self.image(name)
        image.frame.set_cam_from_world(image.camera_id, pose)
        if not refit_keypoints:
            return
        for point in image.points2D:
            if point.has_point3D():
                xyz = pose * self.model.points3D[point.point3D_id].xyz
                point.xy = self.model.cameras[image.camera_id].img_from_cam(xyz[None])[0]


def _turn(degrees: float) -> pycolmap.Rigid3d:
    half = np.deg2rad(degrees) / 2
    return pycolmap.Rigid3d(
        pycolmap.Rotation3d(np.array([0, np.sin(half), 0, np.cos(half)])), np.zeros(3)
    )


def turned_pose(degrees: float, consistent: bool = False) -> Fault:
    """A pose turned about the vertical axis of the camera.

    Args:
        degrees: Angle.
        consistent: Whether the keypoints fit the wrong pose, as those of a bad registration do.
    """

    def spoil(root: Path, names: Sequence[str], rng: np.random.Generator) -> set[str]:
        with _Model(root) as scene:
            for name in names:
                pose = _turn(degrees) * scene.image(name).cam_from_world()
                scene.move(name, pose, consistent)
        return set(names)

    return spoil


def swapped_poses(root: Path, names: Sequence[str], rng: np.random.Generator) -> set[str]:
    """The poses of the first view and of the one half the capture away are swapped."""
    every = view_names(root)
    other = every[(every.index(names[0]) + len(every) // 2) % len(every)]
    with _Model(root) as scene:
        first, second = (scene.image(n).cam_from_world() for n in (names[0], other))
        scene.move(names[0], second, False)
        scene.move(other, first, False)
    return {names[0], other}


def foreign_pose(root: Path, names: Sequence[str], rng: np.random.Generator) -> set[str]:
    """Poses of another world."""
    with _Model(root) as scene:
        for name in names:
            quaternion = rng.normal(size=4)
            rotation = pycolmap.Rotation3d(quaternion / np.linalg.norm(quaternion))
            scene.move(name, pycolmap.Rigid3d(rotation, 5 * rng.normal(size=3)), False)
    return set(names)


def moved_points(root: Path, names: Sequence[str], rng: np.random.Generator) -> set[str]:
    """A tenth of the points lies far away."""
    with _Model(root) as scene:
        ids = np.array(sorted(scene.model.points3D))
        positions = np.array([scene.model.points3D[i].xyz for i in ids])
        size = 5 * np.std(positions, axis=0).max()
        for i in rng.choice(ids, len(ids) // 10, replace=False):
            scene.model.points3D[i].xyz = positions.mean(axis=0) + size * rng.normal(size=3)
    return set()


def _mask_path(root: Path, name: str) -> Path:
    (found,) = [p for p in (root / "masks").iterdir() if p.stem in (name, Path(name).stem)]
    return found


def changed_mask(change: Callable[[np.ndarray], np.ndarray]) -> Fault:
    """Masks of the views after a function of their values. (H, W) uint8"""

    def spoil(root: Path, names: Sequence[str], rng: np.random.Generator) -> set[str]:
        for name in names:
            path = _mask_path(root, name)
            Image.fromarray(change(np.array(Image.open(path).convert("L")))).save(path)
        return set(names)

    return spoil


def mask_of_another_view(root: Path, names: Sequence[str], rng: np.random.Generator) -> set[str]:
    """The mask of the view a quarter of the capture away."""
    every = view_names(root)
    for name in names:
        other = every[(every.index(name) + len(every) // 4) % len(every)]
        shutil.copy(_mask_path(root, other), _mask_path(root, name))
    return set(names)


def rough_outlines(root: Path, names: Sequence[str], rng: np.random.Generator) -> set[str]:
    """All outlines are off by some percent of the image size, differently in each place."""
    for name in view_names(root):
        path = _mask_path(root, name)
        mask = np.array(Image.open(path).convert("L")).astype(np.float64)
        height, width = mask.shape
        coarse = rng.normal(size=(2, height // 40 + 2, width // 40 + 2))
        scale = (1, height / coarse.shape[1], width / coarse.shape[2])
        offset = zoom(coarse, scale, order=3)[:, :height, :width] * OUTLINE * max(height, width)
        grid = np.mgrid[:height, :width] + offset
        moved = map_coordinates(mask, grid, order=1, mode="nearest")
        Image.fromarray(np.uint8(moved >= 128) * 255).save(path)
    return set()


def missing_masks(root: Path, names: Sequence[str], rng: np.random.Generator) -> set[str]:
    """Every second view has no mask."""
    for name in view_names(root)[1::2]:
        _mask_path(root, name).unlink()
    return set()


def changed_image(change: Callable[[Image.Image], Image.Image]) -> Fault:
    """Images of the views after a function of them."""

    def spoil(root: Path, names: Sequence[str], rng: np.random.Generator) -> set[str]:
        for name in names:
            path = root / "images" / name
            with Image.open(path) as image:
                changed = change(image.convert("RGB"))
            changed.save(path, quality=95)
        return set(names)

    return spoil


def _overexposed(image: Image.Image) -> Image.Image:
    linear = (np.asarray(image) / 255.0) ** 2.2 * 2**STOPS
    return Image.fromarray(np.uint8(255 * np.clip(linear, 0, 1) ** (1 / 2.2)))


def _blurred(image: Image.Image) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(max(image.size) / 100))


def _black(image: Image.Image) -> Image.Image:
    return Image.new("RGB", image.size)


def _rotated(image: Image.Image) -> Image.Image:
    return image.transpose(Image.Transpose.ROTATE_90)


def foreign_image(other: Path) -> Fault:
    """Images of another place.

    Args:
        other: An image file.
    """

    def change(image: Image.Image) -> Image.Image:
        with Image.open(other) as found:
            return found.convert("RGB").resize(image.size)

    return changed_image(change)


def doubled_image(root: Path, names: Sequence[str], rng: np.random.Generator) -> set[str]:
    """The image of the next view lies in place of a view's own."""
    every = view_names(root)
    for name in names:
        following = every[(every.index(name) + 1) % len(every)]
        shutil.copy(root / "images" / following, root / "images" / name)
    return set(names)


def faults(foreign: Path) -> dict[str, Fault]:
    """All faults of one kind, by name.

    Args:
        foreign: An image of another place.
    """
    return {
        "pose turned by 5 degrees": turned_pose(5),
        "pose turned by 20 degrees": turned_pose(20),
        "pose turned by 90 degrees": turned_pose(90),
        "bad registration by 5 degrees": turned_pose(5, consistent=True),
        "bad registration by 20 degrees": turned_pose(20, consistent=True),
        "two poses swapped": swapped_poses,
        "pose of another capture": foreign_pose,
        "mask inverted": changed_mask(lambda mask: 255 - mask),
        "mask empty": changed_mask(np.zeros_like),
        "mask full": changed_mask(lambda mask: np.full_like(mask, 255)),
        "mask shifted by 10 %": changed_mask(
            lambda mask: np.roll(mask, round(SHIFT * mask.shape[1]), axis=1)
        ),
        "mask of another view": mask_of_another_view,
        "outlines off by 2 %": rough_outlines,
        "half of the masks missing": missing_masks,
        "image overexposed by 2 stops": changed_image(_overexposed),
        "image blurred": changed_image(_blurred),
        "image black": changed_image(_black),
        "image rotated by 90 degrees": changed_image(_rotated),
        "image of another place": foreign_image(foreign),
        "image doubled": doubled_image,
        "10 % of the points far away": moved_points,
    }


OF_MASKS = ("mask", "outlines", "half of the masks")
"""Beginnings of the names of faults that need masks."""
