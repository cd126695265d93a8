# SPDX-License-Identifier: Apache-2.0
"""Gaussians bound to the triangles of a mesh (SuGaR, section 4.3), evaluated by one kernel.

Each triangle carries g flat Gaussians at fixed barycentric coordinates; their in-plane size and
rotation, opacity and colour are free. V vertices, F faces, G = F g Gaussians, face by face.

A triangle's frame is converted to a quaternion once and multiplied by the rotation in its plane.
In the backward pass the gradient of a unit quaternion q is that of a small rotation w about its own
axes, dq = q (0, w) / 2. The rotations of all Gaussians of a triangle add up, in its frame
(n, t, b), to (x, y, z), and with the edge e from the second to the first corner and c, whose
direction is n,

    x = b . de / |e|,   y = -b . dc / |c|,   z = -n . de / |e|.
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import warp as wp
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import normalize

from gaussian_splatting.core.cloud import GaussianCloud, Gaussians
from gaussian_splatting.core.spherical_harmonics import rgb_to_sh
from sugar_scene.mesh_normals import CornerSums
from sugar_scene.triangle_mesh import area_normals
from sugar_utils.errors import UserError
from sugar_utils.warp_arrays import Floats, Ints2d, Vec2s, Vec3s, Vec3s2d, Vec4s
from sugar_utils.warp_launch import FUSED_OPTIONS, Argument, as_array, launch

wp.set_module_options(FUSED_OPTIONS)

PARAMETERS = ("vertices", "sh_dc", "sh_rest", "opacity_logits", "log_scales", "rotations")
"""Optimised fields of :class:`BoundCloud`, in the order in which checkpoints list them."""

BACKGROUND = "background"
PREFIX = f"{BACKGROUND}_"
"""Before the names of the background's parameters."""

MIN_AREA = 1e-18  # world units squared; below, a triangle has no frame and no gradient of it
MIN_CROSS = 1e-6  # world units squared; shorter cross products are not normalised
MIN_RADIUS = 1e-7
INITIAL_OPACITY = 0.1
SH_REST = 15
_MIN_ITEMS = 256
_VECTORS = {1: None, 2: wp.vec2, 3: wp.vec3, 4: wp.vec4}  # Warp's type of rows of so many numbers
_SQRT3 = math.sqrt(3.0)
_MIDDLE = ((1 / 3, 1 / 3, 1 / 3),)


class TriangleLayout(NamedTuple):
    """Where the Gaussians of a triangle sit and how large they start."""

    barycentric: tuple[tuple[float, float, float], ...]  # coordinates of each Gaussian
    radius_factor: float  # initial radius divided by the shortest edge


def _corners_of(a: float, b: float) -> tuple[tuple[float, float, float], ...]:
    """Three points with the weight a at one corner and b at the others."""
    return ((a, b, b), (b, a, b), (b, b, a))


_HALVES = _corners_of(1 / 2, 1 / 4)
_OUTER = _corners_of(2 / 3, 1 / 6)
_INNER = _corners_of(1 / 6, 5 / 12)
LAYOUTS = {
    1: TriangleLayout(_MIDDLE, 1 / (2 * _SQRT3)),
    3: TriangleLayout(_HALVES, 1 / (2 * (_SQRT3 + 1))),
    4: TriangleLayout(_MIDDLE + _OUTER, 1 / (4 * _SQRT3)),
    6: TriangleLayout(_OUTER + _INNER, 1 / (4 + 2 * _SQRT3)),
}
"""By the number of Gaussians per triangle."""


@wp.struct
class Triangle:
    """Frame of a triangle in world units."""

    first: wp.vec3  # edges from the first corner to the second and the third
    second: wp.vec3
    normal: wp.vec3  # unit axes
    tangent: wp.vec3
    bitangent: wp.vec3
    length: float  # of the first edge
    area: float  # twice that of the triangle; 0 where it is degenerate


@wp.func
def triangle_of(face: int, faces: Ints2d, vertices: Vec3s) -> Triangle:
    """Return the frame of a face; that of a degenerate one is the axes, and its area zero."""
    triangle = Triangle()
    origin = vertices[faces[face, 0]]
    triangle.first = vertices[faces[face, 1]] - origin
    triangle.second = vertices[faces[face, 2]] - origin
    cross = wp.cross(triangle.first, triangle.second)
    triangle.length = wp.length(triangle.first)
    triangle.area = wp.length(cross)
    triangle.normal = wp.vec3(1.0, 0.0, 0.0)
    triangle.tangent = wp.vec3(0.0, 1.0, 0.0)
    triangle.bitangent = wp.vec3(0.0, 0.0, 1.0)
    if triangle.area > wp.static(MIN_AREA):
        triangle.normal = cross / triangle.area
        triangle.tangent = -triangle.first / triangle.length
        triangle.bitangent = wp.normalize(wp.cross(triangle.normal, triangle.tangent))
    else:
        triangle.area = 0.0
    return triangle


@wp.func
def turn_in_plane(rotation: wp.vec2) -> wp.vec2:
    """Return the cosine and sine of a complex number's angle."""
    return rotation / wp.max(wp.length(rotation), 1.0e-12)


@wp.func
def half_turn(turn: wp.vec2) -> wp.vec2:
    """Return the cosine and sine of half the angle."""
    if turn[0] >= 0.0:
        cosine = wp.sqrt(0.5 + 0.5 * turn[0])
        return wp.vec2(cosine, 0.5 * turn[1] / cosine)
    sine = wp.sqrt(0.5 - 0.5 * turn[0])
    return wp.vec2(0.5 * turn[1] / sine, sine)


@wp.kernel
def bind_gaussians(
    first: int,
    faces: Ints2d,
    weights: Vec3s,
    thickness: Floats,
    vertices: Vec3s,
    opacity_logits: Floats,
    log_scales: Vec2s,
    rotations: Vec2s,
    means: Vec3s,
    quats: Vec4s,
    scales: Vec3s,
    opacities: Floats,
):
    """Compute the Gaussians of a triangle from its corners and their raw parameters."""
    face = first + wp.tid()
    a = vertices[faces[face, 0]]
    b = vertices[faces[face, 1]]
    c = vertices[faces[face, 2]]
    triangle = triangle_of(face, faces, vertices)
    axes = wp.matrix_from_cols(triangle.normal, triangle.tangent, triangle.bitangent)
    frame = wp.quat_from_matrix(axes)
    for k in range(weights.shape[0]):
        row = face * weights.shape[0] + k
        w = weights[k]
        means[row] = w[0] * a + w[1] * b + w[2] * c
        half = half_turn(turn_in_plane(rotations[row]))
        q = wp.normalize(
            wp.vec4(
                frame[3] * half[0] - frame[0] * half[1],
                frame[3] * half[1] + frame[0] * half[0],
                frame[1] * half[0] + frame[2] * half[1],
                frame[2] * half[0] - frame[1] * half[1],
            )
        )
        if q[0] < 0.0:
            q = -q
        quats[row] = q
        logs = log_scales[row]
        scales[row] = wp.vec3(thickness[0], wp.exp(logs[0]), wp.exp(logs[1]))
        opacities[row] = 1.0 / (1.0 + wp.exp(-opacity_logits[row]))


@wp.kernel
def backpropagate_to_corners(
    first: int,
    faces: Ints2d,
    weights: Vec3s,
    vertices: Vec3s,
    rotations: Vec2s,
    quats: Vec4s,
    scales: Vec3s,
    opacities: Floats,
    d_means: Vec3s,
    d_quats: Vec4s,
    d_scales: Vec3s,
    d_opacities: Floats,
    d_corners: Vec3s2d,
    d_logits: Floats,
    d_logs: Vec2s,
    d_rotations: Vec2s,
):
    """Backpropagate the gradients of a triangle's Gaussians to raw parameters and corners."""
    face = first + wp.tid()
    triangle = triangle_of(face, faces, vertices)
    d_a = wp.vec3(0.0)
    d_b = wp.vec3(0.0)
    d_c = wp.vec3(0.0)
    d_frame = wp.vec3(0.0)
    for k in range(weights.shape[0]):
        row = face * weights.shape[0] + k
        w = weights[k]
        d_a += w[0] * d_means[row]
        d_b += w[1] * d_means[row]
        d_c += w[2] * d_means[row]
        q = quats[row]
        g = d_quats[row]
        axis = wp.vec3(q[1], q[2], q[3])
        along = wp.vec3(g[1], g[2], g[3])
        d_turn = 0.5 * (q[0] * along - g[0] * axis - wp.cross(axis, along))
        rotation = rotations[row]
        turn = turn_in_plane(rotation)
        d_frame += wp.vec3(
            d_turn[0],
            turn[0] * d_turn[1] - turn[1] * d_turn[2],
            turn[1] * d_turn[1] + turn[0] * d_turn[2],
        )
        size = wp.max(wp.length(rotation), 1.0e-12)
        d_rotations[row] = wp.vec2(-turn[1], turn[0]) * (d_turn[0] / size)
        d_logs[row] = wp.vec2(d_scales[row][1] * scales[row][1], d_scales[row][2] * scales[row][2])
        d_logits[row] = d_opacities[row] * opacities[row] * (1.0 - opacities[row])
    if triangle.area > 0.0:
        u = (d_frame[0] * triangle.bitangent - d_frame[2] * triangle.normal) / triangle.length
        v = triangle.bitangent * (d_frame[1] / triangle.area)
        by_first = wp.cross(v, triangle.second)
        by_second = wp.cross(triangle.first, v)
        d_a += u - by_first - by_second
        d_b += by_first - u
        d_c += by_second
    d_corners[face, 0] = d_a
    d_corners[face, 1] = d_b
    d_corners[face, 2] = d_c


class _BindGaussians(torch.autograd.Function):
    """Vertices, opacity logits, log scales, rotations, :class:`Binding` -> Gaussians' values."""

    @staticmethod
    def forward(
        ctx,
        vertices: Tensor,
        logits: Tensor,
        log_scales: Tensor,
        rotations: Tensor,
        binding: Binding,
    ):
        vertices = vertices.detach()
        rotations = rotations.detach()
        n = len(logits)
        means = vertices.new_empty(n, 3)
        quats = vertices.new_empty(n, 4)
        scales = vertices.new_empty(n, 3)
        opacities = vertices.new_empty(n)
        binding.launch(
            bind_gaussians,
            binding.thickness,
            vertices,
            logits.detach(),
            log_scales.detach(),
            rotations,
            means,
            quats,
            scales,
            opacities,
        )
        ctx.binding = binding
        ctx.save_for_backward(vertices, rotations, quats, scales, opacities)
        return means, quats, scales, opacities

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor):
        binding = ctx.binding
        vertices, rotations, quats, scales, opacities = ctx.saved_tensors
        n = len(rotations)
        d_corners = vertices.new_empty(len(binding.faces), 3, 3)
        d_logits = vertices.new_empty(n, 1)
        d_log_scales = vertices.new_empty(n, 2)
        d_rotations = vertices.new_empty(n, 2)
        binding.launch(
            backpropagate_to_corners,
            vertices,
            rotations,
            quats,
            scales,
            opacities,
            *[gradient.contiguous() for gradient in gradients],
            d_corners,
            d_logits,
            d_log_scales,
            d_rotations,
        )
        return binding.sums(d_corners), d_logits, d_log_scales, d_rotations, None


class Binding:
    """Binding of Gaussians to a mesh's triangles; prepared once, as the topology is fixed."""

    def __init__(self, cloud: BoundCloud) -> None:
        self.faces = cloud.faces.int().contiguous()
        self._weights = cloud.vertices.new_tensor(cloud.layout.barycentric)
        self.thickness = cloud.thickness.reshape(1)
        self.sums = CornerSums(cloud.faces, len(cloud.vertices))

    def launch(self, kernel: wp.Kernel, *tensors: Tensor) -> None:
        """Run a kernel over the faces, with tensors of rows of up to four numbers."""
        arguments: list[Argument] = [self.faces, as_array(self._weights, wp.vec3)]
        for tensor in tensors:
            width = 1 if tensor.dim() == 1 else tensor.shape[-1]
            rows = tensor.view(-1) if width == 1 else tensor
            arguments.append(as_array(rows, _VECTORS[width]))
        launch(kernel, len(self.faces), arguments, min_items=_MIN_ITEMS)


@dataclass
class BoundCloud:
    """Raw parameters of mesh-bound Gaussians, in the order in which checkpoints list them."""

    vertices: Tensor  # (V, 3) world units
    sh_dc: Tensor  # (G, 1, 3)
    sh_rest: Tensor  # (G, 15, 3)
    opacity_logits: Tensor  # (G, 1)
    log_scales: Tensor  # in-plane standard deviations, logarithm, (G, 2)
    rotations: Tensor  # in-plane rotation as a complex number, not normalised, (G, 2)
    faces: Tensor  # vertex indices, not optimised, (F, 3) int64
    thickness: Tensor  # standard deviation along the normal, not optimised. Scalar, world units
    background: GaussianCloud | None = None  # free Gaussians of what the mesh does not cover
    antialiased: bool = False  # as in :class:`Gaussians`

    def __len__(self) -> int:
        return len(self.opacity_logits) + (0 if self.background is None else len(self.background))

    def to(self, device: torch.device | str) -> BoundCloud:
        """Return the same Gaussians on a device."""
        moved = {
            name: getattr(self, name).to(device) for name in (*PARAMETERS, "faces", "thickness")
        }
        if self.background is not None:
            moved["background"] = self.background.to(device)
        return replace(self, **moved)

    def with_triangles(self, rows: Tensor) -> BoundCloud:
        """Return the Gaussians on some triangles, and those of the background. (K,)

        All vertices stay.
        """
        per_triangle = self.per_triangle
        offsets = torch.arange(per_triangle, device=rows.device)
        of_triangles = (rows[:, None] * per_triangle + offsets).reshape(-1).to(self.faces.device)
        names = [name for name in PARAMETERS if name != "vertices"]
        kept = {name: getattr(self, name)[of_triangles] for name in names}
        return replace(self, faces=self.faces[rows], **kept)

    def tensors(self) -> dict[str, Tensor]:
        """Return the optimised tensors by name; those of the background have a prefix."""
        tensors = {name: getattr(self, name) for name in PARAMETERS}
        if self.background is not None:
            for name, tensor in self.background.tensors().items():
                tensors[PREFIX + name] = tensor
        return tensors

    @property
    def per_triangle(self) -> int:
        """Gaussians per triangle."""
        return self.opacity_logits.shape[0] // max(1, self.faces.shape[0])

    @property
    def layout(self) -> TriangleLayout:
        """Positions of the Gaussians in a triangle."""
        return triangle_layout(self.per_triangle)

    def activate(self, binding: Binding | None = None) -> Gaussians:
        """Return the Gaussians on the mesh; gradients reach all raw parameters."""
        values = _BindGaussians.apply(
            self.vertices,
            self.opacity_logits,
            self.log_scales,
            self.rotations,
            Binding(self) if binding is None else binding,
        )
        means, quats, scales, opacities = values
        return Gaussians(
            means,
            quats,
            scales,
            opacities,
            self.sh_dc,
            self.sh_rest,
            antialiased=self.antialiased,
        )

    def activate_all(self, binding: Binding | None = None) -> Gaussians:
        """Return the Gaussians on the mesh, then those of the background."""
        bound = self.activate(binding)
        if self.background is None:
            return bound
        return bound.joined(self.background.activate())

    @torch.no_grad()
    def to_gaussians(self) -> GaussianCloud:
        """Return the same Gaussians without their mesh, as any 3DGS program takes them."""
        gaussians = self.activate()
        bound = GaussianCloud(
            means=gaussians.means,
            log_scales=gaussians.scales.log(),
            quats=gaussians.quats,
            sh_dc=self.sh_dc.detach(),
            sh_rest=self.sh_rest.detach(),
            opacity_logits=self.opacity_logits.detach(),
            antialiased=self.antialiased,
        )
        if self.background is None:
            return bound
        return bound.joined(self.background.detached())


def triangle_layout(per_triangle: int) -> TriangleLayout:
    """Return the layout for a number of Gaussians per triangle.

    Raises:
        UserError: There is none for this number.
    """
    if per_triangle not in LAYOUTS:
        raise UserError(
            f"{per_triangle} Gaussians per triangle are not supported; "
            f"--gaussians_per_triangle takes {', '.join(map(str, LAYOUTS))}"
        )
    return LAYOUTS[per_triangle]


def bind_to_mesh(
    vertices: Tensor,
    faces: Tensor,
    vertex_colors: Tensor,
    per_triangle: int,
    extent: float,
    opacity: float = INITIAL_OPACITY,
) -> BoundCloud:
    """Return initial Gaussians on a mesh; their thickness is a millionth of the camera extent.

    Args:
        vertices: (V, 3) world units
        faces: (F, 3)
        vertex_colors: (V, 3) in [0, 1]
        extent: Camera extent in world units.

    Raises:
        UserError: The mesh has no triangles, or there is no layout for ``per_triangle``.
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
        opacity_logits=torch.logit(radius.new_full((n, 1), opacity)),
        log_scales=radius.log()[:, None].expand(n, 2).clone(),
        rotations=rotations,
        faces=faces,
        thickness=radius.new_tensor(extent / 1e6),
    )


def face_normals(triangles: Tensor) -> Tensor:
    """Return unit normals by the order of the corners; zero for degenerate faces.

    (F, 3, 3) -> (F, 3)
    """
    cross = area_normals(triangles)
    return normalize(cross / cross.norm(dim=-1, keepdim=True).clamp_min(MIN_CROSS), dim=-1)


def face_frames(triangles: Tensor) -> Tensor:
    """Return normal, direction from corner 2 to 1, and their cross product as columns.

    (F, 3, 3) -> (F, 3, 3)
    """
    normal = face_normals(triangles)
    tangent = normalize(triangles[:, 0] - triangles[:, 1], dim=-1)
    bitangent = normalize(torch.linalg.cross(normal, tangent), dim=-1)
    return torch.stack([normal, tangent, bitangent], dim=-1)
