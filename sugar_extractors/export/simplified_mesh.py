# SPDX-License-Identifier: Apache-2.0
"""Textured meshes of fewer triangles or smaller pictures, coloured by the one that they stand for.

Each texel of the new picture has a place on the new surface; it takes the colour of the old picture
at the nearest place of the old surface. So seams of the old layout leave no trace.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sugar_extractors.mesh.meshing_backends import choose_backend
from sugar_extractors.quality.mesh_quality import Surface
from sugar_extractors.texture.texture_atlas import (
    MIN_SQUARE_SIZE,
    Atlas,
    make_atlas,
    squares_per_axis,
)
from sugar_extractors.texture.textured_mesh_io import TexturedMesh, sample_texture
from sugar_scene.mesh.triangle_mesh import TriangleMesh, clean_mesh
from sugar_utils.errors import UserError

_CHUNK_TEXELS = 1 << 20
_GREY = 128


def simplified(mesh: TexturedMesh, n_faces: int | None, texture_side: int | None) -> TexturedMesh:
    """The mesh with at most so many triangles and texels a side.

    Args:
        n_faces: Triangles to be left; None for all.
        texture_side: Most texels per side of the picture; None for as many as now.
    """
    reduced = shape_of(mesh)
    if n_faces is not None and n_faces < mesh.n_faces:
        reduced = clean_mesh(choose_backend().decimate(reduced, n_faces))
    if reduced.n_faces == 0:
        raise UserError(f"no triangles are left at --max_triangles {n_faces}; raise it")
    side = min(mesh.texture.shape[1], texture_side or mesh.texture.shape[1])
    square = side // squares_per_axis(reduced.n_faces)
    if square < MIN_SQUARE_SIZE:
        least = MIN_SQUARE_SIZE * squares_per_axis(reduced.n_faces)
        raise UserError(
            f"{reduced.n_faces:,} triangles do not fit into a picture of {side} texels a side; use "
            f"--texture_size {least} or more, or a lower --max_triangles"
        )
    vertices = torch.from_numpy(reduced.vertices.astype(np.float32))
    faces = torch.from_numpy(reduced.faces)
    atlas = make_atlas("squares", vertices, faces, square)
    texture = transferred(mesh, reduced, atlas)
    return TexturedMesh(vertices, faces, atlas.uvs.cpu(), texture)


def shape_of(mesh: TexturedMesh) -> TriangleMesh:
    """Its triangles, grey."""
    vertices = mesh.vertices.double().cpu().numpy()
    colors = np.full((len(vertices), 3), _GREY, np.uint8)
    return TriangleMesh(vertices, mesh.faces.cpu().numpy(), colors)


def transferred(mesh: TexturedMesh, target: TriangleMesh, atlas: Atlas) -> Tensor:
    """The picture of one mesh on another that has nearly its shape.

    Returns:
        Row 0 is at v = 1; grey where there is no triangle. (side, side, 3) uint8
    """
    low, size = target.vertices.min(axis=0), max(np.ptp(target.vertices, axis=0).max(), 1e-12)
    source = shape_of(mesh)
    places = (source.vertices - low) / size
    surface = Surface(places, source.faces)
    corners = ((target.vertices - low) / size)[target.faces]
    picture = torch.full((atlas.side, atlas.side, 3), _GREY, dtype=torch.uint8, device="cpu")
    step = max(1, _CHUNK_TEXELS // atlas.side)
    for first in range(0, atlas.side, step):
        end = min(first + step, atlas.side)
        owners = atlas.texel_faces(first, end).cpu().numpy()
        y, x = np.nonzero(owners >= 0)
        rows = owners[y, x]
        texels = np.stack([x + 0.5, y + first + 0.5], axis=1)
        weights = _inside(_weights(texels, atlas.corners.cpu().double().numpy()[rows]))
        points = (weights[..., None] * corners[rows]).sum(axis=1)
        picture[first:end][torch.from_numpy(y), torch.from_numpy(x)] = _colors(
            mesh, places, surface, points
        )
    # Rows of texels run with v, those of the picture against it.
    return picture.flip(0)


def _colors(mesh: TexturedMesh, places: np.ndarray, surface: Surface, points: np.ndarray) -> Tensor:
    """Colours of the nearest places of a mesh. (Q, 3) uint8"""
    faces = surface.nearest(points).faces
    triangles = places[mesh.faces.cpu().numpy()[faces]]
    weights = torch.from_numpy(_inside(_weights(points, triangles))).float()
    uvs = (weights[..., None] * mesh.uvs.cpu()[torch.from_numpy(faces)]).sum(dim=1)
    return (sample_texture(mesh.texture.cpu(), uvs) * 255).round().to(torch.uint8)


def _weights(points: np.ndarray, triangles: np.ndarray) -> np.ndarray:
    """Barycentric coordinates of the feet of points in the planes of triangles."""
    a, b, c = triangles.transpose(1, 0, 2)
    u, v, w = b - a, c - a, points - a
    uu, uv, vv = ((p * q).sum(axis=1) for p, q in ((u, u), (u, v), (v, v)))
    wu, wv = (w * u).sum(axis=1), (w * v).sum(axis=1)
    area = uu * vv - uv * uv
    flat = area <= 1e-14 * np.maximum(uu * vv, 1e-300)
    area = np.where(flat, 1.0, area)
    second, third = (vv * wu - uv * wv) / area, (uu * wv - uv * wu) / area
    second, third = np.where(flat, 0.0, second), np.where(flat, 0.0, third)
    return np.stack([1 - second - third, second, third], axis=1)


def _inside(weights: np.ndarray) -> np.ndarray:
    """Weights of a place within the triangle, near the one that was meant. (Q, 3)"""
    clipped = np.maximum(weights, 0)
    return clipped / clipped.sum(axis=1, keepdims=True)
