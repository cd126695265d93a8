# SPDX-License-Identifier: Apache-2.0
"""Results and captures as things that the browser draws by itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.rasterization.spherical_harmonics import sh_to_rgb
from gaussian_splatting.viewing.page_server import add_frustum
from sugar_extractors.quality.turning_preview import jpeg_bytes
from sugar_extractors.texture.textured_mesh_io import TexturedMesh, glb_chunks
from sugar_pipeline.filming.shown_models import Result
from sugar_scene.geometry import covariances
from sugar_scene.mesh.triangle_mesh import TriangleMesh

if TYPE_CHECKING:
    import viser

_LARGEST_TEXTURE = 8_192
_POINT_SHARE = 0.002
_FRUSTUM_SHARE = 0.03
_TYPICAL_SIZE = 0.05
"""Standard deviation that the middle one of a cloud's Gaussians is sent with."""

GLB_TURN = (0.0, 1.0, 0.0, 0.0)
"""From glTF's axes back to those of a capture, as a quaternion."""


_NO_SHADOW = {"cast_shadow": False, "receive_shadow": False}


def add_result(server: viser.ViserServer, name: str, result: Result | bytes) -> Any:
    """Put a result into the scene.

    Args:
        server: The page.
        name: Its path in the scene tree.
        result: Gaussians, a mesh, or the content of a GLB file.

    Returns:
        Its node.
    """
    if isinstance(result, bytes):
        return server.scene.add_glb(name, result, wxyz=GLB_TURN, **_NO_SHADOW)
    if isinstance(result, GaussianCloud):
        return _add_gaussians(server, name, result)
    if isinstance(result, TexturedMesh):
        return server.scene.add_glb(name, textured_glb(result), **_NO_SHADOW)
    return _add_mesh(server, name, result)


def _add_gaussians(server: viser.ViserServer, name: str, cloud: GaussianCloud) -> Any:
    values = splat_values(cloud)
    scale = values.pop("scale")
    return server.scene.add_gaussian_splats(name, scale=float(scale), **values)


def splat_values(cloud: GaussianCloud) -> dict[str, np.ndarray]:
    """A cloud as the browser draws it: without view-dependent colour.

    Covariances travel in half precision, which knows neither very small nor very large numbers. So
    they are sent in units in which typical Gaussians are of a middle size.

    Returns:
        ``centers`` (N, 3), ``covariances`` (N, 3, 3), ``rgbs`` (N, 3) and ``opacities`` (N, 1) in
        [0, 1], and ``scale``, which all sizes have to be multiplied with.
    """
    gaussians = cloud.activate()
    middle = float(gaussians.scales.max(dim=1).values.median()) if len(cloud) else 1.0
    scale = max(middle, 1e-12) / _TYPICAL_SIZE
    colors = sh_to_rgb(gaussians.sh_dc[:, 0]).clamp(0, 1)
    return {
        "centers": (gaussians.means / scale).numpy(),
        "covariances": covariances(gaussians.quats, gaussians.scales / scale).numpy(),
        "rgbs": colors.numpy(),
        "opacities": gaussians.opacities[:, None].numpy(),
        "scale": np.float64(scale),
    }


def textured_glb(mesh: TexturedMesh) -> bytes:
    """A textured mesh as one GLB file in the axes of the capture."""
    side = max(mesh.texture.shape[:2])
    # What browsers take at most; the file on the disk keeps all of it.
    stride = -(-side // _LARGEST_TEXTURE)
    picture = jpeg_bytes(mesh.texture[::stride, ::stride])
    return b"".join(glb_chunks(mesh, picture, Path("mesh"), y_up=True))


def _add_mesh(server: viser.ViserServer, name: str, mesh: TriangleMesh) -> Any:
    # It comes with viser, whose absence is told elsewhere.
    import trimesh

    shape = trimesh.Trimesh(
        mesh.vertices, mesh.faces, vertex_colors=mesh.colors, process=False, validate=False
    )
    return server.scene.add_mesh_trimesh(name, shape, **_NO_SHADOW)


def add_points(
    server: viser.ViserServer, name: str, points: np.ndarray, colors: np.ndarray, extent: float
) -> Any:
    """The points of a reconstruction. points: (P, 3); colors: (P, 3) uint8"""
    return server.scene.add_point_cloud(
        name, points, colors, point_size=_POINT_SHARE * extent, point_shape="circle",
        precision="float32", point_shading="flat",
    )  # fmt: skip


def add_cameras(
    server: viser.ViserServer, name: str, cameras: Sequence[Camera], extent: float
) -> list[Any]:
    """The cameras of a capture as pyramids, still without their photographs."""
    size = _FRUSTUM_SHARE * extent
    return [
        add_frustum(server, f"{name}/{number}", camera, size)
        for number, camera in enumerate(cameras)
    ]
