# SPDX-License-Identifier: Apache-2.0
"""How many (tile, Gaussian) pairs a view will have: as many as at its last visit, or nearly so.

To read the number, the host of a GPU would wait for all that is still to do. Lists that are long
enough need none; whether they were is read with the checks of the step, else the view is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gaussian_splatting.data.cameras import Camera

MARGIN, SPARE = 1.1, 4096
"""Room beyond what the last visit had: as a factor, and for views of few pairs."""

MOST = 2**30  # forecasts end here, so that pairs may double and still be numbered by 32 bits


def with_room(n_pairs: float) -> int:
    return int(MARGIN * n_pairs) + SPARE


class PairsMissed(Exception):
    """Tile lists were too short: nothing that the view said counts."""


class IntersectionPrediction:
    """What the views of a training had when they were seen last."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int, int], tuple[int, int]] = {}

    def guess(self, camera: Camera, n_gaussians: int) -> PredictedIntersections | None:
        """Room for a view; None if it was not seen yet at this size, or had too many."""
        last = self._seen.get(_key(camera))
        if last is None:
            return None
        n_pairs, n_then = last
        capacity = with_room(n_pairs * max(1.0, n_gaussians / max(1, n_then)))
        if capacity > MOST:
            return None
        return PredictedIntersections(self, camera, n_gaussians, capacity)

    def note(self, camera: Camera, n_gaussians: int, n_pairs: int) -> None:
        self._seen[_key(camera)] = (n_pairs, n_gaussians)


@dataclass
class PredictedIntersections:
    """Room for the pairs of one view, and what it lacked."""

    forecast: IntersectionPrediction
    camera: Camera
    n_gaussians: int
    capacity: int
    excess: Tensor | None = None

    def commit(self, excess: float) -> None:
        """Take note of the excess; raise ``PairsMissed`` if there was too little room."""
        self.forecast.note(self.camera, self.n_gaussians, round(self.capacity + excess))
        if excess > 0:
            raise PairsMissed


def _key(camera: Camera) -> tuple[str, int, int]:
    return camera.name, camera.width, camera.height
