# SPDX-License-Identifier: Apache-2.0
"""Contents of exported files, as the writers of formats get them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from gaussian_splatting.core.cloud import GaussianCloud
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh
from sugar_utils.errors import Notify


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
        linear = matrix[:3, :3]
        positions = self.positions @ linear.T + matrix[:3, 3]
        normals = None
        if self.normals is not None:
            turned = self.normals @ linear.T
            normals = turned / np.linalg.norm(turned, axis=1, keepdims=True)
        return replace(self, positions=positions, normals=normals)


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
