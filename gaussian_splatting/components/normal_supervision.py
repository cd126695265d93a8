# SPDX-License-Identifier: Apache-2.0
"""Normal maps of photographs as a loss term: where there is no texture, they keep surfaces flat."""

from __future__ import annotations

import torch
from torch import Tensor

from gaussian_splatting.core.cloud import Gaussians, rotation_matrices
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.maps.normal_maps import KnownNormals
from gaussian_splatting.engine.component import Component
from gaussian_splatting.engine.loss_terms import LossTerm
from gaussian_splatting.engine.training_views import AddedLoss, ImageStrip, TrainingView

NAME = "normal_map"
N_COLUMNS = 3  # of what is blended for it


class NormalSupervision(Component):
    """Rotates flat Gaussians towards the normals of maps."""

    name = NAME

    def __init__(self, known: KnownNormals) -> None:
        self._known = known

    def before_view(self, view: TrainingView) -> TrainingView:
        """Add the normal term, which reads blended normals in camera axes."""
        return view.with_loss(AddedLoss(self.name, (normal_term(self._known),), facing_normals))


def normal_supervision(known: KnownNormals) -> tuple[NormalSupervision, ...]:
    """The component where the scene has normal maps; else none."""
    return (NormalSupervision(known),) if known.maps else ()


def facing_normals(gaussians: Gaussians, camera: Camera) -> Tensor:
    """Shortest axes of Gaussians, turned to the camera, in its axes. (N, 3)"""
    shortest = gaussians.scales.detach().argmin(dim=1)
    columns = shortest[:, None, None].expand(-1, 3, 1)
    normals = rotation_matrices(gaussians.quats).gather(2, columns).squeeze(2)
    rotation = torch.from_numpy(camera.rotation).to(normals)
    in_view = normals @ rotation.T
    centers = camera.to_view(gaussians.means.detach())
    is_facing = (in_view.detach() * centers).sum(dim=1, keepdim=True) < 0
    return torch.where(is_facing, in_view, -in_view)


def normal_term(known: KnownNormals) -> LossTerm:
    """Mean of 1 - cos over the Gaussians of a pixel, blended, where a map knows the normal.

    It counts where the photograph has no texture; what nothing covers is as wrong as a right angle.
    """

    def value(strip: ImageStrip) -> Tensor:
        blended = strip.feature(NAME)
        normals = known.of(strip.view.camera, blended.device)
        if normals is None:
            return blended.sum() * 0
        is_known = normals.abs().sum(dim=-1) > 0
        counted = strip.view.counted_pixels
        if counted is not None:
            is_known = is_known & counted
        weights = strip.view.texture_weights * is_known
        strip_weights = strip.rows_of(weights)[strip.counted_rows]
        strip_normals = strip.rows_of(normals)[strip.counted_rows]
        errors = strip_weights * (1 - (blended * strip_normals).sum(dim=-1))
        return errors.sum() / is_known.sum().clamp_min(1)

    return LossTerm(NAME, known.weight, "image", value)
