# SPDX-License-Identifier: Apache-2.0
"""Find where a capture stands on a map: by control points, or by the GPS of its photographs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from gaussian_splatting.data.cameras import view_directions
from gaussian_splatting.scenes.scene import Scene
from sugar_maps import map_systems
from sugar_maps.control_points import (
    ControlPoint,
    ControlPoints,
    read_control_points,
)
from sugar_maps.gps_photographs import gps_photographs
from sugar_maps.map_conversion import conversion
from sugar_maps.map_placement import (
    CHECK,
    CONTROL,
    LEFT_OUT,
    MapFlags,
    MapPlacement,
    Residual,
    TargetResidual,
    describe_targets,
)
from sugar_maps.map_systems import MapSystem, TangentPlane
from sugar_maps.similarity import (
    MIN_POINTS,
    Fit,
    axis_spreads,
    fitted,
    is_line,
    robust_fit,
)
from sugar_maps.target_places import (
    PlacedTarget,
    TargetScale,
    placed_targets,
    scale_by_targets,
)
from sugar_maps.triangulation import (
    MIN_IMAGES,
    PixelRays,
    TriangulatedPoint,
    triangulated,
)
from sugar_utils.errors import Notify, UserError, shortened

_CHECK_EVERY = 5  # of unnamed control points, where there are enough
_MIN_FOR_CHECKS = 6
_MAX_RESIDUAL = 0.05  # root mean square of control points, as a share of their extent
_RECEIVER_ERROR = 10.0  # metres, root mean square, that receivers of phones and drones stay below
_MAX_TURN = 10.0  # degrees by which the orientation may be uncertain
_MIN_AGREEING = 0.5  # share of the points
_MAX_PIXEL_ERROR = 0.01  # of the longer side of a photograph
_LOOKS_UP = 0.5  # vertical part of the mean direction of view, above which cameras look up


def place_on_map(scene: Scene, flags: MapFlags, notify: Notify) -> MapPlacement:
    """Return where a capture stands on the map.

    Args:
        scene: The capture, in the world of the results.
        flags: By what, and in which system.
        notify: Called with lines about what was left out, and how well it fits.

    Raises:
        UserError: There are too few points, or they do not fit.
    """
    targets: list[PlacedTarget] = []
    if flags.targets is not None:
        targets = placed_targets(scene, flags.targets, notify)
    scale = None
    if flags.target_size is not None:
        scale = scale_by_targets(targets, flags.target_size, notify)
    if flags.gcp is not None:
        file = read_control_points(flags.gcp, needs_pixels=flags.targets is None)
        placement = _by_control_points(scene, file, flags.system, targets, notify)
    else:
        placement = _by_gps(scene, flags.system, scale, notify)
    rows = _target_residuals(targets, scale, placement.similarity.scale, flags.target_size)
    placement = replace(placement, targets=rows)
    notify(placement.describe())
    left_out = [residual.name for residual in placement.residuals if residual.role == LEFT_OUT]
    if left_out:
        notify(f"left out because they do not agree with the others: {shortened(left_out)}")
    directions = view_directions(scene.calibrated_cameras)
    mean_view = placement.similarity.rotation @ directions.mean(axis=0)
    if mean_view[2] > _LOOKS_UP:
        notify(
            "note: on this map the cameras look up to the sky; are x and y of the points swapped?"
        )
    return placement


class MetricScale(NamedTuple):
    """The scale of a capture by printed targets of a known side."""

    metres: float  # that a world unit is
    residuals: list[TargetResidual]

    def record(self) -> dict[str, object]:
        """Return it as values for a JSON file."""
        return {"scale": self.metres, "targets": [row.row() for row in self.residuals]}


def metric_scale(scene: Scene, flags: MapFlags, notify: Notify) -> MetricScale:
    """Return how many metres a unit of the capture is, by printed targets alone.

    Args:
        flags: Their kind and their size.
        notify: Called with lines about what was left out, and how well they fit.

    Raises:
        UserError: There are no targets, or they are of different sizes.
    """
    if flags.targets is None or flags.target_size is None:
        raise ValueError("the flags name no targets of a known size")
    targets = placed_targets(scene, flags.targets, notify)
    scale = scale_by_targets(targets, flags.target_size, notify)
    rows = _target_residuals(targets, scale, scale.metres, flags.target_size)
    notify(f"scale by printed targets: {scale.metres:.6g} m a unit; {describe_targets(rows)}")
    return MetricScale(scale.metres, rows)


def _target_residuals(
    targets: Sequence[PlacedTarget], scale: TargetScale | None, metres: float, size: float | None
) -> list[TargetResidual]:
    """Return targets after a placement.

    Args:
        scale: By the known side of the targets, where it is known.
        metres: That a world unit is after the placement.
        size: Side of the printed targets, metres.
    """
    rows = []
    for index, target in enumerate(targets):
        side = target.side * metres
        difference = None if size is None else side - size
        is_used = scale is None or bool(scale.is_used[index])
        n_images = len(target.images)
        pixels = target.place.error
        rows.append(TargetResidual(target.number, n_images, side, difference, pixels, is_used))
    return rows


class _Located(NamedTuple):
    """A control point with its place in the capture."""

    point: ControlPoint
    place: TriangulatedPoint


def _by_control_points(
    scene: Scene,
    file: ControlPoints,
    system: MapSystem | None,
    targets: Sequence[PlacedTarget],
    notify: Notify,
) -> MapPlacement:
    """Return the placement by control points, of which some may be printed targets."""
    located = _located(scene, file, targets, notify)
    n_needed = MIN_POINTS
    if len(located) < n_needed:
        raise UserError(
            f"{file.context}: {len(located)} control points are seen by {MIN_IMAGES} photographs "
            f"or more, and it takes {n_needed}; add points, or lines of further photographs"
        )
    positions = np.stack([row.point.position for row in located])
    frame = _map_frame(positions, file, system, notify)
    is_check = _check_points([row.point for row in located])
    is_control = ~is_check
    n_control = int(is_control.sum())
    if n_control < n_needed:
        raise UserError(
            f"{file.context}: {n_control} control points are not named as check points, and it "
            f"takes {n_needed}; rename some"
        )
    source = np.stack([row.place.position for row in located])
    fit = _fit_of_points(source[is_control], frame.local[is_control], file.context)
    _require_orientation(fit, source[is_control], f"{file.context}: control points")
    controls = np.flatnonzero(is_control)
    control_names = [located[row].point.name for row in controls]
    what = f"{file.context}: control points"
    _require_small(fit, frame.local[is_control], control_names, what)
    roles = [CHECK] * len(located)
    for row, is_used in zip(controls, fit.is_used, strict=True):
        roles[row] = CONTROL if is_used else LEFT_OUT
    differences = fit.similarity.moved(source) - frame.local
    residuals = []
    for row, role, difference in zip(located, roles, differences, strict=True):
        residuals.append(Residual(row.point.name, role, difference, row.place.error))
    _note_checks(residuals, frame.local, notify)
    if n_control == n_needed:
        notify(f"note: {n_needed} control points leave nothing to check them by; add a fourth")
    return MapPlacement(
        fit.similarity, frame.offset, frame.system, frame.plane, "control points", residuals
    )


def _located(
    scene: Scene, file: ControlPoints, targets: Sequence[PlacedTarget], notify: Notify
) -> list[_Located]:
    """Return the control points that several photographs show, with their places in the capture.

    Points without pixels are the targets of their numbers.
    """
    rays = PixelRays(scene)
    by_number = {target.number: target for target in targets}
    located = []
    too_few = []
    for point in file.points:
        number = point.target_number
        target = None if number is None else by_number.get(number)
        if target is not None and not point.observations:
            located.append(_Located(point, target.place))
            continue
        point_rays = [rays.ray(observation) for observation in point.observations]
        if len(point_rays) < MIN_IMAGES:
            too_few.append(point.name)
            continue
        place = triangulated(point.name, point_rays)
        if not place.is_certain:
            notify(
                f"note: {point.name} is left out: its photographs were taken {place.angle:.2g} "
                "degrees apart, which tells no depth"
            )
            continue
        cameras = [rays.camera_of(observation) for observation in point.observations]
        longest = max(camera.longest_side for camera in cameras)
        if place.error > max(_MAX_PIXEL_ERROR * longest, 1.0):
            notify(
                f"note: {point.name} is left out: its pixels disagree by {place.error:.3g} pixels; "
                f"check {shortened([one.image for one in point.observations])}"
            )
            continue
        located.append(_Located(point, place))
    if targets and not any(point.target_number in by_number for point in file.points):
        names = shortened([point.name for point in file.points])
        numbers = shortened([str(number) for number in by_number])
        raise UserError(
            f"{file.context}: none of the points {names} is a target of the photographs "
            f"({numbers}); name points by the numbers of their targets"
        )
    if too_few:
        notify(f"note: fewer than {MIN_IMAGES} photographs show {shortened(too_few)}")
    return located


def _check_points(points: Sequence[ControlPoint]) -> np.ndarray:
    """Return which control points are held out: those named so, else every fifth of 6 and more."""
    is_check = np.array([point.is_check for point in points])
    if not is_check.any() and len(points) >= _MIN_FOR_CHECKS:
        is_check[_CHECK_EVERY - 1 :: _CHECK_EVERY] = True
    return is_check


class _MapFrame(NamedTuple):
    """Places on a map, in metres near zero."""

    local: np.ndarray  # (N, 3)
    offset: np.ndarray  # to add for coordinates of the map, (3,)
    system: MapSystem | None
    plane: TangentPlane | None


def _map_frame(
    positions: np.ndarray, file: ControlPoints, system: MapSystem | None, notify: Notify
) -> _MapFrame:
    """Return the places of control points, (N, 3), in the system that is wanted."""
    origin = file.system
    if origin is None:
        origin = system
    if origin is not None and origin.is_geographic:
        return _geographic_frame(positions, origin, system, file.context, notify)
    target = system or origin
    if target is None:
        offset = np.round(positions.mean(axis=0))
        return _MapFrame(positions - offset, offset, None, None)
    map_systems.require_metres(target, file.context)
    return _frame_in(positions, origin or target, target, file.context, notify)


def _geographic_frame(
    positions: np.ndarray,
    origin: MapSystem,
    system: MapSystem | None,
    place: str,
    notify: Notify,
) -> _MapFrame:
    """Return places in degrees and metres, (N, 3), in a system in metres.

    Without one that is the zone of UTM, or a tangent plane where pyproj is not installed.
    """
    middle = np.median(positions, axis=0)
    if np.abs(middle[:2]).max() > 180 or abs(middle[1]) > 90:
        raise UserError(
            f"{place}: {middle[0]:g}, {middle[1]:g} are no degrees of longitude and latitude; "
            "correct the coordinate system"
        )
    if system is None and map_systems.pyproj_or_none() is not None:
        system = map_systems.utm_system(middle[0], middle[1])
    if system is None:
        plane = TangentPlane(latitude=middle[1], longitude=middle[0], altitude=middle[2])
        return _MapFrame(plane.positions(positions), np.zeros(3), None, plane)
    return _frame_in(positions, origin, system, place, notify)


def _frame_in(
    positions: np.ndarray, origin: MapSystem, target: MapSystem, place: str, notify: Notify
) -> _MapFrame:
    """Convert points, (N, 3), to another system; its scale must be 1 there."""
    middle = np.median(positions, axis=0)
    way = conversion(origin, target, origin, middle, place)
    for note in way.notes:
        notify(f"note: {place}: {note}")
    moved = way.apply(positions)
    map_systems.require_true_lengths(target, np.median(moved, axis=0), place)
    offset = np.round(moved.mean(axis=0))
    return _MapFrame(moved - offset, offset, target, None)


def _fit_of_points(
    source: np.ndarray, target: np.ndarray, place: str, scale: float | None = None
) -> Fit:
    """Return the similarity of two sets of points, which must not lie on a line.

    Args:
        scale: Of the similarity, where it is known.
    """
    for points, what in ((source, "in the capture"), (target, "on the map")):
        if is_line(points):
            raise UserError(
                f"{place}: the points lie on a line or in one place {what}, which leaves the "
                "orientation open; add points beside it"
            )
    fit = robust_fit(source, target, scale)
    n_used = int(fit.is_used.sum())
    if n_used < max(MIN_POINTS, _MIN_AGREEING * len(source)):
        return fitted(source, target, scale)
    return fit


def _require_small(fit: Fit, target: np.ndarray, names: Sequence[str], what: str) -> None:
    """Raise a UserError where points do not fit the capture.

    Args:
        target: The points on the map. (N, 3)
        names: Of the points.
        what: What they are, for the error.
    """
    extent = _extent(target)
    if fit.rms <= _MAX_RESIDUAL * extent:
        return
    raise UserError(
        f"{what} do not fit the capture: {_misfit(fit, extent, names)}; check their coordinate "
        "system, the order of their coordinates and their pixels"
    )


def _check_gps(
    fit: Fit, target: np.ndarray, names: Sequence[str], what: str, notify: Notify
) -> None:
    """Raise a UserError where GPS misses the capture by more than receivers do; name large errors.

    Args:
        target: The positions on the map. (N, 3)
        names: Of the photographs.
        what: Whose GPS it is, for the error.
    """
    extent = _extent(target)
    limit = _MAX_RESIDUAL * extent
    if fit.rms <= limit:
        return
    misfit = _misfit(fit, extent, names)
    if fit.rms > _RECEIVER_ERROR:
        raise UserError(
            f"{what} does not fit the capture: {misfit}; check the altitudes in the photographs, "
            "or use --gcp"
        )
    notify(f"note: GPS is imprecise for a capture of this size: {misfit}; check the altitudes")


def _note_checks(residuals: Sequence[Residual], target: np.ndarray, notify: Notify) -> None:
    """Name the check points that miss the map by more than control points may.

    Args:
        target: All points on the map. (N, 3)
    """
    limit = _MAX_RESIDUAL * _extent(target)
    rows = [row for row in residuals if row.role == CHECK and row.distance > limit]
    if rows:
        misses = shortened([f"{row.name} {row.distance:.3g} m" for row in rows])
        notify(
            f"note: check points miss the map by more than {100 * _MAX_RESIDUAL:g} % of its extent "
            f"({misses}); check their coordinates, and whether the capture is bent"
        )


def _extent(points: np.ndarray) -> float:
    """Return the diagonal of the box around points, (N, 3)."""
    return float(np.linalg.norm(np.ptp(points, axis=0)))


def _misfit(fit: Fit, extent: float, names: Sequence[str]) -> str:
    """Describe how far points of an extent lie from where a fit has them, the farthest first."""
    worst = np.argsort(-fit.distances)[:3]
    numbers = ", ".join(f"{names[row]} {fit.distances[row]:.3g} m" for row in worst)
    return f"{fit.rms:.3g} m RMS over {extent:.3g} m ({numbers})"


def _require_orientation(fit: Fit, source: np.ndarray, what: str) -> None:
    """Raise a UserError where errors of points, (N, 3), leave the orientation open."""
    used = source[fit.is_used]
    # The rotation about the longest axis follows from the distances to it alone.
    lever = fit.similarity.scale * axis_spreads(used)[1]
    error = fit.rms / np.sqrt(len(used))
    turn = float(np.degrees(np.arctan2(error, abs(lever))))
    if turn > _MAX_TURN:
        extent = abs(fit.similarity.scale) * _extent(used)
        raise UserError(
            f"{what} scatter by {fit.rms:.3g} m over a capture of {extent:.3g} m, which leaves its "
            f"orientation open by {turn:.0f} degrees; use control points, or --known_distance"
        )


def _by_gps(
    scene: Scene, system: MapSystem | None, target_scale: TargetScale | None, notify: Notify
) -> MapPlacement:
    """Return the placement by the GPS of the photographs.

    Args:
        target_scale: By printed targets, which are more exact; None: GPS gives it, too.
    """
    photographs = gps_photographs(scene, notify)
    positions = np.stack([photograph.position for photograph in photographs])
    origin = map_systems.system_of_code(map_systems.WGS84, "GPS")
    what = f"{scene.root}: GPS"
    frame = _geographic_frame(positions, origin, system, what, notify)
    source = np.stack([photograph.camera.center for photograph in photographs])
    if len(source) < MIN_POINTS:
        raise UserError(f"{what} of {len(source)} photographs agrees; it takes {MIN_POINTS}")
    scale = None
    if target_scale is not None:
        scale = target_scale.metres * _map_metres(positions, frame)
    fit = _fit_of_points(source, frame.local, what, scale)
    _require_orientation(fit, source, f"{what} positions")
    _check_gps(fit, frame.local, [row.camera.name for row in photographs], what, notify)
    residuals = []
    for row, photograph in enumerate(photographs):
        role = CONTROL if fit.is_used[row] else LEFT_OUT
        residuals.append(Residual(photograph.camera.name, role, -fit.residuals[row]))
    name = "GPS of photographs"
    if scale is not None:
        name += " and the side of printed targets"
    return MapPlacement(fit.similarity, frame.offset, frame.system, frame.plane, name, residuals)


def _map_metres(positions: np.ndarray, frame: _MapFrame) -> float:
    """Return how many metres of the map a metre on the ground is; UTM shortens some by 0.04 %.

    Args:
        positions: Longitude, latitude, altitude. (N, 3)
        frame: The same places on the map.
    """
    longitude, latitude, altitude = np.median(positions, axis=0)
    plane = TangentPlane(latitude=latitude, longitude=longitude, altitude=altitude)
    return fitted(plane.positions(positions), frame.local).similarity.scale
