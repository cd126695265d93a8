# SPDX-License-Identifier: Apache-2.0
"""Camera poses as a component: learned with the Gaussians, fitted for held-out images.

Motions turn about the camera's centre. They start at zero, have no mean, so that the world stays
where it is, and are pulled back to zero by a little. Learned poses agree with each other, not with
fixed ones. So a held-out view is also measured from the pose in which the finished Gaussians show
its photograph best, as BARF (Lin et al., ICCV 2021, section 4.2) does.

A camera that moves and a world that moves the other way give the same image. So the gradient to a
motion of the camera is a sum over the gradients that the Gaussians have anyway, and no kernel has
to know of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.core.sh_rotation import rotation_generators
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.colmap import find_model, write_poses
from gaussian_splatting.engine.component import Component, ExportTarget, ViewResult
from gaussian_splatting.engine.model import TrainableModel
from gaussian_splatting.engine.training_views import TrainingView, is_counted
from gaussian_splatting.losses.exposure import fit_gain_and_offset
from gaussian_splatting.optim.visited_adam import VisitedAdam, rate_at
from gaussian_splatting.rasterization import WARP, Rasterizer, rasterize
from sugar_utils.errors import UserError

LARGEST_MOTION = 0.03
"""Radians, and extents: twice what is worth repairing; a reconstruction that is worse is wrong."""

RATES = (2e-4, 3e-3)  # least and largest learning rate to begin with
REFINED_MODEL = "sparse_refined"  # folder of the COLMAP model with the learned poses
_MOTIONS = "pose_motions"
_ADAM_STATE = {
    "pose_first_moments": "first",
    "pose_second_moments": "second",
    "pose_steps": "steps",
}
"""Name in checkpoints to attribute of the optimiser."""

STEPS = 50
RATE = 2e-3
FINAL_SHARE = 0.02
"""Radians, and extents of the cameras; the whole way is some 0.03, two degrees."""
_MOVED = ("means", "quats", "sh_rest")


@dataclass(frozen=True)
class PoseConfig:
    """When motions are learned, and how fast."""

    rate: float = 1e-3  # learning rate of rotations in radians, and of shifts in camera extents
    final_share: float = 0.05  # share of the rate that is left at the end; it falls log-linearly
    start: int = 500
    last: int = 30_000
    anchor: float = 0.1

    @classmethod
    def of_run(cls, start: int, last: int, n_cameras: int, views_per_step: int) -> PoseConfig:
        """Choose rates with which a camera can move by ``LARGEST_MOTION`` in a run."""
        n_visits = max(1.0, (last - start) * views_per_step / n_cameras)
        share = cls.final_share
        rate = LARGEST_MOTION * math.log(1 / share) / ((1 - share) * n_visits)
        return cls(rate=min(max(rate, RATES[0]), RATES[1]), start=start, last=last)


class PoseRefinement(Component):
    """The motions of all V training cameras, (V, 6) on the host in float64, and their Adam.

    Shifts are learned in camera extents.
    """

    name = "poses"
    fits_held_out_poses = True

    def __init__(self, cameras: Sequence[Camera], extent: float, config: PoseConfig) -> None:
        self._start = {camera.name: camera for camera in cameras}
        self._rows = {name: row for row, name in enumerate(self._start)}
        self._extent = extent
        self._config = config
        shape = (len(self._rows), 6)
        self.motions = torch.zeros(shape, dtype=torch.float64, device="cpu")
        self._adam = VisitedAdam(shape, torch.float64, torch.device("cpu"))

    def before_view(self, view: TrainingView) -> TrainingView:
        """Move the camera of the view, whose gradients are read for its motion."""
        return replace(view, camera=self.calibrated(view.camera), gradients_are_read=True)

    def after_view(self, result: ViewResult, model: TrainableModel) -> None:
        """Add the gradient of the view to that of its camera's motion."""
        optimizer = model.optimizer
        self.collect(result.view.camera, optimizer.leaves, optimizer.gradients())

    def calibrated(self, camera: Camera) -> Camera:
        """A training camera with its motion."""
        row = self._rows[camera.name]
        return with_motion(camera, self.motions[row], self._extent)

    def collect(
        self, camera: Camera, values: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
    ) -> None:
        """Add the gradient that Gaussians with these values and gradients have for a camera."""
        gradient = pose_gradient(values, gradients, torch.from_numpy(camera.center))
        gradient[3:] *= self._extent
        self._adam.gradient[self._rows[camera.name]] += gradient

    def statistics(self) -> tuple[Tensor, ...]:
        """Gradient of the views of a step; processes add it up in place. (V, 6)"""
        return (self._adam.gradient,)

    def after_step(self, iteration: int) -> None:
        """Move the cameras that the step showed; before the start nothing changes."""
        config = self._config
        if iteration < config.start:
            self._adam.gradient.zero_()
            return
        direction = self._adam.direction()
        rate = rate_at(config.rate, config.final_share, config.start, config.last, iteration)
        was_shown = direction.abs().sum(dim=1, keepdim=True) > 0
        self.motions -= rate * (direction + config.anchor * self.motions * was_shown)
        # Gaussians and cameras could move together without a change of any image.
        self.motions -= self.motions.mean(dim=0)

    def size(self) -> tuple[float, float]:
        """Root mean square of the rotations in degrees, and of the shifts in world units."""
        mean_squares = [part.square().sum(dim=1).mean() for part in self.motions.split(3, 1)]
        turn, shift = (value.sqrt() for value in mean_squares)
        return float(turn.rad2deg()), float(shift) * self._extent

    def export(self, target: ExportTarget) -> None:
        """Write the model of the capture with the learned poses, and say how far they moved."""
        model = find_model(target.scene.root)
        if model is not None:
            write_poses(model, target.root / REFINED_MODEL, target.cameras)
        turn, shift = self.size()
        target.console.headline(f"poses moved by {turn:.3f} degrees and {shift:.4g} units (rms)")

    def state(self) -> dict[str, Tensor]:
        """Motions, moments and numbers of steps of all training cameras."""
        state = {_MOTIONS: self.motions.clone()}
        for name, attribute in _ADAM_STATE.items():
            state[name] = getattr(self._adam, attribute).clone()
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take :meth:`state` back; a checkpoint without poses leaves them at the start."""
        if _MOTIONS not in state:
            return
        present = self.state()
        for name in present:
            if state[name].shape != present[name].shape:
                raise UserError(
                    f"the checkpoint's {name} are not those of {len(self._rows)} photographs; "
                    "start anew with --resume none"
                )
        saved = {name: state[name].double().cpu().clone() for name in present}
        self.motions = saved.pop(_MOTIONS)
        for name, value in saved.items():
            setattr(self._adam, _ADAM_STATE[name], value)


def with_motion(camera: Camera, motion: Tensor, extent: float) -> Camera:
    """A camera turned about its centre and shifted.

    Args:
        motion: Axis times angle in radians, and shift in extents, both in world axes. (6,)
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


def fitted_pose(
    gaussians: Gaussians,
    camera: Camera,
    photograph: Tensor,
    extent: float,
    background: Tensor,
    *,
    exposed: bool = False,
    rasterizer: Rasterizer = WARP,
) -> Camera:
    """The camera moved to where its photograph, (H, W, 3) or (H, W, 4) uint8, is shown best."""
    leaves = {n: getattr(gaussians, n).detach().clone().requires_grad_(True) for n in _MOVED}
    frozen = replace(gaussians, **leaves)
    target = photograph[..., :3].to(background) / 255
    counted = is_counted(photograph)
    weights = torch.ones_like(target[..., :1]) if counted is None else counted[..., None].to(target)
    motion = torch.zeros(1, 6, dtype=torch.float64, device="cpu")
    adam = VisitedAdam(motion.shape, motion.dtype, motion.device)
    best = camera
    least = float("inf")
    for step in range(STEPS + 1):
        moved = with_motion(camera, motion[0], extent)
        with torch.enable_grad():
            image = rasterize(frozen, moved, background, rasterizer=rasterizer).image
            if exposed:
                gain, offset = fit_gain_and_offset(image.detach(), target)
                image = image * gain.to(image) + offset.to(image)
            loss = ((image - target).abs() * weights).mean()
            gradients = torch.autograd.grad(loss, list(leaves.values()))
        if float(loss.detach()) < least:
            best = moved
            least = float(loss.detach())
        by_name: dict[str, Tensor] = dict(zip(_MOVED, gradients, strict=True))
        gradient = pose_gradient(leaves, by_name, torch.from_numpy(moved.center))
        gradient[3:] *= extent
        adam.gradient[0] = gradient
        rate = rate_at(RATE, FINAL_SHARE, 0, STEPS, step)
        motion = motion - rate * adam.direction()
    return best


def pose_gradient(
    values: Mapping[str, Tensor], gradients: Mapping[str, Tensor], center: Tensor
) -> Tensor:
    """Gradient of a loss to the motion of the camera that saw it.

    It is exact where the renderer's gradient is that of its image; the cap of alpha and the limits
    of the linearisation are not (see DOCS/ARCHITECTURE.md).

    Args:
        values: ``means`` (N, 3), ``quats`` (N, 4, of any norm) and ``sh_rest`` (N, 15, 3).
        center: Camera centre in world units. (3,)

    Returns:
        Gradient to a small rotation about the camera's centre, as an axis times an angle in radians
        in world axes, and to a shift in world units. (6,) float64, CPU
    """
    turn, shift = torch.zeros(2, 3, dtype=torch.float64, device="cpu").unbind()
    if "means" in gradients:
        d_means = gradients["means"].double()
        arms = values["means"].detach().double() - center.to(d_means.device)
        turn -= torch.linalg.cross(arms, d_means).sum(dim=0).cpu()
        shift -= d_means.sum(dim=0).cpu()
    if "quats" in gradients:
        quats = values["quats"].detach().double()
        d_quats = gradients["quats"].double()
        real = quats[:, :1]
        vector = quats[:, 1:]
        d_vector = d_quats[:, 1:]
        turned = real * d_vector - d_quats[:, :1] * vector + torch.linalg.cross(vector, d_vector)
        turn -= (0.5 * turned.sum(dim=0)).cpu()
    if "sh_rest" in gradients:
        sh_rest = _by_band(values["sh_rest"].detach())
        d_sh_rest = _by_band(gradients["sh_rest"])
        # In the precision of the parameters: a sum over all Gaussians and colours.
        products = (d_sh_rest @ sh_rest.T).double()
        n_bands = len(sh_rest)
        generators = rotation_generators()[:, :n_bands, :n_bands].to(products.device)
        turn -= (generators * products).sum(dim=(1, 2)).cpu()
    return torch.cat([turn, shift])


def _by_band(coefficients: Tensor) -> Tensor:
    """All values of each coefficient in a row. (N, K, 3) -> (K, 3 N) float32"""
    return coefficients.movedim(1, 0).reshape(coefficients.shape[1], -1).float()
