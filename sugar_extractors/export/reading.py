# SPDX-License-Identifier: Apache-2.0
"""Read results, which are Gaussians of any stage and format or meshes, with where they stand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import Tensor

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.moved import moved_cloud
from gaussian_splatting.engine.model import cloud_from_state
from gaussian_splatting.formats.file_kinds import refuse_other_kinds
from gaussian_splatting.formats.placement import Placement, note_unknown
from gaussian_splatting.formats.ply import holds_gaussians
from gaussian_splatting.formats.readers import near_cloud, read_gaussians
from gaussian_splatting.scenes.reference_layout import load_reference_checkpoint
from sugar_extractors.any_mesh import read_any_mesh
from sugar_extractors.export.format_kinds import GaussianFormat
from sugar_extractors.export.formats import GAUSSIAN_FORMATS
from sugar_extractors.export.gltf_gaussians import holds_gltf_gaussians
from sugar_extractors.results import read_state
from sugar_scene import bound_model
from sugar_scene.mesh_bound import BoundCloud
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh, read_textured_mesh
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_trainers.capture import model_file
from sugar_utils.errors import Notify, UserError

Result = GaussianCloud | TexturedMesh | TriangleMesh

_FORMAT_BY_SUFFIX: dict[str, GaussianFormat] = {
    suffix: entry for entry in GAUSSIAN_FORMATS for suffix in entry.read_suffixes
}


def open_gaussians(path: Path, notify: Notify) -> tuple[GaussianCloud, Placement]:
    """Read a cloud of Gaussians, and from the scene to where it stands.

    Coordinates are near, see :class:`Placement`, and those of files with y up that were not turned
    upright are in a capture's axes. See :func:`read_as_written` for the files.
    """
    placement = Placement.of(path)
    cloud = read_as_written(path, notify, placement.offset)
    turn = placement.to_own_axes(path)
    if turn is None:
        return cloud, placement
    return moved_cloud(cloud, turn), placement.moved(turn)


def read_gaussians_in_scene(
    path: Path, notify: Notify, world_offset: np.ndarray | None = None
) -> GaussianCloud:
    """Read Gaussians of any stage and format into the scene, as ``read_gaussians`` does.

    Args:
        path: See :func:`read_as_written`.
        notify: Called with lines about what is changed or left out.
        world_offset: Of the scene, (3,); None: the one that the file was made with.
    """
    note_unknown(path, Placement.of(path), notify)
    return read_gaussians(path, notify, world_offset, read_as_written)


def open_result(path: Path, notify: Notify) -> tuple[Result, Placement]:
    """Read any result, with where it stands; see :func:`open_gaussians`.

    Args:
        path: Gaussians, see :func:`read_as_written`; a mesh PLY; or a textured OBJ.
        notify: Called with lines about what is changed or left out.

    Raises:
        UserError: The file is missing, or of another kind.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; check the path of the result")
    suffix = path.suffix.lower()
    if suffix == ".obj":
        return open_textured_mesh(path, notify)
    if has_gaussians(path):
        return open_gaussians(path, notify)
    if suffix == ".ply":
        placement = Placement.of(path)
        return read_any_mesh(path, notify, placement.offset), placement
    raise UserError(
        f"{path}: neither Gaussians nor a mesh; pass Gaussians (.ply, .spz, .splat, .pt, a "
        "folder), a mesh .ply, or a textured .obj"
    )


def open_textured_mesh(path: Path, notify: Notify) -> tuple[TexturedMesh, Placement]:
    """Read a textured OBJ, and from the scene to where it stands; see :func:`open_gaussians`."""
    placement = Placement.of(path)
    return read_textured_mesh(path, notify, placement.offset), placement


def read_as_written(path: Path, notify: Notify, offset: np.ndarray | None = None) -> GaussianCloud:
    """Read a cloud of Gaussians in the axes of the file; those bound to a mesh become free ones.

    Args:
        path: A PLY, SPZ, SOG, ``.splat``, GLB or USD of Gaussians; a ``.pt`` of any stage, or the
            folder of its run; or the folder of a vanilla checkpoint, whose last iteration is taken.
        notify: Called with lines about what is changed or left out.
        offset: That is subtracted from coordinates far from the origin, in float64. (3,)
    """
    refuse_other_kinds(path)
    file_format = _FORMAT_BY_SUFFIX.get(path.suffix.lower())
    if file_format is not None:
        return near_cloud(file_format.reader, path, notify, offset)
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
