# SPDX-License-Identifier: Apache-2.0
"""Results as models that can be looked at from any camera, and pictures of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.core.cloud import GaussianCloud, Gaussians
from gaussian_splatting.core.moved import is_identity, moved_cloud, moved_points
from gaussian_splatting.data import cameras as poses
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.reporting import view_pictures
from gaussian_splatting.engine.reporting.evaluation import to_uint8
from gaussian_splatting.formats.placement import Placement, note_unknown
from gaussian_splatting.rasterization import plain_background, render_view
from sugar_extractors.export.reading import Result, open_result
from sugar_extractors.outputs.mesh_pictures import shaded_views
from sugar_extractors.texture.mesh_reduction import shape_of
from sugar_scene.mesh_bound import face_normals
from sugar_scene.mesh_files import textured_mesh_io as meshes
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_scene.triangle_rasterizer import rasterize_triangles
from sugar_utils.errors import Notify, UserError

SHOWS = ("image", "depth", "normal", "clay", "alpha")


@dataclass(frozen=True)
class ShownModel:
    """A result as functions of a camera."""

    name: str
    picture: Callable[[Camera], Tensor]  # (H, W, 3) in [0, 1]
    # Depth, infinite where there is nothing, (H, W); normals in camera axes, zero there, (H, W, 3).
    geometry: Callable[[Camera], tuple[Tensor, Tensor]]
    alpha: Callable[[Camera], Tensor]  # how much of what lies behind is hidden, (H, W) in [0, 1]
    mesh: TriangleMesh | None = None  # its triangles, to be shown as clay; None of Gaussians


def open_model(
    path: Path,
    white: bool,
    device: torch.device,
    notify: Notify,
    world_offset: np.ndarray | None = None,
) -> ShownModel:
    """Read a result to look at from the cameras of its capture.

    Args:
        path: The result; see :func:`read_in_scene` for it and the other arguments.
        white: Whether the background is white, else black.
        device: Where it is rendered.
    """
    result = read_in_scene(path, world_offset, notify)
    return model_of(path.name, result, white, device)


def read_in_scene(path: Path, world_offset: np.ndarray | None, notify: Notify) -> Result:
    """Read a result into the scene, by the placement of its record.

    Args:
        path: The result.
        world_offset: Of the scene: what is subtracted from coordinates of the original, (3,);
            None: the same as when the result was made.
        notify: Called with lines about what was changed or left out.

    Raises:
        UserError: The file cannot be shown.
    """
    result, placement = open_shown(path, notify)
    note_unknown(path, placement, notify)
    return moved_result(result, placement.to_scene(world_offset))


def moved_result(result: Result, matrix: np.ndarray) -> Result:
    """Return a result after a similarity, (4, 4); one that stays keeps all its bits."""
    if isinstance(result, GaussianCloud):
        return moved_cloud(result, matrix)
    if is_identity(matrix):
        return result
    if isinstance(result, TexturedMesh):
        vertices = moved_points(result.vertices.double().numpy(), matrix)
        return replace(result, vertices=torch.from_numpy(vertices).float())
    return replace(result, vertices=moved_points(result.vertices, matrix), normals=None)


def open_shown(path: Path, notify: Notify) -> tuple[Result, Placement]:
    """Read a result that has something to show, as ``open_result`` does.

    Raises:
        UserError: The file is missing, of another kind, or a mesh without triangles.
    """
    result, placement = open_result(path, notify)
    if isinstance(result, TriangleMesh) and not result.n_faces:
        raise UserError(f"{path}: has no triangles to show; make the mesh again")
    return result, placement


def model_of(name: str, result: Result, white: bool, device: torch.device) -> ShownModel:
    """Return a result as a model.

    Args:
        name: Of the model.
        result: In the world of the cameras.
        white: Whether the background is white, else black.
        device: Where it is rendered.
    """
    if isinstance(result, GaussianCloud):
        return _of_gaussians(name, result.to(device).activate(), white)
    if isinstance(result, TexturedMesh):
        mesh = result.to(device)
        background = plain_background(white, device)
        picture = partial(meshes.render_textured, mesh, background=background, supersampling=2)
        vertices = mesh.vertices
        faces = mesh.faces
        shape = shape_of(mesh)
    else:
        picture = partial(_colored_picture, result, device)
        shape = result
        vertices = torch.tensor(result.vertices, dtype=torch.float32, device=device)
        faces = torch.tensor(result.faces, device=device)
    geometry = partial(mesh_geometry, vertices, faces)

    def alpha(camera: Camera) -> Tensor:
        # A surface is opaque.
        depth, _ = geometry(camera)
        return depth.isfinite().float()

    return ShownModel(name, picture, geometry, alpha, shape)


def _of_gaussians(name: str, gaussians: Gaussians, white: bool) -> ShownModel:
    render = partial(render_view, gaussians, white=white)

    def geometry(camera: Camera) -> tuple[Tensor, Tensor]:
        output = render(camera, geometry=True)
        depth = view_pictures.surface_depth(output.depth, output.alpha)
        return depth, output.normal * depth.isfinite()[..., None]

    def picture(camera: Camera) -> Tensor:
        return render(camera, geometry=False).image

    def alpha(camera: Camera) -> Tensor:
        return render(camera, geometry=False).alpha

    return ShownModel(name, picture, geometry, alpha)


def _colored_picture(mesh: TriangleMesh, device: torch.device, camera: Camera) -> Tensor:
    """Picture a mesh with the colours of its vertices. (H, W, 3) in [0, 1]"""
    views = shaded_views(mesh, [camera], camera.longest_side, colored=True, device=device)
    return torch.from_numpy(views[0]).float() / 255


def mesh_geometry(vertices: Tensor, faces: Tensor, camera: Camera) -> tuple[Tensor, Tensor]:
    """Return depth, (H, W), and normals in camera axes, (H, W, 3), of the first surface.

    Without a surface depth is infinite and the normal 0; normals are turned to the camera.
    """
    hits = rasterize_triangles(vertices, faces, camera)
    rotation = torch.tensor(camera.rotation, dtype=torch.float32, device=vertices.device)
    normals = face_normals(vertices[faces]) @ rotation.T
    pixel_normals = torch.zeros(*hits.face.shape, 3, device=vertices.device)
    pixel_normals[hits.covered] = normals[hits.face[hits.covered].long()]
    rays = poses.pixel_rays(camera, dtype=pixel_normals.dtype, device=pixel_normals.device)
    is_away = (pixel_normals * rays).sum(dim=2, keepdim=True) > 0
    return hits.depth, torch.where(is_away, -pixel_normals, pixel_normals)


def shown(
    model: ShownModel,
    show: str,
    camera: Camera,
    depths: view_pictures.DepthRange | None = None,
) -> np.ndarray:
    """Picture a model. (H, W, 3) uint8

    Args:
        show: One of ``SHOWS``.
        depths: Depths of the first and the last colour; None: those of this picture.
    """
    if show == "image":
        return to_uint8(model.picture(camera)).cpu().numpy()
    if show == "clay":
        if model.mesh is None:
            raise ValueError("Gaussians have no triangles to show")
        return shaded_views(model.mesh, [camera], camera.longest_side)[0]
    if show == "alpha":
        return view_pictures.grey_picture(model.alpha(camera)).cpu().numpy()
    depth, normal = model.geometry(camera)
    if show == "depth":
        return view_pictures.depth_picture(depth, depths).cpu().numpy()
    return view_pictures.normal_picture(normal).cpu().numpy()


def depths_of_views(model: ShownModel, cameras: Sequence[Camera]) -> view_pictures.DepthRange:
    """Return the depths to colour in pictures of several cameras.

    See :func:`~gaussian_splatting.engine.reporting.view_pictures.depth_range`.
    """
    depths = [model.geometry(camera)[0].flatten() for camera in cameras]
    return view_pictures.depth_range(torch.cat(depths))
