# SPDX-License-Identifier: Apache-2.0
"""Surface queries: even samples, closest points, visibility."""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.core.random import generator
from sugar_scene import triangle_mesh
from sugar_utils.warp_arrays import Floats, Ints, Vec3s
from sugar_utils.warp_launch import as_array, launch, on_stream_of

_FARTHEST = wp.constant(1.0e6)
_MIN_ITEMS = 1024
wp.set_module_options({"enable_backward": False})


@dataclass(frozen=True)
class AreaSamples:
    """Points of a mesh, uniform in area."""

    points: np.ndarray  # (N, 3) float64, the mesh's units
    normals: np.ndarray  # unit normal of the face of each, (N, 3)

    def __len__(self) -> int:
        return len(self.points)

    def select(self, keep: np.ndarray) -> AreaSamples:
        """Return some of the points."""
        return AreaSamples(self.points[keep], self.normals[keep])


class Nearest(NamedTuple):
    """Nearest places of a surface to some points."""

    distances: np.ndarray  # (Q,) float64, the mesh's units
    normals: np.ndarray  # unit normal of the face there, (Q, 3)
    faces: np.ndarray  # row of that face; -1 where there is no surface, (Q,) int64


def sample_surface(
    vertices: np.ndarray, faces: np.ndarray, count: int, seed: int = 0
) -> AreaSamples:
    """Draw points of a mesh, (V, 3) and (F, 3), uniform in area.

    The areas are gone through in equal steps from one random start, so each face gets its share
    to within one sample.
    """
    weighted = triangle_mesh.doubled_area_normals(vertices, faces)
    doubled = np.linalg.norm(weighted, axis=1)
    ends = np.cumsum(doubled)
    if len(ends) == 0 or not ends[-1] > 0:
        return AreaSamples(np.empty((0, 3)), np.empty((0, 3)))
    source = generator(seed, "surface samples")
    draws = torch.rand(2 * count + 1, generator=source, dtype=torch.float64, device="cpu").numpy()
    places = (np.arange(count) + draws[-1]) / count * ends[-1]
    rows = np.minimum(np.searchsorted(ends, places, "right"), np.flatnonzero(doubled)[-1])
    root = np.sqrt(draws[:count])[:, None]
    across = draws[count : 2 * count, None]
    a, b, c = (vertices[faces[rows, k]].astype(np.float64) for k in range(3))
    points = (1 - root) * a + root * (1 - across) * b + root * across * c
    return AreaSamples(points, weighted[rows] / doubled[rows, None])


class Surface:
    """A mesh, (V, 3) and (F, 3), in a tree that finds distances and blocked lines of sight.

    Vertices are about as large as 1: they become float32. Faces without area are left out.
    """

    def __init__(
        self, vertices: np.ndarray, faces: np.ndarray, device: torch.device | str = "cpu"
    ) -> None:
        self._device = torch.device(device)
        weighted = triangle_mesh.doubled_area_normals(vertices, faces)
        doubled = np.linalg.norm(weighted, axis=1)
        solid = doubled > 0
        self._normals = weighted[solid] / doubled[solid, None]
        self._solid = np.flatnonzero(solid)
        self._points = torch.tensor(vertices, dtype=torch.float32, device=self._device)
        self._rows = torch.tensor(faces[solid], dtype=torch.int32, device=self._device).flatten()
        self._tree = None
        if len(self._normals):
            # Warp refers to the memory of both tensors, so they are kept.
            with on_stream_of(self._device):
                arrays = wp.from_torch(self._points, wp.vec3), wp.from_torch(self._rows)
                self._tree = wp.Mesh(*arrays)

    def nearest(self, points: np.ndarray) -> Nearest:
        """Return the nearest places to points, (Q, 3); infinitely far without a surface."""
        n = len(points)
        if self._tree is None:
            return Nearest(np.full(n, np.inf), np.zeros((n, 3)), np.full(n, -1))
        queries = torch.tensor(points, dtype=torch.float32, device=self._device)
        distances = torch.empty(n, device=self._device)
        faces = torch.empty(n, dtype=torch.int32, device=self._device)
        arguments = [self._tree.id, as_array(queries, wp.vec3), distances, faces]
        launch(find_nearest, n, arguments, min_items=_MIN_ITEMS)
        rows = faces.cpu().numpy()
        return Nearest(
            distances=distances.cpu().numpy().astype(np.float64),
            normals=self._normals[rows],
            faces=self._solid[rows],
        )

    def blocked(self, starts: Tensor, ways: Tensor) -> Tensor:
        """Return whether the surface lies between points and points + ways.

        (Q, 3) float32 -> (Q,) bool
        """
        if self._tree is None:
            raise ValueError("a mesh without triangles blocks nothing")
        hits = torch.empty(len(starts), dtype=torch.bool, device=self._device)
        rays = [as_array(values.contiguous(), wp.vec3) for values in (starts, ways)]
        launch(find_blocked, len(starts), [self._tree.id, *rays, hits], min_items=_MIN_ITEMS)
        return hits


@wp.kernel
def find_nearest(first: int, mesh: wp.uint64, points: Vec3s, distances: Floats, faces: Ints):
    """Nearest place of a mesh: distance and row of the face, one work item per point."""
    i = first + wp.tid()
    query = wp.mesh_query_point_no_sign(mesh, points[i], _FARTHEST)
    place = wp.mesh_eval_position(mesh, query.face, query.u, query.v)
    distances[i] = wp.length(place - points[i])
    faces[i] = query.face


@wp.kernel
def find_blocked(
    first: int,
    mesh: wp.uint64,
    starts: Vec3s,
    ways: Vec3s,
    hits: wp.array(dtype=wp.bool),
):
    """Whether a mesh lies on a segment, one work item per segment."""
    i = first + wp.tid()
    hits[i] = wp.mesh_query_ray_anyhit(mesh, starts[i], ways[i], 1.0)
