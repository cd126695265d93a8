# SPDX-License-Identifier: Apache-2.0
"""The colours of a texture, gathered from pictures of the mesh.

Every texel is a point of the surface. It takes the colour of each view by bilinear interpolation,
but only from pixels that show its own surface: the plane of its triangle at the pixel has to agree
with the depth of the first hit. Texels larger than a pixel average several points. A texel beside
its triangle, which bilinear filtering reads at the edges, is a point of the triangle's plane:
neighbours then meet at their edge. One work item owns a texel, so there are no atomics.
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.reporting.evaluation import to_uint8
from gaussian_splatting.rasterization.projection_kernels import View, make_view
from sugar_extractors.texture.texture_atlas import Atlas
from sugar_scene.triangle_rasterizer import rasterize_camera_triangles, to_camera
from sugar_utils.warp_arrays import Floats, Floats2d, Ints, Vec2s, Vec3s, Vec4s
from sugar_utils.warp_launch import FUSED_OPTIONS, as_array, launch

wp.set_module_options(FUSED_OPTIONS)

BYTES_PER_TEXEL = 20  # sum of colours, sum of weights, face
BUDGET_BYTES = 5 << 28  # of rows worked on at once: a texture of 8008 x 8008 texels in one go
# Texels from a triangle within which colours are looked for: filtering reads up to one beside it,
# and samples of a texel lie within half of one.
REACH = 1.5
MOST_PIXELS = 1_000  # pixels of a face's box; larger faces count as visible without a search
_CHUNK_TEXELS = 1 << 22
_MIN_ITEMS = 4096
_MAX_SAMPLES = 4
Faces = wp.array(dtype=wp.vec3i)
Image = wp.array2d(dtype=wp.vec4)


class ViewColors(NamedTuple):
    """Colours of one view, and how much it counts."""

    image: Tensor  # (H, W, 3) in [0, 1]; of (H, W, 4) the last value is how much a pixel counts
    # How much the view counts at each vertex, in addition to ``BakingConfig.floor``; (V,)
    preferred: Tensor | None = None


ViewSource = Callable[[Camera], ViewColors]


@dataclass(frozen=True)
class BakingConfig:
    """Settings of a :class:`Baker`."""

    # Distance of a pixel from the plane of the triangle, in widths of a pixel at that depth.
    depth_tolerance: float = 2.0
    cosine_power: float = 4.0  # of the cosine to the normal, in the weight of a view
    floor: float = 1.0  # how much a view counts where no vertex prefers it
    budget_bytes: int = BUDGET_BYTES  # of the rows of the texture that are worked on at once


@dataclass(frozen=True)
class BakedTexture:
    """A texture and how much of it some view shows."""

    texture: Tensor  # row 0 is at v = 1, as in a picture file, (side, side, 3) uint8
    seen_texels: int  # texels of faces that some view shows
    face_texels: int  # texels of faces
    seen_faces: int  # faces of which some texel is seen
    face_count: int  # faces that have texels; charts give none to those far below a texel
    n_bands: int  # parts in which the texture was worked on


class _Band(NamedTuple):
    """Colours of some rows of the texture, gathered from all views."""

    rows: slice  # of the texture
    faces: Tensor  # face of each texel, -1 for none, (R, side) int32
    colors: Tensor  # (R, side, 3)
    is_seen: Tensor  # (R, side) bool


@wp.func
def closest_on_segment(p: wp.vec2, a: wp.vec2, b: wp.vec2) -> wp.vec2:
    """The point of a segment nearest to p."""
    along = b - a
    length = wp.dot(along, along)
    if not (length > 0.0):
        return a
    return a + wp.clamp(wp.dot(p - a, along) / length, 0.0, 1.0) * along


@wp.func
def closest_in_triangle(p: wp.vec2, a: wp.vec2, b: wp.vec2, c: wp.vec2) -> wp.vec2:
    """The nearest point on the outline of a triangle, for p outside."""
    best = closest_on_segment(p, a, b)
    other = closest_on_segment(p, b, c)
    if wp.length_sq(other - p) < wp.length_sq(best - p):
        best = other
    other = closest_on_segment(p, c, a)
    if wp.length_sq(other - p) < wp.length_sq(best - p):
        best = other
    return best


@wp.func
def area(a: wp.vec2, b: wp.vec2) -> float:
    """The signed area of the parallelogram of two vectors."""
    return a[0] * b[1] - a[1] * b[0]


@wp.func
def sample_surface(
    view: View,
    point: wp.vec3,
    normal: wp.vec3,
    offset: float,
    tolerance: float,
    image: Image,
    depths: Floats2d,
) -> wp.vec4:
    """Bilinear colour at a camera-space point from pixels that show its plane, and their weight."""
    sum = wp.vec4(0.0, 0.0, 0.0, 0.0)
    if not (point[2] > 0.0):
        return sum
    u = view.fx * point[0] / point[2] + view.cx - 0.5
    v = view.fy * point[1] / point[2] + view.cy - 0.5
    if not (u > -1.0 and v > -1.0 and u < float(view.width) and v < float(view.height)):
        return sum
    limit = tolerance * point[2] / wp.min(view.fx, view.fy)
    x_first = int(wp.floor(u))
    y_first = int(wp.floor(v))
    for k in range(4):
        x = x_first + (k & 1)
        y = y_first + (k >> 1)
        if x >= 0 and y >= 0 and x < view.width and y < view.height:
            ray = wp.vec3(
                (float(x) + 0.5 - view.cx) / view.fx, (float(y) + 0.5 - view.cy) / view.fy, 1.0
            )
            # Not a number and infinity fail the comparison.
            if wp.abs(offset / wp.dot(normal, ray) - depths[y, x]) <= limit:
                color = image[y, x]
                weight = (1.0 - wp.abs(u - float(x))) * (1.0 - wp.abs(v - float(y))) * color[3]
                sum += weight * wp.vec4(color[0], color[1], color[2], 1.0)
    return sum


@wp.kernel
def find_visible(
    first: int,
    view: View,
    tolerance: float,
    corners: Vec2s,
    vertices: Vec3s,
    faces: Faces,
    depths: Floats2d,
    may_be_visible: wp.array(dtype=wp.uint8),
):
    """Mark the faces with a texel that may find a colour.

    Texels look at pixels around points of the triangle's plane that are nearer than REACH texels to
    the triangle. This kernel tests all of those pixels, with the tolerance of the farthest point.
    """
    f = first + wp.tid()
    face = faces[f]
    a = vertices[face[0]]
    ab = vertices[face[1]] - a
    ac = vertices[face[2]] - a
    normal = wp.cross(ab, ac)
    offset = wp.dot(normal, a)
    side1 = corners[3 * f + 1] - corners[3 * f]
    side2 = corners[3 * f + 2] - corners[3 * f]
    doubled = area(side1, side2)
    may_be_visible[f] = wp.uint8(0)
    if doubled == 0.0 or offset == 0.0:
        return
    du = (side2[1] * ab - side1[1] * ac) / doubled
    dv = (side1[0] * ac - side2[0] * ab) / doubled
    reach = wp.static(REACH) * (wp.length(du) + wp.length(dv))
    nearest = wp.min(a[2], wp.min(a[2] + ab[2], a[2] + ac[2])) - reach
    farthest = wp.max(a[2], wp.max(a[2] + ab[2], a[2] + ac[2])) + reach
    may_be_visible[f] = wp.uint8(1)
    if not (nearest > 0.0):
        return
    low = wp.vec2(wp.inf, wp.inf)
    high = -low
    for k in range(3):
        corner = vertices[face[k]]
        column = view.fx * corner[0] / corner[2] + view.cx
        pixel = wp.vec2(column, view.fy * corner[1] / corner[2] + view.cy)
        low = wp.min(low, pixel)
        high = wp.max(high, pixel)
    # A point that is moved in space moves in the picture by its way across and its way in depth.
    slope_x = wp.max(wp.abs(low[0] - view.cx), wp.abs(high[0] - view.cx)) / view.fx
    slope_y = wp.max(wp.abs(low[1] - view.cy), wp.abs(high[1] - view.cy)) / view.fy
    margin_x = view.fx * reach / nearest * (1.0 + slope_x) + 2.0
    margin_y = view.fy * reach / nearest * (1.0 + slope_y) + 2.0
    x_begin = int(wp.floor(wp.clamp(low[0] - margin_x, 0.0, float(view.width))))
    x_end = int(wp.ceil(wp.clamp(high[0] + margin_x, 0.0, float(view.width))))
    y_begin = int(wp.floor(wp.clamp(low[1] - margin_y, 0.0, float(view.height))))
    y_end = int(wp.ceil(wp.clamp(high[1] + margin_y, 0.0, float(view.height))))
    if (x_end - x_begin) * (y_end - y_begin) > wp.static(MOST_PIXELS):
        return
    # Rounding must not decide otherwise here than where colours are taken.
    limit = 1.01 * tolerance * farthest / wp.min(view.fx, view.fy)
    for y in range(y_begin, y_end):
        for x in range(x_begin, x_end):
            ray = wp.vec3(
                (float(x) + 0.5 - view.cx) / view.fx, (float(y) + 0.5 - view.cy) / view.fy, 1.0
            )
            if wp.abs(offset / wp.dot(normal, ray) - depths[y, x]) <= limit:
                return
    may_be_visible[f] = wp.uint8(0)


@wp.kernel
def gather_view(
    first: int,
    view: View,
    first_row: int,
    side: int,
    tolerance: float,
    cosine_power: float,
    texel_faces: Ints,
    corners: Vec2s,
    vertices: Vec3s,
    faces: Faces,
    preference: Floats,
    floor: float,
    image: Image,
    depths: Floats2d,
    may_be_visible: wp.array(dtype=wp.uint8),
    sums: Vec4s,
):
    """Add the weighted colour that one view has of each texel to its sum."""
    i = first + wp.tid()
    f = texel_faces[i]
    if f < 0:
        return
    if may_be_visible[f] == wp.uint8(0):
        return
    face = faces[f]
    a = vertices[face[0]]
    ab = vertices[face[1]] - a
    ac = vertices[face[2]] - a
    normal = wp.cross(ab, ac)
    offset = wp.dot(normal, a)
    origin = corners[3 * f]
    side1 = corners[3 * f + 1] - origin
    side2 = corners[3 * f + 2] - origin
    doubled = area(side1, side2)
    if doubled == 0.0 or offset == 0.0:
        return
    # World vectors along one texel in u and v.
    du = (side2[1] * ab - side1[1] * ac) / doubled
    dv = (side1[0] * ac - side2[0] * ab) / doubled
    center = wp.vec2(float(i % side) + 0.5, float(first_row + i / side) + 0.5) - origin
    anchor = center
    share1 = area(center, side2) / doubled
    share2 = area(side1, center) / doubled
    if share1 < 0.0 or share2 < 0.0 or share1 + share2 > 1.0:
        anchor = closest_in_triangle(center, wp.vec2(0.0, 0.0), side1, side2)
        # Filtering never reads farther from the triangle than this.
        if wp.max(wp.abs(center[0] - anchor[0]), wp.abs(center[1] - anchor[1])) >= 1.0:
            center = anchor
    point = a + center[0] * du + center[1] * dv
    if not (point[2] > 0.0):
        return
    pixels = wp.max(wp.length(du), wp.length(dv)) * wp.max(view.fx, view.fy) / point[2]
    samples = wp.clamp(int(wp.ceil(pixels - 0.5)), 1, wp.static(_MAX_SAMPLES))
    sum = wp.vec4(0.0, 0.0, 0.0, 0.0)
    for k in range(samples * samples):
        x = (float(k % samples) + 0.5) / float(samples) - 0.5
        y = (float(k / samples) + 0.5) / float(samples) - 0.5
        place = point + x * du + y * dv
        sum += sample_surface(view, place, normal, offset, tolerance, image, depths)
    if sum[3] == 0.0 and (anchor[0] != center[0] or anchor[1] != center[1]):
        # The plane leaves the surface here: continue the colour of the outline.
        point = a + anchor[0] * du + anchor[1] * dv
        sum = sample_surface(view, point, normal, offset, tolerance, image, depths)
    if sum[3] > 0.0:
        cosine = wp.abs(offset) / (wp.length(normal) * wp.length(point))
        preferred = (
            (1.0 - share1 - share2) * preference[face[0]]
            + share1 * preference[face[1]]
            + share2 * preference[face[2]]
        )
        weight = wp.pow(cosine, cosine_power) * (floor + wp.max(preferred, 0.0))
        sums[i] = sums[i] + weight / float(samples * samples) * sum


@dataclass(frozen=True)
class Baker:
    """Colours the texture of a mesh from pictures of it, some rows at a time."""

    vertices: Tensor  # (V, 3) world units
    faces: Tensor  # (F, 3)
    atlas: Atlas
    cameras: Sequence[Camera]
    config: BakingConfig = BakingConfig()
    # Called after each view with the number of views that are done, and of all.
    on_view: Callable[[int, int], None] = lambda done, total: None

    @torch.no_grad()
    def bake(self, source: ViewSource, face_colors: Tensor) -> BakedTexture:
        """Return the texture of weighted mean colours of all views.

        A texel that no view shows gets the mean colour of its face's texels.

        Args:
            source: Returns the colours of a view.
            face_colors: For faces that no view shows. (F, 3) in [0, 1]
        """
        atlas = self.atlas
        device = self.vertices.device
        shape = (atlas.side, atlas.side)
        texture = torch.zeros(*shape, 3, dtype=torch.uint8, device=device)
        is_seen = torch.zeros(shape, dtype=torch.bool, device=device)
        color_sums = torch.zeros(3, atlas.n_faces, dtype=torch.int64, device=device)
        counts = torch.zeros(atlas.n_faces, dtype=torch.int64, device=device)
        for band in self._gathered(source):
            is_seen[band.rows] = band.is_seen
            texture[band.rows] = to_uint8(band.colors)
            owners = band.faces[band.is_seen].long()
            colors = texture[band.rows][band.is_seen].long()
            for channel in range(3):
                color_sums[channel].scatter_add_(0, owners, colors[:, channel])
            counts.scatter_add_(0, owners, torch.ones_like(owners))
        # Faces of which no texel is seen have their own colours.
        means = color_sums.double() / counts.clamp_min(1)
        means = means.T.round().to(torch.uint8)
        has_mean = counts > 0
        means = torch.where(has_mean[:, None], means, to_uint8(face_colors.to(device)))
        seen_texels = int(is_seen.sum())
        bands = _bands(atlas.side, self.config.budget_bytes)
        face_texels, face_count = _fill_unseen(texture, is_seen, atlas, bands, means)
        return BakedTexture(
            texture=texture.flip(0),
            seen_texels=seen_texels,
            face_texels=face_texels,
            seen_faces=int(has_mean.sum()),
            face_count=face_count,
            n_bands=len(bands),
        )

    @torch.no_grad()
    def add(self, texture: Tensor, source: ViewSource, exposure: Callable[[], Tensor]) -> Tensor:
        """Add missing colours to a baked texture and return it.

        Args:
            texture: As :meth:`bake` returns it. (side, side, 3) uint8
            source: Returns what is missing in a view, which may be negative.
            exposure: Returns the divisor of the sum, (3,); called when all views were read.
        """
        texture = texture.flip(0)
        for band in self._gathered(source):
            colors = texture[band.rows] / 255 + band.colors
            texture[band.rows] = to_uint8(colors / exposure())
        return texture.flip(0)

    def _gathered(self, source: ViewSource) -> Iterator[_Band]:
        """Yield the mean colours of all views, some rows of the texture at a time."""
        side = self.atlas.side
        n_views = len(self.cameras)
        bands = _bands(side, self.config.budget_bytes)
        for number, band in enumerate(bands):
            texel_faces = self.atlas.texel_faces(band.start, band.stop)
            sums = torch.zeros(texel_faces.numel(), 4, device=self.vertices.device)
            for index, camera in enumerate(self.cameras):
                self._gather(band.start, texel_faces, camera, source(camera), sums)
                self.on_view(number * n_views + index + 1, len(bands) * n_views)
            for rows in _chunks(len(texel_faces), side):
                chunk = sums.view(-1, side, 4)[rows]
                weights = chunk[..., 3]
                yield _Band(
                    rows=slice(band.start + rows.start, band.start + rows.stop),
                    faces=texel_faces[rows],
                    colors=chunk[..., :3] / weights[..., None].clamp_min(1e-30),
                    is_seen=weights > 0,
                )
            del sums, texel_faces

    def _gather(
        self, first_row: int, texel_faces: Tensor, camera: Camera, colors: ViewColors, sums: Tensor
    ) -> None:
        """Add one view to the sums of a band.

        Args:
            first_row: Of the band in the texture.
            texel_faces: Face of each texel of the band. (R, side) int32
            sums: Weighted colours and weights, changed in place. (R side, 4)
        """
        config = self.config
        faces = self.faces.to(torch.int32).contiguous()
        points = to_camera(self.vertices, camera)
        depths = rasterize_camera_triangles(points, faces, camera).depth
        image = colors.image
        if image.shape[-1] == 3:
            image = torch.nn.functional.pad(image, (0, 1), value=1.0)
        else:
            # No surface lies where nothing counts, so no colour is taken from there.
            depths = torch.where(image[..., 3] > 0, depths, torch.inf)
        preferred = colors.preferred
        if preferred is None:
            preferred = points.new_zeros(len(points))
        view = make_view(camera)
        depths = depths.contiguous()
        corners = as_array(self.atlas.corners.reshape(-1, 2).contiguous(), wp.vec2)
        vertices = as_array(points, wp.vec3)
        triangles = as_array(faces, wp.vec3i)
        may_be_visible = torch.empty(len(faces), dtype=torch.uint8, device=points.device)
        arguments = [
            view,
            config.depth_tolerance,
            corners,
            vertices,
            triangles,
            depths,
            may_be_visible,
        ]
        launch(find_visible, len(faces), arguments, min_items=_MIN_ITEMS)
        arguments = [
            view,
            first_row,
            self.atlas.side,
            config.depth_tolerance,
            config.cosine_power,
            texel_faces.view(-1),
            corners,
            vertices,
            triangles,
            preferred.contiguous(),
            config.floor,
            as_array(image.float().contiguous(), wp.vec4),
            depths,
            may_be_visible,
            as_array(sums, wp.vec4),
        ]
        launch(gather_view, texel_faces.numel(), arguments, min_items=_MIN_ITEMS)


def _bands(side: int, budget_bytes: int) -> list[slice]:
    """Split the rows of the texture into parts that fit the budget, of at least one row."""
    return _parts(side, budget_bytes // (BYTES_PER_TEXEL * side))


def _chunks(n_rows: int, side: int) -> list[slice]:
    """Split rows into parts with small temporaries."""
    return _parts(n_rows, _CHUNK_TEXELS // side)


def _parts(n_rows: int, most: int) -> list[slice]:
    starts = range(0, n_rows, max(1, most))
    return [slice(first, min(first + starts.step, n_rows)) for first in starts]


def _fill_unseen(
    texture: Tensor, is_seen: Tensor, atlas: Atlas, bands: Sequence[slice], means: Tensor
) -> tuple[int, int]:
    """Colour the texels that no view shows.

    Args:
        texture: Changed in place. (side, side, 3) uint8
        is_seen: Texels that have a colour. (side, side) bool
        means: Colours of the faces. (F, 3) uint8

    Returns:
        The number of texels of faces, and of faces that have texels.
    """
    between = means.double().mean(dim=0).round().to(torch.uint8)
    n_face_texels = 0
    has_texels = torch.zeros(atlas.n_faces, dtype=torch.bool, device=texture.device)
    for band in bands:
        first = band.start
        end = band.stop
        texel_faces = atlas.texel_faces(first, end)
        for rows in _chunks(end - first, atlas.side):
            at = slice(first + rows.start, first + rows.stop)
            owners = texel_faces[rows]
            is_missing = ~is_seen[at]
            has_face = owners >= 0
            texture[at][is_missing] = between
            is_missing &= has_face
            texture[at][is_missing] = means[owners[is_missing].long()]
            n_face_texels += int(has_face.sum())
            has_texels[owners[has_face].long()] = True
    return n_face_texels, int(has_texels.sum())


def with_filled_gaps(texture: Tensor, atlas: Atlas) -> Tensor:
    """Continue the colours of charts into the gaps between them.

    Smaller copies of the picture, which graphics hardware makes, mix them with the charts. Each gap
    takes the mean of the smallest square of texels around it, of sides 2, 4, 8, ..., that has a
    colour.

    Args:
        texture: As a picture file has it, row 0 at v = 1. (side, side, 3) uint8
    """
    filled = texture.flip(0)
    side = atlas.side
    half = -(-side // 2)
    # Bands of an even number of rows, as squares of 2 x 2 texels need.
    bands = _parts(side, max(2, _CHUNK_TEXELS // side // 2 * 2))
    has_face = torch.zeros(side, side, dtype=torch.bool, device=texture.device)
    sums = torch.zeros(half, half, 4, device=texture.device)
    for band in bands:
        band_has_face = atlas.texel_faces(band.start, band.stop) >= 0
        has_face[band] = band_has_face
        counts = band_has_face[..., None].float()
        colors = filled[band].float() * counts
        band_sums = _halved(torch.cat([colors, counts], dim=2))
        first = band.start // 2
        sums[first : first + len(band_sums)] = band_sums
    means = _means_or_parents(sums)
    columns = torch.arange(side, device=texture.device) // 2
    for band in bands:
        rows = torch.arange(band.start, band.stop, device=texture.device) // 2
        parents = means[rows][:, columns].round().to(torch.uint8)
        filled[band] = torch.where(has_face[band][..., None], filled[band], parents)
    return filled.flip(0)


def _halved(sums: Tensor) -> Tensor:
    """Sum over squares of 2 x 2. (H, W, 4) -> (H / 2, W / 2, 4), rounded up"""
    height, width, _ = sums.shape
    padded = torch.nn.functional.pad(sums, (0, 0, 0, width % 2, 0, height % 2))
    squares = padded.reshape(-(-height // 2), 2, -(-width // 2), 2, 4)
    return squares.sum(dim=(1, 3))


def _means_or_parents(sums: Tensor) -> Tensor:
    """Return means of summed colours and counts; of coarser squares where the count is zero.

    (H, W, 4) -> (H, W, 3)
    """
    counts = sums[..., 3:]
    means = sums[..., :3] / counts.clamp_min(1)
    if len(sums) == 1 or bool((counts > 0).all()):
        return means
    parents = _means_or_parents(_halved(sums))
    rows = torch.arange(len(sums), device=sums.device) // 2
    columns = torch.arange(sums.shape[1], device=sums.device) // 2
    return torch.where(counts > 0, means, parents[rows][:, columns])
