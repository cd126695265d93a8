# SPDX-License-Identifier: Apache-2.0
"""Geometry of the demo scene: a knot of fluted rope that stands on a disc.

World axes: z up, the disc in the plane z = 0; one unit is the longest side of the knot.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from gaussian_splatting.core.moved import unit_vectors
from sugar_scene.surface_queries import Surface
from sugar_scene.triangle_mesh import TriangleMesh, with_vertex_normals

# cells of the knot's surface along the rope and around it
N_ALONG = 400
N_AROUND = 40
DISC_RADIUS = 1.15
_DISC_CORNERS = 256
_SINK = 0.006  # depth by which the knot is set into the disc, to rest on areas and not on points
# strands passed on the way along: a multiple, so that the paint closes
STRANDS = 4
TWISTS = 16
_WIDTH = 2.4
_DEPTH = 1.5
# before scaling, when parts are 0.4 and more apart
_ROPE_RADIUS = 0.66
_FLUTE_DEPTH = 0.09
_GREY = 128
GOLDEN_ANGLE = math.pi * (3 - math.sqrt(5))  # spreads any number of directions evenly
_EYE_RAY_OFFSET = 1e-3  # of rays to the cameras from the surface that they start on
_MIN_FACING_COSINE = 0.1  # between a normal and the direction to the camera


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
    center = _center_line(t, order=0)
    first_derivative = _center_line(t, order=1)
    second_derivative = _center_line(t, order=2)
    tangent = unit_vectors(first_derivative)
    binormal = unit_vectors(np.cross(first_derivative, second_derivative))
    normal = np.cross(binormal, tangent)
    outward = np.cos(u)[..., None] * normal + np.sin(u)[..., None] * binormal
    radius = _ROPE_RADIUS * (1 - _FLUTE_DEPTH * np.cos(STRANDS * u + TWISTS * t))
    return center + radius[..., None] * outward


def _center_line(t: np.ndarray, order: int) -> np.ndarray:
    """Derivative of the centre line. (...) -> (..., 3)"""
    x = _sine(1, t, order) + _WIDTH * _sine(2, t, order)
    y = -_DEPTH * _sine(3, t, order)
    z = _WIDTH * _cosine(2, t, order) - _cosine(1, t, order)
    return np.stack([x, y, z], axis=-1)


def _sine(frequency: int, t: np.ndarray, order: int) -> np.ndarray:
    """Derivative of sin(frequency * t); each order shifts the phase by a quarter turn."""
    return frequency**order * np.sin(frequency * t + order * np.pi / 2)


def _cosine(frequency: int, t: np.ndarray, order: int) -> np.ndarray:
    """Derivative of cos(frequency * t); each order shifts the phase by a quarter turn."""
    return frequency**order * np.cos(frequency * t + order * np.pi / 2)


def make_knot() -> TriangleMesh:
    """Build the knot, scaled to longest side 1, on the disc; two triangles per cell."""
    along, around = np.indices((N_ALONG, N_AROUND))
    points = rope_knot(along / N_ALONG, around / N_AROUND).reshape(-1, 3)
    low = points.min(axis=0)
    high = points.max(axis=0)
    middle = (low + high) / 2
    origin = np.array([*middle[:2], low[2]])
    points = (points - origin) / (high - low).max() - [0.0, 0.0, _SINK]
    return closed_grid_mesh(points.reshape(N_ALONG, N_AROUND, 3))


def closed_grid_mesh(points: np.ndarray) -> TriangleMesh:
    """Build a grey mesh of a grid that is closed in both directions; two triangles per cell.

    Args:
        points: Vertices, counted against the sense of rotation seen from outside. (A, B, 3)
    """
    n_along, n_around = points.shape[:2]
    along, around = np.indices((n_along, n_around))
    next_along = (along + 1) % n_along
    next_around = (around + 1) % n_around
    a = along * n_around + around
    b = along * n_around + next_around
    c = next_along * n_around + next_around
    d = next_along * n_around + around
    faces = np.stack([a, b, c, a, c, d], axis=-1).reshape(-1, 3)
    return _grey_mesh(points.reshape(-1, 3), faces)


def make_disc() -> TriangleMesh:
    """Build the disc as a fan of triangles; vertex 0 is its middle."""
    corner = np.arange(_DISC_CORNERS)
    angles = 2 * np.pi * corner / _DISC_CORNERS
    unit_circle = np.stack([np.cos(angles), np.sin(angles), 0 * angles], axis=1)
    middle = np.zeros((1, 3))
    points = np.concatenate([middle, DISC_RADIUS * unit_circle])
    next_corner = (corner + 1) % _DISC_CORNERS
    faces = np.stack([0 * corner, corner + 1, next_corner + 1], axis=1)
    return _grey_mesh(points, faces)


def _grey_mesh(points: np.ndarray, faces: np.ndarray) -> TriangleMesh:
    colors = np.full(points.shape, _GREY, np.uint8)
    return with_vertex_normals(TriangleMesh(points, faces, colors))


def visible(
    knot: TriangleMesh, points: np.ndarray, normals: np.ndarray, eyes: np.ndarray
) -> np.ndarray:
    """Mark the surface points that face a camera centre and are not occluded. (V, P) bool

    Args:
        knot: The only mesh that occludes.
        points: Surface points, (P, 3).
        normals: Their unit normals, (P, 3).
        eyes: Camera centres, (V, 3).
    """
    surface = Surface(knot.vertices, knot.faces)
    starts = points + _EYE_RAY_OFFSET * normals
    ray_starts = torch.from_numpy(starts).float()
    above_ground = points[:, 2] > -1e-6
    visibility = np.empty((len(eyes), len(points)), dtype=bool)
    for view, eye in enumerate(eyes):
        to_eye = eye - points
        projection = (to_eye * normals).sum(axis=1)
        facing = projection > _MIN_FACING_COSINE * np.linalg.norm(to_eye, axis=1)
        rays = torch.from_numpy(eye - starts).float()
        occluded = surface.blocked(ray_starts, rays).numpy()
        visibility[view] = facing & above_ground & ~occluded
    return visibility
