# SPDX-License-Identifier: Apache-2.0
"""Results as something to look at: colours, depth, normals or clay from any camera, as files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import av
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gaussian_splatting.cloud import GaussianCloud, Gaussians
from gaussian_splatting.data.cameras import Camera, pixel_rays
from gaussian_splatting.engine.reporting.evaluation import to_uint8
from gaussian_splatting.engine.reporting.view_findings import (
    depth_picture,
    farthest,
    grey_picture,
    normal_picture,
)
from gaussian_splatting.rasterization import plain_background, render_view
from gaussian_splatting.rasterization.render import median_depth
from sugar_extractors.export.export_run import has_gaussians, read_any_gaussians
from sugar_extractors.export.mesh_formats import shape_of
from sugar_extractors.mesh_report import read_any_mesh, shaded_views
from sugar_extractors.texture.textured_mesh_io import (
    TexturedMesh,
    read_textured_mesh,
    render_textured,
)
from sugar_scene.mesh_bound import face_normals
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_scene.triangle_rasterizer import rasterize_triangles
from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path

Result = GaussianCloud | TexturedMesh | TriangleMesh  # files that can be shown

SHOWS = ("image", "depth", "median_depth", "normal", "clay", "alpha")
DEPTHS = ("depth", "median_depth")  # those that are drawn from black to white
_SEEN = 0.5


@dataclass(frozen=True)
class ShownModel:
    """A result that can be looked at: functions of a camera."""

    name: str
    picture: Callable[[Camera], Tensor]  # (H, W, 3) in [0, 1]
    # Depth, infinite where there is nothing, (H, W); normals in camera axes, zero there, (H, W, 3).
    geometry: Callable[[Camera], tuple[Tensor, Tensor]]
    median_depth: Callable[[Camera], Tensor]  # where half of the light is left, or infinite (H, W)
    alpha: Callable[[Camera], Tensor]  # how much of what lies behind is hidden, (H, W) in [0, 1]
    mesh: TriangleMesh | None = None  # its triangles, to be shown as clay; None of Gaussians


def open_model(
    path: Path, white: bool, device: torch.device, notify: Callable[[str], None]
) -> ShownModel:
    return model_of(path.name, read_result(path, notify), white, device)


def read_result(path: Path, notify: Callable[[str], None]) -> Result:
    """Read Gaussians as ``read_any_gaussians`` does, a mesh ``.ply``, or a textured ``.obj``."""
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; check the path of the result")
    suffix = path.suffix.lower()
    if suffix == ".obj":
        return read_textured_mesh(path)
    if has_gaussians(path):
        return read_any_gaussians(path, notify)
    if suffix == ".ply":
        mesh = read_any_mesh(path)
        if not mesh.n_faces:
            raise UserError(f"{path}: has no triangles to show; make the mesh again")
        return mesh
    raise UserError(
        f"{path}: cannot be shown; pass Gaussians (.ply, .spz, .splat, .pt, a folder), a mesh "
        ".ply, or a textured .obj"
    )


def model_of(name: str, result: Result, white: bool, device: torch.device) -> ShownModel:
    """A result as something to look at; arguments as for :func:`open_model`."""
    if isinstance(result, GaussianCloud):
        return _of_gaussians(name, result.to(device).activate(), white)
    if isinstance(result, TexturedMesh):
        mesh, background = result.to(device), plain_background(white, device)
        picture = partial(render_textured, mesh, background=background, supersampling=2)
        surface, shape = (mesh.vertices, mesh.faces), shape_of(mesh)
    else:
        picture, shape = partial(_own_colors, result, device), result
        vertices = torch.tensor(result.vertices, dtype=torch.float32, device=device)
        surface = vertices, torch.tensor(result.faces, device=device)
    geometry = partial(mesh_geometry, *surface)
    # No light goes through a surface: its median depth is its depth, and its alpha 1.
    return ShownModel(
        name,
        picture,
        geometry,
        lambda camera: geometry(camera)[0],
        lambda camera: geometry(camera)[0].isfinite().float(),
        shape,
    )


def _of_gaussians(name: str, gaussians: Gaussians, white: bool) -> ShownModel:
    render = partial(render_view, gaussians, white=white)

    def geometry(camera: Camera) -> tuple[Tensor, Tensor]:
        output = render(camera, geometry=True)
        seen = output.alpha >= _SEEN
        depth = torch.where(seen, output.depth / output.alpha.clamp_min(_SEEN), torch.inf)
        return depth, output.normal * seen[..., None]

    return ShownModel(
        name,
        lambda camera: render(camera, geometry=False).image,
        geometry,
        partial(median_depth, gaussians),
        lambda camera: render(camera, geometry=False).alpha,
    )


def _own_colors(mesh: TriangleMesh, device: torch.device, camera: Camera) -> Tensor:
    shown = shaded_views(mesh, [camera], _longer_side(camera), colored=True, device=device)
    return torch.from_numpy(shown[0]).float() / 255


def mesh_geometry(vertices: Tensor, faces: Tensor, camera: Camera) -> tuple[Tensor, Tensor]:
    """Depth, (H, W), and normals in camera axes, (H, W, 3), of the first surface of each pixel.

    Without a surface depth is infinite and the normal 0; normals are turned to the camera.
    """
    hits = rasterize_triangles(vertices, faces, camera)
    rotation = torch.tensor(camera.rotation, dtype=torch.float32, device=vertices.device)
    normals = face_normals(vertices[faces]) @ rotation.T
    seen = torch.zeros(*hits.face.shape, 3, device=vertices.device)
    seen[hits.covered] = normals[hits.face[hits.covered].long()]
    rays = pixel_rays(camera, dtype=seen.dtype, device=seen.device)
    return hits.depth, torch.where((seen * rays).sum(dim=2, keepdim=True) > 0, -seen, seen)


def require_showable(models: Sequence[ShownModel], shows: Sequence[str]) -> None:
    bare = [model.name for model in models if model.mesh is None]
    if "clay" in shows and bare:
        raise UserError(f"--show clay: {bare[0]} has no mesh; show image, depth or normal of it")


def shown(model: ShownModel, show: str, camera: Camera, far: float) -> np.ndarray:
    """A picture of a model. (H, W, 3) uint8"""
    if show == "image":
        return to_uint8(model.picture(camera)).cpu().numpy()
    if show == "clay":
        return shaded_views(model.mesh, [camera], _longer_side(camera))[0]
    if show == "alpha":
        return grey_picture(model.alpha(camera)).cpu().numpy()
    if show == "median_depth":
        return depth_picture(model.median_depth(camera), far).cpu().numpy()
    depth, normal = model.geometry(camera)
    picture = depth_picture(depth, far) if show == "depth" else normal_picture(normal)
    return picture.cpu().numpy()


def far_depth(model: ShownModel, cameras: Sequence[Camera]) -> float:
    """The depth to draw white in pictures of several cameras; see :func:`farthest`. World units"""
    depths = [model.geometry(camera)[0].flatten() for camera in cameras]
    return float(farthest(torch.cat(depths)))


def _longer_side(camera: Camera) -> int:
    return max(camera.width, camera.height)


VIDEO_SUFFIX = ".mp4"
_QUALITY = "18"  # constant rate factor of H.264: what the eye does not tell from the original
_BITS_PER_PIXEL = 4
_SIDES = (2, 16_384)  # least and most pixels a side that libx264 takes


def write_video(path: Path, pictures: Iterable[np.ndarray], frames_per_second: int) -> None:
    """Write an MP4, complete or not at all: H.264 where this build of PyAV has it.

    Args:
        pictures: (H, W, 3) uint8 each. The first one's size is that of the video, less a row or
            column where a side is odd; others are fitted into it.
    """
    try:
        _encode(path, pictures, frames_per_second)
    except av.FFmpegError as error:
        if isinstance(error, OSError):
            raise
        raise UserError(
            f"{path}: the codec failed ({error}); name a folder as --output for PNG files"
        ) from error


def _encode(path: Path, pictures: Iterable[np.ndarray], frames_per_second: int) -> None:
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    stream = None
    with atomic_path(path) as temporary, av.open(str(temporary), "w", format="mp4") as container:
        for picture in pictures:
            if stream is None:
                height, width = picture.shape[:2]
                if not _SIDES[0] <= min(height, width) <= max(height, width) <= _SIDES[1]:
                    raise UserError(
                        f"{path}: a video has {_SIDES[0]} to {_SIDES[1]:,} pixels a side, not "
                        f"{width:,} x {height:,}; show fewer results and maps side by side, set "
                        "the size by --resolution_factor, or name a folder as --output for PNG "
                        "files"
                    )
                stream = container.add_stream(codec, rate=frames_per_second)
                stream.height, stream.width = height // 2 * 2, width // 2 * 2
                stream.pix_fmt = "yuv420p"
                if codec == "libx264":
                    stream.options = {"crf": _QUALITY}
                else:
                    size = stream.width * stream.height
                    stream.bit_rate = _BITS_PER_PIXEL * size * frames_per_second
            frame = _fitted(picture, stream.width, stream.height)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        if stream is None:
            raise UserError(f"{path}: no pictures to make a video of")
        container.mux(stream.encode())


def _fitted(picture: np.ndarray, width: int, height: int) -> np.ndarray:
    """A picture cut by at most a pixel a side, or else made to fit and put on black."""
    excess = picture.shape[0] - height, picture.shape[1] - width
    if all(0 <= more <= 1 for more in excess):
        return np.ascontiguousarray(picture[:height, :width])
    image = Image.fromarray(picture)
    scale = min(width / image.width, height / image.height)
    small = image.resize([max(1, round(side * scale)) for side in image.size])
    paper = Image.new("RGB", (width, height))
    paper.paste(small, ((width - small.width) // 2, (height - small.height) // 2))
    return np.asarray(paper)


def write_pictures(folder: Path, names: Iterable[str], pictures: Iterable[np.ndarray]) -> None:
    """Write PNG files, each complete or not at all. pictures: (H, W, 3) uint8 each, as many"""
    for name, picture in zip(names, pictures, strict=True):
        file = name.replace("/", "_").replace("\\", "_")
        with atomic_path(folder / f"{file}.png") as temporary:
            Image.fromarray(picture).save(temporary, format="PNG")
