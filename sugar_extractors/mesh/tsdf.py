# SPDX-License-Identifier: Apache-2.0
"""Mesh extraction by fusing rendered depth into a truncated signed distance field.

The field (Curless and Levoy, SIGGRAPH 1996) lives in blocks of voxels near the surface only. The
first of two passes over the views finds the blocks that some depth reaches, the second averages
distances and colours in them. So the memory does not depend on the number of views, and the result
not on their order of arrival. Case tables are those of Warp (Lorensen and Cline, SIGGRAPH 1987).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import warp as wp
from torch import Tensor
from torch.nn import functional

from gaussian_splatting.cloud import GaussianCloud, Gaussians
from gaussian_splatting.data.cameras import Camera, pixel_rays
from gaussian_splatting.data.masks import VisualHull
from gaussian_splatting.data.observations import Observations
from gaussian_splatting.rasterization import rasterize
from gaussian_splatting.rasterization.projection_kernels import View, make_view
from sugar_extractors.mesh.level_sets import Box
from sugar_scene import reprojection, triangle_mesh
from sugar_scene.plane_kernels import NO_PATCHES, ComparedPixels, depth_of_planes
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_trainers.view_comparison import all_pixels
from sugar_utils.console import Console
from sugar_utils.flags import non_negative_float, positive_float
from sugar_utils.settings import flag
from sugar_utils.warp_arrays import Floats, Floats2d, Vec3s, Vec3s2d
from sugar_utils.warp_launch import as_array, launch

try:
    from warp.geometry import IsoSurfaceMarchingCubes as Tables
except ImportError:
    # Warp 1.17, the newest that drivers of CUDA 12 can use.
    from warp import MarchingCubes as Tables

wp.set_module_options({"enable_backward": False})

BLOCK = 8  # voxels along the side of a block
_BLOCK_SIDE = wp.constant(BLOCK)
_N_FOOTPRINT_VIEWS = 8
_COARSER = 1.25
_EMPTY = TriangleMesh(np.zeros((0, 3)), np.zeros((0, 3), np.int64), np.zeros((0, 3), np.uint8))
_MIN_ITEMS = 4096
DEPTHS = ("blended", "plane")  # where depth comes from
PLANE_MARGIN = 0.05  # of a multi-view model, in camera extents
PLANE_FILL = 32  # edges of pinholes in its meshes: at grazing angles some depths are not confirmed
_flag = partial(flag, group="surface", no_effect_when="with --mesh_extractor poisson")

_CHUNK_BLOCKS = 2048
_CORNERS = np.array(Tables.CUBE_CORNER_OFFSETS, dtype=np.int64)
_EDGES = np.array(Tables.EDGE_TO_CORNERS, dtype=np.int64)
_RANGES = np.array(Tables.CASE_TO_TRI_RANGE, dtype=np.int64)
_TRIANGLES = np.array(Tables.TRI_LOCAL_INDICES, dtype=np.int64)
_EDGE_AXES = np.argmax(_CORNERS[_EDGES[:, 1]] - _CORNERS[_EDGES[:, 0]], axis=1)
# Sky and other things without texture lie wherever they please, and all photographs are explained;
# but no point of a reconstruction is ever found there.
MIN_VIEWS = 3  # photographs that observe a point that counts: two agree by chance now and then
MIN_OBSERVED = 50  # fewer points in a box do not tell where the scene ends
# For models of the multi-view mode, whose Gaussians are planes: a depth counts where the surface is
# not seen at a grazing angle, and where a neighbouring view that sees the place has the same depth.
MAX_ANGLE = 80.0  # largest angle between a surface's normal and the line of sight, in degrees
_MIN_ALPHA = 0.5  # pixels that the Gaussians cover less have no depth
MAX_MISS = 3.0  # pixels by which the way to a neighbour and back may miss; 1 leaves more holes
MAX_NEIGHBORS = 4  # neighbours that a depth is compared with
_KEPT_BYTES = 2**29


@dataclass(frozen=True)
class TsdfConfig:
    """Constants of the fusion.

    Blended depth is the mean along the ray, divided by alpha. The automatic voxel is the median
    side of a pixel on the surface times ``pixels_per_voxel``, at least 1/2048 of the box.
    """

    tsdf_depth: str = _flag(
        "blended",
        "blended: depth as rendered, all Gaussians averaged; plane: of the planes that "
        "Gaussians are, checked against neighbouring views; unset: plane of a multiview model, "
        "else blended",
        choices=DEPTHS,
        modes={"multiview": "plane"},
    )
    tsdf_voxel_size: float | None = _flag(
        None, "world units; unset: from the size of a pixel on the surface", parse=positive_float
    )
    pixels_per_voxel: float = 2.0
    tsdf_margin: float | None = _flag(
        None,
        "camera extents by which the surface may lie outside of the convex hull of the "
        f"reconstruction's points; unset: {PLANE_MARGIN} with --tsdf_depth plane, else anywhere",
        parse=non_negative_float,
        no_effect_when="where the scene has no tracks of points",
    )
    truncation: float = 4.0  # reach of the fused distances, in voxels
    min_alpha: float = 0.5
    min_component: int = 300
    # Ceiling of the voxels stored; where it is met, voxels are made larger.
    max_voxels: int = 40_000_000

    @property
    def margin(self) -> float | None:
        unset = PLANE_MARGIN if self.tsdf_depth == "plane" else None
        return unset if self.tsdf_margin is None else self.tsdf_margin

    @property
    def fill(self) -> int:
        """Holes of up to so many edges are closed, before decimation."""
        return PLANE_FILL if self.tsdf_depth == "plane" else 0


@dataclass(frozen=True)
class FusedRegion:
    mesh: TriangleMesh
    voxel_size: float  # side of a voxel, world units
    n_voxels: int


@dataclass(frozen=True)
class DepthView:
    camera: Camera
    depth: Tensor  # 0 where unknown. (H, W) world units
    color: Tensor  # (H, W, 3)
    weight: Tensor  # of the view in means over views. (H, W)


Renderer = Callable[[Camera], DepthView]


def view_renderer(cloud: GaussianCloud, config: TsdfConfig) -> Renderer:
    """What renders the views: all Gaussians blended."""
    # Faint Gaussians are part of what was trained; without them rendered depth has gaps.
    gaussians = cloud.detached().activate()
    gaussians.sh_rest = gaussians.sh_rest[:, :0].contiguous()

    def render(camera: Camera) -> DepthView:
        output = rasterize(gaussians, camera, depth=True, sh_degree=0)
        alpha = output.alpha.clamp_min(1e-6)
        # Expected depth: blended depth by alpha.
        depth = torch.where(output.alpha >= config.min_alpha, output.depth / alpha, 0.0)
        color = (output.image / alpha[..., None]).clamp(0, 1)
        return DepthView(camera, depth, color, torch.ones_like(depth))

    return render


def carved_renderer(render: Renderer, hull: VisualHull | None) -> Renderer:
    """What renders the views, without depth of pixels outside of their own masks."""

    def carved(camera: Camera) -> DepthView:
        view = render(camera)
        inside = hull.silhouette(camera)
        return view if inside is None else replace(view, depth=torch.where(inside, view.depth, 0.0))

    return render if hull is None else carved


def _world_points(view: DepthView, depth: Tensor) -> Tensor:
    """Points of all pixels at the given depths. (H, W) -> (H W, 3) world units"""
    camera = view.camera
    rays = pixel_rays(camera, dtype=depth.dtype, device=depth.device)
    local = (rays * depth[..., None]).reshape(-1, 3)
    return local @ depth.new_tensor(camera.rotation) + depth.new_tensor(camera.center)


@dataclass(frozen=True)
class Fusion:
    """The views that are fused, and the box within which they are."""

    render: Renderer
    cameras: Sequence[Camera]
    box: Box
    config: TsdfConfig
    console: Console

    def surface(self, region: ObservedRegion | None = None) -> FusedRegion:
        """Fuse all views within the box and extract the surface within a region."""
        config = self.config
        with torch.no_grad():
            voxel = config.tsdf_voxel_size or self._automatic_voxel()
            if voxel is None:
                return FusedRegion(_EMPTY, 0.0, 0)
            field = self._empty_field(voxel)
            self._fill(field)
        mesh = extract_surface(field)
        if region is not None and mesh.n_faces:
            mesh = triangle_mesh.keep_vertices(mesh, region.contains(mesh.vertices))
        mesh = triangle_mesh.without_small_components(mesh, config.min_component)
        if config.fill:
            mesh = triangle_mesh.with_holes_filled(mesh, config.fill)
        return FusedRegion(mesh, field.voxel, field.distances.numel())

    def _automatic_voxel(self) -> float | None:
        box = self.box
        parts = []
        for camera in self.cameras[:: max(1, len(self.cameras) // _N_FOOTPRINT_VIEWS)]:
            view = self.render(camera)
            points = _world_points(view, view.depth)
            depths = view.depth.flatten()
            low = points.new_tensor(box.low)
            high = points.new_tensor(box.high)
            good = ((points > low) & (points < high)).all(dim=-1) & (depths > 0)
            parts.append(depths[good] / math.sqrt(camera.fx * camera.fy))
        pixel_sizes = torch.cat(parts)
        if len(pixel_sizes) == 0:
            return None
        median = float(pixel_sizes.sort().values[len(pixel_sizes) // 2])
        smallest = max(np.subtract(box.high, box.low)) / 2048
        return max(self.config.pixels_per_voxel * median, smallest)

    def _empty_field(self, voxel: float) -> SparseField:
        """Blocks within the truncation distance of some depth, in larger voxels if too many."""
        box = self.box
        config = self.config
        device = self.render(self.cameras[0]).depth.device
        while True:
            sides = (high - low for low, high in zip(box.low, box.high, strict=True))
            shape = tuple(max(1, math.ceil(side / (voxel * BLOCK))) for side in sides)
            marked = torch.zeros(math.prod(shape), dtype=torch.bool, device=device)
            with self.console.progress("blocks", 1, len(self.cameras)) as progress:
                for done, camera in enumerate(self.cameras, start=1):
                    self._mark(self.render(camera), voxel, shape, marked)
                    progress.update(done)
            n = int(marked.sum()) * BLOCK**3
            if n <= config.max_voxels:
                break
            larger = voxel * max(_COARSER, math.sqrt(n / config.max_voxels))
            self.console.info(f"voxels of {voxel:.4g} would be too many; taking {larger:.4g}")
            voxel = larger
        table = torch.where(marked, marked.cumsum(0).int() - 1, -1).int().reshape(shape)
        distances = torch.zeros(n, device=device)
        weights = torch.zeros(n, device=device)
        colors = torch.zeros(n, 3, device=device)
        return SparseField(box.low, voxel, table, distances, weights, colors)

    def _mark(self, view: DepthView, voxel: float, shape: Sequence[int], marked: Tensor) -> None:
        """Mark the blocks that the depth of a view reaches. marked: (prod(shape),) bool"""
        reach = self.config.truncation * voxel
        n_steps = math.ceil(2 * reach / (voxel * BLOCK / 2)) + 1
        known = view.depth.flatten() > 0
        shape = torch.tensor(shape, device=marked.device)
        for offset in torch.linspace(-reach, reach, n_steps, device="cpu").tolist():
            points = _world_points(view, view.depth + offset)[known]
            blocks = (points - points.new_tensor(self.box.low)) / (voxel * BLOCK)
            blocks = blocks.floor().long()
            blocks = blocks[((blocks >= 0) & (blocks < shape)).all(dim=1)]
            marked[(blocks[:, 0] * shape[1] + blocks[:, 1]) * shape[2] + blocks[:, 2]] = True

    def _fill(self, field: SparseField) -> None:
        n = field.distances.numel()
        blocks = (field.table >= 0).nonzero().int().contiguous()
        if n == 0:
            return
        place = wp.vec3(*field.origin), field.voxel, self.config.truncation * field.voxel
        sums = field.distances, field.weights, as_array(field.colors, wp.vec3)
        with self.console.progress("fusion", 1, len(self.cameras)) as progress:
            for done, camera in enumerate(self.cameras, start=1):
                view = self.render(camera)
                colors = as_array(view.color.contiguous(), wp.vec3)
                maps = view.depth.contiguous(), colors, view.weight.contiguous()
                arguments = [make_view(camera), *place, as_array(blocks, wp.vec3i), *maps, *sums]
                launch(integrate, n, arguments, min_items=_MIN_ITEMS)
                progress.update(done, fields={"voxels": f"{n:,}"})


@wp.kernel
def integrate(
    first: int,
    view: View,
    origin: wp.vec3,
    voxel: float,
    truncation: float,
    blocks: wp.array(dtype=wp.vec3i),
    depth: Floats2d,
    color: Vec3s2d,
    weight: Floats2d,
    distances: Floats,
    weights: Floats,
    colors: Vec3s,
):
    """Average one view into the field; a work item is one voxel corner."""
    i = first + wp.tid()
    side = _BLOCK_SIDE
    block = blocks[i / (side * side * side)]
    part = i % (side * side * side)
    corner = wp.vec3(
        float(block[0] * side + part / (side * side)),
        float(block[1] * side + (part / side) % side),
        float(block[2] * side + part % side),
    )
    point = view.rotation * (origin + voxel * corner) + view.translation
    if not (point[2] > 0.0):
        return
    x = view.fx * point[0] / point[2] + view.cx
    y = view.fy * point[1] / point[2] + view.cy
    if not (x >= 0.0 and y >= 0.0 and x < float(view.width) and y < float(view.height)):
        return
    seen = depth[int(y), int(x)]
    distance = seen - point[2]
    if seen <= 0.0 or distance < -truncation:
        return
    own = weight[int(y), int(x)]
    share = own / (weights[i] + own)
    distances[i] += (wp.min(distance / truncation, 1.0) - distances[i]) * share
    colors[i] += (color[int(y), int(x)] - colors[i]) * share
    weights[i] += own


@dataclass(frozen=True)
class SparseField:
    """Signed distances at voxel corners, in B stored blocks of side S.

    Corner (x, y, z) of the whole grid lies at ``origin + voxel * (x, y, z)``; within a block the
    last axis runs fastest.
    """

    origin: tuple[float, float, float]
    voxel: float  # side of a voxel, world units
    table: Tensor  # block number by place; -1 where none is stored, (X, Y, Z) int32
    distances: Tensor  # positive outside, (B S^3,)
    weights: Tensor  # 0 where the distance is unknown, (B S^3,)
    colors: Tensor  # 0 to 1, (B S^3, 3)

    @property
    def side(self) -> int:
        n_blocks = max(1, int(self.table.max()) + 1)
        return round((self.distances.shape[0] / n_blocks) ** (1 / 3))


def extract_surface(field: SparseField) -> TriangleMesh:
    """Zero level set; cells with a corner that no view sees are left open."""
    table = field.table.cpu().numpy()
    distances = field.distances.cpu().numpy()
    is_known = field.weights.cpu().numpy() > 0
    colors = field.colors.cpu().numpy()
    places = np.argwhere(table >= 0)
    parts = [
        _chunk_cells(table, places[first : first + _CHUNK_BLOCKS], distances, is_known, field.side)
        for first in range(0, len(places), _CHUNK_BLOCKS)
    ]
    if not any(len(cells) for cells, _ in parts):
        return _EMPTY
    cells, rows = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    case = ((distances[rows] < 0) << np.arange(8)).sum(axis=1)
    start = _RANGES[case] // 3
    n = (_RANGES[case + 1] - _RANGES[case]) // 3
    cell_of = np.repeat(np.arange(len(case)), n)
    number = np.arange(len(cell_of)) - np.repeat(np.cumsum(n) - n, n) + start[cell_of]
    edges = _TRIANGLES.reshape(-1, 3)[number]
    low = _EDGES[edges, 0]
    axis = _EDGE_AXES[edges]
    corner = cells[cell_of][:, None] + _CORNERS[low]
    extent = np.array(table.shape) * field.side + 1
    keys = ((corner[..., 0] * extent[1] + corner[..., 1]) * extent[2] + corner[..., 2]) * 3 + axis
    _, where, faces = np.unique(keys.ravel(), return_index=True, return_inverse=True)

    row_a = rows[cell_of[:, None], low].ravel()[where]
    row_b = rows[cell_of[:, None], _EDGES[edges, 1]].ravel()[where]
    a = distances[row_a].astype(np.float64)
    b = distances[row_b].astype(np.float64)
    share = a / (a - b)
    vertices = corner.reshape(-1, 3)[where].astype(np.float64)
    vertices[np.arange(len(where)), axis.ravel()[where]] += share
    color = colors[row_a] + share[:, None] * (colors[row_b] - colors[row_a])
    return TriangleMesh(
        vertices * field.voxel + np.array(field.origin),
        # The tables wind towards smaller values.
        faces.reshape(-1, 3)[:, ::-1].copy(),
        np.clip(np.rint(color * 255), 0, 255).astype(np.uint8),
    )


def _chunk_cells(
    table: np.ndarray, places: np.ndarray, distances: np.ndarray, is_known: np.ndarray, side: int
) -> tuple[np.ndarray, np.ndarray]:
    # Corners 0 to side: the last layer belongs to the next blocks.
    local = np.stack(np.meshgrid(*[np.arange(side + 1)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    step = local // side
    inner = local % side
    offset = (inner[:, 0] * side + inner[:, 1]) * side + inner[:, 2]
    at = places[:, None] + step
    exists = (at < table.shape).all(axis=-1)
    at = np.minimum(at, np.array(table.shape) - 1)
    block = np.where(exists, table[at[..., 0], at[..., 1], at[..., 2]], -1).astype(np.int64)
    row = np.where(block >= 0, block * side**3 + offset, -1)
    known = (row >= 0) & is_known[row]
    inside = known & (distances[row] < 0)

    shape = (len(places), *[side + 1] * 3)
    row, known, inside = (array.reshape(shape) for array in (row, known, inside))

    def corner_view(array: np.ndarray, corner: np.ndarray) -> np.ndarray:
        x, y, z = corner
        return array[:, x : x + side, y : y + side, z : z + side]

    n_known = sum(corner_view(known, corner).astype(np.int8) for corner in _CORNERS)
    n_inside = sum(corner_view(inside, corner).astype(np.int8) for corner in _CORNERS)
    active = np.argwhere((n_known == 8) & (n_inside > 0) & (n_inside < 8))
    rows = np.stack([corner_view(row, corner)[tuple(active.T)] for corner in _CORNERS], axis=1)
    return places[active[:, 0]] * side + active[:, 1:], rows


@dataclass(frozen=True)
class ObservedRegion:
    normals: np.ndarray  # outward normals of its sides, (S, 3)
    offsets: np.ndarray  # a point x lies inside where normals . x <= offsets. (S,) world units

    def contains(self, points: np.ndarray) -> np.ndarray:
        """Points inside. (N, 3) -> (N,) bool"""
        inside = np.ones(len(points), dtype=bool)
        for normal, offset in zip(self.normals, self.offsets, strict=True):
            inside &= points @ normal <= offset
        return inside


def observed_region(
    observations: Observations | None, box: Box, margin: float
) -> ObservedRegion | None:
    """The region around the points of a reconstruction; None for too few, or all in one plane."""
    # Here and not above: most commands start without it.
    from scipy.spatial import ConvexHull, QhullError

    if observations is None:
        return None
    points = observations.points[observations.lengths >= MIN_VIEWS].astype(np.float64)
    points = points[box.contains(points)]
    if len(points) < MIN_OBSERVED:
        return None
    try:
        sides = np.unique(ConvexHull(points).equations, axis=0)
    except QhullError:
        return None
    return ObservedRegion(sides[:, :3], margin - sides[:, 3])


def kept(render: Renderer, cameras: Sequence[Camera]) -> Renderer:
    """What renders each view once, as far as the memory for that reaches."""
    largest = max(16 * camera.width * camera.height for camera in cameras)
    return functools.lru_cache(maxsize=max(1, _KEPT_BYTES // largest))(render)


def plane_renderer(
    gaussians: Gaussians,
    cameras: Sequence[Camera],
    neighbors: reprojection.NeighborViews,
    extent: float,
) -> Renderer:
    """What renders depth and colour of a view for the fusion. extent: in world units"""
    reach = reprojection.REACH * extent
    largest = max(4 * camera.width * camera.height for camera in cameras)

    @functools.lru_cache(maxsize=max(1 + MAX_NEIGHBORS, _KEPT_BYTES // largest))
    def depth_of(camera: Camera) -> Tensor:
        return plane_view(gaussians, camera, reach, colored=False).depth

    def render(camera: Camera) -> DepthView:
        view = plane_view(gaussians, camera, reach)
        others = [(other, depth_of(other)) for other in neighbors.of(camera.name)[:MAX_NEIGHBORS]]
        confirmed = confirmed_depth(view.depth, camera, others)
        return replace(view, depth=torch.where(confirmed, view.depth, 0.0))

    return render


def plane_view(
    gaussians: Gaussians, camera: Camera, reach: float, *, colored: bool = True
) -> DepthView:
    """Depth of the planes up to a distance and, if wanted, colour of degree 0.

    Errors of depth grow with it, and move the surface along its normal by their cosine. Weights of
    1 / (z^2 cosine) give distances along the line of sight the mean of least variance.
    """
    output = rasterize(gaussians, camera, rgb=colored, plane_reach=reach, sh_degree=0)
    plane = output.plane
    rays = pixel_rays(camera, dtype=plane.dtype, device=plane.device)
    depth = depth_of_planes(plane, camera)
    cosine = -(plane[..., :3] * rays).sum(dim=-1)
    cosine = cosine / (plane[..., :3].norm(dim=-1) * rays.norm(dim=-1)).clamp_min(1e-12)
    known = (output.alpha >= _MIN_ALPHA) & (cosine > math.cos(math.radians(MAX_ANGLE)))
    color = torch.zeros_like(rays)
    if colored:
        color = (output.image / output.alpha.clamp_min(1e-6)[..., None]).clamp(0, 1)
    depth = torch.where(known, depth, 0.0)
    return DepthView(camera, depth, color, torch.where(known, 1 / (depth**2 * cosine), 0.0))


def confirmed_depth(
    depth: Tensor, camera: Camera, neighbors: Sequence[tuple[Camera, Tensor]]
) -> Tensor:
    """Where a neighbour has the same depth, or none has any (0) there. (H, W) bool"""
    pixels = all_pixels(camera, depth.device)
    compared = torch.zeros_like(depth, dtype=torch.bool).reshape(-1)
    agreed = compared.clone()
    # Planes that face the camera, at these depths.
    planes = functional.pad(-depth.reshape(-1, 1), (3, 0))
    planes[:, 2] = -1.0
    for neighbor, there in neighbors:
        pair = reprojection.ViewPair.of(camera, neighbor)
        error = ComparedPixels.apply(planes, pixels, *[there] * 3, pair, NO_PATCHES)[1]
        compared |= error > 0
        agreed |= (error > 0) & (error <= MAX_MISS)
    return (agreed | ~compared).reshape(depth.shape)
