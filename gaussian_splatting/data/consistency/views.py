# SPDX-License-Identifier: Apache-2.0
"""Which views of a capture contradict the others, and the masks of the views that stay.

Views with a wrong pose, image or mask are left out of training; held-out ones are measured apart.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.consistency.image_content import inconsistent_images, wrong_shapes
from gaussian_splatting.data.consistency.mask_agreement import MaskAgreement, mask_agreement
from gaussian_splatting.data.images import fit_to_file
from gaussian_splatting.data.masks import MaskOptions, is_all_black, with_masks, with_object_masks
from gaussian_splatting.data.observations import (
    ALL_VIEWS,
    Observations,
    ViewOptions,
    hardly_known,
)
from sugar_utils.errors import UserError

_NAMED = 5
_KEPT = 16
Notify = Callable[[str], None]


@dataclass(frozen=True)
class CheckedViews:
    cameras: list[Camera]  # at the size of their images, with masks, in the given order
    # Reasons by name; those whose image does not fit are not in cameras.
    dropped: dict[str, str] = field(default_factory=dict)


def checked_views(
    cameras: Sequence[Camera],
    root: Path,
    *,
    points: np.ndarray,
    observations: Observations | None,
    masks: MaskOptions,
    options: ViewOptions,
    notify: Notify,
    known: dict[str, str] | None = None,
    estimated: Path | None = None,
) -> CheckedViews:
    """Find the masks of the views of a capture, and check the views against each other.

    Args:
        cameras: At their calibrated size.
        points: (P, 3) world units
        known: Views that an earlier stage left out; None looks for some.
        estimated: Folder of masks that an earlier stage estimated, which replace the given ones.
    """
    _check_names(cameras, options)
    if options.keeps_all:
        fitted = [fit_to_file(camera) for camera in cameras]
        return CheckedViews(with_masks(fitted, root, masks, notify))
    unusable = wrong_shapes(cameras)
    fitted = [fit_to_file(camera) for camera in cameras if camera.name not in unusable]
    masked = with_masks(fitted, root, masks, notify)
    if estimated is not None and any(camera.mask is not None for camera in masked):
        masked = with_object_masks(masked, estimated)
        notify(f"masks that the checkpoint's training estimated: {estimated}")
    if known is not None:
        found = {**known, **unusable}
        masked, _ = _with_agreement(masked, found, points)
    else:
        found = {**hardly_known(observations, options), **unusable}
        found = {**_image_checks(_Inputs.of(masked, found, observations)), **found}
        masked, contradictions = _with_agreement(masked, found, points, notify)
        found = {**contradictions, **found}
    dropped = {c.name: found[c.name] for c in cameras if c.name in found}
    dropped = {n: why for n, why in dropped.items() if n in unusable or n not in options.keep_views}
    if known is None:
        _tell(dropped, len(cameras), notify)
    return CheckedViews(masked, dropped)


def _check_names(cameras: Sequence[Camera], options: ViewOptions) -> None:
    names = {camera.name for camera in cameras}
    unknown = [name for name in options.keep_views if name != ALL_VIEWS and name not in names]
    if unknown:
        raise UserError(
            f"--keep_views {unknown[0]}: no view has this name; names are those of the "
            f"reconstruction, for example {min(names)}"
        )


def _tell(dropped: dict[str, str], n: int, notify: Notify) -> None:
    if not dropped:
        return
    named = [f"{name} ({why})" for name, why in dropped.items()]
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    notify(
        f"left out {len(named)} of {n} views that contradict the rest: "
        f"{', '.join(named[:_NAMED])}{more}; --keep_views NAME, or all, keeps them"
    )


@dataclass(frozen=True)
class _Inputs:
    """What the checks read; equal if nothing of it changed, so that later stages reuse results."""

    key: str
    cameras: tuple[Camera, ...] = field(compare=False)
    data: Any = field(compare=False)

    @classmethod
    def of(cls, cameras: Sequence[Camera], dropped: Collection[str], data: Any) -> _Inputs:
        """Inputs without the views that are dropped already."""
        kept = tuple(camera for camera in cameras if camera.name not in dropped)
        points = data.points if isinstance(data, Observations) else data
        digest = hashlib.sha256(b"" if points is None else points.tobytes())
        for c in kept:
            lens = c.width, c.height, c.fx, c.fy, c.cx, c.cy
            digest.update(f"{c.name} {lens} {c.mask}".encode(errors="replace"))
            digest.update(c.rotation.tobytes() + c.translation.tobytes())
            for path in (c.image_path, None if c.mask is None else c.mask.path):
                if path is not None:
                    status = path.stat()
                    digest.update(f"{path} {status.st_size} {status.st_mtime_ns}".encode(
                        errors="replace"))  # fmt: skip
        return cls(digest.hexdigest(), kept, data)


@functools.lru_cache(maxsize=_KEPT)
def _image_checks(inputs: _Inputs) -> dict[str, str]:
    return inconsistent_images(inputs.cameras, inputs.data)


@functools.lru_cache(maxsize=_KEPT)
def _agreement(inputs: _Inputs) -> MaskAgreement | None:
    shown = [c for c in inputs.cameras if c.mask is not None and c.mask.mode == "object"]
    return mask_agreement(shown, inputs.data)


def _with_agreement(
    cameras: Sequence[Camera],
    dropped: Collection[str],
    points: np.ndarray,
    notify: Notify = lambda line: None,
) -> tuple[list[Camera], dict[str, str]]:
    """The cameras with what the comparison of their masks tells, and views that contradict."""
    black = {c.name: "its mask is all black" for c in cameras if is_all_black(c)}
    if not any(c.mask is not None and c.mask.mode == "object" for c in cameras):
        return list(cameras), black
    found = _agreement(_Inputs.of(cameras, {*dropped, *black}, points))
    if found is None:
        return list(cameras), black
    if found.outline_error:
        notify(f"the outlines of the masks are off by {found.outline_error:.1%} of the image size")
    # Masks that agree nowhere have a median of 0.
    middle = max(float(np.median(list(found.iou.values()))), 1e-6)
    weighted = []
    for camera in cameras:
        mask = camera.mask
        if mask is not None:
            weight = round(min(1.0, found.iou.get(camera.name, middle) / middle), 2)
            mask = replace(mask, outline_error=found.outline_error, weight=weight)
        weighted.append(replace(camera, mask=mask))
    return weighted, {**black, **found.inconsistent}
