# SPDX-License-Identifier: Apache-2.0
"""The page about what ``convert.py`` found: the verdict, a map of the cameras, every photograph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from gaussian_splatting.data.upright import up_direction, upright_rotation
from gaussian_splatting.posing.verdict import BLURRED, Evidence, Verdict
from sugar_utils.html import Page, Picture, duration_text
from sugar_utils.memory import format_bytes

MAP_SIZE = 1000
_MARGIN = 60
_MAX_POINTS = 60_000
_PAPER, _INK, _PATH = (250, 250, 248), (30, 30, 30), (226, 200, 190)
_CAMERA, _FIRST = (214, 69, 52), (36, 110, 185)
_LABELS = 40
_THUMBNAIL = 320
_MAX_LEFT_OUT_PICTURES = 12
_MEANING = {
    "fine": "Go on and train.",
    "usable": "Go on and train, or do what is advised below for a better result.",
    "poor": "The result will have holes or be wrong; better do what is advised below.",
}


def convert_page(
    title: str,
    evidence: Evidence,
    verdict: Verdict,
    seen_from_above: np.ndarray,
    files: Mapping[str, Path],
    steps: Sequence[tuple[str, float, int]],
    settings: Mapping[str, object],
) -> Page:
    """The page.

    Args:
        title: Heading.
        evidence: What is known of the photographs.
        verdict: What follows from it.
        seen_from_above: By :func:`camera_map`.
        files: The photographs as taken, by name.
        steps: Name, seconds and peak bytes of each step.
        settings: What was asked for.
    """
    page = Page(title, f"{len(evidence.names)} photographs")
    page.facts(
        [
            ("photographs with a place", f"{verdict.n_registered} of {len(evidence.names)}"),
            ("verdict", verdict.word),
            ("reprojection error", f"{evidence.error:.2f} px"),
            ("points", evidence.n_points),
            ("photographs per point", f"{evidence.track_length:.1f}"),
        ]
    )
    page.paragraph(_MEANING[verdict.word], note=verdict.word == "poor")
    for advice in verdict.advice:
        page.paragraph(advice[0].upper() + advice[1:] + ".", note=True)
    page.heading("Where the photographs were taken")
    page.wide_picture(
        Picture(seen_from_above,
                "From above: the cameras, where they look, and their numbers in the order of the "
                "photographs. Blue is the first one.", "Map of the cameras")
    )  # fmt: skip
    _add_left_out(page, verdict, files)
    _add_photographs(page, evidence)
    page.heading("What it took")
    page.table(
        ("step", "time", "peak memory"),
        [(name, duration_text(seconds), format_bytes(peak)) for name, seconds, peak in steps],
    )
    page.pairs(settings.items(), folded="settings")
    return page


def _add_left_out(page: Page, verdict: Verdict, files: Mapping[str, Path]) -> None:
    for number, names in enumerate(verdict.other_models, start=2):
        page.paragraph(
            f"Part {number}, which shares too little with the rest: {', '.join(names)}", note=True
        )
    if not verdict.left_out:
        return
    page.heading("Photographs without a place")
    page.table(("photograph", "why"), verdict.left_out, text_columns=2)
    shown = verdict.left_out[:_MAX_LEFT_OUT_PICTURES]
    page.pictures(
        [Picture(files[name], f"{name}: {reason}") for name, reason in shown], width=_THUMBNAIL
    )


def _add_photographs(page: Page, evidence: Evidence) -> None:
    page.heading("All photographs")
    shared = evidence.shared or {}
    partners = [0] * len(evidence.names)
    for i, j in evidence.matches:
        partners[i] += 1
        partners[j] += 1
    page.pairs(
        [
            (f"{number}  {name}",
             f"sharpness {sharp:.2f}{' (blurred)' if sharp < BLURRED else ''}, "
             f"{features:,} features, matches {count} others"
             + (f", shares {shared[name]:,} points with its nearest" if name in shared
                else ", no place"))
            for number, (name, sharp, features, count) in enumerate(
                zip(evidence.names, evidence.sharpness, evidence.n_features, partners, strict=True),
                start=1,
            )
        ],
        folded=f"{len(evidence.names)} photographs",
    )  # fmt: skip


def camera_map(model: Any, names: Sequence[str], size: int = MAP_SIZE) -> np.ndarray:
    """Cameras and points of a reconstruction from above.

    Args:
        model: pycolmap's reconstruction.
        names: All photographs in their order; the path joins those that have a place.
        size: Pixels of a side.

    Returns:
        (size, size, 3) uint8
    """
    images = {model.images[n].name: model.images[n] for n in model.reg_image_ids()}
    numbers = [number for number, name in enumerate(names, start=1) if name in images]
    ordered = [images[names[number - 1]] for number in numbers]
    poses = np.stack([image.cam_from_world().matrix() for image in ordered])
    centers = np.stack([image.projection_center() for image in ordered])
    points, colors = _points_of(model)
    up = up_direction(poses[:, :, :3], points)
    level = upright_rotation(up, centers[0] - centers.mean(axis=0))[[0, 2]]
    at, looks, seen = centers @ level.T, poses[:, 2, :3] @ level.T, points @ level.T
    middle, scale = _frame(at, seen, size)

    def pixels(places: np.ndarray) -> np.ndarray:
        return (places - middle) * scale + size / 2

    paper = np.full((size, size, 3), _PAPER, np.uint8)
    x, y = pixels(seen).astype(int).T if len(seen) else np.zeros((2, 0), int)
    inside = (x >= 0) & (x < size) & (y >= 0) & (y < size)
    # Low points first, so that what lies on top is seen on top.
    order = np.argsort(points[inside] @ up, kind="stable")
    paper[y[inside][order], x[inside][order]] = colors[inside][order]
    picture = Image.fromarray(paper)
    _draw_cameras(ImageDraw.Draw(picture), pixels(at), looks, numbers)
    return np.asarray(picture)


def _points_of(model: Any) -> tuple[np.ndarray, np.ndarray]:
    numbers = sorted(model.point3D_ids())
    numbers = numbers[:: max(1, len(numbers) // _MAX_POINTS)]
    points = np.array([model.points3D[n].xyz for n in numbers]).reshape(-1, 3)
    colors = np.array([model.points3D[n].color for n in numbers], np.uint8).reshape(-1, 3)
    return points, colors


def _frame(at: np.ndarray, seen: np.ndarray, size: int) -> tuple[np.ndarray, float]:
    """Middle of the map and pixels per unit: all cameras, and the points that are not far off."""
    near = np.percentile(seen, (5, 95), axis=0) if len(seen) else at
    both = np.concatenate([at, near])
    low, high = both.min(axis=0), both.max(axis=0)
    return (low + high) / 2, (size - 2 * _MARGIN) / max(float((high - low).max()), 1e-9)


def _draw_cameras(
    draw: ImageDraw.ImageDraw, at: np.ndarray, looks: np.ndarray, numbers: Sequence[int]
) -> None:
    draw.line([tuple(place) for place in at], fill=_PATH, width=1)
    every = -(-len(at) // _LABELS)
    for k in range(len(at) - 1, -1, -1):
        color = _FIRST if k == 0 else _CAMERA
        ahead = at[k] + 22 * looks[k]
        draw.line([tuple(at[k]), tuple(ahead)], fill=color, width=3)
        radius = 7 if k == 0 else 4
        draw.ellipse([*(at[k] - radius), *(at[k] + radius)], fill=color, outline=_INK)
        if k % every == 0:
            # Behind the camera, where its line of sight is not.
            draw.text(tuple(at[k] - 14 * looks[k]), str(numbers[k]), fill=_INK, anchor="mm")
