# SPDX-License-Identifier: Apache-2.0
"""Pictures of the demo scene's knot of fluted rope: paint, light and shadow, by ray casting.

Nothing in the scene depends on the view, so light, shadow and paint are computed once per texel
("baked") and a picture then takes one ray and one look-up per sample.

The triangles of :class:`DemoGeometry` are what the pictures of ``ray_tracer`` show. World axes:
z up, the disc in the plane z = 0; one unit is the longest side of the knot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import warp as wp
from torch import Tensor

from sugar_utils.warp_launch import as_array, launch, on_stream_of

N_ALONG, N_AROUND = 400, 40
"""Cells of the knot's surface along the rope and around it; two triangles each."""

DISC_RADIUS = 1.15
_DISC_CORNERS = 256
_SINK = 0.006
"""Depth by which the knot is set into the disc, so that it rests on areas and not on points."""

STRANDS, TWISTS = 4, 16
"""Strands of the rope and strands passed on the way along it; a multiple, so that paint closes."""

_WIDTH, _DEPTH = 2.4, 1.5
_ROPE_RADIUS, _FLUTE_DEPTH = 0.66, 0.09
"""Of the knot before it is scaled. Its parts come no closer to each other than 0.4."""


@dataclass(frozen=True)
class DemoGeometry:
    """Triangles of the demo scene, outward normals, float64 world units."""

    points: np.ndarray  # vertices of the knot, row by row along the rope, (N_ALONG * N_AROUND, 3)
    normals: np.ndarray
    faces: np.ndarray  # triangles, counter-clockwise from outside, (F, 3) int32
    disc_points: np.ndarray  # vertices of the disc, the centre first, (D, 3)
    disc_faces: np.ndarray  # its triangles, counter-clockwise from above. int32


def make_geometry() -> DemoGeometry:
    """Build the knot, scaled to longest side 1 and standing on the disc."""
    along = np.arange(N_ALONG) / N_ALONG
    around = np.arange(N_AROUND) / N_AROUND
    points, normals = rope_knot(*np.meshgrid(along, around, indexing="ij"))
    points, normals = points.reshape(-1, 3), normals.reshape(-1, 3)
    low, high = points.min(axis=0), points.max(axis=0)
    origin = np.array([(low[0] + high[0]) / 2, (low[1] + high[1]) / 2, low[2]])
    points = (points - origin) / (high - low).max() - [0.0, 0.0, _SINK]
    angles = 2 * np.pi * np.arange(_DISC_CORNERS) / _DISC_CORNERS
    rim = DISC_RADIUS * np.stack([np.cos(angles), np.sin(angles), 0 * angles], axis=1)
    corner = np.arange(_DISC_CORNERS)
    fan = np.stack([0 * corner, corner + 1, (corner + 1) % _DISC_CORNERS + 1], axis=1)
    return DemoGeometry(
        points, normals, _grid_faces(), np.concatenate([np.zeros((1, 3)), rim]), fan.astype("i4")
    )


def rope_knot(s: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Points and outward unit normals of a fluted tube around a trefoil knot, in its own units.

    The centre line is (sin t + a sin 2t, -b sin 3t, a cos 2t - cos t), a knot that stands on two
    of its three lobes. Its Frenet frame sweeps the tube; all derivatives are exact.

    Args:
        s: Position along the rope, period 1. Any shape.
        w: Position around it, period 1. Same shape.

    Returns:
        Points and normals, each of the given shape with a last axis of 3.
    """
    t = 2 * np.pi * s
    d1, d2, d3 = (_center_line(t, order) for order in (1, 2, 3))
    tangent, tangent_dt = _unit(d1, d2)
    binormal, binormal_dt = _unit(np.cross(d1, d2), np.cross(d1, d3))
    normal = np.cross(binormal, tangent)
    normal_dt = np.cross(binormal_dt, tangent) + np.cross(binormal, tangent_dt)

    u = 2 * np.pi * w
    phase = STRANDS * u + TWISTS * t
    radius = _ROPE_RADIUS * (1 - _FLUTE_DEPTH * np.cos(phase))[..., None]
    slope = _ROPE_RADIUS * _FLUTE_DEPTH * np.sin(phase)[..., None]
    cos, sin = np.cos(u)[..., None], np.sin(u)[..., None]
    outward = cos * normal + sin * binormal
    points = _center_line(t, 0) + radius * outward
    dt = d1 + radius * (cos * normal_dt + sin * binormal_dt) + TWISTS * slope * outward
    du = radius * (cos * binormal - sin * normal) + STRANDS * slope * outward
    cross = np.cross(du, dt)
    return points, cross / np.linalg.norm(cross, axis=-1, keepdims=True)


def _center_line(t: np.ndarray, order: int) -> np.ndarray:
    """Derivative of the centre line; each one shifts the phase by a quarter turn."""
    quarter = order * np.pi / 2

    def sin(k: int) -> np.ndarray:
        return float(k**order) * np.sin(k * t + quarter)

    def cos(k: int) -> np.ndarray:
        return float(k**order) * np.cos(k * t + quarter)

    x, z = sin(1) + _WIDTH * sin(2), _WIDTH * cos(2) - cos(1)
    return np.stack([x, -_DEPTH * sin(3), z], axis=-1)


def _unit(v: np.ndarray, v_dt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A vector field scaled to unit length, and the derivative of the result."""
    length = np.linalg.norm(v, axis=-1, keepdims=True)
    unit, unit_dt = v / length, v_dt / length
    return unit, unit_dt - unit * (unit * unit_dt).sum(axis=-1, keepdims=True)


def _grid_faces() -> np.ndarray:
    """Two triangles per cell, closed both ways round; the kernels rely on their order. (F, 3)"""
    i, j = np.meshgrid(np.arange(N_ALONG), np.arange(N_AROUND), indexing="ij")

    def vertex(di: int, dj: int) -> np.ndarray:
        return (i + di) % N_ALONG * N_AROUND + (j + dj) % N_AROUND

    a, b, c, d = vertex(0, 0), vertex(0, 1), vertex(1, 1), vertex(1, 0)
    return np.stack([a, b, c, a, c, d], axis=-1).reshape(-1, 3).astype(np.int32)


wp.set_module_options({"enable_backward": False})

_TEXELS_KNOT, _TEXELS_DISC = (2048, 352), (896, 896)
"""Texels of the two charts at detail 1, which suits pictures of 320 x 240 pixels."""

_DISC_CELLS = 96

_BACKGROUND_LOW = wp.constant(wp.vec3(0.012, 0.014, 0.019))
_BACKGROUND_HIGH = wp.constant(wp.vec3(0.10, 0.12, 0.155))
_KEY = wp.constant(wp.normalize(wp.vec3(0.45, -0.62, 0.85)))
_KEY_COLOR = wp.constant(wp.vec3(0.98, 0.92, 0.82))
_FILL_COLOR = wp.constant(wp.vec3(0.40, 0.43, 0.49))
_CREAM = wp.constant(wp.vec3(0.86, 0.76, 0.58))
_RED = wp.constant(wp.vec3(0.72, 0.17, 0.07))
_TEAL = wp.constant(wp.vec3(0.03, 0.30, 0.34))
_OCHRE = wp.constant(wp.vec3(0.85, 0.47, 0.09))
_SAND = wp.constant(wp.vec3(0.50, 0.46, 0.40))
_GROUT = wp.constant(wp.vec3(0.17, 0.155, 0.14))
_OFFSET = wp.constant(0.002)
_N_FILL_RAYS = wp.constant(96)


@wp.func
def smooth_step(edge: float, width: float, x: float) -> float:
    return wp.smoothstep(edge - width, edge + width, x)


@wp.func
def fractal(seed: int, p: wp.vec3) -> float:
    """Four octaves of gradient noise, about -1 to 1."""
    state = wp.rand_init(seed)
    return (
        wp.noise(state, p)
        + 0.6 * wp.noise(state, 2.3 * p)
        + 0.4 * wp.noise(state, 5.3 * p)
        + 0.3 * wp.noise(state, 12.1 * p)
    )


@wp.func
def knot_paint(seed: int, p: wp.vec3, s: float, w: float) -> wp.vec3:
    """Colour of the rope: four strands, each with a pattern of its own, under solid noise."""
    across = float(STRANDS) * w + float(TWISTS) * s
    strand = wp.floor(across + 0.5)
    x = across + 0.5 - strand  # 0 to 1 across the strand; the flutes are at both ends
    kind = int(strand) % STRANDS
    y = s * 72.0
    y = y - wp.floor(y)  # 0 to 1 along one repeat of the pattern
    color = _CREAM
    edge = wp.abs(x - 0.5)
    if kind == 0:
        spot = wp.length(wp.vec2((x - 0.5) * 2.6, (y - 0.5) * 1.0))
        color = wp.lerp(_RED, _CREAM, smooth_step(0.34, 0.03, spot))
    elif kind == 1:
        color = wp.lerp(_TEAL, _CREAM, 0.8 * (1.0 - smooth_step(0.05, 0.02, wp.abs(edge - 0.2))))
    elif kind == 2:
        color = wp.lerp(_CREAM, _OCHRE, smooth_step(0.5, 0.04, wp.abs(2.0 * y - 1.0)))
    else:
        zigzag = wp.abs(x - 0.5) * 1.2 + wp.abs(y - 0.5)
        color = wp.lerp(_RED, _TEAL, smooth_step(0.52, 0.04, zigzag))
    color = color * (1.0 - 0.75 * smooth_step(0.44, 0.03, edge))
    speckle = wp.noise(wp.rand_init(seed + 1), 46.0 * p)
    color = color * (1.0 + 0.28 * fractal(seed, 7.0 * p))
    return wp.lerp(color, 0.25 * color, smooth_step(0.42, 0.06, speckle))


@wp.func
def disc_paint(seed: int, p: wp.vec3) -> wp.vec3:
    """Colour of the disc: tiles of random shade inside a painted rim."""
    x = (0.94 * p[0] + 0.342 * p[1]) / 0.17
    y = (0.94 * p[1] - 0.342 * p[0]) / 0.17
    i = wp.floor(x)
    j = wp.floor(y)
    state = wp.rand_init(seed + 2, int(i) * 4099 + int(j))
    tone = 0.62 + 0.55 * wp.randf(state)
    tint = wp.lerp(_SAND, wp.vec3(0.47, 0.37, 0.28), wp.randf(state))
    if wp.randf(state) < 0.16:
        tint = wp.lerp(_SAND, _TEAL, 0.6)
    gap = wp.max(wp.abs(x - i - 0.5), wp.abs(y - j - 0.5))
    color = wp.lerp(tone * tint, _GROUT, smooth_step(0.475, 0.012, gap))
    radius = wp.length(wp.vec2(p[0], p[1]))
    turns = wp.atan2(p[1], p[0]) * 48.0 / 6.2831853
    dash = smooth_step(0.5, 0.03, wp.abs(2.0 * (turns - wp.floor(turns)) - 1.0))
    rim = wp.lerp(_CREAM, _RED, dash)
    rim = wp.lerp(rim, _GROUT, 1.0 - smooth_step(0.01, 0.004, wp.abs(radius - 0.93 * DISC_RADIUS)))
    color = wp.lerp(color, 0.8 * rim, smooth_step(0.93 * DISC_RADIUS, 0.004, radius))
    speckle = wp.noise(wp.rand_init(seed + 3), 55.0 * p)
    color = color * (1.0 + 0.22 * fractal(seed, 5.0 * p))
    return color * (1.0 - 0.5 * smooth_step(0.4, 0.06, speckle))


@wp.kernel
def bake_fill(
    first: int,
    mesh: wp.uint64,
    points: wp.array(dtype=wp.vec3),
    normals: wp.array(dtype=wp.vec3),
    fill: wp.array(dtype=wp.vec3),
):
    """Light of the sky and of the disc that reaches a vertex past the knot. Linear RGB."""
    v = first + wp.tid()
    n = normals[v]
    p = points[v] + _OFFSET * n
    total = float(0.0)
    weight = float(0.0)
    for k in range(_N_FILL_RAYS):
        z = 1.0 - (2.0 * float(k) + 1.0) / float(_N_FILL_RAYS)
        turn = 2.3999632 * float(k)
        r = wp.sqrt(1.0 - z * z)
        d = wp.vec3(r * wp.cos(turn), r * wp.sin(turn), z)
        cosine = wp.dot(n, d)
        if cosine > 0.0:
            weight += cosine
            light = 0.75 + 0.25 * z
            if z < 0.0:
                light = 0.3
            if wp.mesh_query_ray_anyhit(mesh, p, d, 1.0):
                light = 0.12
            total += cosine * light
    fill[v] = total / weight * _FILL_COLOR


@wp.func
def between(grid: wp.array2d(dtype=wp.vec3), x: float, y: float) -> wp.vec3:
    """Bilinear value of a grid at row x and column y, the last ones excluded."""
    i = int(x)
    j = int(y)
    y = y - float(j)
    upper = wp.lerp(grid[i, j], grid[i, j + 1], y)
    return wp.lerp(upper, wp.lerp(grid[i + 1, j], grid[i + 1, j + 1], y), x - float(i))


@wp.kernel
def bake_texels(
    first: int, mesh: wp.uint64, seed: int, is_disc: int, points: wp.array2d(dtype=wp.vec3),
    normals: wp.array2d(dtype=wp.vec3), fill: wp.array2d(dtype=wp.vec3),
    texels: wp.array2d(dtype=wp.vec3),
):  # fmt: skip
    """Paint and light one texel of a chart, whose vertices form a grid. Linear RGB."""
    index = first + wp.tid()
    row = index // texels.shape[1]
    column = index - row * texels.shape[1]
    s = (float(row) + 0.5) / float(texels.shape[0])
    w = (float(column) + 0.5) / float(texels.shape[1])
    x = s * float(points.shape[0] - 1)
    y = w * float(points.shape[1] - 1)
    p = between(points, x, y)
    n = wp.normalize(between(normals, x, y))
    light = between(fill, x, y)
    cosine = wp.dot(n, _KEY)
    if cosine > 0.0 and not wp.mesh_query_ray_anyhit(mesh, p + _OFFSET * n, _KEY, 2.0):
        light = light + cosine * _KEY_COLOR
    if is_disc == 1:
        texels[row, column] = wp.cw_mul(light, disc_paint(seed, p))
    else:
        texels[row, column] = wp.cw_mul(light, knot_paint(seed, p, s, w))


@wp.func
def look_up(texels: wp.array2d(dtype=wp.vec3), s: float, w: float) -> wp.vec3:
    """Texel values between their centres, s and w from 0 to 1."""
    x = wp.clamp(s * float(texels.shape[0]) - 0.5, 0.0, float(texels.shape[0] - 1) - 0.001)
    y = wp.clamp(w * float(texels.shape[1]) - 0.5, 0.0, float(texels.shape[1] - 1) - 0.001)
    return between(texels, x, y)


@wp.func
def radiance(
    mesh: wp.uint64,
    knot: wp.array2d(dtype=wp.vec3),
    disc: wp.array2d(dtype=wp.vec3),
    eye: wp.vec3,
    d: wp.vec3,
) -> wp.vec3:
    """Linear RGB that arrives at ``eye`` from direction ``d``."""
    color = wp.lerp(_BACKGROUND_LOW, _BACKGROUND_HIGH, wp.smoothstep(-0.55, 0.45, d[2]))
    far = float(10.0)
    if d[2] < 0.0:
        t = -eye[2] / d[2]
        p = eye + t * d
        if p[0] * p[0] + p[1] * p[1] < DISC_RADIUS * DISC_RADIUS:
            far = t
            color = look_up(disc, 0.5 + 0.5 * p[0] / DISC_RADIUS, 0.5 + 0.5 * p[1] / DISC_RADIUS)
    hit = wp.mesh_query_ray(mesh, eye, d, far)
    if hit.result:
        cell = hit.face // 2
        i = cell // N_AROUND
        j = cell - i * N_AROUND
        third = 1.0 - hit.u - hit.v
        # The corners of a cell's halves are (0, 0), (0, 1), (1, 1) and (0, 0), (1, 1), (1, 0).
        is_first = hit.face == 2 * cell
        x = wp.where(is_first, third, hit.v + third)
        y = wp.where(is_first, hit.v + third, hit.v)
        color = look_up(knot, (float(i) + x) / float(N_ALONG), (float(j) + y) / float(N_AROUND))
    return color


@wp.func
def encode(x: float) -> wp.uint8:
    """Linear light to an 8-bit sRGB value."""
    value = 12.92 * x
    if x > 0.0031308:
        value = 1.055 * wp.pow(x, 1.0 / 2.4) - 0.055
    return wp.uint8(int(255.0 * wp.clamp(value, 0.0, 1.0) + 0.5))


@wp.kernel
def trace_pictures(
    first: int, mesh: wp.uint64, knot: wp.array2d(dtype=wp.vec3), disc: wp.array2d(dtype=wp.vec3),
    eyes: wp.array(dtype=wp.vec3), rotations: wp.array(dtype=wp.mat33), lens: wp.vec3, samples: int,
    pictures: wp.array4d(dtype=wp.uint8),
):  # fmt: skip
    """One pixel: the mean of samples x samples rays, as sRGB. ``lens`` is (f, cx, cy)."""
    index = first + wp.tid()
    column = index % pictures.shape[2]
    row = (index // pictures.shape[2]) % pictures.shape[1]
    view = index // (pictures.shape[2] * pictures.shape[1])
    to_world = wp.transpose(rotations[view])
    total = wp.vec3(0.0)
    for k in range(samples * samples):
        x = float(column) + (float(k % samples) + 0.5) / float(samples)
        y = float(row) + (float(k // samples) + 0.5) / float(samples)
        d = to_world * wp.vec3((x - lens[1]) / lens[0], (y - lens[2]) / lens[0], 1.0)
        total = total + radiance(mesh, knot, disc, eyes[view], wp.normalize(d))
    total = total / float(samples * samples)
    for channel in range(3):
        pictures[view, row, column, channel] = encode(total[channel])


@wp.kernel
def trace_visibility(
    first: int,
    mesh: wp.uint64,
    points: wp.array(dtype=wp.vec3),
    normals: wp.array(dtype=wp.vec3),
    eyes: wp.array(dtype=wp.vec3),
    visible: wp.array2d(dtype=wp.uint8),
):
    """Whether a surface point faces a camera and nothing is in between."""
    index = first + wp.tid()
    view = index // visible.shape[1]
    p = index - view * visible.shape[1]
    way = eyes[view] - points[p]
    distance = wp.length(way)
    way = way / distance
    seen = points[p][2] > -1.0e-6 and wp.dot(way, normals[p]) > 0.1
    if seen:
        start = points[p] + 1.0e-3 * normals[p]
        seen = not wp.mesh_query_ray_anyhit(mesh, start, way, distance)
    visible[view, p] = wp.uint8(wp.where(seen, 1, 0))


class DemoRenderer:
    """Pictures of the demo scene from any pinhole camera, on the CPU or a GPU."""

    def __init__(
        self, geometry: DemoGeometry, seed: int, detail: float, device: torch.device
    ) -> None:
        self._device = device
        self._points = self._vectors(geometry.points)
        self._faces = torch.as_tensor(geometry.faces, device=device).reshape(-1).contiguous()
        # Warp would build the mesh on a stream of its own, which knows nothing of torch's.
        with on_stream_of(self._device):
            self._mesh = wp.Mesh(wp.from_torch(self._points, wp.vec3), wp.from_torch(self._faces))
        self._seed, self._detail = seed, detail
        knot = [
            np.pad(grid.reshape(N_ALONG, N_AROUND, 3), ((0, 1), (0, 1), (0, 0)), mode="wrap")
            for grid in (geometry.points, geometry.normals)
        ]
        side = np.linspace(-DISC_RADIUS, DISC_RADIUS, _DISC_CELLS + 1)
        x, y = np.meshgrid(side, side, indexing="ij")
        disc = np.stack([x, y, 0 * x], axis=-1), np.stack([0 * x, 0 * x, 0 * x + 1], axis=-1)
        self._knot = self._bake(*knot, _TEXELS_KNOT, is_disc=False)
        self._disc = self._bake(*disc, _TEXELS_DISC, is_disc=True)

    def _vectors(self, array: np.ndarray) -> Tensor:
        return torch.as_tensor(np.asarray(array, np.float32), device=self._device).contiguous()

    def _bake(
        self, points: np.ndarray, normals: np.ndarray, size: tuple[int, int], *, is_disc: bool
    ) -> Tensor:
        """Light and paint of a chart with vertices (A, B, 3): linear RGB texels, float32."""
        size = tuple(max(8, round(self._detail * side)) for side in size)
        points, normals = self._vectors(points), self._vectors(normals)
        fill, texels = torch.empty_like(points), points.new_empty(*size, 3)
        grids = [as_array(grid, wp.vec3) for grid in (points, normals, fill, texels)]
        lists = [as_array(grid.view(-1, 3), wp.vec3) for grid in (points, normals, fill)]
        launch(bake_fill, fill.numel() // 3, [self._mesh.id, *lists])
        arguments = [self._mesh.id, self._seed, int(is_disc), *grids]
        launch(bake_texels, math.prod(size), arguments)
        return texels

    def pictures(
        self,
        eyes: np.ndarray,
        rotations: np.ndarray,
        lens: tuple[float, float, float],
        width: int,
        height: int,
        samples: int,
    ) -> np.ndarray:
        """Render views with samples x samples rays a pixel.

        Args:
            eyes: Camera centres, world units. (V, 3)
            rotations: World to camera, axes x right, y down, z forward. (V, 3, 3)

        Returns:
            sRGB. (V, height, width, 3) uint8
        """
        size = (len(eyes), height, width, 3)
        eyes, rotations = self._vectors(eyes), self._vectors(rotations)
        pictures = torch.empty(size, dtype=torch.uint8, device=self._device)
        arguments = [
            self._mesh.id,
            *(as_array(texels, wp.vec3) for texels in (self._knot, self._disc)),
            as_array(eyes, wp.vec3),
            as_array(rotations, wp.mat33),
            wp.vec3(*lens),
            samples,
            pictures,
        ]
        launch(trace_pictures, math.prod(size[:3]), arguments)
        return pictures.cpu().numpy()

    def visible(self, points: np.ndarray, normals: np.ndarray, eyes: np.ndarray) -> np.ndarray:
        """Which surface points (P, 3) each camera centre (V, 3) sees. (V, P) bool"""
        size = (len(eyes), len(points))
        visible = torch.empty(size, dtype=torch.uint8, device=self._device)
        vectors = [self._vectors(array) for array in (points, normals, eyes)]
        arguments = [self._mesh.id, *(as_array(v, wp.vec3) for v in vectors), visible]
        launch(trace_visibility, math.prod(size), arguments)
        return visible.cpu().numpy().astype(bool)
