# SPDX-License-Identifier: Apache-2.0
"""Meshes with holes, and the evidence of views of a surface about them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.data.masks import VisualHull, distance_outside
from sugar_extractors.mesh.holes.hole_evidence import ViewEvidence
from sugar_scene.depth_view import DepthView, FusedViews, Renderer
from sugar_scene.regions import Box
from sugar_scene.triangle_mesh import TriangleMesh, keep_vertices
from sugar_scene.triangle_rasterizer import mesh_tensors, rasterize_triangles

UP = (0.0, 0.0, 1.0)
ANGLE = 10.0
"""Within so many degrees around an axis vertices of the unit sphere are missing."""
BOX = Box.cube(np.zeros(3), 10.0)


def pierced(mesh: TriangleMesh, axis=UP, degrees=ANGLE) -> TriangleMesh:
    """A mesh around the origin without the vertices in a cone."""
    directions = mesh.vertices / np.linalg.norm(mesh.vertices, axis=1, keepdims=True)
    cosines = directions @ (np.array(axis) / np.linalg.norm(axis))
    return keep_vertices(mesh, cosines < np.cos(np.radians(degrees)))


def depth_renderer(mesh: TriangleMesh) -> Renderer:
    """A renderer of the depth of a mesh."""
    vertices, faces = mesh_tensors(mesh, torch.device("cpu"))

    def render(camera) -> DepthView:
        hits = rasterize_triangles(vertices, faces, camera)
        depth = torch.where(hits.covered, hits.depth, 0.0)
        return DepthView(camera, depth, torch.zeros(*depth.shape, 3), torch.ones_like(depth))

    return render


def silhouettes(mesh: TriangleMesh, cameras) -> list[Tensor]:
    """The pixels of each camera that show a mesh. (H, W) bool each"""
    vertices, faces = mesh_tensors(mesh, torch.device("cpu"))
    return [rasterize_triangles(vertices, faces, camera).covered for camera in cameras]


def hull_of_masks(masks, cameras) -> VisualHull:
    """The hull of masks, (H, W) bool each."""
    return VisualHull(tuple(cameras), tuple(distance_outside(mask) for mask in masks))


def hull_around(mesh: TriangleMesh, cameras) -> VisualHull:
    """The hull of the silhouettes of a mesh."""
    return hull_of_masks(silhouettes(mesh, cameras), cameras)


def evidence_of(cameras, render: Renderer, mesh: TriangleMesh, hull=None) -> ViewEvidence:
    """Evidence of rendered depth about the holes of a mesh."""
    return ViewEvidence(
        FusedViews(cameras, lambda: render, hull, torch.device("cpu")),
        box=BOX,
        inner_voxel=0.01,
        outer_voxel=0.01,
        mesh=mesh,
    )
