# SPDX-License-Identifier: Apache-2.0
"""Which views of a capture see the same surface from somewhere else, and not from too far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.observations import Observations
from sugar_utils.random import derive_seed, draw_labels


@dataclass(frozen=True)
class NeighborRule:
    """What makes a view a neighbour.

    Attributes:
        max_angle: Largest angle between the directions of view, in degrees.
        min_baseline: Least distance of the cameras, in camera extents.
        max_baseline: Largest one.
        kept: Neighbours that a view has at most.
    """

    max_angle: float = 30.0
    min_baseline: float = 0.002
    max_baseline: float = 0.5
    kept: int = 8


class NeighborViews:
    """The neighbours of training views, and those that other views have among them.

    Args:
        cameras: Training views.
        extent: Camera extent in world units.
        rule: What makes a view a neighbour.
        observations: Points that photographs observe; None where that is not known.
    """

    def __init__(
        self,
        cameras: Sequence[Camera],
        extent: float,
        rule: NeighborRule | None = None,
        observations: Observations | None = None,
    ) -> None:
        self._cameras = list(cameras)
        self._extent = extent
        self._rule = rule or NeighborRule()
        self._centers = np.stack([camera.center for camera in cameras])
        self._directions = np.stack([camera.rotation[2] for camera in cameras])
        shared = _SharedPoints(cameras, observations)
        self._by_name = {
            camera.name: self.among(camera, shared.with_view(row))
            for row, camera in enumerate(cameras)
        }

    def of(self, name: str) -> tuple[Camera, ...]:
        """Neighbours of a training view, the best first; none if it has none."""
        return self._by_name.get(name, ())

    def among(self, camera: Camera, common: np.ndarray | None = None) -> tuple[Camera, ...]:
        """Training views that are neighbours of any view, the best first.

        Args:
            camera: The view.
            common: Points that it has in common with each training view; None if unknown.
        """
        rule, extent = self._rule, self._extent
        cosine = np.clip(self._directions @ camera.rotation[2], -1.0, 1.0)
        angle = np.degrees(np.arccos(cosine))
        baseline = np.linalg.norm(self._centers - camera.center, axis=1)
        near = (baseline >= rule.min_baseline * extent) & (baseline <= rule.max_baseline * extent)
        itself = np.array([other.name == camera.name for other in self._cameras])
        others = np.flatnonzero(near & (angle <= rule.max_angle) & ~itself)
        shared = np.zeros(len(others), np.int64) if common is None else common[others]
        # By points in common where there are any, then by angle; equals in the order of views.
        best = others[np.lexsort((angle[others], -shared))]
        return tuple(self._cameras[other] for other in best[: rule.kept])

    def draw(self, name: str, seed: int, iteration: int, view_index: int = 0) -> Camera | None:
        """One neighbour of a training view, by iteration and seed; None if there is none."""
        found = self.of(name)
        if not found:
            return None
        labels = draw_labels(iteration, view_index)
        return found[derive_seed(seed, "neighbor view", *labels) % len(found)]

    @property
    def lonely(self) -> list[str]:
        """Names of the training views without neighbours."""
        return [name for name, found in self._by_name.items() if not found]


class _SharedPoints:
    """How many points of the reconstruction two views have in common."""

    def __init__(self, cameras: Sequence[Camera], observations: Observations | None) -> None:
        none = np.zeros(0, np.int32)
        rows = {} if observations is None else observations.rows
        self._rows = [rows.get(camera.name, none) for camera in cameras]
        n_points = 0 if observations is None else len(observations.points)
        self._seen = np.zeros(n_points, dtype=bool)

    def with_view(self, view: int) -> np.ndarray:
        """Points that each view has in common with this one. (number of views,) int64"""
        self._seen[self._rows[view]] = True
        counts = np.array([int(self._seen[rows].sum()) for rows in self._rows])
        self._seen[self._rows[view]] = False
        return counts
