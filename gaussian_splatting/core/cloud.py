# SPDX-License-Identifier: Apache-2.0
"""Gaussian clouds: the raw parameters that are optimised and the values the renderer uses.

Quaternions are w, x, y, z (real part first).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gaussian_splatting.core.adjoints import send_back
from gaussian_splatting.core.color_gradients import ColorGradient

ANTIALIASED = "antialiased"
"""Key of a ``.pt``, and comment of a PLY, of Gaussians that are to be rendered so."""
CUTOFF = "cutoff_deviations"
"""Key of a ``.pt``, and word before the number in a comment of a PLY, where splats end."""
NO_CUTOFF = math.inf
MAX_SH_DEGREE = 3  # of the colours
OPAQUE_LOGIT = 15.0
"""Logit that stands for the infinite one of opacity 1: 3e-7 below it, which float32 can represent.
"""
MAX_LOG_SCALE = 88.0
"""Log scale of the largest size, 1e38, whose exponential float32 still holds."""
_MIN_LENGTH = 1e-12  # of a quaternion that is divided by its length


def rotation_matrices(quats: Tensor) -> Tensor:
    """Rotation matrices, local to world, of unit quaternions. (..., 4) -> (..., 3, 3)

    The gradient is that of the polynomial; normalisation removes the part along the quaternion.
    """
    w, x, y, z = quats.unbind(-1)
    entries = (
        1 - 2 * (y * y + z * z),
        2 * (x * y - w * z),
        2 * (x * z + w * y),
        2 * (x * y + w * z),
        1 - 2 * (x * x + z * z),
        2 * (y * z - w * x),
        2 * (x * z - w * y),
        2 * (y * z + w * x),
        1 - 2 * (x * x + y * y),
    )
    return torch.stack(entries, dim=-1).reshape(*quats.shape[:-1], 3, 3)


def quaternions_of(matrices: Tensor) -> Tensor:
    """Unit quaternions of rotation matrices, real part not negative. (..., 3, 3) -> (..., 4)

    Of the four equivalent formulas, each row uses the one with the largest pivot.
    """
    xx, xy, xz, yx, yy, yz, zx, zy, zz = matrices.flatten(start_dim=-2).unbind(-1)
    formulas = (
        (1 + xx + yy + zz, zy - yz, xz - zx, yx - xy),
        (zy - yz, 1 + xx - yy - zz, yx + xy, xz + zx),
        (xz - zx, yx + xy, 1 - xx + yy - zz, zy + yz),
        (yx - xy, xz + zx, zy + yz, 1 - xx - yy + zz),
    )
    candidates = torch.stack([torch.stack(parts, dim=-1) for parts in formulas], dim=-2)
    pivot = torch.diagonal(candidates, dim1=-2, dim2=-1).argmax(dim=-1)
    chosen = torch.take_along_dim(candidates, pivot[..., None, None], dim=-2).squeeze(-2)
    unit = torch.nn.functional.normalize(chosen, dim=-1)
    return torch.where(unit[..., :1] < 0, -unit, unit)


@dataclass(kw_only=True)
class RenderingSettings:
    """Settings of rendering Gaussians; the defaults are those of 3DGS."""

    antialiased: bool = False  # opacities shrink as the rasterizer widens splats below a pixel
    # Standard deviations from its centre at which a splat ends, at the latest where alpha is 1/255.
    cutoff_deviations: float = NO_CUTOFF

    def rendering(self) -> dict[str, Any]:
        """The settings that are not the default, by attribute name."""
        settings: dict[str, Any] = {}
        if self.antialiased:
            settings[ANTIALIASED] = True
        if self.cutoff_deviations != NO_CUTOFF:
            settings[CUTOFF] = self.cutoff_deviations
        return settings


class LateRows(Protocol):
    """Rows of a tensor that may lack steps of the optimiser."""

    def catch_up_in_view(self, radii: Tensor) -> None:
        """Make the steps that Gaussians in view lack. radii: 0 for others, (N,) int32"""
        ...


@dataclass
class Gaussians(RenderingSettings):
    """Activated Gaussians, as the rasterizer and the fields want them."""

    means: Tensor  # centres, (N, 3) world units
    quats: Tensor  # unit quaternions, wxyz, (N, 4)
    scales: Tensor  # standard deviations along the local axes, (N, 3) world units
    opacities: Tensor  # in (0, 1), (N,)
    sh_dc: Tensor  # band 0 of the spherical harmonics, (N, 1, 3)
    sh_rest: Tensor  # bands 1 and up, (N, K - 1, 3)
    # Backward pass of the activation; None: autograd's, if there is a graph.
    adjoint: ActivationAdjoint | None = None
    # Collects gradients of colours as factors; None: they go to ``sh_dc`` and ``sh_rest``.
    color_gradients: list[ColorGradient] | None = None
    # Brings rows of ``sh_rest`` up to date before they are read; None: they are.
    late_bands: LateRows | None = None

    def __len__(self) -> int:
        return self.means.shape[0]

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in the order of the fields."""
        return (self.means, self.quats, self.scales, self.opacities, self.sh_dc, self.sh_rest)

    def joined(self, more: Gaussians) -> Gaussians:
        """These, then others."""
        tensors = [torch.cat(pair) for pair in zip(self.tensors(), more.tensors(), strict=True)]
        means, quats, scales, opacities, sh_dc, sh_rest = tensors
        return Gaussians(means, quats, scales, opacities, sh_dc, sh_rest, **self.rendering())

    def without_bands(self) -> Gaussians:
        """The same with colours that do not depend on the direction: of degree 0."""
        return replace(self, sh_rest=self.sh_rest.detach()[:, :0].contiguous(), late_bands=None)

    def as_leaves(self) -> Gaussians:
        """Leaves that collect gradients: raw parameters as they are, others cut from their graph.

        Loss terms are backpropagated one after the other into the leaves; one
        ``torch.autograd.backward(self.tensors(), grads)`` then carries their sum to the raw
        parameters.
        """
        leaves = []
        for tensor in self.tensors():
            is_parameter = tensor.is_leaf and tensor.requires_grad
            leaves.append(tensor if is_parameter else tensor.detach().requires_grad_(True))
        return Gaussians(
            *leaves,
            color_gradients=self.color_gradients,
            late_bands=self.late_bands,
            **self.rendering(),
        )

    def backpropagate(self, gradients: Sequence[Tensor | None]) -> None:
        """Add gradients of :meth:`tensors` to the raw parameters; they are used up.

        Args:
            gradients: None for tensors without one.
        """
        if self.adjoint is None:
            send_back(self.tensors(), gradients)
            return
        d_means, d_quats, d_scales, d_opacities, d_sh_dc, d_sh_rest = gradients
        send_back([self.means, self.sh_dc, self.sh_rest], [d_means, d_sh_dc, d_sh_rest])
        self.adjoint(d_quats, d_scales, d_opacities)

    def collect(self, leaves: Gaussians) -> None:
        """Send on the gradients that leaves of :meth:`as_leaves` have collected."""
        gradients = []
        for tensor, leaf in zip(self.tensors(), leaves.tensors(), strict=True):
            gradients.append(None if leaf is tensor else leaf.grad)
        self.backpropagate(gradients)


def finite_logits(logits: Tensor) -> Tensor:
    """Opacity logits with those of opacities 1 and 0 made finite; others, and NaN, stay."""
    return torch.where(logits.isinf(), logits.clamp(-OPAQUE_LOGIT, OPAQUE_LOGIT), logits)


def opacities_of(logits: Tensor) -> Tensor:
    """Sigmoid whose bits, unlike torch's, do not depend on how threads divide it. (N, 1) -> (N,)"""
    return (1 + (-logits.squeeze(-1)).exp()).reciprocal()


class _Activated(NamedTuple):
    """Activated values, and the lengths of the raw quaternions, (N, 1)."""

    unit: Tensor
    scales: Tensor
    opacities: Tensor
    lengths: Tensor


class _RawGradients(NamedTuple):
    """Gradients of raw parameters; None where none came back."""

    quats: Tensor | None  # (N, 4)
    log_scales: Tensor | None  # (N, 3)
    opacity_logits: Tensor | None  # (N, 1)


def _activate(quats: Tensor, log_scales: Tensor, logits: Tensor) -> _Activated:
    lengths = torch.linalg.vector_norm(quats, dim=-1, keepdim=True).clamp_min(_MIN_LENGTH)
    return _Activated(quats / lengths, log_scales.exp(), opacities_of(logits), lengths)


def _differentiate(
    values: _Activated,
    d_unit: Tensor | None,
    d_scales: Tensor | None,
    d_opacities: Tensor | None,
) -> _RawGradients:
    """Gradients of raw quaternions, logarithms of scales and logits; few operations."""
    lengths = values.lengths
    unit = values.unit
    opacities = values.opacities
    d_quats = None
    d_log_scales = None
    d_logits = None
    if d_scales is not None:
        d_log_scales = d_scales * values.scales
    if d_unit is not None:
        # Column by column: a product of all would be the largest tensor of the backward pass.
        along = unit[:, 0] * d_unit[:, 0]
        for column in range(1, 4):
            along.addcmul_(unit[:, column], d_unit[:, column])
        d_quats = torch.addcmul(d_unit, unit, along[:, None], value=-1.0).div_(lengths)
    if d_opacities is not None:
        d_logits = (d_opacities * opacities * (1 - opacities))[:, None]
    return _RawGradients(d_quats, d_log_scales, d_logits)


class _Activation(torch.autograd.Function):
    """Unit quaternions, scales and opacities of raw ones."""

    @staticmethod
    def forward(ctx, quats: Tensor, log_scales: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
        values = _activate(quats, log_scales, logits)
        ctx.save_for_backward(*values)
        ctx.set_materialize_grads(False)
        return values.unit, values.scales, values.opacities

    @staticmethod
    @once_differentiable
    def backward(
        ctx, d_unit: Tensor | None, d_scales: Tensor | None, d_opacities: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        values = _Activated(*ctx.saved_tensors)
        return _differentiate(values, d_unit, d_scales, d_opacities)


@dataclass(frozen=True)
class ActivationAdjoint:
    """Backward pass of one activation, without a graph of autograd around it."""

    quats: Tensor  # raw, (N, 4)
    log_scales: Tensor  # (N, 3)
    opacity_logits: Tensor  # (N, 1)
    values: _Activated

    def __call__(
        self, d_unit: Tensor | None, d_scales: Tensor | None, d_opacities: Tensor | None
    ) -> None:
        """Add the gradients of the raw parameters, given those of activated ones."""
        gradients = _differentiate(self.values, d_unit, d_scales, d_opacities)
        send_back([self.quats, self.log_scales, self.opacity_logits], gradients)


@dataclass
class GaussianCloud(RenderingSettings):
    """Raw parameters of N Gaussians, in the order in which checkpoints list them."""

    means: Tensor  # centres, (N, 3) world units
    sh_dc: Tensor  # band 0 of the spherical harmonics, (N, 1, 3)
    sh_rest: Tensor  # bands 1 to 3, (N, 15, 3)
    opacity_logits: Tensor  # opacity before the sigmoid, (N, 1)
    log_scales: Tensor  # natural logarithm of the standard deviations, (N, 3)
    quats: Tensor  # quaternions, wxyz, not normalised, (N, 4)

    def __len__(self) -> int:
        return self.means.shape[0]

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by attribute name."""
        names = [f.name for f in fields(self) if f.name not in (ANTIALIASED, CUTOFF)]
        return {name: getattr(self, name) for name in names}

    def activate(self, *, graph: bool = True) -> Gaussians:
        """Sigmoid, exponential and normalisation; gradients reach the raw parameters.

        Args:
            graph: Whether autograd records it. Without, gradients come back through
                :meth:`Gaussians.backpropagate` alone, at less cost for the host.
        """
        adjoint = None
        if graph:
            shapes = _Activation.apply(self.quats, self.log_scales, self.opacity_logits)
        else:
            raw = (self.quats, self.log_scales, self.opacity_logits)
            values = _activate(*[tensor.detach() for tensor in raw])
            adjoint = ActivationAdjoint(*raw, values)
            shapes = values[:3]
        return Gaussians(
            self.means,
            *shapes,
            sh_dc=self.sh_dc,
            sh_rest=self.sh_rest,
            adjoint=adjoint,
            **self.rendering(),
        )

    def detached(self) -> GaussianCloud:
        """The same values without gradients, sharing memory."""
        return replace(self, **{name: t.detach() for name, t in self.tensors().items()})

    def joined(self, more: GaussianCloud) -> GaussianCloud:
        """These, then others, as new tensors."""
        added = more.tensors()
        joined = {name: torch.cat([t, added[name]]) for name, t in self.tensors().items()}
        return replace(self, **joined)

    def select(self, rows: Tensor) -> GaussianCloud:
        """Rows by mask or index, as new tensors without gradients."""
        return replace(self, **{name: t.detach()[rows] for name, t in self.tensors().items()})

    def to(self, device: torch.device | str) -> GaussianCloud:
        """The same on a device, without gradients."""
        moved = {name: t.detach().to(device) for name, t in self.tensors().items()}
        return replace(self, **moved)
