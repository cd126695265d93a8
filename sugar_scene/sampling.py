# SPDX-License-Identifier: Apache-2.0
"""Random draws that place samples in Gaussians: the same ones on every device.

Draws are hashes of the seed and the number of the sample (a generator of a GPU gives other numbers
on another model), and are made with integers and a table, so that no rounding differs either.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import warp as wp
from torch import Tensor

from sugar_utils.warp_launch import as_array, launch
from sugar_utils.warp_math import hashed

wp.set_module_options({"enable_backward": False, "cpu_compiler_flags": "-march=native"})

_QUANTILE_BITS = 16
_SHIFT = wp.constant(wp.uint32(32 - _QUANTILE_BITS))
_LOW_HALF = wp.constant(wp.uint32(0xFFFF))
_SECOND = wp.constant(wp.uint32(0x9E3779B9))
_THIRD = wp.constant(wp.uint32(0x3C6EF372))
_WORD = wp.constant(wp.uint64(32))

_MIN_SAMPLES = 4_096


@wp.kernel
def _place_samples(
    first: int, n: wp.int64, n_candidates: wp.int64, seed: wp.uint32, more_seed: wp.uint32,
    quantiles: wp.array(dtype=float), candidates: wp.array(dtype=wp.int64),
    indices: wp.array(dtype=wp.int64), noise: wp.array(dtype=wp.vec3),
):  # fmt: skip
    i = first + wp.tid()
    own = hashed(hashed(wp.uint32(i) ^ seed) + more_seed)
    # (i + u) * candidates / n with u of 32 bits: somewhere in the i-th of n equal parts.
    offset = (wp.uint64(own) * wp.uint64(n_candidates)) >> _WORD
    indices[i] = candidates[int((wp.int64(i) * n_candidates + wp.int64(offset)) / n)]
    second = hashed(own + _SECOND)
    third = hashed(own + _THIRD)
    noise[i] = wp.vec3(
        quantiles[int(second >> _SHIFT)],
        quantiles[int(second & _LOW_HALF)],
        quantiles[int(third >> _SHIFT)],
    )


def draw_samples(
    mask: Tensor, n_samples: int, seed: int, n_candidates: int | None = None
) -> tuple[Tensor, Tensor]:
    """Draw Gaussians of a mask, (N,) bool, uniformly, and a standard normal offset for each draw.

    The draws are stratified: each Gaussian gets as many samples as any other, give or take two,
    which leaves less noise in their mean. Without ``n_candidates`` the host counts the mask.

    Returns:
        Gaussian of each sample, rising, (S,) int64, and offsets, (S, 3) float32 (2^16 values for
        each coordinate); S = 0 where the mask is empty.
    """
    if n_candidates is None:
        n_candidates = int(mask.sum())
    candidates = torch.nonzero_static(mask, size=n_candidates).squeeze(1)
    if n_candidates == 0:
        n_samples = 0
    indices = torch.empty(n_samples, dtype=torch.int64, device=mask.device)
    noise = torch.empty((n_samples, 3), dtype=torch.float32, device=mask.device)
    seeds = (wp.uint32(seed & 0xFFFFFFFF), wp.uint32(seed >> 32 & 0xFFFFFFFF))
    quantiles, points = _normal_quantiles(mask.device), as_array(noise, wp.vec3)
    arguments = [n_samples, n_candidates, *seeds, quantiles, candidates, indices, points]
    launch(_place_samples, n_samples, arguments, min_items=_MIN_SAMPLES)
    return indices, noise


@functools.lru_cache(maxsize=4)
def _normal_quantiles(device: torch.device) -> Tensor:
    """The normal distribution in 2^16 equal parts, the middle of each; of variance 1. (2^16,)"""
    from scipy.special import ndtri

    n = 1 << _QUANTILE_BITS
    values = ndtri((np.arange(n) + 0.5) / n)
    return torch.from_numpy((values / values.std()).astype(np.float32)).to(device)
