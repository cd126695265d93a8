# SPDX-License-Identifier: Apache-2.0
"""Close holes of a mesh by the smoothest surface that no photograph contradicts.

A hole is a closed loop of open edges. It is triangulated with the least area, refined to the edges
around it and faired: its thin plate (bi-Laplacian) energy is least while the rim and one ring of
vertices around it stay where they are, so the surface's tangents go on. Where photographs
contradict the result, it moves toward the membrane (Laplacian) of the rim, which is the flattest
surface; where they contradict that as well, the hole stays open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from gaussian_splatting.core.color_bytes import rounded_bytes
from gaussian_splatting.core.subsets import is_among
from sugar_extractors.mesh.holes.fairing import OneRing, cotangent_laplacian, membrane
from sugar_extractors.mesh.holes.hole_shapes import (
    MIN_COVERING_VIEWS,
    Judge,
    extent,
    judged_shape,
)
from sugar_extractors.mesh.holes.patches import Patch, refined
from sugar_extractors.mesh.holes.rim_triangulation import RimEdges, triangulated
from sugar_scene import triangle_mesh as meshes
from sugar_scene.regions import WHOLE, Box, Region
from sugar_scene.triangle_mesh import TriangleMesh

MODES = ("auto", "none")
HOLE_SHARE = 0.15
"""Longest extent of a hole that is filled, in diagonals of the bounding box of its component.

A larger one is a side without photographs, whose shape the rim does not tell: the border of a
half sphere has 0.67, and on a whole sphere 0.15 is a cap of 15 degrees around its axis.
"""
OBJECT_HOLE_SHARE = 0.25
"""The same of an object in masks, which bound a filling, where most views do not look inside."""
MAX_LOOP = 2048  # edges of a loop: chords of larger ones take too much memory


@dataclass(frozen=True)
class HoleCounts:
    """Counts of filled holes, and of open holes by their reasons."""

    filled: int = 0
    too_large: int = 0
    outer_borders: int = 0  # of open surfaces such as a ground
    outside_views: int = 0
    contradicted: int = 0
    degenerate: int = 0  # with triangles of no area

    def figures(self) -> dict[str, int]:
        """Return the counts for the record of a mesh."""
        return {
            "holes_filled": self.filled,
            "holes_too_large": self.too_large,
            "holes_outer_borders": self.outer_borders,
            "holes_outside_views": self.outside_views,
            "holes_contradicted": self.contradicted,
            "holes_degenerate": self.degenerate,
        }

    def __str__(self) -> str:
        reasons = {
            "larger than a hole": self.too_large,
            "outer borders": self.outer_borders,
            f"not in {MIN_COVERING_VIEWS} views": self.outside_views,
            "contradicted by photographs": self.contradicted,
            "degenerate": self.degenerate,
        }
        text = f"{self.filled:,} holes filled, {sum(reasons.values()):,} left open"
        parts = [f"{count:,} {reason}" for reason, count in reasons.items() if count]
        return f"{text} ({', '.join(parts)})" if parts else text


class FilledMesh(NamedTuple):
    """A mesh with some holes closed."""

    mesh: TriangleMesh  # the one before where no hole was filled
    counts: HoleCounts


def fill_holes(
    mesh: TriangleMesh,
    judge: Judge,
    *,
    is_object: bool,
    region: Region = WHOLE,
) -> FilledMesh:
    """Fill the holes of a mesh that photographs allow.

    Args:
        mesh: Its vertices and faces stay, in their order; new ones come behind them.
        judge: Returns the evidence of images about points.
        is_object: Whether masks tell what the object is. If not, the longest border of each
            component is the end of what was reconstructed and stays.
        region: Vertices outside of its box do not count for the size of a component; borders
            through the vertices that it shares with another region stay.
    """
    loops = simple_loops(meshes.border_loops(mesh))
    labels = meshes.component_labels(mesh)
    shares = _extent_shares(mesh, loops, labels, region.box)
    reasons = _size_reasons(loops, shares, is_object)
    if not is_object:
        for number in _longest_loops(mesh, loops, labels):
            reasons[number] = "outer_borders"
    is_shared = region.shared(mesh.vertices)
    for number, loop in enumerate(loops):
        if is_shared[loop].any():
            reasons[number] = "outer_borders"
    candidates = [number for number, reason in enumerate(reasons) if not reason]
    edges = RimEdges.of(mesh, loops)
    if not candidates:
        return FilledMesh(mesh, HoleCounts(**Counter(reasons)))
    triangulations = []
    centers: list[np.ndarray] = []
    for number in candidates:
        loop = loops[number]
        faces = triangulated(mesh.vertices, loop, edges)
        if faces is None:
            # As where all vertices are joined already: edges to a new vertex are never there.
            center = np.full_like(loop, mesh.n_vertices + len(centers))
            faces = np.stack([np.roll(loop, -1), loop, center], axis=1)
            centers.append(mesh.vertices[loop].mean(axis=0))
        triangulations.append(faces)
    patch = Patch.of(mesh, triangulations, centers)
    patch = refined(patch, edges)
    one_ring = OneRing.of(mesh, patch)
    is_wide = shares[candidates] > HOLE_SHARE
    rims = [loops[number] for number in candidates]
    shaped = judged_shape(patch, one_ring, judge, rims, is_wide)
    for number, reason in zip(candidates, shaped.reasons, strict=True):
        reasons[number] = reason
    counts = HoleCounts(**Counter(reasons))
    if not counts.filled:
        return FilledMesh(mesh, counts)
    is_filled = np.array([reason == "filled" for reason in shaped.reasons])
    patch = replace(patch, mesh=replace(patch.mesh, vertices=shaped.vertices))
    return FilledMesh(_joined(mesh, patch, is_filled, one_ring), counts)


def simple_loops(walks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Divide closed walks where they come to a vertex again, as where two holes touch."""
    loops = []
    for walk in walks:
        path: list[int] = []
        places: dict[int, int] = {}
        for vertex in [*walk.tolist(), int(walk[0])]:
            if vertex in places:
                start = places[vertex]
                loops.append(np.array(path[start:], dtype=np.int64))
                for passed in path[start:]:
                    del places[passed]
                del path[start:]
            places[vertex] = len(path)
            path.append(vertex)
    return [loop for loop in loops if len(loop) >= 3]


def _extent_shares(
    mesh: TriangleMesh, loops: Sequence[np.ndarray], labels: np.ndarray, box: Box
) -> np.ndarray:
    """Return the extent of each loop in diagonals of its component inside of a box. (L,)

    Args:
        labels: Of the components of the mesh. (V,)
    """
    if not loops:
        return np.empty(0)
    diagonals = _diagonals_inside(mesh, labels, box)
    return np.array([extent(mesh.vertices[loop]) / diagonals[labels[loop[0]]] for loop in loops])


def _size_reasons(loops: Sequence[np.ndarray], shares: np.ndarray, is_object: bool) -> list[str]:
    """Return why each loop is no hole by its size alone; empty where it may be one."""
    largest_share = OBJECT_HOLE_SHARE if is_object else HOLE_SHARE
    reasons = []
    for loop, share in zip(loops, shares.tolist(), strict=True):
        is_too_large = len(loop) > MAX_LOOP or share > largest_share
        reasons.append("too_large" if is_too_large else "")
    return reasons


def _longest_loops(
    mesh: TriangleMesh, loops: Sequence[np.ndarray], labels: np.ndarray
) -> list[int]:
    """Return the number of the longest loop of each component that has one.

    Args:
        labels: Of the components of the mesh. (V,)
    """
    lengths = [_length(mesh.vertices[loop]) for loop in loops]
    longest: dict[int, int] = {}
    for number, loop in enumerate(loops):
        component = int(labels[loop[0]])
        if component not in longest or lengths[number] > lengths[longest[component]]:
            longest[component] = number
    return list(longest.values())


def _diagonals_inside(mesh: TriangleMesh, labels: np.ndarray, box: Box) -> np.ndarray:
    """Return the diagonal of each component's bounding box at the row of its label. (V,)"""
    is_inside = box.contains(mesh.vertices)
    # What lies outside of the box, but for one vertex, is measured as it is.
    has_inside = np.bincount(labels[is_inside], minlength=mesh.n_vertices) > 1
    counted = is_inside | ~has_inside[labels]
    return meshes.component_diagonals(mesh, labels, counted)


def _length(points: np.ndarray) -> float:
    """Return the length of a closed polygon. (N, 3) -> world units"""
    return float(np.linalg.norm(np.roll(points, -1, axis=0) - points, axis=1).sum())


def _joined(
    mesh: TriangleMesh, patch: Patch, is_filled: np.ndarray, one_ring: OneRing
) -> TriangleMesh:
    """Return a mesh with the fillings of some holes, (H,) bool, whose vertices are marked."""
    n_rim = patch.n_rim
    faces = patch.mesh.faces[is_filled[patch.holes]]
    is_used = is_among(patch.mesh.n_vertices, faces)
    is_used[:n_rim] = False
    numbers = np.concatenate([patch.rows, np.zeros(len(is_used) - n_rim, dtype=np.int64)])
    numbers[is_used] = mesh.n_vertices + np.arange(int(is_used.sum()))
    colors = one_ring.colors
    if patch.mesh.n_vertices > n_rim:
        laplacian = cotangent_laplacian(patch, patch.mesh.vertices, one_ring)
        colors = membrane(laplacian, colors, n_rim)
    colors = rounded_bytes(colors)
    before = mesh.filled
    if before is None:
        before = np.zeros(mesh.n_vertices, dtype=bool)
    joined = TriangleMesh(
        vertices=np.concatenate([mesh.vertices, patch.mesh.vertices[is_used]]),
        faces=np.concatenate([mesh.faces, numbers[faces]]),
        colors=np.concatenate([mesh.colors, colors[is_used]]),
        filled=np.concatenate([before, np.ones(int(is_used.sum()), dtype=bool)]),
    )
    return meshes.with_vertex_normals(joined)
