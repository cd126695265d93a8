# SPDX-License-Identifier: Apache-2.0
"""Surface of the demo scene: a knot of fluted rope that stands on a tiled disc, painted and lit.

Nothing on it depends on the view, so light, shadow and paint are baked into one texture. World
axes: z up, the disc in the plane z = 0; one unit is the longest side of the knot.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample, interpolate, normalize, pad

from gaussian_splatting.data.cameras import Camera, pixel_rays
from gaussian_splatting.engine.reporting.evaluation import to_uint8
from sugar_extractors.mesh_quality import Surface
from sugar_extractors.texture.textured_mesh_io import TexturedMesh, render_textured
from sugar_scene.triangle_mesh import TriangleMesh, with_vertex_normals
from sugar_utils.random import generator

# cells of the knot's surface along the rope and around it
N_ALONG = 400
N_AROUND = 40
DISC_RADIUS = 1.15
_DISC_CORNERS = 256
_DISC_CELLS = 96
_SINK = 0.006  # depth by which the knot is set into the disc, to rest on areas and not on points
# strands passed on the way along: a multiple, so that the paint closes
STRANDS = 4
TWISTS = 16
_WIDTH = 2.4
_DEPTH = 1.5
# before scaling, when parts are 0.4 and more apart
_ROPE_RADIUS = 0.66
_FLUTE_DEPTH = 0.09
# at detail 1, for pictures of 320 x 240
_TEXELS_KNOT = (2048, 352)
_TEXELS_DISC = (896, 896)
_SAMPLES_PER_SIDE = 3
_N_FILL_RAYS = 96
_OFFSET = 0.002  # of rays from the surface that they start on
Noise = Callable[[Tensor], Tensor]


def _rgb(*values: float) -> Tensor:
    return torch.tensor(values, device="cpu")


_BACKGROUND_LOW = _rgb(0.012, 0.014, 0.019)
_BACKGROUND_HIGH = _rgb(0.10, 0.12, 0.155)
_KEY = normalize(_rgb(0.45, -0.62, 0.85), dim=0)
_KEY_COLOR = _rgb(0.98, 0.92, 0.82)
_FILL_COLOR = _rgb(0.40, 0.43, 0.49)
_CREAM = _rgb(0.86, 0.76, 0.58)
_RED = _rgb(0.72, 0.17, 0.07)
_TEAL = _rgb(0.03, 0.30, 0.34)
_OCHRE = _rgb(0.85, 0.47, 0.09)
_SAND = _rgb(0.50, 0.46, 0.40)
_BROWN = _rgb(0.47, 0.37, 0.28)
_GROUT = _rgb(0.17, 0.155, 0.14)


def rope_knot(s: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Points of a fluted tube around a trefoil knot, in its own units. (...) -> (..., 3)

    The centre line is (sin t + a sin 2t, -b sin 3t, a cos 2t - cos t), a knot that stands on two
    of its three lobes. Its Frenet frame sweeps the tube.

    Args:
        s: Position along the rope, period 1.
        w: Position around it, period 1.
    """
    t = 2 * np.pi * s
    u = 2 * np.pi * w
    center, d1, d2 = (_center_line(t, order) for order in range(3))
    tangent = _unit(d1)
    binormal = _unit(np.cross(d1, d2))
    outward = np.cos(u)[..., None] * np.cross(binormal, tangent) + np.sin(u)[..., None] * binormal
    radius = _ROPE_RADIUS * (1 - _FLUTE_DEPTH * np.cos(STRANDS * u + TWISTS * t))
    return center + radius[..., None] * outward


def _center_line(t: np.ndarray, order: int) -> np.ndarray:
    """Derivative of the centre line; each one shifts the phase by a quarter turn."""
    sin1, sin2, sin3 = (k**order * np.sin(k * t + order * np.pi / 2) for k in (1, 2, 3))
    cos1, cos2 = (k**order * np.cos(k * t + order * np.pi / 2) for k in (1, 2))
    return np.stack([sin1 + _WIDTH * sin2, -_DEPTH * sin3, _WIDTH * cos2 - cos1], axis=-1)


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def make_knot() -> TriangleMesh:
    """The knot, scaled to longest side 1 and standing on the disc; two triangles per cell."""
    i, j = np.indices((N_ALONG, N_AROUND))
    points = rope_knot(i / N_ALONG, j / N_AROUND).reshape(-1, 3)
    low = points.min(axis=0)
    high = points.max(axis=0)
    origin = np.array([(low[0] + high[0]) / 2, (low[1] + high[1]) / 2, low[2]])
    points = (points - origin) / (high - low).max() - [0.0, 0.0, _SINK]
    a, b, c, d = (
        (i + di) % N_ALONG * N_AROUND + (j + dj) % N_AROUND
        for di, dj in ((0, 0), (0, 1), (1, 1), (1, 0))
    )
    return _grey(points, np.stack([a, b, c, a, c, d], axis=-1).reshape(-1, 3))


def make_disc() -> TriangleMesh:
    """The disc, its middle first, as a fan of triangles."""
    corner = np.arange(_DISC_CORNERS)
    angles = 2 * np.pi * corner / _DISC_CORNERS
    rim = DISC_RADIUS * np.stack([np.cos(angles), np.sin(angles), 0 * angles], axis=1)
    faces = np.stack([0 * corner, corner + 1, (corner + 1) % _DISC_CORNERS + 1], axis=1)
    return _grey(np.concatenate([np.zeros((1, 3)), rim]), faces)


def _grey(points: np.ndarray, faces: np.ndarray) -> TriangleMesh:
    return with_vertex_normals(TriangleMesh(points, faces, np.full(points.shape, 128, np.uint8)))


def textured_surface(
    knot: TriangleMesh, disc: TriangleMesh, seed: int, detail: float
) -> TexturedMesh:
    """Both meshes with their paint; the charts of knot and disc lie side by side."""
    surface = Surface(knot.vertices, knot.faces)
    noise = make_noise(seed)
    grids = [
        np.pad(values.reshape(N_ALONG, N_AROUND, 3), ((0, 1), (0, 1), (0, 0)), mode="wrap")
        for values in (knot.vertices, knot.normals)
    ]
    side = np.linspace(-DISC_RADIUS, DISC_RADIUS, _DISC_CELLS + 1)
    flat = np.stack([*np.meshgrid(side, side, indexing="ij"), np.zeros((len(side),) * 2)], axis=-1)
    up = np.broadcast_to([0.0, 0.0, 1.0], flat.shape)
    parts = [
        _bake(surface, noise, *grids, _TEXELS_KNOT, detail, knot_paint),
        _bake(surface, noise, flat, up, _TEXELS_DISC, detail, disc_paint),
    ]
    (rows, columns), (disc_rows, disc_columns) = (part.shape[:2] for part in parts)
    texture = torch.zeros(max(rows, disc_rows), columns + disc_columns, 3, device="cpu")
    texture[:rows, :columns], texture[:disc_rows, columns:] = parts

    i, j = np.indices((N_ALONG, N_AROUND)).reshape(2, -1, 1)
    corners = np.array([[0, 0], [0, 1], [1, 1], [0, 0], [1, 1], [1, 0]])
    places = [
        np.stack([(i + corners[:, 0]) / N_ALONG, (j + corners[:, 1]) / N_AROUND], axis=-1),
        0.5 + 0.5 * disc.vertices[disc.faces][..., :2] / DISC_RADIUS,
    ]
    uvs = []
    for place, part, first in zip(places, parts, (0, columns), strict=True):
        # Borders of a chart are middles of texels, so that no chart shows in the other.
        row, column = np.moveaxis(place.reshape(-1, 3, 2) * (np.array(part.shape[:2]) - 1), -1, 0)
        u = (first + 0.5 + column) / texture.shape[1]
        uvs.append(np.stack([u, 1 - (row + 0.5) / texture.shape[0]], axis=-1))
    return TexturedMesh(
        torch.from_numpy(np.concatenate([knot.vertices, disc.vertices]).astype(np.float32)),
        torch.from_numpy(np.concatenate([knot.faces, disc.faces + knot.n_vertices])),
        torch.from_numpy(np.concatenate(uvs).astype(np.float32)),
        to_uint8(_encoded(texture)),
    )


def _bake(
    surface: Surface,
    noise: Noise,
    points: np.ndarray,
    normals: np.ndarray,
    size: tuple[int, int],
    detail: float,
    paint: Callable[[Noise, Tensor, Tensor], Tensor],
) -> Tensor:
    """Light and paint of a chart whose vertices form a grid, (A, B, 3). Linear RGB, (H, W, 3)"""
    height, width = (max(8, round(detail * side)) for side in size)
    grid = torch.from_numpy(np.concatenate([points, normals], axis=-1).astype(np.float32))
    fill = _fill_light(surface, *grid.reshape(-1, 6).split(3, dim=1)).view(*grid.shape[:2], 1)
    layers = torch.cat([grid, fill], dim=-1).permute(2, 0, 1)[None]
    layers = interpolate(layers, (height, width), mode="bilinear", align_corners=True)
    p, n, fill = layers[0].permute(1, 2, 0).reshape(-1, 7).split([3, 3, 1], dim=1)
    n = normalize(n, dim=1)
    shadow = surface.blocked(p + _OFFSET * n, (2 * _KEY).expand_as(p))
    key = (n @ _KEY).clamp_min(0) * ~shadow
    rows = torch.linspace(0, 1, height, device="cpu")[:, None].expand(-1, width)
    columns = torch.linspace(0, 1, width, device="cpu").expand(height, -1)
    places = torch.stack([rows, columns], dim=-1).reshape(-1, 2)
    light = fill * _FILL_COLOR + key[:, None] * _KEY_COLOR
    return (light * paint(noise, p, places)).view(height, width, 3)


def _fill_light(surface: Surface, points: Tensor, normals: Tensor) -> Tensor:
    """Share of the light of sky and disc that reaches points past the knot. (N, 3) -> (N,)"""
    starts = points + _OFFSET * normals
    total = 0.0
    weight = 0.0
    for k in range(_N_FILL_RAYS):
        z = 1 - (2 * k + 1) / _N_FILL_RAYS
        turn = k * math.pi * (3 - math.sqrt(5))
        r = math.sqrt(1 - z * z)
        direction = _rgb(r * math.cos(turn), r * math.sin(turn), z)
        cosine = (normals @ direction).clamp_min(0)
        light = 0.75 + 0.25 * z if z >= 0 else 0.3
        blocked = surface.blocked(starts, direction.expand_as(starts))
        total += cosine * torch.where(blocked, 0.12, light)
        weight += cosine
    return total / weight


def make_noise(seed: int) -> Noise:
    """Smooth random values of points, about -1 to 1, by interpolation between those of a grid."""
    source = generator(seed, "demo", "noise")
    values = 2 * torch.rand(1, 1, 32, 32, 32, generator=source, device="cpu") - 1
    values = pad(values, (0, 1) * 3, mode="circular")

    def noise(points: Tensor) -> Tensor:
        cell = points.floor()
        share = points - cell
        at = (cell + share * share * (3 - 2 * share)) % 32 / 16 - 1
        return grid_sample(values, at.view(1, 1, 1, -1, 3), align_corners=True).view(-1, 1)

    return noise


def _fractal(noise: Noise, p: Tensor) -> Tensor:
    octaves = ((1.0, 1.0), (2.3, 0.6), (5.3, 0.4), (12.1, 0.3))
    return sum(0.7 * share * noise(scale * p) for scale, share in octaves)


def _step(edge: float, width: float, x: Tensor) -> Tensor:
    """Smooth step from 0 to 1 around an edge."""
    t = ((x - edge + width) / (2 * width)).clamp(0, 1)
    return t * t * (3 - 2 * t)


def knot_paint(noise: Noise, p: Tensor, places: Tensor) -> Tensor:
    """Colour of the rope: four strands, each with a pattern of its own, under solid noise."""
    s = places[:, :1]
    w = places[:, 1:]
    across = STRANDS * w + TWISTS * s + 0.5
    # within a strand, and one repeat of the pattern
    x = across % 1 - 0.5
    y = 72 * s % 1 - 0.5
    edge = x.abs()
    patterns = [
        torch.lerp(_RED, _CREAM, _step(0.34, 0.03, torch.hypot(2.6 * x, y))),
        torch.lerp(_TEAL, _CREAM, 0.8 * (1 - _step(0.05, 0.02, (edge - 0.2).abs()))),
        torch.lerp(_CREAM, _OCHRE, _step(0.5, 0.04, 2 * y.abs())),
        torch.lerp(_RED, _TEAL, _step(0.52, 0.04, 1.2 * edge + y.abs())),
    ]
    strand = across.floor().long() % STRANDS
    color = torch.stack(patterns, dim=1).take_along_dim(strand[..., None], dim=1)[:, 0]
    color = color * (1 - 0.75 * _step(0.44, 0.03, edge)) * (1 + 0.28 * _fractal(noise, 7 * p))
    return color * (1 - 0.75 * _step(0.78, 0.06, noise(46 * p)))


def disc_paint(noise: Noise, p: Tensor, places: Tensor) -> Tensor:
    """Colour of the disc: tiles of random shade inside a painted rim."""
    x = (0.94 * p[:, :1] + 0.342 * p[:, 1:2]) / 0.17
    y = (0.94 * p[:, 1:2] - 0.342 * p[:, :1]) / 0.17
    tile = 0.5 + torch.cat([x.floor(), y.floor(), torch.zeros_like(x)], dim=1)
    # Shades of a tile are smooth noise at a place of its own.
    tone, tint, teal = ((0.5 + noise(7.3 * tile + k)).clamp(0, 1) for k in (3, 11, 19))
    color = torch.lerp(_SAND, _BROWN, tint)
    color = torch.where(teal < 0.2, torch.lerp(_SAND, _TEAL, 0.6), color) * (0.62 + 0.55 * tone)
    gap = torch.maximum((x % 1 - 0.5).abs(), (y % 1 - 0.5).abs())
    color = torch.lerp(color, _GROUT, _step(0.475, 0.012, gap))
    radius = p[:, :2].norm(dim=1, keepdim=True)
    turns = torch.atan2(p[:, 1:2], p[:, :1]) * 24 / math.pi
    rim = torch.lerp(_CREAM, _RED, _step(0.5, 0.03, (2 * (turns % 1) - 1).abs()))
    line = 1 - _step(0.01, 0.004, (radius - 0.93 * DISC_RADIUS).abs())
    rim = 0.8 * torch.lerp(rim, _GROUT, line)
    color = torch.lerp(color, rim, _step(0.93 * DISC_RADIUS, 0.004, radius))
    color = color * (1 + 0.22 * _fractal(noise, 5 * p))
    return color * (1 - 0.5 * _step(0.76, 0.06, noise(55 * p)))


def _encoded(linear: Tensor) -> Tensor:
    curved = 1.055 * linear.clamp_min(0.0031308) ** (1 / 2.4) - 0.055
    return torch.where(linear > 0.0031308, curved, 12.92 * linear).clamp(0, 1)


def picture(mesh: TexturedMesh, camera: Camera) -> np.ndarray:
    """What a camera sees of the scene, as sRGB. (H, W, 3) uint8"""
    n = _SAMPLES_PER_SIDE
    fine = camera.resized(n * camera.width, n * camera.height)
    rays = normalize(pixel_rays(fine, dtype=torch.float64, device="cpu"), dim=-1)
    height = (rays @ torch.from_numpy(camera.rotation[:, 2].copy()))[..., None].float()
    behind = torch.lerp(_BACKGROUND_LOW, _BACKGROUND_HIGH, _step(-0.05, 0.5, height))
    return to_uint8(render_textured(mesh, camera, _encoded(behind), supersampling=n)).numpy()


def visible(knot: TriangleMesh, points: np.ndarray, normals: np.ndarray, eyes: np.ndarray):
    """Which surface points, (P, 3), face which camera centres, (V, 3), uncovered. (V, P) bool"""
    surface = Surface(knot.vertices, knot.faces)
    starts = points + 1e-3 * normals
    seen = np.empty((len(eyes), len(points)), dtype=bool)
    for view, eye in enumerate(eyes):
        facing = ((eye - points) * normals).sum(axis=1) > 0.1 * np.linalg.norm(eye - points, axis=1)
        covered = surface.blocked(*(torch.from_numpy(v).float() for v in (starts, eye - starts)))
        seen[view] = facing & (points[:, 2] > -1e-6) & ~covered.numpy()
    return seen
