# SPDX-License-Identifier: Apache-2.0
"""Start of the refinement besides the mesh: colours of photographs, shapes, and a background.

Colours of vertices are as coarse as the mesh and the same from all sides, and an optimiser needs
hundreds of steps to change that: colours of mesh-bound Gaussians come from the photographs.
Decimated triangles are longer than wide, and circles as small as their shortest edge leave most of
them bare: Gaussians begin as ellipses. What the mesh does not show, as sky, distance and parts
thinner than triangles, stays beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.core.spherical_harmonics import SH_C0, sh_basis_of
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.training_views import is_counted
from gaussian_splatting.losses.exposure import unexposed
from gaussian_splatting.rasterization import WARP, Rasterizer
from gaussian_splatting.rasterization.render import masked_shares
from sugar_scene import mesh_bound
from sugar_scene.mesh_bound import BoundCloud
from sugar_scene.triangle_rasterizer import pixels_of_points, rasterize_triangles
from sugar_utils.device import upload

N_COEFFICIENTS = 4  # of bands 0 and 1; two bands measured no better
RIDGE = 1.0  # views in which band 1 is zero, beside those that show a Gaussian
Photograph = tuple[Camera, Tensor, Tensor | None]
"""A camera; its image, (H, W, 3) or (H, W, 4) uint8; its exposure, (2, 3), if it has one."""
SHAPE_SIZE = 1.3  # of initial ellipses, in those that touch the sides of their part of a triangle
MIN_SHAPE = 1 / 30  # length of an ellipse's second axis, in that of the first
MIN_SHARE = 0.2  # of the blending weights beside the mesh
_MAX_SIDE = 480  # of the views that find the background, pixels


@torch.no_grad()
def with_photograph_colors(cloud: BoundCloud, photographs: Iterable[Photograph]) -> BoundCloud:
    """Give Gaussians the colours of the views that show their centres; others stay as they are.

    Spherical harmonics of degree 1, by least squares with a ridge.
    """
    points = cloud.activate().means
    normal = points.new_zeros(len(points), N_COEFFICIENTS, N_COEFFICIENTS)
    right = points.new_zeros(len(points), N_COEFFICIENTS, 3)
    for camera, image, exposure in photographs:
        is_shown, row, column = pixels_of_points(points, cloud.vertices, cloud.faces, camera)
        image = upload(image, points.device)
        counted = is_counted(image)
        if counted is not None:
            is_shown &= counted[row, column]
        colors = image[row, column, :3] / 255.0
        if exposure is not None:
            colors = unexposed(colors, exposure.to(colors.device))
        directions = normalize(points - points.new_tensor(camera.center), dim=1)
        basis = sh_basis_of(directions)[:, :N_COEFFICIENTS] * is_shown[:, None]
        normal += basis[:, :, None] * basis[:, None]
        right += basis[:, :, None] * (colors - 0.5)[:, None]
    has_view = normal[:, :1, :1] > 0
    ridge = normal.new_full((N_COEFFICIENTS,), RIDGE * SH_C0**2)
    ridge[0] = 0.0
    identity = torch.eye(N_COEFFICIENTS, device=normal.device)
    solvable = torch.where(has_view, normal + ridge.diag(), identity)
    coefficients = torch.linalg.solve(solvable, right)
    band_0, band_1 = coefficients.split([1, N_COEFFICIENTS - 1], dim=1)
    rest = torch.cat([band_1, cloud.sh_rest[:, N_COEFFICIENTS - 1 :]], dim=1)
    return replace(
        cloud,
        sh_dc=torch.where(has_view, band_0, cloud.sh_dc),
        sh_rest=torch.where(has_view, rest, cloud.sh_rest),
    )


def with_shapes_of_triangles(cloud: BoundCloud) -> BoundCloud:
    """Make Gaussians ellipses with the proportions of their triangles.

    On an equilateral triangle they are circles, ``SHAPE_SIZE`` times those of the original.
    """
    triangles = cloud.vertices.detach()[cloud.faces]
    axes = mesh_bound.face_frames(triangles)[..., 1:]
    corners = (triangles - triangles.mean(dim=1, keepdim=True)) @ axes
    # Their second moments, scaled to the identity for an equilateral triangle with edges of 1.
    moments = 2 * corners.transpose(1, 2) @ corners
    mean = (moments[:, 0, 0] + moments[:, 1, 1]) / 2
    difference = (moments[:, 0, 0] - moments[:, 1, 1]) / 2
    spread = torch.hypot(difference, moments[:, 0, 1])
    angle = torch.atan2(moments[:, 0, 1], difference) / 2
    layout = mesh_bound.triangle_layout(cloud.per_triangle)
    size = SHAPE_SIZE * layout.radius_factor
    first = (size * (mean + spread).sqrt()).clamp_min(mesh_bound.MIN_RADIUS)
    second = (size * (mean - spread).clamp_min(0).sqrt()).clamp_min(mesh_bound.MIN_RADIUS)
    second = torch.maximum(second, MIN_SHAPE * first)
    log_scales = torch.stack([first, second], dim=1).log()
    rotations = torch.stack([angle.cos(), angle.sin()], dim=1)
    return replace(
        cloud,
        log_scales=log_scales.repeat_interleave(cloud.per_triangle, dim=0),
        rotations=rotations.repeat_interleave(cloud.per_triangle, dim=0),
    )


def background_rows(
    gaussians: Gaussians,
    vertices: Tensor,
    faces: Tensor,
    cameras: Sequence[Camera],
    rasterizer: Rasterizer = WARP,
) -> Tensor:
    """Find Gaussians that blend into pixels which the mesh does not cover. (N,) bool

    With a fifth of their weights there, so that no gap is left around the mesh.
    """

    def uncovered() -> Iterator[tuple[Camera, Tensor]]:
        for camera in cameras:
            view = camera.reduced(_MAX_SIDE)
            hits = rasterize_triangles(vertices, faces, view)
            yield view, (~hits.covered).float()

    return masked_shares(gaussians, uncovered(), rasterizer) > MIN_SHARE
