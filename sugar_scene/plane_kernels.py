# SPDX-License-Identifier: Apache-2.0
"""Blended planes against their own depth and against a neighbouring view, fused.

The C++ bodies in ``native/`` are written for any number of lanes: eight on a CPU, where a work item
is a row or a run of pixels, one on a GPU, where it is a pixel. All gradients are found on the way
forward, as every term is a sum. Sums are one number per item, added up by torch in float64: no
atomics, the same bits every time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from sugar_scene.reprojection import MAX_CYCLE, MIN_DEPTH, MIN_FACING, MIN_SQUARE, ViewPair
from sugar_utils.warp_launch import NATIVE_OPTIONS, SIMD_SOURCE, launch

PATCH_RADIUS = 3  # patches have 7 x 7 pixels
MIN_VARIANCE = 4e-5  # of grey values in [0, 1]; patches with less have nothing to match
EPSILON = 1e-6  # added to both variances
UNCOUNTED = -1.0  # grey value of masked pixels; patches that touch one do not count
MIN_SQUARED_CROSS = 1e-24  # of two differences of points; with less they span no surface
NO_PATCHES, PATCHES_WHERE_MET, ALL_PATCHES = range(3)
_PAD, _RUN, _MIN_ITEMS = 2, 64, 8

Floats = wp.array(dtype=float)
Floats2d = wp.array2d(dtype=float)
Floats3d = wp.array3d(dtype=float)

wp.set_module_options(NATIVE_OPTIONS)

_CONSTANTS = f"""
constexpr int PAD = {_PAD}, RADIUS = {PATCH_RADIUS};
constexpr float MIN_FACING = {MIN_FACING:e}, MIN_DEPTH = {MIN_DEPTH:e}, MIN_SQUARE = {MIN_SQUARE:e};
constexpr float MIN_SQUARED_CROSS = {MIN_SQUARED_CROSS:e}, MAX_CYCLE = {MAX_CYCLE:e};
constexpr float MIN_VARIANCE = {MIN_VARIANCE:e}, VARIANCE_EPS = {EPSILON:e};
constexpr float UNCOUNTED = {UNCOUNTED};
"""


def _source(name: str) -> str:
    """A body for one lane, and for eight where there are vectors."""
    one, eight, body = (
        (Path(__file__).parent / "native" / f"{part}.inc").read_text(encoding="utf-8")
        for part in ("one_lane", "eight_lanes", name)
    )
    return (
        f"{_CONSTANTS}if (lanes == 1) {{\n{one}{body}}}\n"
        f"#ifndef __CUDACC__\nelse {{\n{SIMD_SOURCE}{eight}{body}}}\n#endif\n"
    )


@wp.func_native(_source("plane_maps"))
def _map_planes(
    item: int, lanes: int, lens: wp.vec4, first_row: int, top: int, end: int, pad: int,
    plane_: Floats3d, weights_: Floats, maps_: Floats3d,
): ...  # fmt: skip


@wp.kernel
def map_planes(
    first: int, lanes: int, lens: wp.vec4, first_row: int, top: int, end: int, pad: int,
    plane: Floats3d, weights: Floats, maps: Floats3d,
):  # fmt: skip
    _map_planes(
        first + wp.tid(), lanes, lens, first_row, top, end, pad, plane, weights, maps,
    )  # fmt: skip


@wp.func_native(_source("plane_normals"))
def _compare_normals(
    item: int, lanes: int, lens: wp.vec4, scale_: Floats, plane_: Floats3d, maps_: Floats3d,
    d_plane_: Floats3d, sums_: Floats,
): ...  # fmt: skip


@wp.kernel
def compare_normals(
    first: int, lanes: int, lens: wp.vec4, scale: Floats, plane: Floats3d, maps: Floats3d,
    d_plane: Floats3d, sums: Floats,
):  # fmt: skip
    _compare_normals(first + wp.tid(), lanes, lens, scale, plane, maps, d_plane, sums)


@wp.func_native(_source("compare_pixels"))
def _compare_pixels(
    item: int, lanes: int, patches: int, lens: wp.vec4, lens2: wp.vec4, rotation: wp.mat33,
    translation: wp.vec3, pixels_: wp.array2d(dtype=int), planes_: Floats2d, gray_: Floats2d,
    gray2_: Floats2d, depth2_: Floats2d, found_: Floats2d, d_miss_: Floats2d, d_mismatch_: Floats2d,
): ...  # fmt: skip


@wp.kernel
def compare_pixels(
    first: int, lanes: int, patches: int, lens: wp.vec4, lens2: wp.vec4, rotation: wp.mat33,
    translation: wp.vec3, pixels: wp.array2d(dtype=int), planes: Floats2d, gray: Floats2d,
    gray2: Floats2d, depth2: Floats2d, found: Floats2d, d_miss: Floats2d, d_mismatch: Floats2d,
):  # fmt: skip
    _compare_pixels(
        first + wp.tid(), lanes, patches, lens, lens2, rotation, translation, pixels, planes, gray,
        gray2, depth2, found, d_miss, d_mismatch,
    )  # fmt: skip


def lanes_of(device: torch.device) -> int:
    """Floats that a work item takes at once."""
    return 8 if device.type == "cpu" else 1


def _lens(camera: Camera, first_row: int = 0) -> wp.vec4:
    return wp.vec4(camera.fx, camera.fy, camera.cx, camera.cy - first_row)


def depth_of_planes(plane: Tensor, camera: Camera, first_row: int = 0) -> Tensor:
    """Depth at which the rays of some rows meet their planes, 0 where unknown. (R, W) world units

    Args:
        plane: N and D; may be columns of wider pixels. (R, W, 4) float32
    """
    plane = plane.detach()
    shape, device, lanes = plane.shape[:2], plane.device, lanes_of(plane.device)
    maps, none = torch.empty(1, *shape, device=device), torch.empty(0, device=device)
    arguments = [lanes, _lens(camera, first_row), 0, 0, 0, 0, plane, none, maps]
    launch(map_planes, _items(shape, lanes), arguments, min_items=_MIN_ITEMS)
    return maps[0]


def _items(shape: torch.Size, lanes: int) -> int:
    return shape[0] * shape[1] if lanes == 1 else shape[0]


class _NormalErrors(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plane: Tensor, camera: Camera, first_row: int, weights: Tensor, rows: slice,
                total: int | Tensor):  # fmt: skip
        (height, width), device, lanes = plane.shape[:2], plane.device, lanes_of(plane.device)
        shape, given = plane.shape[:2], plane.detach()
        # Pixels beyond the border have no depth.
        stride = -(-width // 8) * 8 + 8 * _PAD
        maps = torch.zeros(5, height + 2 * _PAD, stride, device=device)
        n_items, lens = _items(shape, lanes), _lens(camera, first_row)
        top, end, _ = rows.indices(height)
        arguments = [lanes, lens, first_row, top, end, _PAD, given, weights.reshape(-1), maps]
        launch(map_planes, n_items, arguments, min_items=_MIN_ITEMS)
        scale = torch.ones(1, device=device) / total
        sums, gradient = torch.empty(n_items, device=device), torch.empty(*shape, 4, device=device)
        arguments = [lanes, lens, scale, given, maps, gradient, sums]
        launch(compare_normals, n_items, arguments, min_items=_MIN_ITEMS)
        ctx.save_for_backward(gradient)
        return (sums.sum(dtype=torch.float64) / total).float()

    @staticmethod
    def backward(ctx, d_loss: Tensor):
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(d_loss), None, None, None, None, None


def plane_normal_loss(
    plane: Tensor,
    camera: Camera,
    first_row: int,
    weights: Tensor,
    *,
    rows: slice,
    total: int | Tensor,
) -> Tensor:
    """Mean of w (1 - N . n(z)): normals of the planes against those of their depth.

    Pixels without a depth, or beside one, count as 0. Differentiable once.

    Args:
        plane: May be columns of wider pixels. (R, W, 4) float32
        first_row: Of the image.
        weights: See ``edge_weights``. (H, W)
        rows: Rows that count.
        total: Divisor, the pixels of the whole image.
    """
    return _NormalErrors.apply(plane, camera, first_row, weights, rows, total)


class _Compared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, planes: Tensor, pixels: Tensor, gray: Tensor, gray2: Tensor, depth2: Tensor,
                pair: ViewPair, patches: int):  # fmt: skip
        n, device, lanes = planes.shape[0], planes.device, lanes_of(planes.device)
        found = torch.zeros(4, n, device=device)
        d_miss, d_mismatch = torch.zeros(2, n, 4, device=device).unbind()
        rotation = wp.mat33(*(float(value) for value in pair.rotation.ravel()))
        translation = wp.vec3(*(float(value) for value in pair.translation))
        arguments: list[Any] = [
            lanes, patches, _lens(pair.reference), _lens(pair.neighbor), rotation, translation,
            pixels, planes.detach().contiguous(), gray, gray2, depth2, found, d_miss, d_mismatch,
        ]  # fmt: skip
        n_items = n if lanes == 1 else -(-n // _RUN)
        launch(compare_pixels, n_items, arguments)
        weights, misses, mismatches, matched = found.unbind()
        ctx.save_for_backward(d_miss, d_mismatch)
        ctx.mark_non_differentiable(weights, matched)
        return weights, misses, mismatches, matched

    @staticmethod
    def backward(ctx, _, d_misses: Tensor, d_mismatches: Tensor, __):
        d_miss, d_mismatch = ctx.saved_tensors
        gradient = d_miss * d_misses[:, None] + d_mismatch * d_mismatches[:, None]
        return gradient, None, None, None, None, None, None


def compared_pixels(
    planes: Tensor,
    pixels: Tensor,
    gray: Tensor,
    neighbor_gray: Tensor,
    neighbor_depth: Tensor,
    pair: ViewPair,
    patches: int = PATCHES_WHERE_MET,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How a neighbour sees what planes say that pixels show.

    Args:
        planes: Blended, N and D, differentiable. (n, 4) float32
        pixels: Columns and rows. (n, 2) int32
        gray, neighbor_gray: In [0, 1], ``UNCOUNTED`` outside of masks. (H, W) float32
        neighbor_depth: Of the neighbour's planes, 0 where unknown. (H', W') world units
        patches: Which are compared, where pixels are met by the way there and back or all.

    Returns:
        Weights exp(-error) of pixels that the way to the neighbour and back misses by less than
        ``MAX_CYCLE``; the errors of all that have a depth there, in pixels, above 0; 1 - NCC of
        patches with what their planes show in the neighbour; and where there is one: the patch
        lies in both images, counts in both, and has something to match. 0 elsewhere. (n,) each
    """
    maps = (gray.contiguous(), neighbor_gray.contiguous(), neighbor_depth.contiguous())
    return _Compared.apply(planes, pixels.contiguous(), *maps, pair, patches)
