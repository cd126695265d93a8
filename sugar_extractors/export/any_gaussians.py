# SPDX-License-Identifier: Apache-2.0
"""Reading Gaussians from whatever holds some: results of any stage, files for other programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.data.ply import holds_gaussians, read_gaussian_ply
from gaussian_splatting.data.reference_layout import load_reference_checkpoint
from gaussian_splatting.engine.checkpoint import load_payload
from gaussian_splatting.engine.model import cloud_from_state
from gaussian_splatting.moved_cloud import moved_cloud
from sugar_extractors.export.compact_files import read_splat, read_spz
from sugar_extractors.export.gltf_gaussians import holds_gltf_gaussians, read_gltf_gaussians
from sugar_extractors.texture.textured_mesh_io import GLB_AXES
from sugar_scene.mesh_bound import BoundCloud
from sugar_scene.trainable_bound import FACES, bound_cloud_from_state
from sugar_trainers.capture import model_file
from sugar_utils.errors import UserError


def read_any_gaussians(path: Path, notify: Callable[[str], None]) -> GaussianCloud:
    """Read a cloud of Gaussians in a capture's axes: :func:`read_as_written`, turned if need be."""
    cloud = read_as_written(path, notify)
    return moved_cloud(cloud, GLB_AXES) if path.suffix.lower() in (".spz", ".glb") else cloud


def read_as_written(path: Path, notify: Callable[[str], None]) -> GaussianCloud:
    """Read a cloud of Gaussians in the axes of the file; those bound to a mesh become free ones.

    Args:
        path: A PLY of Gaussians; an SPZ or ``.splat`` file; a GLB with
            Gaussians; a ``.pt`` of any stage, or the folder of its run; or the folder of a vanilla
            checkpoint, whose last iteration is taken.
    """
    suffix = path.suffix.lower()
    if suffix == ".ply":
        return read_gaussian_ply(path, notify)
    if suffix == ".glb":
        return read_gltf_gaussians(path)
    if suffix in (".spz", ".splat"):
        if not path.is_file():
            raise UserError(f"{path}: no such file; check the path")
        return read_spz(path) if suffix == ".spz" else read_splat(path)
    if path.is_dir() and not any(p.stem.isdigit() for p in path.glob("*.pt")):
        return load_reference_checkpoint(path, None, notify).read_cloud(notify)
    state, file = _state_of(path)
    try:
        bound = FACES in state
        return bound_cloud_from_state(state).freed() if bound else cloud_from_state(state)
    except UserError as error:
        raise UserError(f"{file}: {error}") from error


def has_gaussians(path: Path) -> bool:
    """Whether a file or folder holds Gaussians, as opposed to a mesh or another thing."""
    suffix = path.suffix.lower()
    if suffix == ".ply":
        return holds_gaussians(path)
    known = suffix in (".spz", ".splat", ".pt") or path.is_dir()
    return known or holds_gltf_gaussians(path)


def read_bound_gaussians(path: Path) -> BoundCloud:
    """Read mesh and bound Gaussians of a refined model.

    Args:
        path: Its ``.pt``, or the folder of its run.
    """
    if path.is_file() and path.suffix.lower() != ".pt":
        raise UserError(
            f"{path}: does not say which triangle carries which Gaussian; pass the .pt of the "
            "refinement, or the folder of its run"
        )
    state, file = _state_of(path)
    try:
        return bound_cloud_from_state(state)
    except UserError as error:
        raise UserError(f"{file}: {error}") from error


def _state_of(path: Path) -> tuple[dict, Path]:
    file = model_file(path, "the path")
    state = load_payload(file).get("state_dict")
    if not isinstance(state, dict):
        raise UserError(f"{file}: lacks state_dict: not a checkpoint of any stage")
    return state, file
