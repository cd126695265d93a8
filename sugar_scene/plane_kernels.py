# SPDX-License-Identifier: Apache-2.0
"""Fused comparisons of blended planes with their own depth and with a neighbouring view, and of
rendered normals with a depth map.

The C++ bodies in ``native/`` are written for any number of lanes: eight on a CPU, where a work item
is a row or a run of pixels, one on a GPU, where it is a pixel. All gradients are computed in the
forward pass, as every term is a sum. Sums are one number per item, added up by torch in float64: no
atomics, the same bits every time.
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from typing import NamedTuple

import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.rasterization.projection_kernels import LENS_IN_RECORD, camera_record
from gaussian_splatting.rasterization.render import NORMAL_EPS
from sugar_scene.reprojection import MAX_CYCLE, MIN_DEPTH, MIN_FACING, MIN_SQUARE, ViewPair
from sugar_utils import warp_launch
from sugar_utils.device import constants, upload
from sugar_utils.warp_arrays import Floats, Floats2d, Floats3d, Ints2d
from sugar_utils.warp_launch import launch, native_kernel, native_source

PATCH_RADIUS = 2  # 5 x 5 pixels; larger planes lie inside of what is curved
MIN_VARIANCE = 4e-5  # of grey values in [0, 1]; patches with less have nothing to match
EPSILON = 1e-6  # added to both variances
UNCOUNTED = -1.0  # grey value of masked pixels; patches that touch one do not count
MIN_SQUARED_CROSS = 1e-24  # of two differences of points; with less they span no surface
NO_PATCHES, PATCHES_WHERE_MET, ALL_PATCHES = range(3)
# Of 1 - NCC: gradients of patches below the first count three times, above the second they fade.
SMALL_MISMATCH = 0.1
LARGE_MISMATCH = 0.5
RELIABLE_GAIN = 2.0
_PAD = 2
_RUN = 64
_MIN_ITEMS = 8


wp.set_module_options(warp_launch.NATIVE_OPTIONS)

_CONSTANTS = f"""
constexpr int PAD = {_PAD}, RADIUS = {PATCH_RADIUS};
constexpr float MIN_FACING = {MIN_FACING:e}, MIN_DEPTH = {MIN_DEPTH:e}, MIN_SQUARE = {MIN_SQUARE:e};
constexpr float MIN_SQUARED_CROSS = {MIN_SQUARED_CROSS:e}, MAX_CYCLE = {MAX_CYCLE:e};
constexpr float NORMAL_EPS = {NORMAL_EPS:e};
constexpr float MIN_VARIANCE = {MIN_VARIANCE:e}, VARIANCE_EPS = {EPSILON:e};
constexpr float UNCOUNTED = {UNCOUNTED};
"""


def _source(name: str) -> str:
    """A body for one lane, and for eight where there are vectors."""
    one = native_source(__file__, "one_lane")
    eight = native_source(__file__, "eight_lanes")
    body = native_source(__file__, name)
    return (
        f"{_CONSTANTS}if (lanes == 1) {{\n{one}{body}}}\n"
        f"#ifndef __CUDACC__\nelse {{\n{warp_launch.SIMD_SOURCE}{eight}{body}}}\n#endif\n"
    )


@native_kernel(_source("plane_maps"))
def map_planes(
    item: int,
    lanes: int,
    first_row: int,
    pad: int,
    lens_: Floats,
    plane_: Floats3d,
    maps_: Floats3d,
):
    """Depth of planes and, where there is room, their unit normals."""


@native_kernel("constexpr bool of_planes = true;\n" + _source("plane_normals"))
def compare_normals(
    item: int,
    lanes: int,
    first_row: int,
    lens_: Floats,
    scale_: Floats,
    plane_: Floats3d,
    maps_: Floats3d,
    gradient_: Floats3d,
    sums_: Floats,
):
    """Errors between planes and the normals of their depth, with their gradient."""


@native_kernel("constexpr bool of_planes = false;\n" + _source("plane_normals"))
def compare_depth_normals(
    item: int,
    lanes: int,
    first_row: int,
    lens_: Floats,
    scale_: Floats,
    plane_: Floats3d,
    maps_: Floats3d,
    gradient_: Floats3d,
    sums_: Floats,
):
    """Errors between rendered normals and those of a depth map, with their gradient."""


@native_kernel(_source("compare_pixels"))
def compare_pixels(
    item: int,
    lanes: int,
    patches: int,
    numbers_: Floats,
    pixels_: Ints2d,
    planes_: Floats2d,
    gray_: Floats2d,
    gray2_: Floats2d,
    depth2_: Floats2d,
    results_: Floats2d,
    d_miss_: Floats2d,
    d_mismatch_: Floats2d,
):
    """Errors of pixels in a neighbouring view, with their gradients."""


def lanes_of(device: torch.device) -> int:
    """Return the number of floats that a work item processes at once."""
    return 8 if device.type == "cpu" else 1


def lens_of(camera: Camera, device: torch.device) -> Tensor:
    """Focal lengths and principal point in pixels, where a recorded launch reads them. (4,)"""
    return camera_record(camera, device)[LENS_IN_RECORD]


def depth_of_planes(plane: Tensor, camera: Camera, first_row: int = 0) -> Tensor:
    """Return the depth at which rays meet their planes, 0 where unknown. (R, W) world units

    N and D, (R, W, 4) float32, may be columns of wider pixels.
    """
    maps = torch.empty(1, *plane.shape[:2], device=plane.device)
    _map_planes(plane.detach(), lens_of(camera, plane.device), first_row, 0, maps)
    return maps[0]


def _map_planes(plane: Tensor, lens: Tensor, first_row: int, pad: int, maps: Tensor) -> None:
    lanes = lanes_of(plane.device)
    arguments = [lanes, first_row, pad, lens, plane, maps]
    launch(map_planes, _items(plane.shape, lanes), arguments, min_items=_MIN_ITEMS)


def _items(shape: torch.Size, lanes: int) -> int:
    return shape[0] * shape[1] if lanes == 1 else shape[0]


def _maps_like(like: Tensor, value: float) -> tuple[Tensor, Tensor]:
    """Maps of depth, unit normals and weights of one value, and the part inside their borders."""
    height, width = like.shape[:2]
    # Pixels beyond the border have no depth, and no weight: both are 0, or no numbers.
    stride = -(-width // 8) * 8 + 8 * _PAD
    maps = torch.full((5, height + 2 * _PAD, stride), value, device=like.device)
    return maps, maps[:, _PAD : _PAD + height, 4 * _PAD : 4 * _PAD + width]


def _mean_error(
    kernel: wp.Kernel,
    values: Tensor,
    maps: Tensor,
    lens: Tensor,
    scale: Tensor,
    gradient: Tensor,
    total: int | Tensor,
    first_row: int = 0,
) -> Tensor:
    """Run a kernel over planes or normals; return the sum of errors divided by ``total``."""
    lanes = lanes_of(values.device)
    n_items = _items(values.shape, lanes)
    sums = torch.empty(n_items, device=values.device)
    arguments = [lanes, first_row, lens, scale, values, maps, gradient, sums]
    launch(kernel, n_items, arguments, min_items=_MIN_ITEMS)
    return (sums.sum(dtype=torch.float64) / total).float()


class NormalErrors(torch.autograd.Function):
    """Blended planes, (R, W, 4), camera, first row, weights of all its pixels, (H, W), counted
    rows, divisor -> mean of w (1 - N . n(z)), 0 at pixels without a depth and next to them.
    """

    @staticmethod
    def forward(
        ctx,
        plane: Tensor,
        camera: Camera,
        first_row: int,
        weights: Tensor,
        rows: slice,
        total: int | Tensor,
    ):
        plane = plane.detach()
        lens = lens_of(camera, plane.device)
        maps, inside = _maps_like(plane, 0.0)
        inside[4, rows] = weights[first_row : first_row + len(plane)][rows]
        _map_planes(plane, lens, first_row, _PAD, maps)
        gradient = torch.empty(*plane.shape[:2], 4, device=plane.device)
        ctx.save_for_backward(gradient)
        scale = torch.ones(1, device=plane.device) / total
        return _mean_error(compare_normals, plane, maps, lens, scale, gradient, total, first_row)

    @staticmethod
    def backward(ctx, d_loss: Tensor):
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(d_loss), None, None, None, None, None


class DepthNormalErrors(torch.autograd.Function):
    """Depth, (R, W), blended x and y of normals, (R, W, 2), lens (fx, fy, cx, cy) of pixel centres
    at integers, (4,), valid mask, (R, W) bool or 1, counted rows, divisor -> mean of 1 - N . n(z),
    which is 1 where the depth map has no normal n(z).
    """

    @staticmethod
    def forward(
        ctx,
        depth: Tensor,
        normal_xy: Tensor,
        lens: Tensor,
        valid: Tensor | float,
        rows: slice,
        total: int | Tensor,
    ):
        normal_xy = normal_xy.detach()
        maps, inside = _maps_like(normal_xy, torch.nan)
        torch.stack([depth.detach(), *normal_xy.unbind(2)], out=inside[:3])
        if isinstance(valid, Tensor):
            inside[4, rows] = valid[rows]
        else:
            inside[4, rows].fill_(valid)
        # By x and y of the normals, (R, W, 2), and by depth, (R, W), one after the other.
        gradient = torch.empty(3, *depth.shape, device=depth.device)
        ctx.save_for_backward(gradient)
        ctx.total = total
        scale = constants((1.0,), depth.device)
        shifted = lens + constants((0.0, 0.0, 0.5, 0.5), depth.device)
        return _mean_error(compare_depth_normals, normal_xy, maps, shifted, scale, gradient, total)

    @staticmethod
    def backward(ctx, d_loss: Tensor):
        (gradient,) = ctx.saved_tensors
        gradient.mul_(d_loss / ctx.total)
        _, height, width = gradient.shape
        return gradient[2], gradient[:2].view(height, width, 2), None, None, None, None


class PlanesAt(torch.autograd.Function):
    """Gather planes, (R, W, 4), at distinct pixel indices, (n,) int64."""

    @staticmethod
    def forward(ctx, plane: Tensor, places: Tensor):
        ctx.shape = plane.shape
        ctx.save_for_backward(places)
        return plane.flatten(0, 1).index_select(0, places)

    @staticmethod
    def backward(ctx, d_planes: Tensor):
        (places,) = ctx.saved_tensors
        gradient = d_planes.new_zeros(ctx.shape)
        gradient.view(-1, ctx.shape[2]).index_copy_(0, places, d_planes)
        return gradient, None


class ComparedMaps(NamedTuple):
    """Maps of two views that are compared; grey values are in [0, 1], ``UNCOUNTED`` if masked."""

    gray: Tensor  # of the reference view, (H, W)
    neighbor_gray: Tensor  # (H', W')
    neighbor_depth: Tensor  # 0 where unknown, (H', W') world units


def pair_numbers(pair: ViewPair, device: torch.device, tolerance: float | None = None) -> Tensor:
    """Return a pair of views as :class:`ComparedPixels` reads it. (23,) float32

    With a ``tolerance`` t, gradients of 1 - NCC = m are multiplied by
    exp(-(m / (t LARGE_MISMATCH))^4) (1 + 2 / (1 + (m / SMALL_MISMATCH)^2)).
    """
    falloff = (0.0, 0.0, 0.0)
    if tolerance is not None:
        falloff = (RELIABLE_GAIN, 1 / SMALL_MISMATCH, 1 / (LARGE_MISMATCH * tolerance))
    numbers = []
    for camera in (pair.reference, pair.neighbor):
        numbers += [camera.fx, camera.fy, camera.cx, camera.cy]
    numbers += [*pair.rotation.ravel().tolist(), *pair.translation.tolist(), *falloff]
    return upload(torch.tensor(numbers, dtype=torch.float32, device="cpu"), device)


class ComparedPixels(torch.autograd.Function):
    """Compares pixels of a view, given their planes N and D, (n, 4), with a neighbouring view.

    Pixels are columns and rows, (n, 2) int32; numbers are those of :func:`pair_numbers`;
    ``patches`` says whose patches are compared.

    Returns, (n,) each and 0 elsewhere: weights exp(-error) of pixels whose forward-backward
    reprojection error is less than ``MAX_CYCLE``; the errors of all pixels with a depth there, in
    pixels, above 0; 1 - NCC of patches with what their planes show in the neighbour; and 1 where
    there is one: the patch lies in both images, counts in both, and has something to match.
    """

    @staticmethod
    def forward(
        ctx,
        planes: Tensor,
        pixels: Tensor,
        maps: ComparedMaps,
        numbers: Tensor,
        patches: int,
    ):
        n = planes.shape[0]
        device = planes.device
        lanes = lanes_of(device)
        results = torch.zeros(4, n, device=device)
        d_miss, d_mismatch = torch.zeros(2, n, 4, device=device).unbind()
        arguments = [
            lanes,
            patches,
            numbers,
            pixels.detach().contiguous(),
            planes.detach().contiguous(),
            *[tensor.detach().contiguous() for tensor in maps],
            results,
            d_miss,
            d_mismatch,
        ]
        n_items = n if lanes == 1 else -(-n // _RUN)
        launch(compare_pixels, n_items, arguments)
        weights, misses, mismatches, matched = results.unbind()
        ctx.save_for_backward(d_miss, d_mismatch)
        ctx.mark_non_differentiable(weights, matched)
        return weights, misses, mismatches, matched

    @staticmethod
    def backward(ctx, _, d_misses: Tensor, d_mismatches: Tensor, __):
        d_miss, d_mismatch = ctx.saved_tensors
        gradient = d_miss * d_misses[:, None] + d_mismatch * d_mismatches[:, None]
        return gradient, None, None, None, None
