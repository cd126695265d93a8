# SPDX-License-Identifier: Apache-2.0
"""Compare a mesh with a known surface: the figures papers report, and topology.

Only the object counts. What is compared, and where:

- All lengths are in fractions of the object's longest side.
- The mesh is sampled evenly by area. Samples inside the object's bounding box grown by
  ``MARGIN`` count, except those below the ground's upper side plus ``CLEARANCE``, where the border
  between ground and object is not visible.
- Accuracy is the mean distance of these samples to the true object or the true ground, whichever
  is nearer: a correct piece of ground inside the box is no error, a blob in the air is one.
- Completeness is the mean distance of the true object's visible samples (seen by three views or
  more) to the whole mesh.
- Topology is that of the whole mesh, because a cut would make edges that it does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import torch
from plyfile import PlyData

from gaussian_splatting.formats.ply import columns_of, ply_errors
from sugar_scene import triangle_mesh
from sugar_scene.surface_queries import AreaSamples, Surface, sample_surface
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_utils.command_text import command_text
from sugar_utils.errors import UserError
from sugar_utils.files import read_json, require_regular_file
from sugar_utils.schemas import Coordinate, Count, conform

OBJECT_FILE = "gt_object.ply"
VISIBLE_FILE = "gt_visible.ply"
FACTS_FILE = "gt.json"
MARGIN = 0.05
CLEARANCE = 0.01
THRESHOLDS = (0.005, 0.01)  # distances at which F-scores are taken, unless others are asked for
N_SAMPLES = 100_000
_MAX_DRAWN = 40 * N_SAMPLES
_REACH = 1.0
_PAIRS = ("x", "y", "z"), ("nx", "ny", "nz")
_Corner = tuple[Coordinate, Coordinate, Coordinate]


class _Facts(msgspec.Struct):
    """Content of the file of facts about a rendered scene."""

    object_bbox: tuple[_Corner, _Corner]
    up: Annotated[str, msgspec.Meta(pattern="^[+-]?[xyz]$")]
    gt_visible_object_samples: Count
    ground_bbox: tuple[_Corner, _Corner] | None = None


@dataclass(frozen=True)
class Reference:
    """The true surface of a scene, and where meshes are compared with it."""

    surface: TriangleMesh
    visible_points: np.ndarray  # points of the object that the photographs show, (N, 3) world units
    visible_normals: np.ndarray  # their unit normals, (N, 3)
    low: np.ndarray  # low corner of the box inside which a mesh is judged, (3,) world units
    high: np.ndarray  # high corner, (3,)
    size: float  # longest side of the object in world units

    def moved_back(self, offset: np.ndarray) -> Reference:
        """Return the same in a world from which an offset, (3,), is subtracted."""
        surface = replace(self.surface, vertices=self.surface.vertices - offset)
        return replace(
            self,
            surface=surface,
            visible_points=self.visible_points - offset,
            low=self.low - offset,
            high=self.high - offset,
        )


@dataclass(frozen=True)
class MeshQuality:
    """Figures of one mesh; distances in fractions of the object's longest side."""

    accuracy: float
    completeness: float
    thresholds: tuple[float, ...]
    precisions: tuple[float, ...]  # shares of the mesh within each of the thresholds
    recalls: tuple[float, ...]  # shares of the object
    normal_agreement: float
    non_manifold_edge_share: float
    open_edge_share: float
    components: int
    triangles: int
    object_triangles: int

    @property
    def chamfer(self) -> float:
        """Mean of accuracy and completeness."""
        return (self.accuracy + self.completeness) / 2

    @property
    def f_scores(self) -> tuple[float, ...]:
        """Harmonic means of precision and recall, one for each threshold."""
        scores = []
        for precision, recall in zip(self.precisions, self.recalls, strict=True):
            total = precision + recall
            scores.append(2 * precision * recall / total if total > 0 else 0.0)
        return tuple(scores)

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each figure for people; distances in % of the object's size."""
        scores = zip(self.thresholds, self.f_scores, strict=True)
        return [
            ("accuracy", f"{self.accuracy:.3%}"),
            ("completeness", f"{self.completeness:.3%}"),
            ("Chamfer distance", f"{self.chamfer:.3%}"),
            *((f"F-score at {100 * t:.3g}%", f"{f:.4f}") for t, f in scores),
            ("normal agreement", f"{self.normal_agreement:.4f}"),
            ("non-manifold edges", f"{self.non_manifold_edge_share:.3%}"),
            ("open edges", f"{self.open_edge_share:.3%}"),
            ("connected parts", f"{self.components:,}"),
            ("triangles", f"{self.triangles:,}"),
            ("triangles on the object", f"{self.object_triangles:,}"),
        ]


def read_reference(scene_dir: Path) -> Reference:
    """Read the true surface of a rendered scene, in the coordinates of its files.

    Raises:
        UserError: The scene has none, or a damaged one.
    """
    scene_dir = Path(scene_dir)
    for name in (OBJECT_FILE, VISIBLE_FILE, FACTS_FILE):
        if not (scene_dir / name).is_file():
            raise UserError(
                f"{scene_dir} has no {name}: its geometry is not known, so a mesh cannot be "
                f"measured; use a rendered scene such as the one of {command_text('demo')}"
            )
    path = scene_dir / FACTS_FILE
    facts = conform(read_json(path), _Facts, path, "make the scene again")
    box = np.array(facts.object_bbox)
    ground = None if facts.ground_bbox is None else np.array(facts.ground_bbox)
    axis = "xyz".index(facts.up[-1])
    sign = -1 if facts.up.startswith("-") else 1
    n_object = facts.gt_visible_object_samples
    mesh = triangle_mesh.read_mesh_ply(scene_dir / OBJECT_FILE)
    points, normals = _read_visible(scene_dir / VISIBLE_FILE)
    flat = float((box[1] - box[0]).max()) <= 0
    if flat or not 0 < n_object <= len(points) or mesh.n_faces == 0:
        raise UserError(
            f"{scene_dir}: the ground truth has no size, no visible sample or no triangle of the "
            "object; make the scene again"
        )
    return make_reference(mesh, points[:n_object], normals[:n_object], box, ground, axis, sign)


def make_reference(
    mesh: TriangleMesh,
    visible_points: np.ndarray,
    visible_normals: np.ndarray,
    box: np.ndarray,
    ground: np.ndarray | None = None,
    axis: int = 2,
    sign: int = 1,
) -> Reference:
    """Set up a comparison by the rules at the top of this file.

    box, ground: low and high corner of the object and of a flat ground, (2, 3); sign: 1 when the
    axis points up, -1 when down.
    """
    size = float((box[1] - box[0]).max())
    low = box[0] - MARGIN * size
    high = box[1] + MARGIN * size
    if ground is not None:
        top = ground[1, axis] if sign > 0 else ground[0, axis]
        # The ground nearest to a point of the box is below that point.
        reach = np.maximum(low, ground[0]), np.minimum(high, ground[1])
        mesh = _with_ground(mesh, *reach, axis, top)
        (low if sign > 0 else high)[axis] = top + sign * CLEARANCE * size
    return Reference(mesh, visible_points, visible_normals, low, high, size)


def compare_surfaces(
    mesh: TriangleMesh,
    reference: Reference,
    *,
    n_samples: int = N_SAMPLES,
    seed: int = 0,
    device: torch.device | str = "cpu",
    thresholds: Sequence[float] = THRESHOLDS,
) -> MeshQuality:
    """Measure a mesh against the true surface by samples of both.

    Raises:
        UserError: The mesh has no surface where the object is.
    """
    # The object is brought to size 1 at the origin, where float32 resolves it best.
    origin = (reference.low + reference.high) / 2
    size = reference.size
    low = (reference.low - origin) / size
    high = (reference.high - origin) / size
    vertices = (mesh.vertices - origin) / size
    true_vertices = (reference.surface.vertices - origin) / size
    visible_points = (reference.visible_points - origin) / size
    is_close = _meets(vertices[mesh.faces], low - _REACH, high + _REACH)
    faces = mesh.faces[is_close]
    samples = _samples_inside(vertices, faces, low, high, n_samples, seed)
    if len(samples) == 0:
        raise UserError(
            "the mesh has no surface where the object is (box "
            f"{reference.low.round(3).tolist()} to {reference.high.round(3).tolist()}); check that "
            "mesh and scene belong together"
        )
    to_truth = Surface(true_vertices, reference.surface.faces, device).nearest(samples.points)
    to_mesh = Surface(vertices, faces, device).nearest(visible_points)
    agreements = [
        _normal_agreement(samples.normals, to_truth.normals),
        _normal_agreement(reference.visible_normals, to_mesh.normals),
    ]
    edges = triangle_mesh.topology(mesh)
    has_corner_inside = _inside(vertices[faces], low, high).any(axis=1)
    return MeshQuality(
        accuracy=float(to_truth.distances.mean()),
        completeness=float(to_mesh.distances.mean()),
        thresholds=tuple(thresholds),
        precisions=_shares_within(to_truth.distances, thresholds),
        recalls=_shares_within(to_mesh.distances, thresholds),
        normal_agreement=float(np.mean(agreements)),
        object_triangles=int(has_corner_inside.sum()),
        non_manifold_edge_share=edges.non_manifold_edge_share,
        open_edge_share=edges.open_edge_share,
        components=edges.components,
        triangles=mesh.n_faces,
    )


def _normal_agreement(first: np.ndarray, second: np.ndarray) -> float:
    """Return the mean absolute cosine between unit normals. (N, 3), (N, 3)"""
    return np.abs((first * second).sum(axis=1)).mean()


def _shares_within(distances: np.ndarray, thresholds: Sequence[float]) -> tuple[float, ...]:
    """Return the shares of distances, (N,), below each threshold."""
    return tuple(float((distances < threshold).mean()) for threshold in thresholds)


def _meets(corners: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return whether the box of each face meets a box. corners: (F, 3, 3); (F,) bool"""
    return ((corners.min(axis=1) <= high) & (corners.max(axis=1) >= low)).all(axis=1)


def _inside(points: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.all((points >= low) & (points <= high), axis=-1)


def _samples_inside(
    vertices: np.ndarray,
    faces: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    count: int,
    seed: int,
) -> AreaSamples:
    """Return about ``count`` even samples of that part of a mesh that lies in a box."""
    faces = faces[_meets(vertices[faces], low, high)]
    samples = sample_surface(vertices, faces, count, seed)
    inside = _inside(samples.points, low, high)
    if not inside.all():
        # Faces that reach far outside took samples away: draw more, so that enough are inside.
        drawn = min(_MAX_DRAWN, int(count / max(inside.mean(), 1e-6)))
        samples = sample_surface(vertices, faces, drawn, seed)
        inside = _inside(samples.points, low, high)
    return samples.select(inside)


def _with_ground(
    mesh: TriangleMesh, low: np.ndarray, high: np.ndarray, axis: int, height: float
) -> TriangleMesh:
    corners = np.tile(low, (4, 1))
    u, v = (k for k in range(3) if k != axis)
    corners[1:3, u] = high[u]
    corners[2:, v] = high[v]
    corners[:, axis] = height
    faces = np.array([[0, 1, 2], [0, 2, 3]])
    ground = TriangleMesh(corners, faces, np.zeros((4, 3), dtype=np.uint8))
    return triangle_mesh.merge_meshes([mesh, ground])


def _read_visible(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read points and unit normals of a PLY. (N, 3) each"""
    require_regular_file(path)
    with ply_errors(path, "make the scene again"):
        table = PlyData.read(str(path))["vertex"].data
        points, normals = (columns_of(table, names) for names in _PAIRS)
    length = np.linalg.norm(normals, axis=1, keepdims=True)
    return points, normals / np.where(length > 0, length, 1)
