# SPDX-License-Identifier: Apache-2.0
"""Reprojection between views of one surface, and the choice of neighbouring views.

A pixel's point is projected into a neighbouring view, and the point at the neighbour's own depth
there is projected back. Where both views see the same surface point, it falls on the same pixel;
occlusion or a wrong depth makes it miss by some pixels.

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

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gaussian_splatting.core.random import derive_seed, draw_labels
from gaussian_splatting.data.cameras import Camera, centers_of, view_directions
from gaussian_splatting.data.observations import Observations

MAX_CYCLE = 1.0  # pixels; points that miss by more are different or too uncertain
MIN_SQUARE = 1e-12  # square pixels; a square root has no gradient at zero

MIN_FACING = 0.05  # least -N . r; smaller ones are transparent or at a grazing angle
REACH = 10.0  # camera extents; Gaussians farther away are sky, without parallax and planes
MIN_DEPTH = 1e-4  # points nearer to the camera than this have no pixel. World units.
_BITS = 36  # of the largest gradient as an integer: 2^26 of them fit into 63 bits


@dataclass(frozen=True)
class ViewPair:
    """A view and a neighbouring one, with the transform between their camera coordinates."""

    reference: Camera
    neighbor: Camera
    rotation: np.ndarray  # X of the reference is rotation X + translation of the neighbour, (3, 3)
    translation: np.ndarray  # (3,) float64, world units

    @classmethod
    def of(cls, reference: Camera, neighbor: Camera) -> ViewPair:
        """Return the pair with its transform."""
        rotation = neighbor.rotation @ reference.rotation.T
        translation = neighbor.translation - rotation @ reference.translation
        return cls(reference, neighbor, rotation, translation)


def triangle_planes(vertices: Tensor, faces: Tensor, camera: Camera, rows: Tensor) -> Tensor:
    """Return planes N and D of some faces, towards the camera; gradients reach the vertices.

    (V, 3) float32 world units, (F, 3) int64, rows of the faces, (n,) -> (n, 4)
    """
    axes = torch.arange(3, device=vertices.device)
    coordinates = 3 * faces[rows.long()][..., None] + axes
    corners = gather(vertices.reshape(-1), coordinates)
    a, b, c = camera.to_view(corners).unbind(1)
    normal = functional.normalize(torch.linalg.cross(b - a, c - a), dim=-1)
    distance = (normal * a).sum(dim=-1, keepdim=True)
    planes = torch.cat([normal, distance], dim=-1)
    return torch.where(distance > 0, -planes, planes)


def bilinear(values: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Read a map, (H, W), bilinearly at columns and rows, clamped at the border. (S,)

    0.5 is the middle of the first pixel. Gradients reach the map, with the same bits in every run
    on every device, and the points, where they are not clamped.
    """
    height, width = values.shape
    x = (u - 0.5).clamp(0, width - 1)
    y = (v - 0.5).clamp(0, height - 1)
    # A point that is not a number reads NaN; its index must be one of the map all the same.
    x0 = x.detach().floor().nan_to_num(0.0)
    y0 = y.detach().floor().nan_to_num(0.0)
    a = x - x0
    b = y - y0
    column = x0.long()
    row = y0.long()
    right = (column + 1).clamp_max(width - 1)
    below = (row + 1).clamp_max(height - 1)
    corners = torch.stack([row * width, row * width, below * width, below * width])
    corners += torch.stack([column, right, column, right])
    weights = torch.stack([(1 - a) * (1 - b), a * (1 - b), (1 - a) * b, a * b])
    return (gather(values.reshape(-1), corners) * weights).sum(dim=0)


def gather(values: Tensor, index: Tensor) -> Tensor:
    """Index a vector by int64 of any shape; gradients have the same bits every time."""
    return _Gather.apply(values, index)


class _Gather(torch.autograd.Function):
    """Vector, (N,), and index of any shape -> its elements."""

    @staticmethod
    def forward(ctx, values: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.n_values = values.shape[0]
        return values[index]

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
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
    multiples = (values.double() * scale).round().to(torch.int64)
    sums = torch.zeros(n_places, dtype=torch.int64, device=values.device)
    sums.index_add_(0, index, multiples)
    result = sums.double() / scale
    return torch.where(largest.isfinite(), result, torch.nan).to(values.dtype)


@dataclass(frozen=True)
class NeighborRule:
    """Which views are neighbours of a view."""

    max_angle: float = 30.0  # between directions of view, degrees
    min_baseline: float = 0.002  # distances of camera centres, camera extents
    max_baseline: float = 0.5
    max_neighbors: int = 8


class NeighborViews:
    """Neighbours of training views, and of other views among the training views."""

    def __init__(
        self,
        cameras: Sequence[Camera],
        extent: float,
        rule: NeighborRule = NeighborRule(),
        observations: Observations | None = None,
    ) -> None:
        # Here and not above: most commands start without it.
        from scipy.sparse import csr_array

        self._cameras = list(cameras)
        self._extent = extent
        self._rule = rule
        self._centers = centers_of(cameras)
        self._directions = view_directions(cameras)
        points_by_name = {} if observations is None else observations.rows
        no_points = np.zeros(0, np.int32)
        points_by_view = [points_by_name.get(camera.name, no_points) for camera in cameras]
        # Which view observes which point, as a sparse matrix.
        points = np.concatenate([no_points, *points_by_view])
        starts = np.cumsum([0, *map(len, points_by_view)])
        shape = (len(points_by_view), int(points.max(initial=0)) + 1)
        is_observed = csr_array((np.ones(len(points), np.int32), points, starts), shape=shape)
        common = is_observed @ is_observed.T
        self._by_name: dict[str, tuple[Camera, ...]] = {}
        for row, camera in enumerate(cameras):
            self._by_name[camera.name] = self.among(camera, common[[row]].toarray()[0])

    def of(self, name: str) -> tuple[Camera, ...]:
        """Return the neighbours of a training view, the best first; may be empty."""
        return self._by_name.get(name, ())

    def among(self, camera: Camera, common: np.ndarray | None = None) -> tuple[Camera, ...]:
        """Return the training views that are neighbours of any view, the best first.

        Args:
            common: Number of points shared with each training view; None if unknown.
        """
        rule = self._rule
        extent = self._extent
        cosine = np.clip(self._directions @ camera.rotation[2], -1.0, 1.0)
        angle = np.degrees(np.arccos(cosine))
        baseline = np.linalg.norm(self._centers - camera.center, axis=1)
        is_neighbor = baseline >= rule.min_baseline * extent
        is_neighbor &= baseline <= rule.max_baseline * extent
        is_neighbor &= angle <= rule.max_angle
        is_neighbor &= np.array([other.name != camera.name for other in self._cameras], dtype=bool)
        others = np.flatnonzero(is_neighbor)
        shared = np.zeros(len(others), np.int64) if common is None else common[others]
        # By points in common where there are any, then by angle; equals in the order of views.
        best = others[np.lexsort((angle[others], -shared))]
        return tuple(self._cameras[other] for other in best[: rule.max_neighbors])

    def draw(self, name: str, seed: int, iteration: int, view_index: int = 0) -> Camera | None:
        """Draw one neighbour of a training view, by iteration and seed; None if there is none."""
        neighbors = self.of(name)
        if not neighbors:
            return None
        labels = draw_labels(iteration, view_index)
        number = derive_seed(seed, "neighbor view", *labels)
        return neighbors[number % len(neighbors)]

    @property
    def without_neighbors(self) -> list[str]:
        """Names of the training views without neighbours."""
        return [name for name, neighbors in self._by_name.items() if not neighbors]
