# SPDX-License-Identifier: Apache-2.0
"""Even samples of a triangle mesh, and distances of points to its surface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import warp as wp

from sugar_utils.random import generator
from sugar_utils.warp_launch import as_array, launch, on_stream_of

wp.set_module_options({"enable_backward": False})

_FARTHEST = wp.constant(1.0e6)
_MIN_ITEMS = 1024


@dataclass(frozen=True)
class AreaSamples:
    """Points on a mesh.

    Attributes:
        points: (N, 3) float64, the mesh's units.
        normals: Unit normal of the face of each. (N, 3)
        faces: Row of that face. (N,)
    """

    points: np.ndarray
    normals: np.ndarray
    faces: np.ndarray

    def __len__(self) -> int:
        return len(self.points)

    def select(self, keep: np.ndarray) -> AreaSamples:
        """Some of them. keep: (N,) bool"""
        return AreaSamples(self.points[keep], self.normals[keep], self.faces[keep])


class Nearest(NamedTuple):
    """The place of a surface that is nearest to each point.

    Attributes:
        distances: (Q,) float64, the mesh's units.
        normals: Unit normal of the face there. (Q, 3)
        faces: Row of that face; -1 where there is no surface. (Q,) int64
    """

    distances: np.ndarray
    normals: np.ndarray
    faces: np.ndarray


def sample_surface(
    vertices: np.ndarray, faces: np.ndarray, count: int, seed: int = 0
) -> AreaSamples:
    """Draw points of a mesh, uniform in area.

    The areas are gone through in equal steps from one random start, so each face gets its share
    to within one sample.

    Args:
        vertices: (V, 3)
        faces: (F, 3) rows of the vertices.
        count: Number of samples.
        seed: Random seed.

    Returns:
        The samples; none where the mesh has no area.
    """
    a, b, c = (vertices[faces[:, k]].astype(np.float64) for k in range(3))
    weighted = np.cross(b - a, c - a)
    doubled = np.linalg.norm(weighted, axis=1)
    ends = np.cumsum(doubled)
    if len(ends) == 0 or not ends[-1] > 0:
        none = np.empty((0, 3))
        return AreaSamples(none, none, np.empty(0, dtype=np.int64))
    draws = torch.rand(
        2 * count + 1,
        generator=generator(seed, "surface samples"),
        dtype=torch.float64,
        device="cpu",
    ).numpy()
    places = (np.arange(count) + draws[-1]) / count * ends[-1]
    rows = np.minimum(np.searchsorted(ends, places, "right"), np.flatnonzero(doubled)[-1])
    root, across = np.sqrt(draws[:count])[:, None], draws[count : 2 * count, None]
    points = (1 - root) * a[rows] + root * (1 - across) * b[rows] + root * across * c[rows]
    return AreaSamples(points, weighted[rows] / doubled[rows, None], rows)


class Surface:
    """A mesh that exact distances are asked of, through a tree of boxes over its triangles.

    Args:
        vertices: (V, 3), about as large as 1: they become float32.
        faces: (F, 3) rows of the vertices; faces without area are left out.
        device: Where distances are computed.
    """

    def __init__(
        self, vertices: np.ndarray, faces: np.ndarray, device: torch.device | str = "cpu"
    ) -> None:
        self._device = torch.device(device)
        a, b, c = (vertices[faces[:, k]].astype(np.float64) for k in range(3))
        weighted = np.cross(b - a, c - a)
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
                self._tree = wp.Mesh(
                    wp.from_torch(self._points, wp.vec3), wp.from_torch(self._rows)
                )

    def nearest(self, points: np.ndarray) -> Nearest:
        """Distances to the surface, and its normals there; infinite where there is no surface.

        Args:
            points: (Q, 3)
        """
        n = len(points)
        if self._tree is None:
            return Nearest(np.full(n, np.inf), np.zeros((n, 3)), np.full(n, -1))
        queries = torch.tensor(points, dtype=torch.float32, device=self._device)
        distances = torch.empty(n, device=self._device)
        faces = torch.empty(n, dtype=torch.int32, device=self._device)
        launch(
            find_nearest,
            n,
            [self._tree.id, as_array(queries, wp.vec3), distances, faces],
            device=self._device,
            min_items=_MIN_ITEMS,
        )
        found = faces.cpu().numpy()
        return Nearest(
            distances.cpu().numpy().astype(np.float64), self._normals[found], self._solid[found]
        )


@wp.kernel
def find_nearest(
    first: int,
    mesh: wp.uint64,
    points: wp.array(dtype=wp.vec3),
    distances: wp.array(dtype=float),
    faces: wp.array(dtype=int),
):
    """Nearest place of a mesh: distance and row of the face, one work item per point."""
    i = first + wp.tid()
    query = wp.mesh_query_point_no_sign(mesh, points[i], _FARTHEST)
    place = wp.mesh_eval_position(mesh, query.face, query.u, query.v)
    distances[i] = wp.length(place - points[i])
    faces[i] = query.face
