# SPDX-License-Identifier: Apache-2.0
"""First-hit rasterization of triangles without a graphics API, one source for CPU and CUDA.

Every pixel centre is a ray ((x + 0.5 - cx) / fx, (y + 0.5 - cy) / fy, 1). Ray and triangle meet
where the homogeneous edge functions d . (b x c), d . (c x a), d . (a x b) of the camera-space
corners have one sign (Olano and Greer, "Triangle scan conversion using 2D homogeneous
coordinates", 1997), so nothing is clipped at the camera. Both sides are hit. Corners are float32
and their products float64, hence exact: no ray slips through between two triangles.

The winner at a pixel is the smallest depth, then the smallest face index, in any order of faces.
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import warp as wp
from torch import Tensor
from torch.nn import functional

from gaussian_splatting.data.cameras import Camera, pixel_rays
from gaussian_splatting.rasterization.projection_kernels import TILE, View, make_view, n_tiles
from sugar_scene.triangle_mesh import TriangleMesh, area_normals
from sugar_utils.device import float32_tensor
from sugar_utils.warp_arrays import Floats2d, Ints, Ints2d, Vec3s
from sugar_utils.warp_launch import EXACT_OPTIONS, as_array, launch, native_kernel, native_source

# An edge function has to round the same wherever it is computed.
wp.set_module_options(EXACT_OPTIONS)

MAX_PAIRS = 1 << 24  # (tile, face) pairs sorted at a time, which bounds the memory
MAX_PIXELS = 1 << 18  # pixels whose barycentric coordinates are found at a time
_CPU_CELL = TILE
_GPU_CELL = 2
_MIN_ITEMS = 4096
_BIG = 1.0e9
_PAD = 0.05
_TILE_SIDE = wp.constant(TILE)
Faces = wp.array(dtype=wp.vec3i)
Rects = wp.array(dtype=wp.vec4i)


@dataclass(frozen=True)
class TriangleHits:
    """The first triangle on every pixel's ray."""

    face: Tensor  # row of the face; -1 where there is none, (H, W) int32
    depth: Tensor  # depth along the view axis; infinite where there is none, (H, W) world units
    mesh: tuple[Tensor, Tensor]  # vertices in camera coordinates, (V, 3), and faces, (F, 3) int32
    camera: Camera

    @property
    def covered(self) -> Tensor:
        """Pixels whose ray meets a triangle. (H, W) bool"""
        return self.face >= 0

    @functools.cached_property
    def barycentrics(self) -> Tensor:
        """Perspective-correct weights of the face's corners; zero without a face. (H, W, 3)

        Computed when they are read: most callers need faces and depths alone.
        """
        vertices, faces = self.mesh
        weights = vertices.new_zeros(*self.face.shape, 3)
        rays = pixel_rays(self.camera, dtype=torch.float64, device=vertices.device)
        for pixels in self.covered.nonzero().split(MAX_PIXELS):
            row, column = pixels.unbind(1)
            corners = vertices[faces[self.face[row, column]]]
            a, b, c = corners.double().unbind(1)
            sides = torch.stack(
                [torch.linalg.cross(b, c), torch.linalg.cross(c, a), torch.linalg.cross(a, b)]
            )
            signed = (sides * rays[row, column]).sum(dim=-1)
            weights[row, column] = (signed / signed.sum(dim=0)).T.float()
        return weights

    @functools.cached_property
    def cosines(self) -> Tensor:
        """Cosine between a face's normal and the line of sight, negative from behind. (H, W)

        It is 0 without a face.
        """
        vertices, faces = self.mesh
        rays = pixel_rays(self.camera, dtype=torch.float32, device=vertices.device)
        cosines = torch.zeros_like(self.depth)
        corners = vertices[faces[self.face[self.covered].long()].long()]
        normals = functional.normalize(area_normals(corners), dim=-1)
        lines = functional.normalize(rays[self.covered], dim=-1)
        cosines[self.covered] = -(normals * lines).sum(dim=-1)
        return cosines


@wp.kernel
def move_to_camera(first: int, view: View, points: Vec3s, moved: Vec3s):
    """Transform points from world to camera coordinates."""
    i = first + wp.tid()
    moved[i] = view.rotation * points[i] + view.translation


@wp.func
def axis_bounds(a: wp.vec3, b: wp.vec3, c: wp.vec3, axis: int, f: float, m: float) -> wp.vec2:
    """Return the interval of pixel indices whose centres a projected triangle may cover.

    Along one axis, with focal length f and principal point m.
    """
    pa = f * a[axis] / a[2] + m
    pb = f * b[axis] / b[2] + m
    pc = f * c[axis] / c[2] + m
    low = wp.min(pa, wp.min(pb, pc))
    high = wp.max(pa, wp.max(pb, pc))
    # float32 rounding grows with the coordinate; the exact test decides, this must only not miss.
    pad = _PAD + 1.0e-5 * wp.max(wp.abs(low), wp.abs(high))
    return wp.vec2(wp.clamp(low - pad - 0.5, -_BIG, _BIG), wp.clamp(high + pad - 0.5, -_BIG, _BIG))


@wp.kernel
def bound_faces(first: int, view: View, vertices: Vec3s, faces: Faces, rects: Rects, counts: Ints):
    """Compute each face's pixel rectangle (x0, x1, y0, y1; past the end) and number of tiles."""
    i = first + wp.tid()
    rects[i] = wp.vec4i(0, 0, 0, 0)
    counts[i] = 0
    face = faces[i]
    a = vertices[face[0]]
    b = vertices[face[1]]
    c = vertices[face[2]]
    sum = wp.abs(a) + wp.abs(b) + wp.abs(c)
    size = sum[0] + sum[1] + sum[2]
    z_min = wp.min(a[2], wp.min(b[2], c[2]))
    z_max = wp.max(a[2], wp.max(b[2], c[2]))
    # Written so that a corner with NaN drops the face.
    if not (size < 1.0e30 and z_max > 0.0):
        return
    x = wp.vec2(0.0, float(view.width - 1))
    y = wp.vec2(0.0, float(view.height - 1))
    if z_min > 1.0e-6 * size:
        x = axis_bounds(a, b, c, 0, view.fx, view.cx)
        y = axis_bounds(a, b, c, 1, view.fy, view.cy)
    x0 = wp.max(int(wp.ceil(x[0])), 0)
    x1 = wp.min(int(wp.floor(x[1])) + 1, view.width)
    y0 = wp.max(int(wp.ceil(y[0])), 0)
    y1 = wp.min(int(wp.floor(y[1])) + 1, view.height)
    if x1 <= x0 or y1 <= y0:
        return
    rects[i] = wp.vec4i(x0, x1, y0, y1)
    across = (x1 - 1) / _TILE_SIDE - x0 / _TILE_SIDE + 1
    counts[i] = across * ((y1 - 1) / _TILE_SIDE - y0 / _TILE_SIDE + 1)


@wp.kernel
def tiles_of_pairs(
    first: int, view: View, pair_faces: Ints, pair_numbers: Ints, rects: Rects, tiles: Ints
):
    """Compute the tile of each (face, tile) pair, the k-th of its face."""
    i = first + wp.tid()
    rect = rects[pair_faces[i]]
    first_column = rect[0] / _TILE_SIDE
    across = (rect[1] - 1) / _TILE_SIDE - first_column + 1
    k = pair_numbers[i]
    row = rect[2] / _TILE_SIDE + k / across
    tiles[i] = row * view.tiles_x + first_column + k % across


@native_kernel(f"constexpr int TILE = {TILE};\n" + native_source(__file__, "hit_faces"))
def hit_faces(
    item: int,
    tiles_x: int,
    lens: wp.vec4,
    cell: int,
    offsets_: Ints,
    ids_: Ints,
    vertices_: Vec3s,
    faces_: Faces,
    rects_: Rects,
    hits_: Ints2d,
    depths_: Floats2d,
):
    """Test a tile's faces against the pixels of one square cell of the tile."""


def mesh_tensors(mesh: TriangleMesh, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the vertices, (V, 3) float32, and faces, (F, 3) int64, of a mesh on a device."""
    vertices = float32_tensor(mesh.vertices).to(device)
    return vertices, torch.from_numpy(mesh.faces).to(device)


def rasterize_triangles(vertices: Tensor, faces: Tensor, camera: Camera) -> TriangleHits:
    """Find the first triangle on every pixel's ray. vertices: (V, 3) world units; faces: (F, 3)"""
    return rasterize_camera_triangles(to_camera(vertices, camera), faces, camera)


class VisiblePoints(NamedTuple):
    """Points of a mesh's surface in one view."""

    is_visible: Tensor  # whether nothing hides the point, (P,) bool
    row: Tensor  # row of its pixel, 0 outside of the image, (P,) int64
    column: Tensor  # column of its pixel, 0 outside of the image, (P,) int64


def pixels_of_points(
    points: Tensor, vertices: Tensor, faces: Tensor, camera: Camera
) -> VisiblePoints:
    """Find the points of a mesh's surface, (P, 3), that a view shows, to a pixel's precision."""
    first_depth = rasterize_triangles(vertices, faces, camera).depth
    view_points = to_camera(points, camera)
    in_image, row, column = points_in_image(view_points, camera)
    z = view_points[:, 2]
    pixel_size = z / camera.fx
    is_visible = in_image & (z <= first_depth[row, column] + pixel_size)
    return VisiblePoints(is_visible, row, column)


def points_in_image(view_points: Tensor, camera: Camera) -> VisiblePoints:
    """Find the pixels of points in camera coordinates, (P, 3); those in the image are visible."""
    x, y, z = view_points.unbind(1)
    column = camera.fx * x / z + camera.cx
    row = camera.fy * y / z + camera.cy
    in_image = (z > 0) & (column >= 0) & (column < camera.width)
    in_image &= (row >= 0) & (row < camera.height)
    column = torch.where(in_image, column, 0.0).long()
    row = torch.where(in_image, row, 0.0).long()
    return VisiblePoints(in_image, row, column)


def to_camera(points: Tensor, camera: Camera) -> Tensor:
    """Transform to camera coordinates, bit-identical for any number of threads. (N, 3) -> (N, 3)"""
    points = points.detach().float().contiguous()
    moved = torch.empty_like(points)
    arguments = [make_view(camera), as_array(points, wp.vec3), as_array(moved, wp.vec3)]
    launch(move_to_camera, points.shape[0], arguments, min_items=_MIN_ITEMS)
    return moved


def rasterize_camera_triangles(vertices: Tensor, faces: Tensor, camera: Camera) -> TriangleHits:
    """Find first triangles of a mesh in camera coordinates; faces with a NaN corner are skipped."""
    device = vertices.device
    vertices = vertices.detach().float().contiguous()
    n_faces = len(faces)
    view = make_view(camera)
    if n_faces == 0:
        # Without rows any strides count as contiguous, which Warp does not take.
        faces = torch.empty(0, 3, dtype=torch.int32, device=device)
    faces = faces.to(device=device, dtype=torch.int32).contiguous()
    hits = torch.full(camera.shape, -1, dtype=torch.int32, device=device)
    depths = torch.full(hits.shape, torch.inf, device=device)
    rects = torch.empty(n_faces, 4, dtype=torch.int32, device=device)
    counts = torch.empty(n_faces, dtype=torch.int32, device=device)
    mesh = [as_array(vertices, wp.vec3), as_array(faces, wp.vec3i)]
    rect_array = as_array(rects, wp.vec4i)
    launch(bound_faces, n_faces, [view, *mesh, rect_array, counts], min_items=_MIN_ITEMS)
    across, down = n_tiles(camera)
    lens = wp.vec4(camera.fx, camera.fy, camera.cx, camera.cy)
    cell = _CPU_CELL if device.type == "cpu" else _GPU_CELL
    for span in _spans(counts):
        offsets, ids = _tile_lists(view, span, counts, rects, across * down)
        arguments = [across, lens, cell, offsets, ids, *mesh, rect_array, hits, depths]
        launch(hit_faces, across * down * (TILE // cell) ** 2, arguments)
    return TriangleHits(hits, depths, (vertices, faces), camera)


class _Span(NamedTuple):
    """A range of faces."""

    first: int
    end: int
    n_pairs: int  # (tile, face) pairs of its faces


def _spans(counts: Tensor) -> list[_Span]:
    """Cut the faces into groups of about ``MAX_PAIRS`` pairs each."""
    n_faces = len(counts)
    ends = counts.cumsum(0)
    total = int(ends[-1]) if n_faces else 0
    if total == 0:
        return []
    if total <= MAX_PAIRS:
        return [_Span(0, n_faces, total)]
    starts = torch.arange(0, total, MAX_PAIRS, device=counts.device)
    firsts = torch.searchsorted(ends, starts, right=True).unique().tolist()
    spans = []
    for first, end in pairwise([*firsts, n_faces]):
        spans.append(_Span(first, end, int(counts[first:end].sum())))
    return spans


def _tile_lists(
    view: View, span: _Span, counts: Tensor, rects: Tensor, n_all_tiles: int
) -> tuple[Tensor, Tensor]:
    """Faces by tile: start of each tile's run (tiles + 1,), and the faces (pairs,)."""
    device = counts.device
    sizes = counts[span.first : span.end].long()
    span_faces = torch.arange(span.first, span.end, dtype=torch.int32, device=device)
    faces = torch.repeat_interleave(span_faces, sizes, output_size=span.n_pairs)
    starts = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes, output_size=span.n_pairs)
    numbers = (torch.arange(span.n_pairs, device=device) - starts).int()
    tiles = torch.empty(span.n_pairs, dtype=torch.int32, device=device)
    arguments = [view, faces, numbers, as_array(rects, wp.vec4i), tiles]
    launch(tiles_of_pairs, span.n_pairs, arguments, min_items=_MIN_ITEMS)
    tiles, order = tiles.sort()
    edges = torch.arange(n_all_tiles + 1, dtype=torch.int32, device=device)
    return torch.searchsorted(tiles, edges, out_int32=True), faces[order]
