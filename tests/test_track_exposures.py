# SPDX-License-Identifier: Apache-2.0
"""Exposures before training: from colours of points that several photographs observe."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from gaussian_splatting.components.exposures import ExposureConfig, Exposures
from gaussian_splatting.components.track_exposures import LEAST_POINTS, track_exposures
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.observations import Observations
from gaussian_splatting.engine.training_views import ImageStrip, TrainingView, color_loss
from gaussian_splatting.losses.exposure import beyond_saturation, exposed, mean_exposure
from gaussian_splatting.rasterization import Rows
from tests.support.tiny_scene import tiny_cameras

N_VIEWS = 8
N_POINTS = 300


@dataclass
class Capture:
    """Points of one colour each, painted into photographs of other exposures."""

    exposures: Tensor  # (V, 2, 3)
    changes: dict[str, Tensor] = field(default_factory=dict)  # photographs by name, instead
    points: np.ndarray = field(init=False)
    cameras: list[Camera] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        self.cameras = tiny_cameras(N_VIEWS)
        self.points = rng.uniform(-0.6, 0.6, (N_POINTS, 3)).astype(np.float32)
        self._colors = torch.from_numpy(rng.uniform(0.15, 0.75, (N_POINTS, 3))).float()

    def observations(self, n: int = N_POINTS) -> Observations:
        """All photographs observe the first ``n`` points."""
        rows = {camera.name: np.arange(n, dtype=np.int32) for camera in self.cameras}
        ones = np.ones(N_POINTS, np.float32)
        return Observations(self.points, ones, np.full(N_POINTS, N_VIEWS, np.int32), rows)

    def photograph(self, camera: Camera) -> Tensor:
        """The points in the exposure of a photograph. (H, W, 3) uint8"""
        if camera.name in self.changes:
            return self.changes[camera.name]
        image = torch.full((camera.height, camera.width, 3), 0.5)
        seen = self.observations().seen(camera)
        assert seen is not None
        columns, rows = torch.from_numpy(seen.pixels.astype(np.int64)).T
        image[rows, columns] = self._colors[torch.from_numpy(seen.rows).long()]
        number = [other.name for other in self.cameras].index(camera.name)
        shown = exposed(image, self.exposures[number])
        return (255 * shown.clamp(0, 1)).round().to(torch.uint8)


def drawn_exposures() -> Tensor:
    rng = torch.Generator().manual_seed(2)
    gains = 0.15 * torch.randn(N_VIEWS, 1, 3, generator=rng)
    offsets = 0.03 * torch.randn(N_VIEWS, 1, 3, generator=rng)
    return torch.cat([gains, offsets], dim=1)


def largest_error(found: dict[str, Tensor], capture: Capture) -> float:
    """Of grey and of colours, as photographs show them beside the mean photograph."""
    names = [camera.name for camera in capture.cameras]
    values = torch.stack([found[name] for name in names])
    expected = capture.exposures - mean_exposure(capture.exposures)
    levels = torch.tensor([0.2, 0.7])[:, None, None].expand(2, 1, 3)
    errors = []
    for value, truth in zip(values, expected, strict=True):
        errors.append(float((exposed(levels, value) - exposed(levels, truth)).abs().max()))
    return max(errors)


def test_exposures_are_found_again():
    capture = Capture(drawn_exposures())
    found = track_exposures(capture.cameras, capture.observations(), capture.photograph)
    assert largest_error(found, capture) < 0.02
    untouched = {camera.name: torch.zeros(2, 3) for camera in capture.cameras}
    assert largest_error(untouched, capture) > 0.15


def test_what_stands_in_front_and_what_is_clipped_decides_nothing():
    capture = Capture(drawn_exposures())
    capture.exposures[3, 0] += 0.5
    covered = capture.photograph(capture.cameras[1])
    covered[:, :24] = torch.tensor([240, 10, 200], dtype=torch.uint8)
    capture.changes[capture.cameras[1].name] = covered
    assert int((capture.photograph(capture.cameras[3]) == 255).sum()) > 50
    found = track_exposures(capture.cameras, capture.observations(), capture.photograph)
    assert largest_error(found, capture) < 0.03


def test_pixels_outside_of_masks_are_not_looked_at():
    capture = Capture(drawn_exposures())
    name = capture.cameras[1].name
    whole = capture.photograph(capture.cameras[1])
    weights = torch.full((*whole.shape[:2], 1), 255, dtype=torch.uint8)
    weights[:, :24] = 0
    masked = torch.cat([whole, weights], dim=-1)
    capture.changes[name] = masked
    first = track_exposures(capture.cameras, capture.observations(), capture.photograph)
    masked[:, :24, :3] = 3
    second = track_exposures(capture.cameras, capture.observations(), capture.photograph)
    assert torch.equal(first[name], second[name])


@pytest.mark.parametrize("n_points", [None, 0, LEAST_POINTS - 1])
def test_without_enough_points_nothing_is_estimated(n_points):
    capture = Capture(drawn_exposures())
    observations = None if n_points is None else capture.observations(n_points)
    assert track_exposures(capture.cameras, observations, capture.photograph) == {}


def test_points_of_two_photographs_say_nothing():
    capture = Capture(drawn_exposures())
    pair = capture.cameras[:2]
    found = track_exposures(pair, capture.observations(), capture.photograph)
    assert all(not exposure.any() for exposure in found.values())


def test_exposures_with_estimates_are_learned_from_the_first_iteration_on():
    config = ExposureConfig(True, start=10)
    estimates = {"a": torch.full((2, 3), 0.2), "b": torch.zeros(2, 3)}
    for given, begins in ((estimates, True), ({}, False)):
        exposures = Exposures(config, ("a", "b", "c"), torch.device("cpu"), (1, 100))
        exposures.begin_with(given)
        assert (exposures.leaf("a", 1) is not None) == begins
        spread = exposures.values[0] - exposures.values[2]
        assert torch.allclose(spread, torch.full((2, 3), 0.2 if begins else 0.0), atol=1e-6)
        assert torch.allclose(mean_exposure(exposures.values), torch.zeros(2, 3), atol=1e-6)


def test_saturated_pixels_ask_for_no_less_than_they_show():
    target = torch.tensor([1.0, 1.0, 0.5, 0.0, 0.0])
    image = torch.tensor([1.4, 0.8, 1.4, -0.1, 0.1])
    followed = beyond_saturation(target, image)
    assert followed.tolist() == pytest.approx([1.4, 1.0, 0.5, -0.1, 0.0])


@pytest.mark.parametrize(("has_exposure", "is_pulled"), [(True, False), (False, True)])
def test_a_render_beyond_white_is_pulled_down_only_without_an_exposure(has_exposure, is_pulled):
    camera = tiny_cameras(1)[0]
    size = (camera.height, camera.width, 3)
    image = torch.full(size, 1.2, requires_grad=True)
    white = torch.full(size, 255, dtype=torch.uint8)
    exposure = torch.zeros(2, 3) if has_exposure else None
    view = TrainingView(camera, white, exposure=exposure)
    rows = Rows(0, camera.height)
    strip = ImageStrip(view, rows, slice(0, camera.height), {"color": image})
    color_loss(strip, 0.2).total.backward()
    assert image.grad is not None
    assert (float(image.grad.max()) > 1e-6) == is_pulled
