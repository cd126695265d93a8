# SPDX-License-Identifier: Apache-2.0
"""Gaussians put on their triangles by one kernel each way.

A triangle's frame is turned into a quaternion once; the turn in its plane, by half the angle, is
multiplied to it.

On the way back the gradient of a unit quaternion q is that of a small turn w about its own axes,
dq = q (0, w) / 2. Turns of all Gaussians of a triangle add up, in its frame (n, t, b), to
(x, y, z), and with the edge e from the second to the first corner and c, whose direction is n,

    x = b . de / |e|,   y = -b . dc / |c|,   z = -n . de / |e|.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import warp as wp
from torch import Tensor
from torch.autograd.function import once_differentiable

from gaussian_splatting.cloud import Gaussians
from sugar_scene.mesh.mesh_normals import CornerSums
from sugar_utils.warp_launch import as_array, launch

if TYPE_CHECKING:
    from sugar_scene.mesh_bound import BoundCloud

wp.set_module_options(
    {"enable_backward": False, "cpu_compiler_flags": "-march=native -ffp-contract=fast"}
)

MIN_AREA = 1e-18
"""Twice the area below which a triangle has no frame and its corners feel no turn. World units
squared"""

_MIN_ITEMS = 256


@wp.struct
class Triangle:
    """A triangle's frame, its first edge's length, and twice its area.

    Attributes:
        first: Edge from the first to the second corner.
        second: Edge from the first to the third corner.
        normal: Unit normal n.
        tangent: Unit vector t from the second to the first corner.
        bitangent: Unit vector b, n x t.
        length: Of the first edge.
        area: Twice the triangle's; 0 where it has no frame.
    """

    first: wp.vec3
    second: wp.vec3
    normal: wp.vec3
    tangent: wp.vec3
    bitangent: wp.vec3
    length: float
    area: float


@wp.func
def triangle_of(
    face: int, faces: wp.array2d(dtype=int), vertices: wp.array(dtype=wp.vec3)
) -> Triangle:
    found = Triangle()
    origin = vertices[faces[face, 0]]
    found.first = vertices[faces[face, 1]] - origin
    found.second = vertices[faces[face, 2]] - origin
    cross = wp.cross(found.first, found.second)
    found.length = wp.length(found.first)
    found.area = wp.length(cross)
    found.normal = wp.vec3(1.0, 0.0, 0.0)
    found.tangent = wp.vec3(0.0, 1.0, 0.0)
    found.bitangent = wp.vec3(0.0, 0.0, 1.0)
    if found.area > wp.static(MIN_AREA):
        found.normal = cross / found.area
        found.tangent = -found.first / found.length
        found.bitangent = wp.normalize(wp.cross(found.normal, found.tangent))
    else:
        found.area = 0.0
    return found


@wp.func
def turn_in_plane(rotation: wp.vec2) -> wp.vec2:
    """Cosine and sine of a complex number's angle."""
    return rotation / wp.max(wp.length(rotation), 1.0e-12)


@wp.func
def half_turn(turn: wp.vec2) -> wp.vec2:
    """Cosine and sine of half the angle."""
    if turn[0] >= 0.0:
        cosine = wp.sqrt(0.5 + 0.5 * turn[0])
        return wp.vec2(cosine, 0.5 * turn[1] / cosine)
    sine = wp.sqrt(0.5 - 0.5 * turn[0])
    return wp.vec2(0.5 * turn[1] / sine, sine)


@wp.kernel
def place_gaussians(
    first: int,
    faces: wp.array2d(dtype=int),
    weights: wp.array(dtype=wp.vec3),
    thickness: wp.array(dtype=float),
    vertices: wp.array(dtype=wp.vec3),
    opacity_logits: wp.array(dtype=float),
    log_scales: wp.array(dtype=wp.vec2),
    rotations: wp.array(dtype=wp.vec2),
    means: wp.array(dtype=wp.vec3),
    quats: wp.array(dtype=wp.vec4),
    scales: wp.array(dtype=wp.vec3),
    opacities: wp.array(dtype=float),
):
    """All Gaussians of a triangle."""
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
def pull_corners(
    first: int,
    faces: wp.array2d(dtype=int),
    weights: wp.array(dtype=wp.vec3),
    vertices: wp.array(dtype=wp.vec3),
    rotations: wp.array(dtype=wp.vec2),
    quats: wp.array(dtype=wp.vec4),
    scales: wp.array(dtype=wp.vec3),
    opacities: wp.array(dtype=float),
    d_means: wp.array(dtype=wp.vec3),
    d_quats: wp.array(dtype=wp.vec4),
    d_scales: wp.array(dtype=wp.vec3),
    d_opacities: wp.array(dtype=float),
    d_corners: wp.array2d(dtype=wp.vec3),
    d_logits: wp.array(dtype=float),
    d_logs: wp.array(dtype=wp.vec2),
    d_rotations: wp.array(dtype=wp.vec2),
):
    """Gradients of a triangle's Gaussians to their own values and to its corners."""
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
        pull = 0.5 * (q[0] * along - g[0] * axis - wp.cross(axis, along))
        rotation = rotations[row]
        turn = turn_in_plane(rotation)
        d_frame += wp.vec3(
            pull[0], turn[0] * pull[1] - turn[1] * pull[2], turn[1] * pull[1] + turn[0] * pull[2]
        )
        size = wp.max(wp.length(rotation), 1.0e-12)
        d_rotations[row] = wp.vec2(-turn[1], turn[0]) * (pull[0] / size)
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


class _Placing(torch.autograd.Function):
    """Vertices, opacity logits, log scales, rotations, :class:`Placement` -> Gaussians' values."""

    @staticmethod
    def forward(ctx, vertices, logits, log_scales, rotations, placement: Placement):
        ctx.placement = placement
        raw = [value.detach() for value in (vertices, logits, log_scales, rotations)]
        means, quats, scales, opacities = placement.place(*raw)
        ctx.save_for_backward(raw[0], raw[3], quats, scales, opacities)
        return means, quats, scales, opacities

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor):
        return *ctx.placement.pull(*ctx.saved_tensors, *gradients), None


class Placement:
    """Where the Gaussians of a mesh's triangles sit; prepared once, as the topology stays.

    Args:
        cloud: Its triangles, thickness and number of Gaussians are taken.
    """

    def __init__(self, cloud: BoundCloud) -> None:
        self._faces = cloud.faces.int().contiguous()
        self._weights = cloud.vertices.new_tensor(cloud.layout.barycentric)
        self._thickness = cloud.thickness.reshape(1)
        self._sums = CornerSums(cloud.faces, len(cloud.vertices))

    def activate(self, cloud: BoundCloud) -> Gaussians:
        """The Gaussians; gradients reach all raw parameters. The cloud's topology is this one's."""
        raw = cloud.vertices, cloud.opacity_logits, cloud.log_scales, cloud.rotations
        means, quats, scales, opacities = _Placing.apply(*raw, self)
        return Gaussians(means, quats, scales, opacities, cloud.sh_dc, cloud.sh_rest)

    def place(
        self, vertices: Tensor, logits: Tensor, log_scales: Tensor, rotations: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Means, (G, 3); quaternions, (G, 4); scales, (G, 3); opacities, (G,)."""
        n = len(logits)
        sizes = (n, 3), (n, 4), (n, 3), (n,)
        found = tuple(vertices.new_empty(size) for size in sizes)
        self._launch(
            place_gaussians,
            self._thickness, vertices, logits, log_scales, rotations, *found,
        )  # fmt: skip
        return found

    def pull(
        self, vertices: Tensor, rotations: Tensor, quats: Tensor, scales: Tensor,
        opacities: Tensor, *gradients: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients to vertices, logits, log scales and rotations, of those to what was placed."""
        n = len(rotations)
        d_corners = vertices.new_empty(len(self._faces), 3, 3)
        own = [vertices.new_empty(size) for size in ((n, 1), (n, 2), (n, 2))]
        gradients = [gradient.contiguous() for gradient in gradients]
        self._launch(
            pull_corners,
            vertices, rotations, quats, scales, opacities, *gradients, d_corners, *own,
        )  # fmt: skip
        return self._sums(d_corners), *own

    def _launch(self, kernel, *tensors: Tensor) -> None:
        arrays = [self._faces, as_array(self._weights, wp.vec3), *map(_described, tensors)]
        launch(kernel, len(self._faces), arrays, device=self._faces.device, min_items=_MIN_ITEMS)


_VECTORS = {2: wp.vec2, 3: wp.vec3, 4: wp.vec4}


def _described(tensor: Tensor):
    """Rows of up to four numbers, as kernels take them."""
    if tensor.dim() == 1 or tensor.shape[-1] == 1:
        return as_array(tensor.view(-1))
    return as_array(tensor, _VECTORS[tensor.shape[-1]])
