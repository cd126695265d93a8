# SPDX-License-Identifier: Apache-2.0
"""Results as layers of the page."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import torch

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.moved import GLB_AXES, moved_points
from gaussian_splatting.formats.placement import Placement
from sugar_extractors.export.gltf_gaussians import holds_gltf_gaussians
from sugar_extractors.export.reading import Result
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh
from sugar_utils.errors import Notify, UserError
from sugar_viewer.result_search import FoundResult
from sugar_viewer.shown_models import model_of, open_shown
from sugar_viewer.tool_panels import inside
from sugar_viewer.view_page import GlbFile, Layer


def read_layer(
    found_result: FoundResult, white: bool, device: torch.device, upright: bool, notify: Notify
) -> Layer:
    """Read a result as a layer.

    Args:
        white: Whether the background is white, else black.
        upright: Whether y is up in the world of the page; else it has the axes of a capture.

    Raises:
        UserError: The file is damaged, or of another kind.
    """
    title = found_result.title
    path = found_result.path
    if path.suffix.lower() != ".glb" or holds_gltf_gaussians(path):
        result, _ = open_shown(path, notify)
        return layer_of(title, result, white, device)
    content = path.read_bytes()
    if not content.startswith(b"glTF"):
        raise UserError(f"{path}: is no GLB file; write it again, or pass the .obj")
    if Placement.of(path).offset.any():
        raise UserError(f"{path}: has coordinates of a map; pass the file that it was made of")
    turn = np.eye(4) if upright else GLB_AXES
    points = moved_points(glb_points(content), turn)

    def uncut(low: np.ndarray, high: np.ndarray) -> Layer:
        return layer

    # The browser alone can draw it, and no box cuts it.
    layer = Layer(title, GlbFile(content, upright), model=None, points=points, cut=uncut)
    return layer


def glb_points(content: bytes) -> np.ndarray:
    """Return the vertices of a GLB, in its axes. (P, 3)

    There are none if the file is damaged.
    """
    # It comes with viser; another place reports that it is missing.
    import trimesh

    try:
        scene = trimesh.load_scene(io.BytesIO(content), file_type="glb", process=False)
        return np.asarray(scene.to_mesh().vertices, dtype=np.float64).reshape(-1, 3)
    # The browser says what is wrong with the file; without its places it is looked at from afar.
    except Exception:
        return np.zeros((0, 3))


def layer_of(title: str, result: Result, white: bool, device: torch.device) -> Layer:
    """Return a layer of Gaussians or of a mesh; see :func:`read_layer`."""

    def cut(one: np.ndarray, other: np.ndarray) -> Layer | None:
        part = cut_result(result, one, other)
        return None if part is None else layer_of(title, part, white, device)

    model = model_of(title, result, white, device)
    return Layer(title, result, model, places_of(result), cut)


def places_of(result: Result) -> np.ndarray:
    """Return the centres of the Gaussians of a result, or its vertices. (P, 3) float64"""
    if isinstance(result, GaussianCloud):
        return result.means.double().cpu().numpy()
    if isinstance(result, TexturedMesh):
        return result.vertices.double().cpu().numpy()
    return result.vertices


def cut_result(result: Result, one: np.ndarray, other: np.ndarray) -> Result | None:
    """Return the part of a result in a box between two corners; None for nothing.

    It has the Gaussians with their centres inside, or the faces with all corners inside.
    """
    is_inside = inside(places_of(result), one, other)
    if isinstance(result, GaussianCloud):
        return result.select(torch.from_numpy(is_inside)) if is_inside.any() else None
    rows = np.all(is_inside[np.asarray(result.faces)], axis=1)
    if not rows.any():
        return None
    if isinstance(result, TexturedMesh):
        return replace(result, faces=result.faces[rows], uvs=result.uvs[rows])
    return replace(result, faces=result.faces[rows])
