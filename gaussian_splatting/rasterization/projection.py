# SPDX-License-Identifier: Apache-2.0
"""Projection of Gaussians to splats as a differentiable torch operation."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.core.adjoints import send_back
from gaussian_splatting.core.cloud import NO_CUTOFF, Gaussians
from gaussian_splatting.core.color_gradients import ColorGradient
from gaussian_splatting.core.spherical_harmonics import SH_C0
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.rasterization import projection_kernels as kernels
from gaussian_splatting.rasterization.projection_adjoint import PROJECT_BACKWARD
from gaussian_splatting.rasterization.projection_kernels import Channels, camera_record
from gaussian_splatting.rasterization.tile_coverage import PROJECT_AND_COUNT, count_tiles
from sugar_utils.warp_launch import as_array, launch

MIN_ITEMS = 2048  # Gaussians per range of the CPU's thread pool; smaller ranges cost more
MARGIN = 1.1
SPARE = 4096
"""Room beyond the count of the last visit: a factor, and a constant for views with few
intersections."""

STEPS_PER_DOUBLING = 4
"""Sizes of lists between a size and its double, where one list is to serve many views."""

MAX_PREDICTION = 2**30  # the count may double and its index still fits in 32 bits

_launch = functools.partial(launch, min_items=MIN_ITEMS)


def rounded_up(capacity: int) -> int:
    """Round the length of lists up to one of few sizes."""
    step = math.ceil(STEPS_PER_DOUBLING * math.log2(max(1, capacity)))
    return math.ceil(2 ** (step / STEPS_PER_DOUBLING))


class PredictionMissed(Exception):
    """Raised where a predicted number was too low: the results of the view must be discarded."""


class CountPrediction(Protocol):
    """Predicts a number of a view that only the device knows."""

    def record(self, camera: Camera, n_gaussians: int, count: int) -> None:
        """Record the exact number, once the host has read it."""
        ...


class _Visit(NamedTuple):
    """Counts at the last visit of a view."""

    n_intersections: int
    n_gaussians: int

    def capacity(self, n_gaussians: int) -> int:
        """Return the length of tile lists that is enough with so many Gaussians."""
        growth = max(1.0, n_gaussians / max(1, self.n_gaussians))
        return int(MARGIN * (self.n_intersections * growth)) + SPARE


class IntersectionPrediction:
    """Predicts a view's number of (tile, Gaussian) intersections from its last visit.

    The exact number would have to be read from the GPU, and the host would wait for all pending
    work. Tile lists that are long enough do not need it. Whether they were is read together with
    the checks of the training step; if they were not, the view is repeated.
    """

    def __init__(self) -> None:
        # By the name and the size of the view.
        self._last_visits: dict[tuple[str, tuple[int, int]], _Visit] = {}

    def predict(self, camera: Camera, n_gaussians: int) -> PredictedCount | None:
        """Return the predicted capacity of a view's tile lists.

        None: the view has not been visited at this size, or has too many intersections.
        """
        visit = self._last_visits.get((camera.name, camera.size))
        if visit is None:
            return None
        capacity = visit.capacity(n_gaussians)
        if capacity > MAX_PREDICTION:
            return None
        return PredictedCount(self, camera, n_gaussians, capacity)

    def largest(self, camera: Camera, n_gaussians: int) -> int:
        """Return the largest capacity of all visited views of the size of one; 0 without any."""
        capacities = []
        for (_, size), visit in self._last_visits.items():
            if size == camera.size:
                capacities.append(visit.capacity(n_gaussians))
        return min(max(capacities, default=0), MAX_PREDICTION)

    def record(self, camera: Camera, n_gaussians: int, count: int) -> None:
        """Record the exact number of intersections of a view."""
        self._last_visits[camera.name, camera.size] = _Visit(count, n_gaussians)


@dataclass
class PredictedCount:
    """Predicted number of one view, as of tile intersections, and by how much it was wrong."""

    predictor: CountPrediction
    camera: Camera
    n_gaussians: int
    capacity: int  # the number that there is room for
    excess: Tensor | None = None  # exact number less the capacity, on the device
    count: int | None = None  # the exact number, once the host has read it

    @property
    def is_enough(self) -> bool:
        """Whether the capacity is enough; the host waits for the number."""
        return self.excess is None or float(self.excess) <= 0

    def record(self, excess: float) -> bool:
        """Record the exact number; whether the capacity was enough."""
        self.count = round(self.capacity + excess)
        self.predictor.record(self.camera, self.n_gaussians, self.count)
        return excess <= 0


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
    @functools.lru_cache(maxsize=64)
    def of(
        cls, *, rgb: bool, depth: bool, normal: bool, plane: bool, n_features: int
    ) -> ChannelLayout:
        """Lay out 3, 1, 2, 4 and ``n_features`` columns for the requested quantities."""
        widths = {
            "rgb": 3 if rgb else 0,
            "depth": 1 if depth else 0,
            "normal": 2 if normal else 0,
            "plane": 4 if plane else 0,
            "features": n_features,
        }
        starts: dict[str, int | None] = {}
        total = 0
        for name, width in widths.items():
            starts[name] = total if width > 0 else None
            total += width
        return cls(**starts, n_features=n_features, total=total)


@dataclass
class Projection:
    """Splats of one camera, before any pixel is blended."""

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
    # What is taken for the sum of the tile counts; None: the host waits for it.
    prediction: PredictedCount | None = None
    adjoint: ProjectionAdjoint | None = None  # backward pass; None: autograd's
    has_cutoff: bool = False  # whether splats end before alpha is 1/255

    def backpropagate(self, d_means2d: Tensor, d_splats: Tensor) -> None:
        """Add the gradients of the projection. (N, 2) per pixel, (N, 9 + C)"""
        if self.adjoint is not None:
            self.adjoint(d_means2d, d_splats)
            return
        torch.autograd.backward([self.means2d, self.splats], [d_means2d, d_splats])


class _ProjectedRows(NamedTuple):
    """Tensors that a projection reads, in the order of its gradients."""

    means: Tensor  # (N, 3)
    quats: Tensor  # (N, 4)
    scales: Tensor  # (N, 3)
    opacities: Tensor  # (N,)
    sh_dc: Tensor  # (N, 1, 3)
    sh_rest: Tensor  # (N, K, 3) float32 or bfloat16
    features: Tensor  # (N, F)


class _ProjectionSettings(NamedTuple):
    """Arguments of a projection that are no tensors."""

    camera_record: Tensor  # (28,)
    channels: Any  # struct ``Channels``
    n_channels: int


class _ProjectedTensors(NamedTuple):
    """Results of a projection, as of :class:`Projection`."""

    means2d: Tensor
    splats: Tensor
    radii: Tensor
    depths: Tensor
    tile_rects: Tensor
    tile_counts: Tensor


class _Project(torch.autograd.Function):
    """:class:`_ProjectionSettings` and :class:`_ProjectedRows` -> :class:`_ProjectedTensors`."""

    @staticmethod
    def forward(ctx, settings: _ProjectionSettings, *tensors: Tensor):
        rows = _prepared_rows(_ProjectedRows(*tensors))
        projected = _project_rows(settings, rows)
        # A graph may add up gradients of centres and of splats apart from each other.
        projected = projected._replace(means2d=projected.means2d.contiguous())
        ctx.settings = settings
        ctx.save_for_backward(*rows, projected.radii, projected.splats)
        ctx.mark_non_differentiable(*projected[2:])
        # Materialized zeros for absent gradients would be alive at the peak, 28 bytes per Gaussian.
        ctx.set_materialize_grads(False)
        return tuple(projected)

    @staticmethod
    def backward(ctx, d_means2d: Tensor | None, d_splats: Tensor | None, *_: object):
        *saved_rows, radii, splats = ctx.saved_tensors
        if d_means2d is None:
            d_means2d = torch.zeros(splats.shape[0], 2, device=splats.device)
        if d_splats is None:
            d_splats = torch.zeros_like(splats)
        rows = _ProjectedRows(*saved_rows)
        gradients = _differentiate(ctx.settings, rows, radii, splats, d_means2d, d_splats)
        return (None, *gradients)


@dataclass(frozen=True)
class ProjectionAdjoint:
    """Backward pass of one projection, without a graph of autograd around it."""

    settings: _ProjectionSettings
    gaussians: Gaussians  # what was projected
    features: Tensor  # (N, F)
    rows: _ProjectedRows  # both as the kernels read them
    radii: Tensor  # (N,) int32
    splats: Tensor  # (N, 9 + C)

    def __call__(self, d_means2d: Tensor, d_splats: Tensor) -> None:
        """Add the gradients of the projection. (N, 2), (N, 9 + C)"""
        gaussians = self.gaussians
        keeps_factors = self._keeps_factors()
        needs_coefficients = gaussians.sh_dc.requires_grad or gaussians.sh_rest.requires_grad
        gradients = _differentiate(
            self.settings,
            self.rows,
            self.radii,
            self.splats,
            d_means2d,
            d_splats,
            of_coefficients=needs_coefficients and not keeps_factors,
        )
        of_gaussians: list[Tensor | None] = list(gradients[:-1])
        if keeps_factors and gaussians.color_gradients is not None:
            of_gaussians[-2:] = [None, None]
            gaussians.color_gradients.append(
                ColorGradient(
                    colors=gradients.sh_dc.view(-1, 3),
                    means=self.rows.means,
                    camera_record=self.settings.camera_record,
                    sh_degree=self.settings.channels.sh_degree,
                )
            )
        gaussians.backpropagate(of_gaussians)
        send_back([self.features], [gradients.features])

    def _keeps_factors(self) -> bool:
        """Whether factors are kept in place of the gradients of coefficients."""
        gaussians = self.gaussians
        if gaussians.color_gradients is None or self.settings.channels.rgb < 0:
            return False
        coefficients = (gaussians.sh_dc, gaussians.sh_rest)
        are_parameters = all(t.is_leaf and t.requires_grad for t in coefficients)
        return are_parameters and gaussians.sh_rest.numel() > 0


def _project_rows(settings: _ProjectionSettings, rows: _ProjectedRows) -> _ProjectedTensors:
    """Run the kernels that project; centres are columns of the splats."""
    n = rows.means.shape[0]
    device = rows.means.device
    splats = torch.empty(n, kernels.SPLAT_HEADER + settings.n_channels, device=device)
    depths = torch.empty(n, device=device)
    radii = torch.empty(n, dtype=torch.int32, device=device)
    counts = torch.empty(n, dtype=torch.int32, device=device)
    rects = torch.empty(n, 4, dtype=torch.int32, device=device)
    coefficients = _vector_of(rows.sh_rest)
    inputs = [
        settings.camera_record,
        settings.channels,
        as_array(rows.means, wp.vec3),
        as_array(rows.quats, wp.vec4),
        as_array(rows.scales, wp.vec3),
        rows.opacities,
        as_array(rows.sh_dc, wp.vec3),
        as_array(rows.sh_rest, coefficients),
        rows.features,
        splats,
        radii,
        depths,
        as_array(rects, wp.vec4i),
    ]
    if counts_while_projecting(device):
        _launch(PROJECT_AND_COUNT[coefficients], n, [*inputs, counts])
    else:
        _launch(kernels.PROJECT_FORWARD[coefficients], n, inputs)
        _launch(count_tiles, n, [splats, as_array(rects, wp.vec4i), counts])
    return _ProjectedTensors(splats[:, :2], splats, radii, depths, rects, counts)


def _radii(settings: _ProjectionSettings, rows: _ProjectedRows) -> Tensor:
    """Project without colours; return the radii. (N,) int32 pixels"""
    layout = ChannelLayout.of(rgb=False, depth=True, normal=False, plane=False, n_features=0)
    # Neither antialiasing nor where splats end changes the radii.
    channels = _channels(layout, 0, False, NO_CUTOFF, 0.0)
    shape_settings = _ProjectionSettings(settings.camera_record, channels, layout.total)
    return _project_rows(shape_settings, _prepared_rows(rows)).radii


def _differentiate(
    settings: _ProjectionSettings,
    rows: _ProjectedRows,
    radii: Tensor,
    splats: Tensor,
    d_means2d: Tensor,
    d_splats: Tensor,
    *,
    of_coefficients: bool = True,
) -> _ProjectedRows:
    """Run the kernel of the backward pass.

    Args:
        of_coefficients: Whether gradients of coefficients are formed. Otherwise those of the
            colours themselves take the place of band 0, and there are none of the bands above.
    """
    formed = rows if of_coefficients else rows._replace(sh_rest=rows.sh_rest[:, :0])
    gradients = _ProjectedRows(*[torch.empty_like(tensor) for tensor in formed])
    coefficients = _vector_of(rows.sh_rest)
    inputs = [
        settings.camera_record,
        settings.channels,
        SH_C0 if of_coefficients else 1.0,
        as_array(rows.means, wp.vec3),
        as_array(rows.quats, wp.vec4),
        as_array(rows.scales, wp.vec3),
        as_array(rows.sh_rest, coefficients),
        radii,
        splats,
        as_array(d_means2d.contiguous(), wp.vec2),
        d_splats.contiguous(),
        as_array(gradients.means, wp.vec3),
        as_array(gradients.quats, wp.vec4),
        as_array(gradients.scales, wp.vec3),
        gradients.opacities,
        as_array(gradients.sh_dc.view(-1, 3), wp.vec3),
        as_array(gradients.sh_rest, coefficients),
        gradients.features,
    ]
    _launch(PROJECT_BACKWARD[coefficients], rows.means.shape[0], inputs)
    return gradients


def _prepared_rows(rows: _ProjectedRows) -> _ProjectedRows:
    """Detach and make contiguous; float32 but for the coefficients, which keep their type.

    Coefficients are three quarters of all values, so they are read in the type they are stored in.
    """
    is_half = rows.sh_rest.dtype == torch.bfloat16
    return _ProjectedRows(
        means=_in_rows(rows.means),
        quats=_in_rows(rows.quats),
        scales=_in_rows(rows.scales),
        opacities=_in_rows(rows.opacities),
        sh_dc=_in_rows(rows.sh_dc),
        sh_rest=rows.sh_rest.detach().contiguous() if is_half else _in_rows(rows.sh_rest),
        features=_in_rows(rows.features),
    )


def _in_rows(values: Tensor) -> Tensor:
    """The same values without a gradient, contiguous in float32."""
    values = values.detach()
    if values.dtype == torch.float32 and values.is_contiguous():
        return values
    return values.float().contiguous()


def counts_while_projecting(device: torch.device) -> bool:
    """Return whether one launch projects and counts tiles.

    On a CPU two kernels do, because they may round differently.
    """
    return device.type != "cpu"


def _vector_of(sh_rest: Tensor) -> type:
    """Warp's type of one coefficient."""
    return kernels.vec3bf if sh_rest.dtype == torch.bfloat16 else wp.vec3


@functools.lru_cache(maxsize=64)
def _channels(
    layout: ChannelLayout,
    sh_degree: int,
    antialiased: bool,
    cutoff_deviations: float,
    plane_reach: float,
) -> Any:
    """Return columns and settings as an argument of kernels; cached like cameras."""
    channels = Channels()
    for name in ("rgb", "depth", "normal", "plane", "features"):
        column = getattr(layout, name)
        setattr(channels, name, -1 if column is None else column)
    channels.n_features = layout.n_features
    channels.sh_degree = sh_degree
    channels.antialiased = int(antialiased)
    channels.cutoff = 0.5 * cutoff_deviations**2
    channels.plane_reach = plane_reach
    return channels


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
    graph: bool = True,
) -> Projection:
    """Project Gaussians to a camera and compute the values their splats carry.

    A Gaussian with a non-finite position, shape or opacity is culled.

    Args:
        graph: Whether autograd records the projection. Without, gradients come back through
            :meth:`Projection.backpropagate` alone, at less cost for the host.
        plane_reach: Maximum depth, in world units, of Gaussians whose planes are carried: the unit
            normal n and the distance n . centre. Planes of Gaussians farther away are all zeros.
        features: Free values to blend. (N, F) or None
        sh_degree: Degree at which colours are evaluated, 0 to 3; at most that of ``sh_rest``,
            which is float32 or bfloat16.

    Raises:
        ValueError: No channel is requested, or ``sh_rest`` or ``features`` has another shape.
    """
    n_features = 0 if features is None else features.shape[1]
    layout = ChannelLayout.of(
        rgb=rgb,
        depth=depth,
        normal=normal,
        plane=plane_reach is not None,
        n_features=n_features,
    )
    if layout.total == 0:
        raise ValueError("nothing to render: ask for rgb, depth, normal, plane or features")
    n_coefficients = (sh_degree + 1) ** 2 - 1
    if rgb and gaussians.sh_rest.shape[1] < n_coefficients:
        raise ValueError(
            f"sh_degree {sh_degree} needs {n_coefficients} coefficients in sh_rest, "
            f"got {gaussians.sh_rest.shape[1]}"
        )
    if features is None:
        features = gaussians.means.new_zeros(len(gaussians), 0)
    elif features.shape[0] != len(gaussians):
        raise ValueError(f"{features.shape[0]} rows of features for {len(gaussians)} Gaussians")
    reach = 0.0 if plane_reach is None else plane_reach
    record = camera_record(camera, gaussians.means.device)
    channels = _channels(
        layout, sh_degree, gaussians.antialiased, gaussians.cutoff_deviations, reach
    )
    has_cutoff = gaussians.cutoff_deviations != NO_CUTOFF
    settings = _ProjectionSettings(record, channels, layout.total)
    sources = _ProjectedRows(
        means=gaussians.means,
        quats=gaussians.quats,
        scales=gaussians.scales,
        opacities=gaussians.opacities,
        sh_dc=gaussians.sh_dc,
        sh_rest=gaussians.sh_rest,
        features=features,
    )
    if rgb and n_coefficients > 0 and gaussians.late_bands is not None:
        gaussians.late_bands.catch_up_in_view(_radii(settings, sources))
    if graph:
        tensors: Sequence[Tensor] = _Project.apply(settings, *sources)
        return Projection(*tensors, layout=layout, camera=camera, has_cutoff=has_cutoff)
    rows = _prepared_rows(sources)
    projected = _project_rows(settings, rows)
    adjoint = ProjectionAdjoint(
        settings, gaussians, features, rows, projected.radii, projected.splats
    )
    return Projection(
        *projected, layout=layout, camera=camera, adjoint=adjoint, has_cutoff=has_cutoff
    )
