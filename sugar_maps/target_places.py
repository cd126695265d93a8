# SPDX-License-Identifier: Apache-2.0
"""Places and sizes of printed targets in the world of a capture, from all of its photographs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.scenes.scene import Scene
from sugar_maps.printed_targets import Detection, detections_in, load_opencv
from sugar_maps.similarity import least_squares
from sugar_maps.triangulation import (
    MIN_IMAGES,
    Ray,
    TriangulatedPoint,
    at_size_of_file,
    pinhole_ray,
    pixel_errors,
    triangulated,
)
from sugar_utils.errors import Notify, UserError, shortened
from sugar_utils.files import in_parallel

# Of the longer side of a photograph: how far a detection may miss what the others say.
_MAX_PIXEL_ERROR = 0.0025
_LEAST_PIXEL_ERROR = 1.0
_SAME_SIZE = 0.03  # relative difference between the sides of targets of one size
_SQUARE = np.array([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 1.0, 0.0]])


@dataclass(frozen=True)
class PlacedTarget:
    """A printed target that several photographs show."""

    number: int
    corners: np.ndarray  # world units, (4, 3)
    place: TriangulatedPoint  # its middle; the error is that of the corners
    images: tuple[str, ...]  # names of the photographs
    pixel_size: float  # of a pixel of the photographs at the target, world units

    @property
    def side(self) -> float:
        """Side of the square that fits the corners best, world units."""
        return least_squares(_SQUARE, self.corners).scale


@dataclass(frozen=True)
class TargetScale:
    """The scale by the known side of targets."""

    metres: float  # that a world unit is
    is_used: np.ndarray  # of the targets, (N,) bool


class _View(NamedTuple):
    """A detection of a target by a camera, and the rays through the corners."""

    camera: Camera  # at the size of its image
    rays: list[Ray]  # of the four corners


def placed_targets(scene: Scene, kind: str, notify: Notify) -> list[PlacedTarget]:
    """Find printed targets in the photographs of a capture, in the order of their numbers.

    Args:
        kind: One of ``TARGET_KINDS``.
        notify: Called with lines about what was left out.

    Raises:
        UserError: There is none that two photographs show, or a photograph shows a number twice.
    """
    load_opencv("--targets")
    views = _views_of(scene, kind)
    if not views:
        raise UserError(
            f"{scene.root}: no photograph shows a target of the kind {kind}; check the kind "
            "(--targets KIND), and that targets are sharp and 30 pixels wide or more"
        )
    single = []
    targets = []
    for number in sorted(views):
        if len(views[number]) < MIN_IMAGES:
            single.append(f"{number} ({views[number][0].camera.name})")
            continue
        target = _placed(number, views[number], notify)
        if target is not None:
            targets.append(target)
    if single and not targets and len(single) == len(views):
        raise UserError(
            f"{scene.root}: each target is in one photograph alone: {shortened(single)}; it takes "
            f"{MIN_IMAGES} from different places"
        )
    if not targets:
        raise UserError(
            f"{scene.root}: no target has a certain place; take photographs of them from several "
            "directions"
        )
    if single:
        notify(f"note: fewer than {MIN_IMAGES} photographs show target {shortened(single)}")
    return targets


def _views_of(scene: Scene, kind: str) -> dict[int, list[_View]]:
    """Return the detections of each target in the images that the scene uses, which are flat."""
    cameras = []
    for camera in scene.calibrated_cameras:
        if camera.image_path is not None and camera.image_path.is_file():
            cameras.append(at_size_of_file(camera))

    def detections(camera: Camera) -> list[Detection]:
        return detections_in(camera.image_file, kind)

    views: dict[int, list[_View]] = {}
    for camera, in_image in zip(cameras, in_parallel(detections, cameras), strict=True):
        for detection in in_image:
            rays = [pinhole_ray(camera, corner) for corner in detection.corners]
            views.setdefault(detection.number, []).append(_View(camera, rays))
    return views


def _placed(number: int, views: Sequence[_View], notify: Notify) -> PlacedTarget | None:
    """Return the place of a target by the views that agree; None where it is not certain."""
    agreeing = list(views)
    while True:
        corners = [_corner(number, agreeing, index) for index in range(4)]
        errors = _view_errors(corners, agreeing)
        worst = int(errors.argmax())
        camera = agreeing[worst].camera
        limit = max(_MAX_PIXEL_ERROR * camera.longest_side, _LEAST_PIXEL_ERROR)
        if errors[worst] <= limit:
            break
        if len(agreeing) == MIN_IMAGES:
            notify(
                f"note: target {number} is left out: its places in "
                f"{shortened([view.camera.name for view in agreeing])} disagree by "
                f"{errors[worst]:.3g} pixels"
            )
            return None
        notify(
            f"note: target {number} in {camera.name} is left out: it is {errors[worst]:.3g} pixels "
            "from where the others see it"
        )
        del agreeing[worst]
    angle = min(corner.angle for corner in corners)
    positions = np.stack([corner.position for corner in corners])
    middle = positions.mean(axis=0)
    error = float(np.sqrt(np.mean([corner.error**2 for corner in corners])))
    place = TriangulatedPoint(middle, error, angle)
    if not place.is_certain:
        notify(
            f"note: target {number} is left out: its photographs were taken {angle:.2g} degrees "
            "apart, which tells no depth"
        )
        return None
    pixel_sizes = []
    for view in agreeing:
        distance = float(np.linalg.norm(middle - view.camera.center))
        pixel_sizes.append(distance * view.rays[0].pixel_angle)
    names = tuple(view.camera.name for view in agreeing)
    return PlacedTarget(number, positions, place, names, float(np.median(pixel_sizes)))


def _corner(number: int, views: Sequence[_View], index: int) -> TriangulatedPoint:
    """Return the place of one of the four corners."""
    return triangulated(f"target {number}", [view.rays[index] for view in views])


def _view_errors(corners: Sequence[TriangulatedPoint], views: Sequence[_View]) -> np.ndarray:
    """Return how far each view's corners are from their places, root mean square, pixels. (V,)"""
    squares = np.zeros(len(views))
    for index, corner in enumerate(corners):
        squares += pixel_errors(corner.position, [view.rays[index] for view in views]) ** 2
    return np.sqrt(squares / len(corners))


def scale_by_targets(targets: Sequence[PlacedTarget], size: float, notify: Notify) -> TargetScale:
    """Return the scale that makes the sides of targets a known length.

    Targets whose sides differ from most of the others are left out by name.

    Args:
        size: Side of the printed targets, metres.

    Raises:
        UserError: The targets are of different sizes.
    """
    sides = np.array([target.side for target in targets])
    median = float(np.median(sides))
    is_used = np.abs(sides / median - 1) <= _SAME_SIZE
    if is_used.sum() <= len(targets) / 2:
        texts = [
            f"{target.number}: {side / median * size:.4g} m"
            for target, side in zip(targets, sides, strict=True)
        ]
        raise UserError(
            f"--target_size {size:g}: the targets are of different sizes ({shortened(texts)}); "
            "print all at one size, or cover the others"
        )
    # The error of a side falls with the number of photographs, and rises with the distance.
    weights = np.array([len(target.images) / target.pixel_size**2 for target in targets]) * is_used
    metres = size / float((weights * sides).sum() / weights.sum())
    for target, side, is_same in zip(targets, sides, is_used, strict=True):
        if not is_same:
            notify(
                f"note: target {target.number} is left out of the scale: its side is "
                f"{side * metres:.4g} m by the others, not {size:g} m"
            )
    return TargetScale(metres, is_used)
