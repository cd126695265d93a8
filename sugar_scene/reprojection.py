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
from torch import Tensor
from torch.nn import functional

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.observations import Observations
from sugar_utils.random import derive_seed, draw_labels

MAX_CYCLE = 1.0  # pixels; points that miss by more are different or too uncertain
MIN_SQUARE = 1e-12  # square pixels; a square root has no gradient at zero

MIN_FACING = 0.05  # least -N . r; smaller ones are transparent or at a grazing angle
REACH = 10.0  # camera extents; Gaussians farther off are sky that has no parallax and no planes
MIN_DEPTH = 1e-4  # points nearer to the camera than this have no pixel. World units.
_BITS = 36  # of the largest gradient as an integer: 2^26 of them fit into 63 bits


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


def triangle_planes(vertices: Tensor, faces: Tensor, camera: Camera, chosen: Tensor) -> Tensor:
    """Planes N and D of some faces, towards the camera; gradients reach the vertices.

    (V, 3) float32 world units, (F, 3) int64, rows of the faces, (n,) -> (n, 4)
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


def bilinear(values: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Read a map, (H, W), bilinearly at columns and rows, clamped at the border. (S,)

    0.5 is the middle of the first pixel. Gradients reach the map, with the same bits in every run
    on every device, and the points, where they are not clamped.
    """
    height, width = values.shape
    x = (u - 0.5).clamp(0, width - 1)
    y = (v - 0.5).clamp(0, height - 1)
    # A point that is not a number reads NaN; its index must be one of the map all the same.
    left = x.detach().floor().nan_to_num(0.0)
    top = y.detach().floor().nan_to_num(0.0)
    a = x - left
    b = y - top
    column = left.long()
    row = top.long()
    right = (column + 1).clamp_max(width - 1)
    below = (row + 1).clamp_max(height - 1)
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
        rule: NeighborRule = NeighborRule(),
        observations: Observations | None = None,
    ) -> None:
        # Here and not above: most commands start without it.
        from scipy.sparse import csr_array

        self._cameras = list(cameras)
        self._extent = extent
        self._rule = rule
        self._centers = np.stack([camera.center for camera in cameras])
        self._directions = np.stack([camera.rotation[2] for camera in cameras])
        points = {} if observations is None else observations.rows
        none = np.zeros(0, np.int32)
        rows = [points.get(camera.name, none) for camera in cameras]
        places = np.concatenate([none, *rows])
        starts = np.cumsum([0, *map(len, rows)])
        shape = len(rows), int(places.max(initial=0)) + 1
        seen = csr_array((np.ones(len(places), np.int32), places, starts), shape=shape)
        common = seen @ seen.T
        self._by_name = {}
        for row, camera in enumerate(cameras):
            self._by_name[camera.name] = self.among(camera, common[[row]].toarray()[0])

    def of(self, name: str) -> tuple[Camera, ...]:
        """Neighbours of a training view, the best first; none if it has none."""
        return self._by_name.get(name, ())

    def among(self, camera: Camera, common: np.ndarray | None = None) -> tuple[Camera, ...]:
        """Training views that are neighbours of any view, the best first.

        ``common`` counts the points that it shares with each training view; None if unknown.
        """
        rule = self._rule
        extent = self._extent
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
        labels = draw_labels(iteration, view_index)
        number = derive_seed(seed, "neighbor view", *labels)
        return found[number % len(found)] if found else None

    @property
    def without_neighbors(self) -> list[str]:
        return [name for name, found in self._by_name.items() if not found]
