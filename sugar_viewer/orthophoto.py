# SPDX-License-Identifier: Apache-2.0
"""Orthophotos and height models of results: pictures without perspective, at a scale.

Pictures are rendered in square tiles by cameras that are a thousand tiles away. What rises above
the middle of a result moves by a quarter of a pixel at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.color_bytes import color_bytes
from gaussian_splatting.core.moved import Z_UP_AXES
from gaussian_splatting.core.subsets import box_of_most
from gaussian_splatting.data.cameras import Camera, upright_axes
from gaussian_splatting.scenes.scene import Scene
from sugar_extractors.export.reading import Result
from sugar_maps.map_placement import MapPlacement
from sugar_maps.similarity import Similarity
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh
from sugar_scene.triangle_rasterizer import rasterize_triangles
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path
from sugar_viewer.geotiff import GeoPlace, load_tifffile, write_geotiff
from sugar_viewer.shown_models import ShownModel

DOWN = "down"
DIRECTIONS = (DOWN, "up", "x+", "x-", "y+", "y-")
# To the right, downwards and into the picture, in a world whose z is up.
_AXES = {
    DOWN: ((1, 0, 0), (0, -1, 0), (0, 0, -1)),
    "up": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "x+": ((0, -1, 0), (0, 0, -1), (1, 0, 0)),
    "x-": ((0, 1, 0), (0, 0, -1), (-1, 0, 0)),
    "y+": ((1, 0, 0), (0, 0, -1), (0, 1, 0)),
    "y-": ((-1, 0, 0), (0, 0, -1), (0, -1, 0)),
}
_TILE = 1_024  # pixels a side
_DISTANCE = 1_000.0  # of the cameras, in units of a tile or of the depth
_DEFAULT_SIDE = 2_000  # pixels of the longer side where their size is not given
_MAX_PIXELS = 400_000_000
_SPREAD = 0.005  # share of points on each side that do not count for the region of Gaussians
_MARGIN = 0.05  # around them, in units of the region
_MIN_POINTS = 100
_MIN_ALPHA = 1 / 255


class OrthoWorld(NamedTuple):
    """The world of an orthophoto, z up: of a map, or of a capture that stands upright."""

    similarity: Similarity  # from the world of the result to coordinates near zero
    offset: np.ndarray  # to add to these for coordinates of the map, (3,)
    epsg: int | None
    system: str  # the map in words; empty where there is none


def ortho_world(scene: Scene, place: MapPlacement | None) -> OrthoWorld:
    """Return the world of a map, or without one that of the upright capture, in its units."""
    if place is not None:
        return OrthoWorld(place.similarity, place.offset, place.epsg, place.system_name)
    rotation = Z_UP_AXES[:3, :3] @ upright_axes(scene.calibrated_cameras, scene.points)
    return OrthoWorld(Similarity(1.0, rotation, np.zeros(3)), np.zeros(3), None, "")


@dataclass(frozen=True)
class OrthoView:
    """A rectangle of pixels that is looked at from far away."""

    world: OrthoWorld
    axes: np.ndarray  # rows: to the right, downwards, into the picture, (3, 3)
    low: np.ndarray  # left, upper and nearest coordinate along these, near zero, (3,)
    depth: float  # of the region along the third axis
    pixel: float  # side of a pixel
    width: int  # pixels
    height: int

    def tiles(self) -> Iterator[tuple[slice, slice]]:
        """Yield rows and columns of the tiles."""
        for top in range(0, self.height, _TILE):
            for left in range(0, self.width, _TILE):
                rows = slice(top, min(top + _TILE, self.height))
                yield rows, slice(left, min(left + _TILE, self.width))

    def camera(self, rows: slice, columns: slice) -> tuple[Camera, float]:
        """Return the camera of a tile, and its coordinate along the third axis."""
        width = columns.stop - columns.start
        height = rows.stop - rows.start
        side = self.pixel * max(width, height)
        distance = _DISTANCE * max(side, self.depth)
        center = np.array(
            [
                self.low[0] + self.pixel * (columns.start + columns.stop) / 2,
                self.low[1] + self.pixel * (rows.start + rows.stop) / 2,
                self.low[2] + self.depth / 2 - distance,
            ]
        )
        similarity = self.world.similarity
        # Of the camera's axes and the result's unit.
        translation = (self.axes @ similarity.translation - center) / similarity.scale
        camera = Camera(
            name="ortho",
            width=width,
            height=height,
            fx=distance / self.pixel,
            fy=distance / self.pixel,
            cx=width / 2,
            cy=height / 2,
            rotation=self.axes @ similarity.rotation,
            translation=translation,
        )
        return camera, float(center[2])

    def shown(self, result: Result) -> Result:
        """Return the part of a result that is in the depth of the region; meshes are all in it."""
        if not isinstance(result, GaussianCloud):
            return result
        # Gaussians of the sky lie before and behind all others.
        means = self.world.similarity.moved(result.means.double().cpu().numpy())
        depths = means @ self.axes[2]
        is_inside = (depths >= self.low[2]) & (depths <= self.low[2] + self.depth)
        if not is_inside.any():
            raise UserError("--ortho: no Gaussians are where the points of the scene are")
        return result.select(torch.from_numpy(is_inside).to(result.means.device))

    @property
    def place(self) -> GeoPlace:
        """Where the picture lies."""
        offset = self.axes @ self.world.offset
        looks_down = np.array_equal(self.axes, np.array(_AXES[DOWN]))
        return GeoPlace(
            left=float(self.low[0] + offset[0]),
            top=float(-(self.low[1] + offset[1])),
            pixel=self.pixel,
            epsg=self.world.epsg,
            # Coordinates of a picture of a front are none of the map.
            system=self.world.system if looks_down else "",
        )

    @property
    def height_offset(self) -> float:
        """Offset from heights of the scene to heights of the map."""
        vertical = np.array([0.0, 0.0, self.world.offset[2]])
        return -float(self.axes[2] @ vertical)


def ortho_view(
    world: OrthoWorld, direction: str, pixel: float | None, result: Result, scene: Scene
) -> OrthoView:
    """Return the view of a result along a direction.

    Args:
        pixel: Side of a pixel in units of the world; None for 2,000 pixels along the longer side.

    Raises:
        UserError: It would have too many pixels.
    """
    axes = np.array(_AXES[direction], dtype=np.float64)
    points = world.similarity.moved(_points_of(result, scene)) @ axes.T
    low = points.min(axis=0)
    high = points.max(axis=0)
    if isinstance(result, GaussianCloud):
        low, high = _region_of_many(points)
    sides = high - low
    longer = float(max(sides[0], sides[1]))
    if not longer > 0:
        raise UserError("--ortho: the result has no extent in this direction; choose another one")
    if pixel is None:
        pixel = longer / _DEFAULT_SIDE
    if not longer / pixel < _MAX_PIXELS or sides[0] * sides[1] / pixel**2 > _MAX_PIXELS:
        least = max(math.sqrt(sides[0] * sides[1] / _MAX_PIXELS), longer / _MAX_PIXELS)
        raise UserError(
            f"--ortho_pixel {pixel:g}: makes more than {_MAX_PIXELS:,} pixels of "
            f"{sides[0]:.4g} x {sides[1]:.4g}; choose {least:.2g} or more"
        )
    # Pixels of two results of one map lie on each other.
    offset = (axes @ world.offset)[:2]
    low[:2] = np.floor((low[:2] + offset) / pixel) * pixel - offset
    counts = np.ceil((high[:2] - low[:2]) / pixel).astype(int)
    return OrthoView(
        world=world,
        axes=axes,
        low=low,
        depth=max(float(sides[2]), pixel),
        pixel=pixel,
        width=max(int(counts[0]), 1),
        height=max(int(counts[1]), 1),
    )


def _points_of(result: Result, scene: Scene) -> np.ndarray:
    """Return the points that say where a result is. (N, 3) float64"""
    if isinstance(result, TexturedMesh):
        return result.vertices.double().cpu().numpy()
    if isinstance(result, GaussianCloud):
        # Gaussians of the sky and of what is far away would make the region too large.
        if len(scene.points) >= _MIN_POINTS:
            return np.asarray(scene.points, np.float64)
        return result.means.double().cpu().numpy()
    return np.asarray(result.vertices, np.float64)


def _region_of_many(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the corners of the box that holds most points, (N, 3), with a margin."""
    low, high = box_of_most(points, _SPREAD)
    margin = _MARGIN * (high - low).max()
    return low - margin, high + margin


Heights = Callable[[slice, slice], np.ndarray]
"""Coordinates against the direction of view for rows and columns, NaN where there is nothing."""


def heights_of(view: OrthoView, result: Result, model: ShownModel, device: torch.device) -> Heights:
    """Return the function that finds heights of a result in a tile, (H, W) float64."""
    if isinstance(result, GaussianCloud):
        return partial(_blended_heights, view, model)
    vertices = torch.as_tensor(result.vertices).to(device)
    faces = torch.as_tensor(result.faces).to(device)
    return partial(_triangle_heights, view, vertices, faces)


def _blended_heights(view: OrthoView, model: ShownModel, rows: slice, columns: slice) -> np.ndarray:
    camera, place = view.camera(rows, columns)
    depths = model.geometry(camera)[0].double().cpu().numpy()
    heights = -place - depths * view.world.similarity.scale
    return np.where(np.isfinite(heights), heights, np.nan)


def _triangle_heights(
    view: OrthoView, vertices: Tensor, faces: Tensor, rows: slice, columns: slice
) -> np.ndarray:
    camera, _ = view.camera(rows, columns)
    hits = rasterize_triangles(vertices.float(), faces, camera)
    is_covered = hits.covered.cpu().numpy()
    face_rows = hits.face[hits.covered].long()
    corners = vertices[faces[face_rows]].double().cpu().numpy().reshape(-1, 3)
    moved = view.world.similarity.moved(corners) @ view.axes.T
    a, b, c = moved.reshape(-1, 3, 3).transpose(1, 0, 2)
    y, x = np.nonzero(is_covered)
    to_pixel = np.stack([columns.start + x + 0.5, rows.start + y + 0.5], axis=1) * view.pixel
    to_pixel += view.low[:2] - a[:, :2]
    normals = np.cross(b - a, c - a)
    along_plane = -(normals[:, :2] * to_pixel).sum(axis=1)
    is_edge_on = normals[:, 2] == 0
    depths = a[:, 2] + along_plane / np.where(is_edge_on, np.inf, normals[:, 2])
    # Planes of triangles that are seen nearly from the side go far beyond them.
    corner_depths = moved.reshape(-1, 3, 3)[..., 2]
    depths = np.clip(depths, corner_depths.min(axis=1), corner_depths.max(axis=1))
    heights = np.full(is_covered.shape, np.nan)
    heights[is_covered] = -depths
    return heights


def render_ortho(
    model: ShownModel, heights_in: Heights, view: OrthoView, console: Console
) -> tuple[np.ndarray, np.ndarray]:
    """Render colours with transparency, (H, W, 4) uint8, and heights, (H, W) float32.

    Heights are coordinates against the direction of view; NaN where there is nothing.
    """
    picture = np.zeros((view.height, view.width, 4), np.uint8)
    heights = np.full((view.height, view.width), np.nan, np.float32)
    tiles = list(view.tiles())
    with console.progress("orthophoto", 1, len(tiles)) as progress:
        for done, (rows, columns) in enumerate(tiles, start=1):
            camera, _ = view.camera(rows, columns)
            picture[rows, columns] = _transparent_picture(model, camera)
            heights[rows, columns] = heights_in(rows, columns) + view.height_offset
            progress.update(done)
    return picture, heights


def _transparent_picture(model: ShownModel, camera: Camera) -> np.ndarray:
    """Return colours that are not blended with a background, and opacity. (H, W, 4) uint8"""
    alpha = model.alpha(camera).clamp(0, 1)
    is_covered = alpha >= _MIN_ALPHA
    # The picture is blended over black.
    colors = model.picture(camera) / alpha.clamp_min(_MIN_ALPHA)[..., None]
    values = torch.cat([colors.clamp(0, 1), alpha[..., None]], dim=2)
    levels = color_bytes(values * is_covered[..., None])
    return levels.cpu().numpy()


def height_file(path: Path) -> Path:
    """Return the file of the heights beside an orthophoto."""
    return path.with_name(f"{path.stem}_height{path.suffix}")


def write_ortho(
    path: Path, model: ShownModel, heights_in: Heights, view: OrthoView, console: Console
) -> None:
    """Render an orthophoto and a height model and write them as GeoTIFF."""
    load_tifffile("--ortho")
    picture, heights = render_ortho(model, heights_in, view, console)
    with ExitStack() as stack:
        # They appear in reverse order, so that the orthophoto is the last.
        picture_path = stack.enter_context(atomic_path(path))
        height_path = stack.enter_context(atomic_path(height_file(path)))
        write_geotiff(picture_path, picture, view.place)
        write_geotiff(height_path, heights, view.place)
    covered = float((picture[..., 3] > 0).mean())
    console.info(
        f"orthophoto and heights, {view.width:,} x {view.height:,} pixels of {view.pixel:.4g}, "
        f"{covered:.0%} of them covered: {path}, {height_file(path).name}"
    )
