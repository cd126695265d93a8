# SPDX-License-Identifier: Apache-2.0
"""Gaussian clouds: the raw parameters that are optimised and the values the renderer uses."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass
class Gaussians:
    """Activated Gaussians, as the rasterizer and the fields want them.

    Attributes:
        means: Centres. (N, 3) world units
        quats: Unit quaternions, wxyz. (N, 4)
        scales: Standard deviations along the local axes. (N, 3) world units
        opacities: In (0, 1). (N,)
        sh_dc: Band 0 of the spherical harmonics. (N, 1, 3)
        sh_rest: Bands 1 and up. (N, K - 1, 3)
    """

    means: Tensor
    quats: Tensor
    scales: Tensor
    opacities: Tensor
    sh_dc: Tensor
    sh_rest: Tensor

    def __len__(self) -> int:
        return self.means.shape[0]

    def tensors(self) -> tuple[Tensor, ...]:
        """All attributes in declaration order."""
        return tuple(getattr(self, f.name) for f in fields(self))

    def as_leaves(self) -> Gaussians:
        """Leaves that collect gradients: raw parameters as they are, others cut from their graph.

        What is cut shares its memory. A raw parameter collects its gradient itself: cut, it would
        hold the gradient twice in the end.

        Several loss terms can be backpropagated one after the other into the leaves; a single
        ``torch.autograd.backward(self.tensors(), grads)`` then carries their sum to the raw
        parameters. Each term's graph is freed as soon as it is done.
        """
        return Gaussians(
            *(
                t if t.is_leaf and t.requires_grad else t.detach().requires_grad_(True)
                for t in self.tensors()
            )
        )


@dataclass
class GaussianCloud:
    """Raw parameters of N Gaussians, in the order in which checkpoints list them.

    Attributes:
        means: Centres. (N, 3) world units
        sh_dc: Band 0 of the spherical harmonics. (N, 1, 3)
        sh_rest: Bands 1 to 3. (N, 15, 3)
        opacity_logits: Opacity before the sigmoid. (N, 1)
        log_scales: Natural logarithm of the standard deviations. (N, 3)
        quats: Quaternions, wxyz, not normalised. (N, 4)
    """

    means: Tensor
    sh_dc: Tensor
    sh_rest: Tensor
    opacity_logits: Tensor
    log_scales: Tensor
    quats: Tensor

    def __len__(self) -> int:
        return self.means.shape[0]

    def tensors(self) -> dict[str, Tensor]:
        """Parameters by attribute name, in order."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def activate(self) -> Gaussians:
        """Sigmoid, exponential and normalisation; gradients reach the raw parameters."""
        return Gaussians(
            means=self.means,
            quats=torch.nn.functional.normalize(self.quats, dim=-1),
            scales=self.log_scales.exp(),
            opacities=self.opacity_logits.sigmoid().squeeze(-1),
            sh_dc=self.sh_dc,
            sh_rest=self.sh_rest,
        )

    def detached(self) -> GaussianCloud:
        """The same values without gradients, sharing memory."""
        return GaussianCloud(**{name: t.detach() for name, t in self.tensors().items()})

    def select(self, rows: Tensor) -> GaussianCloud:
        """Rows by mask or index, as new tensors without gradients."""
        return GaussianCloud(**{name: t.detach()[rows] for name, t in self.tensors().items()})

    def to(self, device: torch.device | str) -> GaussianCloud:
        """Copy to another device."""
        return GaussianCloud(**{name: t.detach().to(device) for name, t in self.tensors().items()})
