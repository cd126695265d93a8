# SPDX-License-Identifier: Apache-2.0
"""What a reconstruction knows of its images: points they observe, and how well they fit.

The keypoints of an image and the points that the other images agree on give its pose (PnP in
RANSAC), and wrong ones are estimated again; so are points that do not fit their tracks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from gaussian_splatting.data.cameras import Camera
from sugar_utils.errors import Notify, shortened
from sugar_utils.flags import integer, name_list
from sugar_utils.libraries import load_pycolmap
from sugar_utils.settings import flag

# median reprojection error of an image: times the median, pixels
WORSE = 3.0
WORST_PIXELS = 2.0
# the same for the median error of a point over its track
POINT_WORSE = 10.0
POINT_PIXELS = 8.0
_MIN_INLIERS = 12
_MIN_INLIER_SHARE = 0.5
_MIN_TRACK = 3
_MAX_OBSERVATIONS = 1_000_000

MAX_POINTS = 50_000
"""Of larger models an even sample of the points is kept: reading tracks takes microseconds each."""
DENSE = 4
"""A reconstruction whose median photograph observes fewer than this many times the least number is
sparse as a whole, or made by hand, and says nothing about single photographs."""
ALL_VIEWS = "all"


def median(values: Iterable[float]) -> float:
    """Median of those that are finite; nan where none is."""
    finite = [value for value in values if np.isfinite(value)]
    return float(np.median(finite)) if finite else np.nan


def deviation(apart: Iterable[float]) -> float:
    """Standard deviation of differences from the median, by their median."""
    return 1.4826 * median(map(abs, apart))


def error_limit(errors: Iterable[float]) -> float:
    """Largest median reprojection error in pixels of an image that agrees with the others."""
    middle = median(errors)
    return np.inf if np.isnan(middle) else max(WORSE * middle, WORST_PIXELS)


def far_below(
    values: Mapping[Any, float], gap: float, spread: float
) -> tuple[float, dict[Any, float]]:
    """Median, and what lies further below it than a gap, and than so many standard deviations."""
    middle = median(values.values())
    limit = middle - max(gap, spread * deviation(value - middle for value in values.values()))
    return middle, {name: value for name, value in values.items() if value < limit}


def repair_reconstruction(model: Any, notify: Notify) -> None:
    """Estimate poses and points again that do not fit the keypoints.

    Args:
        model: ``pycolmap.Reconstruction``, changed in place. Very large ones are left as they are.
    """
    if model.compute_num_observations() > _MAX_OBSERVATIONS:
        return
    tracks = _Tracks(model)
    if not tracks.images:
        return
    medians = {i: float(np.median(tracks.errors(i))) for i in tracks.images}
    limit = error_limit(medians.values())
    repaired = [
        f"{model.images[i].name} ({median:.1f} pixels off)"
        for i, median in medians.items()
        if median > limit and tracks.estimate_pose(i, limit)
    ]
    if repaired:
        notify(
            f"estimated the poses of {len(repaired)} of {len(medians)} images again, which did "
            f"not fit their keypoints: {shortened(repaired, 5)}"
        )
    wrong, limit = tracks.wrong_points()
    if wrong:
        n = len(model.points3D)
        n_found = sum(tracks.triangulate(row, limit) for row in wrong)
        notify(
            f"{len(wrong):,} of {n:,} points of the reconstruction do not lie where the images "
            f"observe them; triangulated {n_found:,} again and left out {len(wrong) - n_found:,}"
        )


def reprojection_errors(
    model: Any, image_id: int, keypoints: np.ndarray, points: np.ndarray
) -> np.ndarray:
    """Distances of the projected points from the keypoints. (n,) pixels, inf behind"""
    image = model.images[image_id]
    pose = np.array(image.cam_from_world().matrix())
    view = points @ pose[:, :3].T + pose[:, 3]
    found = model.cameras[image.camera_id].img_from_cam(view, check_cheirality=False)
    return np.where(view[:, 2] > 0, np.linalg.norm(found - keypoints, axis=1), np.inf)


class _Tracks:
    """Keypoints with a 3D point, of all registered images."""

    def __init__(self, model: Any) -> None:
        self._model = model
        # Numbers of points are of 64 bits without a sign.
        self._ids = np.array(sorted(model.points3D), dtype=np.uint64)
        self._points = np.array([model.points3D[i].xyz for i in self._ids]).reshape(-1, 3)
        self.images: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for image_id in model.reg_image_ids():
            seen = model.images[image_id].get_observation_points2D()
            numbers = np.array([p.point3D_id for p in seen], dtype=np.uint64)
            # Points of a damaged model may be missing.
            present = np.isin(numbers, self._ids)
            if present.any():
                keypoints = np.array([p.xy for p in seen])[present]
                self.images[image_id] = keypoints, np.searchsorted(self._ids, numbers[present])

    def errors(self, image_id: int) -> np.ndarray:
        """As of :func:`reprojection_errors`. (n,)"""
        keypoints, rows = self.images[image_id]
        return reprojection_errors(self._model, image_id, keypoints, self._points[rows])

    def estimate_pose(self, image_id: int, limit: float) -> bool:
        """Estimate the pose of an image from its keypoints; whether that succeeded."""
        pycolmap = load_pycolmap()
        image = self._model.images[image_id]
        frame = image.frame
        keypoints, rows = self.images[image_id]
        if len(rows) < _MIN_INLIERS or len(list(frame.image_ids)) > 1:
            return False
        options = pycolmap.AbsolutePoseEstimationOptions()
        options.ransac.max_error = limit
        options.ransac.random_seed = 0
        before = np.median(self.errors(image_id))
        old = image.cam_from_world()
        found = pycolmap.estimate_and_refine_absolute_pose(
            keypoints, self._points[rows], self._model.cameras[image.camera_id], options
        )
        if found is None or found["num_inliers"] < max(_MIN_INLIERS, _MIN_INLIER_SHARE * len(rows)):
            return False
        frame.set_cam_from_world(image.camera_id, found["cam_from_world"])
        if np.median(self.errors(image_id)) < min(before, limit):
            return True
        frame.set_cam_from_world(image.camera_id, old)
        return False

    def wrong_points(self) -> tuple[list[int], float]:
        """Rows of the points whose median error is far above the others, and the limit."""
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
        """Estimate a point from its track, or delete it; whether it was found."""
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
        found = None
        if len(keypoints) >= _MIN_TRACK:
            found = pycolmap.estimate_triangulation(np.array(keypoints), poses, cameras, options)
        if found is None:
            self._model.delete_point3D(number)
            return False
        self._model.points3D[number].xyz = found["xyz"]
        return True


@dataclass(frozen=True)
class ViewOptions:
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
        return ALL_VIEWS in self.keep_views


KEEP_ALL = ViewOptions(0, (ALL_VIEWS,))


@dataclass(frozen=True)
class ViewFit:
    n_points: int
    error: float


@dataclass(frozen=True)
class Observations:
    points: np.ndarray  # positions, (P, 3) float32 world units
    # Mean reprojection errors, (P,) float32 pixels of the photographs as calibrated.
    errors: np.ndarray
    lengths: np.ndarray  # photographs that observe each point, (P,) int32
    # Rows of the above that a photograph observes, by its name, (n,) int32 each.
    rows: dict[str, np.ndarray]
    fits: dict[str, ViewFit] = field(default_factory=dict)
    # Colours of the points; None where they are not known, (P, 3) uint8.
    rgb: np.ndarray | None = None

    def only(self, names: Iterable[str]) -> Observations:
        names = list(names)
        rows = {n: self.rows[n] for n in names if n in self.rows}
        return replace(self, rows=rows, fits={n: self.fits[n] for n in names if n in self.fits})

    def moved_back(self, offset: np.ndarray) -> Observations:
        """The same in a world from which an offset, (3,), is subtracted."""
        return replace(self, points=(self.points - offset).astype(np.float32))

    def seen(self, camera: Camera) -> SeenPoints | None:
        """What a camera sees of the points that its photograph observes; None for nothing."""
        rows = self.rows.get(camera.name)
        if rows is None:
            return None
        view = self.points[rows].astype(np.float64) @ camera.rotation.T + camera.translation
        depth = view[:, 2]
        pixels = view[:, :2] / np.where(depth > 0, depth, 1.0)[:, None]
        pixels = pixels * (camera.fx, camera.fy) + (camera.cx, camera.cy)
        inside = (depth > 0) & (pixels >= 0).all(axis=1)
        inside &= (pixels < (camera.width, camera.height)).all(axis=1)
        if not inside.any():
            return None
        kept = rows[inside]
        rgb = None if self.rgb is None else self.rgb[kept]
        return SeenPoints(pixels[inside], depth[inside], self.errors[kept], self.lengths[kept], rgb)


@dataclass(frozen=True)
class SeenPoints:
    pixels: np.ndarray  # where they are, (n, 2) pixels
    depths: np.ndarray  # along the view axis, (n,) world units
    errors: np.ndarray  # mean reprojection errors, (n,) pixels of the photographs as calibrated
    lengths: np.ndarray  # photographs that observe each point, (n,)
    # Colours of the points; None where they are not known, (n, 3) uint8.
    rgb: np.ndarray | None = None


@dataclass(frozen=True)
class CaptureModel:
    train_cameras: list[Camera]
    test_cameras: list[Camera] | None  # None: no split of its own
    points: np.ndarray  # ordered by their COLMAP number, (P, 3) float32 world units; P may be 0
    points_rgb: np.ndarray  # their colours, (P, 3) uint8
    description: str
    observations: Observations | None = None  # None where no tracks are kept
    # What was subtracted from the coordinates of the files, in world units. (3,) float64
    offset: np.ndarray = field(default_factory=partial(np.zeros, 3))

    @property
    def cameras(self) -> list[Camera]:
        return [*self.train_cameras, *(self.test_cameras or [])]


def hardly_known(observations: Observations | None, options: ViewOptions) -> dict[str, str]:
    """Views that the reconstruction knows too little about, by name, with the reason."""
    fits = {} if observations is None else observations.fits
    least = options.min_observations
    if least <= 0 or not fits:
        return {}
    if np.median([fit.n_points for fit in fits.values()]) < DENSE * least:
        return {}
    limit = error_limit(fit.error for fit in fits.values())
    few = {n: f"{f.n_points} points" for n, f in fits.items() if f.n_points < least}
    far = {n: f"{f.error:.1f} pixels off" for n, f in fits.items() if f.error > limit}
    return {**far, **few}
