# SPDX-License-Identifier: Apache-2.0
"""The subject of the demo scene: a knot of fluted rope on a disc, known exactly.

The triangles of :class:`DemoGeometry` are what the pictures of ``ray_tracer`` show. World axes:
z up, the disc in the plane z = 0; one unit is the longest side of the knot.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
    """Triangles of the demo scene, outward normals, float64 world units.

    Attributes:
        points: Vertices of the knot, row by row along the rope. (N_ALONG * N_AROUND, 3)
        normals: Exact unit normals of the smooth surface at the vertices.
        faces: Triangles, counter-clockwise from outside. (F, 3) int32
        disc_points: Vertices of the disc, the centre first. (D, 3)
        disc_faces: Its triangles, counter-clockwise from above. int32
    """

    points: np.ndarray
    normals: np.ndarray
    faces: np.ndarray
    disc_points: np.ndarray
    disc_faces: np.ndarray


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
