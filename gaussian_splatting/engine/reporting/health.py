# SPDX-License-Identifier: Apache-2.0
"""When a result has failed: limits of its figures, with the likely cause and a remedy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sugar_utils.command_text import command_text
from sugar_utils.errors import UserError

MIN_GAIN = -2.0
"""Decibels that a model must have beyond one constant colour for each image. Objects of nearly one
colour behind imprecise masks come close to it, and failures lie far below."""
MIN_MASK_IOU = 0.6
"""Least intersection over union of rendered opacity, or of a mesh, with the masks."""
MAX_GAP = 12.0  # decibels by which training views may be better than held-out ones
MIN_COVERED = 0.02  # least share of the images that a mesh covers where there are no masks


class FailedResult(UserError):
    """A stage finished, but its result is not usable; the next stages would waste their time."""

    exit_code = 5
    label = "failed"


def _check_of_poses() -> str:
    return f"{command_text('doctor', '-s', 'SCENE')} checks them"


def problem_of(figures: Mapping[str, Any]) -> str | None:
    """Return the fault of a result, its likely cause and a remedy in one line; None without one.

    Args:
        figures: Any of ``psnr`` and ``constant_psnr`` (of the masked pixels where there are masks),
            ``gap``, ``mask_iou`` and ``covered_share``.
    """
    psnr = figures.get("psnr")
    constant = figures.get("constant_psnr")
    if psnr is not None and constant is not None and psnr < constant + MIN_GAIN:
        return (
            f"renders are worse than one constant colour for each image ({psnr:.1f} dB, constant "
            f"{constant:.1f} dB): poses or masks are wrong, or training was far too short; "
            f"{_check_of_poses()}"
        )
    iou = figures.get("mask_iou")
    if iou is not None and iou < MIN_MASK_IOU:
        return (
            f"the result fills {iou:.0%} of the masks (IoU, at least {MIN_MASK_IOU:.0%} expected): "
            "masks contradict each other, or parts were removed by mistake; check the masks, or "
            "pass --mask_mode ignore"
        )
    gap = figures.get("gap")
    if gap is not None and gap > MAX_GAP:
        return (
            f"training views are {gap:.1f} dB better than held-out ones: each image is explained "
            f"by itself; {_check_of_poses()}"
        )
    covered = figures.get("covered_share")
    if covered is not None and covered < MIN_COVERED:
        return (
            f"the mesh covers {covered:.1%} of the images: the surface was not found; train "
            "longer, or lower --surface_level"
        )
    return None
