# SPDX-License-Identifier: Apache-2.0
"""Protocol of DTU: accuracy, completeness and their mean, in millimetres.

Written from the description of the data set (Jensen et al., CVPR 2014; Aanæs et al., IJCV 2016)
and from what the papers of Gaussian splatting say about their use of it (2DGS, section 6):

- Parts of the mesh that project outside of the object's mask in any image are removed. Masks are
  those of IDR, grown by ``MASK_MARGIN``.
- The mesh becomes points, thinned so that no two are closer than ``SPACING``.
- Accuracy is the mean distance of the points to the scan. Only points count that are in the
  observation mask, a grid of voxels.
- Completeness is the mean distance of the scan to the points. Only points of the scan count that
  are above the plane of the table.
- Distances of ``CAP`` and more are left out of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.io import loadmat
from scipy.ndimage import distance_transform_edt

from benchmarks.public.points import distances_to, even_points, thinned
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.formats.ply import read_point_table
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_utils.errors import UserError, explained

SPACING = 0.2  # mm
CAP = 20.0  # mm
MASK_MARGIN = 24.0  # pixels of images of 1600 x 1200
MASKED_WIDTH = 1600  # pixels, of the images that the margin is for
SAMPLES_PER_CELL = 2.0  # of SPACING x SPACING, before points are thinned
_TRUTH_FOLDERS = ("", "MVS Data", "MVS_Data", "SampleSet/MVS Data", "SampleSet/MVS_Data")


@dataclass(frozen=True)
class DtuTruth:
    """The scan of an object, and where it counts."""

    points: np.ndarray  # (N, 3) mm
    observed: np.ndarray  # voxels that the cameras observe, (X, Y, Z) bool
    low: np.ndarray  # centre of the first voxel, (3,) mm
    voxel: float  # side of a voxel, mm
    plane: np.ndarray  # (4,): positive above the table, with a 1 after the point

    def in_mask(self, points: np.ndarray) -> np.ndarray:
        """Return whether points, (N, 3) mm, are in observed voxels. (N,) bool"""
        cells = np.rint((points - self.low) / self.voxel).astype(np.int64)
        is_inside = ((cells >= 0) & (cells < self.observed.shape)).all(axis=1)
        is_counted = np.zeros(len(points), bool)
        is_counted[is_inside] = self.observed[tuple(cells[is_inside].T)]
        return is_counted

    def above_table(self) -> np.ndarray:
        """Return the points of the scan that count. (M, 3) mm"""
        return self.points[self.points @ self.plane[:3] + self.plane[3] > 0]


def read_truth(folder: Path, number: int) -> DtuTruth:
    """Read the scan of an object, with mask and plane, from the folder ``MVS Data`` of DTU.

    Args:
        folder: That folder, or one above it.
        number: Of the scan.

    Raises:
        UserError: A file is missing or damaged.
    """
    candidates = [folder / name for name in _TRUTH_FOLDERS]
    root = next((path for path in candidates if (path / "ObsMask").is_dir()), None)
    if root is None:
        raise UserError(
            f"{folder}: no folder ObsMask of DTU's SampleSet; unpack SampleSet.zip there, and "
            "Points.zip beside ObsMask, or name their folder with --truth"
        )
    mask = _read_mat(root / "ObsMask" / f"ObsMask{number}_10.mat", ("ObsMask", "BB", "Res"))
    plane = _read_mat(root / "ObsMask" / f"Plane{number}.mat", ("P",))
    scan = root / "Points" / "stl" / f"stl{number:03d}_total.ply"
    if not scan.is_file():
        raise UserError(f"{scan}: missing; unpack Points.zip of DTU into {root}")
    return DtuTruth(
        points=read_point_table(scan)[0],
        observed=mask["ObsMask"].astype(bool),
        low=mask["BB"].astype(np.float64)[0],
        voxel=float(mask["Res"].ravel()[0]),
        plane=plane["P"].astype(np.float64).ravel(),
    )


def _read_mat(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise UserError(f"{path}: missing; unpack SampleSet.zip of DTU again")
    with explained(f"{path}: cannot be read", "unpack SampleSet.zip again", Exception):
        content = loadmat(str(path))
        return {name: content[name] for name in names}


def inside_masks(
    mesh: TriangleMesh, cameras: Sequence[Camera], masks: Sequence[np.ndarray]
) -> TriangleMesh:
    """Return the faces of a mesh whose corners are in the grown mask of every image.

    Corners outside of an image, or behind it, say nothing.

    Args:
        mesh: In the world of the cameras.
        masks: Of the cameras' images, True where the object is. (H, W) bool each
    """
    is_kept = np.ones(mesh.n_vertices, bool)
    for camera, mask in zip(cameras, masks, strict=True):
        height, width = mask.shape
        view = camera.resized(width, height)
        margin = MASK_MARGIN * width / MASKED_WIDTH
        grown = distance_transform_edt(~mask) <= margin if mask.any() else mask
        points = mesh.vertices @ view.rotation.T + view.translation
        depths = np.where(points[:, 2] > 0, points[:, 2], np.nan)
        columns = np.floor(view.fx * points[:, 0] / depths + view.cx)
        rows = np.floor(view.fy * points[:, 1] / depths + view.cy)
        is_shown = (columns >= 0) & (columns < width) & (rows >= 0) & (rows < height)
        pixels = rows[is_shown].astype(np.int64), columns[is_shown].astype(np.int64)
        is_kept[is_shown] &= grown[pixels]
    return replace(mesh, faces=mesh.faces[is_kept[mesh.faces].all(axis=1)])


def score_points(points: np.ndarray, truth: DtuTruth) -> dict[str, float]:
    """Compare thinned points, (N, 3) mm, with a scan: ``accuracy``, ``completeness``, ``mean``.

    Without any distance below ``CAP`` a figure is ``CAP``.
    """
    to_scan = distances_to(truth.points, points[truth.in_mask(points)])
    to_points = distances_to(points, truth.above_table())
    accuracy = _capped_mean(to_scan)
    completeness = _capped_mean(to_points)
    return {
        "accuracy": accuracy,
        "completeness": completeness,
        "mean": (accuracy + completeness) / 2,
    }


def _capped_mean(distances: np.ndarray) -> float:
    is_near = distances < CAP
    return float(distances[is_near].mean()) if is_near.any() else CAP


def score_mesh(mesh: TriangleMesh, truth: DtuTruth) -> dict[str, float]:
    """Compare a mesh in mm, without what is outside of the masks, with a scan."""
    return score_points(thinned(even_points(mesh, SPACING, SAMPLES_PER_CELL), SPACING), truth)
