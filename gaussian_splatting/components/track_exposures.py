# SPDX-License-Identifier: Apache-2.0
"""Exposures of photographs before training, from the points that several of them observe.

A point has one colour, and photographs of other exposures show it in others. Colours of points and
exposures of photographs are found in turn: a point has the median of what its photographs show once
their exposures are taken out; a photograph has the gain and offset that bring the colours of its
points to what it shows. So a model needs not learn the differences first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera, LoadImage
from gaussian_splatting.data.observations import Observations
from gaussian_splatting.engine.training_views import is_counted
from gaussian_splatting.engine.view_sampling import smaller
from gaussian_splatting.losses.exposure import fit_robustly, mean_exposure, unexposed

SIDE = 400  # longest side of photographs, pixels: what surrounds a keypoint is averaged
ROUNDS = 6
LEAST_POINTS = 30  # of a photograph
LEAST_VIEWS = 3  # of a point
UNSATURATED = (0.01, 0.99)  # range of colours that a camera did not clip


@dataclass(frozen=True)
class _Samples:
    """Colours of the points in one photograph."""

    points: np.ndarray  # rows of the points, (n,)
    colors: np.ndarray  # (n, 3) float64 in [0, 1]


def track_exposures(
    cameras: Sequence[Camera],
    observations: Observations | None,
    load_image: LoadImage,
) -> dict[str, Tensor]:
    """Estimate exposures of photographs; empty without points that several observe.

    Args:
        load_image: Returns a photograph, (H, W, 3) or (H, W, 4) uint8.

    Returns:
        Logarithms of gains, then offsets, (2, 3) float32 each, by the name of the photograph.
        Photographs that observe few points are left out.
    """
    if observations is None:
        return {}
    samples = {}
    for camera in cameras:
        sampled = _sampled(camera, observations, load_image)
        if sampled is not None:
            samples[camera.name] = sampled
    if not samples:
        return {}
    exposures = {name: torch.zeros(2, 3, device="cpu") for name in samples}
    for _ in range(ROUNDS):
        colors = _point_colors(samples, exposures, len(observations.points))
        for name, sampled in samples.items():
            exposures[name] = _fitted(sampled, colors, exposures[name])
        mean = mean_exposure(torch.stack(list(exposures.values())))
        exposures = {name: exposure - mean for name, exposure in exposures.items()}
    return exposures


def _sampled(camera: Camera, observations: Observations, load_image: LoadImage) -> _Samples | None:
    """Colours of a photograph at the points that it observes; None where they are few."""
    small, image = smaller(camera, load_image(camera), SIDE)
    observed = observations.seen(small)
    if observed is None:
        return None
    columns, rows = observed.pixels.astype(int).T
    is_kept = np.ones(len(rows), bool)
    counted = is_counted(image)
    if counted is not None:
        is_kept = counted.numpy()[rows, columns]
    if is_kept.sum() < LEAST_POINTS:
        return None
    colors = image[..., :3].numpy()[rows, columns] / 255.0
    return _Samples(observed.rows[is_kept], colors[is_kept])


def _point_colors(
    samples: Mapping[str, _Samples], exposures: Mapping[str, Tensor], n_points: int
) -> np.ndarray:
    """Median colours of points without exposures. (P, 3); nan where few photographs show it"""
    points = np.concatenate([sampled.points for sampled in samples.values()])
    parts = []
    for name, sampled in samples.items():
        exposed = torch.from_numpy(sampled.colors)
        parts.append(unexposed(exposed, exposures[name].double()).numpy())
    values = np.concatenate(parts)
    present, count = np.unique(points, return_counts=True)
    first = np.cumsum(count) - count
    colors = np.full((n_points, 3), np.nan)
    for channel in range(3):
        ordered = values[np.lexsort((values[:, channel], points)), channel]
        lower = ordered[first + (count - 1) // 2]
        upper = ordered[first + count // 2]
        colors[present, channel] = (lower + upper) / 2
    colors[present[count < LEAST_VIEWS]] = np.nan
    return colors


def _fitted(sampled: _Samples, colors: np.ndarray, exposure: Tensor) -> Tensor:
    """Fit the exposure of a photograph to colours of points; where few are known, it stays."""
    point_colors = colors[sampled.points]
    pixel_colors = sampled.colors
    low, high = UNSATURATED
    is_unsaturated = ((pixel_colors > low) & (pixel_colors < high)).all(axis=1)
    is_usable = np.isfinite(point_colors[:, 0]) & is_unsaturated
    if is_usable.sum() < LEAST_POINTS:
        return exposure
    point_colors = point_colors[is_usable]
    pixel_colors = pixel_colors[is_usable]
    gain, offset = fit_robustly(torch.from_numpy(point_colors), torch.from_numpy(pixel_colors))
    return torch.stack([gain.log(), offset]).float()
