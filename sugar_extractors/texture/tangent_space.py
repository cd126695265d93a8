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

FLAT = 128, 128, 255  # colour of a normal that does not differ from the mesh's own
_TINY = 1e-200  # length of a vector of float64 that has no direction


class SharedCorners(NamedTuple):
    """Corners of faces, those with the same vertex and texture coordinate as one."""

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
    # Adding zero gives minus zero the bits of zero.
    bits = (corners + 0.0).contiguous().view(torch.int32).long()
    place = bits[:, 0] * (1 << 32) + (bits[:, 1] & 0xFFFFFFFF)
    _, place = place.unique(return_inverse=True)
    key = faces.reshape(-1).long() * (int(place.max()) + 1) + place
    if sides is not None:
        key = 2 * key + (sides > 0).repeat_interleave(3)
    distinct, group = key.unique(return_inverse=True)
    number = torch.arange(len(key), device=key.device)
    first = torch.full_like(distinct, len(key)).scatter_reduce_(0, group, number, "amin")
    order = first.argsort()
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    chosen = first[order]
    rows = rank[group].reshape(-1, 3)
    return SharedCorners(rows, faces.reshape(-1)[chosen].long(), corners[chosen])


def vertex_normals(vertices: Tensor, faces: Tensor) -> Tensor:
    """Unit normals, those of adjacent faces weighted by area. (V, 3), (F, 3) -> (V, 3)

    Zero where no adjacent face has an area.
    """
    # Areas of small scenes are below what float32 divides by.
    a, b, c = vertices.double()[faces].unbind(1)
    sums = torch.zeros(vertices.shape, dtype=torch.float64, device=vertices.device)
    sums.index_add_(0, faces.flatten(), torch.linalg.cross(b - a, c - a).repeat_interleave(3, 0))
    return normalize(sums, dim=1, eps=_TINY).to(vertices.dtype)


def corner_tangents(vertices: Tensor, faces: Tensor, uvs: Tensor, normals: Tensor) -> Tensor:
    """Tangents at the corners, of length 1, and w, the side of the bitangent. (F, 3, 4)

    uvs: texture coordinates, v upwards, (F, 3, 2); normals: (V, 3)
    """
    corners = vertices.double()[faces]
    places = uvs.double()
    across = normals.double()[faces]
    e1, e2 = (corners[:, 1:] - corners[:, :1]).unbind(1)
    d1, d2 = (places[:, 1:] - places[:, :1]).unbind(1)
    side = torch.where(d1[:, 0] * d2[:, 1] < d1[:, 1] * d2[:, 0], -1.0, 1.0)
    along_u = (e1 * d2[:, 1:] - e2 * d1[:, 1:]) * side[:, None]
    tangents = _perpendicular(along_u[:, None].expand_as(across), across)
    tangents = tangents * _corner_angles(corners)[..., None]
    shared = shared_corners(faces, uvs, side)
    sums = tangents.new_zeros(len(shared.vertices), 3)
    sums.index_add_(0, shared.rows.reshape(-1), tangents.reshape(-1, 3))
    axes = normals.double()[shared.vertices]
    means = _perpendicular(sums, axes)
    # Faces without area in the picture have no direction of u: any other one will do.
    least = torch.nn.functional.one_hot(axes.abs().argmin(dim=1), 3).to(axes)
    means = torch.where(means.norm(dim=1, keepdim=True) < 0.5, _perpendicular(least, axes), means)
    joined = torch.cat([means[shared.rows], side[:, None, None].expand(-1, 3, 1)], dim=2)
    return joined.to(vertices.dtype)


def _perpendicular(vectors: Tensor, normals: Tensor) -> Tensor:
    """Unit vectors along the part of vectors that is perpendicular to unit normals, or zero."""
    parts = vectors - normals * (normals * vectors).sum(dim=-1, keepdim=True)
    return normalize(parts, dim=-1, eps=_TINY)


def _corner_angles(corners: Tensor) -> Tensor:
    """Angles of triangles at their corners in radians. (F, 3, 3) -> (F, 3)"""
    ahead = normalize(corners.roll(-1, dims=1) - corners, dim=2, eps=_TINY)
    back = normalize(corners.roll(1, dims=1) - corners, dim=2, eps=_TINY)
    return (ahead * back).sum(dim=2).clamp(-1, 1).acos()


def tangent_frames(normals: Tensor, tangents: Tensor, weights: Tensor) -> Tensor:
    """Axes T, B and N as columns at places of faces. (P, 3, 3)

    normals, tangents: at the corners of their faces, (P, 3, 3) and (P, 3, 4); weights: barycentric
    coordinates, (P, 3)
    """
    normal = normalize((normals * weights[..., None]).sum(dim=1), dim=1)
    tangent = normalize((tangents[..., :3] * weights[..., None]).sum(dim=1), dim=1)
    bitangent = torch.linalg.cross(normal, tangent) * tangents[:, 0, 3:]
    return torch.stack([tangent, bitangent, normal], dim=2)


def encoded(normals: Tensor, frames: Tensor) -> Tensor:
    """World normals as colours of a normal map. (P, 3), (P, 3, 3) -> (P, 3) uint8"""
    one = torch.eye(3, dtype=frames.dtype, device=frames.device)
    usable = torch.linalg.det(frames).abs() > 1e-3
    own = torch.linalg.solve(torch.where(usable[:, None, None], frames, one), normals)
    colors = ((normalize(own, dim=1) + 1) * 127.5).round().to(torch.uint8)
    return torch.where(usable[:, None], colors, colors.new_tensor(FLAT))
