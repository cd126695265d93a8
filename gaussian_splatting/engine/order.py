# SPDX-License-Identifier: Apache-2.0
"""The order in which training views come: a fresh permutation of all of them per epoch."""

from __future__ import annotations

import torch

from sugar_utils.random import generator


class CameraOrder:
    """Which view belongs to which step, computed from the seed alone.

    Args:
        n_cameras: Number of training views, at least 1.
        seed: Random seed of the run.
        label: Name of the stage, so that stages see different orders.
    """

    def __init__(self, n_cameras: int, seed: int, label: str) -> None:
        self._n = n_cameras
        self._seed = seed
        self._label = label
        self._epoch = -1
        self._permutation: list[int] = []

    def epoch(self, step: int) -> int:
        """How many complete passes lie behind a step (steps count from 0)."""
        return step // self._n

    def index(self, step: int) -> int:
        """Index of the view of a step."""
        epoch = self.epoch(step)
        if epoch != self._epoch:
            rng = generator(self._seed, self._label, "camera order", epoch)
            self._permutation = torch.randperm(self._n, generator=rng, device="cpu").tolist()
            self._epoch = epoch
        return self._permutation[step % self._n]
