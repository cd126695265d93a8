# SPDX-License-Identifier: Apache-2.0
"""Checks of the views of a capture against each other, and the masks of the views that stay.

Views with a wrong pose, image or mask are left out of training; held-out ones are measured apart.
Images are checked by :mod:`.image_checks`, masks by :mod:`.mask_agreement`.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gaussian_splatting.data.cameras import Camera, ViewMask
from gaussian_splatting.data.image_checks import inconsistent_images, wrong_shapes
from gaussian_splatting.data.images import (
    describe_unreadable,
    fit_to_file,
    unreadable_images,
)
from gaussian_splatting.data.mask_agreement import MaskAgreement, mask_agreement
from gaussian_splatting.data.masks import (
    FOUND,
    MaskOptions,
    counts_nowhere,
    with_masks,
    with_object_masks,
)
from gaussian_splatting.data.names import nearest_name
from gaussian_splatting.data.observations import (
    ALL_VIEWS,
    CaptureModel,
    Observations,
    ViewOptions,
    hardly_known,
)
from sugar_utils.errors import Notify, UserError, shortened
from sugar_utils.files import file_digest

Result = TypeVar("Result")

_CACHED_RESULTS = 16  # of checks


@dataclass(frozen=True)
class CheckedViews:
    """The views of a capture with their masks, and the views that are left out."""

    cameras: list[Camera]  # at the size of their images, with masks, in the order of the capture
    # Reasons by name; views whose image does not fit are not in ``cameras``.
    dropped: dict[str, str] = field(default_factory=dict)
    # Of the images' exposures, see :class:`ImageFindings`; nan where they are unknown.
    exposure_spread: float = math.nan
    exposure_noise: float = math.nan


@dataclass(frozen=True)
class EarlierChecks:
    """The results of an earlier stage that are used again."""

    dropped: dict[str, str] | None = None  # views that it left out; None: it made no checks
    # Folder of masks that it estimated, which replace those of the capture.
    object_masks: Path | None = None
    # Folder of masks of what it found to be transient.
    transient_masks: Path | None = None


NO_EARLIER_CHECKS = EarlierChecks()


def checked_views(
    cameras: Sequence[Camera],
    root: Path,
    source: CaptureModel,
    *,
    masks: MaskOptions,
    options: ViewOptions,
    notify: Notify,
    earlier: EarlierChecks = NO_EARLIER_CHECKS,
) -> CheckedViews:
    """Find the masks of the views of a capture, and check the views against each other.

    Args:
        cameras: At their calibrated size.
        root: Scene folder.
        source: Points and observations of the reconstruction.
        earlier: Its views are left out, and no others are looked for.
    """
    check_view_names(options.keep_views, [camera.name for camera in cameras])
    unreadable = _unreadable_views(cameras)
    known = earlier.dropped or {}
    if unreadable.keys() - known.keys():
        notify(describe_unreadable(unreadable, len(cameras)))
    readable = [camera for camera in cameras if camera.name not in unreadable]
    if options.keeps_all:
        fitted = [fit_to_file(camera) for camera in readable]
        return CheckedViews(with_masks(fitted, root, masks, notify), unreadable)
    unusable = {**wrong_shapes(readable), **unreadable}
    fitted = [fit_to_file(camera) for camera in cameras if camera.name not in unusable]
    masked = with_masks(fitted, root, masks, notify)
    if earlier.object_masks is not None:
        has_masks = any(camera.mask is not None for camera in masked)
        if has_masks or masks.masks in FOUND:
            masked = with_object_masks(masked, earlier.object_masks)
            notify(f"masks that the checkpoint's training estimated: {earlier.object_masks}")
    if earlier.dropped is not None:
        reasons = {**earlier.dropped, **unusable}
        weighted, _ = _compare_masks(masked, reasons, source.points)
        return CheckedViews(weighted, _dropped(cameras, reasons, unusable, options))
    reasons = {**hardly_known(source.observations, options), **unusable}
    inputs = _CheckInputs.of(masked, reasons, source.observations)
    findings = _cached_result(inconsistent_images, inputs)
    reasons = {**findings.inconsistent, **reasons}
    weighted, contradictions = _compare_masks(masked, reasons, source.points, notify)
    reasons = {**contradictions, **reasons}
    dropped = _dropped(cameras, reasons, unusable, options)
    entries = [f"{name} ({why})" for name, why in dropped.items() if name not in unreadable]
    if entries:
        notify(
            f"left out {len(entries)} of {len(cameras)} views that contradict the rest: "
            f"{shortened(entries, 5)}; --keep_views NAME, or all, keeps them"
        )
    return CheckedViews(weighted, dropped, findings.exposure_spread, findings.exposure_noise)


def _unreadable_views(cameras: Sequence[Camera]) -> dict[str, str]:
    """Return the views whose image file cannot be decoded, with the reason of each."""
    paths = [camera.image_path for camera in cameras if camera.image_path is not None]
    reasons = unreadable_images(paths)
    return {
        camera.name: f"the image cannot be read: {reasons[camera.image_path]}"
        for camera in cameras
        if camera.image_path in reasons
    }


def _dropped(
    cameras: Sequence[Camera],
    reasons: Mapping[str, str],
    unusable: Collection[str],
    options: ViewOptions,
) -> dict[str, str]:
    """Return the views to leave out; ``--keep_views`` keeps any that is usable."""
    dropped = {}
    for camera in cameras:
        name = camera.name
        is_kept = name in options.keep_views and name not in unusable
        if name in reasons and not is_kept:
            dropped[name] = reasons[name]
    return dropped


def check_view_names(views: Sequence[str], names: Sequence[str]) -> None:
    """Check that there are views of all names that ``--keep_views`` lists.

    Args:
        names: Of the views of the capture.

    Raises:
        UserError: There is no view of a name.
    """
    unknown = [view for view in views if view not in names and view != ALL_VIEWS]
    if unknown:
        nearest = nearest_name(unknown[0], names) or min(names)
        raise UserError(
            f"--keep_views {unknown[0]}: no view has this name; names are those of the "
            f"reconstruction, for example {nearest}; one with a comma stands in quotes"
        )


@dataclass(frozen=True)
class _CheckInputs:
    """The inputs of a check; equal if nothing has changed, so that its result is used again."""

    key: str  # digest of all inputs
    cameras: tuple[Camera, ...] = field(compare=False)
    # Observations or points of the reconstruction.
    data: Observations | np.ndarray | None = field(compare=False)

    @classmethod
    def of(
        cls,
        cameras: Sequence[Camera],
        dropped: Collection[str],
        data: Observations | np.ndarray | None,
    ) -> _CheckInputs:
        """Make the inputs without the views that are dropped already."""
        # In one order, whichever views a stage holds out.
        ordered = sorted(cameras, key=lambda camera: camera.name)
        remaining = tuple(camera for camera in ordered if camera.name not in dropped)
        points = data.points if isinstance(data, Observations) else data
        digest = hashlib.sha256(b"" if points is None else points.tobytes())
        for camera in remaining:
            lens = (camera.width, camera.height, camera.fx, camera.fy, camera.cx, camera.cy)
            digest.update(f"{camera.name} {lens} {camera.mask}".encode(errors="replace"))
            digest.update(camera.rotation.tobytes())
            digest.update(camera.translation.tobytes())
            if camera.image_path is not None:
                digest.update(_file_key(camera.image_path))
            if camera.mask is not None:
                digest.update(_file_key(camera.mask.path))
        return cls(digest.hexdigest(), remaining, data)


def _file_key(path: Path) -> bytes:
    return f"{path} {file_digest(path)}".encode(errors="replace")


@functools.lru_cache(maxsize=_CACHED_RESULTS)
def _cached_result(
    check: Callable[[Sequence[Camera], Any], Result], inputs: _CheckInputs
) -> Result:
    return check(inputs.cameras, inputs.data)


def _compare_masks(
    cameras: Sequence[Camera],
    dropped: Collection[str],
    points: np.ndarray,
    notify: Notify = lambda line: None,
) -> tuple[list[Camera], dict[str, str]]:
    """Return the cameras with precision and weight of their masks, and views that contradict."""
    reasons = {c.name: "nothing of its mask counts" for c in cameras if counts_nowhere(c)}
    if not any(camera.shows_object for camera in cameras):
        return list(cameras), reasons
    inputs = _CheckInputs.of(cameras, {*dropped, *reasons}, points)
    agreement = _cached_result(mask_agreement, inputs)
    if agreement is None:
        return list(cameras), reasons
    error = agreement.outline_error
    if error:
        notify(f"the outlines of the masks are off by {error:.1%} of the image size")
    # Masks that agree nowhere have a median of 0.
    median_iou = max(float(np.median(list(agreement.iou.values()))), 1e-6)
    weighted = []
    for camera in cameras:
        mask = camera.mask
        if mask is not None:
            mask = _weighted_mask(mask, camera.name, agreement, median_iou)
        weighted.append(replace(camera, mask=mask))
    return weighted, {**reasons, **agreement.inconsistent}


def _weighted_mask(
    mask: ViewMask, name: str, agreement: MaskAgreement, median_iou: float
) -> ViewMask:
    """Return a mask with its precision, and less weight if it agrees less than the median one."""
    iou = agreement.iou.get(name, median_iou)
    weight = round(min(1.0, iou / median_iou), 2)
    return replace(mask, outline_error=agreement.outline_error, weight=weight)
