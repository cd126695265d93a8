# SPDX-License-Identifier: Apache-2.0
"""Pictures of meshes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from gaussian_splatting.data.cameras import Camera, centers_of, view_directions
from sugar_scene.triangle_mesh import TriangleMesh, area_normals
from sugar_scene.triangle_rasterizer import rasterize_triangles

N_VIEWS = 4
CLAY = (0.80, 0.80, 0.79)
INSIDE = (0.72, 0.52, 0.42)  # a surface seen from its back: holes and faces that are turned round
BACKGROUND = (0.93, 0.94, 0.95)
_AMBIENT = 0.14
_HEADLIGHT = 0.26
_KEY = 0.64
_KEY_DIRECTION = (-0.5, -0.7, -0.5)  # camera axes: from the upper left, behind the viewer
_SAMPLES_PER_SIDE = 2


def shaded_views(
    mesh: TriangleMesh,
    cameras: Sequence[Camera],
    width: int,
    *,
    colored: bool = False,
    device: torch.device | str = "cpu",
) -> list[np.ndarray]:
    """Picture a mesh as clay, lit from behind the viewer. (h, w, 3) uint8 for each camera

    Shading is flat, which hides nothing: smooth normals make a rough mesh look better than it is.
    """
    n = _SAMPLES_PER_SIDE
    views = []
    for camera in cameras:
        scale = width / camera.longest_side
        sides = (n * max(1, round(side * scale)) for side in camera.size)
        views.append(camera.resized(*sides))
    if mesh.n_faces == 0:
        paper = torch.tensor(BACKGROUND, device="cpu")
        return [_averaged(paper.expand(view.height, view.width, 3)) for view in views]
    vertices = torch.tensor(mesh.vertices, dtype=torch.float32, device=device)
    faces = torch.tensor(mesh.faces, device=device)
    normals = normalize(area_normals(vertices[faces].double()), dim=1, eps=1e-30).float()
    corner_values = normals[:, None].expand(-1, 3, -1)
    if colored:
        corner_values = torch.tensor(mesh.colors, device=device).float()[faces] / 255.0
    pictures = []
    for view in views:
        hits = rasterize_triangles(vertices, faces, view)
        covered = hits.covered
        rows = hits.face[hits.covered].long()
        values = corner_values.new_zeros(*hits.face.shape, 3)
        values[covered] = (corner_values[rows] * hits.barycentrics[covered][..., None]).sum(1)
        if not colored:
            center = torch.tensor(view.center, dtype=torch.float32, device=device)
            is_front = (normals * (center - vertices[faces[:, 0]])).sum(1) > 0
            front = torch.ones_like(covered).masked_scatter(covered, is_front[rows])
            values = _clay(values, front, view)
        image = torch.where(covered[..., None], values, values.new_tensor(BACKGROUND))
        pictures.append(_averaged(image))
    return pictures


def pick_views(cameras: Sequence[Camera], n: int = N_VIEWS) -> list[Camera]:
    """Return ``n`` views that differ as much as possible in position and direction."""
    if len(cameras) <= n:
        return list(cameras)
    centers = centers_of(cameras)
    centers -= centers.mean(axis=0)
    spread = np.linalg.norm(centers, axis=1).max()
    forward = view_directions(cameras)
    place = np.concatenate([centers / (spread if spread > 0 else 1.0), forward], axis=1)
    distance = np.linalg.norm(place - place.mean(axis=0), axis=1)
    picked: list[int] = []
    while len(picked) < n:
        picked.append(int(distance.argmax()))
        to_last = np.linalg.norm(place - place[picked[-1]], axis=1)
        distance = to_last if len(picked) == 1 else np.minimum(distance, to_last)
        # Views from one place have no distance; none is picked twice all the same.
        distance[picked] = -1.0
    return [cameras[row] for row in picked]


def _clay(normals: Tensor, front: Tensor, camera: Camera) -> Tensor:
    """Return shaded colours of normals in world axes. (H, W, 3) -> (H, W, 3)"""
    rotation = torch.tensor(camera.rotation, dtype=torch.float32, device=normals.device)
    front = front[..., None]
    facing = torch.where(front, normals, -normals)
    facing = normalize(facing @ rotation.T, dim=-1)
    key = normalize(facing.new_tensor(_KEY_DIRECTION), dim=0)
    light = _AMBIENT + _HEADLIGHT * (-facing[..., 2]).clamp_min(0)
    light = light + _KEY * (facing @ key).clamp_min(0)
    color = torch.where(front, facing.new_tensor(CLAY), facing.new_tensor(INSIDE))
    # The light is linear, the picture is not.
    return (color**2.2 * light[..., None]).clamp(0, 1) ** (1 / 2.2)


def _averaged(image: Tensor) -> np.ndarray:
    """Return the mean of each block of samples, as 8-bit. (H, W, 3) -> (h, w, 3)"""
    planes = image.permute(2, 0, 1)[None]
    means = torch.nn.functional.avg_pool2d(planes, _SAMPLES_PER_SIDE)[0]
    colors = (means.permute(1, 2, 0).clamp(0, 1) * 255).round()
    return colors.to(torch.uint8).cpu().numpy()
