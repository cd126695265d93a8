# SPDX-License-Identifier: Apache-2.0
"""Observations of a reconstruction: points that images observe, and how well they fit.

Poses that do not fit their keypoints are estimated again (PnP in RANSAC); so are points that do not
fit their tracks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gaussian_splatting.data.cameras import Camera
from sugar_utils.errors import Notify, shortened
from sugar_utils.flags import integer, name_list
from sugar_utils.libraries import load_pycolmap
from sugar_utils.settings import flag

if TYPE_CHECKING:
    import pycolmap

# Limit of the median reprojection error of an image: times the median one, pixels.
WORSE = 3.0
WORST_PIXELS = 2.0
# The same for the median error of a point over its track.
POINT_WORSE = 10.0
POINT_PIXELS = 8.0
_MIN_INLIERS = 12
_MIN_INLIER_SHARE = 0.5
_MIN_TRACK = 3
_MAX_OBSERVATIONS = 1_000_000

MAX_POINTS = 50_000
"""An even sample of the points of larger models is used: reading a track takes microseconds."""
DENSE = 4
"""A reconstruction whose median image observes fewer than this many times the least number is
sparse as a whole, or made by hand, and says nothing about single images."""
ALL_VIEWS = "all"


def median(values: Iterable[float]) -> float:
    """Return the median of the finite values; nan without any."""
    finite = [value for value in values if np.isfinite(value)]
    return float(np.median(finite)) if finite else np.nan


def deviation(differences: Iterable[float]) -> float:
    """Return the standard deviation of differences from the median, estimated by their median."""
    return 1.4826 * median(map(abs, differences))


def error_limit(errors: Iterable[float]) -> float:
    """Return the largest median reprojection error of an image that fits, in pixels."""
    middle = median(errors)
    return np.inf if np.isnan(middle) else max(WORSE * middle, WORST_PIXELS)


def far_below(
    values: Mapping[Any, float], gap: float, spread: float
) -> tuple[float, dict[Any, float]]:
    """Return the median, and the values that are far below it.

    Args:
        gap: Least distance from the median.
        spread: Least distance in standard deviations.
    """
    middle = median(values.values())
    standard_deviation = deviation(value - middle for value in values.values())
    limit = middle - max(gap, spread * standard_deviation)
    return middle, {name: value for name, value in values.items() if value < limit}


def repair_reconstruction(model: pycolmap.Reconstruction, notify: Notify) -> None:
    """Estimate poses and points again that do not fit the keypoints.

    Args:
        model: ``pycolmap.Reconstruction``, changed in place. Very large ones are left as they are.
    """
    if model.compute_num_observations() > _MAX_OBSERVATIONS:
        return
    tracks = _Tracks(model)
    if not tracks.images:
        return
    median_errors = {i: float(np.median(tracks.errors(i))) for i in tracks.images}
    limit = error_limit(median_errors.values())
    repaired = []
    for image_id, error in median_errors.items():
        if error > limit and tracks.estimate_pose(image_id, limit):
            repaired.append(f"{model.images[image_id].name} ({error:.1f} pixels off)")
    if repaired:
        notify(
            f"estimated the poses of {len(repaired)} of {len(median_errors)} images again, which "
            f"did not fit their keypoints: {shortened(repaired, 5)}"
        )
    wrong_rows, limit = tracks.wrong_points()
    if wrong_rows:
        n = len(model.points3D)
        n_wrong = len(wrong_rows)
        n_repaired = sum(tracks.triangulate(row, limit) for row in wrong_rows)
        notify(
            f"{n_wrong:,} of {n:,} points of the reconstruction do not lie where the images "
            f"observe them; triangulated {n_repaired:,} again and left out "
            f"{n_wrong - n_repaired:,}"
        )


def positions_and_colors(points: Sequence[pycolmap.Point3D]) -> tuple[np.ndarray, np.ndarray]:
    """Return positions, (P, 3) float64 world units, and colours, (P, 3) uint8, of points."""
    positions = np.array([point.xyz for point in points], dtype=np.float64)
    colors = np.array([point.color for point in points], dtype=np.uint8)
    return positions.reshape(-1, 3), colors.reshape(-1, 3)


def reprojection_errors(
    model: pycolmap.Reconstruction, image_id: int, keypoints: np.ndarray, points: np.ndarray
) -> np.ndarray:
    """Return the distances of projected points from keypoints. (n,) pixels, inf behind the camera

    Args:
        model: ``pycolmap.Reconstruction``.
        keypoints: (n, 2) pixels
        points: (n, 3) world units
    """
    image = model.images[image_id]
    pose = np.array(image.cam_from_world().matrix())
    view = points @ pose[:, :3].T + pose[:, 3]
    projected = model.cameras[image.camera_id].img_from_cam(view, check_cheirality=False)
    distances = np.linalg.norm(projected - keypoints, axis=1)
    return np.where(view[:, 2] > 0, distances, np.inf)


class _Tracks:
    """Keypoints with a 3D point, of all registered images."""

    def __init__(self, model: pycolmap.Reconstruction) -> None:
        self._model = model
        # Numbers of points are of 64 bits without a sign.
        self._ids = np.array(sorted(model.points3D), dtype=np.uint64)
        self._points = np.array([model.points3D[i].xyz for i in self._ids]).reshape(-1, 3)
        # Keypoints, (n, 2), and rows of their points, (n,), by image.
        self.images: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for image_id in model.reg_image_ids():
            observed = model.images[image_id].get_observation_points2D()
            numbers = np.array([point.point3D_id for point in observed], dtype=np.uint64)
            # Points of a damaged model may be missing.
            present = np.isin(numbers, self._ids)
            if present.any():
                keypoints = np.array([point.xy for point in observed])[present]
                rows = np.searchsorted(self._ids, numbers[present])
                self.images[image_id] = (keypoints, rows)

    def errors(self, image_id: int) -> np.ndarray:
        """Return the reprojection errors of an image. (n,) pixels"""
        keypoints, rows = self.images[image_id]
        return reprojection_errors(self._model, image_id, keypoints, self._points[rows])

    def estimate_pose(self, image_id: int, limit: float) -> bool:
        """Estimate the pose of an image from its keypoints; return whether that succeeded."""
        pycolmap = load_pycolmap()
        image = self._model.images[image_id]
        frame = image.frame
        keypoints, rows = self.images[image_id]
        if frame is None or len(rows) < _MIN_INLIERS or len(list(frame.image_ids)) > 1:
            return False
        options = pycolmap.AbsolutePoseEstimationOptions()
        options.ransac.max_error = limit
        options.ransac.random_seed = 0
        previous_error = np.median(self.errors(image_id))
        previous_pose = image.cam_from_world()
        estimate = pycolmap.estimate_and_refine_absolute_pose(
            keypoints, self._points[rows], self._model.cameras[image.camera_id], options
        )
        min_inliers = max(_MIN_INLIERS, _MIN_INLIER_SHARE * len(rows))
        if estimate is None or estimate["num_inliers"] < min_inliers:
            return False
        frame.set_cam_from_world(image.camera_id, estimate["cam_from_world"])
        if np.median(self.errors(image_id)) < min(previous_error, limit):
            return True
        frame.set_cam_from_world(image.camera_id, previous_pose)
        return False

    def wrong_points(self) -> tuple[list[int], float]:
        """Return the rows of points whose median error is far above the others, and the limit."""
        rows = np.concatenate([rows for _, rows in self.images.values()])
        errors = np.concatenate([self.errors(i) for i in self.images])
        order = np.lexsort((errors, rows))
        rows = rows[order]
        errors = errors[order]
        present, first, count = np.unique(rows, return_index=True, return_counts=True)
        medians = errors[first + count // 2]
        limit = max(POINT_WORSE * float(np.median(medians)), POINT_PIXELS)
        return present[medians > limit].tolist(), limit

    def triangulate(self, row: int, limit: float) -> bool:
        """Estimate a point from its track, or delete it; return whether it was estimated."""
        pycolmap = load_pycolmap()
        number = int(self._ids[row])
        keypoints = []
        poses = []
        cameras = []
        for element in self._model.points3D[number].track.elements:
            if element.image_id not in self.images:
                continue
            image = self._model.images[element.image_id]
            keypoints.append(image.points2D[element.point2D_idx].xy)
            poses.append(image.cam_from_world())
            cameras.append(self._model.cameras[image.camera_id])
        options = pycolmap.EstimateTriangulationOptions()
        options.residual_type = pycolmap.TriangulationResidualType.REPROJECTION_ERROR
        options.ransac.max_error = limit
        options.ransac.random_seed = 0
        estimate = None
        if len(keypoints) >= _MIN_TRACK:
            estimate = pycolmap.estimate_triangulation(np.array(keypoints), poses, cameras, options)
        if estimate is None:
            self._model.delete_point3D(number)
            return False
        self._model.points3D[number].xyz = estimate["xyz"]
        return True


@dataclass(frozen=True)
class ViewOptions:
    """Flags for the views that are left out."""

    min_observations: int = flag(
        20,
        "leave out photographs that observe fewer points of the reconstruction than this, or "
        "that fit it much worse than the others do (3 times the median reprojection error and 2 "
        "pixels); 0 keeps all",
        group="input",
        parse=integer,
        metavar="N",
        no_effect_when="where the reconstruction has no tracks, or few in all photographs",
    )

    keep_views: tuple[str, ...] = flag(
        (),
        "names of views to keep although they contradict the rest of the capture (wrong pose, "
        "image or mask), separated by commas; all switches the checks off",
        group="input",
        parse=name_list,
        metavar="NAME,...",
    )

    @property
    def keeps_all(self) -> bool:
        """Whether no view is checked and left out."""
        return ALL_VIEWS in self.keep_views


KEEP_ALL = ViewOptions(0, (ALL_VIEWS,))


@dataclass(frozen=True)
class ViewFit:
    """The fit of an image to the reconstruction."""

    n_points: int  # that it observes
    error: float  # median reprojection error in pixels; nan without points


@dataclass(frozen=True)
class Observations:
    """Points of a reconstruction, and the images that observe them."""

    points: np.ndarray  # positions, (P, 3) float32 world units
    # Mean reprojection errors, (P,) float32 pixels of the images as calibrated.
    errors: np.ndarray
    lengths: np.ndarray  # images that observe each point, (P,) int32
    # Rows of the above that an image observes, by its name, (n,) int32 each.
    rows: dict[str, np.ndarray]
    fits: dict[str, ViewFit] = field(default_factory=dict)  # by name of the image
    # Colours of the points; None where they are not known, (P, 3) uint8.
    rgb: np.ndarray | None = None

    def only(self, names: Iterable[str]) -> Observations:
        """Return the observations of some images."""
        names = list(names)
        rows = {name: self.rows[name] for name in names if name in self.rows}
        fits = {name: self.fits[name] for name in names if name in self.fits}
        return replace(self, rows=rows, fits=fits)

    def moved_back(self, offset: np.ndarray) -> Observations:
        """Return the same in a world from which an offset, (3,), is subtracted."""
        return replace(self, points=(self.points - offset).astype(np.float32))

    def seen(self, camera: Camera) -> SeenPoints | None:
        """Return the points that a camera's image observes, in its view; None without any."""
        rows = self.rows.get(camera.name)
        if rows is None:
            return None
        pixels, depths, inside = camera.project(self.points[rows].astype(np.float64))
        if not inside.any():
            return None
        inside_rows = rows[inside]
        return SeenPoints(
            rows=inside_rows,
            pixels=pixels[inside],
            depths=depths[inside],
            errors=self.errors[inside_rows],
            lengths=self.lengths[inside_rows],
            rgb=None if self.rgb is None else self.rgb[inside_rows],
        )


@dataclass(frozen=True)
class SeenPoints:
    """Points that an image observes, in the view of its camera."""

    rows: np.ndarray  # of the points in :class:`Observations`, (n,)
    pixels: np.ndarray  # x and y in the image, (n, 2) pixels
    depths: np.ndarray  # along the view axis, (n,) world units
    errors: np.ndarray  # mean reprojection errors, (n,) pixels of the images as calibrated
    lengths: np.ndarray  # images that observe each point, (n,)
    # Colours of the points; None where they are not known, (n, 3) uint8.
    rgb: np.ndarray | None = None


@dataclass(frozen=True)
class CaptureModel:
    """Cameras and points of a capture, as a reader found them in its files."""

    train_cameras: list[Camera]
    test_cameras: list[Camera] | None  # None: no split of its own
    points: np.ndarray  # ordered by their COLMAP number, (P, 3) float32 world units; P may be 0
    points_rgb: np.ndarray  # their colours, (P, 3) uint8
    description: str
    observations: Observations | None = None  # None where no tracks are kept
    # Offset that was subtracted from the coordinates of the files, in world units. (3,) float64
    offset: np.ndarray = field(default_factory=partial(np.zeros, 3))

    @property
    def cameras(self) -> list[Camera]:
        """All cameras."""
        return [*self.train_cameras, *(self.test_cameras or [])]


def hardly_known(observations: Observations | None, options: ViewOptions) -> dict[str, str]:
    """Return the views that observe few points or fit badly, by name, with the reason."""
    fits = {} if observations is None else observations.fits
    least = options.min_observations
    if least <= 0 or not fits:
        return {}
    if np.median([fit.n_points for fit in fits.values()]) < DENSE * least:
        return {}
    limit = error_limit(fit.error for fit in fits.values())
    reasons = {}
    for name, fit in fits.items():
        if fit.n_points < least:
            reasons[name] = f"{fit.n_points} points"
        elif fit.error > limit:
            reasons[name] = f"{fit.error:.1f} pixels off"
    return reasons
