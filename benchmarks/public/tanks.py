# SPDX-License-Identifier: Apache-2.0
"""Protocol of Tanks and Temples: precision, recall and F-score at a threshold for each scene.

Written from the paper (Knapitsch et al., SIGGRAPH 2017, sections 4 and 5) and the file formats of
the training set:

- The similarity that takes the cameras of the reconstruction to those of the data set is fitted
  robustly, and refined by the iterated closest points of mesh and scan, in three passes.
- What is outside of the scene's crop volume is removed from both.
- Both become the means of voxels of half the threshold.
- Precision is the share of the reconstruction nearer to the scan than the threshold, recall the
  share of the scan nearer to the reconstruction.

A mesh is not a point set, and papers differ from the data set here. ``classic`` takes the corners
and the centres of the triangles, as the papers of Gaussian splatting do; it depends on how the mesh
is divided. ``uniform`` takes points that are even in area.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from scipy.spatial import KDTree

from benchmarks.public.points import (
    corner_and_center_points,
    distances_to,
    even_points,
    voxel_means,
)
from gaussian_splatting.formats.ply import read_point_table
from sugar_maps.similarity import Similarity, least_squares, robust_fit
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_utils.errors import UserError
from sugar_utils.files import read_json
from sugar_utils.schemas import Coordinate, conform

THRESHOLDS = {
    "Barn": 0.01,
    "Caterpillar": 0.005,
    "Church": 0.025,
    "Courthouse": 0.025,
    "Ignatius": 0.003,
    "Meetingroom": 0.01,
    "Truck": 0.005,
}
"""Distances in metres below which points agree."""

SAMPLES_PER_CELL = 4.0  # of half a threshold's square, for uniform points
ICP_STEPS = 20  # of each pass
ICP_PASSES = ((1.0, 80.0), (0.5, 20.0), (0.5, 2.0))
"""Voxels, and largest distances of pairs, in thresholds."""

_MIN_PAIRS = 10  # of closest points, below which a pass ends
_AXES = {"X": 0, "Y": 1, "Z": 2}
_Corner = tuple[Coordinate, Coordinate, Coordinate]


class _CropFile(msgspec.Struct):
    """The ``.json`` of a scene: a polygon, extruded along an axis."""

    orthogonal_axis: Literal["X", "Y", "Z"]
    axis_min: Coordinate
    axis_max: Coordinate
    bounding_polygon: list[_Corner]


@dataclass(frozen=True)
class CropVolume:
    """A polygon in two axes, extruded along the third."""

    axis: int  # along which it is extruded
    low: float  # along this axis, metres
    high: float
    polygon: np.ndarray  # corners in the other two axes, (K, 2) metres

    def contains(self, points: np.ndarray) -> np.ndarray:
        """Return whether points, (N, 3), are inside: an odd number of edges to their right."""
        flat = np.delete(points, self.axis, axis=1)
        is_inside = np.zeros(len(points), bool)
        for start, end in zip(self.polygon, np.roll(self.polygon, -1, axis=0), strict=True):
            if start[1] == end[1]:
                continue
            crosses = (start[1] > flat[:, 1]) != (end[1] > flat[:, 1])
            share = (flat[:, 1] - start[1]) / (end[1] - start[1])
            is_inside ^= crosses & (flat[:, 0] < start[0] + share * (end[0] - start[0]))
        along = points[:, self.axis]
        return is_inside & (along >= self.low) & (along <= self.high)


@dataclass(frozen=True)
class TanksTruth:
    """The scan of a scene, its cameras, and where it counts; all in metres."""

    points: np.ndarray  # (N, 3)
    centers: np.ndarray  # centre of each image's camera, in the order of the images, (C, 3)
    volume: CropVolume
    threshold: float

    def cropped(self, points: np.ndarray) -> np.ndarray:
        """Return the points, (N, 3), in the crop volume."""
        return points[self.volume.contains(points)]


def read_truth(folder: Path, name: str) -> TanksTruth:
    """Read the scan, the crop volume and the cameras of a scene of the training set.

    Args:
        folder: Has ``NAME.ply``, ``NAME.json``, ``NAME_COLMAP_SfM.log`` and ``NAME_trans.txt``.

    Raises:
        UserError: A file is missing or damaged.
    """
    names = (f"{name}.ply", f"{name}.json", f"{name}_COLMAP_SfM.log", f"{name}_trans.txt")
    for file_name in names:
        if not (folder / file_name).is_file():
            raise UserError(
                f"{folder / file_name}: missing; unpack the training set of Tanks and Temples, or "
                "name its folder with --truth"
            )
    scan, crop, trajectory, matrix = (folder / file_name for file_name in names)
    to_scan = _read_numbers(matrix).reshape(-1, 4)
    centers = read_trajectory(trajectory)[:, :3, 3]
    return TanksTruth(
        points=read_point_table(scan)[0],
        centers=centers @ to_scan[:3, :3].T + to_scan[:3, 3],
        volume=read_volume(crop),
        threshold=THRESHOLDS[name],
    )


def read_volume(path: Path) -> CropVolume:
    """Read a crop volume."""
    content = conform(read_json(path), _CropFile, path, "unpack the training set again")
    axis = _AXES[content.orthogonal_axis]
    polygon = np.delete(np.array(content.bounding_polygon, np.float64), axis, axis=1)
    return CropVolume(axis, content.axis_min, content.axis_max, polygon)


def read_trajectory(path: Path) -> np.ndarray:
    """Read camera-to-world matrices: three whole numbers, then four rows of a matrix. (C, 4, 4)"""
    numbers = _read_numbers(path)
    if len(numbers) == 0 or len(numbers) % 19:
        raise UserError(f"{path}: no trajectory of 5 lines for each image; unpack it again")
    return numbers.reshape(-1, 19)[:, 3:].reshape(-1, 4, 4)


def _read_numbers(path: Path) -> np.ndarray:
    try:
        return np.array(path.read_text(encoding="utf-8").split(), np.float64)
    except ValueError as error:
        raise UserError(f"{path}: holds words that are no numbers; unpack it again") from error


def closest_point_passes(points: np.ndarray, truth: TanksTruth, start: Similarity) -> Similarity:
    """Refine a similarity from the reconstruction to the scan by iterated closest points.

    Args:
        points: Of the reconstruction, in its world. (N, 3)
        truth: The scan.
        start: The similarity of the cameras.
    """
    similarity = start
    scan = truth.cropped(truth.points)
    for voxel, reach in ICP_PASSES:
        targets = voxel_means(scan, voxel * truth.threshold)
        sources = voxel_means(truth.cropped(similarity.moved(points)), voxel * truth.threshold)
        if min(len(targets), len(sources)) < _MIN_PAIRS:
            return similarity
        sources = similarity.inverse.moved(sources)
        tree = KDTree(targets)
        for _ in range(ICP_STEPS):
            limit = reach * truth.threshold
            moved = similarity.moved(sources)
            distances, rows = tree.query(moved, distance_upper_bound=limit, workers=-1)
            pairs = np.flatnonzero(np.isfinite(distances))
            if len(pairs) < _MIN_PAIRS:
                break
            nearest = np.asarray(rows)[pairs]
            similarity = least_squares(sources[pairs], targets[nearest])
    return similarity


def score_points(points: np.ndarray, truth: TanksTruth) -> dict[str, float]:
    """Compare points, (N, 3) in metres, with a scan: ``precision``, ``recall``, ``f_score``."""
    size = truth.threshold / 2
    sources = voxel_means(truth.cropped(points), size)
    targets = voxel_means(truth.cropped(truth.points), size)
    precision = _share_within(distances_to(targets, sources), truth.threshold)
    recall = _share_within(distances_to(sources, targets), truth.threshold)
    total = precision + recall
    f_score = 2 * precision * recall / total if total > 0 else 0.0
    return {"precision": precision, "recall": recall, "f_score": f_score}


def _share_within(distances: np.ndarray, threshold: float) -> float:
    return float((distances < threshold).mean()) if len(distances) else 0.0


def score_mesh(
    mesh: TriangleMesh, centers: np.ndarray, rows: np.ndarray, truth: TanksTruth
) -> dict[str, float]:
    """Align a mesh with a scan, and compare them; figures of ``uniform`` points have its name.

    Args:
        mesh: In the world of the reconstruction.
        centers: Of the cameras of the reconstruction, in the same world. (C, 3)
        rows: Their images, as rows of the trajectory. (C,)
    """
    cameras = robust_fit(centers, truth.centers[rows]).similarity
    classic = corner_and_center_points(mesh)
    similarity = closest_point_passes(classic, truth, cameras)
    spacing = truth.threshold / 2 / similarity.scale
    scores = score_points(similarity.moved(classic), truth)
    uniform_points = even_points(_near_volume(mesh, similarity, truth), spacing, SAMPLES_PER_CELL)
    uniform = score_points(similarity.moved(uniform_points), truth)
    return scores | {f"{name}_uniform": value for name, value in uniform.items()}


def _near_volume(mesh: TriangleMesh, similarity: Similarity, truth: TanksTruth) -> TriangleMesh:
    """Return the faces of a mesh with a corner in the crop volume: samples elsewhere are lost."""
    is_inside = truth.volume.contains(similarity.moved(mesh.vertices))
    return TriangleMesh(mesh.vertices, mesh.faces[is_inside[mesh.faces].any(axis=1)], mesh.colors)
