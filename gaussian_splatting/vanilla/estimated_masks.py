# SPDX-License-Identifier: Apache-2.0
"""Masks of an object from a model of the whole scene, where given ones are imprecise or missing, or
where there are none and the object is what all photographs look at.

The share of a Gaussian that lies inside the given masks, weighted by the blending weights of all
views,

    s_g = sum_views sum_pixels w_gp m_p / sum_views sum_pixels w_gp,

averages errors of outlines that differ between views. A pixel belongs to the object where the
blended share is at least ``OBJECT_SHARE``. Masks are written into the checkpoint folder.

Without masks, :mod:`.object_region` finds the Gaussians of the object.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.core.subsets import at_most
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import COUNTS, decode_image, decode_view, outlined
from gaussian_splatting.data.masks import (
    FOUND,
    OVERVIEW_SIDE,
    REMBG,
    overview,
    with_object_masks,
    write_object_mask,
)
from gaussian_splatting.engine.reporting.evaluation import intersection_over_union
from gaussian_splatting.engine.run_identity import points_digest, scene_inputs
from gaussian_splatting.formats.ply import read_gaussian_ply
from gaussian_splatting.rasterization import WARP, Rasterizer, rasterize
from gaussian_splatting.rasterization.compute import Compute
from gaussian_splatting.rasterization.render import masked_shares
from gaussian_splatting.scenes.reference_layout import OBJECT_MASKS
from gaussian_splatting.scenes.scene import Scene
from gaussian_splatting.vanilla.object_region import object_rows
from gaussian_splatting.vanilla.scene_masks import (
    SCENE_MASKS,
    all_views,
    copy_edited_masks,
    edited_digest,
    write_scene_masks,
)
from sugar_utils import html
from sugar_utils.errors import Notify
from sugar_utils.files import read_json, write_json_atomic
from sugar_utils.flags import AUTO
from sugar_utils.libraries import load_package
from sugar_utils.recipe import Recipe
from sugar_utils.schemas import conform

OBJECT_SHARE = 0.4
"""Blended share of the object from which a pixel belongs to it. Less than a half, because pixels
that a mask lacks cost more than those that it has too many."""
ITERATIONS = 700  # iterations of the model of the whole scene at most
MIN_IOU = 0.7  # median IoU with the given masks; below, those stay
MIN_MASKS = 6  # fewer masks do not determine the object in other views
_RECORD = "estimate.json"
OUTLINES = "masks.html"
_SHOWN = 60  # photographs on the page of outlines, evenly spread over all
_SHOWN_SIDE = 320
Train = Callable[[Scene, Path, int], Path]


@torch.no_grad()
def render_mask(
    gaussians: Gaussians,
    shares: Tensor,
    camera: Camera,
    size: tuple[int, int] | None = None,
    rasterizer: Rasterizer = WARP,
) -> np.ndarray:
    """Render the mask of the object in a view, 255 where it is. (height, width) uint8

    Args:
        shares: As of :func:`masked_shares`. (N,)
        size: Width and height in pixels; those of the camera if None.
    """
    blended = rasterize(
        gaussians, camera, rgb=False, features=shares[:, None], rasterizer=rasterizer
    ).features[..., 0]
    width, height = size or camera.size
    image = functional.interpolate(
        blended[None, None], (height, width), mode="bilinear", align_corners=False
    )
    return ((image[0, 0] >= OBJECT_SHARE).to(torch.uint8) * 255).cpu().numpy()


def needs_masks(cameras: Sequence[Camera]) -> bool:
    """Whether masks show an object, and some are imprecise or missing."""
    n_masks = sum(camera.shows_object for camera in cameras)
    if n_masks < MIN_MASKS:
        return False
    return any(
        _needs_mask(camera) for camera in cameras if camera.mask is None or camera.shows_object
    )


def _needs_mask(camera: Camera) -> bool:
    return camera.mask is None or camera.mask.outline_error > 0


class _Record(msgspec.Struct):
    """``estimate.json``."""

    median_iou: float  # of the estimated masks with the given ones


@dataclass(frozen=True)
class MaskEstimation:
    """Estimates masks of a scene that needs some, by a short training on whole photographs."""

    model_path: Path  # checkpoint folder
    compute: Compute
    settings: dict[str, Any]  # what else decides the training
    iterations: int  # of the training on whole photographs
    train: Train  # trains a scene into a folder for so many iterations, and returns the PLY
    mask_flag: str | None = None  # --masks

    def __call__(self, scene: Scene, notify: Notify) -> Scene:
        """Return the scene with masks, if it needs them and they agree with the given ones."""
        is_asked = self.mask_flag in FOUND
        if not (is_asked or needs_masks(scene.train_cameras)):
            return scene
        mask_flag = self.mask_flag if is_asked else None
        edited = edited_digest(scene.root) if self.mask_flag == AUTO else None
        settings = {"training": self.settings, "iterations": self.iterations, "masks": mask_flag}
        inputs = {**scene_inputs(scene), "points": points_digest(scene), "edited": edited}
        key = Recipe(settings, inputs).key
        folder = self.model_path / OBJECT_MASKS / key
        if not self.compute.group.broadcast((folder / _RECORD).is_file()):
            self._make(scene, folder, notify, edited is not None)
        record = conform(read_json(folder / _RECORD), _Record, folder / _RECORD)
        iou = record.median_iou
        if edited is not None:
            notify(f"masks as they are in {scene.root / SCENE_MASKS}; remove it for new ones")
        elif self.mask_flag == AUTO:
            if self.compute.group.is_first:
                write_scene_masks(scene, folder, OUTLINES, notify)
        elif is_asked:
            notify(
                f"masks of the object: {folder}, as outlines in {OUTLINES} there; to correct them, "
                "copy that folder and pass it with --masks"
            )
        elif iou < MIN_IOU:
            notify(f"note: masks could not be estimated (IoU {iou:.2f} with the given ones)")
            return scene
        else:
            notify(f"masks estimated from all views (IoU {iou:.2f} with the given ones): {folder}")
        return replace(
            scene,
            train_cameras=with_object_masks(scene.train_cameras, folder),
            test_cameras=with_object_masks(scene.test_cameras, folder),
            dropped_test_cameras=with_object_masks(scene.dropped_test_cameras, folder),
            object_masks=key,
        )

    def _make(self, scene: Scene, folder: Path, notify: Notify, is_edited: bool) -> None:
        """Write masks, their page and their record; all processes wait for the first.

        Args:
            is_edited: Masks of the scene folder are taken in place of an estimate.
        """
        if not is_edited:
            iou = self._write_masks(scene, folder, notify)
        else:
            iou = 1.0
            if self.compute.group.is_first:
                copy_edited_masks(scene, folder, notify)
        if self.compute.group.is_first:
            page = partial(_outlines, with_object_masks(scene.train_cameras, folder))
            html.write_page(folder / OUTLINES, page, notify)
            write_json_atomic(folder / _RECORD, {"median_iou": iou})
        self.compute.group.broadcast(True)

    def _write_masks(self, scene: Scene, folder: Path, notify: Notify) -> float:
        """Write the masks of all views; their median IoU with given ones, or 1."""
        if self.mask_flag == REMBG:
            if self.compute.group.is_first:
                write_foregrounds(scene, folder)
            return 1.0
        model = folder / "model"
        # No masks, small images, nothing held out to measure.
        cameras = [replace(c.reduced(OVERVIEW_SIDE), mask=None) for c in scene.train_cameras]
        unmasked = replace(scene, train_cameras=cameras, test_cameras=[], dropped_test_cameras=[])
        ply_path = self.train(unmasked, model, self.iterations)
        gaussians = read_gaussian_ply(ply_path, notify).to(self.compute.device).activate()
        iou = self._write_rendered(gaussians, scene, folder)
        if self.compute.group.is_first:
            shutil.rmtree(model, ignore_errors=True)
        return iou

    def _write_rendered(self, gaussians: Gaussians, scene: Scene, folder: Path) -> float:
        """Render and write the masks of all views that need one; their median IoU, or 1."""
        rasterizer = self.compute.rasterizer
        views = []
        for camera in scene.train_cameras:
            if camera.mask is not None:
                mask = torch.from_numpy(overview(camera).copy())
                views.append((camera.reduced(OVERVIEW_SIDE), mask))
        if self.mask_flag == AUTO:
            rows = object_rows(gaussians, scene.train_cameras)
            shares = torch.from_numpy(rows).to(gaussians.means)
        else:
            weighted = ((camera, mask.float() / 255) for camera, mask in views)
            shares = masked_shares(gaussians, weighted, rasterizer)
        ious = []
        for camera, mask in views:
            rendered = render_mask(gaussians, shares, camera, rasterizer=rasterizer) >= COUNTS
            ious.append(intersection_over_union(torch.from_numpy(rendered), mask >= COUNTS))
        for camera in all_views(scene):
            if _needs_mask(camera):
                size = camera.size
                small = camera.reduced(OVERVIEW_SIDE)
                values = render_mask(gaussians, shares, small, size, rasterizer)
                if self.compute.group.is_first:
                    write_object_mask(folder, camera.name, values)
        return float(np.median(ious)) if ious else 1.0


def write_foregrounds(scene: Scene, folder: Path) -> None:
    """Write masks of all views by the package rembg, which looks at each photograph by itself."""
    (rembg,) = load_package("--masks rembg", "rembg", "rembg", instead="use --masks auto")
    session = rembg.new_session()
    for camera in all_views(scene):
        if camera.image_path is not None:
            photograph = decode_image(camera.image_path, *camera.size)
            values = rembg.remove(photograph, session=session, only_mask=True)
            write_object_mask(folder, camera.name, np.asarray(values).astype(np.uint8))


def _outlines(cameras: Sequence[Camera]) -> html.Page:
    """A page of photographs with the outlines of their masks."""
    page = html.Page("Masks of the object", "photographs of the training views with outlines")

    def pictures() -> Iterator[html.Picture]:
        for camera in at_most(cameras, _SHOWN):
            view = torch.from_numpy(decode_view(camera.reduced(_SHOWN_SIDE)))
            yield html.Picture(outlined(view).numpy(), camera.name)

    page.pictures(pictures(), width=_SHOWN_SIDE)
    return page
