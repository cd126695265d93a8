# SPDX-License-Identifier: Apache-2.0
"""Read Gaussians of any stage and of any format of the table in ``formats.py``."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.data.ply import holds_gaussians
from gaussian_splatting.data.reference_layout import load_reference_checkpoint
from gaussian_splatting.engine.model import cloud_from_state
from gaussian_splatting.formats.file_kinds import refuse_other_kinds
from gaussian_splatting.formats.moved import GLB_AXES, moved_cloud
from sugar_extractors.export.format_types import Axes, GaussianFormat
from sugar_extractors.export.formats import GAUSSIAN_FORMATS
from sugar_extractors.export.gltf_gaussians import holds_gltf_gaussians
from sugar_extractors.results import read_state
from sugar_scene import bound_model
from sugar_scene.mesh_bound import BoundCloud
from sugar_trainers.capture import model_file
from sugar_utils.errors import Notify, UserError

_FORMAT_BY_SUFFIX: dict[str, GaussianFormat] = {
    suffix: entry for entry in GAUSSIAN_FORMATS for suffix in entry.read_suffixes
}


def read_any_gaussians(path: Path, notify: Notify) -> GaussianCloud:
    """Read a cloud of Gaussians in a capture's axes; see :func:`read_as_written` for the files."""
    cloud = read_as_written(path, notify)
    file_format = _FORMAT_BY_SUFFIX.get(path.suffix.lower())
    if file_format is not None and file_format.axes is Axes.Y_UP:
        return moved_cloud(cloud, GLB_AXES)
    return cloud


def read_as_written(path: Path, notify: Notify) -> GaussianCloud:
    """Read a cloud of Gaussians in the axes of the file; those bound to a mesh become free ones.

    Args:
        path: A PLY, SPZ, SOG, ``.splat``, GLB or USD of Gaussians; a ``.pt`` of any stage, or the
            folder of its run; or the folder of a vanilla checkpoint, whose last iteration is taken.
    """
    refuse_other_kinds(path)
    file_format = _FORMAT_BY_SUFFIX.get(path.suffix.lower())
    if file_format is not None and file_format.reader is not None:
        return file_format.reader(path, notify)
    if path.is_dir() and not any(file.stem.isdigit() for file in path.glob("*.pt")):
        return load_reference_checkpoint(path, None, notify).read_cloud(notify)
    return read_state(model_file(path, "the path"), _cloud_of_any_stage)


def _cloud_of_any_stage(state: dict[str, Tensor]) -> GaussianCloud:
    if bound_model.FACES in state:
        return bound_model.bound_cloud_from_state(state).to_gaussians()
    return cloud_from_state(state)


def has_gaussians(path: Path) -> bool:
    """Return whether a file or folder holds Gaussians, as opposed to a mesh or another thing.

    Raises:
        UserError: It is packed, misnamed, or of a format of Gaussians that is not read.
    """
    suffix = path.suffix.lower()
    refuse_other_kinds(path)
    if suffix == ".ply":
        return holds_gaussians(path)
    if path.is_dir() or suffix == ".pt":
        return True
    if suffix == ".glb":
        return holds_gltf_gaussians(path)
    return suffix in _FORMAT_BY_SUFFIX


def read_bound_gaussians(path: Path) -> BoundCloud:
    """Read the Gaussians on the mesh of a refined model.

    Args:
        path: The ``.pt`` of a refinement, or the folder of its run.

    Raises:
        UserError: It is another kind of file.
    """
    if path.is_file() and path.suffix.lower() != ".pt":
        raise UserError(
            f"{path}: does not say which triangle carries which Gaussian; pass the .pt of the "
            "refinement, or the folder of its run"
        )
    return read_state(model_file(path, "the path"), bound_model.bound_cloud_from_state)
