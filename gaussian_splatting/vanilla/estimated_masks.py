# SPDX-License-Identifier: Apache-2.0
"""Masks of an object from a model of the whole scene, where given ones are imprecise or missing, or
where there are none and the object is what all photographs look at.

The share of a Gaussian that lies inside the given masks, weighted by the blending weights of all
views,

    s_g = sum_views sum_pixels w_gp m_p / sum_views sum_pixels w_gp,

averages errors of outlines that differ between views. A pixel belongs to the object where the
blended share is at least ``OBJECT_SHARE``. Masks are written into the checkpoint folder.

Without masks the optical axes of the cameras cross in the object. The plane that it stands on, or
hangs at, has all cameras on one side and next to nothing on the other. What hangs together around
the crossing after the plane is removed is the object.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from gaussian_splatting.cloud import Gaussians, rotation_matrices
from gaussian_splatting.compute import Compute
from gaussian_splatting.data.cameras import Camera, looked_at, planes_of_triples
from gaussian_splatting.data.images import COUNTS, decode_image, decode_view, outlined
from gaussian_splatting.data.masks import (
    FOUND,
    OVERVIEW_SIDE,
    REMBG,
    object_mask_path,
    overview,
    with_object_masks,
)
from gaussian_splatting.data.ply import read_gaussian_ply
from gaussian_splatting.data.reference_layout import OBJECT_MASKS
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.engine.run_directory import points_digest, scene_inputs
from gaussian_splatting.rasterization import WARP, Rasterizer, rasterize
from gaussian_splatting.rasterization.render import masked_shares
from sugar_utils import html
from sugar_utils.errors import Notify, UserError
from sugar_utils.files import atomic_path, read_json, write_json_atomic
from sugar_utils.flags import AUTO
from sugar_utils.libraries import load_package
from sugar_utils.schemas import conform

# Lengths are in the radius of the sphere around the crossing that the median view shows whole.
REACH = 1.5  # what is farther from the crossing belongs to the surroundings
# of a support: half its thickness, its share of all surfaces
PLANE_WIDTH = 0.01
PLANE_SHARE = 0.08
LIFT = 0.015  # what is lower than this above the support belongs to it
MOST_BEHIND = 0.1  # share of the surfaces that may lie behind the support
VOXEL = 1 / 30  # of the grid in which parts are connected
MAX_OFF_AXIS = 15.0  # median angle in degrees between an optical axis and the crossing
MOST_AT_BORDER = 0.02  # share of the object that may lie in the outer tenth of the reach
_MIN_OPACITY = 0.2
_MAX_SCALE = 0.3
_REACHED = 1.5  # ends of a Gaussian, in standard deviations
_REFITS = 3  # of a plane to all that lies in it
_CENTRAL = 0.5  # radii: standard deviation of the weight by which the object is chosen

OBJECT_SHARE = 0.4
"""Blended share of the object from which a pixel belongs to it. Less than a half, because pixels
that a mask lacks cost more than those that it has too many."""
ITERATIONS = 700  # iterations of the model of the whole scene at most
MIN_IOU = 0.7  # median IoU with the given masks; below, those stay
MIN_MASKS = 6  # fewer masks do not tell what the object is in other views
_RECORD = "estimate.json"
OUTLINES = "masks.html"
_SHOWN = 60  # photographs on the page of outlines, evenly spread over all
_SHOWN_SIDE = 320
Train = Callable[[Scene, Path, int], Path]


def object_rows(gaussians: Gaussians, cameras: Sequence[Camera]) -> np.ndarray:
    """Which Gaussians are the object. (N,) bool

    Raises:
        UserError: The cameras do not look at one place, or what is there is not separate from its
            surroundings.
    """
    # Here and not above: most commands start without it.
    from scipy.ndimage import label

    means = gaussians.means.cpu().numpy().astype(np.float64)
    opacities = gaussians.opacities.reshape(-1).cpu().numpy()
    scales = np.sort(gaussians.scales.cpu().numpy(), axis=1)
    center, radius = crossing_of(cameras)
    near = np.linalg.norm(means - center, axis=1) < REACH * radius
    near &= (opacities > _MIN_OPACITY) & (scales[:, 2] < _MAX_SCALE * radius)
    areas = opacities * scales[:, 1] * scales[:, 2]
    kept = near.copy()
    plane = support_plane(means[near], areas[near], cameras, radius)
    if plane is not None:
        normal, offset = plane
        kept &= means @ normal - offset > LIFT * radius
    if not kept.any():
        raise _no_object("nothing is where they look at")
    # A Gaussian fills the voxels of its centre and of the ends of its axes.
    axes = (rotation_matrices(gaussians.quats) * gaussians.scales[:, None]).cpu().numpy()[kept]
    ends = _REACHED * np.concatenate([axes, -axes, 0 * axes[..., :1]], axis=2).swapaxes(1, 2)
    cells = np.floor((means[kept, None] + ends - center) / (VOXEL * radius)).astype(np.int64)
    cells -= cells.min(axis=(0, 1))
    grid = np.zeros(cells.max(axis=(0, 1)) + 1, dtype=bool)
    grid[tuple(cells.reshape(-1, 3).T)] = True
    parts = label(grid, np.ones((3, 3, 3)))[0][tuple(cells[:, -1].T)]
    distances = np.linalg.norm(means[kept] - center, axis=1) / radius
    central = areas[kept] * np.exp(-0.5 * (distances / _CENTRAL) ** 2)
    is_object = parts == np.bincount(parts, weights=central).argmax()
    at_border = is_object & (distances > 0.9 * REACH)
    if areas[kept][at_border].sum() > MOST_AT_BORDER * areas[kept][is_object].sum():
        raise _no_object("what they look at is not separate from its surroundings")
    found = np.zeros(len(means), dtype=bool)
    found[np.flatnonzero(kept)[is_object]] = True
    return found


def crossing_of(cameras: Sequence[Camera]) -> tuple[np.ndarray, float]:
    """Point nearest to all optical axes, (3,) world units, and the radius that views show of it."""
    centers = np.stack([camera.center for camera in cameras])
    axes = np.stack([camera.rotation[2] for camera in cameras])
    center = looked_at(cameras)
    distances = np.linalg.norm(center - centers, axis=1)
    cosines = ((center - centers) * axes).sum(axis=1) / np.maximum(distances, 1e-12)
    if np.degrees(np.arccos(np.clip(np.median(cosines), -1, 1))) > MAX_OFF_AXIS:
        raise _no_object("they do not look at one place")
    half_views = np.array([min(camera.tan_half_fov) for camera in cameras])
    return center, float(np.median(distances * half_views))


def support_plane(
    points: np.ndarray, areas: np.ndarray, cameras: Sequence[Camera], radius: float
) -> tuple[np.ndarray, float] | None:
    """Normal n towards the cameras and offset d of the plane n . x = d of a support, if any.

    Args:
        points: (P, 3) world units
        areas: Surface that each stands for. (P,)
    """
    if len(points) < 3:
        return None
    centers = np.stack([camera.center for camera in cameras])
    total = areas.sum()
    best = None
    most = PLANE_SHARE * total
    for a, normal in planes_of_triples(points):
        normal = normal if ((centers - a) @ normal).mean() >= 0 else -normal
        heights = (points - a) @ normal
        own = areas[np.abs(heights) < PLANE_WIDTH * radius].sum()
        behind = areas[heights < -3 * PLANE_WIDTH * radius].sum()
        if own > most and behind < MOST_BEHIND * total and ((centers - a) @ normal).min() > 0:
            best = (normal, float(normal @ a))
            most = own
    for _ in range(_REFITS if best is not None else 0):
        normal, offset = best
        rows = np.abs(points @ normal - offset) < 1.5 * PLANE_WIDTH * radius
        middle = np.average(points[rows], axis=0, weights=areas[rows])
        weighted = (points[rows] - middle) * np.sqrt(areas[rows])[:, None]
        axis = np.linalg.svd(weighted, full_matrices=False)[2][2]
        axis = axis if axis @ normal >= 0 else -axis
        best = axis, float(axis @ middle)
    return best


def _no_object(reason: str) -> UserError:
    return UserError(
        f"--masks auto: the photographs show no object by itself ({reason}); draw masks, or leave "
        "the flag out"
    )


@torch.no_grad()
def render_mask(
    gaussians: Gaussians,
    shares: Tensor,
    camera: Camera,
    size: tuple[int, int] | None = None,
    rasterizer: Rasterizer = WARP,
) -> np.ndarray:
    """The mask of the object in a view, 255 where it is. (height, width) uint8

    Args:
        shares: As of :func:`masked_shares`. (N,)
        size: Width and height in pixels; those of the camera if None.
    """
    blended = rasterize(
        gaussians, camera, rgb=False, features=shares[:, None], rasterizer=rasterizer
    ).features[..., 0]
    width, height = size or (camera.width, camera.height)
    image = functional.interpolate(
        blended[None, None], (height, width), mode="bilinear", align_corners=False
    )
    return ((image[0, 0] >= OBJECT_SHARE).to(torch.uint8) * 255).cpu().numpy()


def needs_masks(cameras: Sequence[Camera]) -> bool:
    """Whether masks show an object, and some are imprecise or missing."""
    shown = [c.mask for c in cameras if c.shows_object]
    incomplete = any(c.mask is None for c in cameras)
    return len(shown) >= MIN_MASKS and (incomplete or any(m.outline_error > 0 for m in shown))


class _Record(msgspec.Struct):
    """``estimate.json``."""

    median_iou: float  # of the estimated masks with the given ones


@dataclass(frozen=True)
class MaskEstimation:
    model_path: Path  # checkpoint folder
    compute: Compute
    settings: dict[str, Any]  # what else decides the training
    iterations: int  # of the training on whole photographs
    train: Train  # trains a scene into a folder for so many iterations, and returns the PLY
    asked: str | None = None  # --masks

    def __call__(self, scene: Scene, notify: Notify) -> Scene:
        """The scene with estimated masks, if it needs them and they agree with the given ones."""
        found = self.asked in FOUND
        if not (found or needs_masks(scene.train_cameras)):
            return scene
        decisive = self.settings, self.iterations, self.asked if found else None
        inputs = [scene_inputs(scene), points_digest(scene), *decisive]
        key = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]
        folder = self.model_path / OBJECT_MASKS / key
        group = self.compute.group
        if not group.broadcast((folder / _RECORD).is_file()):
            iou = self._write_masks(scene, folder, notify)
            if group.is_first:
                page = partial(_outlines, with_object_masks(scene.train_cameras, folder))
                html.write_page(folder / OUTLINES, page, notify)
                write_json_atomic(folder / _RECORD, {"median_iou": iou})
            group.broadcast(True)
        record = conform(read_json(folder / _RECORD), _Record, folder / _RECORD)
        iou = record.median_iou
        if found:
            notify(
                f"masks of the object: {folder}, as outlines in {OUTLINES} there; to correct them, "
                "copy that folder and pass it with --masks"
            )
        elif iou < MIN_IOU:
            notify(f"note: masks could not be estimated (IoU {iou:.2f} with the given ones)")
            return scene
        else:
            notify(f"masks estimated from all views (IoU {iou:.2f} with the given ones): {folder}")
        roles = ("train_cameras", "test_cameras", "dropped_test_cameras")
        masked = {role: with_object_masks(getattr(scene, role), folder) for role in roles}
        return replace(scene, **masked, object_masks=key)

    def _write_masks(self, scene: Scene, folder: Path, notify: Notify) -> float:
        if self.asked == REMBG:
            if self.compute.group.is_first:
                write_foregrounds(scene, folder)
            return 1.0
        model = folder / "model"
        # No masks, small images, nothing held out to measure.
        small = [replace(c.reduced(OVERVIEW_SIDE), mask=None) for c in scene.train_cameras]
        bare = {"test_cameras": [], "dropped_test_cameras": []}
        ply = self.train(replace(scene, train_cameras=small, **bare), model, self.iterations)
        cloud = read_gaussian_ply(ply, notify).to(self.compute.device).activate()
        iou = self._write(cloud, scene, folder)
        if self.compute.group.is_first:
            shutil.rmtree(model, ignore_errors=True)
        return iou

    def _write(self, gaussians: Gaussians, scene: Scene, folder: Path) -> float:
        """Write the masks of all views that need one; their median IoU with given ones, or 1."""
        rasterizer = self.compute.rasterizer
        masked = [camera for camera in scene.train_cameras if camera.mask is not None]
        views = [(c.reduced(OVERVIEW_SIDE), torch.from_numpy(overview(c).copy())) for c in masked]
        if self.asked == AUTO:
            rows = object_rows(gaussians, scene.train_cameras)
            shares = torch.from_numpy(rows).to(gaussians.means)
        else:
            shares = masked_shares(gaussians, ((c, m.float() / 255) for c, m in views), rasterizer)
        iou = []
        for camera, mask in views:
            found = render_mask(gaussians, shares, camera, rasterizer=rasterizer) >= COUNTS
            given = mask.numpy() >= COUNTS
            iou.append(int((found & given).sum()) / max(int((found | given).sum()), 1))
        for camera in (*scene.train_cameras, *scene.test_cameras, *scene.dropped_test_cameras):
            if camera.mask is None or camera.mask.outline_error > 0:
                size = camera.width, camera.height
                small = camera.reduced(OVERVIEW_SIDE)
                values = render_mask(gaussians, shares, small, size, rasterizer)
                if self.compute.group.is_first:
                    _write_mask(folder, camera, values)
        return float(np.median(iou)) if iou else 1.0


def write_foregrounds(scene: Scene, folder: Path) -> None:
    """Masks of all views by the package rembg, which looks at each photograph by itself."""
    (rembg,) = load_package("--masks rembg", "rembg", "rembg", instead="use --masks auto")
    session = rembg.new_session()
    for camera in (*scene.train_cameras, *scene.test_cameras, *scene.dropped_test_cameras):
        photograph = decode_image(camera.image_path, camera.width, camera.height)
        values = rembg.remove(photograph, session=session, only_mask=True)
        _write_mask(folder, camera, np.asarray(values).astype(np.uint8))


def _write_mask(folder: Path, camera: Camera, values: np.ndarray) -> None:
    with atomic_path(object_mask_path(folder, camera.name)) as temporary:
        Image.fromarray(values).save(temporary, format="PNG")


def _outlines(cameras: Sequence[Camera]) -> html.Page:
    page = html.Page("Masks of the object", "photographs of the training views with outlines")
    shown = cameras[:: -(-len(cameras) // _SHOWN)]
    views = (torch.from_numpy(decode_view(camera.reduced(_SHOWN_SIDE))) for camera in shown)
    drawn = (outlined(view).numpy() for view in views)
    pictures = (html.Picture(v, camera.name) for v, camera in zip(drawn, shown, strict=True))
    page.pictures(pictures, width=_SHOWN_SIDE)
    return page
