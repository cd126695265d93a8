# SPDX-License-Identifier: Apache-2.0
"""Texture and images of the demo scene.

Nothing on its surface depends on the view, so light, shadow and paint are baked into one texture.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate, normalize

from gaussian_splatting.data.cameras import Camera, pixel_rays
from gaussian_splatting.engine.reporting.evaluation import to_uint8
from sugar_pipeline.demo.demo_paint import (
    Noise,
    disc_paint,
    knot_paint,
    make_noise,
    rgb,
    smooth_step,
)
from sugar_pipeline.demo.demo_surface import DISC_RADIUS, GOLDEN_ANGLE, N_ALONG, N_AROUND
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh, render_textured
from sugar_scene.surface_queries import Surface
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_utils.device import float32_tensor

_DISC_CELLS = 96
# at detail 1, for pictures of 320 x 240
_TEXELS_KNOT = (2048, 352)
_TEXELS_DISC = (896, 896)
_MIN_TEXELS = 8  # of a side of a chart
_SAMPLES_PER_SIDE = 3  # of a pixel
_N_FILL_RAYS = 96
_GROUND_LIGHT = 0.3  # of fill light from below
_KNOT_LIGHT = 0.12  # of fill light from directions in which the knot is
_RAY_OFFSET = 0.002  # of rays from the surface that they start on

_BACKGROUND_LOW = rgb(0.012, 0.014, 0.019)
_BACKGROUND_HIGH = rgb(0.10, 0.12, 0.155)
_KEY_DIRECTION = normalize(rgb(0.45, -0.62, 0.85), dim=0)
_KEY_COLOR = rgb(0.98, 0.92, 0.82)
_FILL_COLOR = rgb(0.40, 0.43, 0.49)


@dataclass(frozen=True)
class Chart:
    """A part of the surface that becomes one rectangle of the texture."""

    points: np.ndarray  # vertices of a grid over the part, (A, B, 3)
    normals: np.ndarray  # of the vertices, (A, B, 3)
    corners: np.ndarray  # of the faces in this grid, each axis from 0 to 1, (F, 3, 2)
    texels: tuple[int, int]  # height and width of the rectangle
    paint: Callable[[Noise, Tensor, Tensor], Tensor]


def textured_surface(
    knot: TriangleMesh, knot_chart: Chart, disc: TriangleMesh, seed: int, detail: float
) -> TexturedMesh:
    """Join both meshes and bake their texture; the charts of knot and disc lie side by side.

    Args:
        knot: Of :func:`~sugar_pipeline.demo.demo_surface.make_knot`, or another object on the disc.
        knot_chart: All of its surface, such as :func:`knot_chart`.
        disc: Of :func:`~sugar_pipeline.demo.demo_surface.make_disc`.
        seed: Of the noise in the paint.
        detail: Factor on the number of texels per side; 1 is for images of 320 x 240.
    """
    surface = Surface(knot.vertices, knot.faces)
    noise = make_noise(seed)
    disc_chart = _disc_chart(disc, detail)
    knot_texels = _bake(surface, noise, knot_chart)
    disc_texels = _bake(surface, noise, disc_chart)

    knot_rows, knot_columns = knot_chart.texels
    disc_rows, disc_columns = disc_chart.texels
    height = max(knot_rows, disc_rows)
    width = knot_columns + disc_columns
    texture = torch.zeros(height, width, 3, device="cpu")
    texture[:knot_rows, :knot_columns] = knot_texels
    texture[:disc_rows, knot_columns:] = disc_texels
    knot_uvs = _texture_coordinates(knot_chart, 0, height, width)
    disc_uvs = _texture_coordinates(disc_chart, knot_columns, height, width)

    vertices = np.concatenate([knot.vertices, disc.vertices])
    faces = np.concatenate([knot.faces, disc.faces + knot.n_vertices])
    uvs = np.concatenate([knot_uvs, disc_uvs])
    return TexturedMesh(
        vertices=float32_tensor(vertices),
        faces=torch.from_numpy(faces),
        uvs=float32_tensor(uvs),
        texture=to_uint8(_to_srgb(texture)),
    )


def knot_chart(knot: TriangleMesh, detail: float) -> Chart:
    """The chart of the knot; ``detail`` as of :func:`textured_surface`."""
    return closed_grid_chart(knot, (N_ALONG, N_AROUND), _scaled_size(_TEXELS_KNOT, detail))


def closed_grid_chart(
    mesh: TriangleMesh, n_cells: tuple[int, int], texels: tuple[int, int]
) -> Chart:
    """The chart of a mesh of :func:`~sugar_pipeline.demo.demo_surface.closed_grid_mesh`."""
    n_along, n_around = n_cells
    along, around = np.indices(n_cells).reshape(2, -1, 1)
    cell_corners = np.array([[0, 0], [0, 1], [1, 1], [0, 0], [1, 1], [1, 0]])
    s = (along + cell_corners[:, 0]) / n_along
    w = (around + cell_corners[:, 1]) / n_around
    return Chart(
        points=_closed_grid(mesh.vertices, n_cells),
        normals=_closed_grid(mesh.normals, n_cells),
        corners=np.stack([s, w], axis=-1).reshape(-1, 3, 2),
        texels=texels,
        paint=knot_paint,
    )


def _closed_grid(values: np.ndarray | None, n_cells: tuple[int, int]) -> np.ndarray:
    """Arrange values of vertices in a grid that repeats its first row and column."""
    assert values is not None
    grid = values.reshape(*n_cells, 3)
    return np.pad(grid, ((0, 1), (0, 1), (0, 0)), mode="wrap")


def _disc_chart(disc: TriangleMesh, detail: float) -> Chart:
    side = np.linspace(-DISC_RADIUS, DISC_RADIUS, _DISC_CELLS + 1)
    x, y = np.meshgrid(side, side, indexing="ij")
    points = np.stack([x, y, np.zeros_like(x)], axis=-1)
    corner_positions = disc.vertices[disc.faces][..., :2]
    corners = 0.5 + 0.5 * corner_positions / DISC_RADIUS
    return Chart(
        points=points,
        normals=np.broadcast_to([0.0, 0.0, 1.0], points.shape),
        corners=corners,
        texels=_scaled_size(_TEXELS_DISC, detail),
        paint=disc_paint,
    )


def _scaled_size(texels: tuple[int, int], detail: float) -> tuple[int, int]:
    height, width = (max(_MIN_TEXELS, round(detail * count)) for count in texels)
    return height, width


def _texture_coordinates(
    chart: Chart, first_column: int, texture_height: int, texture_width: int
) -> np.ndarray:
    """Texture coordinates of the corners of a chart's faces. (F, 3, 2)"""
    # Borders of a chart are middles of texels, so that no chart shows in the other.
    last_texel = np.array(chart.texels) - 1
    positions = chart.corners * last_texel
    u = (first_column + 0.5 + positions[..., 1]) / texture_width
    v = 1 - (positions[..., 0] + 0.5) / texture_height
    return np.stack([u, v], axis=-1)


def _bake(surface: Surface, noise: Noise, chart: Chart) -> Tensor:
    """Multiply light and paint at every texel of a chart. Linear RGB, (H, W, 3)"""
    height, width = chart.texels
    grid = np.concatenate([chart.points, chart.normals], axis=-1)
    grid_values = float32_tensor(grid)
    grid_points, grid_normals = grid_values.reshape(-1, 6).split(3, dim=1)
    grid_fill = _fill_light(surface, grid_points, grid_normals)
    n_rows, n_columns = grid_values.shape[:2]
    layers = torch.cat([grid_values, grid_fill.view(n_rows, n_columns, 1)], dim=-1)
    layers = layers.permute(2, 0, 1)[None]
    layers = interpolate(layers, (height, width), mode="bilinear", align_corners=True)

    texel_values = layers[0].permute(1, 2, 0).reshape(-1, 7)
    points, normals, fill = texel_values.split([3, 3, 1], dim=1)
    normals = normalize(normals, dim=1)
    key_rays = (2 * _KEY_DIRECTION).expand_as(points)
    shadow = surface.blocked(points + _RAY_OFFSET * normals, key_rays)
    key = (normals @ _KEY_DIRECTION).clamp_min(0) * ~shadow
    light = fill * _FILL_COLOR + key[:, None] * _KEY_COLOR

    rows = torch.linspace(0, 1, height, device="cpu")[:, None].expand(-1, width)
    columns = torch.linspace(0, 1, width, device="cpu").expand(height, -1)
    positions = torch.stack([rows, columns], dim=-1).reshape(-1, 2)
    color = light * chart.paint(noise, points, positions)
    return color.view(height, width, 3)


def _fill_light(surface: Surface, points: Tensor, normals: Tensor) -> Tensor:
    """Share of the light of sky and disc that reaches points past the knot. (N, 3) -> (N,)"""
    starts = points + _RAY_OFFSET * normals
    total = torch.zeros(len(points), device="cpu")
    weight = torch.zeros(len(points), device="cpu")
    for k in range(_N_FILL_RAYS):
        z = 1 - (2 * k + 1) / _N_FILL_RAYS
        angle = k * GOLDEN_ANGLE
        r = math.sqrt(1 - z * z)
        direction = rgb(r * math.cos(angle), r * math.sin(angle), z)
        cosine = (normals @ direction).clamp_min(0)
        light = 0.75 + 0.25 * z if z >= 0 else _GROUND_LIGHT
        blocked = surface.blocked(starts, direction.expand_as(starts))
        total += cosine * torch.where(blocked, _KNOT_LIGHT, light)
        weight += cosine
    return total / weight


def _to_srgb(linear: Tensor) -> Tensor:
    curved = 1.055 * linear.clamp_min(0.0031308) ** (1 / 2.4) - 0.055
    return torch.where(linear > 0.0031308, curved, 12.92 * linear).clamp(0, 1)


def picture(mesh: TexturedMesh, camera: Camera) -> np.ndarray:
    """Render the scene from a camera, as sRGB. (H, W, 3) uint8"""
    n = _SAMPLES_PER_SIDE
    sample_camera = camera.resized(n * camera.width, n * camera.height)
    rays = normalize(pixel_rays(sample_camera, dtype=torch.float64, device="cpu"), dim=-1)
    up = torch.from_numpy(camera.rotation[:, 2].copy())
    height = (rays @ up)[..., None].float()
    sky_share = smooth_step(-0.05, 0.5, height)
    background = torch.lerp(_BACKGROUND_LOW, _BACKGROUND_HIGH, sky_share)
    image = render_textured(mesh, camera, _to_srgb(background), supersampling=n)
    return to_uint8(image).numpy()
