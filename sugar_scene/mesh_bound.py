# SPDX-License-Identifier: Apache-2.0
"""Gaussians bound to the triangles of a mesh (SuGaR, section 4.3).

Each triangle carries g flat Gaussians at fixed barycentric coordinates. Moving a vertex moves
them; their in-plane size and rotation, opacity and colour are free. Letters: V vertices, F faces,
G = F g Gaussians, face by face.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import normalize

from gaussian_splatting.cloud import GaussianCloud, Gaussians
from gaussian_splatting.rasterization.spherical_harmonics import rgb_to_sh
from sugar_scene.bound_kernels import Placement
from sugar_utils.errors import UserError

MIN_CROSS = 1e-6
"""Length below which a cross product is not normalised further. World units squared"""

MIN_RADIUS = 1e-7
INITIAL_OPACITY = 0.1
SH_REST = 15
_SQRT3 = math.sqrt(3.0)


@dataclass(frozen=True)
class TriangleLayout:
    """Where the Gaussians of a triangle sit and how large they start.

    Attributes:
        barycentric: One row of coordinates per Gaussian.
        radius_factor: Initial standard deviation per unit of the shortest edge: the radius of
            the largest circles that fit side by side into an equilateral triangle.
    """

    barycentric: tuple[tuple[float, float, float], ...]
    radius_factor: float


LAYOUTS = {
    1: TriangleLayout(((1 / 3, 1 / 3, 1 / 3),), 1 / (2 * _SQRT3)),
    3: TriangleLayout(
        ((1 / 2, 1 / 4, 1 / 4), (1 / 4, 1 / 2, 1 / 4), (1 / 4, 1 / 4, 1 / 2)),
        1 / (2 * (_SQRT3 + 1)),
    ),
    4: TriangleLayout(
        (
            (1 / 3, 1 / 3, 1 / 3),
            (2 / 3, 1 / 6, 1 / 6),
            (1 / 6, 2 / 3, 1 / 6),
            (1 / 6, 1 / 6, 2 / 3),
        ),
        1 / (4 * _SQRT3),
    ),
    6: TriangleLayout(
        (
            (2 / 3, 1 / 6, 1 / 6),
            (1 / 6, 2 / 3, 1 / 6),
            (1 / 6, 1 / 6, 2 / 3),
            (1 / 6, 5 / 12, 5 / 12),
            (5 / 12, 1 / 6, 5 / 12),
            (5 / 12, 5 / 12, 1 / 6),
        ),
        1 / (4 + 2 * _SQRT3),
    ),
}


@dataclass
class BoundCloud:
    """Raw parameters of mesh-bound Gaussians, in the order in which checkpoints list them.

    Attributes:
        vertices: (V, 3) world units
        sh_dc: (G, 1, 3)
        sh_rest: (G, 15, 3)
        opacity_logits: (G, 1)
        log_scales: In-plane standard deviations, logarithm. (G, 2)
        rotations: In-plane rotation as a complex number, not normalised. (G, 2)
        faces: Vertex indices, not optimised. (F, 3) int64
        thickness: Standard deviation along the normal, not optimised. Scalar, world units
    """

    vertices: Tensor
    sh_dc: Tensor
    sh_rest: Tensor
    opacity_logits: Tensor
    log_scales: Tensor
    rotations: Tensor
    faces: Tensor
    thickness: Tensor

    def to(self, device: torch.device | str) -> BoundCloud:
        """The same on another device."""
        return BoundCloud(*(getattr(self, f.name).to(device) for f in fields(self)))

    @property
    def per_triangle(self) -> int:
        """Gaussians per triangle g."""
        return self.opacity_logits.shape[0] // max(1, self.faces.shape[0])

    @property
    def layout(self) -> TriangleLayout:
        """Where they sit on each triangle."""
        return triangle_layout(self.per_triangle)

    def activate(self, placement: Placement | None = None) -> Gaussians:
        """Place the Gaussians on the mesh; gradients reach all raw parameters.

        Args:
            placement: What was prepared for this topology; None prepares it.
        """
        return (placement or Placement(self)).activate(self)

    @torch.no_grad()
    def freed(self) -> GaussianCloud:
        """The same Gaussians without their mesh, as any 3DGS program takes them."""
        gaussians = self.activate()
        return GaussianCloud(
            means=gaussians.means,
            sh_dc=self.sh_dc.detach(),
            sh_rest=self.sh_rest.detach(),
            opacity_logits=self.opacity_logits.detach(),
            log_scales=gaussians.scales.log(),
            quats=gaussians.quats,
        )


def triangle_layout(per_triangle: int) -> TriangleLayout:
    """The layout for 1, 3, 4 or 6 Gaussians per triangle.

    Raises:
        UserError: For any other number.
    """
    if per_triangle not in LAYOUTS:
        raise UserError(
            f"{per_triangle} Gaussians per triangle are not supported; "
            f"--gaussians_per_triangle takes {', '.join(map(str, LAYOUTS))}"
        )
    return LAYOUTS[per_triangle]


def bind_to_mesh(
    vertices: Tensor, faces: Tensor, vertex_colors: Tensor, per_triangle: int, extent: float
) -> BoundCloud:
    """Initial Gaussians on a mesh.

    Args:
        vertices: (V, 3) world units
        faces: (F, 3) integers
        vertex_colors: (V, 3) in [0, 1]
        per_triangle: 1, 3, 4 or 6.
        extent: Camera extent; a millionth of it is the thickness. World units

    Raises:
        UserError: For a mesh without triangles or an unsupported number per triangle.
    """
    layout = triangle_layout(per_triangle)
    if faces.shape[0] == 0:
        raise UserError("the mesh has no triangles to bind Gaussians to; extract it again")
    faces = faces.long()
    triangles = vertices.float()[faces]
    edges = triangles - triangles.roll(1, dims=1)
    shortest = edges.norm(dim=-1).amin(dim=-1).repeat_interleave(per_triangle)
    radius = (layout.radius_factor * shortest).clamp_min(MIN_RADIUS)
    weights = triangles.new_tensor(layout.barycentric)
    colors = torch.einsum("kc,fcd->fkd", weights, vertex_colors.float()[faces]).reshape(-1, 1, 3)
    n = radius.shape[0]
    rotations = radius.new_zeros(n, 2)
    rotations[:, 0] = 1.0
    return BoundCloud(
        vertices=vertices.float().clone(),
        sh_dc=rgb_to_sh(colors),
        sh_rest=radius.new_zeros(n, SH_REST, 3),
        opacity_logits=torch.logit(radius.new_full((n, 1), INITIAL_OPACITY)),
        log_scales=radius.log()[:, None].expand(n, 2).clone(),
        rotations=rotations,
        faces=faces,
        thickness=radius.new_tensor(extent / 1e6),
    )


def face_normals(triangles: Tensor) -> Tensor:
    """Unit normals by the order of the corners. (F, 3, 3) -> (F, 3); zero for degenerate ones."""
    a, b, c = triangles.unbind(1)
    cross = torch.linalg.cross(b - a, c - a)
    return normalize(cross / cross.norm(dim=-1, keepdim=True).clamp_min(MIN_CROSS), dim=-1)


def face_frames(triangles: Tensor) -> Tensor:
    """Orthonormal frames: normal, direction from the second to the first corner, their product.

    Args:
        triangles: Corners. (F, 3, 3) world units

    Returns:
        Rotation matrices whose columns are the axes. (F, 3, 3)
    """
    normal = face_normals(triangles)
    tangent = normalize(triangles[:, 0] - triangles[:, 1], dim=-1)
    bitangent = normalize(torch.linalg.cross(normal, tangent), dim=-1)
    return torch.stack([normal, tangent, bitangent], dim=-1)
