# SPDX-License-Identifier: Apache-2.0
"""Sample points in Gaussians, and field values for loss terms, in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.core.random import derive_seed, draw_labels
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.component import ViewResult
from gaussian_splatting.engine.gradients import backpropagate_weighted
from gaussian_splatting.engine.loss_terms import LossTerm
from gaussian_splatting.engine.training_views import TrainingView
from gaussian_splatting.rasterization.projection import (
    MARGIN,
    SPARE,
    STEPS_PER_DOUBLING,
    PredictedCount,
    rounded_up,
)
from gaussian_splatting.rasterization.projection_kernels import (
    CENTER_IN_RECORD,
    LENS_IN_RECORD,
    ROTATION_IN_RECORD,
    TRANSLATION_IN_RECORD,
    camera_record,
)
from sugar_scene.field_kernels import UsedRows, evaluate_fields
from sugar_scene.geometry import (
    FieldSamples,
    draw_counted_samples,
    halves_of,
    sample_points,
    std_along_view,
)
from sugar_trainers import losses
from sugar_trainers.losses import MIN_VIEW_Z
from sugar_trainers.stage_config import CoarseConfig
from sugar_utils.device import upload
from sugar_utils.errors import Notify

SampleSource = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]
"""Draws indices and noise from a mask, a number of samples, and the iteration."""


class CameraAxes:
    """World to camera axes on a device, in memory that a recorded pass reads again."""

    def __init__(self, camera: Camera, device: torch.device) -> None:
        self._record = camera_record(camera, device)

    @property
    def center(self) -> Tensor:
        """Where the camera is. (3,) world units"""
        return self._record[CENTER_IN_RECORD]

    @property
    def lens(self) -> Tensor:
        """Focal lengths and principal point in pixels. (4,)"""
        return self._record[LENS_IN_RECORD]

    def to_view(self, points: Tensor) -> Tensor:
        """World to camera axes. (S, 3) -> (S, 3) world units"""
        rotation = self._record[ROTATION_IN_RECORD].view(3, 3)
        return points @ rotation.T + self._record[TRANSLATION_IN_RECORD]


@dataclass(frozen=True)
class SampleChunk:
    """One chunk of the samples of a view, as a term gets it."""

    fields: FieldSamples  # gradients reach the Gaussians through them
    total: int | Tensor  # samples of all chunks, at least 1
    used: Tensor | None  # rows that hold a sample; None: all. (S,) bool
    # Those before the camera, at least 1; None without a depth map, or for all. () on the device
    total_in_front: Tensor | None
    axes: CameraAxes
    depth: Tensor | None  # leaf, if a term at samples reads it. (H, W) world units
    extent: float

    @property
    def has_spare(self) -> bool:
        """Whether rows may follow that hold no sample; their errors are zeros."""
        return self.used is not None


def sampling_mask(
    gaussians: Gaussians, camera: Camera, visible: Tensor, depth: Tensor | None
) -> Tensor:
    """Gaussians to sample: the visible ones, of those near the depth map if there is one. (N,)"""
    if depth is None:
        return visible
    with torch.no_grad():
        axes = CameraAxes(camera, depth.device)
        std = std_along_view(gaussians.means, gaussians.quats, gaussians.scales, axes.center)
        gap = depth_gap(depth, axes.to_view(gaussians.means), axes)
        return losses.near_surface_mask(gap, std, visible)


def counts_on_device(device: torch.device) -> bool:
    """Return whether samples are counted where they are drawn, so that the host need not wait.

    On a CPU exact numbers cost nothing, while rows to spare would.
    """
    return device.type != "cpu"


def room_of_samples(device: torch.device) -> float:
    """Return the room for Gaussians that may be sampled, over the most that a view has."""
    if not counts_on_device(device):
        return 1.0
    return MARGIN * 2 ** (1 / STEPS_PER_DOUBLING)


class CandidatePrediction:
    """Predicts how many Gaussians may be sampled in a view: as many as in any view before.

    One number for all views, because each number has recordings of its own.
    """

    def __init__(self) -> None:
        self._largest: int | None = None
        self._n_gaussians = 0  # of the model when they were counted

    def predict(self, camera: Camera, n_gaussians: int) -> PredictedCount | None:
        """Return the room for candidates; None: none were counted with so many Gaussians."""
        if self._largest is None or self._n_gaussians != n_gaussians:
            return None
        capacity = rounded_up(int(MARGIN * self._largest) + SPARE)
        return PredictedCount(self, camera, n_gaussians, min(n_gaussians, capacity))

    def record(self, camera: Camera, n_gaussians: int, count: int) -> None:
        """Record the exact number of a view."""
        if self._n_gaussians != n_gaussians:
            self._largest = None
        self._n_gaussians = n_gaussians
        self._largest = max(count, self._largest or 0)


class Samples(NamedTuple):
    """Points drawn in Gaussians."""

    indices: Tensor  # Gaussian of each sample, sorted. (S,)
    noise: Tensor  # standard normal draws. (S, 3)
    n_owners: int | None = None  # most Gaussians with samples, if the host knows it
    used: UsedRows | None = None  # rows that hold samples; None: all
    guess: PredictedCount | None = None  # the number of candidates, if it was predicted

    @property
    def total(self) -> int | Tensor:
        """Number of samples, at least 1. Of the device: () int32"""
        if self.used is None:
            return max(1, self.indices.numel())
        return self.used.number[0].clamp_min(1)

    def chunks(self, size: int) -> Iterator[Samples]:
        """Cut into chunks of at most ``size`` rows."""
        n_rows = self.indices.numel()
        if n_rows <= size:
            yield self
            return
        for first in range(0, n_rows, size):
            rows = slice(first, min(first + size, n_rows))
            used = self.used
            if used is not None:
                number = (used.number - first).clamp(0, rows.stop - first)
                used = UsedRows(used.rows[rows], number)
            yield Samples(self.indices[rows], self.noise[rows], self.n_owners, used)


class SampleDraws:
    """Draws samples in Gaussians of views.

    On a CPU as many as there are to be. Elsewhere with room for as many as predicted: the host
    waits for the number of candidates, those that may be drawn in, of the first view only.

    Args:
        device: Where the Gaussians are.
        notify: Told of views that show nothing to sample.
        source: Replaces the random draws.
    """

    def __init__(
        self,
        config: CoarseConfig,
        device: torch.device,
        notify: Notify,
        source: SampleSource | None = None,
    ) -> None:
        self._config = config
        self._device = device
        self._notify = notify
        self._source = source
        self._prediction = CandidatePrediction()

    def seed(self, view: TrainingView) -> Tensor:
        """Return the seed of a view's draw, where a recorded one reads it. (2,) int32"""
        labels = draw_labels(view.iteration, view.index)
        seed = derive_seed(self._config.random_seed, "samples", *labels)
        return upload(halves_of(seed), self._device)

    def room(self, camera: Camera, n_gaussians: int) -> PredictedCount | None:
        """Predict the number of candidates; None where the host has to know it."""
        if self._source is not None or not counts_on_device(self._device):
            return None
        return self._prediction.predict(camera, n_gaussians)

    def draw(self, mask: Tensor, view: TrainingView, seed: Tensor) -> Samples:
        """Draw samples in Gaussians of a mask, (N,) bool; see :meth:`seed`."""
        n_candidates = mask.sum()
        guess = self.room(view.camera, len(mask))
        if guess is None:
            capacity = int(n_candidates)
            self._prediction.record(view.camera, len(mask), capacity)
            if capacity == 0:
                self._tell_of_nothing(view)
        else:
            # With more of them than there is room for the view does not count.
            capacity = guess.capacity
            guess.excess = n_candidates - capacity
        rule = self._config.sample_rule
        if self._source is not None:
            indices, noise = self._source(mask, rule.number(capacity), view.iteration)
            return Samples(indices, noise, capacity)
        drawn = draw_counted_samples(mask, n_candidates, seed, rule, capacity)
        used = None
        if counts_on_device(self._device):
            used = UsedRows(drawn.is_used, drawn.n_used)
        return Samples(drawn.indices, drawn.noise, capacity, used, guess)

    def note(self, result: ViewResult) -> None:
        """Report a view without candidates, once the host has their count."""
        for guess in result.predicted:
            if guess.predictor is self._prediction and guess.count == 0:
                self._tell_of_nothing(result.view)

    def _tell_of_nothing(self, view: TrainingView) -> None:
        self._notify(
            f"iteration {view.iteration}: {view.camera.name} shows no Gaussian to sample; its "
            "surface terms are left out"
        )


@dataclass(frozen=True)
class SampledView:
    """A view whose Gaussians are sampled."""

    camera: Camera
    depth: Tensor | None  # leaf with the rendered depth, if a term reads it. (H, W) world units


class SurfaceSampler:
    """Evaluates terms at samples, chunk by chunk."""

    def __init__(self, config: CoarseConfig, extent: float) -> None:
        self._config = config
        self._extent = extent

    def backward(
        self,
        terms: Sequence[LossTerm],
        leaves: Gaussians,
        neighbors: Tensor,
        samples: Samples,
        view: SampledView,
        chunk_size: int,
    ) -> dict[str, Tensor]:
        """Evaluate terms chunk by chunk, adding weighted gradients to the leaves.

        Every chunk's loss is divided by the number of all samples, so the sum over chunks is the
        mean over all. The terms share the fields, so they are backpropagated together.

        Args:
            neighbors: (N, K) int32

        Returns:
            Unweighted values by name; none without rows for samples.
        """
        n_rows = samples.indices.numel()
        if n_rows == 0:
            return {}
        axes = CameraAxes(view.camera, leaves.means.device)
        total = samples.total
        in_front = None
        if view.depth is not None and n_rows > chunk_size:
            in_front = _count_in_front(leaves, samples, axes, chunk_size)
        values: dict[str, Tensor] = {}
        for part in samples.chunks(chunk_size):
            fields = evaluate_fields(
                leaves.means,
                leaves.quats,
                leaves.scales,
                leaves.opacities,
                neighbors,
                part.indices,
                part.noise,
                self._config.density_factor,
                n_owners=part.n_owners,
                used=part.used,
            )
            is_used = None if part.used is None else part.used.rows
            chunk = SampleChunk(fields, total, is_used, in_front, axes, view.depth, self._extent)
            shares = [_share(term, chunk) for term in terms]
            backpropagate_weighted(shares, [term.weight for term in terms])
            for term, share in zip(terms, shares, strict=True):
                earlier = values.get(term.name)
                value = share.detach()
                values[term.name] = value if earlier is None else earlier + value
        return values


def _share(term: LossTerm, chunk: SampleChunk) -> Tensor:
    share = term.value(chunk)
    if share is None:
        raise ValueError(f"loss term {term.name}: a term at samples has a value in every chunk")
    return share


@torch.no_grad()
def _count_in_front(
    gaussians: Gaussians, samples: Samples, axes: CameraAxes, chunk_size: int
) -> Tensor:
    """Samples that have a pixel: the divisor of the sdf term, needed before the chunks. ()"""
    count = torch.zeros((), dtype=torch.int64, device=samples.indices.device)
    for part in samples.chunks(chunk_size):
        points = sample_points(
            gaussians.means, gaussians.quats, gaussians.scales, part.indices, part.noise
        )
        is_in_front = axes.to_view(points)[:, 2] > MIN_VIEW_Z
        if part.used is not None:
            is_in_front &= part.used.rows
        count += is_in_front.sum()
    return count.clamp_min(1)


def depth_gap(depth: Tensor, view_points: Tensor, axes: CameraAxes) -> Tensor:
    """Rendered depth where points project, minus their own depth. (S,) world units"""
    return losses.lookup_depth(depth, view_points, axes.lens) - view_points[:, 2]
