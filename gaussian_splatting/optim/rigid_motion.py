# SPDX-License-Identifier: Apache-2.0
"""The gradient of an image to its camera's pose, read off the gradients of the Gaussians.

A camera that moves and a world that moves the other way give the same image. So the gradient to a
motion of the camera is a sum over the gradients that the Gaussians have anyway, and no kernel has
to know of it. Motions turn about the camera's centre.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from gaussian_splatting.rasterization.reference import sh_basis_reference

_DIRECTIONS = 400


def pose_gradient(
    values: Mapping[str, Tensor], gradients: Mapping[str, Tensor], center: Tensor
) -> Tensor:
    """Gradient of a loss to the motion of the camera that saw it.

    It is exact where the renderer's gradient is that of its image; the cap of alpha and the limits
    of the linearisation are not (see DOCS/ARCHITECTURE.md).

    Args:
        values: Parameters ``means`` (N, 3), ``quats`` (N, 4, of any norm) and ``sh_rest``
            (N, 15, 3).
        gradients: Gradients of the same names; one that is missing is zero.
        center: Camera centre in world units. (3,)

    Returns:
        Gradient to a small rotation of the camera about its centre, as an axis times an angle in
        radians in world axes, and to a shift of its centre in world units. (6,) float64, CPU
    """
    turn, shift = torch.zeros(2, 3, dtype=torch.float64, device="cpu").unbind()
    if "means" in gradients:
        pull = gradients["means"].double()
        arms = values["means"].detach().double() - center.to(pull.device)
        turn -= torch.linalg.cross(arms, pull).sum(dim=0).cpu()
        shift -= pull.sum(dim=0).cpu()
    if "quats" in gradients:
        turn -= _turn_of_quaternions(values["quats"].detach(), gradients["quats"]).cpu()
    if "sh_rest" in gradients:
        turn -= _turn_of_colors(values["sh_rest"].detach(), gradients["sh_rest"]).cpu()
    return torch.cat([turn, shift])


def _turn_of_quaternions(quats: Tensor, gradients: Tensor) -> Tensor:
    """Gradient to a rotation of the world, through the orientations. (3,) float64"""
    w, v = quats[:, :1].double(), quats[:, 1:].double()
    d_w, d_v = gradients[:, :1].double(), gradients[:, 1:].double()
    return 0.5 * (w * d_v - d_w * v + torch.linalg.cross(v, d_v)).sum(dim=0)


def _turn_of_colors(sh_rest: Tensor, gradients: Tensor) -> Tensor:
    """Gradient to a rotation of the world, through the colours' dependence on the direction."""
    n_bands = sh_rest.shape[1]
    rows = gradients.movedim(1, 0).reshape(n_bands, -1)
    columns = sh_rest.movedim(1, 0).reshape(n_bands, -1)
    # In the precision of the parameters: a sum over all Gaussians and colours.
    products = (rows.float() @ columns.float().T).double()
    generators = rotation_generators()[:, :n_bands, :n_bands].to(products.device)
    return (generators * products).sum(dim=(1, 2))


@functools.cache
def rotation_generators() -> Tensor:
    """How coefficients of the bands 1 to 3 change when the function turns about x, y or z.

    Returns:
        For each axis the derivative of the coefficients to the angle. (3, 15, 15) float64
    """
    rng = torch.Generator("cpu").manual_seed(0)
    directions = torch.randn(_DIRECTIONS, 3, generator=rng, dtype=torch.float64, device="cpu")
    directions = torch.nn.functional.normalize(directions, dim=1)
    basis = sh_basis_reference(directions)[:, 1:]
    found = []
    for axis in torch.eye(3, dtype=torch.float64, device="cpu"):
        # The turned function has at d the value that the function has at d turned back.
        back = -torch.linalg.cross(axis.expand_as(directions), directions)
        _, slope = torch.autograd.functional.jvp(sh_basis_reference, directions, back)
        found.append(torch.linalg.lstsq(basis, slope[:, 1:]).solution)
    return torch.stack(found)
