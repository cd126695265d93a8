# SPDX-License-Identifier: Apache-2.0
"""Corners of textured meshes: which share a vertex of a file, their normals and tangents.

Normal maps hold normals of a fine mesh in the tangent space of a coarse one, as glTF has it. At
each corner stand the vertex normal N, the tangent T along u, and the bitangent w N x T along v,
which points upwards in the picture; in between they are interpolated. T is that of MikkTSpace: the
direction of u in the faces that share the corner, made perpendicular to N, weighted by angle.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from sugar_scene.triangle_mesh import area_normals

FLAT = (128, 128, 255)  # colour of a normal that does not differ from the mesh's own
_TINY = 1e-200  # length of a vector of float64 that has no direction


class SharedCorners(NamedTuple):
    """Corners of faces, where those with the same vertex and texture coordinate are one."""

    rows: Tensor  # the shared corner at each corner of each face, (F, 3) int64
    vertices: Tensor  # the vertex of each shared corner, (C,) int64
    uvs: Tensor  # its texture coordinate, (C, 2) float32


def shared_corners(faces: Tensor, uvs: Tensor, sides: Tensor | None = None) -> SharedCorners:
    """Join equal corners, in the order of their first appearance.

    Args:
        faces: Rows of the vertices. (F, 3)
        uvs: Texture coordinates of the corners. (F, 3, 2) float32
        sides: Faces with other values share no corner, (F,); None for all the same.
    """
    corners = uvs.reshape(-1, 2).float()
    vertices = faces.reshape(-1).long()
    # Adding zero gives minus zero the bits of zero.
    bits = (corners + 0.0).contiguous().view(torch.int32).long()
    place_bits = bits[:, 0] * (1 << 32) + (bits[:, 1] & 0xFFFFFFFF)
    _, places = place_bits.unique(return_inverse=True)
    n_places = int(places.max()) + 1
    keys = vertices * n_places + places
    if sides is not None:
        keys = 2 * keys + (sides > 0).repeat_interleave(3)
    distinct, groups = keys.unique(return_inverse=True)
    numbers = torch.arange(len(keys), device=keys.device)
    # The first corner of each group; groups are sorted by it.
    first = torch.full_like(distinct, len(keys))
    first.scatter_reduce_(0, groups, numbers, "amin")
    order = first.argsort()
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order), device=order.device)
    chosen = first[order]
    return SharedCorners(
        rows=ranks[groups].reshape(-1, 3),
        vertices=vertices[chosen],
        uvs=corners[chosen],
    )


def vertex_normals(vertices: Tensor, faces: Tensor) -> Tensor:
    """Return unit normals, those of adjacent faces weighted by area. (V, 3), (F, 3) -> (V, 3)

    They are zero where no adjacent face has an area.
    """
    # Areas of small scenes are below what float32 divides by.
    face_normals = area_normals(vertices.double()[faces])
    sums = torch.zeros(vertices.shape, dtype=torch.float64, device=vertices.device)
    sums.index_add_(0, faces.flatten(), face_normals.repeat_interleave(3, 0))
    normals = normalize(sums, dim=1, eps=_TINY)
    return normals.to(vertices.dtype)


def corner_tangents(vertices: Tensor, faces: Tensor, uvs: Tensor, normals: Tensor) -> Tensor:
    """Return tangents at the corners, of length 1, and w, the side of the bitangent. (F, 3, 4)

    Args:
        vertices: World units. (V, 3)
        faces: (F, 3)
        uvs: Texture coordinates, v upwards. (F, 3, 2)
        normals: Unit normals of the vertices. (V, 3)
    """
    corners = vertices.double()[faces]
    corner_uvs = uvs.double()
    normals = normals.double()
    corner_normals = normals[faces]
    # Edges from the first corner, in the world and in the picture.
    edge1, edge2 = (corners[:, 1:] - corners[:, :1]).unbind(1)
    uv1, uv2 = (corner_uvs[:, 1:] - corner_uvs[:, :1]).unbind(1)
    is_mirrored = uv1[:, 0] * uv2[:, 1] < uv1[:, 1] * uv2[:, 0]
    side = torch.where(is_mirrored, -1.0, 1.0)
    along_u = (edge1 * uv2[:, 1:] - edge2 * uv1[:, 1:]) * side[:, None]
    tangents = _perpendicular(along_u[:, None].expand_as(corner_normals), corner_normals)
    tangents = tangents * _corner_angles(corners)[..., None]
    shared = shared_corners(faces, uvs, side)
    sums = tangents.new_zeros(len(shared.vertices), 3)
    sums.index_add_(0, shared.rows.reshape(-1), tangents.reshape(-1, 3))
    shared_normals = normals[shared.vertices]
    means = _perpendicular(sums, shared_normals)
    # Faces without area in the picture have no direction of u: any other one will do.
    least_axis = shared_normals.abs().argmin(dim=1)
    axes = torch.nn.functional.one_hot(least_axis, 3).to(shared_normals)
    fallback = _perpendicular(axes, shared_normals)
    has_none = means.norm(dim=1, keepdim=True) < 0.5
    means = torch.where(has_none, fallback, means)
    corner_sides = side[:, None, None].expand(-1, 3, 1)
    joined = torch.cat([means[shared.rows], corner_sides], dim=2)
    return joined.to(vertices.dtype)


def _perpendicular(vectors: Tensor, normals: Tensor) -> Tensor:
    """Return unit vectors along the part perpendicular to unit normals, or zero. (..., 3)"""
    along = (normals * vectors).sum(dim=-1, keepdim=True)
    parts = vectors - normals * along
    return normalize(parts, dim=-1, eps=_TINY)


def _corner_angles(corners: Tensor) -> Tensor:
    """Return angles of triangles at their corners in radians. (F, 3, 3) -> (F, 3)"""
    to_next = corners.roll(-1, dims=1) - corners
    to_last = corners.roll(1, dims=1) - corners
    to_next = normalize(to_next, dim=2, eps=_TINY)
    to_last = normalize(to_last, dim=2, eps=_TINY)
    cosines = (to_next * to_last).sum(dim=2)
    return cosines.clamp(-1, 1).acos()


def tangent_frames(normals: Tensor, tangents: Tensor, weights: Tensor) -> Tensor:
    """Return the axes T, B and N as columns at places of faces. (P, 3, 3)

    Args:
        normals: At the corners of the faces. (P, 3, 3)
        tangents: At the corners of the faces, with the side of the bitangent. (P, 3, 4)
        weights: Barycentric coordinates of the places. (P, 3)
    """
    weights = weights[..., None]
    normal = (normals * weights).sum(dim=1)
    normal = normalize(normal, dim=1)
    tangent = (tangents[..., :3] * weights).sum(dim=1)
    tangent = normalize(tangent, dim=1)
    side = tangents[:, 0, 3:]
    bitangent = torch.linalg.cross(normal, tangent) * side
    return torch.stack([tangent, bitangent, normal], dim=2)


def encoded(normals: Tensor, frames: Tensor) -> Tensor:
    """Encode world normals as colours of a normal map. (P, 3), (P, 3, 3) -> (P, 3) uint8"""
    identity = torch.eye(3, dtype=frames.dtype, device=frames.device)
    is_usable = torch.linalg.det(frames).abs() > 1e-3
    frames = torch.where(is_usable[:, None, None], frames, identity)
    tangent_normals = normalize(torch.linalg.solve(frames, normals), dim=1)
    colors = ((tangent_normals + 1) * 127.5).round().to(torch.uint8)
    return torch.where(is_usable[:, None], colors, colors.new_tensor(FLAT))
