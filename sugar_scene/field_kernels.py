# SPDX-License-Identifier: Apache-2.0
"""Density, tangent-plane and normal fields at random points, as Warp kernels with their adjoint.

N Gaussians with K neighbours each have S samples; nothing of size S x K is stored. The backward
pass recomputes the (Gaussian, neighbour) pairs.

All samples of one Gaussian i share its neighbour list. For each neighbour j of i the backward pass
sums over the samples of i, in the local coordinates y = diag(1/s_j) R_j^T (x - mean_j), what the
gradients of row j need: moments of y for mean, scales and rotation, and likewise the part that
reaches row i through x. Each (i, j) owns a row of 11 numbers; the rows are then added up in a fixed
order. So there are no atomics, and the bits depend neither on the number of threads nor on the
chunk size. On the CPU one thread takes an i (``field_cpu``), on a GPU sixteen lanes take at most
``RUN_SAMPLES`` samples of it (``field_sums_cuda``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sugar_scene import field_device, field_sums_cuda
from sugar_scene.field_cpu import add_up_samples_native, evaluate_owners
from sugar_scene.geometry import FieldSamples
from sugar_utils.warp_launch import launch

# Ceiling of the backward pass's buffer of per-pair gradients; on a GPU each filling of it costs
# the host two launches and a sort.
PAIR_BYTES = 64 * 2**20
PAIR_BYTES_GPU = 256 * 2**20
_MIN_ITEMS = 256


class UsedRows(NamedTuple):
    """Rows that hold samples, the first ones, where only the device knows how many."""

    rows: Tensor  # (S,) bool
    number: Tensor  # (1,) int32


def evaluate_fields(
    means: Tensor,
    quats: Tensor,
    scales: Tensor,
    opacities: Tensor,
    neighbors: Tensor,
    indices: Tensor,
    noise: Tensor,
    density_factor: float = 1.0,
    *,
    n_owners: int | None = None,
    used: UsedRows | None = None,
    native: bool | None = None,
) -> FieldSamples:
    """Sample points from Gaussians and evaluate all fields that the losses need.

    Args:
        means, scales: (N, 3) float32 world units, CPU or CUDA.
        quats: Unit quaternions, wxyz. (N, 4)
        neighbors: Neighbours of each Gaussian, usually itself first. (N, K) int32
        indices: Gaussian of each sample; those of one must be adjacent to share work. (S,)
        noise: Standard normal draws. (S, 3)
        n_owners: Most Gaussians with samples; None makes the host count them on a GPU.
        used: Rows that hold samples, on a GPU. The others are like points on a flat surface: their
            density is 1, other fields are 0, and gradients of them are not read. None: all.
        native: Whether to run the CPU's vector code; None: by the device.

    Raises:
        ValueError: The CPU's code is to leave rows out.
    """
    if native is None:
        native = means.device.type == "cpu"
    if native and used is not None:
        raise ValueError("the host knows the number of samples on a CPU, where each row is one")
    settings = _FieldSettings(
        neighbors=neighbors,
        indices=indices,
        noise=noise,
        density_factor=float(density_factor),
        n_owners=n_owners,
        used=used,
        native=native,
    )
    return FieldSamples(*_Fields.apply(settings, means, quats, scales, opacities))


class _FieldSettings(NamedTuple):
    """Arguments of :func:`evaluate_fields` without a gradient."""

    neighbors: Tensor
    indices: Tensor
    noise: Tensor
    density_factor: float
    n_owners: int | None
    used: UsedRows | None
    native: bool


class _SavedFields(NamedTuple):
    """Tensors that the backward pass reads."""

    means: Tensor
    quats: Tensor
    scales: Tensor
    opacities: Tensor
    packed: Tensor  # (N, PACK_SIZE), on a GPU (N, COMPACT_SIZE)
    neighbors: Tensor  # (N, K) int32
    noise: Tensor  # (S, 3)
    owners: Tensor  # Gaussians of adjacent samples, (R,) int32
    starts: Tensor  # where each run begins and the last ends, (R + 1,) int32
    residual: Tensor  # (S, 4)


class _Fields(torch.autograd.Function):
    """:class:`_FieldSettings`, means, quaternions, scales, opacities -> fields at samples."""

    @staticmethod
    def forward(ctx, settings: _FieldSettings, *gaussians: Tensor):
        prepared = [tensor.detach().float().contiguous() for tensor in gaussians]
        means, quats, scales, opacities = prepared
        neighbors = settings.neighbors.int().contiguous()
        noise = settings.noise.float().contiguous()
        n_gaussians = means.shape[0]
        n_samples = noise.shape[0]
        device = means.device
        outputs = FieldSamples(
            points=torch.empty(n_samples, 3, device=device),
            density=torch.empty(n_samples, device=device),
            beta=torch.empty(n_samples, device=device),
            plane_distance=torch.empty(n_samples, device=device),
            normal_error=torch.empty(n_samples, device=device),
        )
        residual = torch.empty(n_samples, 4, device=device)
        if settings.native:
            pack = field_device.pack_rows
            pack_size = field_device.PACK_SIZE
        else:
            pack = field_device.pack_compact_rows
            pack_size = field_device.COMPACT_SIZE
        packed = torch.empty(n_gaussians, pack_size, device=device)
        launch(pack, n_gaussians, [*prepared, packed], min_items=_MIN_ITEMS)
        indices = settings.indices.int()
        if settings.native:
            owners, starts = _runs(indices)
        else:
            owners, starts = _short_runs(indices, settings.n_owners, settings.used)
        inputs = [
            quats,
            scales,
            packed,
            neighbors,
            noise,
            settings.density_factor,
            *outputs,
            residual,
        ]
        if settings.native:
            arguments = [owners, starts, *inputs]
            launch(evaluate_owners, owners.shape[0], arguments, min_items=_MIN_ITEMS // 8)
        else:
            used = settings.used
            if used is None:
                n_used = torch.full((1,), n_samples, dtype=torch.int32, device=device)
            else:
                n_used = used.number
            launch(field_device.evaluate_samples, n_samples, [n_used, indices, *inputs])
        ctx.save_for_backward(
            *_SavedFields(
                means=means,
                quats=quats,
                scales=scales,
                opacities=opacities,
                packed=packed,
                neighbors=neighbors,
                noise=noise,
                owners=owners,
                starts=starts,
                residual=residual,
            )
        )
        ctx.density_factor = settings.density_factor
        ctx.native = settings.native
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_points: Tensor | None, *d_scalars: Tensor | None):
        saved = _SavedFields(*ctx.saved_tensors)
        noise = saved.noise
        neighbors = saved.neighbors
        point_grads = noise.new_empty((0, 3)) if d_points is None else d_points.contiguous()
        n_samples = noise.shape[0]
        columns = [noise.new_zeros(n_samples) if d is None else d for d in d_scalars]
        scalar_grads = torch.stack(columns, dim=1)
        gaussians = (saved.means, saved.quats, saved.scales, saved.opacities)
        grads = [torch.zeros_like(tensor) for tensor in gaussians]
        inputs = [
            saved.quats,
            saved.scales,
            saved.packed,
            neighbors,
            noise,
            saved.residual,
            ctx.density_factor,
            int(d_points is not None),
            point_grads,
            scalar_grads,
        ]
        launch_sums = _launch_sums_native if ctx.native else _launch_sums_cuda
        for first, gradient_rows in _chunks(saved.owners.shape[0], neighbors.shape[1] + 1, noise):
            end = first + gradient_rows.shape[0]
            chunk = _Chunk(
                owners=saved.owners[first:end],
                starts=saved.starts[first : end + 1],
                neighbors=neighbors,
                gradient_rows=gradient_rows,
            )
            launch_sums(chunk, inputs, grads)
        return (None, *grads)


class _Chunk(NamedTuple):
    """Runs of samples whose gradient rows are in memory together."""

    owners: Tensor  # (R,) int32
    starts: Tensor  # (R + 1,) int32
    neighbors: Tensor  # of all Gaussians, (N, K) int32
    gradient_rows: Tensor  # of the neighbours and the owner, to be filled. (R, K + 1, PAIR_SIZE)

    def sorted_targets(self) -> tuple[Tensor, Tensor]:
        """Return the Gaussians of all gradient rows, rising, int32, and the rows' numbers."""
        of_owners = self.neighbors.index_select(0, self.owners)
        targets = torch.cat([of_owners, self.owners[:, None]], dim=1)
        return targets.flatten().sort(stable=True)

    def rows(self) -> Tensor:
        """Return all gradient rows. (R (K + 1), PAIR_SIZE)"""
        return self.gradient_rows.view(-1, field_device.PAIR_SIZE)


def _launch_sums_native(chunk: _Chunk, inputs: list[Any], grads: list[Tensor]) -> None:
    """Add a chunk's gradients to ``grads`` on the CPU."""
    arguments = [chunk.owners, chunk.starts, *inputs, chunk.gradient_rows]
    n_owners = chunk.owners.shape[0]
    launch(add_up_samples_native, n_owners, arguments, min_items=_MIN_ITEMS // 8)
    targets, order = chunk.sorted_targets()
    arguments = [targets, order, chunk.rows(), *grads]
    launch(field_device.add_up_pairs, targets.shape[0], arguments, min_items=_MIN_ITEMS)


def _launch_sums_cuda(chunk: _Chunk, inputs: list[Any], grads: list[Tensor]) -> None:
    """Add a chunk's gradients to ``grads`` on a GPU."""
    device = chunk.owners.device
    n_filled = torch.empty(1, dtype=torch.int32, device=device)
    arguments = [chunk.owners, chunk.starts, *inputs, chunk.gradient_rows, n_filled]
    field_sums_cuda.launch_runs(chunk.owners.shape[0], arguments, device)
    targets, order = chunk.sorted_targets()
    per_run = chunk.gradient_rows.shape[1]
    arguments = [targets, order, n_filled, per_run, chunk.rows(), *grads]
    field_sums_cuda.launch_rows(targets.shape[0], arguments, device)


def pair_bytes(device: torch.device) -> int:
    """Return the largest size of the buffer of per-pair gradients on a device."""
    return PAIR_BYTES if device.type == "cpu" else PAIR_BYTES_GPU


def _chunks(n_owners: int, pairs_per_owner: int, like: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (first owner, pair buffer) pairs that cover all owners; one buffer is reused."""
    size = max(1, pair_bytes(like.device) // (pairs_per_owner * field_device.PAIR_SIZE * 4))
    gradient_rows = like.new_empty((min(size, n_owners), pairs_per_owner, field_device.PAIR_SIZE))
    for first in range(0, n_owners, size):
        yield first, gradient_rows[: min(size, n_owners - first)]


def _runs(indices: Tensor) -> tuple[Tensor, Tensor]:
    """Gaussians of adjacent samples (R,), and where each run begins and the last ends. (R + 1,)"""
    owners, counts = indices.unique_consecutive(return_counts=True)
    starts = torch.zeros(owners.shape[0] + 1, dtype=torch.int32, device=indices.device)
    starts[1:] = counts.cumsum(dim=0)
    return owners, starts


def _short_runs(
    indices: Tensor, n_owners: int | None, used: UsedRows | None = None
) -> tuple[Tensor, Tensor]:
    """Return runs as :func:`_runs`, cut where they cross a multiple of ``RUN_SAMPLES``.

    With a bound of the number of owners nothing waits for the device, and the last runs may be
    without samples. So are runs of rows that are not used.
    """
    n_samples = indices.shape[0]
    begins = torch.empty(n_samples, dtype=torch.bool, device=indices.device)
    torch.ne(indices[1:], indices[:-1], out=begins[1:])
    begins[:: field_sums_cuda.RUN_SAMPLES].fill_(True)
    if n_owners is None:
        n_runs = int(begins.sum())
    else:
        n_cuts = n_samples // field_sums_cuda.RUN_SAMPLES
        n_runs = min(n_owners + n_cuts, n_samples)
    starts = torch.nonzero_static(begins, size=n_runs + 1, fill_value=n_samples).squeeze(1)
    if used is not None:
        starts = starts.minimum(used.number)
    return indices[starts[:-1].clamp_max(n_samples - 1)], starts.int()
