# SPDX-License-Identifier: Apache-2.0
"""Projection of Gaussians to splats as a differentiable torch operation."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.rasterization import projection_kernels as kernels
from gaussian_splatting.rasterization.projection_kernels import Channels, make_view
from gaussian_splatting.rasterization.tile_coverage import PROJECT_AND_COUNT, count_tiles
from sugar_utils.warp_launch import as_array, launch

MIN_ITEMS = 2048  # Gaussians per launch below which another strip costs more than it gives
MARGIN = 1.1
SPARE = 4096
"""Room beyond what the last visit had: as a factor, and for views of few pairs."""

MOST = 2**30  # forecasts end here, so that pairs may double and still be numbered by 32 bits

_launch = functools.partial(launch, min_items=MIN_ITEMS)


class PairsMissed(Exception):
    """Tile lists were too short: nothing that the view said counts."""


class IntersectionPrediction:
    """How many (tile, Gaussian) pairs views will have: about as many as at their last visit.

    To read the number, the host of a GPU would wait for all that is still to do. Lists that are
    long enough need none; whether they were is read with the checks of the step, else the view is
    repeated.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int, int], tuple[int, int]] = {}

    def guess(self, camera: Camera, n_gaussians: int) -> PredictedIntersections | None:
        """Room for a view; None if it was not seen yet at this size, or had too many."""
        last = self._seen.get(_key(camera))
        if last is None:
            return None
        n_pairs, n_then = last
        expected = n_pairs * max(1.0, n_gaussians / max(1, n_then))
        capacity = int(MARGIN * expected) + SPARE
        if capacity > MOST:
            return None
        return PredictedIntersections(self, camera, n_gaussians, capacity)

    def note(self, camera: Camera, n_gaussians: int, n_pairs: int) -> None:
        self._seen[_key(camera)] = (n_pairs, n_gaussians)


@dataclass
class PredictedIntersections:
    """Room for the pairs of one view, and what it lacked."""

    forecast: IntersectionPrediction
    camera: Camera
    n_gaussians: int
    capacity: int
    excess: Tensor | None = None

    def commit(self, excess: float) -> None:
        """Take note of the excess; raise ``PairsMissed`` if there was too little room."""
        self.forecast.note(self.camera, self.n_gaussians, round(self.capacity + excess))
        if excess > 0:
            raise PairsMissed


def _key(camera: Camera) -> tuple[str, int, int]:
    return camera.name, camera.width, camera.height


@dataclass(frozen=True)
class ChannelLayout:
    """First column of each blended quantity, without gaps; None where it is absent."""

    rgb: int | None
    depth: int | None
    normal: int | None
    plane: int | None
    features: int | None
    n_features: int
    total: int

    @classmethod
    def of(
        cls, *, rgb: bool, depth: bool, normal: bool, plane: bool, n_features: int
    ) -> ChannelLayout:
        """3, 1, 2, 4 and ``n_features`` columns of what is wanted."""
        column = 0
        starts = []
        widths = ((rgb, 3), (depth, 1), (normal, 2), (plane, 4), (n_features > 0, n_features))
        for wanted, width in widths:
            starts.append(column if wanted else None)
            column += width if wanted else 0
        return cls(*starts, n_features=n_features, total=column)


@dataclass
class Projection:
    """Splats of one camera, before any pixel is touched."""

    # Centres, (N, 2) pixels, the middle of the first pixel is (0, 0); differentiable.
    means2d: Tensor
    splats: Tensor  # rows as described in ``projection_kernels``, (N, 9 + C); differentiable
    # Three standard deviations, rounded up; 0 for culled Gaussians, (N,) int32 pixels.
    radii: Tensor
    depths: Tensor  # view-axis depth of every Gaussian, culled ones too, (N,) world units
    tile_rects: Tensor  # first and past-the-last tile in x, then in y, (N, 4) int32
    tile_counts: Tensor  # tiles among those that the splat reaches, (N,) int32
    layout: ChannelLayout
    camera: Camera
    n_pairs: int | None = None
    guess: PredictedIntersections | None = None


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, view, channels, n_channels, means, quats, scales, opacities, sh_dc, sh_rest, features
    ):
        n = means.shape[0]
        device = means.device
        means2d_splats = torch.empty(n, kernels.SPLAT_HEADER + n_channels, device=device)
        depths = torch.empty(n, device=device)
        sizes = ((n,), (n,), (n, 4))
        radii, counts, rects = (torch.empty(s, dtype=torch.int32, device=device) for s in sizes)
        given = means, quats, scales, opacities, sh_dc, features
        means, quats, scales, opacities, sh_dc, features = (
            tensor.detach().float().contiguous() for tensor in given
        )
        # Three quarters of all values: read in the type they are stored in.
        vector = _vector_of(sh_rest)
        sh_rest = sh_rest.detach().to(wp.dtype_to_torch(vector._wp_scalar_type_)).contiguous()
        inputs = [
            view,
            channels,
            as_array(means, wp.vec3),
            as_array(quats, wp.vec4),
            as_array(scales, wp.vec3),
            opacities,
            as_array(sh_dc, wp.vec3),
            as_array(sh_rest, vector),
            features,
            means2d_splats,
            radii,
            depths,
            as_array(rects, wp.vec4i),
        ]
        if counts_while_projecting(device):
            _launch(PROJECT_AND_COUNT[vector], n, [*inputs, counts])
        else:
            _launch(kernels.PROJECT_FORWARD[vector], n, inputs)
            _launch(count_tiles, n, [means2d_splats, as_array(rects, wp.vec4i), counts])
        means2d = means2d_splats[:, :2].contiguous()
        ctx.view = view
        ctx.channels = channels
        shape = means, quats, scales, opacities
        ctx.save_for_backward(*shape, sh_dc, sh_rest, features, radii, means2d_splats)
        ctx.mark_non_differentiable(radii, depths, rects, counts)
        # Zeros for what has no gradient would be alive at the peak, 28 bytes per Gaussian.
        ctx.set_materialize_grads(False)
        return means2d, means2d_splats, radii, depths, rects, counts

    @staticmethod
    def backward(ctx, d_means2d, d_splats, *_):
        *given, radii, splats = ctx.saved_tensors
        means, quats, scales, _, _, sh_rest, _ = given
        if d_means2d is None:
            d_means2d = splats.new_zeros(splats.shape[0], 2)
        if d_splats is None:
            d_splats = torch.zeros_like(splats)
        grads = [torch.empty_like(tensor) for tensor in given]
        d_means, d_quats, d_scales, d_opacities, d_sh_dc, d_sh_rest, d_features = grads
        vector = _vector_of(sh_rest)
        inputs = [
            ctx.view,
            ctx.channels,
            as_array(means, wp.vec3),
            as_array(quats, wp.vec4),
            as_array(scales, wp.vec3),
            as_array(sh_rest, vector),
            radii,
            splats,
            as_array(d_means2d.contiguous(), wp.vec2),
            d_splats.contiguous(),
            as_array(d_means, wp.vec3),
            as_array(d_quats, wp.vec4),
            as_array(d_scales, wp.vec3),
            d_opacities,
            as_array(d_sh_dc, wp.vec3),
            as_array(d_sh_rest, vector),
            d_features,
        ]
        _launch(kernels.PROJECT_BACKWARD[vector], means.shape[0], inputs)
        return (None, None, None, *grads)


def counts_while_projecting(device: torch.device) -> bool:
    """Whether one launch projects and counts tiles; on a CPU two kernels may round differently."""
    return device.type != "cpu"


def _vector_of(sh_rest: Tensor) -> type:
    return kernels.vec3bf if sh_rest.dtype == torch.bfloat16 else wp.vec3


def project(
    gaussians: Gaussians,
    camera: Camera,
    *,
    rgb: bool = True,
    depth: bool = False,
    normal: bool = False,
    plane_reach: float | None = None,
    features: Tensor | None = None,
    sh_degree: int = 3,
) -> Projection:
    """Project Gaussians to a camera and compute the values their splats carry.

    A Gaussian with a non-finite position, shape or opacity is culled.

    Args:
        plane_reach: Carry planes through the centres, that normal n whole and n . centre, of
            Gaussians up to this depth in world units. Those farther away have none, all zeros.
        features: Free values to blend. (N, F) or None
        sh_degree: Degree at which colours are evaluated, 0 to 3; at most what ``sh_rest``, float32
            or bfloat16, holds.
    """
    n_features = 0 if features is None else features.shape[1]
    plane = plane_reach is not None
    wanted = {"rgb": rgb, "depth": depth, "normal": normal, "plane": plane}
    layout = ChannelLayout.of(**wanted, n_features=n_features)
    if layout.total == 0:
        raise ValueError("nothing to render: ask for rgb, depth, normal, plane or features")
    if rgb and gaussians.sh_rest.shape[1] < (sh_degree + 1) ** 2 - 1:
        raise ValueError(
            f"sh_degree {sh_degree} needs {(sh_degree + 1) ** 2 - 1} coefficients in sh_rest, "
            f"got {gaussians.sh_rest.shape[1]}"
        )
    channels = Channels()
    for name in ("rgb", "depth", "normal", "plane", "features"):
        column = getattr(layout, name)
        setattr(channels, name, -1 if column is None else column)
    channels.n_features = n_features
    channels.sh_degree = sh_degree
    channels.antialiased = int(gaussians.antialiased)
    channels.plane_reach = 0.0 if plane_reach is None else plane_reach
    if features is None:
        features = gaussians.means.new_zeros(len(gaussians), 0)
    elif features.shape[0] != len(gaussians):
        raise ValueError(f"{features.shape[0]} rows of features for {len(gaussians)} Gaussians")
    settings = (make_view(camera), channels, layout.total)
    raw = gaussians.tensors()
    return Projection(*_Project.apply(*settings, *raw, features), layout=layout, camera=camera)
