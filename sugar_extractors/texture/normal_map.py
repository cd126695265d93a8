# SPDX-License-Identifier: Apache-2.0
"""Normal maps: normals of a fine mesh in the tangent space of a coarse one, as glTF has it.

At each corner stand the vertex normal N, the tangent T along u, and the bitangent w N x T along v,
which points upwards in the picture; in between they are interpolated. T is that of MikkTSpace:
as no two faces share texture coordinates, the direction of u in the face, made perpendicular to N.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

FLAT = 128, 128, 255  # a normal that does not differ from the mesh's own


def vertex_normals(vertices: Tensor, faces: Tensor) -> Tensor:
    """Unit normals, those of adjacent faces weighted by area. (V, 3), (F, 3) -> (V, 3)"""
    a, b, c = vertices[faces].unbind(1)
    sums = torch.zeros_like(vertices)
    sums.index_add_(0, faces.flatten(), torch.linalg.cross(b - a, c - a).repeat_interleave(3, 0))
    return normalize(sums, dim=1)


def corner_tangents(vertices: Tensor, faces: Tensor, uvs: Tensor, normals: Tensor) -> Tensor:
    """Tangents at the corners, and w, the side of the bitangent. (F, 3, 4)

    Texture coordinates, v upwards, (F, 3, 2), are of no two faces the same. normals: (V, 3)
    """
    corners, normals = vertices[faces], normals[faces]
    (e1, e2), (d1, d2) = ((x[:, 1:] - x[:, :1]).unbind(1) for x in (corners, uvs))
    side = torch.where(d1[:, 0] * d2[:, 1] < d1[:, 1] * d2[:, 0], -1.0, 1.0)
    along_u = (e1 * d2[:, 1:] - e2 * d1[:, 1:]) * side[:, None]
    along_u = along_u[:, None].expand_as(normals)
    tangents = normalize(along_u - normals * (normals * along_u).sum(dim=2, keepdim=True), dim=2)
    return torch.cat([tangents, side[:, None, None].expand(-1, 3, 1)], dim=2)


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
