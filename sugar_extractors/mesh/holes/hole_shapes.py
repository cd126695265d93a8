# SPDX-License-Identifier: Apache-2.0
"""The smoothest shape of a filling that no photograph contradicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from sugar_extractors.mesh.holes.fairing import OneRing, extreme_shapes
from sugar_extractors.mesh.holes.patches import Patch
from sugar_extractors.mesh.holes.rim_triangulation import triangle_costs
from sugar_scene.triangle_mesh import sides_of

MIN_COVERING_VIEWS = 3  # in whose images all of a hole lies: from two sides it can be a background
MAX_BULGE = 0.5  # height above the membrane in extents of the hole: that of a half sphere
SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)  # of the way from the membrane to the smoothest surface


class Rims(NamedTuple):
    """Which of the points that are judged lie on rims of holes."""

    holes: np.ndarray  # number of the hole of each point, (N,) int64
    is_rim: np.ndarray  # whether it lies on the rim, hence on the mesh, (N,) bool
    is_wide: np.ndarray  # whether its hole is so wide that views into it contradict, (N,) bool


class Judgement(NamedTuple):
    """Evidence of photographs about points."""

    n_views: np.ndarray  # views that show the place of a point, (N,) int64
    is_contradicted: np.ndarray  # whether there can be no surface, (N,) bool


Judge = Callable[[np.ndarray, Rims], Judgement]
"""Returns what photographs say about points, (N, 3) in world units."""


class JudgedShape(NamedTuple):
    """The shape of a patch."""

    vertices: np.ndarray  # (P, 3)
    reasons: list[str]  # what becomes of each hole, a field of :class:`HoleCounts`


def judged_shape(
    patch: Patch,
    one_ring: OneRing,
    judge: Judge,
    loops: Sequence[np.ndarray],
    is_wide: np.ndarray,
) -> JudgedShape:
    """Return the smoothest shape of each filling that photographs do not contradict.

    Args:
        loops: Rims of the holes, rows of the mesh.
        is_wide: Holes that a view must not look into, (H,) bool.
    """
    n_rim = patch.n_rim
    n_inside = patch.mesh.n_vertices - n_rim
    holes = _holes_of_inner_vertices(patch)
    rims = [np.searchsorted(patch.rows, loop) for loop in loops]
    flat, smooth = extreme_shapes(patch, one_ring)
    bulge = (smooth - flat)[n_rim:]
    shares = np.array(SHARES)[:, None]
    shapes = flat[n_rim:] + shares[:, :, None] * bulge
    rim_rows = np.concatenate(rims)
    rim_holes = np.repeat(np.arange(len(rims)), [len(rim) for rim in rims])
    numbers = np.concatenate([rim_holes, np.tile(holes, len(SHARES))])
    is_rim = np.arange(len(numbers)) < len(rim_rows)
    points = np.concatenate([flat[rim_rows], shapes.reshape(-1, 3)])
    judgement = judge(points, Rims(numbers, is_rim, is_wide[numbers]))
    # Of each share of each vertex off the rims.
    n_views = judgement.n_views[~is_rim].reshape(len(SHARES), n_inside)
    is_refuted = judgement.is_contradicted[~is_rim].reshape(len(SHARES), n_inside)
    is_refuted = is_refuted | (n_views < MIN_COVERING_VIEWS)
    extents = np.array([extent(flat[rim]) for rim in rims])
    heights = shares * np.linalg.norm(bulge, axis=1)
    is_refuted = is_refuted | (heights > MAX_BULGE * extents[holes])
    levels = _levels(is_refuted, patch)
    best_levels = np.minimum(levels, len(SHARES) - 1)
    vertices = np.concatenate([flat[:n_rim], shapes[best_levels, np.arange(n_inside)]])

    is_uncovered = np.concatenate([judgement.n_views[is_rim], n_views[-1]]) < MIN_COVERING_VIEWS
    uncovered_holes = set(np.concatenate([rim_holes, holes])[is_uncovered].tolist())
    contradicted_holes = set(holes[levels == len(SHARES)].tolist())
    degenerate_holes = _degenerate_holes(patch, vertices)
    reasons = []
    for number in range(len(rims)):
        reason = "filled"
        if number in uncovered_holes:
            reason = "outside_views"
        elif number in contradicted_holes:
            reason = "contradicted"
        elif number in degenerate_holes:
            reason = "degenerate"
        reasons.append(reason)
    return JudgedShape(vertices, reasons)


def _holes_of_inner_vertices(patch: Patch) -> np.ndarray:
    """Return the number of the hole in which each vertex off the rims lies. (I,)"""
    numbers = np.zeros(patch.mesh.n_vertices, dtype=np.int64)
    numbers[patch.mesh.faces] = patch.holes[:, None]
    return numbers[patch.n_rim :]


def _degenerate_holes(patch: Patch, vertices: np.ndarray) -> set[int]:
    """Return the holes with triangles without area between vertices, (P, 3)."""
    a, b, c = vertices[patch.mesh.faces].swapaxes(0, 1)
    is_degenerate = np.isinf(triangle_costs(a, b, c))
    return set(patch.holes[is_degenerate].tolist())


def _levels(is_refuted: np.ndarray, patch: Patch) -> np.ndarray:
    """Return the first level of ``SHARES`` that each vertex off the rims may have.

    Neighbours differ by one level at most. A filling one of whose vertices may have none ends with
    ``len(SHARES)`` there.

    Args:
        is_refuted: Whether a vertex may not have a level. (L, I) bool
    """
    n_levels, n_inside = is_refuted.shape
    # First level from each one on that is allowed: a filling is pulled in, never out.
    following = np.full((n_levels + 1, n_inside), n_levels)
    for level in range(n_levels - 1, -1, -1):
        following[level] = np.where(is_refuted[level], following[level + 1], level)
    starts, ends = sides_of(patch.mesh.faces - patch.n_rim)
    is_inside = (starts >= 0) & (ends >= 0)
    starts = starts[is_inside]
    ends = ends[is_inside]
    columns = np.arange(n_inside)
    levels = following[0]
    while True:
        lower = levels.copy()
        np.maximum.at(lower, starts, levels[ends] - 1)
        np.maximum.at(lower, ends, levels[starts] - 1)
        lower = following[lower, columns]
        if (lower == levels).all():
            return levels
        levels = lower


def extent(points: np.ndarray) -> float:
    """Return the extent of points along their first principal axis. (N, 3) -> world units"""
    centered = points - points.mean(axis=0)
    _, axes = np.linalg.eigh(centered.T @ centered)
    return float(np.ptp(centered @ axes[:, -1]))
