# SPDX-License-Identifier: Apache-2.0
"""Decimation by edge collapses whose error counts the more the better a place is known.

Each vertex has a quadric, the weighted sum of squared distances from the planes of its triangles
(Garland and Heckbert, Surface simplification using quadric error metrics, SIGGRAPH 1997), and a
collapse costs what its best point has in the quadrics of both ends. Edges are not taken one after
the other from a queue but many at a time: of the cheapest ones all those that no cheaper one
touches, so that no two of them change one triangle. The same mesh gives the same bits, whatever the
number of threads.
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import warp as wp
from torch import Tensor
from torch.nn.functional import normalize

from sugar_scene.triangle_mesh import TriangleMesh, doubled_area_normals
from sugar_utils.warp_arrays import Longs2d, Mat44ds, Vec3ds
from sugar_utils.warp_launch import as_array, launch

wp.set_module_options({"enable_backward": False})

_CANDIDATES = 0.15  # share of the edges, the cheapest ones, that a round collapses if it may
_FAST_CANDIDATES = 0.5  # the same far from the number of triangles that is wanted
_FAR = 4  # times that number
_BORDER_WEIGHT = 1.0  # of planes through borders, square to their triangles
_TOWARD_MIDDLE = wp.constant(1e-3)  # weight of the middle of an edge, in those of its planes
_LEAST_COSINE = 0.2  # by which a collapse may turn a triangle
_LEAST_SHAPE = 0.02  # twice the area of a triangle in its squared longest edge
_NEVER = torch.iinfo(torch.int64).max
_HALF_WORD = 32  # bits
_LOWER_HALF = (1 << _HALF_WORD) - 1
_SCATTER = 0x9E3779B1  # odd, so that no two rows get the same number
_DROPPED_BITS = 20  # of costs: those within an eighth are equal


@dataclass(frozen=True)
class _Edges:
    """Edges of a mesh."""

    ends: Tensor  # (E, 2) rows of vertices, the lower one first
    n_faces: Tensor  # that have the edge; 1 at borders, (E,)
    costs: Tensor  # of their collapse; infinite where it is not allowed, (E,) float32


@dataclass(frozen=True)
class _Collapsing:
    """A mesh between two rounds."""

    points: Tensor  # (V, 3) float64 world units
    quadrics: Tensor  # of each vertex, (V, 4, 4) float64
    colors: Tensor  # (V, 3) float32
    is_border: Tensor  # (V,) bool
    is_fixed: Tensor  # vertices that stay where they are, (V,) bool
    faces: Tensor  # (F, 3) int64
    edges: _Edges


@wp.func
def best_point(quadric: wp.mat44d, a: wp.vec3d, b: wp.vec3d) -> wp.vec3d:
    """Return the point of least error; where planes do not tell, it is near the middle."""
    middle = wp.float64(0.5) * (a + b)
    trace = quadric[0, 0] + quadric[1, 1] + quadric[2, 2]
    pull = wp.float64(_TOWARD_MIDDLE) * trace + wp.float64(1.0e-300)
    system = wp.mat33d(
        quadric[0, 0] + pull,
        quadric[0, 1],
        quadric[0, 2],
        quadric[1, 0],
        quadric[1, 1] + pull,
        quadric[1, 2],
        quadric[2, 0],
        quadric[2, 1],
        quadric[2, 2] + pull,
    )
    linear = wp.vec3d(quadric[0, 3], quadric[1, 3], quadric[2, 3])
    return wp.inverse(system) * (pull * middle - linear)


@wp.kernel
def collapse_edges(
    first: int,
    rows: Longs2d,
    points: Vec3ds,
    quadrics: Mat44ds,
    best: Vec3ds,
    costs: wp.array(dtype=float),
):
    """Find the point that each edge would collapse to, and its error."""
    item = first + wp.tid()
    a = int(rows[item, 0])
    b = int(rows[item, 1])
    quadric = quadrics[a] + quadrics[b]
    point = best_point(quadric, points[a], points[b])
    best[item] = point
    extended = wp.vec4d(point[0], point[1], point[2], wp.float64(1.0))
    costs[item] = wp.max(float(wp.dot(extended, quadric * extended)), 0.0)


def decimated(
    mesh: TriangleMesh,
    n_faces: int,
    weights: np.ndarray | None = None,
    fixed: np.ndarray | None = None,
) -> TriangleMesh:
    """Return a mesh with at most so many triangles, if its shape can have so few.

    Colours are means of the vertices that are joined.

    Args:
        weights: Of squared distances at each vertex; None: 1. (V,)
        fixed: Vertices that stay where they are; None: none does. (V,) bool
    """
    if mesh.n_faces <= n_faces:
        return mesh
    collapsing = _begin(mesh, weights, fixed)
    while len(collapsing.faces) > n_faces:
        smaller = _round(collapsing, n_faces)
        if smaller is None:
            break
        collapsing = smaller
    return TriangleMesh(
        collapsing.points.numpy(),
        collapsing.faces.numpy(),
        collapsing.colors.round().to(torch.uint8).numpy(),
    )


def _begin(mesh: TriangleMesh, weights: np.ndarray | None, fixed: np.ndarray | None) -> _Collapsing:
    """Return the quadrics and edges of a mesh."""
    points = torch.from_numpy(mesh.vertices.copy())
    faces = torch.from_numpy(mesh.faces.copy())
    n_vertices = len(points)
    crosses = torch.from_numpy(doubled_area_normals(mesh.vertices, mesh.faces))
    normals = normalize(crosses, dim=1, eps=1e-300)
    face_weights = points.new_ones(len(faces))
    if weights is not None:
        face_weights = torch.from_numpy(weights)[faces].mean(dim=1)
    quadrics = points.new_zeros(n_vertices, 16)
    areas = crosses.norm(dim=1) / 2
    of_faces = _plane_quadrics(normals, points[faces[:, 0]], face_weights * areas)
    for corner in range(3):
        quadrics.index_add_(0, faces[:, corner], of_faces)
    starts, stops = faces.flatten(), faces.roll(-1, dims=1).flatten()
    keys = torch.minimum(starts, stops) * n_vertices + torch.maximum(starts, stops)
    edge_keys, edge, counts = keys.unique(return_inverse=True, return_counts=True)
    ends = torch.stack([edge_keys // n_vertices, edge_keys % n_vertices], dim=1)
    at_border = (counts[edge] == 1).nonzero()[:, 0]
    face = at_border // 3
    starts, stops = starts[at_border], stops[at_border]
    along = points[stops] - points[starts]
    across = normalize(torch.linalg.cross(along, normals[face]), dim=1, eps=1e-300)
    strength = _BORDER_WEIGHT * along.square().sum(dim=1) * face_weights[face]
    of_borders = _plane_quadrics(across, points[starts], strength)
    quadrics.index_add_(0, starts, of_borders)
    quadrics.index_add_(0, stops, of_borders)
    is_border = points.new_zeros(n_vertices, dtype=torch.bool)
    is_border[ends[counts != 2]] = True
    collapsing = _Collapsing(
        points,
        quadrics.view(-1, 4, 4),
        torch.from_numpy(mesh.colors).float(),
        is_border,
        torch.zeros_like(is_border) if fixed is None else torch.from_numpy(fixed),
        faces,
        _Edges(ends, counts, points.new_empty(len(ends), dtype=torch.float32)),
    )
    return _with_costs(collapsing, torch.ones_like(counts, dtype=torch.bool))


def _plane_quadrics(normals: Tensor, points: Tensor, weights: Tensor) -> Tensor:
    """Quadrics of planes. (N, 3), (N, 3), (N,) -> (N, 16)"""
    planes = torch.cat([normals, -(normals * points).sum(dim=1, keepdim=True)], dim=1)
    return (weights[:, None, None] * planes[:, :, None] * planes[:, None]).flatten(1)


def _collapsed(mesh: _Collapsing, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Points that edges would collapse to, and their errors. (E, 2) -> (E, 3), (E,)"""
    best = mesh.points.new_empty(len(ends), 3)
    costs = best.new_empty(len(ends), dtype=torch.float32)
    arguments = [
        ends,
        as_array(mesh.points, wp.vec3d),
        as_array(mesh.quadrics, wp.mat44d),
        as_array(best, wp.vec3d),
        costs,
    ]
    launch(collapse_edges, len(ends), arguments)
    return best, costs


def _with_costs(mesh: _Collapsing, is_stale: Tensor) -> _Collapsing:
    """Find the costs of some edges anew. (E,) bool"""
    rows = is_stale.nonzero()[:, 0]
    ends = mesh.edges.ends[rows]
    n_faces = mesh.edges.n_faces[rows]
    _, costs = _collapsed(mesh, ends)
    # An inner edge between two borders would join them in one vertex.
    joins_borders = mesh.is_border[ends].all(dim=1) & (n_faces != 1)
    is_fixed = mesh.is_fixed[ends].any(dim=1)
    costs[is_fixed | joins_borders | (n_faces > 2) | ~costs.isfinite()] = torch.inf
    all_costs = mesh.edges.costs.clone()
    all_costs[rows] = costs
    return replace(mesh, edges=replace(mesh.edges, costs=all_costs))


def _round(mesh: _Collapsing, n_faces: int) -> _Collapsing | None:
    """Collapse edges that do not touch each other; None if no edge may be collapsed."""
    edges = mesh.edges
    chosen = _independent(mesh, n_faces)
    if not len(chosen):
        return None
    ends = edges.ends[chosen]
    best, _ = _collapsed(mesh, ends)
    owner = ends.new_full((len(mesh.points),), -1)
    owner[ends] = torch.arange(len(chosen), device=ends.device)[:, None].expand(-1, 2)
    is_good = _keeps_topology(edges, chosen, owner) & _keeps_shape(mesh, ends, best, owner)
    costs = edges.costs.clone()
    costs[chosen[~is_good]] = torch.inf
    n_needed = (len(mesh.faces) - n_faces + 1) // 2
    good = is_good.nonzero()[:, 0][:n_needed]
    mesh = replace(mesh, edges=replace(edges, costs=costs))
    return _joined(mesh, ends[good], best[good])


def _independent(mesh: _Collapsing, n_faces: int) -> Tensor:
    """Cheap edges of which no two touch one triangle, cheapest first. (C,) rows of edges"""
    costs, ends = mesh.edges.costs, mesh.edges.ends
    is_far = len(mesh.faces) > _FAR * n_faces
    share = _FAST_CANDIDATES if is_far else _CANDIDATES
    limit = costs.kthvalue(max(1, int(share * len(costs)))).values
    # Costs are not negative, so their bits have their order. About equal ones have the order of
    # scattered numbers: along a slope of costs there would be one edge after the other.
    bits = (costs.view(torch.int32) >> _DROPPED_BITS).long() << _HALF_WORD
    rows = (torch.arange(len(costs), device=costs.device) * _SCATTER) & _LOWER_HALF
    keys = torch.where((costs <= limit) & costs.isfinite(), bits + rows, _NEVER)
    nearest = _least_at_ends(keys[:, None].expand(-1, 2), ends, len(mesh.points))
    # Over the neighbours of each vertex as well.
    both = nearest[ends].amin(dim=1, keepdim=True).expand(-1, 2)
    least = _least_at_ends(both, ends, len(mesh.points))
    is_least = (least[ends] == keys[:, None]).all(dim=1) & (keys < _NEVER)
    chosen = is_least.nonzero()[:, 0]
    return chosen[keys[chosen].argsort()]


def _least_at_ends(values: Tensor, ends: Tensor, n_vertices: int) -> Tensor:
    """Least value of the edges of each vertex. (E, 2), (E, 2) -> (V,)"""
    least = ends.new_full((n_vertices,), _NEVER)
    return least.scatter_reduce_(0, ends.flatten(), values.flatten(), "amin")


def _keeps_topology(edges: _Edges, chosen: Tensor, owner: Tensor) -> Tensor:
    """Whether the ends of an edge share no neighbours but those of its triangles. (C,) bool

    Args:
        owner: Row of the chosen edge that each vertex is an end of, -1 for none. (V,)
    """
    of_ends = owner[edges.ends]
    is_beside = (of_ends >= 0).sum(dim=1) == 1
    other = edges.ends[is_beside][of_ends[is_beside] < 0]
    keys = of_ends[is_beside].amax(dim=1) * len(owner) + other
    neighbors, counts = keys.unique(return_counts=True)
    edge = neighbors // len(owner)
    n_neighbors = edge.bincount(minlength=len(chosen))
    n_shared = edge[counts == 2].bincount(minlength=len(chosen))
    n_triangles = edges.n_faces[chosen]
    # A tetrahedron or a single triangle has no others, and would be flat or gone.
    return (n_shared == n_triangles) & (n_neighbors > n_triangles)


def _keeps_shape(mesh: _Collapsing, ends: Tensor, best: Tensor, owner: Tensor) -> Tensor:
    """Whether no triangle turns over or becomes a sliver. (C,) bool"""
    of_corners = owner[mesh.faces]
    changed = (of_corners >= 0).sum(dim=1) == 1
    edge = of_corners[changed].amax(dim=1)
    before = mesh.points[mesh.faces[changed]]
    after = torch.where((of_corners[changed] >= 0)[..., None], best[edge][:, None], before)
    crosses, shapes = zip(_cross_and_shape(before), _cross_and_shape(after), strict=True)
    cosines = torch.cosine_similarity(crosses[0], crosses[1], dim=1, eps=1e-300)
    is_sliver = (shapes[1] < _LEAST_SHAPE) & (shapes[1] < shapes[0])
    is_good = ends.new_ones(len(ends), dtype=torch.bool)
    is_good[edge[(cosines < _LEAST_COSINE) | is_sliver]] = False
    return is_good


def _cross_and_shape(corners: Tensor) -> tuple[Tensor, Tensor]:
    """Cross product of two edges, and its length in the squared longest edge. (N, 3, 3)"""
    sides = corners.roll(-1, dims=1) - corners
    cross = torch.linalg.cross(sides[:, 0], sides[:, 1])
    longest = sides.square().sum(dim=2).amax(dim=1)
    return cross, cross.norm(dim=1) / longest.clamp_min(1e-300)


def _joined(mesh: _Collapsing, ends: Tensor, best: Tensor) -> _Collapsing:
    """Move the first end of each edge to its best point, and put it in place of the second."""
    kept, gone = ends[:, 0], ends[:, 1]
    points, quadrics, colors = mesh.points.clone(), mesh.quadrics.clone(), mesh.colors.clone()
    is_border = mesh.is_border.clone()
    points[kept] = best
    quadrics[kept] += quadrics[gone]
    colors[kept] = (colors[kept] + colors[gone]) / 2
    is_border[kept] |= is_border[gone]
    is_gone = torch.zeros_like(is_border)
    is_gone[gone] = True
    is_moved = torch.zeros_like(is_border)
    is_moved[kept] = True
    target = torch.arange(len(points), device=points.device)
    target[gone] = kept
    stays = ~is_gone
    row = (stays.cumsum(0) - 1)[target]
    faces = row[mesh.faces]
    faces = faces[(faces != faces.roll(1, dims=1)).all(dim=1)]
    is_moved = is_moved[stays]
    edges = _merged_edges(mesh.edges, row, is_moved)
    mesh = _Collapsing(
        points[stays],
        quadrics[stays],
        colors[stays],
        is_border[stays],
        mesh.is_fixed[stays],
        faces,
        edges,
    )
    return _with_costs(mesh, is_moved[edges.ends].any(dim=1))


def _merged_edges(edges: _Edges, row: Tensor, is_moved: Tensor) -> _Edges:
    """Edges after some vertices became one with others.

    Two edges that become one have lost the triangle between them.

    Args:
        row: New row of each vertex. (V,)
        is_moved: Vertices that are made of two. (W,) bool
    """
    ends = row[edges.ends].sort(dim=1).values
    stays = ends[:, 0] != ends[:, 1]
    ends, n_faces, costs = ends[stays], edges.n_faces[stays], edges.costs[stays]
    may_be_twice = is_moved[ends].any(dim=1)
    keys = ends[may_be_twice][:, 0] * len(is_moved) + ends[may_be_twice][:, 1]
    unique, inverse, counts = keys.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros_like(unique).index_add_(0, inverse, n_faces[may_be_twice])
    merged = torch.stack([unique // len(is_moved), unique % len(is_moved)], dim=1)
    others = ~may_be_twice
    return _Edges(
        torch.cat([ends[others], merged]),
        torch.cat([n_faces[others], sums - 2 * (counts - 1)]),
        torch.cat([costs[others], costs.new_zeros(len(unique))]),
    )
