# SPDX-License-Identifier: Apache-2.0
"""Contents of exported files: as results are read, and as the writers of formats get them.

What is read has ``positions``, (N, 3), by which it is placed, and is ``moved`` by a similarity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.moved import is_identity, moved_cloud, moved_points, unit_vectors
from sugar_scene.mesh_bound import BoundCloud
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh
from sugar_utils.device import float32_tensor
from sugar_utils.errors import Notify


@dataclass(frozen=True)
class GaussianContent:
    """Gaussians."""

    cloud: GaussianCloud
    bound: BoundCloud | None = None  # on their mesh, before that was edited; None of other ones

    @property
    def positions(self) -> np.ndarray:
        """The centres. (N, 3)"""
        return self.cloud.means.double().numpy()

    def moved(self, matrix: np.ndarray) -> GaussianContent:
        """Return the Gaussians after a similarity, (4, 4); those that stay keep all their bits."""
        return replace(self, cloud=moved_cloud(self.cloud, matrix))


@dataclass(frozen=True)
class MeshContent:
    """The levels of detail of a textured mesh."""

    full: TexturedMesh  # with all triangles
    levels: tuple[TexturedMesh, ...]  # the finest first, which may have fewer triangles

    @property
    def positions(self) -> np.ndarray:
        """The vertices of the full mesh. (V, 3)"""
        return self.full.vertices.double().numpy()

    def moved(self, matrix: np.ndarray) -> MeshContent:
        """Return all levels after a similarity. (4, 4)"""
        return replace(self, levels=tuple(moved_mesh(level, matrix) for level in self.levels))


@dataclass(frozen=True)
class CombinedContent:
    """A textured mesh and its Gaussians."""

    mesh: MeshContent  # one level
    cloud: GaussianCloud
    to_mesh: np.ndarray  # from where the Gaussians stand to where the mesh does, (4, 4)

    @property
    def positions(self) -> np.ndarray:
        """The vertices of the full mesh. (V, 3)"""
        return self.mesh.positions

    def moved(self, matrix: np.ndarray) -> CombinedContent:
        """Return both after a similarity of the mesh, (4, 4); the Gaussians come along."""
        cloud = moved_cloud(self.cloud, matrix @ self.to_mesh)
        return CombinedContent(self.mesh.moved(matrix), cloud, np.eye(4))


@dataclass(frozen=True)
class CollisionShape:
    """A piece of a collider."""

    vertices: np.ndarray  # (V, 3) float64
    faces: np.ndarray  # (F, 3) int64


@dataclass(frozen=True)
class Collider:
    """Shapes to collide with, in the axes of their mesh."""

    shapes: tuple[CollisionShape, ...]
    convex: bool  # whether each shape is convex; else there is a single one

    @property
    def n_faces(self) -> int:
        """Triangles of all shapes."""
        return sum(len(shape.faces) for shape in self.shapes)


@dataclass(frozen=True)
class MeshExport:
    """A mesh on its way into a file."""

    mesh: TexturedMesh  # in the axes that the format's writer expects
    target: Path  # file that is exported
    paths: Mapping[Path, Path]  # where to write each of ``files_of(target)`` for now
    upright: bool  # whether the mesh has the axes of the format already
    lit: bool  # whether viewers light the mesh
    normal_map: bool
    notify: Notify
    collider: Collider | None = None  # in the axes of the mesh
    coarser: tuple[TexturedMesh, ...] = ()  # further levels of detail, in the axes of the mesh

    @property
    def path(self) -> Path:
        """Where to write the target for now."""
        return self.paths[self.target]


@dataclass(frozen=True)
class CombinedExport:
    """A mesh and its Gaussians on their way into one file."""

    mesh: TexturedMesh  # in the axes of the format
    cloud: GaussianCloud  # in the axes of the format
    target: Path  # file that is exported
    path: Path  # where to write it for now
    lit: bool  # whether viewers light the mesh
    collider: Collider | None = None  # in the axes of the format


@dataclass(frozen=True)
class PointCloud:
    """Points with colours, and what else their source has."""

    positions: np.ndarray  # (N, 3) float64
    colors: np.ndarray  # (N, 3) uint8
    normals: np.ndarray | None = None  # of length 1, (N, 3) float64; None of Gaussians
    opacities: np.ndarray | None = None  # (N,) in [0, 1]; None of a mesh

    def moved(self, matrix: np.ndarray) -> PointCloud:
        """Return the points after a similarity. (4, 4)"""
        if is_identity(matrix):
            return self
        normals = None
        if self.normals is not None:
            normals = unit_vectors(self.normals @ matrix[:3, :3].T)
        return replace(self, positions=moved_points(self.positions, matrix), normals=normals)


class CoordinateSystem(Protocol):
    """A coordinate system of a map."""

    @property
    def name(self) -> str:
        """Its code, or the beginning of its definition."""
        ...

    @property
    def definition(self) -> str:
        """Its definition, as pyproj reads it."""
        ...


@dataclass(frozen=True)
class PointExport:
    """Points on their way into a file."""

    points: PointCloud  # in coordinates near zero
    offset: np.ndarray  # to add to them, (3,) float64
    system: CoordinateSystem | None  # of the map; None where there is none
    is_metric: bool  # whether the unit is a metre
    path: Path  # where to write the file for now
    notify: Notify


def moved_mesh(mesh: TexturedMesh, matrix: np.ndarray) -> TexturedMesh:
    """Return a textured mesh after a similarity. (4, 4)"""
    vertices = moved_points(mesh.vertices.double().numpy(), matrix)
    return replace(mesh, vertices=float32_tensor(vertices))
