# SPDX-License-Identifier: Apache-2.0
"""Mesh-bound Gaussians and normal consistency in plain torch, any dtype: twins of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from gaussian_splatting.core.cloud import GaussianCloud, Gaussians, quaternions_of
from sugar_scene.mesh_bound import BoundCloud, face_frames
from sugar_scene.mesh_normals import COSINE_EPS


def activated(cloud: BoundCloud) -> Gaussians:
    """The Gaussians on their triangles."""
    triangles = cloud.vertices[cloud.faces]
    weights = triangles.new_tensor(cloud.layout.barycentric)
    means = torch.einsum("kc,fcd->fkd", weights, triangles).reshape(-1, 3)
    in_plane = cloud.log_scales.exp()
    frames = rotate_in_plane(
        face_frames(triangles).repeat_interleave(cloud.per_triangle, dim=0), cloud.rotations
    )
    return Gaussians(
        means=means,
        quats=quaternions_of(frames),
        scales=torch.cat([cloud.thickness.expand(in_plane.shape[0], 1), in_plane], dim=1),
        opacities=cloud.opacity_logits.sigmoid().squeeze(-1),
        sh_dc=cloud.sh_dc,
        sh_rest=cloud.sh_rest,
    )


def to_gaussians(cloud: BoundCloud) -> GaussianCloud:
    """The same Gaussians without their mesh."""
    gaussians = activated(cloud)
    return GaussianCloud(
        gaussians.means,
        cloud.sh_dc,
        cloud.sh_rest,
        cloud.opacity_logits,
        gaussians.scales.log(),
        gaussians.quats,
    )


def rotate_in_plane(frames: Tensor, rotations: Tensor) -> Tensor:
    """Turn frames about their first axis by the angle of a complex number.

    Args:
        frames: (G, 3, 3)
        rotations: Real and imaginary part, of any length. (G, 2)
    """
    cosine, sine = normalize(rotations, dim=-1)[:, None, :].unbind(-1)
    normal, tangent, bitangent = frames.unbind(-1)
    turned = cosine * tangent + sine * bitangent
    return torch.stack([normal, turned, cosine * bitangent - sine * tangent], dim=-1)


def normal_consistency(vertices: Tensor, pairs: Tensor) -> Tensor:
    """Mean of 1 - cos of the angle between the normals of adjacent faces.

    The normals come from the opposite corners, so the winding of the faces does not matter.

    Args:
        vertices: (V, 3) world units
        pairs: As :func:`adjacent_face_pairs` returns them. (P, 4)

    Returns:
        Scalar; 0 for a mesh without shared edges.
    """
    if pairs.shape[0] == 0:
        return vertices.sum() * 0.0
    start, end, a, b = vertices[pairs].unbind(dim=1)
    edge = end - start
    first = torch.linalg.cross(edge, a - start)
    second = -torch.linalg.cross(edge, b - start)
    cosine = cosine_similarity(first, second, dim=-1, eps=COSINE_EPS)
    return (1.0 - cosine).mean()
