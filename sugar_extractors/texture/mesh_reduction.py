# SPDX-License-Identifier: Apache-2.0
"""Textured meshes with fewer triangles or texels; the texture is resampled for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from gaussian_splatting.core.color_bytes import color_bytes
from gaussian_splatting.core.subsets import longest_side
from sugar_extractors.mesh.decimation import decimated
from sugar_extractors.texture import texture_atlas
from sugar_extractors.texture.texture_atlas import Atlas
from sugar_extractors.texture.texture_baking import with_filled_gaps
from sugar_scene import triangle_mesh
from sugar_scene.mesh_files.tangent_space import FLAT, encoded, tangent_frames, vertex_normals
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh, sample_texture
from sugar_scene.surface_queries import Surface
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_utils.device import float32_tensor
from sugar_utils.errors import UserError

_CHUNK_TEXELS = 1 << 20
_GREY = 128
_MOST_SAMPLES = 4  # of a finer picture along the side of a texel


def simplified(
    mesh: TexturedMesh, n_faces: int | None, texture_side: int | None, normal_map: bool = False
) -> TexturedMesh:
    """Return the mesh with at most so many triangles and texels a side; None keeps the number.

    Args:
        normal_map: Also keep the normals of the mesh as it was, as a normal map.

    Raises:
        UserError: No triangles are left, or they do not fit into the texture.
    """
    reduced = shape_of(mesh)
    if n_faces is not None and n_faces < mesh.n_faces:
        reduced = triangle_mesh.clean_mesh(decimated(reduced, n_faces))
    if reduced.n_faces == 0:
        raise UserError(f"no triangles are left at --max_triangles {n_faces}; raise it")
    side = mesh.texture.shape[1]
    if texture_side is not None:
        side = min(side, texture_side)
    square = texture_atlas.largest_square_size(reduced.n_faces, side)
    vertices = float32_tensor(reduced.vertices)
    faces = torch.from_numpy(reduced.faces)
    atlas = texture_atlas.make_atlas("charts", vertices, faces, square)
    target = TexturedMesh(vertices, faces, atlas.uvs.cpu(), mesh.texture)
    return transferred(mesh, target, atlas, normal_map)


def shape_of(mesh: TexturedMesh) -> TriangleMesh:
    """Return the triangles of a textured mesh, in grey."""
    vertices = mesh.vertices.double().cpu().numpy()
    colors = np.full((len(vertices), 3), _GREY, np.uint8)
    return TriangleMesh(vertices, mesh.faces.cpu().numpy(), colors)


def transferred(
    mesh: TexturedMesh, target: TexturedMesh, atlas: Atlas, normal_map: bool
) -> TexturedMesh:
    """Return ``target``, a mesh of nearly the shape of ``mesh``, with the texture of ``mesh``.

    A texel of a smaller picture is the mean of several places in it.

    Args:
        atlas: Where the faces of ``target`` lie in its texture.
        normal_map: Also write the normals of ``mesh`` into a normal map of ``target``.
    """
    source = _Source(mesh, target)
    side = atlas.side
    corner_axes = target.corner_axes() if normal_map else None
    picture = torch.full((side, side, 3), _GREY, dtype=torch.uint8, device="cpu")
    flat = torch.tensor(FLAT, dtype=torch.uint8, device="cpu")
    normals = flat.repeat(side, side, 1)
    atlas_corners = atlas.corners.cpu().double().numpy()
    offsets = _sample_offsets(mesh.texture.shape[1], side)
    rows_per_chunk = max(1, _CHUNK_TEXELS // side)
    for first in range(0, side, rows_per_chunk):
        end = min(first + rows_per_chunk, side)
        owners = atlas.texel_faces(first, end).cpu().numpy()
        y, x = np.nonzero(owners >= 0)
        target_faces = owners[y, x]
        texels = np.stack([x + 0.5, y + first + 0.5], axis=1)
        texel_colors = torch.zeros(len(x), 3, device="cpu")
        fine_normals = torch.zeros(len(x), 3, device="cpu")
        for offset in offsets:
            offset_weights = barycentric_weights(texels + offset, atlas_corners[target_faces])
            hits = source.nearest(target_faces, offset_weights)
            places = hits.interpolated(source.uvs[hits.faces])
            texel_colors += sample_texture(source.texture, places) / len(offsets)
            if corner_axes is not None:
                fine_normals += hits.interpolated(source.normals[source.faces[hits.faces]])
        texel_places = (torch.from_numpy(y), torch.from_numpy(x))
        picture[first:end][texel_places] = color_bytes(texel_colors)
        if corner_axes is not None:
            corner_normals, corner_tangents = corner_axes
            face_rows = torch.from_numpy(target_faces).long()
            centers = barycentric_weights(texels, atlas_corners[target_faces])
            weights = torch.from_numpy(centers).float()
            frames = tangent_frames(corner_normals[face_rows], corner_tangents[face_rows], weights)
            normals[first:end][texel_places] = encoded(normalize(fine_normals, dim=1), frames)
    # Rows of texels run with v, rows of the picture against it.
    texture = with_filled_gaps(picture.flip(0), atlas)
    return replace(target, texture=texture, normal_map=normals.flip(0) if normal_map else None)


def _sample_offsets(source_side: int, side: int) -> list[np.ndarray]:
    """Return sample offsets within a texel for reading a finer texture. (2,) each

    One for every two texels of the finer picture: all of them would blur what one sees.
    """
    per_axis = min(max(1, round(source_side / side / 2)), _MOST_SAMPLES)
    steps = (np.arange(per_axis) + 0.5) / per_axis - 0.5
    return [np.array([x, y]) for y in steps for x in steps]


class _SurfaceHits:
    """Nearest places on the source mesh, one per texel."""

    def __init__(self, faces: np.ndarray, weights: np.ndarray) -> None:
        self.faces = torch.from_numpy(faces)  # rows of the source's faces, (P,)
        self._weights = torch.from_numpy(weights).float()[..., None]  # barycentric, (P, 3, 1)

    def interpolated(self, corner_values: Tensor) -> Tensor:
        """Interpolate values at the corners of the faces that were hit. (P, 3, C) -> (P, C)"""
        return (self._weights * corner_values).sum(dim=1)


class _Source:
    """The mesh whose texture is transferred, and the geometry of the target in its unit cube.

    Both are scaled by the extent of the target, so that distances do not depend on the world's
    unit.
    """

    def __init__(self, mesh: TexturedMesh, target: TexturedMesh) -> None:
        target_vertices = target.vertices.double().numpy()
        low = target_vertices.min(axis=0)
        size = max(longest_side(target_vertices), 1e-12)
        shape = shape_of(mesh)
        places = (shape.vertices - low) / size
        self._surface = Surface(places, shape.faces)
        self._triangles = places[shape.faces]
        self._target_triangles = ((target_vertices - low) / size)[target.faces.numpy()]
        self.uvs = mesh.uvs.cpu()  # (F, 3, 2)
        self.texture = mesh.texture.cpu()  # (H, W, 3) uint8
        self.faces = mesh.faces.cpu()  # (F, 3)
        self.normals = vertex_normals(mesh.vertices.float().cpu(), self.faces)  # (V, 3)

    def nearest(self, target_faces: np.ndarray, weights: np.ndarray) -> _SurfaceHits:
        """Find the nearest places of the source to places on faces of the target.

        Args:
            target_faces: Rows of the target's faces. (P,)
            weights: Barycentric coordinates within them. (P, 3)
        """
        points = (weights[..., None] * self._target_triangles[target_faces]).sum(axis=1)
        faces = self._surface.nearest(points).faces
        return _SurfaceHits(faces, barycentric_weights(points, self._triangles[faces]))


def barycentric_weights(points: np.ndarray, triangles: np.ndarray) -> np.ndarray:
    """Return the barycentric coordinates of points in triangles, clipped to be non-negative.

    Points lie in their triangle or close to it; in a degenerate triangle, the first corner has all
    the weight. (Q, D), (Q, 3, D) -> (Q, 3)
    """
    a, b, c = triangles.transpose(1, 0, 2)
    u = b - a
    v = c - a
    w = points - a
    uu = (u * u).sum(axis=1)
    uv = (u * v).sum(axis=1)
    vv = (v * v).sum(axis=1)
    wu = (w * u).sum(axis=1)
    wv = (w * v).sum(axis=1)
    area = uu * vv - uv * uv
    is_degenerate = area <= 1e-14 * np.maximum(uu * vv, 1e-300)
    area = np.where(is_degenerate, 1.0, area)
    second = np.where(is_degenerate, 0.0, (vv * wu - uv * wv) / area)
    third = np.where(is_degenerate, 0.0, (uu * wv - uv * wu) / area)
    weights = np.stack([1 - second - third, second, third], axis=1)
    weights = np.maximum(weights, 0)
    return weights / weights.sum(axis=1, keepdims=True)
