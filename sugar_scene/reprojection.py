# SPDX-License-Identifier: Apache-2.0
"""Several views of one surface: which see it, and from pixel to pixel and back.

A pixel's point is projected into a neighbouring view, and the point that its own depth gives there
back again. Where both views see the same surface point the pixel is met; by occlusion or wrong
depth it is missed by some pixels.

Every Gaussian is a plane: n . X = d in camera axes, n its normal towards the camera. Blending
gives N = sum w n and D = sum w d, and the point of a pixel's ray r = K^-1 p~ on the blended plane
is at z = D / (N . r) along the view axis. The weights' sum cancels, so half transparent edges are
not drawn towards the camera, as in a blended depth.

Many samples fall on one pixel. Their gradients are added as integers: added as floats they would
differ from run to run in the last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import warp as wp
from torch import Tensor
from torch.nn import functional

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.observations import Observations
from sugar_utils.random import derive_seed, draw_labels
from sugar_utils.warp_launch import as_array, launch

MAX_CYCLE = 1.0  # pixels; points that miss by more are different or too uncertain
_MIN_SQUARE = 1e-12


@dataclass(frozen=True)
class ViewPair:
    reference: Camera
    neighbor: Camera
    rotation: np.ndarray  # X of the reference is rotation X + translation of the neighbour, (3, 3)
    translation: np.ndarray  # (3,) float64, world units

    @classmethod
    def of(cls, reference: Camera, neighbor: Camera) -> ViewPair:
        rotation = neighbor.rotation @ reference.rotation.T
        translation = neighbor.translation - rotation @ reference.translation
        return cls(reference, neighbor, rotation, translation)


def bilinear_depth(depth: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Read a depth map, (H, W), 0 where unknown, between the middles of its pixels, (n, 2).

    Returns:
        Depth, and where all of the four pixels around have one. (n,) each; the gradient reaches
        the positions.
    """
    height, width = depth.shape
    x, y = (at - 0.5).unbind(-1)
    x0, y0 = x.detach().floor(), y.detach().floor()
    inside = (x0 >= 0) & (y0 >= 0) & (x0 < width - 1) & (y0 < height - 1)
    # Positions that are not finite are inside of nothing.
    first = torch.where(inside, y0, 0).long() * width + torch.where(inside, x0, 0).long()
    right, down = x - x0, y - y0
    step, below = int(width > 1), width if height > 1 else 0
    flat = depth.reshape(-1)
    corners = [flat[first + more] for more in (0, step, below, below + step)]
    known = inside & (torch.stack(corners) > 0).all(dim=0)
    top = corners[0] + (corners[1] - corners[0]) * right
    bottom = corners[2] + (corners[3] - corners[2]) * right
    return torch.where(known, top + (bottom - top) * down, 1.0), known


def cycle_error(
    rays: Tensor, depth: Tensor, neighbor_depth: Tensor, pair: ViewPair
) -> tuple[Tensor, Tensor]:
    """How far pixels are missed on the way to the neighbour and back.

    Args:
        rays: Points of the pixels' rays at depth 1. (n, 3)
        depth: Depth of the reference at the pixels. (n,) world units
        neighbor_depth: Depth map of the neighbour, 0 where unknown. (H', W') world units

    Returns:
        Distances in pixels of the reference, (n,), with a gradient to ``depth``, and where there is
        one: the point lies in the neighbour's image, which has a depth there.
    """
    reference, neighbor = pair.reference, pair.neighbor
    rotation = depth.new_tensor(pair.rotation)
    translation = depth.new_tensor(pair.translation)
    there = (rays * depth[:, None]) @ rotation.T + translation
    in_front = there[:, 2] > MIN_DEPTH
    tangents = there[:, :2] / torch.where(in_front, there[:, 2], 1.0)[:, None]
    focal = depth.new_tensor([neighbor.fx, neighbor.fy])
    middle = depth.new_tensor([neighbor.cx, neighbor.cy])
    seen, known = bilinear_depth(neighbor_depth, tangents * focal + middle)
    met = torch.cat([tangents, torch.ones_like(tangents[:, :1])], dim=1) * seen[:, None]
    back = (met - translation) @ rotation
    known = known & in_front & (back[:, 2] > MIN_DEPTH)
    again = back[:, :2] / torch.where(known, back[:, 2], 1.0)[:, None]
    missed = (again - rays[:, :2]) * depth.new_tensor([reference.fx, reference.fy])
    missed = torch.where(known[:, None], missed, 0.0)
    squares = missed.square().sum(dim=-1)
    # A square root has no gradient at zero.
    return squares.clamp_min(_MIN_SQUARE).sqrt(), known


def cycle_weights(error: Tensor, known: Tensor) -> Tensor:
    """exp(-error), and 0 where the neighbour sees something else; without a gradient. (n,)"""
    error = error.detach()
    return torch.where(known & (error < MAX_CYCLE), (-error).exp(), 0.0)


MIN_FACING = 0.05  # least -N . r; smaller ones are transparent or at a grazing angle
REACH = 10.0  # camera extents; Gaussians farther off are sky that has no parallax and no planes
MIN_DEPTH = 1e-4  # points nearer to the camera than this have no pixel. World units.


def plane_depth(plane: Tensor, rays: Tensor) -> tuple[Tensor, Tensor]:
    """Depth at which rays of depth 1, (..., 3), meet blended planes N and D, (..., 4).

    Returns:
        Depth along the view axis, 1 where it is undefined, in world units; and where it is known.
        (...,) each. The gradient reaches the planes, where there is a depth.
    """
    facing = (plane[..., :3] * rays).sum(dim=-1)
    distance = plane[..., 3]
    known = (facing < -MIN_FACING) & (distance < MIN_DEPTH * facing)
    return torch.where(known, distance, -1.0) / torch.where(known, facing, -1.0), known


def triangle_planes(vertices: Tensor, faces: Tensor, camera: Camera, chosen: Tensor) -> Tensor:
    """Planes of triangles as :func:`plane_depth` takes them, towards the camera. (n, 4)

    Args:
        vertices: (V, 3) float32 world units; gradients reach them.
        faces: (F, 3) int64
        chosen: Rows of the faces. (n,)
    """
    axes = torch.arange(3, device=vertices.device)
    corners = gather(vertices.reshape(-1), 3 * faces[chosen.long()][..., None] + axes)
    rotation = torch.from_numpy(camera.rotation).to(vertices)
    corners = corners @ rotation.T + torch.from_numpy(camera.translation).to(vertices)
    a, b, c = corners.unbind(1)
    normal = functional.normalize(torch.linalg.cross(b - a, c - a), dim=-1)
    distance = (normal * a).sum(dim=-1, keepdim=True)
    planes = torch.cat([normal, distance], dim=-1)
    return torch.where(distance > 0, -planes, planes)


_BITS = 36  # of the largest gradient as an integer: 2^26 of them fit into 63 bits


def bilinear(values: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Read a map, (H, W), bilinearly at columns and rows, clamped at the border. (S,)

    0.5 is the middle of the first pixel. Gradients reach the map, with the same bits in every run
    on every device, and the points, where they are not clamped.
    """
    height, width = values.shape
    x = (u - 0.5).clamp(0, width - 1)
    y = (v - 0.5).clamp(0, height - 1)
    # A point that is not a number reads NaN; its index must be one of the map all the same.
    left, top = x.detach().floor().nan_to_num(0.0), y.detach().floor().nan_to_num(0.0)
    a, b = x - left, y - top
    column, row = left.long(), top.long()
    right, below = (column + 1).clamp_max(width - 1), (row + 1).clamp_max(height - 1)
    corners = torch.stack([row * width, row * width, below * width, below * width])
    corners += torch.stack([column, right, column, right])
    weights = torch.stack([(1 - a) * (1 - b), a * (1 - b), (1 - a) * b, a * b])
    return (gather(values.reshape(-1), corners) * weights).sum(dim=0)


def gather(values: Tensor, index: Tensor) -> Tensor:
    """Elements of a vector by int64 index of any shape; gradients have the same bits every time."""
    return _Gather.apply(values, index)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.n_values = values.shape[0]
        return values[index]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return ordered_sum(gradient.reshape(-1), index.reshape(-1), ctx.n_values), None


def ordered_sum(values: Tensor, index: Tensor, n_places: int) -> Tensor:
    """Add M <= 2^26 values to places, (M,) int64, with the same bits for any order of additions.

    They are added as multiples of 2^-36 of the power of two above the largest; NaN if any is not
    finite.
    """
    if values.numel() == 0:
        return values.new_zeros(n_places)
    largest = values.abs().max().double()
    scale = torch.exp2((_BITS - torch.frexp(largest).exponent).double())
    whole = (values.double() * scale).round().to(torch.int64)
    sums = torch.zeros(n_places, dtype=torch.int64, device=values.device)
    sums.index_add_(0, index, whole)
    result = sums.double() / scale
    return torch.where(largest.isfinite(), result, torch.nan).to(values.dtype)


@dataclass(frozen=True)
class NeighborRule:
    max_angle: float = 30.0
    min_baseline: float = 0.002
    max_baseline: float = 0.5
    kept: int = 8


class NeighborViews:
    """The neighbours of training views, and those that other views have among them."""

    def __init__(
        self,
        cameras: Sequence[Camera],
        extent: float,
        rule: NeighborRule | None = None,
        observations: Observations | None = None,
    ) -> None:
        self._cameras, self._extent = list(cameras), extent
        self._rule = rule or NeighborRule()
        self._centers = np.stack([camera.center for camera in cameras])
        self._directions = np.stack([camera.rotation[2] for camera in cameras])
        points, none = {} if observations is None else observations.rows, np.zeros(0, np.int32)
        rows = [points.get(camera.name, none) for camera in cameras]
        seen = np.zeros(0 if observations is None else len(observations.points), dtype=bool)
        self._by_name = {}
        for camera, own in zip(cameras, rows, strict=True):
            seen[own] = True
            common = np.array([int(seen[others].sum()) for others in rows])
            seen[own] = False
            self._by_name[camera.name] = self.among(camera, common)

    def of(self, name: str) -> tuple[Camera, ...]:
        """Neighbours of a training view, the best first; none if it has none."""
        return self._by_name.get(name, ())

    def among(self, camera: Camera, common: np.ndarray | None = None) -> tuple[Camera, ...]:
        """Training views that are neighbours of any view, the best first.

        ``common`` counts the points that it shares with each training view; None if unknown.
        """
        rule, extent = self._rule, self._extent
        cosine = np.clip(self._directions @ camera.rotation[2], -1.0, 1.0)
        angle = np.degrees(np.arccos(cosine))
        baseline = np.linalg.norm(self._centers - camera.center, axis=1)
        near = (baseline >= rule.min_baseline * extent) & (baseline <= rule.max_baseline * extent)
        itself = np.array([other.name == camera.name for other in self._cameras])
        others = np.flatnonzero(near & (angle <= rule.max_angle) & ~itself)
        shared = np.zeros(len(others), np.int64) if common is None else common[others]
        # By points in common where there are any, then by angle; equals in the order of views.
        best = others[np.lexsort((angle[others], -shared))]
        return tuple(self._cameras[other] for other in best[: rule.kept])

    def draw(self, name: str, seed: int, iteration: int, view_index: int = 0) -> Camera | None:
        """One neighbour of a training view, by iteration and seed; None if there is none."""
        found = self.of(name)
        if not found:
            return None
        labels = draw_labels(iteration, view_index)
        return found[derive_seed(seed, "neighbor view", *labels) % len(found)]

    @property
    def without_neighbors(self) -> list[str]:
        return [name for name, found in self._by_name.items() if not found]


wp.set_module_options({"enable_backward": False})

PATCH_RADIUS = 3  # patches have 7 x 7 pixels
MIN_VARIANCE = 4e-5  # of grey values in [0, 1]; patches with less have nothing to match
EPSILON = 1e-6  # added to both variances
UNCOUNTED = -1.0  # grey value of masked pixels; patches that touch one do not count
_MIN_ITEMS = 64
_RADIUS = wp.constant(PATCH_RADIUS)
_LEAST = wp.constant(MIN_VARIANCE)
_EPS = wp.constant(EPSILON)


@wp.struct
class Pair:
    """Two pinhole views and the motion between them, as a kernel argument."""

    rotation: wp.mat33
    translation: wp.vec3
    fx: float
    fy: float
    cx: float
    cy: float
    fx2: float
    fy2: float
    cx2: float
    cy2: float


def _pair_argument(pair: ViewPair) -> Pair:
    filled = Pair()
    filled.rotation = wp.mat33(*(float(v) for v in pair.rotation.ravel()))
    filled.translation = wp.vec3(*(float(v) for v in pair.translation))
    for camera, suffix in ((pair.reference, ""), (pair.neighbor, "2")):
        for name in ("fx", "fy", "cx", "cy"):
            setattr(filled, name + suffix, float(getattr(camera, name)))
    return filled


@wp.kernel
def match_patches(
    first: int, pair: Pair, pixels: wp.array(dtype=wp.vec2i), planes: wp.array(dtype=wp.vec3),
    gray: wp.array2d(dtype=float), gray2: wp.array2d(dtype=float),
    correlation: wp.array(dtype=float), gradient: wp.array(dtype=wp.vec3),
    counts: wp.array(dtype=wp.uint8),
):  # fmt: skip
    """Correlation of one patch and its gradient to the plane; rows that do not count stay zero."""
    i = first + wp.tid()
    pixel = pixels[i]
    m = planes[i]
    column = pixel[0]
    row = pixel[1]
    if column < _RADIUS or row < _RADIUS:
        return
    if column + _RADIUS >= gray.shape[1] or row + _RADIUS >= gray.shape[0]:
        return
    r0 = pair.rotation
    t = pair.translation
    # Grey values are taken relative to the middle ones: their squares would cancel in float32.
    base = gray[row, column]
    base2 = float(0.0)
    sum_a = float(0.0)
    sum_b = float(0.0)
    sum_aa = float(0.0)
    sum_bb = float(0.0)
    sum_ab = float(0.0)
    d_b = wp.vec3()
    d_ab = wp.vec3()
    d_bb = wp.vec3()
    for j in range(-_RADIUS, _RADIUS + 1):
        for k in range(-_RADIUS, _RADIUS + 1):
            a = gray[row + j, column + k]
            ray = wp.vec3(
                (float(column + k) + 0.5 - pair.cx) / pair.fx,
                (float(row + j) + 0.5 - pair.cy) / pair.fy,
                1.0,
            )
            inverse_depth = wp.dot(m, ray)
            y = r0 * ray + t * inverse_depth
            if not (a >= 0.0 and inverse_depth > 0.0 and y[2] > 1.0e-6):
                return
            iz = 1.0 / y[2]
            u = pair.fx2 * y[0] * iz + pair.cx2 - 0.5
            v = pair.fy2 * y[1] * iz + pair.cy2 - 0.5
            if not (u >= 0.0 and v >= 0.0):
                return
            if not (u < float(gray2.shape[1] - 1) and v < float(gray2.shape[0] - 1)):
                return
            x0 = int(u)
            y0 = int(v)
            p00 = gray2[y0, x0]
            p01 = gray2[y0, x0 + 1]
            p10 = gray2[y0 + 1, x0]
            p11 = gray2[y0 + 1, x0 + 1]
            if wp.min(wp.min(p00, p01), wp.min(p10, p11)) < 0.0:
                return
            fu = u - float(x0)
            fv = v - float(y0)
            top = p00 + (p01 - p00) * fu
            bottom = p10 + (p11 - p10) * fu
            slope_u = (p01 - p00) + ((p11 - p10) - (p01 - p00)) * fv
            slope_v = bottom - top
            b = top + (bottom - top) * fv
            if j == -_RADIUS and k == -_RADIUS:
                base2 = b
            # Both coordinates move along the ray's derivative T (dm . ray).
            du = pair.fx2 * iz * (t[0] - t[2] * y[0] * iz)
            dv = pair.fy2 * iz * (t[1] - t[2] * y[1] * iz)
            step = (slope_u * du + slope_v * dv) * ray
            a -= base
            b -= base2
            sum_a += a
            sum_b += b
            sum_aa += a * a
            sum_bb += b * b
            sum_ab += a * b
            d_b += step
            d_ab += a * step
            d_bb += b * step
    share = 1.0 / float((2 * _RADIUS + 1) * (2 * _RADIUS + 1))
    mean_a = sum_a * share
    mean_b = sum_b * share
    variance_a = wp.max(sum_aa * share - mean_a * mean_a, 0.0)
    variance_b = wp.max(sum_bb * share - mean_b * mean_b, 0.0)
    if variance_a < _LEAST:
        return
    covariance = sum_ab * share - mean_a * mean_b
    scale = 1.0 / wp.sqrt((variance_a + _EPS) * (variance_b + _EPS))
    value = covariance * scale
    counts[i] = wp.uint8(1)
    correlation[i] = value
    d_covariance = (d_ab - mean_a * d_b) * share
    half_d_variance = (d_bb - mean_b * d_b) * share
    gradient[i] = scale * d_covariance - (value / (variance_b + _EPS)) * half_d_variance


class _Matched(torch.autograd.Function):
    @staticmethod
    def forward(ctx, planes: Tensor, pixels: Tensor, gray: Tensor, gray2: Tensor, pair: ViewPair):
        n, device = planes.shape[0], planes.device
        correlation = torch.zeros(n, device=device)
        gradient = torch.zeros(n, 3, device=device)
        counts = torch.zeros(n, dtype=torch.uint8, device=device)
        rows = as_array(planes.detach().contiguous(), wp.vec3)
        outputs = [correlation, as_array(gradient, wp.vec3), counts]
        arguments = [_pair_argument(pair), as_array(pixels, wp.vec2i), rows, gray, gray2, *outputs]
        launch(match_patches, n, arguments, min_items=_MIN_ITEMS)
        counted = counts.bool()
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(counted)
        return correlation, counted

    @staticmethod
    def backward(ctx, d_correlation: Tensor, _):
        (gradient,) = ctx.saved_tensors
        return gradient * d_correlation[:, None], None, None, None, None


def patch_correlation(
    planes: Tensor, pixels: Tensor, gray: Tensor, neighbor_gray: Tensor, pair: ViewPair
) -> tuple[Tensor, Tensor]:
    """Normalised cross-correlation of patches with what planes say is the same in another view.

    Args:
        planes: m of the planes m . X = 1 in the reference's camera axes, differentiable. (n, 3)
        pixels: Column and row of the patches' middles. (n, 2) int32
        gray, neighbor_gray: In [0, 1], ``UNCOUNTED`` outside of masks. (H, W) float32

    Returns:
        Correlations in [-1, 1], 0 where there is none, and where there is one: the patch lies in
        both images, counts in both, and has something to match. (n,) each
    """
    return _Matched.apply(
        planes, pixels.contiguous(), gray.contiguous(), neighbor_gray.contiguous(), pair
    )
