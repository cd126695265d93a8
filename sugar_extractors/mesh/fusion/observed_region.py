# SPDX-License-Identifier: Apache-2.0
"""The region in which a reconstruction has points.

Sky and other things without texture lie wherever they please, and all images are explained; but no
point of a reconstruction is ever found there. Within a margin around the points a surface goes on
where views show texture on it. Where they show none, it ends at its border, as of a ground before a
dark sky; a closed surface stays whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gaussian_splatting.core.subsets import is_among
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.observations import Observations
from sugar_scene import triangle_mesh
from sugar_scene.depth_view import DepthView, Renderer
from sugar_scene.plane_kernels import MIN_VARIANCE
from sugar_scene.regions import Box
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_scene.triangle_rasterizer import points_in_image, to_camera

MIN_OBSERVING_VIEWS = 3  # images that observe a reliable point: two agree by chance now and then
MIN_OBSERVED = 50  # fewer points in a box do not show where the scene ends
MAX_TEXTURE_VIEWS = 100
"""Views that are looked at for texture, evenly spread; for what none of them shows, all others."""
TEXTURE_PATCH = 5  # side of the squares whose variance is texture, pixels
_TEXTURED = 0.5  # share of the views, by their weights, that show texture on a surface that stays
_EDGE_RINGS = 4  # edges of the mesh by which the texture of a surface's rim reaches beyond it


@dataclass(frozen=True)
class ObservedRegion:
    """A convex region, as half-spaces."""

    normals: np.ndarray  # outward normals of its sides, (S, 3)
    offsets: np.ndarray  # a point x lies inside where normals . x <= offsets. (S,) world units
    margin: float  # by which the region is larger than the convex hull of points, world units

    def without_margin(self) -> ObservedRegion:
        """Return the convex hull of the points itself."""
        return ObservedRegion(self.normals, self.offsets - self.margin, 0.0)

    def contains(self, points: np.ndarray) -> np.ndarray:
        """Return which points lie inside. (N, 3) -> (N,) bool"""
        inside = np.ones(len(points), dtype=bool)
        for normal, offset in zip(self.normals, self.offsets, strict=True):
            inside &= points @ normal <= offset
        return inside


def observed_region(
    observations: Observations | None, box: Box, margin: float
) -> ObservedRegion | None:
    """Return the region around the points of a reconstruction.

    None for too few points, or if all lie in one plane.

    Args:
        margin: By which the surface may lie outside of their convex hull, in world units.
    """
    # Here and not above: most commands start without it.
    from scipy.spatial import ConvexHull, QhullError

    if observations is None:
        return None
    is_reliable = observations.lengths >= MIN_OBSERVING_VIEWS
    points = observations.points[is_reliable].astype(np.float64)
    points = points[box.contains(points)]
    if len(points) < MIN_OBSERVED:
        return None
    try:
        sides = np.unique(ConvexHull(points).equations, axis=0)
    except QhullError:
        return None
    return ObservedRegion(sides[:, :3], margin - sides[:, 3], margin)


def without_bare_border(
    mesh: TriangleMesh,
    points_region: ObservedRegion,
    render: Renderer,
    cameras: Sequence[Camera],
    reach: float,
    min_faces: int,
) -> TriangleMesh:
    """Cut untextured surface outside a region off a mesh, from its open edges inwards.

    Args:
        points_region: Around the points themselves, without a margin.
        reach: Difference in depth up to which a view shows a vertex, world units.
        min_faces: Of what the cut separates; smaller pieces go, too.
    """
    is_outside = ~points_region.contains(mesh.vertices)
    if not is_outside.any():
        return mesh
    points = mesh.vertices[is_outside]
    stride = max(1, -(-len(cameras) // MAX_TEXTURE_VIEWS))
    shares = texture_shares(points, render, cameras[::stride], reach)
    is_unseen = np.isnan(shares)
    if stride > 1 and is_unseen.any():
        others = [camera for number, camera in enumerate(cameras) if number % stride]
        shares[is_unseen] = texture_shares(points[is_unseen], render, others, reach)
    is_bare = np.zeros(mesh.n_vertices, dtype=bool)
    # What no view shows stays: comparisons with NaN are false.
    is_bare[is_outside] = shares < _TEXTURED
    for _ in range(_EDGE_RINGS):
        is_bare[mesh.faces[is_bare[mesh.faces].any(axis=1)]] = True
        is_bare &= is_outside
    return _without_pieces(mesh, _reaching_border(mesh, is_bare), min_faces)


def _reaching_border(mesh: TriangleMesh, selected: np.ndarray) -> np.ndarray:
    """Return the selected vertices that others of them connect with an open edge. (V,) bool"""
    faces = mesh.faces[selected[mesh.faces].all(axis=1)]
    labels = triangle_mesh.component_labels(TriangleMesh(mesh.vertices, faces, mesh.colors))
    border = triangle_mesh.border_edges(mesh).reshape(-1)
    is_at_border = is_among(mesh.n_vertices, labels[border[selected[border]]])
    return selected & is_at_border[labels]


def _without_pieces(mesh: TriangleMesh, is_cut: np.ndarray, min_faces: int) -> TriangleMesh:
    """Remove vertices, and the pieces of fewer faces that this separates."""
    is_beside_cut = is_among(mesh.n_vertices, mesh.faces[is_cut[mesh.faces].any(axis=1)])
    cut = triangle_mesh.keep_vertices(mesh, ~is_cut)
    pieces = triangle_mesh.component_labels(cut)
    n_faces = np.bincount(pieces[cut.faces[:, 0]], minlength=cut.n_vertices)
    is_separated = is_among(cut.n_vertices, pieces[is_beside_cut[~is_cut]])
    return triangle_mesh.keep_vertices(cut, ~is_separated[pieces] | (n_faces[pieces] >= min_faces))


def texture_shares(
    points: np.ndarray, render: Renderer, cameras: Sequence[Camera], reach: float
) -> np.ndarray:
    """Return the share of the views of each point that show texture there; NaN where none sees it.

    Args:
        points: Points of a surface, (P, 3) world units.
        reach: Difference in depth up to which a view shows a point, world units.
    """
    device = render(cameras[0]).depth.device
    places = torch.from_numpy(points).float().to(device)
    weights = torch.zeros(len(points), device=device)
    textured_weights = torch.zeros_like(weights)
    for camera in cameras:
        view = render(camera)
        view_points = to_camera(places, camera)
        is_shown, row, column = points_in_image(view_points, camera)
        depth = view.depth[row, column]
        is_shown &= (depth > 0) & ((depth - view_points[:, 2]).abs() < reach)
        weight = torch.where(is_shown, view.weight[row, column], 0.0)
        weights += weight
        textured_weights += torch.where(_is_textured(view)[row, column], weight, 0.0)
    return (textured_weights / weights).cpu().numpy()


def _is_textured(view: DepthView) -> Tensor:
    """Return which pixels have a neighbourhood whose grey values differ. (H, W) bool"""
    grey = view.color.mean(dim=-1)[None, None]
    padded = functional.pad(grey, [TEXTURE_PATCH // 2] * 4, mode="replicate")
    mean = functional.avg_pool2d(padded, TEXTURE_PATCH, stride=1)
    mean_square = functional.avg_pool2d(padded.square(), TEXTURE_PATCH, stride=1)
    return (mean_square - mean.square())[0, 0] >= MIN_VARIANCE
