# SPDX-License-Identifier: Apache-2.0
"""Camera poses that are learned beside the Gaussians: a small motion per training photograph.

Reconstructions of weak texture or rolling shutters are off by some pixels, which Gaussians answer
with blur and floaters. The motions start at zero, have no mean, so that the world stays where it
is, and are pulled back to zero by a little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.optim.rigid_motion import pose_gradient
from gaussian_splatting.optim.visited_adam import VisitedAdam, rate_at
from sugar_utils.errors import UserError

WAY = 0.03
"""Radians, and extents: twice what is worth repairing; a reconstruction that is worse is wrong."""

RATES = (2e-4, 3e-3)
"""Least and largest learning rate to begin with."""

_MOTIONS = "pose_motions"
_KEPT = {"pose_first_moments": "first", "pose_second_moments": "second", "pose_steps": "steps"}
"""Name in checkpoints to attribute of the optimiser."""


@dataclass(frozen=True)
class PoseConfig:
    """How poses are learned.

    Attributes:
        rate: Learning rate of rotations in radians, and of shifts in camera extents.
        final_share: Share of the rate that is left at the end; it falls log-linearly.
        start: First iteration in which poses move: before it the Gaussians are not there yet.
        last: Last iteration of the run.
        anchor: Share of a motion that each of its steps takes back, times the rate.
    """

    rate: float = 1e-3
    final_share: float = 0.05
    start: int = 500
    last: int = 30_000
    anchor: float = 0.1

    @classmethod
    def of_run(cls, start: int, last: int, n_cameras: int, views_per_step: int) -> PoseConfig:
        """Rates with which a camera can go ``WAY`` in a run, which shows it so many times."""
        n_visits = max(1.0, (last - start) * views_per_step / n_cameras)
        share = cls.final_share
        rate = WAY * math.log(1 / share) / ((1 - share) * n_visits)
        return cls(rate=min(max(rate, RATES[0]), RATES[1]), start=start, last=last)


class PoseRefinement:
    """The motions of all training cameras, and their Adam.

    On the host, in float64: V rows of 6 numbers.

    Args:
        cameras: Training views with the poses to start from.
        extent: Camera extent in world units; shifts are learned in it.
        config: Rates.
    """

    def __init__(self, cameras: Sequence[Camera], extent: float, config: PoseConfig) -> None:
        self._start = {camera.name: camera for camera in cameras}
        self._rows = {name: row for row, name in enumerate(self._start)}
        self._extent = extent
        self._config = config
        shape = (len(self._rows), 6)
        self.motions = torch.zeros(shape, dtype=torch.float64, device="cpu")
        self._adam = VisitedAdam(shape, torch.float64, torch.device("cpu"))

    def moved(self, camera: Camera) -> Camera:
        """The camera in its present pose, at its own size."""
        row = self._rows[camera.name]
        return with_motion(camera, self.motions[row], self._extent)

    def collect(
        self, camera: Camera, values: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
    ) -> None:
        """Take note of what one view pulls at its pose.

        Args:
            camera: The view, in its present pose.
            values: Parameters of the Gaussians.
            gradients: Their gradients, of this view alone.
        """
        found = pose_gradient(values, gradients, torch.from_numpy(camera.center))
        found[3:] *= self._extent
        self._adam.gradient[self._rows[camera.name]] += found

    def statistics(self) -> Tensor:
        """What the views of a step pulled; processes add it up in place. (V, 6)"""
        return self._adam.gradient

    def step(self, iteration: int) -> None:
        """Move the cameras of the step's views."""
        config = self._config
        if iteration < config.start:
            self._adam.gradient.zero_()
            return
        direction = self._adam.direction()
        rate = rate_at(config.rate, config.final_share, config.start, config.last, iteration)
        seen = direction.abs().sum(dim=1, keepdim=True) > 0
        self.motions -= rate * (direction + config.anchor * self.motions * seen)
        # Gaussians and cameras could move together and no photograph would tell.
        self.motions -= self.motions.mean(dim=0)

    def size(self) -> tuple[float, float]:
        """Root mean square of the rotations in degrees, and of the shifts in world units."""
        turn, shift = (part.square().sum(dim=1).mean().sqrt() for part in self.motions.split(3, 1))
        return float(turn.rad2deg()), float(shift) * self._extent

    def state(self) -> dict[str, Tensor]:
        """What resuming needs."""
        kept = {name: getattr(self._adam, own).clone() for name, own in _KEPT.items()}
        return {_MOTIONS: self.motions.clone(), **kept}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take :meth:`state` back; a checkpoint without poses leaves them at the start.

        Raises:
            UserError: It is of another number of photographs.
        """
        if _MOTIONS not in state:
            return
        own = self.state()
        wrong = [name for name in own if state[name].shape != own[name].shape]
        if wrong:
            raise UserError(
                f"the checkpoint's {wrong[0]} are not those of {len(self._rows)} photographs; "
                "start anew with --resume none"
            )
        saved = {name: state[name].double().cpu().clone() for name in own}
        self.motions = saved.pop(_MOTIONS)
        for name, value in saved.items():
            setattr(self._adam, _KEPT[name], value)


def with_motion(camera: Camera, motion: Tensor, extent: float) -> Camera:
    """A camera turned about its centre and shifted.

    Args:
        camera: The camera.
        motion: Axis times angle in radians, and shift in extents, both in world axes. (6,)
        extent: World units of one extent.
    """
    turn = _rotation(motion[:3].numpy())
    rotation = camera.rotation @ turn.T
    center = camera.center + extent * motion[3:].numpy()
    return replace(camera, rotation=rotation, translation=-rotation @ center)


def _rotation(vector: np.ndarray) -> np.ndarray:
    """Rotation matrix of an axis times an angle (Rodrigues)."""
    angle = float(np.linalg.norm(vector))
    if angle == 0.0:
        return np.eye(3)
    x, y, z = vector / angle
    skew = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + np.sin(angle) * skew + (1 - np.cos(angle)) * (skew @ skew)
