# SPDX-License-Identifier: Apache-2.0
"""Depth and colour of the views of a block on the disk, from which one mesh of all is fused.

A view counts fully in the middle of its block, half at the border to a neighbour, and not at all
where the margin ends, so that the surfaces of two blocks pass into each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import COUNTS, decode_mask
from gaussian_splatting.engine.model import cloud_from_state
from sugar_extractors.mesh.fusion.observed_region import TEXTURE_PATCH
from sugar_extractors.mesh.loading import depth_renderer
from sugar_extractors.mesh.mesh_config import MeshOptions
from sugar_extractors.results import read_state
from sugar_pipeline.blocks.block_plan import Block
from sugar_scene.depth_view import DepthView, Renderer
from sugar_scene.regions import Corner, corner_of
from sugar_trainers.capture import load_views
from sugar_utils.console import Console
from sugar_utils.device import float32_tensor
from sugar_utils.errors import say_nothing
from sugar_utils.files import (
    atomic_path,
    check_writable,
    file_digest,
    read_json,
)
from sugar_utils.recipe import Recipe
from sugar_utils.schemas import conform

INDEX_FILE = "depths.json"
_STEPS = 65_534  # of the inverse depth of a view, between its nearest and its farthest pixel
_LEAST_SPAN = 1e-9  # between them


class ViewRecord(msgspec.Struct):
    """A view in the index: where the pixels with a depth lie, and how large they are there."""

    file: str
    low: Corner
    high: Corner
    pixel: float  # median side of a pixel on the surface, world units


class _Index(msgspec.Struct):
    """The index of a folder of depths; written last."""

    views: list[ViewRecord]


@dataclass(frozen=True)
class StoredView:
    """A view on the disk."""

    path: Path
    record: ViewRecord

    @property
    def number(self) -> int:
        """Of the camera among the training views of its block."""
        return int(self.path.stem)

    def _camera(self, arrays: Mapping[str, np.ndarray]) -> Camera:
        fx, fy, cx, cy = arrays["intrinsics"].tolist()
        width, height = arrays["size"].tolist()
        return Camera(
            name=self.path.stem,
            width=width,
            height=height,
            fx=fx,
            fy=fy,
            cx=cx,
            cy=cy,
            rotation=arrays["rotation"],
            translation=arrays["translation"],
        )

    def read(self, device: torch.device) -> DepthView:
        """Read depth and colour."""
        with np.load(self.path) as arrays:
            steps = arrays["inverse_depth"]
            least, span, most_weight = arrays["scales"].tolist()
            camera = self._camera(arrays)
            inverse = float32_tensor(steps) - 1
            colors = torch.from_numpy(arrays["colors"])
            weights = torch.from_numpy(arrays["weights"])
        depth = 1 / (least + inverse * (span / _STEPS))
        depth = torch.where(inverse >= 0, depth, 0.0)
        return DepthView(
            camera,
            depth.to(device),
            (colors.float() / 255).to(device),
            (weights.float() * most_weight).to(device),
        )


def stored_views(blocks: Sequence[Block]) -> list[StoredView]:
    """Return all views with depth, in the order of blocks and names."""
    views = []
    for block in blocks:
        index = _read_index(block.depths)
        for record in index.views:
            views.append(StoredView(block.depths / record.file, record))
    return views


def write_depths(block: Block, margin: float, options: MeshOptions, console: Console) -> None:
    """Render and write the views of a block, unless they are there.

    Args:
        margin: By which blocks reach into each other, world units.
        options: Of the mesh of the block's coarse model.
    """
    model = options.model
    if model is None:
        raise ValueError("a block has a coarse model")
    index_path = block.depths / INDEX_FILE
    recipe = Recipe(inputs={"model": file_digest(model)})
    if recipe.is_current(index_path):
        console.headline(f"exists already: {index_path}")
        return
    index_path.unlink(missing_ok=True)
    check_writable(block.depths)
    _, scene = load_views(options, say_nothing)
    cloud = read_state(model, cloud_from_state).to(options.compute.device)
    cameras = scene.train_cameras
    render = depth_renderer(cloud, scene, options.tsdf)
    records = []
    with console.progress("depth", 1, len(cameras)) as progress, torch.no_grad():
        for number, camera in enumerate(cameras):
            record = _write_view(block, margin, render, camera, f"{number:05d}.npz")
            if record is not None:
                records.append(record)
            progress.update(number + 1)
    views = msgspec.to_builtins(records)
    recipe.write(index_path, views=views)


def border_weights(block: Block, points: np.ndarray, margin: float) -> np.ndarray:
    """Return the weights of places: 1 in the block, 0.5 at its border. (P, 3) -> (P,)

    Those of two blocks that touch sum up to 1.
    """
    if margin == 0:
        return np.ones(len(points))
    return np.clip(0.5 + 0.5 * block.box.depth_inside(points) / margin, 0, 1)


def _write_view(
    block: Block, margin: float, render: Renderer, camera: Camera, name: str
) -> ViewRecord | None:
    """Write the pixels of a view that show its block; None where there are none."""
    view = render(camera)
    view = replace(view, depth=torch.where(_counted(camera, view.depth), view.depth, 0.0))
    points = view.world_points(view.depth).cpu().numpy().astype(np.float64)
    depth = view.depth.cpu().numpy().reshape(-1).astype(np.float64)
    weights = border_weights(block, points, margin) * view.weight.cpu().numpy().reshape(-1)
    is_known = (depth > 0) & (weights > 0)
    if not is_known.any():
        return None
    inverse = 1 / depth[is_known]
    least = float(inverse.min())
    span = max(float(inverse.max()) - least, _LEAST_SPAN)
    most_weight = float(weights[is_known].max())
    steps = np.zeros(len(depth), np.uint16)
    # 0 stands for no depth.
    steps[is_known] = 1 + np.rint((inverse - least) / span * _STEPS).astype(np.uint16)
    shape = view.depth.shape
    colors = (view.color.cpu().numpy() * 255).round().astype(np.uint8)
    has_color = _widened(is_known.reshape(shape))
    arrays = {
        "inverse_depth": steps.reshape(shape),
        # Weights shrink with the square of the distance, whose unit is the capture's.
        "scales": np.array([least, span, most_weight]),
        "colors": np.where(has_color[:, :, None], colors, 0).astype(np.uint8),
        "weights": (np.where(is_known, weights, 0) / most_weight).reshape(shape).astype(np.float16),
        "size": np.array(camera.size),
        "intrinsics": np.array([camera.fx, camera.fy, camera.cx, camera.cy]),
        "rotation": camera.rotation,
        "translation": camera.translation,
    }
    with atomic_path(block.depths / name) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    known_points = points[is_known]
    return ViewRecord(
        file=name,
        low=corner_of(known_points.min(axis=0)),
        high=corner_of(known_points.max(axis=0)),
        pixel=float(np.median(depth[is_known]) / np.sqrt(camera.fx * camera.fy)),
    )


def _counted(camera: Camera, depth: Tensor) -> Tensor:
    """Return the pixels that count in the mask of a view; elsewhere it sees through the block."""
    if camera.mask is None:
        return torch.ones_like(depth, dtype=torch.bool)
    values = decode_mask(camera.mask, *camera.size)
    return torch.from_numpy(values >= COUNTS).to(depth.device)


def _widened(is_known: np.ndarray) -> np.ndarray:
    """Return the pixels within the squares whose variance is texture. (H, W) bool"""
    values = float32_tensor(is_known)[None, None]
    widened = functional.max_pool2d(values, TEXTURE_PATCH, stride=1, padding=TEXTURE_PATCH // 2)
    return widened[0, 0].numpy() > 0


def _read_index(folder: Path) -> _Index:
    path = folder / INDEX_FILE
    return conform(read_json(path), _Index, path, "remove it, and the depths are rendered again")
